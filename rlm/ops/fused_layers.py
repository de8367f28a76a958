"""Fuses LoRA, norms, gating and attention for training.

Up to rounding, the results equal those of transformers and PEFT. The fused layers make fewer passes
over the activations, and they save fewer tensors for the backward pass.

Attention on a CPU is computed for a block of queries and its visible keys at a time. A packed
rollout attends only to its prompt and to itself. torch's fused kernel for CPUs (in torch 2.13) also
computes scores that the mask hides, and in bf16 it sums the gradients of keys and values in bf16.
attention.c skips hidden keys, and so do the torch matmuls in this file, which are used if
attention.c is not compiled. Attention weights are not saved; the backward pass recomputes them.

Shapes use these letters: B sequences, S tokens, Q query heads per key-value head, H key-value
heads, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import eager_mask

from rlm.cli import UsageError
from rlm.ops.kernels import ATTENTION_BLOCK, Kernels, ops_for

if TYPE_CHECKING:
    from peft import PeftModel

FUSED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
Module = Any  # a module of transformers or PEFT, whose attributes are not declared
QUERY_BLOCK = 128  # queries per block
ATTN_IMPLEMENTATION = "rlm_products"  # for transformers' `attn_implementation`


def use_fused_layers(policy: PreTrainedModel | PeftModel) -> None:
    """Replace the forward methods of layers of the policy with fused ones.

    LoRA layers are always fused. Norms, gating and attention are fused if the kernels can be
    compiled and the architecture is supported. The norms must be frozen, and the LoRA dropout must
    be 0.
    """
    module: Module
    for module in policy.modules():
        if hasattr(module, "lora_A"):
            module.forward = partial(_lora, module)
    kernels = ops_for(policy)
    if not isinstance(kernels, Kernels):
        return
    base: Module = getattr(policy, "get_base_model", lambda: policy)()
    decoder = base.get_decoder()
    if decoder.config.model_type not in FUSED_MODEL_TYPES:
        return
    for module in decoder.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(_norm, module, kernels)
        elif hasattr(module, "q_proj"):
            module.forward = partial(_attention, module, kernels)
        elif hasattr(module, "gate_proj") and decoder.config.hidden_act == "silu":
            module.forward = partial(_gated, module, kernels)


def _lora(self: Module, x: Tensor) -> Tensor:
    """Apply a linear layer with its adapter: x Wᵀ + (s x Aᵀ) Bᵀ."""
    return _project(x, self)[0]


def _project(x: Tensor, *layers: Module) -> Sequence[Tensor]:
    """Apply several layers with their adapters to the same input.

    All layers run as one autograd function if they are plain linear layers with at most one active
    adapter, in the dtype of x.
    """
    parts, factors = [], []
    for layer in layers:
        if not hasattr(layer, "lora_A"):
            break
        base, active = layer.get_base_layer(), layer.active_adapters
        names = [] if layer.disable_adapters else [n for n in active if n in layer.lora_A]
        # In SFT the adapter is in fp32 and the base model in bf16; autograd converts the gradients
        # of the adapter back to fp32.
        adapter = [
            m[name].weight.to(x.dtype) for name in names for m in (layer.lora_A, layer.lora_B)
        ]
        if type(base) is not nn.Linear or len(names) > 1 or base.weight.dtype != x.dtype:
            break
        parts.append((base.weight, base.bias, layer.scaling[names[0]] if names else 0.0))
        factors += adapter or [None, None]
    else:
        return _Projections.apply(x, parts, *factors)
    return [_add_adapters(layer, x) if hasattr(layer, "lora_A") else layer(x) for layer in layers]


def _add_adapters(self: Module, x: Tensor) -> Tensor:
    """Apply a layer with its adapters in torch; this fallback supports all dtypes and adapters.

    Autograd does not allow changing the output of an 8-bit layer in place. Therefore an adapter's
    output is added to that of a quantized layer in a new tensor.
    """
    result = self.base_layer(x)
    if self.disable_adapters:
        return result
    rows = result.view(-1, result.shape[-1])
    plain = type(self.get_base_layer()) is nn.Linear
    for adapter in self.active_adapters:
        if adapter in self.lora_A:
            down, up = self.lora_A[adapter].weight, self.lora_B[adapter].weight
            inner = F.linear(x.flatten(0, -2).to(down.dtype), down) * self.scaling[adapter]
            factors = inner.to(rows.dtype), up.t().to(rows.dtype)
            rows = rows.addmm_(*factors) if plain else rows.addmm(*factors)
    return rows.view_as(result)


class _Projections(torch.autograd.Function):
    """Several linear layers with the same input, each with its adapter.

    Each layer computes y = x Wᵀ + b + (s x Aᵀ) Bᵀ. PEFT scales and adds in separate passes over
    every output, and autograd sums the gradients of x in separate passes, too. Here the matmuls
    accumulate in place. A single function also needs fewer autograd nodes, each of which takes
    about as long as a small matmul.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (…, inputs)
        parts: Sequence[tuple[Tensor, Tensor | None, float]],  # W (frozen), b and s of each layer
        *factors: Tensor | None,  # A and B of each layer, or None for no adapter
    ) -> tuple[Tensor, ...]:
        rows, outs, inners = x.flatten(0, -2), [], []
        adapters = zip(factors[::2], factors[1::2], strict=True)
        for (weight, bias, scale), (down, up) in zip(parts, adapters, strict=True):
            out, inner = F.linear(rows, weight, bias), None
            if down is not None and up is not None:
                inner = F.linear(rows, down).mul_(scale)
                out.addmm_(inner, up.t())
            outs.append(out.view(*x.shape[:-1], -1))
            inners.append(inner)
        ctx.save_for_backward(rows, *factors, *inners)
        ctx.parts, ctx.shape = parts, x.shape
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outs: Tensor) -> tuple[Tensor | None, ...]:
        rows, *kept = ctx.saved_tensors
        count, grad_x = len(grad_outs), None
        factors, inners, gradients = kept[: 2 * count], kept[2 * count :], []
        for i, ((weight, _, scale), grad_out, inner) in enumerate(
            zip(ctx.parts, grad_outs, inners, strict=True)
        ):
            down, up = factors[2 * i : 2 * i + 2]
            grad_rows = grad_out.reshape(len(rows), -1)
            if ctx.needs_input_grad[0]:
                grad_x = grad_rows @ weight if grad_x is None else grad_x.addmm_(grad_rows, weight)
            grad_down = grad_up = None
            if down is not None:
                grad_inner = (grad_rows @ up).mul_(scale)
                if ctx.needs_input_grad[2 + 2 * i]:
                    grad_down, grad_up = grad_inner.t() @ rows, (inner.t() @ grad_rows).t()
                if grad_x is not None:
                    grad_x.addmm_(grad_inner, down)
            gradients += grad_down, grad_up
        return None if grad_x is None else grad_x.view(ctx.shape), None, *gradients


def _norm(self: Module, kernels: Kernels, x: Tensor) -> Tensor:
    return _Norm.apply(x, self.weight, self.variance_epsilon, kernels)


def _gated(self: Module, kernels: Kernels, x: Tensor) -> Tensor:
    return self.down_proj(_Gating.apply(*_project(x, self.gate_proj, self.up_proj), kernels))


def _attention(
    self: Module,
    kernels: Kernels,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: object = None,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    if (
        self.config._attn_implementation != ATTN_IMPLEMENTATION  # the sampler sets its own value
        or attention_mask is None
        or past_key_values is not None
        or (self.training and self.attention_dropout)
    ):
        return type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, past_key_values, **options
        )
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (
        part.view(shape) for part in _project(hidden_states, self.q_proj, self.k_proj, self.v_proj)
    )
    if hasattr(self, "q_norm"):  # Qwen3 normalizes each head
        q, k = self.q_norm(q), self.k_norm(k)
    q, k = (_Rotation.apply(x, *position_embeddings, kernels) for x in (q, k))
    out = _CompiledAttention.apply(q, k, v, attention_mask, self.scaling, kernels)
    return self.o_proj(out.flatten(2)), None


class _Rotation(torch.autograd.Function):
    """Rotary position embedding (Su et al., arXiv 2104.09864).

    The backward pass rotates the gradient in the opposite direction.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (B, S, heads, D)
        cos: Tensor,  # (B or 1, S, D)
        sin: Tensor,
        kernels: Kernels,
    ) -> Tensor:
        cos, sin = (part.expand(len(x), -1, -1).flatten(0, 1) for part in (cos, sin))
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        return kernels.rotary_embedding(_rows(x), cos, sin).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad_x = ctx.kernels.rotary_embedding(_rows(grad_out), cos, -sin).view_as(grad_out)
        return grad_x, None, None, None


def _rows(x: Tensor) -> Tensor:
    """Copy a tensor (B, S, heads, D) into a new tensor (B·S, heads, D)."""
    return x.clone(memory_format=torch.contiguous_format).flatten(0, 1)


class _Norm(torch.autograd.Function):
    """RMS norm: weight · x / rms(x) over the last dimension (Zhang & Sennrich, arXiv 1910.07467).

    The input x is saved for the backward pass in its own dtype; transformers saves x in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,  # frozen
        epsilon: float,
        kernels: Kernels,
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.epsilon, ctx.kernels = epsilon, kernels
        return kernels.rms_norm(x.flatten(0, -2), weight, epsilon).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, grad_rows = x.flatten(0, -2), grad_out.contiguous().flatten(0, -2)
        grad_x = ctx.kernels.rms_norm_backward(rows, weight, ctx.epsilon, grad_rows)
        return grad_x.view_as(x), None, None, None


class _Gating(torch.autograd.Function):
    """SiLU gating: silu(gate) · up.

    Only gate and up are saved for the backward pass; transformers also saves silu(gate).
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.silu_and_mul(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ctx.kernels.silu_and_mul_backward(*ctx.saved_tensors, grad_out.contiguous()), None


class _CompiledAttention(torch.autograd.Function):
    """Attention computed by attention.c: softmax(scale · q kᵀ + mask) v, with the softmax in fp32.

    The tensors have the heads after the tokens, as the projections return them. The mask is
    (B or 1, 1, S, S), of the same dtype: 0 for a visible key, the dtype's minimum for a hidden key.
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
    """The attention of `_CompiledAttention`, computed by torch.

    The tensors have the heads before the tokens, as transformers passes them: q and the result are
    (B, H·Q, S, D), k and v are (B, H, S, D).
    """

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
    out = _BlockAttention.apply(query, key, value, attention_mask, scale)
    return out.transpose(1, 2), None


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
    """Return the bytes of the scores and attention weights of a block, and of their gradients.

    The result is 0 if the config names another attention implementation.
    """
    if config._attn_implementation != ATTN_IMPLEMENTATION:
        return 0
    return 4 * config.num_attention_heads * min(tokens, QUERY_BLOCK) * tokens * dtype.itemsize


AttentionInterface.register(ATTN_IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(ATTN_IMPLEMENTATION, eager_mask)
