"""What the machine could do at best: the time below which no decode step can go.

A step reads every weight and the cache once, and multiplies every weight once for every row. The
larger of the two times is the floor. Both rates are measured, on this machine and in this number
type; nothing is taken from a data sheet. Products are torch's or oneDNN's, whichever are faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.harness import timed
from rlm.sampling import fused_linear

REPEATS = 7
BUFFER_BYTES = {"cpu": 2**29, "cuda": 2**32}  # many times the last cache
# Products to find the peak with: one of the embedded model's own, and a large square one.
PRODUCTS = {
    "cpu": ((1024, 576, 1536), (1536, 1536, 1536)),
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192)),
}


@dataclass(frozen=True)
class ModelCost:
    """What one decode step of a model does, whatever software runs it."""

    weight_bytes: int  # read once a step
    row_flops: int  # of all matrix products with weights, for one row
    layers: int
    query_width: int  # heads × width, of queries
    cache_bytes_per_token: int  # keys and values of one token, all layers

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelCost:
        """Ask a base model, before an adapter is put on it."""
        linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        config = model.config.get_text_config()
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        return cls(
            weight_bytes=sum(m.weight.numel() * m.weight.element_size() for m in linears),
            row_flops=sum(2 * m.in_features * m.out_features for m in linears),
            layers=config.num_hidden_layers,
            query_width=config.num_attention_heads * width,
            cache_bytes_per_token=2
            * config.num_hidden_layers
            * config.num_key_value_heads
            * width
            * model.dtype.itemsize,
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
    """The least seconds of a step in the middle of a batch, and what sets them.

    Args:
        prompts: different ones; the cache of a prompt is read once for all its rows.
        prompt_tokens: mean length.
        new: mean number of tokens that a row has drawn so far.
    """
    tokens_read = prompts * prompt_tokens + rows * new
    attention = 4 * cost.layers * cost.query_width * (prompt_tokens + new)  # of one row
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
    """Best of a few repetitions: a floor must not hold what disturbed the measurement."""
    buffer = torch.ones(BUFFER_BYTES[device] // 4, device=device)
    seconds = _best(buffer.sum)
    bandwidth = buffer.numel() * buffer.element_size() / seconds
    flops = 0.0
    for rows, inner, columns in PRODUCTS[device]:
        a = torch.randn(rows, inner, device=device, dtype=dtype)
        b = torch.randn(columns, inner, device=device, dtype=dtype)
        ways = [lambda a=a, b=b: torch.nn.functional.linear(a, b)]
        if device == "cpu":  # torch's fp32 is MKL's, which is slow on AMD: oneDNN's, packed, too
            ways.append(partial(fused_linear(_layer(b)), a))
        seconds = min(_best(way) for way in ways)
        flops = max(flops, 2 * rows * inner * columns / seconds)
    return {"bytes_per_second": bandwidth, "flops_per_second": flops}


def _layer(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def _best(work: Callable[[], object]) -> float:
    return min(timed(work)[0] for _ in range(REPEATS))
