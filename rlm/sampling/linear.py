"""Fused linear layers for inference: q/k/v or gate/up as one, with norm, residual and gating.

The first of these that is available computes them: products.c, oneDNN's packed weights, torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlm.model import merged_weight
from rlm.ops import Kernels

# linear(x (rows, inputs)[, residual (rows, outputs)]) → (rows, outputs)
LinearFunction = Callable[..., Tensor]
PACKED_FOR_ROWS = 64  # a hint for oneDNN's layout; any number of rows may be multiplied


class TorchOps:
    """RMS norm and rotary embedding in torch; `Kernels` has the same, compiled."""

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        """Compute weight · x / rms(x), the quotient in fp32; the default weight is 1."""
        wide = x.float()
        square_sum = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        unit = (wide * (square_sum / x.shape[-1] + epsilon).rsqrt_()).to(x.dtype)
        return unit if weight is None else unit * weight

    @staticmethod
    def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary position embedding (Su et al., arXiv 2104.09864), halves paired as in Llama.

        Args:
            x: (rows, heads, D).
            cos, sin: (rows, D).
        """
        low, high = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]


@torch.no_grad()
def fused_linear(
    *layers: nn.Module,
    norm: nn.Module | None = None,
    gated: bool = False,
    kernels: Kernels | None = None,
    dtype: torch.dtype | None = None,
) -> LinearFunction:
    """Fuse linear layers of the same input into one, with the norm before them.

    Args:
        gated: compute silu(first(x)) · second(x) of two layers.
        dtype: number type to compute in, the same as of `kernels` (None: the layers').
    """
    has_bias = any(getattr(layer, "bias", None) is not None for layer in layers)
    parts = [[layer] for layer in layers] if gated else [layers]
    weights = [_merged_weight(part, norm) for part in parts]
    weights = [weight.to(dtype or weight.dtype) for weight in weights]
    biases = [_joined_bias(part, weights[0]) for part in parts] if has_bias else None
    epsilon = norm and norm.variance_epsilon
    inputs = weights[0].shape[1]
    if kernels and kernels.has_linear and inputs % kernels.multiplied_together == 0:
        return kernels.linear(weights, biases, epsilon)
    ops = kernels or TorchOps
    linears = [_linear(*pair) for pair in zip(weights, biases or [None] * len(parts), strict=True)]

    def multiply(x: Tensor, residual: Tensor | None = None) -> Tensor:
        if norm is not None:
            x = ops.rms_norm(x, None, epsilon)  # its weight is merged
        if gated:
            # (oneDNN's own SiLU tail is slower than this extra pass.)
            return linears[1](x, F.silu(linears[0](x), inplace=True), "mul")
        return linears[0](x, residual)

    return multiply


def _merged_weight(layers: Sequence[nn.Module], norm: nn.Module | None) -> Tensor:
    """Weight (outputs of all, inputs), adapters added and the norm's weight multiplied in."""
    weights = [merged_weight(layer) for layer in layers]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    return weight if norm is None else weight * norm.weight


def _joined_bias(layers: Sequence[nn.Module], weight: Tensor) -> Tensor:
    """Bias (outputs of all), of the weight's number type; zeros where a layer has none."""
    biases = [(getattr(layer, "bias", None), layer.out_features) for layer in layers]
    return torch.cat([weight.new_zeros(size) if b is None else b for b, size in biases]).to(
        weight.dtype
    )


def _linear(weight: Tensor, bias: Tensor | None) -> LinearFunction:
    """Make linear(x[, other, how]) → (rows, outputs), to which `other` is added or multiplied.

    Where it can, oneDNN multiplies from its own blocked layout, into which it would copy a
    row-major matrix in every product, and adds or multiplies `other` in the same pass.
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
    """Whether oneDNN multiplies this number type on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
