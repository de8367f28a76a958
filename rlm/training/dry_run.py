"""`train_grpo.py --plan`: says what a run will take, in memory and in time, and trains nothing.

Seconds are measured with the loaded model on this machine: the first tokens of a step's rollouts,
and one micro-batch forward and backward. They are scaled to completions of `max_new_tokens`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from rlm.cli import terminal
from rlm.data import Problem
from rlm.model import Device, model_download, pick_device
from rlm.sampling import Request, SamplingParams, choose_sampling_dtype
from rlm.training.batches import MicroBatch, Rollout, problems_for_step, split_rollouts
from rlm.training.logprobs import reference_logprobs, token_logprobs
from rlm.training.loss import policy_loss
from rlm.training.metrics import remaining
from rlm.training.run_setup import prepare_run, set_memory_plan

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
        return math.ceil(completions / self.max_num_seqs) * (self.first + (tokens - 1) * self.next)


def run_plan(trainer: Any, dataset: Sequence[Problem], eval_dataset: Sequence[Problem]) -> int:
    """Print what the run of a `train_grpo.GRPOTrainer` will take."""
    problems, eval_problems = prepare_run(trainer, dataset, eval_dataset)
    set_memory_plan(trainer, problems, eval_problems)
    config, policy, shard = trainer.config, trainer.policy, trainer.distributed.shard
    drawn = shard(problems_for_step(problems, 0, config.batch_size, config.seed))
    tokens, speed = config.max_new_tokens, time_sampling(trainer, drawn)
    sampling = config.sampling_rounds * speed.of(len(drawn) * config.group_size, tokens)
    learning, micro_batches = time_learning(trainer, drawn)
    evaluated = len(shard(eval_problems)) * config.eval_group_size_for(len(eval_problems))
    a_step, validation = sampling + learning, speed.of(evaluated, tokens)
    steps, seconds = remaining(config, 0, a_step, validation, seconds=validation)
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
            "micro-batches": f"{len(micro_batches)} of {len(micro_batches[0].lengths)} completions "
            f"({micro_batches[0].input_ids.numel()} tokens with prompts), gradient checkpointing "
            + ("on" if trainer.memory_plan.checkpointing else "off"),
            "a step": f"{a_step:.1f} s: sampling {sampling:.1f}, learning {learning:.1f}",
            "a validation": f"{validation:.1f} s",
            "total": terminal.duration(validation + seconds)
            + f" for {steps} of {config.steps} steps{limit}",
            "assumed": f"{tokens} tokens in each completion, the most (half as many take about "
            "half as long), a difference in each group, and a reward that takes no time",
        },
    )
    return 0


def time_sampling(trainer: Any, problems: Sequence[Problem]) -> SamplingTime:
    """Time the first tokens of a step's rollouts, in the batch that the run would decode."""
    config, marks, rows, drawn = trainer.config, [], 0, set()
    params = SamplingParams(config.max_new_tokens, config.temperature)
    size, render = config.group_size, trainer.render
    requests = [Request(render(p), params, seed, size) for seed, p in enumerate(problems)]
    began = time.monotonic()
    with closing(trainer.sampler.stream(requests)) as stream:
        for token in stream:
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
    """Time a step's largest micro-batch, and scale its seconds by padded tokens to all of them;
    return these seconds and the micro-batches, the largest first."""
    config, length = trainer.config, trainer.config.max_new_tokens
    rollouts = [
        Rollout(i, trainer.render(p), [0] * length, (-1.0) ** j, 1.0, [0.0] * length)
        for i, p in enumerate(problems)
        for j in range(config.group_size)
    ]
    size = config.group_size * (config.mini_batch_size or len(problems))
    mini_batches = [rollouts[i : i + size] for i in range(0, len(rollouts), size)]
    micro_batches = [micro for mini in mini_batches for micro in split_rollouts(trainer, mini)]
    micro_batches.sort(key=lambda micro: -micro.input_ids.numel())
    times: list[float] = []
    while len(times) < 3 and sum(times) < PROBE_SECONDS:  # the first also warms up
        began = time.monotonic()
        _forward_and_backward(trainer, micro_batches[0])
        times.append(time.monotonic() - began)
    tokens = [micro.input_ids.numel() for micro in micro_batches]
    seconds = config.updates_per_batch * min(times) * sum(tokens) / tokens[0]
    return seconds, micro_batches


def _forward_and_backward(trainer: Any, micro: MicroBatch) -> None:
    """Compute the gradient of a micro-batch as `GRPOTrainer._learn` does, and drop it."""
    config = trainer.config
    logprobs, _ = token_logprobs(trainer.policy, micro, config.temperature)
    micro.old_logprobs = logprobs.detach()
    if config.kl_weight:
        micro.ref_logprobs = reference_logprobs(trainer.policy, micro, config)
    differs = not trainer.sampler.matches_trainer
    options = {"correct_sampler": differs, "kl_weight": config.kl_weight}
    loss, _ = policy_loss(logprobs, micro, config.resolved_algorithm, **options)
    gradient, *_ = torch.autograd.grad(loss, [*trainer.weights.model_weights.values()])
    gradient.sum().item()  # waits for a GPU to be done
