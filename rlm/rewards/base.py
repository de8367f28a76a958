"""The reward interfaces: `RewardFunction`, functions of one completion, and TRL's signature."""

from __future__ import annotations

import inspect
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from rlm.cli import UsageError, terminal

# None means no reward: the rollout is left out of the group statistics and of the loss.
Reward = float | None
# These arguments are passed to a function with TRL's signature only if it names them, because most
# of them are not in the **kwargs that TRL passes.
EXTRAS = ("reasoning_format", "is_truncated", "answer_type", "strict_verdict")
EXTRAS += ("question", "solution", "completion_ids")
# Neither exit() nor a cancelled task in a reward may end the run.
REWARD_ERRORS = (Exception, SystemExit, CancelledError)
# Errors raised by code that expects messages (completion[0]["content"]) but receives a string.
# KeyError is left out, because reading a judge's reply without an expected key raises it, too.
NOT_MESSAGES = (TypeError, IndexError, AttributeError)
CONTRACT = (
    "write f(completion, reference_answer) -> float, which is called for each completion, or TRL's "
    "f(prompts, completions, answer, **columns) -> list of floats, or subclass "
    "rlm.rewards.RewardFunction"
)


class RewardFunction:
    """Base class of rewards that score one completion at a time.

    Subclass it and define `__call__`, which may be `async def`. The columns, which
    docs/explanation/algorithms.md lists, are passed as keyword arguments.
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
        """Score many completions; each column has one entry per completion.

        Override this method to score a whole batch at once.
        """
        named = named_columns(self, columns)
        return [
            self(text, answer, **{name: values[i] for name, values in named.items()})
            for i, (text, answer) in enumerate(zip(completions, reference_answers, strict=True))
        ]

    def pop_metrics(self) -> dict[str, float]:
        """Return sums over the completions scored since the last call, by metric name.

        The log contains each sum divided by the number of completions.
        """
        return {}


class FunctionReward(RewardFunction):
    """Calls a function or object, `async` or not, with the arguments that its signature names.

    TRL passes strings, or lists of messages if the dataset's prompts are conversations. A function
    that fails on strings but succeeds on messages receives messages in all later calls.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(getattr(function, "weight", None))
        self.function = function
        self.is_async = any(map(inspect.iscoroutinefunction, (function, function.__call__)))
        self.takes_messages: bool | None = None  # None until a first call succeeds

    def _call(self, given: Mapping[str, Any]) -> Any:
        given = named_columns(self.function, given)
        if self.is_async:
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
        """Return the result of a call in which the function accepted messages.

        Raises the error of the call with strings if earlier calls accepted strings.
        """
        if self.takes_messages is False:
            raise error
        self.takes_messages = True
        name = getattr(self.function, "__name__", type(self.function).__name__)
        terminal.line(
            f"the reward {name} reads messages, so it receives lists of messages instead of strings"
        )
        return found

    def pop_metrics(self) -> dict[str, float]:
        own = self.function
        return own.pop_metrics() if isinstance(own, RewardFunction) else {}


class PlainReward(FunctionReward):
    """Wraps a function with TRL's signature, which scores all completions in one call.

    The signature is `(prompts, completions, answer, **columns) -> list[float | None]`.
    """

    def __call__(self, completion: str, reference_answer: str, **columns: Any) -> Any:
        columns = {name: [value] for name, value in columns.items()}
        rewards = self.batch_call([completion], [reference_answer], **columns)
        return _only_later(rewards) if inspect.isawaitable(rewards) else _only(rewards)

    def batch_call(
        self, completions: Sequence[str], reference_answers: Sequence[str], **columns: Sequence[Any]
    ) -> Any:
        parameters = inspect.signature(self.function).parameters
        prompts = columns.get("question", [""] * len(completions))
        given = {"prompts": prompts, "completions": completions, "answer": reference_answers}
        given |= {k: v for k, v in columns.items() if k in parameters or k not in EXTRAS}
        return self._call(given)


class PerCompletionReward(FunctionReward):
    """Wraps a function `(completion, reference_answer) -> float | None`.

    The parameter for the reference answer may also be named `answer`. The signature may also
    contain `prompt` or `question`, and any columns.
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
    """Return the result of a batch reward as a list.

    Raises:
        UsageError: the result is a single value, a dict, a set or None instead of a sequence of
            values.
    """
    if isinstance(rewards, Mapping | Set | str | bytes) or not isinstance(rewards, Iterable):
        raise UsageError(
            f"the reward returned {rewards!r:.60} for its completions: return a list with one "
            "number (or None) per completion"
        )
    return list(rewards)


def as_messages(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reward's arguments with the texts as lists of messages as in TRL.

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
    """Return the columns that a function's signature names; all columns if it has `**columns`.

    A column that is None is left out if the parameter has a default value.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    defaults = {p.name for p in parameters.values() if p.default is not p.empty}
    return {
        name: value
        for name, value in columns.items()
        if (takes_all or name in parameters) and not (value is None and name in defaults)
    }


def adapt_reward(reward: Any) -> RewardFunction:
    """Wrap a function, a callable object or a class as a RewardFunction.

    The parameter names of `reward` determine how it is called.

    Raises:
        TypeError: `reward` is not callable, or its parameter names match no supported signature.
    """
    if isinstance(reward, type):
        reward = _make(reward)
    if not callable(reward):
        raise TypeError(f"{reward!r:.60} is not a reward: {CONTRACT}")
    name = getattr(reward, "__name__", type(reward).__name__)
    try:
        signature = inspect.signature(reward)
    except ValueError:  # some built-in functions have no signature
        raise TypeError(f"the signature of {name} is not available: {CONTRACT}") from None
    parameters = signature.parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if "completions" in named:
        return PlainReward(reward)
    if isinstance(reward, RewardFunction) and _takes_two(signature):
        cls, base = type(reward), RewardFunction
        if cls.__call__ is base.__call__ and cls.batch_call is base.batch_call:
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
    """Return whether a function accepts two positional arguments (completion and answer)."""
    kinds = [p.kind for p in signature.parameters.values()]
    places = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return inspect.Parameter.VAR_POSITIONAL in kinds or sum(k in places for k in kinds) >= 2


def _make(cls: type) -> Any:
    """Instantiate a class without arguments."""
    parameters = inspect.signature(cls).parameters.values()
    anyhow = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [f"{p.name}=..." for p in parameters if p.default is p.empty and p.kind not in anyhow]
    if needed:
        call = f"{cls.__name__}({', '.join(needed)})"
        raise TypeError(f"{cls.__name__} is a class that needs arguments: pass {call}")
    return cls()
