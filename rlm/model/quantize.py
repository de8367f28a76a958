"""Quantizes frozen base models to 4 or 8 bits with bitsandbytes, on a GPU or a CPU.

Only the linear layers of the decoder are quantized; the embeddings and the LM head are not. The
quantized weights are never changed: an adapter is computed separately, and merging an adapter
dequantizes a copy of the weights.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, cast

from rlm.cli import UsageError

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn.modules import Linear4bit
    from torch import nn
    from transformers import BitsAndBytesConfig, PreTrainedModel

QUANTIZATIONS = ("none", "4bit", "8bit")


def import_bitsandbytes() -> None:
    """Import bitsandbytes before another library does, and hide the package `kernels` from it.

    On CPUs with AVX512-BF16, the import of bitsandbytes would download compiled code from the hub
    if `kernels` is installed, and would print a warning otherwise. Nothing here uses that code.
    """
    if "bitsandbytes" in sys.modules:
        return
    # The second logger warns that 8-bit matmuls cast their input to fp16.
    for name in ("backends.cpu.ops", "autograd._functions"):
        logging.getLogger(f"bitsandbytes.{name}").setLevel(logging.ERROR)
    kernels = sys.modules.pop("kernels", None)
    sys.modules["kernels"] = None  # type: ignore[assignment]  # makes importing it fail
    try:
        import bitsandbytes  # noqa: F401
    finally:
        del sys.modules["kernels"]
        if kernels is not None:
            sys.modules["kernels"] = kernels


def quantization_config(quantize: str, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """Return the config with which transformers quantizes loaded weights; None for "none".

    Args:
        dtype: the dtype of 4-bit matmuls.
    """
    from transformers import BitsAndBytesConfig

    if quantize == "4bit":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return BitsAndBytesConfig(load_in_8bit=True) if quantize == "8bit" else None


def freeze_packed_weights(model: PreTrainedModel) -> None:
    """Prevent forward passes from rewriting quantized weights, and set their dequantized dtype.

    On CPUs with AVX512-BF16, bitsandbytes rearranges the 4-bit weights of a layer in eval mode, in
    place, for a matmul that has no backward pass. We train in eval mode (without dropout).

    Raises:
        UsageError: 8-bit matmuls are wrong on this CPU, or the rows of 4-bit weights on a CPU do
            not consist of whole blocks. On CPUs with AVX-512, bitsandbytes 0.50 silently
            dequantizes such rows wrongly, with an error of 40 % of their norm.
    """
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    is_8bit = any(isinstance(module, Linear8bitLt) for module in model.modules())
    if is_8bit and model.device.type == "cpu" and not multiplies_int8_exactly():
        raise UsageError(
            "torch multiplies 8-bit integers wrongly on this CPU (it has no VNNI instructions, or "
            "ONEDNN_MAX_CPU_ISA forbids them): use --quantize 4bit or none"
        )

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
            width, block = module.in_features, _quant_state(module).blocksize
            assert block  # set when the layer was quantized
            if width % block and module.weight.device.type == "cpu":
                raise UsageError(
                    f"bitsandbytes dequantizes 4-bit rows of {width} weights wrongly on a CPU, as "
                    f"{width} is not a multiple of {block}: use --quantize 8bit or none"
                )
        if isinstance(module, Linear4bit | Linear8bitLt):
            module.compute_dtype = model.dtype  # pyright: ignore[reportArgumentType]  # torch's stub


def _quant_state(linear: Linear4bit) -> QuantState:
    from bitsandbytes.nn.modules import Params4bit

    assert isinstance(linear.weight, Params4bit)
    assert linear.weight.quant_state  # set when the layer was loaded
    return linear.weight.quant_state


def multiplies_int8_exactly() -> bool:
    """Return whether torch's 8-bit matmul, which bitsandbytes calls, is exact on this CPU.

    Without VNNI, oneDNN sums pairs of products in 16 bits, and these sums overflow silently (torch
    2.13).
    """
    import torch

    largest = torch.full((32, 64), 127, dtype=torch.int8)
    product = torch.ops.aten._int_mm(largest, largest.t().contiguous())
    return bool((product == 64 * 127 * 127).all())


def dequantized_weight(linear: nn.Module) -> torch.Tensor:
    """Return a linear layer's weight (out, in); a quantized one is dequantized as in its matmul."""
    from bitsandbytes import functional
    from bitsandbytes.nn.modules import Int8Params, Linear4bit, Linear8bitLt

    weight = cast("nn.Linear", linear).weight
    if isinstance(linear, Linear4bit):
        state = _quant_state(linear)
        return functional.dequantize_4bit(weight.data, state).to(linear.compute_dtype)
    if isinstance(linear, Linear8bitLt):
        assert isinstance(weight, Int8Params)
        # The forward pass moves SCB from the weight to the state.
        scales = weight.SCB if linear.state.SCB is None else linear.state.SCB
        return functional.int8_vectorwise_dequant(weight.data, scales).to(linear.compute_dtype)
    return weight.detach()
