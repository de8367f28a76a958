"""Attention of the learning pass on a CPU that computes in bf16.

torch's fused kernel for CPUs (2.13) takes twice the time of the products it stands for, at the few
hundred tokens of a rollout, and sums the gradients of keys and values in bf16 (docs/log.md; in fp32
it is the faster one). So here they are: one sequence at a time, so that no more than one
(heads × S × S) exists, and made anew in the backward pass, so that none is kept.

Letters: B sequences, S tokens, Q query heads per key-value head, H key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from rlm.config import UsageError

NAME = "rlm_products"  # for transformers' `attn_implementation`


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(scale · q kᵀ + mask) v, softmax in fp32, with its gradients for q, k and v.

    Args:
        q: (B, H·Q, S, D).
        k: (B, H, S, D), and v.
        mask: (B or 1, 1, S, S) of the same type: 0, or its lowest number where nothing is seen.

    Returns:
        (B, H·Q, S, D), laid out as (B, S, H·Q, D).
    """
    return _Attend.apply(q, k, v, mask.expand(len(q), -1, -1, -1), scale)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale = scale
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        for b, row in enumerate(out.transpose(1, 2)):
            weights = _weights(_by_head(q[b], k[b]) * scale, k[b], mask[b])
            row.copy_((weights @ v[b]).view(row.shape))
        return out.transpose(1, 2)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, by_out: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, mask = ctx.saved_tensors
        by_q, by_k, by_v = (torch.empty_like(part) for part in (q, k, v))
        for b in range(len(q)):
            scaled, slope = _by_head(q[b], k[b]) * ctx.scale, _by_head(by_out[b], k[b])
            weights = _weights(scaled, k[b], mask[b])
            by_v[b] = weights.mT @ slope
            by_weights = slope @ v[b].mT
            by_scores = torch._softmax_backward_data(by_weights, weights, -1, q.dtype)
            by_q[b] = (by_scores @ k[b]).mul_(ctx.scale).view(q[b].shape)
            by_k[b] = by_scores.mT @ scaled
        return by_q, by_k, by_v, None, None


def _by_head(x: Tensor, k: Tensor) -> Tensor:
    """(H·Q, S, D) → (H, Q·S, D): the queries of one key-value head as rows of one matrix."""
    return x.reshape(len(k), -1, x.shape[-1])


def _weights(scaled: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """(H, Q·S, S) of scaled queries (H, Q·S, D), keys (H, S, D) and a mask (1, S, S)."""
    scores = scaled @ k.mT
    scores.unflatten(1, (-1, len(mask[0]))).add_(mask)
    return scores.softmax(-1)  # computed in fp32, whatever comes out


def _for_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: object,
) -> tuple[Tensor, None]:
    """What transformers calls for attention; heads and tokens are swapped in its answer."""
    if dropout or attention_mask is None:
        raise UsageError("this model's attention needs dropout, or no mask: use --attn eager")
    scale = plain_scale(query, scaling, options, "use --attn eager")
    return attend(query, key, value, attention_mask, scale).transpose(1, 2), None


def plain_scale(
    query: Tensor, scaling: float | None, options: Mapping[str, object], advice: str
) -> float:
    """The factor of the scores, from what transformers hands to an attention function.

    Raises:
        UsageError: it asks for more than softmax(scale · q kᵀ + mask) v.
    """
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise UsageError(f"this model's attention needs {name}: {advice}")
    return query.shape[-1] ** -0.5 if scaling is None else scaling


AttentionInterface.register(NAME, _for_transformers)
AttentionMaskInterface.register(NAME, eager_mask)
