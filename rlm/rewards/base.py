"""What a user writes: a `RewardFunction`, a plain function, or TRL's keyword contract."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlm.cli import UsageError, terminal

Reward = float | None  # None: no verdict; the rollout leaves the group's statistics and the loss
Rollout = tuple[str, str, Mapping[str, Any]]  # completion, reference answer, columns
# Given to a plain function only if it names them: TRL's **kwargs hold columns and no more.
EXTRAS = ("reasoning_format", "is_truncated", "answer_type", "strict_verdict")
EXTRAS += ("solution", "completion_ids")
REWARD_ERRORS = (Exception, SystemExit)  # a reward that calls exit() ends nothing but itself
# A text where messages were expected, as in completion[0]["content"], fails with one of these.
NOT_MESSAGES = (TypeError, LookupError, AttributeError)
CONTRACT = (
    "write f(completion, reference_answer) -> float, which is called for each completion, or TRL's "
    "f(prompts, completions, answer, **columns) -> list of floats, or subclass "
    "rlm.rewards.RewardFunction"
)


class RewardFunction:
    """A reward of one completion. Subclass it and write `__call__` (or `async def`).

    Its weight in a sum is a class attribute, or given to `super().__init__(weight=2.0)`.
    Columns are keywords: `question`, the data set's own fields, `reasoning_format` (the name of
    the tags in use), `answer_type`, `is_truncated` (there is no end token) and `strict_verdict`
    (a `Verdict`: what the strict grading says). A `__call__` without `**columns` is given those
    that it names.
    """

    weight: float = 1.0

    def __init__(self, weight: float | None = None) -> None:
        if weight is not None:
            self.weight = weight

    def __call__(self, completion: str, reference_answer: str, **columns: Any) -> Reward:
        raise NotImplementedError

    def batch_call(
        self, completions: Sequence[str], reference_answers: Sequence[str], **columns: Sequence[Any]
    ) -> list[Reward]:
        """Many completions; each column holds an entry for each. Override it to score at once."""
        columns = named_columns(self, columns)
        return [
            self(text, answer, **{name: values[i] for name, values in columns.items()})
            for i, (text, answer) in enumerate(zip(completions, reference_answers, strict=True))
        ]

    def pop_metrics(self) -> dict[str, float]:
        """What to log of the calls since it was last asked, by name: sums over calls."""
        return {}


@dataclass(eq=False)
class BinaryReward(RewardFunction):
    """`true_value` where `condition_fn(completion, reference_answer)` holds, else `false_value`.

    For 1 if the final answer is right and 0 if not, take `CorrectnessReward`, the default.
    """

    condition_fn: Callable[[str, str], bool]
    weight: float = 1.0
    true_value: float = 1.0
    false_value: float = 0.0

    def __call__(self, completion: str, reference_answer: str, **columns: Any) -> float:
        holds = self.condition_fn(completion, reference_answer)
        return self.true_value if holds else self.false_value


class FunctionReward(RewardFunction):
    """Calls a function, plain or `async`, by the names of its parameters.

    TRL gives texts or, where a data set's prompts are conversations, lists of messages. So a
    function that fails on texts, and does not fail on messages, is given messages from then on.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(getattr(function, "weight", None))
        self.function = function
        self.takes_messages: bool | None = None  # not known before the first call

    def _call(self, given: Mapping[str, Any]) -> Any:
        given = named_columns(self.function, given)
        if inspect.iscoroutinefunction(self.function):
            return self._call_async(given)
        if self.takes_messages:
            return self.function(**as_messages(given))
        try:
            found = self.function(**given)
        except NOT_MESSAGES as error:
            try:
                return self._accept(self.function(**as_messages(given)), error)
            except REWARD_ERRORS:
                raise error from None
        self.takes_messages = False
        return found

    async def _call_async(self, given: Mapping[str, Any]) -> Any:
        if self.takes_messages:
            return await self.function(**as_messages(given))
        try:
            found = await self.function(**given)
        except NOT_MESSAGES as error:
            try:
                return self._accept(await self.function(**as_messages(given)), error)
            except REWARD_ERRORS:
                raise error from None
        self.takes_messages = False
        return found

    def _accept(self, found: Any, error: Exception) -> Any:
        """Return what a function made of messages; raise if it had taken texts before."""
        if self.takes_messages is False:
            raise error
        self.takes_messages = True
        name = getattr(self.function, "__name__", type(self.function).__name__)
        terminal.line(f"the reward {name} reads messages, so it is given messages, not texts")
        return found

    def pop_metrics(self) -> dict[str, float]:
        own = self.function
        return own.pop_metrics() if isinstance(own, RewardFunction) else {}


class PlainReward(FunctionReward):
    """A plain function `(prompts, completions, answer, **columns) -> list[float | None]`."""

    def __call__(self, completion: str, reference_answer: str, **columns: Any) -> Any:
        columns = {name: [value] for name, value in columns.items()}
        rewards = self.batch_call([completion], [reference_answer], **columns)
        return _only_later(rewards) if inspect.isawaitable(rewards) else _only(rewards)

    def batch_call(
        self, completions: Sequence[str], reference_answers: Sequence[str], **columns: Sequence[Any]
    ) -> Any:
        parameters = inspect.signature(self.function).parameters
        prompts = columns.pop("question", [""] * len(completions))
        given = {"prompts": prompts, "completions": completions, "answer": reference_answers}
        given |= {k: v for k, v in columns.items() if k in parameters or k not in EXTRAS}
        return self._call(given)


class PerCompletionReward(FunctionReward):
    """A plain function `(completion, reference_answer) -> float | None`.

    It may name what it wants beside the completion: `reference_answer` or `answer`, `prompt` or
    `question`, and columns.
    """

    def __call__(self, completion: str, reference_answer: str, **columns: Any) -> Any:
        parameters = inspect.signature(self.function).parameters
        others = {"answer": reference_answer, "prompt": columns.get("question", "")}
        given = {"completion": completion, "reference_answer": reference_answer, **columns}
        given |= {name: value for name, value in others.items() if name in parameters}
        return self._call(given)


def _only(rewards: Any) -> Any:
    (reward,) = as_list(rewards)
    return reward


async def _only_later(rewards: Awaitable[Any]) -> Any:
    return _only(await rewards)


def as_list(rewards: Any) -> list[Any]:
    """Return what a reward of many completions gave, as a list.

    Raises:
        UsageError: it is no sequence of values, but one value, a dict or None.
    """
    if isinstance(rewards, Mapping | str) or not isinstance(rewards, Iterable):
        raise UsageError(
            f"the reward returned {rewards!r:.60} for its completions: return a list with a "
            "number (or None) for each"
        )
    return list(rewards)


def as_messages(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reward's arguments with prompts and completions as TRL's conversations.

    >>> as_messages({"completion": "5", "answer": "5"})
    {'completion': [{'role': 'assistant', 'content': '5'}], 'answer': '5'}
    """
    roles = {"prompt": "user", "prompts": "user", "completion": "assistant"}
    roles |= {"completions": "assistant"}
    return {
        name: (
            value
            if name not in roles
            else [{"role": roles[name], "content": value}]
            if isinstance(value, str)
            else [[{"role": roles[name], "content": text}] for text in value]
        )
        for name, value in given.items()
    }


def named_columns(function: Callable[..., Any], columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns that a function names; all of them if it has `**columns`."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return columns
    return {name: value for name, value in columns.items() if name in parameters}


def adapt_reward(reward: Any) -> RewardFunction:
    """Return a function, or an object or class that can be called, as a RewardFunction.

    The names of its parameters say how it is to be called.

    Raises:
        TypeError: it is none of these, or its parameters have other names.
    """
    if isinstance(reward, type):
        reward = _make(reward)
    if not callable(reward):
        raise TypeError(f"{reward!r:.60} is no reward: {CONTRACT}")
    name = getattr(reward, "__name__", type(reward).__name__)
    try:
        signature = inspect.signature(reward)
    except ValueError:  # of some built-in functions
        raise TypeError(f"the parameters of {name} cannot be read: {CONTRACT}") from None
    parameters = signature.parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if "completions" in named:
        return PlainReward(reward)
    if isinstance(reward, RewardFunction) and _takes_two(signature):
        if not _has_own_call(type(reward)):
            raise TypeError(f"{name} has no __call__(self, completion, reference_answer)")
        return reward
    if "completion" in named:
        return PerCompletionReward(reward)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if takes_all and inspect.isroutine(reward) and named <= {"prompts", "answer", *EXTRAS}:
        return PlainReward(reward)
    raise TypeError(
        f"{name}{signature!s:.100} names neither completion nor completions: {CONTRACT}"
    )


def _takes_two(signature: inspect.Signature) -> bool:
    """Whether a completion and an answer can be given in this order, without names."""
    kinds = [p.kind for p in signature.parameters.values()]
    places = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return inspect.Parameter.VAR_POSITIONAL in kinds or sum(k in places for k in kinds) >= 2


def _has_own_call(cls: type[RewardFunction]) -> bool:
    return any(
        getattr(cls, n) is not getattr(RewardFunction, n) for n in ("__call__", "batch_call")
    )


def _make(cls: type) -> Any:
    """Make an object of a class that needs no arguments."""
    parameters = inspect.signature(cls).parameters.values()
    anyhow = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [f"{p.name}=..." for p in parameters if p.default is p.empty and p.kind not in anyhow]
    if needed:
        call = f"{cls.__name__}({', '.join(needed)})"
        raise TypeError(f"{cls.__name__} is a class that needs arguments: give {call}")
    return cls()
