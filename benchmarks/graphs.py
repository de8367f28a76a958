"""Graphs of two agents per second: all of a step level by level, against one graph at a time.

python -m benchmarks.graphs --json docs/results/graphs.json
python -m benchmarks.graphs --adapter weights/final_rlm_lora --graphs 16 --repeats 5
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from recipes.orchestrator.agents import LocalAgents
from recipes.orchestrator.cold_start import random_graph
from recipes.orchestrator.graph import Graph
from recipes.orchestrator.runner import Runner
from rlm.cli.main import run_main
from rlm.cli.options import check_values, flag
from rlm.data.loaders import load_problems
from rlm.model import adapters
from rlm.model import base as models
from rlm.model import hardware as machine
from rlm.sampling import Sampler


@dataclass
class GraphsConfig:
    model: str = flag(machine.EMBEDDED_MODEL, "behind all agents")
    adapter: Path | None = flag(None, "that they wear; without one they rarely end by themselves")
    graphs: int = flag(32, "in a step, each with prompts and a problem of its own", min=1)
    max_new_tokens: int = flag(64, "of each agent", min=1)
    repeats: int = flag(3, "measured repetitions, after one to warm up", min=1)
    json: Path | None = flag(None, "file for the report")

    def __post_init__(self) -> None:
        check_values(self)


def measure(config: GraphsConfig, agents: LocalAgents) -> dict[str, Any]:
    count = config.graphs
    problems = load_problems(
        "word-problems:1", "train", max_samples=count * (config.repeats + 1), seed=0
    )

    def arm(at_once: int) -> Callable[[int], float]:
        def graphs_per_second(repetition: int) -> float:
            tried = problems[repetition * count :][:count]
            rng = random.Random(repetition)
            graphs: list[Graph] = [random_graph(rng) for _ in tried]
            runner = Runner(agents, config.max_new_tokens)  # with nothing cached
            started = time.monotonic()
            for i in range(0, count, at_once):
                runner.run(tried[i : i + at_once], graphs[i : i + at_once])
            return count / (time.monotonic() - started)

        return graphs_per_second

    runs = harness.alternate({harness.OURS: arm(count), "one at a time": arm(1)}, config.repeats)
    cell = harness.cell(f"{count} graphs", "graphs/s", runs, more_is_better=True)
    harness.show("level by level", [cell])
    return harness.report("graphs", cell, [cell], {})


def main(config: GraphsConfig) -> int:
    machine.prepare_process()
    model = models.load_base(config.model, machine.pick_device())
    if config.adapter:
        model = adapters.load_adapter(model, config.adapter, trainable=False)
    tokenizer = models.load_tokenizer(config.model)
    # As in training, where the weights are merged once a step: kept from batch to batch here,
    # so that the one-at-a-time arm does not pay for it every time.
    agents = LocalAgents(Sampler(model, tokenizer), tokenizer)
    agents.release = lambda: None
    harness.write_json(config.json, measure(config, agents))
    return 0


if __name__ == "__main__":
    run_main(main, GraphsConfig, description=__doc__)
