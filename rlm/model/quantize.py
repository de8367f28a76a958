"""Quantizes frozen bases to 4 or 8 bits (bitsandbytes), on a GPU or a CPU.

Only the linear layers of the stack are packed; embeddings and head stay as they are. The packed
weights are never written: adapters stay beside them, and what wants merged weights unpacks a copy.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from rlm.cli import UsageError

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig, PreTrainedModel

QUANTIZATIONS = ("none", "4bit", "8bit")


def import_bitsandbytes() -> None:
    """Import bitsandbytes, before another library does, without its search for `kernels`.

    On CPUs with AVX512-BF16 the import would download compiled code from the hub if the package
    `kernels` is installed, and complain if it is not. Nothing here uses that code.
    """
    if "bitsandbytes" in sys.modules:
        return
    for name in ("backends.cpu.ops", "autograd._functions"):  # the other: 8 bit casts to fp16
        logging.getLogger(f"bitsandbytes.{name}").setLevel(logging.ERROR)
    kernels = sys.modules.pop("kernels", None)
    sys.modules["kernels"] = None  # type: ignore[assignment]  # "not installed", to an import
    try:
        import bitsandbytes  # noqa: F401
    finally:
        del sys.modules["kernels"]
        if kernels is not None:
            sys.modules["kernels"] = kernels


def quantization_config(quantize: str, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """Make transformers' settings that quantize weights as they are loaded; None for "none".

    Args:
        dtype: in which products are computed; 8-bit products keep outliers in it.
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
    """Keep forward passes from rewriting packed weights, and tell layers what to unpack to.

    On CPUs with AVX512-BF16, bitsandbytes rearranges 4-bit weights in place for a product that has
    no backward pass, whenever a layer is in eval mode. We train in eval mode (no dropout).
    """
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
        if isinstance(module, Linear4bit | Linear8bitLt):
            module.compute_dtype = model.dtype


def check_dequantization(model: PreTrainedModel) -> None:
    """Check that 4-bit weights of these widths come out of their packing as they went in.

    bitsandbytes 0.50 scales them wrongly (by 40 % of their norm, silently) on CPUs with AVX-512,
    where a row is not a whole number of blocks.

    Raises:
        UsageError: this machine's code for them is wrong.
    """
    import torch
    from bitsandbytes import functional
    from bitsandbytes.nn import Linear4bit

    layers = [m for m in model.modules() if isinstance(m, Linear4bit)]
    shapes = {(m.in_features, m.weight.quant_state.blocksize, m.weight.device) for m in layers}
    for width, block, device in shapes:
        if width % block == 0:
            continue
        exact = torch.linspace(-1, 1, 4 * width, device=device).view(4, width)
        packed, state = functional.quantize_4bit(exact, blocksize=block, quant_type="nf4")
        error = (functional.dequantize_4bit(packed, state) - exact).norm() / exact.norm()
        if error > 0.2:  # 4 bits are worth about 0.1
            raise UsageError(
                f"bitsandbytes unpacks 4-bit rows of {width} weights wrongly on this machine "
                f"(they are no multiple of {block}): use --quantize 8bit or none"
            )


def dequantized_weight(linear: torch.nn.Module) -> torch.Tensor:
    """The weight of a linear layer, (out, in), unpacked as it multiplies; itself if not packed."""
    from bitsandbytes import functional
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    weight = linear.weight
    if isinstance(linear, Linear4bit):
        return functional.dequantize_4bit(weight.data, weight.quant_state).to(linear.compute_dtype)
    if isinstance(linear, Linear8bitLt):
        scales = weight.SCB if linear.state.SCB is None else linear.state.SCB  # a forward moves it
        return functional.int8_vectorwise_dequant(weight.data, scales).to(linear.compute_dtype)
    return weight.detach()
