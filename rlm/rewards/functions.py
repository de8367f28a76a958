"""The built-in rewards.

No reward executes text as code. A reward that compares answers counts only an explicit answer: a
number that merely ends a text does not count.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

from rlm.data import FORMATS, Format
from rlm.grading import Verdict, has_wrong_equation, parse_number, split_completion
from rlm.rewards.base import Reward, RewardFunction, adapt_reward, named_columns

_STEP = re.compile(r"^\s*(?:\d+[.)]|[-*•]|step\s+\d+)", re.IGNORECASE)
_CONNECTIVE = re.compile(
    r"\b(?:because|therefore|thus|since|so|then|hence|first|next|finally)\b",
    re.IGNORECASE,
)


@dataclass(eq=False)
class CorrectnessReward(RewardFunction):
    """The default reward: 1 if the strict verdict is "correct", else 0."""

    weight: float = 1.0
    right_with_wrong_equation: int = field(default=0, init=False)
    allows_wrong_equations: ClassVar[bool] = True

    def __call__(self, completion: str, reference_answer: str, **columns: Any) -> float:
        verdict = _strict_verdict(completion, reference_answer, columns)
        is_flawed = verdict.correct and has_wrong_equation(completion)
        self.right_with_wrong_equation += is_flawed
        return float(verdict.correct and (self.allows_wrong_equations or not is_flawed))

    def pop_metrics(self) -> dict[str, float]:
        """Return the number of completions with a correct answer but a wrong equation."""
        found = {"reward/right_with_wrong_equation_rate": float(self.right_with_wrong_equation)}
        self.right_with_wrong_equation = 0
        return found


@dataclass(eq=False)
class StepsReward(CorrectnessReward):
    """A reward of 1 if the strict verdict is "correct" and no equation is wrong, else 0.

    A completion without equations can be rewarded too, because reasoning in words is allowed.
    """

    allows_wrong_equations: ClassVar[bool] = False


@dataclass(eq=False)
class ConstantReward(RewardFunction):
    """A reward that is the same for every completion, so that the model learns nothing.

    It is meant for tests and control runs.
    """

    value: float = 0.0
    weight: float = 1.0

    def __call__(self, completion: str, reference_answer: str, **columns: Any) -> float:
        return self.value


@dataclass(eq=False)
class GSM8KReward(RewardFunction):
    """A shaped reward for GSM8K that also rewards near misses and the format.

    The reward is `correct` for the right number or `close` for a number that is off by at most 1,
    plus `format_bonus` if the format is right; the total is limited to 1. A wrong answer can
    therefore score above 0. `CorrectnessReward`, by contrast, is either 0 or 1.
    """

    weight: float = 1.0
    correct: float = 1.0
    close: float = 0.3
    format_bonus: float = 0.1

    def __call__(self, completion: str, reference_answer: str, **columns: Any) -> float:
        verdict = _explicit_answer(completion, reference_answer, columns)
        strict = _strict_verdict(completion, reference_answer, columns)
        reward = self.format_bonus if strict.is_answer else 0.0
        if verdict.correct:
            reward += self.correct
        elif isinstance(verdict.value, Fraction):
            gold = parse_number(reference_answer)
            is_close = gold is not None and abs(verdict.value - gold) <= 1
            reward += self.close if is_close else 0.0
        return min(reward, 1.0)


@dataclass(eq=False)
class FormatReward(RewardFunction):
    """A reward for the format of a completion, whatever its answer is.

    The reward is `format_reward` if the completion has exactly one non-empty reasoning block,
    followed by exactly one non-empty answer block; `partial_reward` if only one of the two blocks
    is valid or their order is wrong; and 0 otherwise. A model that is trained with this reward
    alone learns to write meaningless text between the right tags.
    """

    weight: float = 1.0
    format_reward: float = 0.2
    partial_reward: float = 0.1

    def __call__(self, completion: str, reference_answer: str, **columns: Any) -> float:
        tags = _format(columns)
        reasoning = _one_block(completion, tags.reasoning_tag)
        answer = _one_block(completion, tags.answer_tag)
        if reasoning and answer and reasoning.end() <= answer.start():
            return self.format_reward
        return self.partial_reward if reasoning or answer else 0.0


@dataclass(eq=False)
class ReasoningQualityReward(RewardFunction):
    """A heuristic reward of up to 0.3 for the surface form of the reasoning.

    The reward is 0.1 for ten distinct words, 0.1 for two distinct steps, and 0.05 for each of up
    to two distinct connecting words. Repetition is not rewarded, but the heuristic is still easily
    exploited: combine it with a reward for the verified answer and give it a small weight.
    """

    weight: float = 1.0

    def __call__(self, completion: str, reference_answer: str, **columns: Any) -> float:
        block = _one_block(completion, _format(columns).reasoning_tag)
        if block is None:
            return 0.0
        reward = 0.1 if len(set(block[1].lower().split())) >= 10 else 0.0
        lines = {line.strip() for line in block[1].splitlines() if _STEP.match(line)}
        reward += 0.1 if len(lines) >= 2 else 0.0
        words = {word.lower() for word in _CONNECTIVE.findall(block[1])}
        return reward + 0.05 * min(len(words), 2)


class CombinedReward(RewardFunction):
    """The weighted mean of several rewards, its parts; the log contains each part.

    A part that returns no verdict (None or NaN) is left out of the mean. If no verdict is left, or
    the remaining weights do not add up to more than 0, the result is None. A part may be a plain
    function; its weight is 1 unless a pair (function, weight) is passed. The call returns an
    awaitable if any part returns an awaitable.
    """

    def __init__(self, rewards: Sequence[Any], weight: float = 1.0) -> None:
        """
        Args:
            rewards: RewardFunctions, plain functions, or (reward, weight) pairs.
        """
        if not rewards:
            raise ValueError("CombinedReward needs at least one reward")
        self.weight = weight
        self.parts: dict[str, RewardFunction] = {}
        self.weights: dict[str, float] = {}
        for item in rewards:
            is_pair = isinstance(item, list | tuple) and len(item) == 2
            reward, share = item if is_pair else (item, None)
            name = getattr(reward, "__name__", type(reward).__name__)
            name = f"{name}_{len(self.parts) + 1}" if name in self.parts else name
            self.parts[name] = part = adapt_reward(reward)
            self.weights[name] = part.weight if share is None else share
            if not isinstance(self.weights[name], int | float):
                raise TypeError(f"the weight of {name} is {self.weights[name]!r}, not a number")
        if not sum(self.weights.values()) > 0:  # this comparison also rejects NaN
            raise ValueError("the weights of a CombinedReward must add up to more than 0")
        self._sums: defaultdict[str, float] = defaultdict(float)

    def get_component_rewards(
        self, completion: str, reference_answer: str, **columns: Any
    ) -> dict[str, Reward]:
        """Return the reward of each part for a completion, by the part's name.

        Parts that return awaitables are not supported.
        """
        return {
            name: part(completion, reference_answer, **named_columns(part, columns))
            for name, part in self.parts.items()
        }

    def __call__(
        self, completion: str, reference_answer: str, **columns: Any
    ) -> Reward | Awaitable[Reward]:
        found = [
            part(completion, reference_answer, **named_columns(part, columns))
            for part in self.parts.values()
        ]
        if any(map(inspect.isawaitable, found)):
            return self._await_and_combine(found)
        return self.combine(found)

    async def _await_and_combine(self, found: Sequence[Any]) -> Reward:
        return self.combine([await r if inspect.isawaitable(r) else r for r in found])

    def combine(self, found: Sequence[Reward]) -> Reward:
        """Return the weighted mean of the parts' rewards, which are in the order of the parts."""
        pairs = zip(self.parts, found, strict=True)
        values = {n: v for n, v in pairs if v is not None and not math.isnan(v)}
        for name, value in values.items():
            self._sums[f"reward/{name}"] += value
        weight = sum(self.weights[name] for name in values)
        if weight <= 0:  # no part gave a verdict, or only parts with negative weights did
            return None
        return sum(self.weights[name] * value for name, value in values.items()) / weight

    def pop_metrics(self) -> dict[str, float]:
        """Return the sum of each part's rewards, and the parts' own metrics."""
        found = dict(self._sums)
        self._sums.clear()
        for part in self.parts.values():
            found |= part.pop_metrics()
        return found


def _format(columns: Mapping[str, Any]) -> Format:
    format = FORMATS[columns.get("reasoning_format", "deepseek")]
    return format.with_answer_type(columns.get("answer_type", "number"))


def _strict_verdict(completion: str, answer: str, columns: Mapping[str, Any]) -> Verdict:
    """Return the verdict in `columns` that the scorer passed, or grade the completion."""
    given = columns.get("strict_verdict")
    return given or _format(columns).grade(completion, answer, strict=True)


def _explicit_answer(completion: str, answer: str, columns: Mapping[str, Any]) -> Verdict:
    """Return the lenient verdict if the answer is explicit: in an answer tag, a box or after ####.

    Otherwise the verdict is "no_answer".
    """
    tags = _format(columns)
    rest = split_completion(completion, tags.reasoning_tag)[1]
    if not any(mark in rest for mark in (f"<{tags.answer_tag}>", "\\boxed", "####")):
        return Verdict(False, "no_answer", None)
    return tags.grade(completion, answer, strict=False)


def _one_block(text: str, tag: str) -> re.Match[str] | None:
    """Return the block of a tag, or None if the tag is missing or repeated, or its block empty."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    block = re.search(f"{re.escape(opening)}(.*?){re.escape(closing)}", text, re.DOTALL)
    return block if block and block[1].strip() else None
