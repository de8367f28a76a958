"""Run our trainer on the task of a `GRPOConfig`, and compute the floor of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from benchmarks.floor import ModelCost, learning_seconds, measure, sampling_seconds
from benchmarks.trainers import ScriptedReward, in_scratch, problem_pool
from rlm import GRPOTrainer
from rlm.cli import required
from rlm.sampling import Sampler
from rlm.training import Group, GRPOConfig, TrainingRun


class MeasuredTrainer(GRPOTrainer):
    """A trainer that keeps each step's seconds and the lengths of its prompts and completions."""

    def __init__(self, config: GRPOConfig, reward: Callable[..., list[float]]) -> None:
        super().__init__(required(config.model, "--model"), config, reward_fn=reward)
        self.steps: list[dict[str, float]] = []
        self.lengths: list[tuple[list[int], list[list[int]]]] = []
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
        drawn = [[len(completion.token_ids) for completion in g.completions] for g in groups]
        self.lengths.append(([len(group.prompt) for group in groups], drawn))
        self.planned_memory_gb = run.memory_plan.peak / 2**30


def run_ours(config: Mapping[str, Any], signal: str, ignore_ends: bool = False) -> dict[str, Any]:
    """Train with `config`; return each step's seconds (the first is the warm-up) and floors.

    Args:
        signal: the kind of scripted reward.
        ignore_ends: ignore end tokens, so that every completion has `max_new_tokens` tokens.
    """
    with in_scratch(config) as options:
        reward = ScriptedReward(signal, options.group_size)
        trainer = MeasuredTrainer(options, reward.score)
        sampler = trainer.sampler
        assert isinstance(sampler, Sampler)  # the config names no server
        if ignore_ends:
            sampler.stop_ids = frozenset()
        trainer.train(problem_pool(options))
    floors = [step_floor(trainer, sampler, *drawn, reward.every) for drawn in trainer.lengths]
    steps = [step | {"floor": it} for step, it in zip(trainer.steps, floors, strict=True)]
    return reward.result(steps) | {"planned_memory_gb": trainer.planned_memory_gb}


def step_floor(
    trainer: GRPOTrainer,
    sampler: Sampler,
    prompts: Sequence[int],
    lengths: Sequence[Sequence[int]],
    every: int,
) -> dict[str, float]:
    """Return the least seconds of sampling the groups, and of training on those with signal."""
    policy, dtype = trainer.policy, sampler.dtype
    rates = {kind: _rates(policy.device.type, kind) for kind in (dtype, policy.dtype)}
    learned, weights = (prompts[::every], lengths[::every]), trainer.adapter.values()
    sizes = ModelCost.of(policy), sum(weight.numel() for weight in weights)
    return {
        "sample": sampling_seconds(rates[dtype], ModelCost.of(policy, dtype), prompts, lengths),
        "learn": learning_seconds(rates[policy.dtype], *sizes, *learned),
    }


_rates = cache(measure)
