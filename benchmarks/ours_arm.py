"""Run our trainer on the task of a `GRPOConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from benchmarks.trainers import ScriptedReward, in_scratch, problem_pool
from rlm import GRPOTrainer
from rlm.cli import required
from rlm.sampling import Sampler
from rlm.training import Group, GRPOConfig, TrainingRun


class MeasuredTrainer(GRPOTrainer):
    """A trainer that keeps each step's seconds and mean length, and the planned memory."""

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
    """Train with `config`; return each step's seconds (the first is the warm-up).

    Args:
        signal: the kind of scripted reward.
        ignore_ends: ignore end tokens, so that every completion has `max_new_tokens` tokens.
    """
    with in_scratch(config) as options:
        reward = ScriptedReward(signal, options.group_size)
        trainer = MeasuredTrainer(options, reward.score)
        if ignore_ends:
            assert isinstance(trainer.sampler, Sampler)  # the config names no server
            trainer.sampler.stop_ids = frozenset()
        trainer.train(problem_pool(options))
    return reward.result(trainer.steps) | {"planned_memory_gb": trainer.planned_memory_gb}
