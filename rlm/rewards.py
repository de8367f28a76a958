"""Rewards: what a user writes, and the one seam through which every recipe scores a step.

A trainer calls a `Scorer` once a step with all problems and all completions. What a user writes
is smaller: a plain function with TRL's keyword contract, or a `RewardFunction` per completion.
`as_scorer` adapts either.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlm.answers import grade
from rlm.data import Problem
from rlm.prompts import Format

Reward = float | None  # None: no verdict; the rollout leaves the group's statistics and the loss


@dataclass
class Scores:
    """rewards[p][g] of each rollout, and figures for the log (`reward/…`, `reason/…`)."""

    rewards: list[list[Reward]]
    metrics: dict[str, float] = field(default_factory=dict)


Scorer = Callable[[Sequence[Problem], Sequence[Sequence[str]]], Scores]


class RewardFunction:
    """A reward of one completion. Subclass it, set `weight`, write `__call__`."""

    weight: float = 1.0

    def __call__(self, completion: str, reference_answer: str, **columns: object) -> Reward:
        raise NotImplementedError


class CorrectnessReward(RewardFunction):
    """1 if the strict verdict is "correct", else 0: the reward of the solver."""

    def __init__(self, format: Format, weight: float = 1.0) -> None:
        self.format = format
        self.weight = weight
        self.reasons: Counter[str] = Counter()

    def __call__(self, completion: str, reference_answer: str, **columns: object) -> Reward:
        verdict = grade(
            completion,
            reference_answer,
            strict=True,
            reasoning_tag=self.format.reasoning_tag,
            answer_tag=self.format.answer_tag,
        )
        self.reasons[verdict.reason] += 1
        return float(verdict.correct)


def as_scorer(reward: RewardFunction | Callable[..., Sequence[Reward]]) -> Scorer:
    """Adapt a user's reward to the seam.

    A plain function is called once with all rollouts of the step, by keyword, as TRL does:
    `(prompts, completions, answer, **columns) -> list[float | None]`, one entry per completion.
    A parameter it does not take is not passed.

    Raises (when called):
        ValueError: it returned another number of rewards, or an infinite one. NaN counts as None.
    """
    if isinstance(reward, RewardFunction):
        return lambda problems, groups: _score_each(reward, problems, groups)
    parameters = inspect.signature(reward).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}

    def score(problems: Sequence[Problem], groups: Sequence[Sequence[str]]) -> Scores:
        rows = [(p, text) for p, group in zip(problems, groups, strict=True) for text in group]
        columns = {
            "prompts": [problem.question for problem, _ in rows],
            "completions": [text for _, text in rows],
            "answer": [problem.answer for problem, _ in rows],
        }
        for name in {name for problem, _ in rows for name in problem.columns} - set(columns):
            columns[name] = [problem.columns.get(name) for problem, _ in rows]
        given = columns if takes_all else {k: v for k, v in columns.items() if k in names}
        return _regroup(list(reward(**given)), groups)

    return score


def _score_each(
    reward: RewardFunction, problems: Sequence[Problem], groups: Sequence[Sequence[str]]
) -> Scores:
    reasons = getattr(reward, "reasons", None)
    if reasons is not None:
        reasons.clear()
    flat = [
        reward(text, problem.answer, **problem.columns)
        for problem, group in zip(problems, groups, strict=True)
        for text in group
    ]
    scores = _regroup(flat, groups)
    if reasons is not None:
        scores.metrics |= {f"reason/{code}": n / len(flat) for code, n in sorted(reasons.items())}
    return scores


def _regroup(flat: list[Reward], groups: Sequence[Sequence[str]]) -> Scores:
    count = sum(map(len, groups))
    if len(flat) != count:
        raise ValueError(
            f"the reward function returned {len(flat)} rewards for {count} completions"
        )
    values = [None if r is None or math.isnan(r) else float(r) for r in flat]
    if any(r is not None and math.isinf(r) for r in values):
        raise ValueError("the reward function returned an infinite reward")
    rows = iter(values)
    return Scores([[next(rows) for _ in group] for group in groups])
