"""Fused linear layers for inference: q/k/v or gate/up as one, with norm, residual and gating.

Computed by the first of three that can be had: products.c, oneDNN's packed weights, plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlm.kernels import Kernels
from rlm.model import merged_weight

# linear(x (rows, inputs)[, residual (rows, outputs)]) → (rows, outputs)
LinearFunction = Callable[..., Tensor]


class TorchOps:
    """RMS norm and rotary embedding in torch; `Kernels` has the same, compiled."""

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        """weight · x / rms(x), the quotient made in fp32; without a weight, of 1."""
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
    *layers: nn.Module, norm: nn.Module | None = None, kernels: Kernels | None = None
) -> LinearFunction:
    """Fuse linear layers of the same input into one, with the norm before them."""
    weight, bias = _merged(layers, norm)
    if _use_kernels(kernels, weight):
        return kernels.linear([weight], [bias], norm and norm.variance_epsilon)
    linear = _torch_linear(weight, bias)
    if norm is None:
        return linear
    ops = kernels or TorchOps
    return lambda x: linear(ops.rms_norm(x, None, norm.variance_epsilon))  # its weight is merged


@torch.no_grad()
def fused_gate_up(
    gate: nn.Module, up: nn.Module, norm: nn.Module, kernels: Kernels | None = None
) -> LinearFunction:
    """Fuse silu(gate(x)) · up(x), of the normalised x."""
    gate_weight, gate_bias = _merged([gate], norm)
    up_weight, up_bias = _merged([up], norm)
    epsilon = norm.variance_epsilon
    if _use_kernels(kernels, gate_weight):
        return kernels.linear([gate_weight, up_weight], [gate_bias, up_bias], epsilon)
    first, second = _torch_linear(gate_weight, gate_bias), _torch_linear(up_weight, up_bias)
    ops = kernels or TorchOps

    def multiply(x: Tensor) -> Tensor:
        unit = ops.rms_norm(x, None, epsilon)
        # (oneDNN's own SiLU tail is slower than this extra pass.)
        return second.times(unit, F.silu(first(unit), inplace=True))

    return multiply


def _merged(layers: Sequence[nn.Module], norm: nn.Module | None) -> tuple[Tensor, Tensor | None]:
    """Weight (outputs of all, inputs), adapters added and the norm's weight multiplied in; bias."""
    weights = [merged_weight(layer) for layer in layers]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    if norm is not None:
        weight = weight * norm.weight
    biases = [getattr(layer, "bias", None) for layer in layers]
    if all(bias is None for bias in biases):
        return weight, None
    missing = [weight.new_zeros(layer.out_features) for layer in layers]
    return weight, torch.cat(
        [zero if b is None else b for b, zero in zip(biases, missing, strict=True)]
    )


def _use_kernels(kernels: Kernels | None, weight: Tensor) -> bool:
    return kernels is not None and kernels.has_linear and weight.shape[1] % 2 == 0


def _torch_linear(weight: Tensor, bias: Tensor | None) -> _TorchLinear | _OneDNNLinear:
    return (_OneDNNLinear if _can_pack(weight) else _TorchLinear)(weight, bias)


class _TorchLinear:
    """A linear layer in torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out if residual is None else out + residual

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x) * other


class _OneDNNLinear:
    """A linear layer in oneDNN's own blocked layout, which a row-major matrix is rearranged into
    in every single product; what follows it oneDNN does to a block that is still in the cache."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            return self._with(x, residual, "add")
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self._with(x, other, "mul")

    def _with(self, x: Tensor, other: Tensor, how: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, how)


PACKED_FOR_ROWS = 64  # a hint for the layout; any number of rows may be multiplied


def _can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies this number type on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
