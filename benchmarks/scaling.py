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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import linear_regression
from typing import Any

from benchmarks import harness, shapes
from benchmarks.arms import Work
from rlm.cli import terminal
from rlm.cli.main import run_main
from rlm.cli.options import check_values, flag
from rlm.model import hardware as machine


@dataclass
class ScalingConfig:
    groups: tuple[int, ...] | None = flag((4, 8, 16, 32), "group sizes, or none", min=2)
    new_tokens: tuple[int, ...] | None = flag(
        (64, 128, 256, 512), "completion lengths, or none", min=1
    )
    models: tuple[str, ...] | None = flag(
        (machine.EMBEDDED_MODEL, "random:smollm2-360m", "random:qwen2.5-0.5b"),
        "models of growing size, or none",
    )
    prompts: int = flag(4, "problems in a step", min=1)
    group_size: int = flag(8, "where the group size does not vary", min=2)
    length: int = flag(128, "where the length does not vary", min=1)
    dataset: str = flag("word-problems:1", "where the prompts come from")
    steps: int = flag(2, "measured steps of a cell, after one to warm up", min=1)
    seed: int = flag(0, "of problems and sampling")
    json: Path | None = flag(None, "file for the report")

    def __post_init__(self) -> None:
        check_values(self)


def run_cell(work: Work) -> dict[str, Any]:
    """One cell in a process of its own."""
    with shapes.model_at(work.model) as model:
        payload = asdict(replace(work, model=model))
        result = harness.run_child("benchmarks.arms", "run_ours", payload)
    steps = result["steps"][1:]
    short = {int(work.max_new_tokens - step["length_mean"]) for step in steps} - {0}
    if short:
        raise RuntimeError(f"completions ended early although ends were to be ignored: {short}")
    return {
        "parts": {
            part: harness.summary([step[part] for step in steps])
            for part in ("sample", "learn", "total")
        },
        "peak_memory_gb": result["peak_memory_gb"],
        "planned_memory_gb": result["planned_memory_gb"],
    }


def parameters(model: str) -> int:
    """How many weights a model has, without loading them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlm.model.base import model_directory

    if model.startswith(shapes.PREFIX):
        config_class, values = shapes.SHAPES[model.removeprefix(shapes.PREFIX)]
        config = config_class(**values)
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
    base = Work(
        model=machine.EMBEDDED_MODEL,
        adapter=None,
        dataset=config.dataset,
        prompts=config.prompts,
        group_size=config.group_size,
        max_new_tokens=config.length,
        steps=1 + config.steps,
        reward="all",
        ignore_ends=True,
        seed=config.seed,
    )
    return {
        "group size": [(n, str(n), replace(base, group_size=n)) for n in config.groups or ()],
        "length": [(n, str(n), replace(base, max_new_tokens=n)) for n in config.new_tokens or ()],
        "model size": [(parameters(m), m, replace(base, model=m)) for m in config.models or ()],
    }


def measure(config: ScalingConfig) -> dict[str, Any]:
    cells, exponents = [], {}
    for axis, points in axes_of(config).items():
        found = []
        for size, name, work in points:
            found.append({"axis": axis, "name": name, "size": size, **run_cell(work)})
            terminal.line(f"{axis} {name}: {found[-1]['parts']['total']['median']:.2f} s")
        if len(found) > 1:
            exponents[axis] = {
                part: exponent(
                    [c["size"] for c in found], [c["parts"][part]["median"] for c in found]
                )
                for part in ("sample", "learn", "total")
            }
        cells += found
    show(cells, exponents)
    return {
        "benchmark": "scaling",
        "exponents": exponents,
        "cells": cells,
        **harness.provenance("scaling"),
    }


def show(cells: Sequence[dict[str, Any]], exponents: dict[str, dict[str, float]]) -> None:
    def planned(cell: dict[str, Any]) -> str:
        plan = cell["planned_memory_gb"]
        return "" if plan is None else f"{plan:.2f} ({cell['peak_memory_gb'] / plan:.0%} used)"

    harness.print_table(
        ["grows", "to", "s/step", "sampling", "learning", "peak memory, GB", "planned"],
        [
            [
                cell["axis"],
                cell["name"],
                *(f"{cell['parts'][p]['median']:.2f}" for p in ("total", "sample", "learn")),
                f"{cell['peak_memory_gb']:.2f}",
                planned(cell),
            ]
            for cell in cells
        ],
    )
    for axis, slopes in exponents.items():
        parts = ", ".join(f"{part} {slope:.2f}" for part, slope in slopes.items())
        terminal.line(f"exponent in {axis}: {parts}")


def main(config: ScalingConfig) -> int:
    machine.prepare_process()
    harness.write_json(config.json, measure(config))
    return 0


if __name__ == "__main__":
    run_main(main, ScalingConfig, description=__doc__)
