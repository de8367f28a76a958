"""The reward interfaces: `RewardFunction`, plain functions, and TRL's keyword contract."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlm.cli import UsageError, terminal

Reward = float | None  # None: no verdict; the rollout is left out of group statistics and loss
Rollout = tuple[str, str, Mapping[str, Any]]  # completion, reference answer, columns
# Passed to a plain function only if it names them: TRL's **kwargs contain only columns.
EXTRAS = ("reasoning_format", "is_truncated", "answer_type", "strict_verdict")
EXTRAS += ("solution", "completion_ids")
REWARD_ERRORS = (Exception, SystemExit)  # exit() in a reward must not end the run
# Errors of code that expects messages, such as completion[0]["content"], but gets a text.
NOT_MESSAGES = (TypeError, LookupError, AttributeError)
CONTRACT = (
    "write f(completion, reference_answer) -> float, which is called for each completion, or TRL's "
    "f(prompts, completions, answer, **columns) -> list of floats, or subclass "
    "rlm.rewards.RewardFunction"
)


class RewardFunction:
    """A reward of one completion. Subclass it and define `__call__` (or `async def`).

    The weight in a sum is a class attribute, or set by `super().__init__(weight=2.0)`.
    Columns are keywords: `question`, the dataset's own fields, `reasoning_format` (the name of
    the tags in use), `answer_type`, `is_truncated` (no end token) and `strict_verdict` (the
    `Verdict` of the strict grading). A `__call__` without `**columns` gets those that it names.
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
        """Score many completions; columns have an entry for each. Override to score in batches."""
        named = named_columns(self, columns)
        return [
            self(text, answer, **{name: values[i] for name, values in named.items()})
            for i, (text, answer) in enumerate(zip(completions, reference_answers, strict=True))
        ]

    def pop_metrics(self) -> dict[str, float]:
        """Return sums over the calls since the last call of this method, by name, for the log."""
        return {}


@dataclass(eq=False)
class BinaryReward(RewardFunction):
    """`true_value` where `condition_fn(completion, reference_answer)` holds, else `false_value`.

    For a right final answer use `CorrectnessReward`, the default.
    """

    condition_fn: Callable[[str, str], bool]
    weight: float = 1.0
    true_value: float = 1.0
    false_value: float = 0.0

    def __call__(self, completion: str, reference_answer: str, **columns: Any) -> float:
        holds = self.condition_fn(completion, reference_answer)
        return self.true_value if holds else self.false_value


class FunctionReward(RewardFunction):
    """Calls a plain or `async` function by the names of its parameters.

    TRL passes texts, or lists of messages if a dataset's prompts are conversations. A function
    that fails on texts but not on messages gets messages from then on.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(getattr(function, "weight", None))
        self.function = function
        self.takes_messages: bool | None = None  # None until a first call succeeds

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
        """Return the result of a call with messages; raise if earlier calls accepted texts."""
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

    It may also name `reference_answer` or `answer`, `prompt` or `question`, and columns.
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
    """Return a batch reward's result as a list.

    Raises:
        UsageError: it is not a sequence of values but one value, a dict or None.
    """
    if isinstance(rewards, Mapping | str) or not isinstance(rewards, Iterable):
        raise UsageError(
            f"the reward returned {rewards!r:.60} for its completions: return a list with a "
            "number (or None) for each"
        )
    return list(rewards)


def as_messages(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reward's arguments with prompts and completions as conversations, as in TRL.

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
    """Wrap a function, a callable object or a class as a RewardFunction.

    The names of its parameters decide how it is called.

    Raises:
        TypeError: it is not callable, or its parameters have other names.
    """
    if isinstance(reward, type):
        reward = _make(reward)
    if not callable(reward):
        raise TypeError(f"{reward!r:.60} is no reward: {CONTRACT}")
    name = getattr(reward, "__name__", type(reward).__name__)
    try:
        signature = inspect.signature(reward)
    except ValueError:  # some built-in functions have no signature
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
    """Return whether a function accepts a completion and an answer by position."""
    kinds = [p.kind for p in signature.parameters.values()]
    places = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return inspect.Parameter.VAR_POSITIONAL in kinds or sum(k in places for k in kinds) >= 2


def _has_own_call(cls: type[RewardFunction]) -> bool:
    return any(
        getattr(cls, n) is not getattr(RewardFunction, n) for n in ("__call__", "batch_call")
    )


def _make(cls: type) -> Any:
    """Instantiate a class without arguments."""
    parameters = inspect.signature(cls).parameters.values()
    anyhow = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [f"{p.name}=..." for p in parameters if p.default is p.empty and p.kind not in anyhow]
    if needed:
        call = f"{cls.__name__}({', '.join(needed)})"
        raise TypeError(f"{cls.__name__} is a class that needs arguments: give {call}")
    return cls()
