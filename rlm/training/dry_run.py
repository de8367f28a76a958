"""`train_grpo.py --plan`: says what a run will take, in memory and in time, and trains nothing.

Seconds are measured with the loaded model on this machine: the first tokens of a step's rollouts,
and one micro-batch forward and backward. They are scaled to completions of `max_new_tokens`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from rlm.cli import terminal
from rlm.data import Problem
from rlm.model import Device, model_download, pick_device, set_gradient_checkpointing
from rlm.sampling import Request, SamplingParams, choose_sampling_dtype
from rlm.training.batches import MicroBatch, Rollout, make_micro_batches, problems_for_step
from rlm.training.config import GRPOConfig
from rlm.training.logprobs import reference_logprobs, token_logprobs
from rlm.training.loss import policy_loss
from rlm.training.memory_plan import plan_memory
from rlm.training.run_setup import prepare_run

PROBE_TOKENS = 16  # of each completion, that are timed after its first
PROBE_SECONDS = 1.5  # after which no further token or pass is timed


@dataclass(frozen=True)
class SamplingTime:
    """Seconds that sampling takes with this model on this machine."""

    max_num_seqs: int  # completions that are decoded at the same time
    first: float  # until they have their first token: weights merged, prompts read
    next: float  # until they have one token more

    def of(self, completions: int, tokens: int) -> float:
        """Return the seconds of completions of so many tokens each.

        >>> SamplingTime(4, first=2.0, next=0.5).of(6, tokens=3)
        6.0
        """
        rounds = math.ceil(completions / self.max_num_seqs)
        return rounds * (self.first + (tokens - 1) * self.next)


def run_plan(trainer: Any, dataset: Sequence[Problem], eval_dataset: Sequence[Problem]) -> int:
    """Print what the run of a `train_grpo.GRPOTrainer` will take."""
    problems, eval_problems = prepare_run(trainer, dataset, eval_dataset)
    config, policy, distributed = trainer.config, trainer.policy, trainer.distributed
    plan = plan_memory(trainer, [*problems, *eval_problems], len(eval_problems))
    trainer.memory_plan = plan = distributed.broadcast(plan)
    set_gradient_checkpointing(policy, plan.checkpointing)
    drawn = problems_for_step(problems, 0, config.batch_size, config.seed)
    drawn, validated = distributed.shard(drawn), distributed.shard(eval_problems)
    tokens, speed = config.max_new_tokens, time_sampling(trainer, drawn)
    sampling = config.sampling_rounds * speed.of(len(drawn) * config.group_size, tokens)
    learning, micro_batches = time_learning(trainer, drawn)
    validation, largest = speed.of(len(validated), tokens), micro_batches[0]
    steps, seconds = total_time(config, sampling + learning, validation)

    place, (dtype, why) = policy.device.type, choose_sampling_dtype(policy, config.sampler_dtype)
    if dtype != trainer.sampler.dtype:
        dtype, why = policy.dtype, "as in learning: no merged copy"
    limit = "" if steps == config.steps else f", where --max-minutes {config.max_minutes:g} ends it"
    terminal.facts(
        "Plan: estimated, nothing was trained",
        {
            "model": f"{trainer.model_name}{model_download(trainer.model_name)}",
            "sampling": Device(place, dtype, why),
            "learning": Device(place, policy.dtype, pick_device(config.dtype).reason),
            "max_num_seqs": f"{speed.max_num_seqs} completions at a time",
            "micro-batches": f"{len(micro_batches)} of {len(largest.lengths)} completions, "
            f"{largest.input_ids.numel()} tokens with prompts, at most; gradient checkpointing "
            + ("on" if plan.checkpointing else "off"),
            "a step": f"{sampling + learning:.1f} s: sampling {sampling:.1f}, learning "
            f"{learning:.1f}",
            "a validation": f"{validation:.1f} s",
            "total": f"{terminal.duration(seconds)} for {steps} of {config.steps} steps{limit}",
            "assumed": f"completions of {tokens} tokens, the most, and a difference in each group: "
            "half as many tokens take about half; the reward's own time is not in it",
        },
    )
    return 0


def time_sampling(trainer: Any, problems: Sequence[Problem]) -> SamplingTime:
    """Time the first tokens of a step's rollouts, in the batch that the run would decode."""
    config, marks, rows, drawn = trainer.config, [], 0, set()
    params = SamplingParams(config.max_new_tokens, config.temperature)
    prompts = [trainer.render(problem) for problem in problems]
    requests = [Request(p, params, seed, config.group_size) for seed, p in enumerate(prompts)]
    began = time.monotonic()
    for token in trainer.sampler.stream(requests):
        row = token.request, token.row
        if not marks or row in drawn:  # all have theirs: this is the next one's
            marks.append(time.monotonic())
            drawn = set()
        drawn.add(row)
        rows = max(rows, len(drawn))
        if len(marks) > PROBE_TOKENS or marks[-1] - marks[0] > PROBE_SECONDS:
            break
    trainer.sampler.release()
    took = [after - before for before, after in pairwise(marks)]
    return SamplingTime(rows, marks[0] - began, statistics.median(took) if took else 0.0)


def time_learning(trainer: Any, problems: Sequence[Problem]) -> tuple[float, list[MicroBatch]]:
    """Time a step's largest micro-batch, and scale its seconds by padded tokens to all of them.

    Returns:
        Seconds of a step's updates, and its micro-batches, the largest first.
    """
    config, policy = trainer.config, trainer.policy
    length, count = config.max_new_tokens, len(problems) * config.group_size
    rollouts = [
        Rollout(i, trainer.render(p), [0] * length, (-1.0) ** j, 1 / count, [0.0] * length)
        for i, p in enumerate(problems)
        for j in range(config.group_size)
    ]
    limits = (config.train_batch_size or count, trainer.memory_plan.train_batch_tokens)
    micro_batches = make_micro_batches(rollouts, *limits, policy.device.type)
    times: list[float] = []
    while len(times) < 3 and sum(times) < PROBE_SECONDS:  # the first also warms up
        began = time.monotonic()
        _forward_and_backward(trainer, micro_batches[0])
        times.append(time.monotonic() - began)
    tokens = [micro.input_ids.numel() for micro in micro_batches]
    return min(times) * sum(tokens) / tokens[0] * config.updates_per_batch, micro_batches


def _forward_and_backward(trainer: Any, micro: MicroBatch) -> None:
    """Compute the gradient of a micro-batch as `GRPOTrainer._learn` does, and drop it."""
    config, policy = trainer.config, trainer.policy
    logprobs, _ = token_logprobs(policy, micro, config.temperature)
    micro.old_logprobs = logprobs.detach()
    if config.kl_weight:
        micro.ref_logprobs = reference_logprobs(policy, micro, config)
    options = {"correct_sampler": not trainer.sampler.exact, "kl_weight": config.kl_weight}
    loss, _ = policy_loss(logprobs, micro, config.choices, **options)
    gradients = torch.autograd.grad(loss, [*trainer.weights.model_weights.values()])
    gradients[0].sum().item()  # waits for a GPU to be done


def total_time(config: GRPOConfig, a_step: float, validation: float) -> tuple[int, float]:
    """Return the steps that a run makes within --max-minutes, and its seconds."""
    seconds = validation  # of the start
    for done in range(1, config.steps + 1):
        seconds += a_step
        last = done == config.steps or seconds >= 60 * (config.max_minutes or math.inf)
        if last or (config.eval_every and done % config.eval_every == 0):
            seconds += validation
        if last:
            break
    return done, seconds
