"""Graphs of two agents per second: a step's graphs all at once, against one graph at a time.

    python -m recipes.orchestrator.benchmark --json docs/results/graphs.json
    python -m recipes.orchestrator.benchmark --adapter weights/final_rlm_lora --graphs 16

The same graphs, problems and frozen model in both; nothing is cached between runs, and neither pays
for merging the weights.
"""

from __future__ import annotations

import os
import random
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from recipes.orchestrator.agents import LocalAgents
from recipes.orchestrator.cold_start import random_graph
from recipes.orchestrator.runner import Runner
from rlm.cli import check_values, flag, run_main, terminal
from rlm.data import load_problems
from rlm.model import (
    EMBEDDED_MODEL,
    load_adapter,
    load_base,
    load_tokenizer,
    pick_device,
    prepare_process,
)
from rlm.runs import git_commit, replace_json
from rlm.sampling import Sampler


@dataclass
class BenchmarkConfig:
    model: str = flag(EMBEDDED_MODEL, "behind all agents")
    adapter: Path | None = flag(None, "that they use; without one they rarely end by themselves")
    graphs: int = flag(32, "in a step, each with prompts and a problem of its own", min=1)
    max_new_tokens: int = flag(64, "of each agent", min=1)
    repeats: int = flag(3, "measured repetitions, after one to warm up", min=1)
    json: Path | None = flag(None, "file for the report")

    def __post_init__(self) -> None:
        check_values(self)


def measure(config: BenchmarkConfig, agents: LocalAgents) -> dict[str, Any]:
    """Graphs per second of both ways, in turns; the repetition before the first is a warm-up."""
    count = config.graphs
    problems = load_problems(
        "word-problems:1", "train", max_samples=count * (config.repeats + 1), seed=0
    )
    runs: dict[str, list[float]] = {"all at once": [], "one at a time": []}
    for repetition in range(config.repeats + 1):
        asked = problems[repetition * count :][:count]
        rng = random.Random(repetition)
        graphs = [random_graph(rng) for _ in asked]
        for way, at_once in zip(runs, (count, 1), strict=True):
            runner = Runner(agents, config.max_new_tokens)  # with nothing cached
            started = time.monotonic()
            for i in range(0, count, at_once):
                runner.run(asked[i : i + at_once], graphs[i : i + at_once])
            if repetition:
                runs[way].append(count / (time.monotonic() - started))
    ratios = [a / b for a, b in zip(*runs.values(), strict=True)]
    together, alone = map(median, runs.values())
    return {
        "graphs": count,
        "graphs_per_second": runs,
        "ratio": together / alone,  # of the medians
        "ratio_range": [min(ratios), max(ratios)],
        "command": shlex.join(["python", "-m", "recipes.orchestrator.benchmark", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {pick_device()}",
        "commit": git_commit(),
    }


def main(config: BenchmarkConfig) -> None:
    prepare_process()
    model = load_base(config.model, pick_device())
    if config.adapter:
        model = load_adapter(model, config.adapter, trainable=False)
    tokenizer = load_tokenizer(config.model)
    # As in training, where the weights are merged once a step: kept from batch to batch here,
    # so that one at a time does not pay for it every time.
    agents = LocalAgents(Sampler(model, tokenizer), tokenizer)
    agents.release = lambda: None
    report = measure(config, agents)
    low, high = report["ratio_range"]
    terminal.line(f"{config.graphs} graphs at once: {report['ratio']:.1f} × ({low:.1f}–{high:.1f})")
    if config.json:
        replace_json(config.json, report)
        terminal.line(f"written: {config.json}")


if __name__ == "__main__":
    run_main(main, BenchmarkConfig, description=__doc__)
