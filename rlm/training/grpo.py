"""The mathematics of GRPO: groups, advantages, weights, loss. Tensors in, tensors out.

Letters: P problems, G group size, N = P·G rollouts of a step, n rollouts of a micro-batch, T their
padded length. Between a rollout and the loss stand the log-probabilities: `rlm.training.logprobs`.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TypeVar

import torch
from torch import Tensor

from rlm.data.problem import Problem
from rlm.sampling.params import Completion, prompt_seed
from rlm.training.algorithms import soft_overlong
from rlm.training.distributed import Distributed

T = TypeVar("T")

ADVANTAGE_EPS = 1e-4  # TRL's; in units of reward
IMPORTANCE_CAP = 2.0


@dataclass(frozen=True)
class Group:
    """The rollouts of one problem, sampled and scored."""

    problem: Problem
    prompt: Sequence[int]
    completions: Sequence[Completion]  # G
    texts: Sequence[str]
    rewards: Sequence[float | None]  # None: no verdict


def reward_tensor(groups: Sequence[Group]) -> Tensor:
    """(P, G), NaN where there is no verdict."""
    return torch.tensor([[math.nan if r is None else r for r in g.rewards] for g in groups])


def draw_problems(
    problems: Sequence[Problem], tried: Sequence[Group], step: int, count: int, seed: int
) -> list[Problem]:
    """What a step samples next: `count` problems, then one for each group that taught nothing.

    Empty when every place is filled, or no other problem is left.
    """
    if not tried:
        return problems_for_step(problems, step, count, seed)
    missing = count - int(has_signal(reward_tensor(tried)).sum())
    return refill_problems(problems, step, missing, seed, [group.problem for group in tried])


def problems_for_step(problems: Sequence[T], step: int, count: int, seed: int) -> list[T]:
    """The problems of a training step: a pure function, so that a resume replays nothing.

    Passes over the data are shuffled, each in its own way.
    """
    chosen: list[T] = []
    orders: dict[int, list[int]] = {}
    for position in range(step * count, (step + 1) * count):
        epoch, index = divmod(position, len(problems))
        if epoch not in orders:
            shuffle = random.Random(f"{seed} {epoch}")
            orders[epoch] = shuffle.sample(range(len(problems)), len(problems))
        chosen.append(problems[orders[epoch][index]])
    return chosen


def refill_problems(
    problems: Sequence[T], step: int, count: int, seed: int, tried: Sequence[T]
) -> list[T]:
    """Other problems in place of those that taught nothing (dynamic sampling).

    A pure function, like `problems_for_step`; fewer than `count` where the data run out.

    Args:
        tried: what the step has drawn already.
    """
    fresh = [problem for problem in problems if problem not in tried]
    rng = random.Random(f"{seed} {step} {len(tried)}")
    return rng.sample(fresh, min(count, len(fresh)))


def rollout_seeds(problems: Sequence[Problem], seed: int, step: int, refill: int) -> list[int]:
    """What the groups of these problems are sampled with, a pure function like the drawing.

    A problem that stands there twice (fewer problems than places) gets two different groups.
    """
    seen: Counter[str] = Counter()
    seeds = []
    for problem in problems:
        again = [seen[problem.id]] if seen[problem.id] else []
        seeds.append(prompt_seed(seed, step, refill, problem.id, *again))
        seen[problem.id] += 1
    return seeds


def group_advantages(rewards: Tensor, *, scale_by_std: bool) -> Tensor:
    """How much better each rollout is than its group: (P, G) → (P, G).

    A = r - mean, divided by (std + 1e-4) where scaled; std with n - 1, as in TRL. A rollout
    without a verdict (NaN) stays out of the group's mean and std and gets 0; so does the rest of
    a group that has fewer than two verdicts. A group without a difference gets exactly 0.

    >>> group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), scale_by_std=False)
    tensor([[ 0.5000, -0.5000, -0.5000,  0.5000]])
    """
    judged = ~rewards.isnan()
    count = judged.sum(1, keepdim=True)  # (P, 1)
    mean = rewards.nansum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(judged, rewards - mean, 0.0)
    if scale_by_std:
        std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (std + ADVANTAGE_EPS)
    return torch.where((count >= 2) & has_signal(rewards)[:, None], centred, 0.0)


def has_signal(rewards: Tensor) -> Tensor:
    """Which groups can teach something, (P,) of bool: two verdicts in it differ.

    Asked of the rewards, not of the advantages: rounding in the mean can leave 1e-9 where an
    all-equal group should have 0.
    """
    high = rewards.nan_to_num(nan=-torch.inf).amax(1)
    low = rewards.nan_to_num(nan=torch.inf).amin(1)
    return high - low > 1e-8


def overlong_penalties(
    groups: Sequence[Sequence[Completion]], max_new_tokens: int, buffer: int, penalty: float
) -> Tensor:
    """What is added to each rollout's reward for its length: (P, G), all 0 where buffer is 0."""
    limits = {"max_new_tokens": max_new_tokens, "buffer": buffer, "penalty": penalty}
    return torch.tensor(
        [
            [soft_overlong(len(c.token_ids), c.truncated, **limits) for c in group]
            for group in groups
        ]
    )


@dataclass(frozen=True)
class Rollout:
    """A completion on its way into the loss. `weight` is what one of its tokens counts."""

    problem: int  # rollouts of one problem share the prompt's computation
    prompt: Sequence[int]
    completion: Sequence[int]
    advantage: float
    weight: float
    sampler_logprobs: Sequence[float] = ()


def row_weights(lengths: Sequence[int], aggregation: str, constant: int | None) -> list[float]:
    """What one token of each rollout counts in the loss of the step.

    The denominator is the whole step's, so the gradient does not depend on how the rollouts are
    cut into micro-batches:
        sequence  1 / (N · |o_i|)          GRPO: every completion counts the same
        constant  1 / (N · constant)       Dr. GRPO: every token counts the same, always
        token     1 / Σ |o_i|              DAPO: every token counts the same within the step
    Rollouts that are left out of the batch (no signal) must be in `lengths`: they are samples.
    One whose tokens are masked has length 0: it is a sample without tokens.

    >>> row_weights([2, 4], "sequence", 8), row_weights([2, 4], "constant", 8)
    ([0.25, 0.125], [0.0625, 0.0625])
    """
    samples = len(lengths)
    if aggregation == "sequence":
        return [1 / (samples * max(length, 1)) for length in lengths]
    if aggregation == "constant":
        return [1 / (samples * constant) for _ in lengths]
    if aggregation == "token":
        return [1 / max(sum(lengths), 1)] * samples
    raise ValueError(f"unknown aggregation {aggregation!r}")


def make_rollouts(
    prompts: Sequence[Sequence[int]],
    groups: Sequence[Sequence[Completion]],
    advantages: Tensor,
    *,
    aggregation: str,
    constant: int | None,
    kept: Sequence[bool] | None = None,
    keep_all: bool = False,
    mask_truncated: bool = False,
) -> list[Rollout]:
    """The rollouts of a step that the loss needs, with the weights that the whole step gives them.

    A rollout with advantage 0 has exactly zero policy loss and gradient, so it is left out; it
    still counts in the denominator, so the update equals the textbook's at a fraction of the
    price. `keep_all` keeps it for the sake of another loss term (KL). `mask_truncated` takes the
    tokens of completions without an end token out of every loss term and denominator of tokens;
    as samples, and in the group's mean and std, they stay (as in TRL).

    Args:
        advantages: (P, G).
        constant: the length by which "constant" aggregation divides.
        kept: which groups take part at all; one that was replaced counts nowhere (none: all do).
    """
    if kept is not None:
        prompts, groups = (list(compress(part, kept)) for part in (prompts, groups))
        advantages = advantages[torch.tensor(kept, dtype=torch.bool)]
    flat = [completion for group in groups for completion in group]
    masked = [mask_truncated and completion.truncated for completion in flat]
    lengths = [0 if out else len(c.token_ids) for c, out in zip(flat, masked, strict=True)]
    weights = row_weights(lengths, aggregation, constant)
    rows = zip(flat, advantages.flatten().tolist(), weights, strict=True)
    return [
        Rollout(
            i // len(groups[0]),
            prompts[i // len(groups[0])],
            completion.token_ids,
            advantage,
            weight,
            completion.logprobs,
        )
        for i, (completion, advantage, weight) in enumerate(rows)
        if (keep_all or advantage != 0) and not masked[i]
    ]


def shard_rollouts(rollouts: Sequence[Rollout], distributed: Distributed) -> list[Rollout]:
    """This process's part of the learning: whole problems, so that their prompts stay shared."""
    problems = list(dict.fromkeys(rollout.problem for rollout in rollouts))
    mine = set(distributed.shard(problems))
    return [rollout for rollout in rollouts if rollout.problem in mine]


@dataclass(frozen=True)
class LossSums:
    """Detached sums over the tokens of a micro-batch; the step adds them up and divides."""

    policy: float
    kl: float  # Σ weight · estimate: as the loss adds it up
    kl_total: float  # Σ estimate
    clipped_low: float
    clipped_high: float
    tokens: int


def importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """Corrects for a sampler that computes a little differently from the trainer: (n, T).

    min(π_old / π_sampler, 2) per token, a constant for the gradient: truncated importance
    sampling (Ionides, 2008), as Yao et al. use it for rollouts from another engine (2025).
    """
    return (old_logprobs - sampler_logprobs).exp().clamp(max=IMPORTANCE_CAP).detach()


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """KL(policy ‖ reference) of each token from the one that was drawn (Schulman 2020): (n, T).

    With d = ref_logprobs - logprobs:
        k1  -d               unbiased, but its gradient is noise around 0: it pulls nowhere
        k2  d² / 2           biased value; on-policy its gradient is that of KL(policy ‖ reference)
        k3  exp(d) - d - 1   unbiased and never negative; DeepSeekMath's, and the default
    """
    difference = ref_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return difference.exp() - difference - 1
    raise ValueError(f"unknown KL estimator {estimator!r}")


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    completion_mask: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    ratio: str = "token",
    objective: str = "ppo",
    importance: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    kl_weight: float = 0.0,
    kl_estimator: str = "k3",
) -> tuple[Tensor, LossSums]:
    """Σᵢ wᵢ Σₜ lᵢₜ + KL, to be minimised; what tells algorithms apart comes in as choices.

    objective "ppo": l = -min(ρ A, clip(ρ, 1-ε_low, 1+ε_high) A), ρ = exp(logprobs - old_logprobs).
    With old = logprobs.detach() the value is -A and the gradient -A ∇logprob: REINFORCE with a
    group baseline. The minimum is taken for both signs of A (Schulman et al., arXiv 1707.06347).
    objective "weighted": l = -clip(ρ) A logprob with the clipped ratio a constant, so that no token
    loses its gradient (CISPO, arXiv 2506.13585).
    ratio "sequence": ρ is one number a completion, the exponential of the mean over its tokens
    (GSPO, arXiv 2507.18071).
    TRL's default multiplies the KL term by ρ; this one is not multiplied by anything.

    Args:
        logprobs, old_logprobs, ref_logprobs, completion_mask: (n, T).
        advantages: (n,).
        weights: (n,), what one token counts: `row_weights`.
        importance: (n, T), where another distribution was sampled: `importance_weights`.
    """
    mask = completion_mask.to(logprobs.dtype)
    scale = weights[:, None] * mask
    advantage = advantages[:, None]
    log_ratio = logprobs - old_logprobs
    if ratio == "sequence":
        log_ratio = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    rho = log_ratio.exp()  # (n, T), or (n, 1)
    clipped = rho.clamp(1 - clip_eps_low, 1 + clip_eps_high)
    if objective == "weighted":
        per_token = -clipped.detach() * advantage * logprobs
    else:
        per_token = -torch.minimum(rho * advantage, clipped * advantage)
    if importance is not None:
        per_token = per_token * importance
    policy = (per_token * scale).sum()
    loss = policy
    kl = kl_total = torch.zeros(())
    if ref_logprobs is not None:
        estimate = kl_estimate(logprobs, ref_logprobs, kl_estimator)
        kl, kl_total = (estimate * scale).sum(), (estimate * mask).sum()
        loss = policy + kl_weight * kl
    low = (rho < 1 - clip_eps_low) & (advantage < 0)
    high = (rho > 1 + clip_eps_high) & (advantage > 0)
    return loss, LossSums(
        policy=policy.item(),
        kl=kl.item(),
        kl_total=kl_total.item(),
        clipped_low=(low * mask).sum().item(),
        clipped_high=(high * mask).sum().item(),
        tokens=int(mask.sum()),
    )
