"""The adapter of this project, which calls the same functions as `train_grpo.py`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rlm.data import Problem
from rlm.ops import TorchOps
from rlm.sampling import Completion, SamplingParams, sample_tokens
from rlm.training import (
    Group,
    GRPOConfig,
    MicroBatch,
    Rollout,
    group_advantages,
    make_micro_batches,
    make_rollouts,
    overlong_penalties,
    policy_loss,
    score_tokens,
)


def ours(formula: str, given: SimpleNamespace) -> Tensor:
    """Compute the result of a case with the functions that `train_grpo.py` calls."""
    return FORMULAS[formula](given)


def _advantages(given: SimpleNamespace, *options: Any) -> Tensor:
    return group_advantages(torch.tensor(given.rewards).float(), *options)


def _overlong(given: SimpleNamespace) -> Tensor:
    config = GRPOConfig(max_new_tokens=given.max_new_tokens, overlong_buffer=given.buffer)
    ended = [Completion([1] * length, [0.0] * length, "stop") for length in given.lengths]
    return overlong_penalties([_group(ended)], config)[0]


def _mask(given: SimpleNamespace) -> Tensor:
    drawn = [
        Completion(ids, [0.0] * len(ids), "stop" if ids[-1] == given.end else "length")
        for ids in given.completions
    ]
    config = GRPOConfig(algorithm="grpo", mask_truncated=given.mask_truncated)
    rollouts = _rollouts(drawn, [1.0] * len(drawn), config)
    whole = torch.zeros(len(drawn), max(map(len, given.completions)))  # (n, T)
    batch = _batch(rollouts)
    for row, mask in zip(batch.rows, batch.completion_mask, strict=True):
        place = given.completions.index(rollouts[row].completion)
        whole[place, : len(mask)] = mask.float()
    return whole


def _scoring_logprobs(given: SimpleNamespace) -> Tensor:
    logits = torch.tensor(given.logits)  # (1, V)
    vocabulary = logits.shape[1]
    head = nn.Linear(vocabulary, vocabulary, bias=False)
    head.weight.data = torch.eye(vocabulary)
    hidden = logits.expand(vocabulary, -1).contiguous()
    scored, _ = score_tokens(hidden, head, torch.arange(vocabulary), given.temperature, TorchOps())
    return scored[None]


def _sampling_logprobs(given: SimpleNamespace) -> Tensor:
    logits = torch.tensor(given.logits).expand(64, -1)
    # The numbers are evenly spaced, so that every token is drawn at least once.
    uniform = torch.arange(64, dtype=torch.float64) / 64
    params = SamplingParams(1, temperature=given.temperature)
    tokens, logprobs = sample_tokens(logits, uniform, params, TorchOps())
    found = dict(zip(tokens.tolist(), logprobs.tolist(), strict=True))
    return torch.tensor([[found[token] for token in range(logits.shape[1])]])


def _loss(given: SimpleNamespace) -> Tensor:
    """Return the contribution of a micro-batch to the loss of the step."""
    by_ratio = {"sequence": "gspo", "token": "grpo"}[given.ratio]
    algorithm = {"weighted": "cispo", "tapered": "topr"}.get(given.objective, by_ratio)
    config = GRPOConfig(
        algorithm=algorithm,
        aggregation=given.aggregation,
        max_new_tokens=given.constant,
        clip_eps_low=given.clip_low,
        clip_eps_high=given.clip_high,
        kl_weight=given.kl_weight,
        mask_truncated=True,
    )
    completions = []
    for row, (mask, logprobs) in enumerate(
        zip(given.step_mask.tolist(), given.step_sampler_logprobs.tolist(), strict=True)
    ):
        length = max((t + 1 for t, own in enumerate(mask) if own), default=1)
        own = [bool(m) for m in mask[:length]]
        reason = "stop" if any(own) else "length"  # a row without tokens is treated as truncated
        tool_mask = own if any(own) and not all(own) else []
        # Use the row number as the token ids, to identify the row later. The loss ignores the ids.
        completions.append(Completion([row] * length, logprobs[:length], reason, tool_mask))
    rollouts = _rollouts(completions, given.step_advantages.tolist(), config)
    rollouts = [rollout for rollout in rollouts if rollout.completion[0] in given.rows]
    if not rollouts:
        return 0 * given.logprobs.sum()
    batch = _batch(rollouts)
    places = [given.rows.index(rollouts[row].completion[0]) for row in batch.rows]
    width = max(batch.lengths)
    batch.old_logprobs = given.old_logprobs[places, :width]
    if given.kl_weight:
        batch.ref_logprobs = given.ref_logprobs[places, :width]
    formula, correct = config.resolved_algorithm, given.importance_cap is not None
    logprobs = given.logprobs[places, :width]
    return policy_loss(
        logprobs, batch, formula, correct_sampler=correct, kl_weight=given.kl_weight
    )[0]


def _group(completions: list[Completion]) -> Group:
    return Group(Problem("0", "", ""), [0], completions, [], [])


def _rollouts(
    completions: list[Completion], advantages: list[float], config: GRPOConfig
) -> list[Rollout]:
    return make_rollouts([_group(completions)], torch.tensor([advantages]), [0], config)


def _batch(rollouts: list[Rollout]) -> MicroBatch:
    (batch,) = make_micro_batches(rollouts, max_rows=99, max_tokens=9999, device="cpu")
    return batch


FORMULAS: dict[str, Callable[[SimpleNamespace], Tensor]] = {
    "advantages": lambda given: _advantages(given, "std" if given.scale else "centred"),
    "maxrl_advantages": lambda given: _advantages(given, "mean"),
    "topr_advantages": lambda given: _advantages(given, "share", given.negative_weight),
    "overlong": _overlong,
    "mask": _mask,
    "scoring_logprobs": _scoring_logprobs,
    "sampling_logprobs": _sampling_logprobs,
    "loss": _loss,
}
