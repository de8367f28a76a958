"""Our trainer as a benchmark arm, and code shared with TRL's arm (trl_arm.py).

Each runs in a process of its own (`harness.run_child`) to measure its peak memory. The task is a
`GRPOConfig`, from which TRL's options are derived.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.floor import ModelCost, learning_seconds, measure, sampling_seconds
from rlm.data import FORMATS, Problem, load_problems
from rlm.model import prepare_process
from rlm.runs import read_lines
from rlm.sampling import Completion, Sampler
from rlm.training import GRPOConfig

if TYPE_CHECKING:
    from rlm import GRPOTrainer

FORMAT = FORMATS["deepseek"]


def problem_pool(config: GRPOConfig) -> list[Problem]:
    """Return the problems of both trainers."""
    return load_problems(config.dataset, "train", max_samples=2000, seed=config.seed)


@contextmanager
def in_scratch(config: Mapping[str, Any]) -> Iterator[GRPOConfig]:
    """Make the config of a temporary run from a child process's payload."""
    with tempfile.TemporaryDirectory() as folder:
        places = {"run_dir": Path(folder) / "run", "output": Path(folder) / "adapter"}
        yield GRPOConfig(**{**config, **places})


@dataclass
class ScriptedReward:
    """A reward of alternating 1 and 0 in groups with signal and 0 in others.

    So both arms have the same share of groups with signal. Both trainers call it exactly once a
    step, so the time between calls is an independent measure of a step.
    """

    kind: str  # "half" or "all" of the groups have signal
    group_size: int
    calls: list[float] = field(default_factory=list)  # when

    @property
    def every(self) -> int:
        """Return how many groups there are for each one with signal."""
        return {"half": 2, "all": 1}[self.kind]

    def score(self, completions: Sequence[str], **_: Any) -> list[float]:
        self.calls.append(time.monotonic())
        size = self.group_size
        return [
            float(row // size % self.every == 0 and row % size % 2 == 0)
            for row in range(len(completions))
        ]

    def result(self, steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Return the result that the arm's process reports.

        Args:
            steps: for each step, the seconds of sample, score and learn, and length_mean.
        """
        totals = [step["sample"] + step["score"] + step["learn"] for step in steps]
        return {
            "steps": [{**s, "total": total} for s, total in zip(steps, totals, strict=True)],
            "between_calls": [after - before for before, after in pairwise(self.calls)],
        }


def run_ours(config: Mapping[str, Any], signal: str, ignore_ends: bool = False) -> dict[str, Any]:
    """Train with `config`; return the seconds of every step (the first is the warm-up) and the
    floors of both phases.

    Args:
        signal: the kind of scripted reward.
        ignore_ends: every completion has `max_new_tokens`.
    """
    from rlm import GRPOTrainer

    prepare_process()
    with in_scratch(config) as options:
        reward = ScriptedReward(signal, options.group_size)
        trainer = GRPOTrainer(options.model, options, reward_fn=reward.score)
        if ignore_ends:
            trainer.sampler.stop_ids = frozenset()
        sampled = record_lengths(trainer.sampler)
        trainer.train(problem_pool(options))
        floors = [step_floor(trainer, *lengths, reward.every) for lengths in sampled]
        rows = read_lines(options.run_dir / "metrics.jsonl", repair=False)
    steps = [
        {name: row[f"time/{name}"] for name in ("sample", "score", "learn")}
        | {"length_mean": row["completion/length_mean"], "floor": floor}
        for row, floor in zip(rows, floors, strict=True)
    ]
    planned = trainer.run.memory_plan.peak / 2**30  # to stand beside the measured peak
    return reward.result(steps) | {"planned_memory_gb": planned}


def record_lengths(sampler: Sampler) -> list[tuple[list[int], list[list[int]]]]:
    """Record the lengths of prompts and completions of each later call of `sample`."""
    sample, found = sampler.sample, []

    def recorded(prompts: Sequence[Sequence[int]], *others: Any) -> list[list[Completion]]:
        groups = sample(prompts, *others)
        lengths = [[len(completion.token_ids) for completion in group] for group in groups]
        found.append(([len(prompt) for prompt in prompts], lengths))
        return groups

    sampler.sample = recorded
    return found


def step_floor(
    trainer: GRPOTrainer, prompts: Sequence[int], lengths: Sequence[Sequence[int]], every: int
) -> dict[str, float]:
    """Return the least seconds of sampling these and of learning from those with signal."""
    policy, dtype = trainer.policy, trainer.sampler.dtype
    rates = {kind: _rates(policy.device.type, kind) for kind in (dtype, policy.dtype)}
    learned, weights = (prompts[::every], lengths[::every]), trainer.adapter.values()
    sizes = ModelCost.of(policy), sum(weight.numel() for weight in weights)
    return {
        "sample": sampling_seconds(rates[dtype], ModelCost.of(policy, dtype), prompts, lengths),
        "learn": learning_seconds(rates[policy.dtype], *sizes, *learned),
    }


_rates = cache(measure)
