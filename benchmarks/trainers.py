"""Our trainer as an arm of a benchmark, and what its peer shares with it; TRL's is trl_arm.py.

Each runs in a process of its own (`harness.run_child`), so that peak memory is its own. What it is
asked to do is a `GRPOConfig`: TRL's options are read off it.
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
    """What both trainers draw their problems from."""
    return load_problems(config.dataset, "train", max_samples=2000, seed=config.seed)


@contextmanager
def in_scratch(config: Mapping[str, Any]) -> Iterator[GRPOConfig]:
    """The config of a run whose files nobody keeps, from what a child process got."""
    with tempfile.TemporaryDirectory() as folder:
        places = {"run_dir": Path(folder) / "run", "output": Path(folder) / "adapter"}
        yield GRPOConfig(**{**config, **places})


@dataclass
class ScriptedReward:
    """Gives 1 and 0 in turn in a group with signal, 0 in one without, whatever was said.

    So the share of groups with signal is the same in both arms. Both trainers call it exactly once
    a step, which makes it a second clock: from call to call is a whole step, whatever a trainer
    says of itself.
    """

    kind: str  # "half" or "all" of the groups have signal
    group_size: int
    calls: list[float] = field(default_factory=list)  # when

    @property
    def every(self) -> int:
        """Of so many groups the first has signal."""
        return {"half": 2, "all": 1}[self.kind]

    def score(self, completions: Sequence[str], **_: Any) -> list[float]:
        self.calls.append(time.monotonic())
        size = self.group_size
        return [
            float(row // size % self.every == 0 and row % size % 2 == 0)
            for row in range(len(completions))
        ]

    def result(self, steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """What an arm's process hands back.

        Args:
            steps: sample, score and learn in seconds and length_mean of each step.
        """
        totals = [step["sample"] + step["score"] + step["learn"] for step in steps]
        return {
            "steps": [{**s, "total": total} for s, total in zip(steps, totals, strict=True)],
            "between_calls": [after - before for before, after in pairwise(self.calls)],
        }


def run_ours(config: Mapping[str, Any], signal: str, ignore_ends: bool = False) -> dict[str, Any]:
    """Train as `config` says; seconds of every step, of which the first is the warm-up, and the
    floors of its two phases.

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
    """The tokens of the prompts and of their completions, of each call of `sample` from now on."""
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
    """The least seconds of sampling these completions and of learning from those with signal."""
    policy, dtype = trainer.policy, trainer.sampler.dtype
    rates = {kind: _rates(policy.device.type, kind) for kind in (dtype, policy.dtype)}
    learned, weights = (prompts[::every], lengths[::every]), trainer.adapter.values()
    sizes = ModelCost.of(policy), sum(weight.numel() for weight in weights)
    return {
        "sample": sampling_seconds(rates[dtype], ModelCost.of(policy, dtype), prompts, lengths),
        "learn": learning_seconds(rates[policy.dtype], *sizes, *learned),
    }


_rates = cache(measure)
