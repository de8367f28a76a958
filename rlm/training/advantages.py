"""Group-relative advantages, which compare each completion with the others of the same prompt.

In the shapes, P is the number of problems and G the group size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlm.data import Problem
from rlm.sampling import Completion
from rlm.training.config import GRPOConfig

ADVANTAGE_EPS = 1e-4  # added to the standard deviation of the rewards, as in TRL
# With "share", a group has no signal if all its rewards are within this distance of each other. The
# shares do not depend on the size of the differences, so without this tolerance a rounding error
# would weigh as much as a right answer.
SHARE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Group:
    """The rollouts of one problem, sampled and scored."""

    problem: Problem
    prompt: Sequence[int]
    completions: Sequence[Completion]  # G
    texts: Sequence[str]
    rewards: Sequence[float | None]  # None for a completion without a reward
    reasons: Sequence[str] = ()  # reason of each completion's strict verdict (`Scores`)


def reward_tensor(rewards: Sequence[Sequence[float | None]]) -> Tensor:
    """Return the rewards as a tensor (P, G), with NaN for completions without a reward."""
    return torch.tensor([[math.nan if r is None else r for r in group] for group in rewards])


def group_advantages(
    rewards: Tensor, kind: str, negative_weight: float = 1.0, copies: Tensor | None = None
) -> Tensor:
    """Compute the advantage of each rollout over its group from the rewards: (P, G) → (P, G).

    `kind` selects the formula:

        std      (r - mean) / (std + 1e-4), where the std divides by n - 1, as in TRL
        centred  r - mean                                                  Dr. GRPO
        mean     (r - mean) / mean. If a reward is negative, all rewards of the
                 group are first shifted up until the lowest is 0.         MaxRL
        share    G · (r - mean) / Σ |r - mean|, where Σ is over the rollouts on the same side of
                 the mean. With rewards 0 and 1, each of K right rollouts gets +G / K and each of W
                 wrong ones -G / W. Every group has the same total weight, however
                 little its rewards differ, unless all of them are within 1e-3 of
                 each other.                                               TOPR

    Negative advantages are then multiplied by `negative_weight`. A rollout without a reward (NaN)
    is left out of the group's mean and std, and its advantage is 0. In a group with fewer than two
    rewards or without signal (`has_signal`), all advantages are exactly 0.

    `copies`, (P, G) of bool, selects rollouts that count in the mean and the std, but whose
    advantage is 0 (see `copies_above_mean`).

    >>> group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), "centred")
    tensor([[ 0.5000, -0.5000, -0.5000,  0.5000]])
    """
    judged = ~rewards.isnan()
    count = judged.sum(1, keepdim=True)  # (P, 1)
    mean = rewards.nansum(1, keepdim=True) / count.clamp(min=1)
    advantages = torch.where(judged, rewards - mean, 0.0)
    if kind == "std":
        std = (advantages.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        advantages = advantages / (std + ADVANTAGE_EPS)
    elif kind == "mean":
        lowest = rewards.nan_to_num(nan=torch.inf).amin(1, keepdim=True).clamp(max=0)
        advantages = advantages / (mean - lowest)  # 0 only where all rewards are equal
    if copies is not None:
        advantages = advantages.masked_fill(copies, 0.0)
    if kind == "share":
        above, below = (advantages * sign > 0 for sign in (1, -1))
        sums = [(advantages * side).sum(1, keepdim=True).abs() for side in (above, below)]
        advantages = rewards.shape[1] * advantages / torch.where(above, *sums)
    advantages = torch.where(advantages < 0, negative_weight * advantages, advantages)
    return torch.where((count >= 2) & has_signal(rewards, kind)[:, None], advantages, 0.0)


def copies_above_mean(groups: Sequence[Group], rewards: Tensor) -> Tensor:
    """Find the completions with rewards above the group's mean that repeat an earlier completion.

    Returns:
        Whether each completion is such a copy, (P, G) of bool.
    """
    copies = rewards > rewards.nanmean(1, keepdim=True)
    for place, group in enumerate(groups):
        seen: set[tuple[int, ...]] = set()
        for row, completion in enumerate(group.completions):
            tokens = tuple(completion.token_ids)
            if copies[place, row]:
                copies[place, row] = tokens in seen
                seen.add(tokens)
    return copies


def has_signal(rewards: Tensor, kind: str = "") -> Tensor:
    """Return whether each group contains two different rewards: (P,) of bool.

    With the kind "share" of `group_advantages`, they must differ by at least SHARE_TOLERANCE.

    A group with equal rewards has no gradient. This function compares the rewards instead of the
    advantages, because rounding in the mean can produce an advantage of 1e-9 in a group whose
    rewards are all equal.
    """
    high = rewards.nan_to_num(nan=-torch.inf).amax(1)
    low = rewards.nan_to_num(nan=torch.inf).amin(1)
    return high - low >= SHARE_TOLERANCE if kind == "share" else high - low > 1e-8


def overlong_penalties(groups: Sequence[Group], config: GRPOConfig) -> Tensor:
    """Compute the length penalties, (P, G), which are all 0 if `overlong_buffer` is 0."""
    return torch.tensor([[_soft_overlong(c, config) for c in g.completions] for g in groups])


def _soft_overlong(completion: Completion, config: GRPOConfig) -> float:
    """Return the length penalty of a completion (DAPO, equation 13).

    The penalty is 0 up to max_new_tokens - overlong_buffer tokens, and then falls linearly to -1 at
    max_new_tokens. A completion without an end token gets the full penalty, regardless of its
    length.
    """
    buffer = config.overlong_buffer
    if not buffer or completion.truncated:
        return -1.0 if buffer else 0.0
    excess = len(completion.token_ids) - (config.max_new_tokens - buffer)
    return -max(excess, 0) / buffer
