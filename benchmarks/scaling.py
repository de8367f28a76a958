"""How the cost of our GRPO step grows with group size, completion length and model size.

One of the three varies at a time, ends are ignored and every group has signal, so that a cell is a
known amount of work. The exponent is the slope of log seconds against log size: 1 is growth in
proportion. `python -m benchmarks.grpo_step --scaling` runs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import linear_regression
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import harness, shapes
from benchmarks.trainers import Work, run_work
from rlm.cli import terminal
from rlm.evaluation import show_table
from rlm.model import EMBEDDED_MODEL, model_directory

PARTS = ("total", "sample", "learn")
GROUP_SIZES, LENGTHS = (4, 8, 16), (64, 128, 256)
MODELS = (EMBEDDED_MODEL, "random:smollm2-360m", "random:qwen2.5-0.5b")


def axes_of(work: Work) -> dict[str, list[tuple[float, str, Work]]]:
    """For each thing that varies: size, name and work of its cells."""
    return {
        "group size": [(n, str(n), replace(work, group_size=n)) for n in GROUP_SIZES],
        "length": [(n, str(n), replace(work, max_new_tokens=n)) for n in LENGTHS],
        "model size": [(parameters(m), m, replace(work, model=m, adapter=None)) for m in MODELS],
    }


def parameters(model: str) -> int:
    """How many weights a model has, without loading them."""
    if model.startswith(shapes.PREFIX):
        config = shapes.config_of(model.removeprefix(shapes.PREFIX))
    else:
        config = AutoConfig.from_pretrained(model_directory(model))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of log seconds against log size.

    >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    return linear_regression([math.log(x) for x in sizes], [math.log(y) for y in seconds]).slope


def run_cell(work: Work) -> dict[str, Any]:
    """One cell in a process of its own."""
    with shapes.model_at(work.model) as model:
        result = run_work(replace(work, model=model))
    steps = result["steps"][1:]
    short = {int(work.max_new_tokens - step["length_mean"]) for step in steps} - {0}
    if short:
        raise RuntimeError(f"completions ended early although ends were to be ignored: {short}")
    return {
        "parts": {part: harness.summary([step[part] for step in steps]) for part in PARTS},
        "peak_memory_gb": result["peak_memory_gb"],
        "planned_memory_gb": result["planned_memory_gb"],
    }


def measure_growth(work: Work) -> dict[str, Any]:
    """All cells of the three axes; the report."""
    cells, exponents, rows = [], {}, {}
    for axis, points in axes_of(work).items():
        found = []
        for size, name, varied in points:
            found.append({"axis": axis, "name": name, "size": size, **run_cell(varied)})
            parts, plan = found[-1]["parts"], found[-1]["planned_memory_gb"]
            rows[f"{axis} {name}"] = {f"{p}, s": f"{parts[p]['median']:.2f}" for p in PARTS} | {
                "peak memory, GB": f"{found[-1]['peak_memory_gb']:.2f}",
                "planned, GB": f"{plan:.2f}",
            }
            terminal.line(f"{axis} {name}: {parts['total']['median']:.2f} s")
        sizes = [cell["size"] for cell in found]
        exponents[axis] = {
            part: exponent(sizes, [cell["parts"][part]["median"] for cell in found])
            for part in PARTS
        }
        cells += found
    show_table("", rows, "a step grows to")
    show_table("", {a: {p: f"{s[p]:.2f}" for p in PARTS} for a, s in exponents.items()}, "exponent")
    report = {"benchmark": "scaling", "exponents": exponents, "cells": cells}
    return report | harness.provenance("grpo_step")
