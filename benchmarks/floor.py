"""The floor: the least time that sampling and learning can take on this machine.

A decode step reads every weight and the KV cache once, and multiplies every weight once per row.
The larger of the two times is its floor. A training pass is bound by its matmuls alone. The memory
and matmul rates are measured on this machine in the dtype of each phase, not taken from a data
sheet. On CPUs, matmuls are timed with torch and with oneDNN; the faster
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness import timed
from rlm.model import decoder_and_head
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
    head_flops: int  # the output head's part of row_flops
    layers: int
    query_width: int  # query heads × head width
    cache_bytes_per_token: int  # KV cache of one token, all layers

    @classmethod
    def of(cls, model: PreTrainedModel | PeftModel, dtype: torch.dtype | None = None) -> ModelCost:
        """Return the costs of a model without its adapter.

        Args:
            dtype: dtype of weights and KV cache (None: the model's).
        """
        linears = [
            module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and "lora_" not in name
        ]
        (_, head), itemsize = decoder_and_head(model), (dtype or model.dtype).itemsize
        config = model.config.get_text_config()
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        return cls(
            weight_bytes=sum(m.in_features * m.out_features for m in linears) * itemsize,
            row_flops=sum(2 * m.in_features * m.out_features for m in linears),
            head_flops=2 * head.in_features * head.out_features,
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


def sampling_seconds(
    rates: Mapping[str, float],
    cost: ModelCost,
    prompts: Sequence[int],
    lengths: Sequence[Sequence[int]],
) -> float:
    """Return the least seconds of all decode steps of groups that are sampled together.

    Args:
        prompts: tokens of each group's prompt; prefill is not counted.
        lengths: tokens of each group's completions.
    """
    seconds = 0.0
    for new in range(max(map(max, lengths))):
        rows = [sum(length > new for length in group) for group in lengths]
        tokens = [prompt for prompt, count in zip(prompts, rows, strict=True) if count]
        sizes = {"prompts": len(tokens), "rows": sum(rows), "prompt_tokens": mean(tokens)}
        seconds += decode_floor(rates, cost, **sizes, new=new)["seconds"]
    return seconds


def learning_seconds(
    rates: Mapping[str, float],
    cost: ModelCost,
    adapter_weights: int,
    prompts: Sequence[int],
    lengths: Sequence[Sequence[int]],
) -> float:
    """Return the least seconds of all matmuls of a forward and backward pass over groups.

    A frozen weight takes two matmuls (output and input gradient), an adapter's weight three. A
    group's prompt is computed once. Attention takes two matmuls forward and four backward over the
    visible pairs of tokens.

    Args:
        prompts: tokens of each group's prompt.
        lengths: tokens of each group's completions. The last token of each is only predicted.
    """
    flops = 0
    for prompt, group in zip(prompts, lengths, strict=True):
        tokens = prompt + sum(length - 1 for length in group)
        flops += tokens * (2 * (cost.row_flops - cost.head_flops) + 3 * 2 * adapter_weights)
        flops += sum(group) * 2 * cost.head_flops
        pairs = prompt * (prompt + 1) // 2
        pairs += sum((length - 1) * (prompt + length / 2) for length in group)
        flops += pairs * 6 * 2 * cost.layers * cost.query_width
    return flops / rates["flops_per_second"]


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
