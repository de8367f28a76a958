"""The one seam through which every recipe scores a step; a bad reward does not end a run there.

A trainer calls a `Scorer` with all problems and all completions of a step. What a user writes is
smaller: a `RewardFunction` of one completion, or a plain function with TRL's keyword contract, both
also `async`. `as_scorer` adapts either. A call that raises, hangs or returns no finite number costs
its own rollout, not the run.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlm.cli import terminal
from rlm.cli.options import UsageError
from rlm.data.problem import Problem

T = TypeVar("T")
Reward = float | None  # None: no verdict; the rollout leaves the group's statistics and the loss
Row = Mapping[str, Any]  # what is known of one rollout

TIME_LIMIT = 60.0  # seconds that one call may take
HANGS = 3  # time limits that a step waits for; then what is left of it goes without a verdict
DEAD_STEPS = 3  # steps in a row in which every call failed end the run; at the start, one does
# Given to a plain function only if it names them: TRL's **kwargs hold columns and no more.
EXTRAS = ("reasoning_format", "is_truncated", "answer_type")


@dataclass
class Scores:
    """rewards[p][g] of each rollout, and figures for the log (`reward/…`, `reason/…`)."""

    rewards: list[list[Reward]]
    metrics: dict[str, float] = field(default_factory=dict)


# (problems, their groups of texts, whether each text was truncated) → scores
Scorer = Callable[..., Scores]


class RewardFunction:
    """A reward of one completion. Subclass it, set `weight`, write `__call__` (or `async def`).

    Columns are keywords: `question`, the data set's own fields, `reasoning_format` (the name of
    the tags in use) and `is_truncated` (there is no end token). Take what you need and `**columns`.
    """

    weight: float = 1.0

    def __call__(self, completion: str, reference_answer: str, **columns: Any) -> Reward:
        raise NotImplementedError

    def batch_call(
        self, completions: Sequence[str], reference_answers: Sequence[str], **columns: Sequence[Any]
    ) -> list[Reward]:
        """Many completions; each column holds an entry for each. Override it to score at once."""
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        rows = rows or [{}] * len(completions)
        pairs = zip(completions, reference_answers, rows, strict=True)
        return [self(text, answer, **row) for text, answer, row in pairs]

    def figures(self) -> dict[str, float]:
        """What to log of the calls since the last time it was asked, by name: sums over calls."""
        return {}


@dataclass(frozen=True)
class Failed:
    """In the place of a reward: why there is none."""

    reason: str
    hung: bool = False


def as_scorer(
    reward: RewardFunction | Callable[..., Any],
    reasoning_format: str = "deepseek",
    time_limit: float = TIME_LIMIT,
) -> Scorer:
    """Adapt a user's reward to the seam.

    A plain function is called once with all rollouts, by keyword, as TRL does:
    `(prompts, completions, answer, **columns) -> list[float | None]`, one entry per completion.
    A parameter it does not take is not passed. If that call fails it is asked about each alone.

    Args:
        time_limit: seconds of one call.

    Raises (when called):
        ValueError: it returned another number of rewards than there are completions.
        UsageError: every call failed.
    """
    return _Scorer(reward, reasoning_format, time_limit)


class _Scorer:
    def __init__(self, reward: Any, reasoning_format: str, time_limit: float) -> None:
        self.reward, self.reasoning_format, self.time_limit = reward, reasoning_format, time_limit
        self.figures = getattr(reward, "figures", dict)
        self.one, self.batch = _adapt(reward)
        self.told: set[str] = set()
        self.dead_steps = DEAD_STEPS - 1  # until one call succeeds, one dead step is enough

    def __call__(
        self,
        problems: Sequence[Problem],
        groups: Sequence[Sequence[str]],
        truncated: Sequence[Sequence[bool]] | None = None,
    ) -> Scores:
        truncated = truncated or [[False] * len(group) for group in groups]
        rows = [
            {
                **problem.columns,
                "completion": text,
                "reference_answer": problem.answer,
                "question": problem.question,
                "answer_type": problem.answer_type,
                "reasoning_format": self.reasoning_format,
                "is_truncated": cut,
            }
            for problem, texts, cuts in zip(problems, groups, truncated, strict=True)
            for text, cut in zip(texts, cuts, strict=True)
        ]
        if not rows:
            return Scores([[] for _ in groups])
        self.figures()  # of an evaluation in between: not this step's
        found = list(map(_number, self._ask(rows)))
        failed = [value for value in found if isinstance(value, Failed)]
        self._report(failed, len(rows))
        values = iter(None if isinstance(value, Failed) else value for value in found)
        metrics = {name: total / len(rows) for name, total in self.figures().items()}
        if failed:
            metrics["reward/failed"] = len(failed) / len(rows)
        return Scores([[next(values) for _ in group] for group in groups], metrics)

    def _ask(self, rows: list[Row]) -> list[Any]:
        """A reward, or Failed, for each row."""
        if self.batch is not None:
            found = self._guarded(lambda: list(_finish(self.batch(rows))), self.time_limit)
            if not isinstance(found, Failed):
                if len(found) != len(rows):
                    raise ValueError(
                        f"the reward function returned {len(found)} rewards for {len(rows)} "
                        "completions"
                    )
                return found
        elif _is_async(self.reward):
            found = self._guarded(lambda: asyncio.run(self._together(rows)), 2 * self.time_limit)
            return [found] * len(rows) if isinstance(found, Failed) else found
        answers, hangs = [], 0
        for row in rows:
            if hangs == HANGS:
                answers.append(Failed("not asked: too many calls hang"))
                continue
            answers.append(self._guarded(lambda row=row: _finish(self.one(row)), self.time_limit))
            hangs += isinstance(answers[-1], Failed) and answers[-1].hung
        return answers

    async def _together(self, rows: list[Row]) -> list[Any]:
        """All rows at the same time: what an async reward waits for is somebody else."""

        async def one(row: Row) -> Any:
            try:
                async with asyncio.timeout(self.time_limit):  # in this task: wait_for's own one
                    return await self.one(row)  # would hand an exit() to the loop
            except UsageError:
                raise
            except (Exception, SystemExit) as error:
                return self._failure(error)

        return await asyncio.gather(*map(one, rows))

    def _guarded(self, call: Callable[[], T], limit: float) -> T | Failed:
        try:
            return call_with_limit(call, limit)
        except UsageError:
            raise
        except (Exception, SystemExit) as error:  # one that calls exit() ends nothing but itself
            return self._failure(error)

    def _failure(self, error: BaseException) -> Failed:
        if isinstance(error, TimeoutError):
            return Failed(f"no answer in {self.time_limit:g} seconds", hung=True)
        return Failed(f"{type(error).__name__}: {error}".strip().rstrip(":"))

    def _report(self, failed: Sequence[Failed], calls: int) -> None:
        for reason in dict.fromkeys(f.reason for f in failed if f.reason not in self.told):
            terminal.line(f"warning: a reward failed, its rollout is left out: {reason}")
            self.told.add(reason)
        self.dead_steps = self.dead_steps + 1 if len(failed) == calls else 0
        if self.dead_steps >= DEAD_STEPS:
            raise UsageError(f"the reward failed for every completion: {failed[0].reason}")


def _adapt(reward: Any) -> tuple[Callable[[Row], Any], Callable[[list[Row]], Any] | None]:
    """How to ask about one row, and about all at once where the reward can be."""
    if not isinstance(reward, RewardFunction):
        return partial(ask_one, reward), partial(plain_call, reward)

    def one(row: Row) -> Any:
        columns = {k: v for k, v in row.items() if k not in ("completion", "reference_answer")}
        return reward(row["completion"], row["reference_answer"], **columns)

    def batch(rows: list[Row]) -> Any:
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        return reward.batch_call(
            columns.pop("completion"), columns.pop("reference_answer"), **columns
        )

    overridden = type(reward).batch_call is not RewardFunction.batch_call
    return one, batch if overridden else None


def plain_call(function: Callable[..., Any], rows: Sequence[Row]) -> Any:
    """Call a function of TRL's contract on these rows; what it returns may be awaitable."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {parameter.name for parameter in parameters}
    columns = {
        "prompts": [row["question"] for row in rows],
        "completions": [row["completion"] for row in rows],
        "answer": [row["reference_answer"] for row in rows],
    }
    known = {"question", "completion", "reference_answer"}
    for name in dict.fromkeys(name for row in rows for name in row if name not in known):
        if name not in EXTRAS or name in named:
            columns.setdefault(name, [row.get(name) for row in rows])
    return function(**{k: v for k, v in columns.items() if takes_all or k in named})


def ask_one(function: Callable[..., Any], row: Row) -> Any:
    """The reward of one row, by a function of TRL's contract; awaitable if it is async."""
    rewards = plain_call(function, [row])
    if inspect.isawaitable(rewards):
        return _only(rewards)
    (reward,) = rewards
    return reward


async def _only(rewards: Awaitable[Any]) -> Any:
    (reward,) = await rewards
    return reward


def _is_async(reward: Any) -> bool:
    parts = getattr(reward, "parts", {})
    return inspect.iscoroutinefunction(type(reward).__call__) or any(map(_is_async, parts.values()))


def _finish(found: Any) -> Any:
    """The value itself, waited for if it is a coroutine's."""
    if not inspect.isawaitable(found):
        return found

    async def wait() -> Any:
        return await found

    return asyncio.run(wait())


def _number(value: Any) -> Reward | Failed:
    """A reward as a float. NaN is no verdict and no mistake; an infinite one is a mistake."""
    if value is None or isinstance(value, Failed):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return Failed(f"returned {value!r:.60}, which is no number")
    if math.isinf(number):
        return Failed("returned an infinite reward")
    return None if math.isnan(number) else number


def call_with_limit(call: Callable[[], T], limit: float) -> T:
    """What `call` returns or raises, if that takes at most `limit` seconds.

    It runs in a thread of its own. One that hangs cannot be stopped in Python: it is left behind,
    and ends with the process.

    Raises:
        TimeoutError: it takes longer.
    """
    box: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            box.put((call(), None))
        except BaseException as error:  # handed to who asked, Ctrl-C included
            box.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        value, error = box.get(timeout=limit)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return value


def load_reward(spec: str | None) -> RewardFunction | Callable[..., Any] | None:
    """What `--reward FILE.py:NAME` names: a function, a RewardFunction, or a class of it.

    Raises:
        UsageError: there is no such file or name, or the file fails when it is run.
    """
    if spec is None:
        return None
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser()
    if path.suffix != ".py" or not path.is_file() or not name:
        raise UsageError(f"--reward {spec}: expected FILE.py:NAME, and the file must exist")
    module_spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look it up
    try:
        module_spec.loader.exec_module(module)
        found = getattr(module, name, None)
        if isinstance(found, type):
            found = found()
    except (Exception, SystemExit) as error:  # sys.exit would end the training, without a word
        raise UsageError(f"--reward {spec}: {type(error).__name__}: {error}") from error
    if not callable(found):
        own = vars(module).items()
        names = ", ".join(n for n, v in own if getattr(v, "__module__", "") == module.__name__)
        raise UsageError(f"--reward {spec}: no function or class {name!r}; it has {names}")
    return found
