"""The KV cache of prefixes, prompts and completions.

Each row of the batch attends to three segments: the prefix that all prompts share (the system
prompt), the rest of the row's own prompt, and the row's own completion. The prefix is stored once
for all prompts. A prompt is stored once for its n completions. Keys are stored as (D, T) and values
as (T, D), the layouts that the matmuls read: oneDNN would copy a transposed view in every matmul.

Shape letters: L layers, H key-value heads, D head width, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from rlm.cli import UsageError
from rlm.ops import AttentionFunction, Ops, head_dim, num_key_value_heads


@dataclass(frozen=True)
class CacheConfig:
    """The size of a cache, which is fixed at allocation, so a batch cannot run out of cache."""

    max_num_seqs: int  # maximum number of sequences that are decoded at the same time
    prompt_slots: int  # maximum number of prompts that are cached at the same time
    prompt_tokens: int  # maximum length of a prompt, without the shared prefix
    new_tokens: int  # maximum length of a completion
    prefix_tokens: int = 0  # length of the shared prefix

    @property
    def tokens(self) -> int:
        """The capacity of the cache in tokens."""
        return (
            self.prefix_tokens
            + self.prompt_slots * self.prompt_tokens
            + self.max_num_seqs * self.new_tokens
        )

    def fit(self, bytes_per_token: int, memory: int) -> CacheConfig:
        """Halve the numbers of sequences and prompts until the cache fits in `memory` bytes.

        Raises:
            UsageError: not even one sequence and one prompt fit.
        """
        config = self
        while config.tokens * bytes_per_token > memory:
            if config.max_num_seqs == config.prompt_slots == 1:
                needed, free = config.tokens * bytes_per_token / 2**30, memory / 2**30
                raise UsageError(
                    f"the KV cache of one completion needs {needed:.1f} GB, but it may use only "
                    f"{free:.1f} GB: lower --max-new-tokens"
                )
            halved = (max(1, config.max_num_seqs // 2), max(1, config.prompt_slots // 2))
            config = replace(config, max_num_seqs=halved[0], prompt_slots=halved[1])
        return config


def token_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the size of one token in the KV cache, in bytes."""
    heads = config.num_hidden_layers * num_key_value_heads(config)
    return 2 * heads * head_dim(config) * dtype.itemsize


class KVCache:
    """Preallocated storage for keys and values. `Ops` computes the attention over this storage."""

    def __init__(
        self,
        config: PretrainedConfig,
        cache_config: CacheConfig,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
    ) -> None:
        """
        Args:
            ops: the `Ops` for this config and dtype.
        """
        self.config, self._ops = cache_config, ops
        layers, heads = config.num_hidden_layers, num_key_value_heads(config)
        width = head_dim(config)

        def store(slots: int, tokens: int) -> tuple[Tensor, Tensor]:
            """Allocate keys (L, slots, H, D, T) and values (L, slots, H, T, D)."""
            shape = layers, slots, heads
            return (
                ops.new_store((*shape, width, tokens), dtype=dtype, device=device),
                ops.new_store((*shape, tokens, width), dtype=dtype, device=device),
            )

        self._prefix = store(1, cache_config.prefix_tokens)
        self._prompts = store(cache_config.prompt_slots, cache_config.prompt_tokens)
        self._own = store(cache_config.max_num_seqs, cache_config.new_tokens)

    def prefill_prefix(self) -> AttentionFunction:
        """Build the attention function that prefills the shared prefix as a single row."""
        stores = self._prefix, self._prefix
        return self._ops.prefill_attention(stores, [0], self.config.prefix_tokens, prefix=0)

    def prefill_prompts(self, slots: Sequence[int], tokens: int, prefix: int) -> AttentionFunction:
        """Build the attention function that prefills right-padded prompts into cache slots.

        Args:
            slots: the cache slot of each prompt.
            tokens: the padded length of the prompts; their shape is (len(slots), tokens).
            prefix: the length of the shared prefix before the prompts (0 if there is none).
        """
        stores = self._prefix, self._prompts
        return self._ops.prefill_attention(stores, slots, tokens, prefix)

    def decode(
        self,
        slots: Sequence[int],
        prefix_lengths: Sequence[int],
        prompt_lengths: Sequence[int],
        own_lengths: Sequence[int],
    ) -> AttentionFunction:
        """Build the attention function that decodes one token for each of the rows 0 to N-1.

        Args:
            slots: the prompt slot of each row.
            prefix_lengths, prompt_lengths: the cached length of each row's prefix and prompt.
            own_lengths: the number of tokens that are cached for each row's completion.
        """
        # The new token is stored before the cache is read.
        lengths = (prefix_lengths, prompt_lengths, [own + 1 for own in own_lengths])
        where = ([0] * len(slots), slots, range(len(slots)))
        return self._ops.decode_attention((self._prefix, self._prompts, self._own), where, lengths)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the cache of a completion to another row, so that running rows stay contiguous."""
        keys, values = self._own
        keys[:, target, ..., :length] = keys[:, source, ..., :length]
        values[:, target, :, :length] = values[:, source, :, :length]
