"""Keys and values of the rows being decoded: preallocated, written in place."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

# By layer: keys and values, each (rows, heads, tokens, width).
KeysAndValues = list[tuple[torch.Tensor, torch.Tensor]]


class SeatCache:
    """A fixed number of seats, each with room for one row's keys and values.

    Handed to a transformers model as `past_key_values`. It works in one of two modes: while
    prompts are read (`collect`), what attention computes is kept aside, behind the keys of a
    beginning that all prompts share; while rows are decoded (`place`), each row's new key is
    written at its own position, so rows of different length need no common padding.
    """

    is_compileable = False
    is_sliding = (False,)

    def __init__(
        self, config: PretrainedConfig, seats: int, length: int, dtype: torch.dtype, device: str
    ) -> None:
        heads = config.num_key_value_heads
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        shape = (config.num_hidden_layers, seats, heads, length, width)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._collected: KeysAndValues | None = None
        self._prefix: KeysAndValues = []

    def collect(self, prefix: KeysAndValues) -> None:
        """The next forward pass reads prompts that go on after `prefix` ([] for none)."""
        self._collected, self._prefix = [], prefix

    def collected(self) -> KeysAndValues:
        """Keys and values by layer of what that pass read, the prefix in front."""
        collected, self._collected = self._collected, None
        return collected

    def place(self, positions: torch.Tensor) -> None:
        """The next forward pass decodes one token for seats 0…N-1, at these positions (N,)."""
        self._positions = positions
        self._rows = torch.arange(len(positions), device=positions.device)
        self._longest = int(positions.max()) + 1

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model's attention: keys and values (N, heads, tokens, width)."""
        if self._collected is not None:
            if self._prefix:
                before = (part.expand(len(keys), -1, -1, -1) for part in self._prefix[layer])
                keys, values = (
                    torch.cat(parts, 2) for parts in zip(before, (keys, values), strict=True)
                )
            self._collected.append((keys, values))
            return keys, values
        self.keys[layer][self._rows, :, self._positions] = keys[:, :, 0]
        self.values[layer][self._rows, :, self._positions] = values[:, :, 0]
        rows = len(self._rows)
        return (
            self.keys[layer][:rows, :, : self._longest],
            self.values[layer][:rows, :, : self._longest],
        )

    def fill(self, seat: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put a prompt's keys and values (layers, heads, tokens, width) at a seat's start."""
        self.keys[:, seat, :, : keys.shape[2]] = keys
        self.values[:, seat, :, : values.shape[2]] = values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row to another seat, so that the occupied seats stay a block."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def get_seq_length(self, layer: int = 0) -> int:
        """Asked by the model when it is given no positions; it always is."""
        return 0
