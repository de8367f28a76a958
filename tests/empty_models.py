"""Models of any size that take no memory, because their weights are pages that were never written.

The numbers that a memory plan uses (the bytes of the weights, of the adapter and of saved
activations) equal those of the real model. The output of the model is meaningless.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

SMALL = 2**20  # tensors with fewer numbers are set to zero


def empty_model(
    config: PretrainedConfig, dtype: torch.dtype, device: str, quantize: str = "none"
) -> PreTrainedModel:
    """Make a frozen model in eval mode whose large weights are unset, quantized on request."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    layers = model.get_decoder().layers
    if quantize == "4bit":
        _pack(layers, dtype, device)
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False)]:
            if tensor.is_meta:
                filled = nn.Parameter(_empty(tensor, device), requires_grad=False)
                setattr(module, name, filled)
        for name, tensor in [*module.named_buffers(recurse=False)]:
            module.register_buffer(name, _empty(tensor, device), persistent=False)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def _empty(tensor: torch.Tensor, device: str) -> torch.Tensor:
    new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return new.zero_() if new.numel() < SMALL else new


def _pack(layers: nn.Module, dtype: torch.dtype, device: str) -> None:
    """Replace linear layers by 4-bit layers.

    Only one layer of each shape is quantized; the others get tensors of the same sizes.
    """
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit

    packed = {}
    for parent in [*layers.modules()]:
        for name, linear in [*parent.named_children()]:
            if not isinstance(linear, nn.Linear):
                continue
            shape, has_bias = (linear.out_features, linear.in_features), linear.bias is not None
            if shape not in packed:
                zeros = torch.zeros(shape, dtype=dtype, device=device)
                options = {"quant_type": "nf4", "compress_statistics": True}
                packed[shape] = quantize_4bit(zeros, **options)
            data, state = packed[shape]
            own = copy(state)
            own.absmax = torch.zeros_like(state.absmax)
            new = Linear4bit(*reversed(shape), bias=has_bias, compute_dtype=dtype, device="meta")
            new.weight = Params4bit(
                torch.empty_like(data), requires_grad=False, quant_state=own, quant_type="nf4",
                bnb_quantized=True, module=new,
            )  # fmt: skip
            new.support_avx512bf16_for_cpu = False
            setattr(parent, name, new)
