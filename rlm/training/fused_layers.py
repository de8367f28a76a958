"""Fused layers for training: LoRA, norms, gating and attention with fewer passes over the
activations than transformers and PEFT make, and less kept for the backward pass; same results."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers import PreTrainedModel

from rlm.kernels import Kernels
from rlm.model import attention, decoder_and_head, kernels_for, lora_layers
from rlm.sampling import FUSED_MODEL_TYPES


def use_fused_layers(policy: PreTrainedModel) -> None:
    """Let the policy compute with fused adapters and, where they can be compiled, fused norms,
    gating and attention. It takes frozen norms, and a LoRA dropout of 0 as eval mode has."""
    for module in lora_layers(policy):
        module.forward = partial(_lora, module)
    kernels, _ = kernels_for(policy)
    if kernels is None:
        return
    decoder, _ = decoder_and_head(policy)
    if decoder.config.model_type not in FUSED_MODEL_TYPES:
        return
    for module in decoder.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(_norm, module, kernels)
        elif hasattr(module, "q_proj"):
            module.forward = partial(_attention, module, kernels)
        elif hasattr(module, "gate_proj") and decoder.config.hidden_act == "silu":
            module.forward = partial(_gated, module, kernels)


def _lora(self: nn.Module, x: Tensor) -> Tensor:
    """Add the adapter inside a product: x Wᵀ + (s x Aᵀ) Bᵀ, accumulated in place.

    PEFT scales and adds in passes of their own over every layer's output, and once more in the
    backward pass. Packed layers' products may not be changed in place (autograd refuses it for 8
    bits): there the sum is a new tensor.
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


def _norm(self: nn.Module, kernels: Kernels, x: Tensor) -> Tensor:
    return _Norm.apply(x, self.weight, self.variance_epsilon, kernels)


def _gated(self: nn.Module, kernels: Kernels, x: Tensor) -> Tensor:
    return self.down_proj(_Gating.apply(self.gate_proj(x), self.up_proj(x), kernels))


def _attention(
    self: nn.Module,
    kernels: Kernels,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: object = None,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    if (
        self.config._attn_implementation != attention.ATTN_IMPLEMENTATION  # such as the sampler's
        or attention_mask is None
        or past_key_values is not None
        or (self.training and self.attention_dropout)
    ):
        return type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, past_key_values, **options
        )
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (
        projection(hidden_states).view(shape)
        for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    if hasattr(self, "q_norm"):  # Qwen3 normalises each head's
        q, k = self.q_norm(q), self.k_norm(k)
    q, k = (_Rotation.apply(x, *position_embeddings, kernels) for x in (q, k))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = attention.block_attention(q, k, v, attention_mask, self.scaling, kernels)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


class _Rotation(torch.autograd.Function):
    """Rotary position embedding (Su et al., arXiv 2104.09864); its gradient is rotated back."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
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
    def backward(ctx: FunctionCtx, by_out: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        by_x = ctx.kernels.rotary_embedding(_rows(by_out), cos, -sin).view_as(by_out)
        return by_x, None, None, None


def _rows(x: Tensor) -> Tensor:
    """(B, S, heads, D) → a copy, (B·S, heads, D)."""
    return x.clone(memory_format=torch.contiguous_format).flatten(0, 1)


class _Norm(torch.autograd.Function):
    """weight · x / rms(x) over the last dimension (Zhang & Sennrich, arXiv 1910.07467).

    Keeps x, where transformers keeps it in fp32.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
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
    def backward(ctx: FunctionCtx, by_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, by_rows = x.flatten(0, -2), by_out.contiguous().flatten(0, -2)
        by_x = ctx.kernels.rms_norm_backward(rows, weight, ctx.epsilon, by_rows)
        return by_x.view_as(x), None, None, None


class _Gating(torch.autograd.Function):
    """silu(gate) · up. Keeps both, where transformers keeps silu(gate) as well."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.silu_and_mul(gate, up)

    @staticmethod
    def backward(ctx: FunctionCtx, by_out: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ctx.kernels.silu_and_mul_backward(*ctx.saved_tensors, by_out.contiguous()), None
