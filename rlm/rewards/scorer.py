"""Score all completions of a step with one reward, without letting a failed reward end the run.

A trainer calls a `Scorer` with all problems and all completions of a step. Built-in rewards run in
the calling thread. A user's reward runs in a worker thread with a time limit. If a call raises an
error, hangs or does not return a finite number, only the rollout of that call is lost.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, starmap
from typing import Any, TypeVar

from rlm.cli import UsageError, terminal
from rlm.data import FORMATS, Problem
from rlm.rewards.base import (
    REWARD_ERRORS,
    PerCompletionReward,
    Reward,
    RewardFunction,
    as_list,
    named_columns,
)
from rlm.rewards.functions import CombinedReward, as_reward, is_built_in, parts_of

T = TypeVar("T")
Call = tuple[str, str, Mapping[str, Any]]  # completion, reference answer, columns
TIME_LIMIT = 300.0  # seconds per call; the limit is generous because an LLM judge may be slow
MAX_TIMEOUTS = 3  # timeouts per step, after which the remaining calls are skipped
# The run ends after this many consecutive steps without a successful call. If no call of the run
# has succeeded yet, it ends after the first such step.
MAX_FAILED_STEPS = 3


class OutOfTime(Exception):
    """A call of the reward exceeded the scorer's time limit.

    This is not a TimeoutError, which the reward itself may raise, for example for a socket.
    """


@dataclass
class Scores:
    """The scores of a step. `[p][g]` is the index of completion g of problem p.

    The reasons are empty if a recipe uses its own verdicts instead of the strict grading.
    """

    rewards: list[list[Reward]]  # [p][g]
    metrics: dict[str, float] = field(default_factory=dict)  # for the log: reward/…, reason/…
    reasons: list[list[str]] = field(default_factory=list)  # [p][g], reasons of strict verdicts

    def __post_init__(self) -> None:
        self.reasons = self.reasons or [[] for _ in self.rewards]


class Scorer:
    """Scores all rollouts of a step with a reward.

    A function with TRL's signature or an overridden `batch_call` is called once with all rollouts;
    if that call fails, the reward is called for each rollout separately.

    Args:
        reward: a reward in any form that `as_reward` accepts.
        time_limit: the time limit in seconds for one call of a user's reward.

    Raises (when called):
        UsageError: every call failed in the first step or in `MAX_FAILED_STEPS` consecutive steps;
            the reward returned a wrong number of values; or it returned None or NaN for every
            completion of the first step.
    """

    def __init__(
        self,
        reward: RewardFunction | Callable[..., Any] | Sequence[Any] | None,
        reasoning_format: str = "deepseek",
        time_limit: float = TIME_LIMIT,
    ) -> None:
        self.reward = as_reward(reward)
        self.reasoning_format, self.time_limit = reasoning_format, time_limit
        self.warned: set[str] = set()
        self.gave_verdict = False
        self.failed_steps = MAX_FAILED_STEPS - 1  # one failed step ends a run without any success
        self._runner: asyncio.Runner | None = None

    def __call__(
        self,
        problems: Sequence[Problem],
        groups: Sequence[Sequence[str]],
        truncated: Sequence[Sequence[bool]] | None = None,
        token_ids: Sequence[Sequence[list[int]]] | None = None,
    ) -> Scores:
        """Score the completions of each problem.

        Args:
            problems: the problems of the step.
            groups: the texts of the completions of each problem.
            truncated: whether each completion lacks an end token.
            token_ids: the token ids of each completion, passed to the reward as `completion_ids`.
        """
        truncated = truncated or [[False] * len(group) for group in groups]
        token_ids = token_ids or [[[] for _ in group] for group in groups]
        verdicts = []  # each completion is graded once, for rewards, metrics and samples.jsonl
        for problem, texts in zip(problems, groups, strict=True):
            format = FORMATS[self.reasoning_format].with_answer_type(problem.answer_type)
            verdicts.append([format.grade(text, problem.answer, strict=True) for text in texts])
        parts = zip(problems, groups, truncated, token_ids, verdicts, strict=True)
        # A column that a row lacks is None, so that a reward may name it in its signature.
        missing = dict.fromkeys(name for problem in problems for name in problem.columns)
        rollouts = [
            (
                text,
                problem.answer,
                {
                    **missing,
                    **problem.columns,
                    "question": problem.question,
                    "solution": problem.solution,
                    "completion_ids": ids,
                    "answer_type": problem.answer_type,
                    "reasoning_format": self.reasoning_format,
                    "is_truncated": cut,
                    "strict_verdict": verdict,
                },
            )
            for problem, *group in parts
            for text, cut, ids, verdict in zip(*group, strict=True)
        ]
        reasons = [[verdict.reason for verdict in group] for group in verdicts]
        if not rollouts:
            return Scores([[] for _ in groups], reasons=reasons)
        self.reward.pop_metrics()  # discard what a validation since the last step has added
        rewards = self._ask_all(self.reward, rollouts)
        failed = [value for value in rewards if isinstance(value, REWARD_ERRORS)]
        self._warn(failed, len(rollouts))
        self._check_rewards(rewards)
        counts = {"correct": 0, **Counter(sorted(chain(*reasons)))}
        sums = {f"reason/{reason}": count for reason, count in counts.items()}
        sums |= self.reward.pop_metrics()
        metrics = {name: float(total) / len(rollouts) for name, total in sums.items()}
        if failed:
            metrics["reward/failed"] = len(failed) / len(rollouts)
        values = iter(value if isinstance(value, float) else None for value in rewards)
        return Scores([[next(values) for _ in group] for group in groups], metrics, reasons)

    def _check_rewards(self, rewards: Sequence[Reward | BaseException]) -> None:
        """Reject a reward that returns only None or NaN, and has not returned a number before."""
        if not self.gave_verdict and all(reward is None for reward in rewards):
            raise UsageError(
                f"the reward returned no number for any of {len(rewards)} completions (None or NaN "
                "leaves a completion out of its group)"
            )
        self.gave_verdict |= any(isinstance(reward, float) for reward in rewards)

    def _ask_all(
        self, reward: RewardFunction, rollouts: Sequence[Call]
    ) -> list[Reward | BaseException]:
        """Return the reward of each rollout, or the error of its call."""
        if is_built_in(reward):
            found = list(starmap(partial(self._ask, reward), rollouts))
        elif type(reward) is CombinedReward:  # each part receives the whole step
            parts = [self._ask_all(part, rollouts) for part in parts_of(reward)]
            found = [
                next((one for one in row if isinstance(one, REWARD_ERRORS)), None)
                or reward.combine(row)
                for row in zip(*parts, strict=True)
            ]
        else:
            found = self._ask_in_worker(reward, rollouts)
        return list(map(_to_reward, found))

    def _ask(
        self, reward: RewardFunction, completion: str, answer: str, columns: Mapping[str, Any]
    ) -> Any:
        """Return the reward of one rollout, or the error that the reward raises."""
        try:
            found = reward(completion, answer, **named_columns(reward, columns))
            return self._run(_wait_for(found)) if inspect.isawaitable(found) else found
        except REWARD_ERRORS as error:
            return error

    def _ask_in_worker(self, reward: RewardFunction, rollouts: Sequence[Call]) -> list[Any]:
        """Call the reward in a worker thread, with all rollouts at once if it supports this.

        Otherwise, or if that call fails, the reward is called for each rollout.
        """
        at_once = type(reward).batch_call is not RewardFunction.batch_call
        if at_once or _is_async(reward):
            # Allow twice the time, because `_wait_for_all` limits the time of awaited calls.
            limit = self.time_limit if at_once else 2 * self.time_limit
            (found,) = call_in_worker([lambda: self._ask_together(reward, rollouts)], limit)
            if isinstance(found, UsageError):
                raise found
            if isinstance(found, list):
                if len(found) != len(rollouts):
                    raise UsageError(
                        f"the reward returned {len(found)} values for {len(rollouts)} completions: "
                        "return one value per completion"
                    )
                return found
        calls = [lambda rollout=rollout: self._ask(reward, *rollout) for rollout in rollouts]
        return call_in_worker(calls, self.time_limit)

    def _ask_together(self, reward: RewardFunction, rollouts: Sequence[Call]) -> list[Any]:
        """Call `batch_call` once and await all awaitable results together."""
        texts, answers, rows = zip(*rollouts, strict=True)
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        columns = named_columns(reward.batch_call, columns)
        # Call it outside an event loop, because a synchronous reward may start its own loop.
        found = reward.batch_call(list(texts), list(answers), **columns)
        found = as_list(self._run(_wait_for(found)) if inspect.isawaitable(found) else found)
        return self._run(self._wait_for_all(found)) if _is_async(reward) else found

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in an event loop that stays open between the steps.

        A reward may keep objects that belong to one event loop, such as a semaphore or the
        connections of an HTTP client.
        """
        runner = self._runner
        if runner is None or runner.get_loop().is_running():  # an earlier call hangs
            runner = self._runner = asyncio.Runner()
            weakref.finalize(self, _close, runner.get_loop())
        try:
            return runner.run(coroutine)
        finally:
            if runner is not self._runner:  # this was the call that hung
                runner.close()

    async def _wait_for_all(self, rewards: Sequence[Any]) -> list[Any]:
        async def wait(reward: Any) -> Any:
            limit = asyncio.timeout(self.time_limit)
            try:
                # asyncio.wait_for would run the reward in a new task, and an exit() in that task
                # would end the event loop.
                async with limit:
                    return await _wait_for(reward)
            except REWARD_ERRORS as error:
                return OutOfTime() if limit.expired() else error

        return await asyncio.gather(*map(wait, rewards))

    def _warn(self, failed: Sequence[BaseException], calls: int) -> None:
        reasons = dict.fromkeys(map(self._reason, failed))
        for reason in (reason for reason in reasons if reason not in self.warned):
            terminal.line(f"warning: the reward failed, so the completion is left out: {reason}")
            self.warned.add(reason)
        self.failed_steps = self.failed_steps + 1 if len(failed) == calls else 0
        if self.failed_steps >= MAX_FAILED_STEPS:
            raise UsageError(f"the reward failed for every completion: {next(iter(reasons))}")

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, OutOfTime):
            return f"it did not return within {self.time_limit:g} seconds"
        text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
        if "signal only works in main thread" in text:
            text += " (rewards run in a worker thread with a time limit: do not set an alarm)"
        return text


def _is_async(reward: RewardFunction) -> bool:
    if isinstance(reward, PerCompletionReward):
        return reward.is_async
    is_async = inspect.iscoroutinefunction(type(reward).__call__)
    return is_async or any(map(_is_async, parts_of(reward)))


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Close an event loop without waiting for its tasks, unless a call still hangs in it."""
    if not loop.is_running():
        loop.close()


async def _wait_for(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


def _to_reward(value: Any) -> Reward | BaseException:
    """Convert a reward to float or None; NaN becomes None.

    The advantages are computed in float32. A number so large that a sum of squares may be infinite
    there becomes a ValueError, because otherwise all advantages of its group would be 0.
    """
    if isinstance(value, UsageError):
        raise value
    if value is None or isinstance(value, REWARD_ERRORS):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return ValueError(f"it returned {value!r:.60}, which is not a number")
    if abs(number) >= 2.0**60:
        return ValueError(f"it returned {value!r:.60}; its square may be infinite in float32")
    return None if math.isnan(number) else number


def call_in_worker(calls: Sequence[Callable[[], Any]], limit: float) -> list[Any]:
    """Run the calls one by one in a daemon thread; return their results or errors.

    The result of a call that takes longer than `limit` seconds is an OutOfTime error. Python
    cannot stop such a call, so its thread is abandoned and a new thread runs the remaining calls.
    """
    found, hangs = list[Any](), 0
    while len(found) < len(calls) and hangs < MAX_TIMEOUTS:
        results, stopped = queue.SimpleQueue[Any](), threading.Event()
        arguments = (calls[len(found) :], results, stopped)
        threading.Thread(target=_work, args=arguments, name="rewards", daemon=True).start()
        try:
            while len(found) < len(calls):
                value = results.get(timeout=limit)
                if isinstance(value, BaseException) and not isinstance(value, REWARD_ERRORS):
                    raise value  # Ctrl-C
                found.append(value)
        except queue.Empty:
            found.append(OutOfTime())
            hangs += 1
        finally:
            stopped.set()
    not_asked = RuntimeError("the reward was not called: too many earlier calls timed out")
    return found + [not_asked] * (len(calls) - len(found))


def _work(
    calls: Sequence[Callable[[], Any]], results: queue.SimpleQueue[Any], stopped: threading.Event
) -> None:
    for call in calls:
        if stopped.is_set():
            return
        try:
            results.put(call())
        except BaseException as error:  # re-raised in the caller, Ctrl-C included
            results.put(error)
