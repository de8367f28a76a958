"""The floor: the least time that a decode step can take on this machine.

A decode step reads every weight and the KV cache once, and multiplies every weight once per row.
The larger of the two times is its floor. The memory and matmul rates are measured on this machine,
not taken from a data sheet. On CPUs, matmuls are timed with torch and with oneDNN; the faster
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness import timed
from rlm.ops import TorchOps
from rlm.sampling import fused_linear

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

REPEATS = 7
BUFFER_BYTES = {"cpu": 2**29, "cuda": 2**32}  # many times the last-level cache
# (rows, inner, columns) of matmuls; the best rate is the peak. The first for CPUs is one of the
# embedded model's.
PRODUCTS = {
    "cpu": ((1024, 576, 1536), (1536, 1536, 1536)),
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192)),
}


@dataclass(frozen=True)
class ModelCost:
    """The work of a model's decode step, independent of software."""

    weight_bytes: int  # read once per step
    row_flops: int  # all matmuls with weights, for one row
    layers: int
    query_width: int  # query heads × head width
    cache_bytes_per_token: int  # KV cache of one token, all layers

    @classmethod
    def of(cls, model: PreTrainedModel | PeftModel) -> ModelCost:
        """Return the costs of a model without its adapter."""
        linears = [
            module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and "lora_" not in name
        ]
        config, itemsize = model.config.get_text_config(), model.dtype.itemsize
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        return cls(
            weight_bytes=sum(m.in_features * m.out_features for m in linears) * itemsize,
            row_flops=sum(2 * m.in_features * m.out_features for m in linears),
            layers=config.num_hidden_layers,
            query_width=config.num_attention_heads * width,
            cache_bytes_per_token=2
            * config.num_hidden_layers
            * config.num_key_value_heads
            * width
            * itemsize,
        )


def decode_floor(
    rates: Mapping[str, float],
    cost: ModelCost,
    *,
    prompts: int,
    rows: int,
    prompt_tokens: float,
    new: float,
) -> dict[str, Any]:
    """Return the least seconds of a decode step, and what limits them.

    Args:
        prompts: the number of distinct prompts; the KV cache of each is read once for its rows.
        prompt_tokens: mean length of the prompts.
        new: mean number of tokens generated so far per row.
    """
    tokens_read = prompts * prompt_tokens + rows * new
    attention = 4 * cost.layers * cost.query_width * (prompt_tokens + new)  # for one row
    bytes_read = cost.weight_bytes + tokens_read * cost.cache_bytes_per_token
    memory = bytes_read / rates["bytes_per_second"]
    arithmetic = rows * (cost.row_flops + attention) / rates["flops_per_second"]
    return {
        "seconds": max(memory, arithmetic),
        "memory_seconds": memory,
        "arithmetic_seconds": arithmetic,
        "bound": "memory" if memory >= arithmetic else "arithmetic",
    }


def measure(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Measure memory and matmul rates: the best of a few repetitions, to exclude disturbances."""
    buffer = torch.ones(BUFFER_BYTES[device] // 4, device=device)
    seconds = _best(buffer.sum)
    bandwidth = buffer.numel() * buffer.element_size() / seconds
    flops = 0.0
    for rows, inner, columns in PRODUCTS[device]:
        a = torch.randn(rows, inner, device=device, dtype=dtype)
        b = torch.randn(columns, inner, device=device, dtype=dtype)
        ways = [lambda a=a, b=b: torch.nn.functional.linear(a, b)]
        if device == "cpu":  # torch's fp32 is MKL, slow on AMD: try packed oneDNN too
            ways.append(partial(fused_linear(_layer(b), ops=TorchOps()), a))
        seconds = min(_best(way) for way in ways)
        flops = max(flops, 2 * rows * inner * columns / seconds)
    return {"bytes_per_second": bandwidth, "flops_per_second": flops}


def _layer(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def _best(work: Callable[[], object]) -> float:
    return min(timed(work)[0] for _ in range(REPEATS))
