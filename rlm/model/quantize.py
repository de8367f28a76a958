"""Quantizes frozen bases to 4 or 8 bits (bitsandbytes), on a GPU or a CPU.

Only the linear layers of the stack are packed; embeddings and head stay as they are. The packed
weights are never changed: adapters stay beside them, and merging unpacks a copy.
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
    """Import bitsandbytes, before another library does, without its search for `kernels`.

    On CPUs with AVX512-BF16 the import would download compiled code from the hub if the package
    `kernels` is installed, and warn if it is not. Nothing here uses that code.
    """
    if "bitsandbytes" in sys.modules:
        return
    for name in ("backends.cpu.ops", "autograd._functions"):  # the second: 8 bit casts to fp16
        logging.getLogger(f"bitsandbytes.{name}").setLevel(logging.ERROR)
    kernels = sys.modules.pop("kernels", None)
    sys.modules["kernels"] = None  # type: ignore[assignment]  # makes its import fail
    try:
        import bitsandbytes  # noqa: F401
    finally:
        del sys.modules["kernels"]
        if kernels is not None:
            sys.modules["kernels"] = kernels


def quantization_config(quantize: str, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """Make transformers' settings that quantize weights as they are loaded; None for "none".

    Args:
        dtype: dtype of the matmuls; 8-bit matmuls keep outliers in it.
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
    """Keep forward passes from rewriting packed weights, and set the dtype that layers unpack to.

    On CPUs with AVX512-BF16, bitsandbytes rearranges 4-bit weights in place for a matmul that has
    no backward pass, whenever a layer is in eval mode. We train in eval mode (no dropout).

    Raises:
        UsageError: 4-bit rows are not whole blocks, which bitsandbytes 0.50 unpacks wrongly on CPUs
            with AVX-512 (silently, by 40 % of their norm), or 8-bit matmuls are wrong on this CPU.
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
            assert block  # set when it was packed
            if width % block and module.weight.device.type == "cpu":
                raise UsageError(
                    f"bitsandbytes unpacks 4-bit rows of {width} weights wrongly on a CPU (they "
                    f"are no multiple of {block}): use --quantize 8bit or none"
                )
        if isinstance(module, Linear4bit | Linear8bitLt):
            module.compute_dtype = model.dtype  # pyright: ignore[reportArgumentType]  # torch's stub


def _quant_state(linear: Linear4bit) -> QuantState:
    from bitsandbytes.nn.modules import Params4bit

    assert isinstance(linear.weight, Params4bit)
    assert linear.weight.quant_state  # set when it was loaded
    return linear.weight.quant_state


def multiplies_int8_exactly() -> bool:
    """Return whether torch's 8-bit matmul, which bitsandbytes calls, is exact on this CPU.

    Without VNNI, oneDNN adds pairs of products in 16 bits, which overflow silently (torch 2.13).
    """
    import torch

    largest = torch.full((32, 64), 127, dtype=torch.int8)
    product = torch.ops.aten._int_mm(largest, largest.t().contiguous())
    return bool((product == 64 * 127 * 127).all())


def dequantized_weight(linear: nn.Module) -> torch.Tensor:
    """Return a linear layer's weight (out, in), unpacked as in its matmul if it is packed."""
    from bitsandbytes import functional
    from bitsandbytes.nn.modules import Int8Params, Linear4bit, Linear8bitLt

    weight = cast("nn.Linear", linear).weight
    if isinstance(linear, Linear4bit):
        state = _quant_state(linear)
        return functional.dequantize_4bit(weight.data, state).to(linear.compute_dtype)
    if isinstance(linear, Linear8bitLt):
        assert isinstance(weight, Int8Params)
        scales = weight.SCB if linear.state.SCB is None else linear.state.SCB  # forward moves SCB
        return functional.int8_vectorwise_dequant(weight.data, scales).to(linear.compute_dtype)
    return weight.detach()
