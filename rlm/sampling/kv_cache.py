"""Stores keys and values of prefixes, prompts and completions, and attends over them.

A row attends to three segments: the prefix that all prompts share (the system prompt), the rest of
its own prompt, shared by the prompt's n completions, and its own completion. The first two are
stored once; torch multiplies them with the queries of all their rows in one product, and
decode.c, where it could be compiled, reads all three where they lie. Keys are
stored (D, T) and values (T, D), as the products read them: oneDNN would copy a transposed view of
part of their T in every product.

Letters: N rows, P prompt slots, R rows of a prompt, H key-value heads, Q queries per such head,
D head width, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from rlm.cli import UsageError
from rlm.model import head_dim, num_key_value_heads
from rlm.ops import Kernels

# attend(layer, queries (B, heads, T, D), keys, values (B, H, T, D), scale) → (B, heads, T, D)
AttentionFunction = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class CacheConfig:
    """The size of a cache. It is fixed at allocation, so a batch cannot run out of it."""

    max_num_seqs: int  # sequences decoded at once
    prompt_slots: int  # prompts held at once
    prompt_tokens: int  # length of a prompt, without the shared prefix
    new_tokens: int  # length of a completion
    prefix_tokens: int = 0  # length of the shared prefix

    @property
    def tokens(self) -> int:
        """The number of tokens for which keys and values are stored."""
        return (
            self.prefix_tokens
            + self.prompt_slots * self.prompt_tokens
            + self.max_num_seqs * self.new_tokens
        )

    def fit(self, bytes_per_token: int, memory: int) -> CacheConfig:
        """Shrink the config to as many rows and slots as fit in so many bytes.

        Raises:
            UsageError: not even one of each fits.
        """
        config = self
        while config.tokens * bytes_per_token > memory:
            if config.max_num_seqs == config.prompt_slots == 1:
                needed, free = config.tokens * bytes_per_token / 2**30, memory / 2**30
                raise UsageError(
                    f"keys and values of one completion need {needed:.1f} GB, and {free:.1f} GB "
                    "are free: lower --max-new-tokens"
                )
            halved = (max(1, config.max_num_seqs // 2), max(1, config.prompt_slots // 2))
            config = replace(config, max_num_seqs=halved[0], prompt_slots=halved[1])
        return config


def token_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes."""
    heads = config.num_hidden_layers * num_key_value_heads(config)
    return 2 * heads * head_dim(config) * dtype.itemsize


def round_up(length: int, multiple: int, at_most: int) -> int:
    """Round a length up to a multiple, but not beyond `at_most`.

    This keeps the number of shapes small: oneDNN keeps its code for each, about a
    megabyte, up to a thousand of them.
    """
    return min(-(-length // multiple) * multiple, at_most)


class KVCache:
    """Preallocated storage, and the attention over it."""

    def __init__(
        self,
        config: PretrainedConfig,
        cache_config: CacheConfig,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> None:
        """
        Args:
            kernels: compiled code for this config and number type; None uses torch's products.
        """
        self.config, self._kernels = cache_config, kernels
        layers, heads = config.num_hidden_layers, num_key_value_heads(config)
        width = head_dim(config)

        def store(tokens: int, *shape: int) -> tuple[Tensor, Tensor]:
            """Keys (L, …, H, D, T) and values (L, …, H, T, D)."""
            shape = (layers, *shape, heads)
            # Zeros, because products also read masked entries, and 0 · NaN would be NaN.
            made = torch.empty if kernels else torch.zeros
            return (
                made(*shape, width, tokens, dtype=dtype, device=device),
                made(*shape, tokens, width, dtype=dtype, device=device),
            )

        self._prefix = store(cache_config.prefix_tokens)
        self._prompts = store(cache_config.prompt_tokens, cache_config.prompt_slots)
        self._own = store(cache_config.new_tokens, cache_config.max_num_seqs)
        self._device, self._heads = device, heads

    def prefill_prefix(self) -> AttentionFunction:
        """Make the attention of the pass that prefills the shared prefix, one row."""
        if self._kernels:
            store = [part[:, None] for part in self._prefix]
            return self._prefill_compiled(store, [0], self.config.prefix_tokens, prefix=0)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            keys, values = self._prefix
            keys[layer, :, :, : k.shape[2]] = k[0].mT
            values[layer, :, : k.shape[2]] = v[0]
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )

        return attend

    def prefill_prompts(self, slots: Sequence[int], tokens: int, prefix: int) -> AttentionFunction:
        """Make the attention that prefills prompts into slots: (len(slots), tokens), right-padded.

        Args:
            prefix: tokens of the shared prefix that stand before them (0 for none).
        """
        if self._kernels:
            return self._prefill_compiled(self._prompts, slots, tokens, prefix)
        where = torch.tensor(slots, device=self._device)
        shape = (tokens, prefix + tokens)
        seen = torch.ones(shape, dtype=torch.bool, device=self._device).tril(prefix)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            keys, values = self._prompts
            keys[layer][where, :, :, :tokens] = k.mT
            values[layer][where, :, :tokens] = v
            before = self._prefix[0][layer, :, :, :prefix].mT, self._prefix[1][layer, :, :prefix]
            parts = [
                torch.cat((old.expand(len(new), -1, -1, -1), new), 2)
                for old, new in zip(before, (k, v), strict=True)
            ]
            shares = q.shape[1] // k.shape[1]
            if q.is_cuda and shares > 1:  # no fused kernel there takes a mask and grouped heads
                parts, shares = [part.repeat_interleave(shares, 1) for part in parts], 1
            return F.scaled_dot_product_attention(
                q, *parts, attn_mask=seen, scale=scale, enable_gqa=shares > 1
            )

        return attend

    def _prefill_compiled(
        self, store: Sequence[Tensor], slots: Sequence[int], tokens: int, prefix: int
    ) -> AttentionFunction:
        """Prefill into slots of a store with the decoding kernel: each token of a prompt is a row.

        So a token's attention is one sum in one order, wherever its prompt was cut and whatever was
        read beside it.
        """
        where, rows = torch.tensor(slots), len(slots) * tokens
        read = self._kernels.decode_attention(
            ([part[:, None] for part in self._prefix], self._prompts, store),
            ([0] * rows, [0] * rows, [slot for slot in slots for _ in range(tokens)]),
            ([prefix] * rows, [0] * rows, [*range(1, tokens + 1)] * len(slots)),
        )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            keys, values = store
            keys[layer][where, :, :, :tokens] = k.mT
            values[layer][where, :, :tokens] = v
            queries = q.transpose(1, 2).flatten(0, 1)[:, :, None]  # (B·T, heads, 1, D)
            out = read(layer, queries, None, None, scale)
            return out.view(len(slots), tokens, *out.shape[1:2], -1).transpose(1, 2)

        return attend

    def decode(
        self,
        slots: Sequence[int],
        prefix_lengths: Sequence[int],
        prompt_lengths: Sequence[int],
        own_lengths: Sequence[int],
    ) -> AttentionFunction:
        """Make the attention that decodes one token for each of the rows 0…N-1.

        Args:
            slots: where the prompt of each row stands.
            own_lengths: tokens of each row's completion before this one.
        """
        # This counts the new token, which is stored before anything is read.
        lengths = (prefix_lengths, prompt_lengths, [own + 1 for own in own_lengths])
        if self._kernels:
            stores = ([part[:, None] for part in self._prefix], self._prompts, self._own)
            where = ([0] * len(slots), slots, range(len(slots)))
            return self._kernels.decode_attention(stores, where, lengths)
        return self._decode_in_torch(slots, lengths)

    def _decode_in_torch(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> AttentionFunction:
        """Do `decode` in torch, given how many tokens each row reads of each segment."""
        limits = (self.config.prefix_tokens, self.config.prompt_tokens, self.config.new_tokens)
        sizes = [round_up(max(part), 64, most) for part, most in zip(tokens, limits, strict=True)]
        lengths = [torch.tensor(part, device=self._device) for part in tokens]
        mask = self._mask(lengths, sizes)
        rows, own = torch.arange(len(slots), device=self._device), lengths[2] - 1
        # How queries (N·H, Q, D) and weights (N·H, Q, T) are multiplied with each segment.
        products = [self._shared_product(where) for where in ([0] * len(slots), slots)]
        products.append(torch.bmm)
        stores = (
            self._prefix,
            [part[:, : max(slots) + 1].flatten(1, 2) for part in self._prompts],
            [part[:, : len(slots)].flatten(1, 2) for part in self._own],
        )
        # Of all layers at once, because a thousand views a step take as long as some products:
        # of each layer (H, D, T), (P·H, D, T) or (N·H, D, T), and values (…, T, D).
        segments = [
            (product, keys[..., :size].unbind(), values[..., :size, :].unbind())
            for product, (keys, values), size in zip(products, stores, sizes, strict=True)
            if size
        ]
        sizes = [size for size in sizes if size]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            keys, values = self._own
            keys[layer][rows, :, :, own] = k[:, :, 0]
            values[layer][rows, :, own] = v[:, :, 0]
            (n, heads, width), shared = q[:, :, 0].shape, k.shape[1]
            # Queries that share a key-value head become rows of one matrix.
            q = (q[:, :, 0] * scale).view(n * shared, heads // shared, width)  # (N·H, Q, D)
            scores = torch.cat([product(q, keys[layer]) for product, keys, _ in segments], -1)
            # (N·H, Q, T). A softmax of 16-bit numbers is computed in fp32, and rounded in the end.
            weights = (scores.unflatten(0, (n, shared)) + mask).softmax(-1).flatten(0, 1)
            parts = zip(segments, weights.split(sizes, -1), strict=True)
            out = [product(part, values[layer]) for (product, _, values), part in parts]
            return sum(out[1:], start=out[0]).view(n, heads, 1, width)

        return attend

    def _shared_product(self, slots: Sequence[int]) -> Callable[[Tensor, Tensor], Tensor]:
        """Make (N·H, Q, A) times (P·H, A, B) → (N·H, Q, B): one product per slot and head."""
        grid, place = (part.to(self._device) for part in _grid(slots, self._heads))

        def product(left: Tensor, right: Tensor) -> Tensor:
            (queries, inner), outer = left.shape[1:], right.shape[-1]
            together = len(grid) // len(right) * queries
            stacked = left.index_select(0, grid).view(len(right), together, inner)
            return torch.bmm(stacked, right).view(len(grid), queries, outer).index_select(0, place)

        return product

    def _mask(self, lengths: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """(N, 1, 1, T): 0 where a row has a token, -inf where it has none."""
        beyond = [
            torch.arange(size, device=self._device) >= length[:, None]
            for length, size in zip(lengths, sizes, strict=True)
        ]
        beyond = torch.cat(beyond, 1)
        mask = torch.zeros(beyond.shape, dtype=self._own[0].dtype, device=self._device)
        return mask.masked_fill_(beyond, -torch.inf)[:, None, None]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy a completion's cache to another row, so that the running rows stay a block."""
        keys, values = self._own
        keys[:, target, ..., :length] = keys[:, source, ..., :length]
        values[:, target, :, :length] = values[:, source, :, :length]


def _grid(slots: Sequence[int], heads: int) -> tuple[Tensor, Tensor]:
    """Sort the (row, head) pairs by slot, head, row: where each goes, and back.

    Returns:
        grid: (P·H·R,), for each place the pair (row · H + head); unused places name pair 0,
            and what is computed there is never read.
        place: (N·H,), for each pair its place.

    >>> [part.tolist() for part in _grid([1, 0, 1], 1)]
    [[1, 0, 0, 2], [2, 0, 3]]
    """
    used = [0] * (max(slots) + 1)  # rows of each slot so far
    ranks = []
    for slot in slots:
        ranks.append(used[slot])
        used[slot] += 1
    first = torch.tensor(slots)[:, None] * heads + torch.arange(heads)  # (N, H)
    place = (first * max(used) + torch.tensor(ranks)[:, None]).flatten()
    grid = torch.zeros(len(used) * heads * max(used), dtype=torch.long)
    grid[place] = torch.arange(len(place))
    return grid, place
