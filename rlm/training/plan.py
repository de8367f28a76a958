"""Estimates the memory and the time of a GRPO run without training (`train_grpo.py --plan`).

The time is estimated from timings of the loaded model on this machine: the time to sample the first
tokens of a step's rollouts, and the time for the forward and backward pass of one micro-batch. The
times are extrapolated to completions of `max_new_tokens` tokens.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise

import torch

from rlm.cli import required, terminal
from rlm.data import Problem
from rlm.model import Device, model_download, pick_device
from rlm.sampling import Request, Sampler, SamplingParams, sampling_dtype
from rlm.training.batches import MicroBatch, Rollout, make_micro_batches, problems_for_step
from rlm.training.config import GRPOConfig
from rlm.training.logprobs import reference_logprobs, token_logprobs
from rlm.training.memory_plan import MemoryPlan
from rlm.training.metrics import remaining
from rlm.training.trainer import Trainer, TrainingData

PROBE_TOKENS = 16  # number of tokens that are timed after the first token of each completion
PROBE_SECONDS = 1.5  # time limit of a measurement


@dataclass(frozen=True)
class SamplingTime:
    """The measured sampling time of this model on this machine."""

    max_num_seqs: int  # number of completions decoded at the same time
    first: float  # seconds until the first token, including weight merging and prefill
    next: float  # seconds for each further token

    def of(self, completions: int, tokens: int) -> float:
        """Return the estimated seconds to sample completions of `tokens` tokens each.

        >>> SamplingTime(4, first=2.0, next=0.5).of(6, tokens=3)
        6.0
        """
        return math.ceil(completions / self.max_num_seqs) * (self.first + (tokens - 1) * self.next)


def show_plan(trainer: Trainer, data: TrainingData) -> None:
    """Time parts of a step, and print an estimate for the whole run."""
    sampler, config, policy = trainer.sampler, trainer.config, trainer.policy
    assert isinstance(sampler, Sampler)  # GRPOConfig rejects --plan with a server's sampler
    plan, shard = data.plan_memory(trainer), trainer.distributed.shard
    drawn = shard(problems_for_step(data.problems, 0, config.batch_size, config.seed))
    tokens = config.max_new_tokens
    speed = time_sampling(sampler, config, [trainer.render(problem) for problem in drawn])
    sampling = config.sampling_rounds * speed.of(len(drawn) * config.group_size, tokens)
    learning, micro_batches = time_learning(trainer, plan, drawn)
    count = len(data.eval_problems)
    evaluated = len(shard(data.eval_problems)) * config.eval_group_size_for(count)
    a_step, validation = sampling + learning, speed.of(evaluated, tokens)
    steps, seconds = remaining(config, 0, a_step, validation, seconds=validation)
    place, (dtype, why) = policy.device.type, sampling_dtype(policy, config.dtype)
    if dtype != sampler.dtype:
        dtype, why = policy.dtype, "as in learning: no merged copy"
    rounds, after = config.sampling_rounds, ""
    if rounds > 1:
        after = f", but only after all {rounds} sampling rounds of {config.batch_size} problems"
    limit, model = "", required(config.model, "--model")
    if steps != config.steps:
        limit = f", then --max-minutes {config.max_minutes:g} ends the run"
    terminal.table(
        "Plan: estimated, nothing was trained",
        {
            "model": "; ".join(filter(None, [model, model_download(model)])),
            "sampling": Device(place, dtype, why),
            "learning": Device(place, policy.dtype, pick_device(config.dtype).reason),
            "max_num_seqs": f"{speed.max_num_seqs} completions at a time",
            "micro-batches": f"{len(micro_batches)}, the largest with "
            f"{len(micro_batches[0].lengths)} completions "
            f"({micro_batches[0].input_ids.numel()} tokens with prompts), gradient "
            f"checkpointing {'on' if plan.checkpointing else 'off'}",
            "a step": f"{a_step:.1f} s: sampling {sampling:.1f}, learning {learning:.1f}",
            "a validation": f"{validation:.1f} s",
            "total": terminal.duration(validation + seconds)
            + f" for {steps} of {config.steps} steps{limit}",
            "assumed": f"{tokens} tokens in each completion, the maximum (half as many take "
            f"about half as long); different rewards in each group{after}; no time for the reward",
        },
    )


def time_learning(
    trainer: Trainer, plan: MemoryPlan, problems: Sequence[Problem]
) -> tuple[float, list[MicroBatch]]:
    """Time the largest micro-batch of a step, and extrapolate the time to the whole step.

    The time is assumed to be proportional to the number of tokens, including padding.

    Returns:
        The seconds for the training passes of the step, and the micro-batches of the step, with
        the largest micro-batch first.
    """
    config, length = trainer.config, trainer.config.max_new_tokens
    rollouts = [
        Rollout(i, trainer.render(problem), [0] * length, advantage=1.0, weight=1.0)
        for i, problem in enumerate(problems)
        for _ in range(config.group_size)
    ]
    size = config.group_size * (config.mini_batch_size or len(problems))
    limits = config.train_batch_size or size, plan.train_batch_tokens
    micro_batches = [
        micro
        for i in range(0, len(rollouts), size)
        for micro in make_micro_batches(rollouts[i : i + size], *limits, trainer.policy.device.type)
    ]
    micro_batches.sort(key=lambda micro: -micro.input_ids.numel())
    times: list[float] = []
    while len(times) < 3 and sum(times) < PROBE_SECONDS:  # the first pass warms up
        began = time.monotonic()
        _forward_and_backward(trainer, micro_batches[0])
        times.append(time.monotonic() - began)
    tokens = [micro.input_ids.numel() for micro in micro_batches]
    return config.updates_per_batch * min(times) * sum(tokens) / tokens[0], micro_batches


def _forward_and_backward(trainer: Trainer, micro: MicroBatch) -> None:
    """Make the passes through the model that `GRPOTrainer._learn` makes for a micro-batch.

    The time of the loss is negligible.
    """
    config = trainer.config
    logprobs, _ = token_logprobs(trainer.policy, micro, config.temperature)
    if config.kl_weight:
        reference_logprobs(trainer.policy, micro, config)
    weights = [*trainer.weights.model_weights.values()]
    gradient, *_ = torch.autograd.grad(logprobs.sum(), weights)
    gradient.sum().item()  # synchronizes a GPU


def time_sampling(
    sampler: Sampler, config: GRPOConfig, prompts: Sequence[Sequence[int]]
) -> SamplingTime:
    """Time the sampling of the first tokens of a group for each prompt."""
    params = SamplingParams(config.max_new_tokens, config.temperature)
    requests = [Request(ids, params, seed, config.group_size) for seed, ids in enumerate(prompts)]
    marks: list[float] = []
    drawn: set[tuple[int, int]] = set()  # rows that have a token from the current decoding step
    rows, began = 0, time.monotonic()
    with closing(sampler.stream(requests)) as stream:
        for token in stream:
            row = token.request, token.row
            if not marks or row in drawn:  # a new decoding step begins
                marks.append(time.monotonic())
                drawn = set()
            drawn.add(row)
            rows = max(rows, len(drawn))
            if len(marks) > PROBE_TOKENS or marks[-1] - marks[0] > PROBE_SECONDS:
                break
    sampler.release()
    took = [after - before for before, after in pairwise(marks)]
    return SamplingTime(rows, marks[0] - began, statistics.median(took) if took else 0.0)
