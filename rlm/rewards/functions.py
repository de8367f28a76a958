"""The built-in rewards, and the conversion of `reward_fn` or `--reward` to a RewardFunction.

No built-in reward executes text as code. A reward that compares answers counts only an explicit
answer: a number that merely ends a text does not count.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

from rlm.cli import UsageError, load_from_file
from rlm.data import FORMATS, Format, Problem
from rlm.grading import (
    Verdict,
    after_hashes,
    explicit_answers,
    has_wrong_equation,
    parse_number,
    split_completion,
)
from rlm.rewards.base import (
    EXTRAS,
    FunctionReward,
    PlainReward,
    Reward,
    RewardFunction,
    adapt_reward,
    named_columns,
)

# Arguments that a reward receives in addition to the columns: the first set if a call scores all
# completions, the second set if a call scores one completion.
GIVEN_TO_BATCH = {"answer", "completions", "prompts"}
GIVEN_TO_ONE = {"answer", "completion", "prompt", "reference_answer"}
# Arguments that only TRL's trainer passes to rewards.
TRAINERS_OWN = {"trainer_state", "log_extra", "log_metric", "environments"}
# Columns that the scorer adds to the columns of the data.
COLUMNS = {*EXTRAS} - {"solution"}
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
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
    """A reward of 1 if the strict verdict is "correct" and no equation is wrong, else 0."""

    allows_wrong_equations: ClassVar[bool] = False


@dataclass(eq=False)
class GSM8KReward(RewardFunction):
    """A shaped reward for GSM8K that also rewards near misses and the format.

    The reward is `correct` for the right number or `close` for a number that is off by at most 1,
    plus `format_bonus` if the format is right; the total is limited to 1.
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
            gold = parse_number(after_hashes(reference_answer))
            is_close = gold is not None and abs(verdict.value - gold) <= 1
            reward += self.close if is_close else 0.0
        return min(reward, 1.0)


@dataclass(eq=False)
class FormatReward(RewardFunction):
    """A reward for the format of a completion, whatever its answer is.

    The reward is `format_reward` for exactly one non-empty reasoning block, followed by exactly one
    non-empty answer block, and `partial_reward` if only one of the two blocks is valid or their
    order is wrong.
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
    to two distinct connecting words.
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
    """The weighted mean of several rewards, which are its parts. Each part is also logged.

    A part is a reward, a function, or a pair (reward, weight). A part that returns None or NaN is
    left out of the mean. If no part is left, or the remaining weights do not add up to more than 0,
    the result is None.
    """

    def __init__(self, rewards: Sequence[Any], weight: float = 1.0) -> None:
        if not rewards:
            raise ValueError("CombinedReward needs at least one reward")
        self.weight = weight
        self.parts: dict[str, RewardFunction] = {}
        self.weights: dict[str, float] = {}
        for item in rewards:
            is_pair = isinstance(item, list | tuple) and len(item) == 2
            reward, share = item if is_pair else (item, None)
            name = getattr(reward, "__name__", type(reward).__name__)
            while name in self.parts:
                name = f"{name}_{len(self.parts) + 1}"
            self.parts[name] = part = adapt_reward(reward)
            share = part.weight if share is None else share
            if not isinstance(share, Real):
                raise TypeError(f"the weight of {name} is {share!r}, not a number")
            self.weights[name] = float(share)
        if not sum(self.weights.values()) > 0:  # this comparison also rejects NaN
            raise ValueError("the weights of a CombinedReward must add up to more than 0")
        self._sums: defaultdict[str, float] = defaultdict(float)

    def get_component_rewards(
        self, completion: str, reference_answer: str, **columns: Any
    ) -> dict[str, Reward]:
        """Return the reward of each part for a completion, by the part's name.

        The value of an asynchronous part is an awaitable.
        """
        return {
            name: part(completion, reference_answer, **named_columns(part, columns))
            for name, part in self.parts.items()
        }

    def __call__(
        self, completion: str, reference_answer: str, **columns: Any
    ) -> Reward | Awaitable[Reward]:
        found = [*self.get_component_rewards(completion, reference_answer, **columns).values()]
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
        if weight <= 0:  # no part gave a reward, or only parts with negative weights did
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
    """Return the verdict in `columns` that the scorer passed, or grade the completion.

    Raises:
        ValueError: the reference answer does not fit its answer type. A scorer logs this instead.
    """
    if given := columns.get("strict_verdict"):
        return given
    verdict = _format(columns).grade(completion, answer, strict=True)
    if verdict.reason == "gold_unreadable":
        kind = columns.get("answer_type", "number")
        raise ValueError(f"the reference answer is not a {kind}: {answer[:40]!r}")
    return verdict


def _explicit_answer(completion: str, answer: str, columns: Mapping[str, Any]) -> Verdict:
    """Return the lenient verdict if the answer is explicit: in an answer tag, a box or after ####.

    Otherwise the verdict is "no_answer".
    """
    tags = _format(columns)
    rest = split_completion(completion, tags.reasoning_tag)[1]
    if not explicit_answers(rest, tags.answer_tag):
        return Verdict(False, "no_answer", None)
    return tags.grade(completion, answer, strict=False)


def _one_block(text: str, tag: str) -> re.Match[str] | None:
    """Return the block of a tag; None if the tag is missing or repeated, or the block is empty."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    block = re.search(f"{re.escape(opening)}(.*?){re.escape(closing)}", text, re.DOTALL)
    return block if block and block[1].strip() else None


def as_reward(
    reward: RewardFunction | Callable[..., Any] | Sequence[Any] | None,
) -> RewardFunction:
    """Convert a reward in any supported form to a RewardFunction.

    Args:
        reward: a RewardFunction or a subclass of it, a function, a list of such rewards or of
            (reward, weight) pairs (a `CombinedReward`), or None (a `CorrectnessReward`).

    Raises:
        TypeError, ValueError: `reward` is of another kind; the message explains what to pass.
    """
    if reward is None:
        return CorrectnessReward()
    if isinstance(reward, list | tuple):
        return CombinedReward(reward)
    return adapt_reward(reward)


def write_reward_template(path: Path) -> None:
    """Write a working example of a reward to a new file.

    Raises:
        UsageError: the file name does not end with .py, or the file exists or cannot be written.
    """
    if path.suffix != ".py":
        raise UsageError(f"{path}: the name of the new file must end with .py")
    text = Path(__file__).with_name("template.py").read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text.replace("FILE", str(path)))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def load_reward(spec: str | None, problems: Sequence[Problem] = ()) -> RewardFunction | None:
    """Load the reward that `--reward` names; return None if `spec` is None.

    Args:
        spec: `steps`, or FILE.py:NAME for an object that `as_reward` accepts.
        problems: the problems to score; they must have the columns that the reward requires.

    Raises:
        UsageError: the file or name does not exist, running the file fails, or the problems lack a
            required column.
    """
    if spec is None:
        return None
    if spec == "steps":
        return StepsReward()
    found = load_from_file("--reward", spec, (list, tuple))
    try:
        reward = as_reward(found)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--reward {spec}: {error}") from error
    if problems:
        check_columns(reward, problems)
    return reward


def check_columns(reward: RewardFunction, problems: Sequence[Problem]) -> None:
    """Check that the problems have the columns that a reward requires.

    Raises:
        UsageError: the problems have no column for a parameter without a default, or they have
            open answers although the reward compares answers.
    """
    if any(problem.answer_type == "open" for problem in problems) and _compares(reward):
        raise UsageError(
            "the data has open answers (answer_type), which no built-in reward can judge: pass "
            "your own reward with --reward FILE.py:NAME"
        )
    there = COLUMNS.union(*(problem.columns for problem in problems))
    if any(problem.solution for problem in problems):
        there.add("solution")
    for name, function, given in _functions(reward):
        parameters = inspect.signature(function).parameters.values()
        named = [p.name for p in parameters if p.kind in NAMED and p.default is p.empty]
        unknown = [one for one in named if one not in there | given]
        if not unknown:
            continue
        known = {"solution", *TRAINERS_OWN}  # never treated as misspellings
        word = "answer" if unknown[0] == "reference_answer" and given else unknown[0]
        close = difflib.get_close_matches(word, sorted((there | given) - known), 1)
        meant = f" (did you mean {close[0]}?)" if close and unknown[0] not in known else ""
        why = "the data does not have (a column that --columns renames has only the new name)"
        if TRAINERS_OWN.issuperset(unknown):
            why = "only TRL's trainer passes: add a default value, or accept **kwargs instead"
        elif unknown[0] in GIVEN_TO_BATCH | GIVEN_TO_ONE:
            why = "a reward of this form does not receive"
        raise UsageError(
            f"the reward {name} requires {', '.join(unknown)}{meant}, which {why}; available "
            f"columns: {', '.join([*sorted(given), *sorted(there)])}"
        )


def _functions(reward: RewardFunction) -> list[tuple[str, Callable[..., Any], set[str]]]:
    """Return each user-defined function or `__call__` in a reward: name, callable and arguments.

    The arguments are those that it receives in addition to the columns. The first two arguments of
    a `__call__` are bound, because these parameters are positional and may have any name.
    """
    found: list[tuple[str, Callable[..., Any], set[str]]] = []
    if isinstance(reward, FunctionReward):
        if inspect.isroutine(reward.function):
            given = GIVEN_TO_BATCH if isinstance(reward, PlainReward) else GIVEN_TO_ONE
            found = [(reward.function.__name__, reward.function, given)]
    elif not is_built_in(reward) and type(reward).__call__ is not RewardFunction.__call__:
        found = [(type(reward).__name__, partial(reward.__call__, "", ""), set())]
    return found + [function for part in parts_of(reward) for function in _functions(part)]


def _compares(reward: RewardFunction) -> bool:
    """Return whether a reward or a part of it compares answers with the reference."""
    own = isinstance(reward, CorrectnessReward | GSM8KReward)
    return own or any(map(_compares, parts_of(reward)))


def is_built_in(reward: RewardFunction) -> bool:
    """Return whether a reward and all its parts are built in; such a reward needs no time limit."""
    return type(reward).__module__ == __name__ and all(map(is_built_in, parts_of(reward)))


def parts_of(reward: RewardFunction) -> Iterable[RewardFunction]:
    """Return the parts of a CombinedReward; () for any other reward."""
    return reward.parts.values() if isinstance(reward, CombinedReward) else ()
