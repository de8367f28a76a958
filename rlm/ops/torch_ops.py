"""Runs matmuls, attention, sampling and scoring in torch, on any device; `Kernels` runs C code.

Shapes use these letters: N rows, V tokens of the vocabulary. Shapes of caches also use: L layers, P
prompt slots, H key-value heads, Q query heads per key-value head, D head width, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# linear(x (rows, inputs)[, residual (rows, outputs)]) → (rows, outputs)
LinearFunction = Callable[..., Tensor]
# attend(layer, queries (B, heads, T, D), keys, values (B, H, T, D), scale) → (B, heads, T, D)
AttentionFunction = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
# Keys (L, slots, H, D, T) and values (L, slots, H, T, D).
Store = tuple[Tensor, Tensor]
# Tokens per block of the vocabulary. A typical vocabulary has about as many blocks.
VOCAB_BLOCK = 256
# Rows that are converted to fp32 at a time on a CPU. 16 rows × 49,152 logits × 4 bytes = 3 MB stay
# in the CPU's cache, and the allocator reuses a block of this size. A block of 25 MB would often be
# mapped anew, with many page faults.
WIDE_ROWS = 16
PACKED_FOR_ROWS = 64  # a hint for oneDNN's layout; any number of rows works


class DecoderLayer(Protocol):
    """The attributes of a `FusedLayer` that `Kernels.decode_layers` reads."""

    qkv: LinearFunction
    out: LinearFunction
    gated: LinearFunction
    down: LinearFunction
    head_norms: list[tuple[Tensor, float]]  # weight and epsilon, of the queries and the keys
    scale: float


class TorchOps:
    """Runs matmuls, attention, sampling and scoring in torch."""

    # Allocates a cache of zeros, because matmuls also read masked entries, and 0 · NaN is NaN.
    new_store = staticmethod(torch.zeros)
    has_linear = False  # whether our own matmuls run, in which rows are independent
    logit_bytes = 3 * 4  # bytes per logit in sampling: fp32 logits, exponentials, running sums

    def __init__(self, reason: str = "torch was requested", batch_note: str | None = None) -> None:
        """Create the operations, and record why torch runs them.

        Args:
            reason: why the kernels are not compiled.
            batch_note: why a row's results may depend on other rows; None repeats `reason`.
        """
        self.description = f"kernels not compiled: {reason}"
        self.batch_note = batch_note or self.description

    def rms_norm(self, x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        """Compute weight · x / rms(x), with the quotient in fp32; a weight of None means 1."""
        wide = x.float()
        square_sum = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        unit = (wide * (square_sum / x.shape[-1] + epsilon).rsqrt_()).to(x.dtype)
        return unit if weight is None else unit * weight

    def rotary_embedding(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply rotary position embedding (Su et al., arXiv 2104.09864) to the pairs (i, i + D/2).

        Args:
            x: (rows, heads, D).
            cos, sin: (rows, D).
        """
        low, high = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]

    def linear(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] | None,
        epsilon: float | None = None,
    ) -> LinearFunction:
        """Build the function of a linear layer; see `Kernels.linear`."""
        return packed_linear(weights, biases, epsilon, self.rms_norm)

    def prefill_attention(
        self, stores: Sequence[Store], slots: Sequence[int], tokens: int, prefix: int
    ) -> AttentionFunction:
        """Build the attention function that prefills right-padded prompts into cache slots.

        Args:
            stores: the cache of the shared prefix, and the cache to which prompts are written.
            slots: the slot of each prompt.
            tokens: the length of the padded prompts.
            prefix: the length of the shared prefix that precedes the prompts; 0 without a prefix.
        """
        (before_keys, before_values), (keys, values) = stores
        where = torch.tensor(slots, device=keys.device)
        shape = (tokens, prefix + tokens)
        seen = torch.ones(shape, dtype=torch.bool, device=keys.device).tril(prefix)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            keys[layer][where, :, :, :tokens] = k.mT
            values[layer][where, :, :tokens] = v
            if not prefix:
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=scale, enable_gqa=True
                )
            before = before_keys[layer, 0, ..., :prefix].mT, before_values[layer, 0, :, :prefix]
            parts = [
                torch.cat((old.expand(len(new), -1, -1, -1), new), 2)
                for old, new in zip(before, (k, v), strict=True)
            ]
            shares = q.shape[1] // k.shape[1]
            if q.is_cuda and shares > 1:  # no fused CUDA kernel supports a mask with grouped heads
                parts, shares = [part.repeat_interleave(shares, 1) for part in parts], 1
            return F.scaled_dot_product_attention(
                q, *parts, attn_mask=seen, scale=scale, enable_gqa=shares > 1
            )

        return attend

    def decode_layers(self, layers: Sequence[DecoderLayer]) -> None:
        """Return None, because torch runs the operations of a layer one by one."""

    def decode_attention(
        self,
        stores: Sequence[Store],
        slots: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[int]],
    ) -> AttentionFunction:
        """Build the attention function for rows with one new token each.

        Rows that share a slot also share the matmuls that read this slot.

        Args:
            stores: the cache of each segment. The keys and values of a new token are written to the
                last cache, at position length - 1.
            slots: for each segment, the slot that each row reads. In the last segment, row i reads
                slot i.
            lengths: for each segment, the number of tokens that each row reads.
        """
        own_keys, own_values = stores[-1]
        device, heads = own_keys.device, own_keys.shape[2]
        sizes = [
            round_up(max(part), 64, keys.shape[-1])
            for part, (keys, _) in zip(lengths, stores, strict=True)
        ]
        read = [torch.tensor(part, device=device) for part in lengths]
        mask = _mask(read, sizes, own_keys.dtype)
        rows, last = torch.arange(len(slots[-1]), device=device), read[-1] - 1
        # One function per segment multiplies queries (N·H, Q, D) by the keys of the segment, and
        # attention weights (N·H, Q, T) by its values.
        products = [_shared_product(where, heads, device) for where in slots[:-1]]
        products.append(torch.bmm)
        # Slicing the caches once and unbinding the layers has less overhead than slicing the caches
        # in every layer. For each layer: keys (P·H, D, T) and values (P·H, T, D).
        segments = []
        for product, store, where, size in zip(products, stores, slots, sizes, strict=True):
            if size:
                keys, values = (part[:, : max(where) + 1].flatten(1, 2) for part in store)
                segments.append(
                    (product, keys[..., :size].unbind(), values[..., :size, :].unbind())
                )
        sizes = [size for size in sizes if size]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            own_keys[layer][rows, :, :, last] = k[:, :, 0]
            own_values[layer][rows, :, last] = v[:, :, 0]
            (n, heads, width), shared = q[:, :, 0].shape, k.shape[1]
            # Queries that share a key-value head become rows of one matrix.
            q = (q[:, :, 0] * scale).view(n * shared, heads // shared, width)  # (N·H, Q, D)
            scores = torch.cat([product(q, keys[layer]) for product, keys, _ in segments], -1)
            # (N·H, Q, T). torch computes a 16-bit softmax in fp32, and rounds the result.
            weights = (scores.unflatten(0, (n, shared)) + mask).softmax(-1).flatten(0, 1)
            parts = zip(segments, weights.split(sizes, -1), strict=True)
            out = [product(part, values[layer]) for (product, _, values), part in parts]
            return sum(out[1:], start=out[0]).view(n, heads, 1, width)

        return attend

    def sample(
        self, logits: Tensor, uniform: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor] | None:
        """Sample one token per row; see `Kernels.sample`.

        The method is inverse transform sampling: one uniform number per row is scaled by the total
        mass and looked up in the running sum of the masses. The running sum is computed over blocks
        of the vocabulary, and then inside the selected block, so sampling takes about as long as
        reading the logits. (`torch.multinomial` draws N × V random numbers on one thread.)

        On a GPU, a test of the logits would require a synchronization. Therefore the result is
        never None there, and invalid logits produce log-probabilities that are not finite.
        """
        logits = logits.float()
        if temperature == 0:
            tokens = logits.argmax(-1)
            mass = logits.logsumexp(-1)
            logprobs = logits.gather(-1, tokens[:, None]).squeeze(-1) - mass
            return (tokens, logprobs) if _is_finite(mass) else None
        if temperature != 1:
            logits = logits / temperature
        probabilities = logits.softmax(-1)
        rows, vocabulary = probabilities.shape
        missing = -vocabulary % VOCAB_BLOCK
        mass = F.pad(probabilities, (0, missing)) if missing else probabilities
        mass = mass.unflatten(-1, (-1, VOCAB_BLOCK))  # (N, blocks, VOCAB_BLOCK)
        # The cumulative sums are in double precision, because single precision would distort the
        # probabilities of rare tokens in a vocabulary of 150,000.
        blocks = mass.sum(-1).double()
        before = blocks.cumsum(-1)
        total = before[:, -1:]
        if not _is_finite(total):
            return None
        wanted = uniform.to(total)[:, None] * total
        block = _search(before, wanted)
        wanted = wanted - (before.gather(-1, block) - blocks.gather(-1, block))
        inside = mass[torch.arange(rows, device=block.device), block[:, 0]].double().cumsum(-1)
        # If the sums are not finite, the search may return an index beyond the vocabulary, which
        # would crash a GPU. The last token is used until the caller detects the error.
        tokens = (block * VOCAB_BLOCK + _search(inside, wanted)).clamp(max=vocabulary - 1)
        chosen = probabilities.gather(-1, tokens) / total  # the total is 1 up to rounding
        return tokens.squeeze(-1), chosen.log().squeeze(-1).float()

    def token_logprobs(
        self, logits: Tensor, targets: Tensor, temperature: float, gradients: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities and entropies; see `Kernels.token_logprobs`."""
        rows = WIDE_ROWS if logits.device.type == "cpu" else len(logits)
        logprobs, entropies = [], []
        for part, wanted in zip(logits.split(rows), targets.split(rows), strict=True):
            wide = part.float()
            if temperature != 1:
                wide = wide / temperature
            wide = wide.log_softmax(-1)  # log-probabilities of all tokens
            logprobs.append(wide.gather(-1, wanted[:, None]).squeeze(-1))
            probabilities = wide.exp()
            # One dot product per row, which avoids another (rows, V) tensor.
            entropies.append(-torch.bmm(probabilities[:, None], wide[..., None]).flatten())
            if gradients:
                coefficients = probabilities.neg_()
                coefficients[torch.arange(len(wanted), device=wanted.device), wanted] += 1
                part.copy_(coefficients)
        return torch.cat(logprobs), torch.cat(entropies)


def round_up(length: int, multiple: int, at_most: int) -> int:
    """Round a length up to a multiple, but not beyond `at_most`.

    Rounding limits the number of shapes, for each of which oneDNN generates code.
    """
    return min(-(-length // multiple) * multiple, at_most)


def score_bytes(vocabulary: int, tokens: int, dtype: torch.dtype, device_type: str) -> int:
    """Return the maximum memory in bytes for scoring this many tokens at once.

    The memory holds the logits of all tokens, and three fp32 tensors with as many rows as
    `TorchOps.token_logprobs` converts at a time.
    """
    rows = WIDE_ROWS if device_type == "cpu" else tokens
    return vocabulary * (tokens * dtype.itemsize + 3 * rows * 4)


def packed_linear(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    epsilon: float | None,
    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor],
) -> LinearFunction:
    """Build the function of `Kernels.linear` from oneDNN's matmuls.

    torch's matmuls are used for weights that oneDNN does not support.
    """
    linears = [
        _linear(*pair) for pair in zip(weights, biases or [None] * len(weights), strict=True)
    ]

    def multiply(x: Tensor, residual: Tensor | None = None) -> Tensor:
        if epsilon is not None:
            x = rms_norm(x, None, epsilon)
        if len(linears) == 2:
            # oneDNN's fused SiLU is slower than this extra pass.
            return linears[1](x, F.silu(linears[0](x), inplace=True), "mul")
        return linears[0](x, residual)

    return multiply


def _linear(weight: Tensor, bias: Tensor | None) -> LinearFunction:
    """Build the function linear(x[, other, how]) → (rows, outputs).

    The function adds `other` to the result, or multiplies the result by `other`. If oneDNN supports
    the weight, the weight is stored in oneDNN's blocked layout, because oneDNN would otherwise copy
    a row-major matrix in every matmul. oneDNN also adds or multiplies `other` in the same pass.
    """
    if not _can_pack(weight):

        def multiply(x: Tensor, other: Tensor | None = None, how: str = "add") -> Tensor:
            out = F.linear(x, weight, bias)
            if other is None:
                return out
            return out + other if how == "add" else out * other

        return multiply

    weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)

    def multiply_packed(x: Tensor, other: Tensor | None = None, how: str = "add") -> Tensor:
        if other is None:
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, how)

    return multiply_packed


def _can_pack(weight: Tensor) -> bool:
    """Return whether oneDNN has a matmul for this weight's dtype on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def _is_finite(mass: Tensor) -> bool:
    """Return whether all values are finite.

    The result is always true on a GPU, where a test would require a synchronization.
    """
    return mass.is_cuda or bool(mass.isfinite().all())


def _search(sums: Tensor, wanted: Tensor) -> Tensor:
    """Find the first index at which the running sums (N, K) exceed the wanted mass (N, 1).

    The entry at this index always has a mass above 0: if rounding makes `wanted` equal the total,
    the result is the last entry with a mass above 0.
    """
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    found = torch.minimum(torch.searchsorted(sums, wanted, right=True), last)
    return found.clamp(max=sums.shape[1] - 1)


def _mask(lengths: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Build the mask (N, 1, 1, T), which is 0 where a row has a token and -inf elsewhere."""
    beyond = [
        torch.arange(size, device=length.device) >= length[:, None]
        for length, size in zip(lengths, sizes, strict=True)
    ]
    beyond = torch.cat(beyond, 1)
    mask = torch.zeros(beyond.shape, dtype=dtype, device=beyond.device)
    return mask.masked_fill_(beyond, -torch.inf)[:, None, None]


def _shared_product(
    slots: Sequence[int], heads: int, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """Build the function (N·H, Q, A) · (P·H, A, B) → (N·H, Q, B).

    The function runs one matmul per slot and head, in one batch.
    """
    grid, place = (part.to(device) for part in _grid(slots, heads))

    def product(left: Tensor, right: Tensor) -> Tensor:
        (queries, inner), outer = left.shape[1:], right.shape[-1]
        together = len(grid) // len(right) * queries
        stacked = left.index_select(0, grid).view(len(right), together, inner)
        return torch.bmm(stacked, right).view(len(grid), queries, outer).index_select(0, place)

    return product


def _grid(slots: Sequence[int], heads: int) -> tuple[Tensor, Tensor]:
    """Arrange the (row, head) pairs, sorted by slot, head and row, in a grid of places.

    Returns:
        grid: the pair (row · H + head) at each place, (P·H·R,), where R is the maximum number of
            rows of a slot. Unused places contain pair 0, and the results computed there are never
            read.
        place: the place of each pair, (N·H,).

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
