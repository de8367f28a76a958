"""How the cost of a step grows: seconds and peak memory against group size, length, model size.

Ours only. One of the three varies at a time, ends are ignored and every group has signal, so that
a cell is a known amount of work. The exponent is the slope of log seconds against log size: 1 is
growth in proportion.

    python -m benchmarks.scaling --json docs/results/scaling.json
    python -m benchmarks.scaling --groups 4,8 --new-tokens 64,128 --models none
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import harness, shapes
from benchmarks.trainers import StepConfig, Work, run_work
from rlm.cli import flag, run_main, terminal
from rlm.model import EMBEDDED_MODEL, model_directory, prepare_process

PARTS = ("total", "sample", "learn")


@dataclass
class ScalingConfig(StepConfig):
    batch_size: int = flag(4, "problems in a step", aliases=("--prompts",), min=1)
    max_new_tokens: int = flag(128, "where the length does not vary", aliases=("--length",), min=1)
    groups: tuple[int, ...] | None = flag((4, 8, 16, 32), "group sizes, or none", min=2)
    new_tokens: tuple[int, ...] | None = flag(
        (64, 128, 256, 512), "completion lengths, or none", min=1
    )
    models: tuple[str, ...] | None = flag(
        (EMBEDDED_MODEL, "random:smollm2-360m", "random:qwen2.5-0.5b"),
        "models of growing size, or none",
    )
    steps: int = flag(2, "measured steps of a cell, after one to warm up", min=1)


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


def axes_of(config: ScalingConfig) -> dict[str, list[tuple[float, str, Work]]]:
    """For each thing that varies: size, name and work of its cells."""
    base = config.work(config.model, steps=1 + config.steps, reward="all", ignore_ends=True)
    return {
        "group size": [(n, str(n), replace(base, group_size=n)) for n in config.groups or ()],
        "length": [(n, str(n), replace(base, max_new_tokens=n)) for n in config.new_tokens or ()],
        "model size": [
            (parameters(m), m, replace(base, model=m, adapter=None)) for m in config.models or ()
        ],
    }


def measure(config: ScalingConfig) -> dict[str, Any]:
    cells, exponents = [], {}
    for axis, points in axes_of(config).items():
        found = []
        for size, name, work in points:
            found.append({"axis": axis, "name": name, "size": size, **run_cell(work)})
            terminal.line(f"{axis} {name}: {found[-1]['parts']['total']['median']:.2f} s")
        if len(found) > 1:
            sizes = [cell["size"] for cell in found]
            exponents[axis] = {
                part: exponent(sizes, [cell["parts"][part]["median"] for cell in found])
                for part in PARTS
            }
        cells += found
    show(cells, exponents)
    report = {"benchmark": "scaling", "exponents": exponents, "cells": cells}
    return report | harness.provenance("scaling")


def show(cells: Sequence[dict[str, Any]], exponents: dict[str, dict[str, float]]) -> None:
    rows = []
    for cell in cells:
        plan, peak = cell["planned_memory_gb"], cell["peak_memory_gb"]
        seconds = [f"{cell['parts'][part]['median']:.2f}" for part in PARTS]
        used = "" if plan is None else f"{plan:.2f} ({peak / plan:.0%} used)"
        rows.append([cell["axis"], cell["name"], *seconds, f"{peak:.2f}", used])
    heads = ["grows", "to", "s/step", "sampling", "learning", "peak memory, GB", "planned"]
    harness.print_table(heads, rows)
    for axis, slopes in exponents.items():
        parts = ", ".join(f"{part} {slope:.2f}" for part, slope in slopes.items())
        terminal.line(f"exponent in {axis}: {parts}")


def main(config: ScalingConfig) -> int:
    prepare_process()
    harness.write_json(config.json, measure(config))
    return 0


if __name__ == "__main__":
    run_main(main, ScalingConfig, description=__doc__)
