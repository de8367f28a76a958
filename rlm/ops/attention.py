"""Attention for training on a CPU, computed for a block of queries and its visible keys at a time.

A packed rollout attends only to its prompt and to itself. torch's fused kernel for CPUs (2.13)
also computes scores that the mask hides, and in bf16 it sums the gradients of keys and values in
bf16. attention.c skips hidden keys. If attention.c is not compiled, the matmuls in this file are
used instead, and the matmuls skip hidden keys, too. Attention weights are not saved, because the
backward pass recomputes them.

Shapes use these letters: B sequences, S tokens, Q query heads per key-value head, H key-value
heads, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import eager_mask

from rlm.cli import UsageError
from rlm.ops.kernels import ATTENTION_BLOCK

if TYPE_CHECKING:
    from rlm.ops.kernels import Kernels

QUERY_BLOCK = 128  # queries per block
ATTN_IMPLEMENTATION = "rlm_products"  # for transformers' `attn_implementation`


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, kernels: Kernels | None = None
) -> Tensor:
    """Compute softmax(scale · q kᵀ + mask) v, with the softmax in fp32; q, k and v get gradients.

    Args:
        q: (B, H·Q, S, D).
        k: (B, H, S, D); v has the same shape.
        mask: (B or 1, 1, S, S) of the same dtype: 0 for a visible key, the dtype's minimum for a
            hidden key.
        kernels: the compiled code for these shapes, if any.

    Returns:
        The output (B, H·Q, S, D), stored in memory as (B, S, H·Q, D).
    """
    if kernels is None:
        return _BlockAttention.apply(q, k, v, mask, scale)
    by_token = (part.transpose(1, 2) for part in (q, k, v))
    return _CompiledAttention.apply(*by_token, mask, scale, kernels).transpose(1, 2)


class _CompiledAttention(torch.autograd.Function):
    """Attention computed by attention.c.

    The tensors have the heads after the tokens, as the projections return them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # (B, S, H·Q, D)
        k: Tensor,  # (B, S, H, D)
        v: Tensor,
        mask: Tensor,
        scale: float,
        kernels: Kernels,
    ) -> Tensor:
        q, k, v = (part.contiguous() for part in (q, k, v))
        ctx.save_for_backward(q, k, v)
        ctx.shown, ctx.scale, ctx.kernels = _shown(mask), scale, kernels
        return kernels.attention(q, k, v, *ctx.shown, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        given = *ctx.saved_tensors, *ctx.shown, ctx.scale, grad_out.contiguous()
        return *ctx.kernels.attention_backward(*given), None, None, None


@functools.lru_cache(maxsize=1)
def _shown(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the arguments `hidden` and `seen` of `Kernels.attention` for a mask.

    The result for the latest mask is cached, because all layers get the same mask.
    """
    visible = mask[:, 0] > torch.finfo(mask.dtype).min  # (B, queries, keys)
    missing = -visible.shape[-1] % ATTENTION_BLOCK
    visible = F.pad(visible, (0, missing, 0, missing))
    seen = visible.unflatten(1, (-1, ATTENTION_BLOCK)).any(2)
    seen = seen.unflatten(2, (-1, ATTENTION_BLOCK)).any(3)
    return ~visible.mT.contiguous(), seen


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale, ctx.blocks = scale, _blocks(mask)
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        for b, row in enumerate(out.transpose(1, 2)):
            for block in ctx.blocks[b % len(ctx.blocks)]:
                _, _, values, weights = _attend(q[b], k[b], v[b], scale, block)
                row[:, block.rows] = (weights @ values).view(row[:, block.rows].shape)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(part) for part in (q, k, v))
        for b in range(len(q)):
            # A key's gradient is a sum over blocks, so it is summed in fp32 and rounded once.
            wide_k, wide_v = (torch.zeros_like(part[b], dtype=torch.float32) for part in (k, v))
            for block in ctx.blocks[b % len(ctx.blocks)]:
                scaled, keys, values, weights = _attend(q[b], k[b], v[b], ctx.scale, block)
                grad = _by_head(grad_out[b][:, block.rows], k[b])
                wide_v.index_add_(1, block.columns, (weights.mT @ grad).float())
                grad_scores = torch.ops.aten._softmax_backward_data(
                    grad @ values.mT, weights, -1, q.dtype
                )
                part_of_q = grad_q[b][:, block.rows]
                part_of_q[:] = (grad_scores @ keys).mul_(ctx.scale).view(part_of_q.shape)
                wide_k.index_add_(1, block.columns, (grad_scores.mT @ scaled).float())
            grad_k[b], grad_v[b] = wide_k, wide_v
        return grad_q, grad_k, grad_v, None, None


@dataclass(frozen=True)
class _Block:
    """A block of queries of a sequence, and the keys that are visible to any of these queries."""

    rows: slice
    columns: Tensor
    mask: Tensor  # (rows, columns)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, block: _Block
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the attention weights of a block of queries.

    Args:
        q: queries of the whole sequence, (H·Q, S, D).
        k: keys of the whole sequence, (H, S, D); v has the same shape.

    Returns:
        The scaled queries, the keys and values, and the weights (H, Q·rows, columns).
    """
    scaled = _by_head(q[:, block.rows], k) * scale
    keys, values = (part.index_select(1, block.columns) for part in (k, v))
    scores = scaled @ keys.mT
    scores.unflatten(1, (-1, len(block.mask))).add_(block.mask)
    return scaled, keys, values, scores.softmax(-1)  # computed in fp32


@functools.lru_cache(maxsize=1)
def _blocks(mask: Tensor) -> list[list[_Block]]:
    """Split each sequence into blocks of queries.

    The result for the latest mask is cached, because all layers get the same mask.
    """
    lowest = torch.finfo(mask.dtype).min
    found: list[list[_Block]] = [[] for _ in mask]
    for blocks, visible in zip(found, mask[:, 0], strict=True):
        for part in range(0, len(visible), QUERY_BLOCK):
            rows = slice(part, min(part + QUERY_BLOCK, len(visible)))
            columns = (visible[rows].amax(0) > lowest).nonzero()[:, 0]
            if not len(columns):  # padding, whose result is never read but must be finite
                columns = torch.zeros(1, dtype=torch.long)
            blocks.append(_Block(rows, columns, visible[rows].index_select(1, columns)))
    return found


def _by_head(x: Tensor, k: Tensor) -> Tensor:
    """Reshape (H·Q, S, D) to (H, Q·S, D), one matrix of queries for each key-value head."""
    return x.reshape(len(k), -1, x.shape[-1])


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer; transformers calls this function.

    Returns:
        The output (B, S, H·Q, D), and None in place of the attention weights.
    """
    if dropout or attention_mask is None:
        raise UsageError("attention with dropout or without a mask is not supported")
    scale = softmax_scale(query, scaling, options)
    return block_attention(query, key, value, attention_mask, scale).transpose(1, 2), None


def softmax_scale(query: Tensor, scaling: float | None, options: Mapping[str, object]) -> float:
    """Return the scale of the scores from the arguments that transformers passes.

    Raises:
        UsageError: the attention of the model is not softmax(scale · q kᵀ + mask) v.
    """
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise UsageError(f"this model is not supported: its attention needs {name}")
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def attention_bytes(config: PretrainedConfig, tokens: int, dtype: torch.dtype) -> int:
    """Return the memory in bytes for the weights and scores of a block, and for their gradients.

    The result is 0 if the config names another attention implementation.
    """
    if config._attn_implementation != ATTN_IMPLEMENTATION:
        return 0
    return 4 * config.num_attention_heads * min(tokens, QUERY_BLOCK) * tokens * dtype.itemsize


AttentionInterface.register(ATTN_IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(ATTN_IMPLEMENTATION, eager_mask)
