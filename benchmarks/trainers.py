"""Runs our trainer for `grpo_step`, with the problems and the reward that TRL's trainer also gets.

Each trainer runs in its own process (`harness.run_child`), so that its peak memory can be measured.
Both get a `GRPOConfig`, from which TRL's options are derived.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from rlm import GRPOTrainer
from rlm.cli import required
from rlm.data import Problem, load_problems
from rlm.sampling import Sampler
from rlm.training import Group, GRPOConfig, TrainingRun


def problem_pool(config: GRPOConfig) -> list[Problem]:
    """Return the problems from which both trainers take those of each step."""
    dataset = required(config.dataset, "--dataset")
    return load_problems(dataset, "train", max_samples=2000, seed=config.seed)


@contextmanager
def in_scratch(config: Mapping[str, Any]) -> Iterator[GRPOConfig]:
    """Yield the config with a temporary folder for run_dir and output."""
    with tempfile.TemporaryDirectory() as folder:
        places = {"run_dir": Path(folder) / "run", "output": Path(folder) / "adapter"}
        yield GRPOConfig(**{**config, **places})


@dataclass
class ScriptedReward:
    """A reward that alternates between 1 and 0 in all groups or in every second group.

    In the other groups, the reward is 0. Both trainers call the reward exactly once per step, so
    the time between two calls is an independent measure of a step.
    """

    kind: str  # the share of the groups whose rewards differ: "half" or "all"
    group_size: int
    calls: list[float] = field(default_factory=list)  # times of the calls

    @property
    def every(self) -> int:
        """The number n for which the rewards of every n-th group differ."""
        return {"half": 2, "all": 1}[self.kind]

    def score(self, completions: Sequence[str], **_: Any) -> list[float]:
        self.calls.append(time.monotonic())
        size = self.group_size
        return [
            float(row // size % self.every == 0 and row % size % 2 == 0)
            for row in range(len(completions))
        ]

    def result(self, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the steps with their total seconds, and the seconds between two calls."""
        totals = [step["sample"] + step["score"] + step["learn"] for step in steps]
        return {
            "steps": [{**s, "total": total} for s, total in zip(steps, totals, strict=True)],
            "between_calls": [after - before for before, after in pairwise(self.calls)],
        }


class MeasuredTrainer(GRPOTrainer):
    """A trainer that records each step's seconds and mean length, and the planned memory."""

    def __init__(self, config: GRPOConfig, reward: Callable[..., list[float]]) -> None:
        super().__init__(required(config.model, "--model"), config, reward_fn=reward)
        self.steps: list[dict[str, float]] = []
        self.planned_memory_gb = 0.0  # reported beside the measured peak

    def log(
        self,
        run: TrainingRun,
        metrics: dict[str, float],
        groups: Sequence[Group],
        advantages: Tensor,
    ) -> None:
        super().log(run, metrics, groups, advantages)
        seconds = {name: metrics[f"time/{name}"] for name in ("sample", "score", "learn")}
        self.steps.append(seconds | {"length_mean": metrics["completion/length_mean"]})
        self.planned_memory_gb = run.memory_plan.peak / 2**30


def run_ours(config: Mapping[str, Any], signal: str, ignore_ends: bool = False) -> dict[str, Any]:
    """Train with `config`, and return the seconds of each step; the first step is the warmup.

    If end tokens are ignored, every completion has `max_new_tokens` tokens.
    """
    with in_scratch(config) as options:
        reward = ScriptedReward(signal, options.group_size)
        trainer = MeasuredTrainer(options, reward.score)
        if ignore_ends:
            assert isinstance(trainer.sampler, Sampler)  # the config names no server
            trainer.sampler.stop_ids = frozenset()
        trainer.train(problem_pool(options))
    return reward.result(trainer.steps) | {"planned_memory_gb": trainer.planned_memory_gb}
