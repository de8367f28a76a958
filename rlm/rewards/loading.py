"""Convert `reward_fn` or `--reward FILE.py:NAME` to a RewardFunction."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlm.cli import UsageError, load_from_file
from rlm.data import Problem
from rlm.rewards import functions
from rlm.rewards.base import FunctionReward, RewardFunction, adapt_reward
from rlm.rewards.functions import CombinedReward, CorrectnessReward, StepsReward

GIVEN = {"prompts", "completions", "completion", "answer", "reference_answer", "prompt"}
# Arguments that only TRL's trainer passes to rewards.
TRAINERS_OWN = {"trainer_state", "log_extra", "log_metric", "environments"}
# Columns that the scorer adds to the columns of the data.
COLUMNS = {"question", "completion_ids", "answer_type", "reasoning_format", "is_truncated"}
COLUMNS |= {"strict_verdict"}
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


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
    for name, function in _functions(reward):
        parameters = inspect.signature(function).parameters.values()
        named = [p.name for p in parameters if p.kind in NAMED and p.default is p.empty]
        unknown = [one for one in named if one not in there | GIVEN]
        if not unknown:
            continue
        known = {"solution", *TRAINERS_OWN}  # never treated as misspellings
        close = difflib.get_close_matches(unknown[0], sorted((there | GIVEN) - known), 1)
        meant = f" (did you mean {close[0]}?)" if close and unknown[0] not in known else ""
        why = "the data does not have (a column that --columns renames has only the new name)"
        if TRAINERS_OWN.issuperset(unknown):
            why = "only TRL's trainer passes: add a default value, or accept **kwargs instead"
        raise UsageError(
            f"the reward {name} requires {', '.join(unknown)}{meant}, which {why}; available "
            f"columns: answer, {', '.join(sorted(there))}"
        )


def _functions(reward: RewardFunction) -> list[tuple[str, Callable[..., Any]]]:
    """Return the name and the callable of each user-defined function or `__call__` in a reward.

    The first two arguments of a `__call__` are bound, because these parameters are positional and
    may have any name.
    """
    found: list[tuple[str, Callable[..., Any]]] = []
    if isinstance(reward, FunctionReward):
        if inspect.isroutine(reward.function):
            found = [(reward.function.__name__, reward.function)]
    elif not is_built_in(reward) and type(reward).__call__ is not RewardFunction.__call__:
        found = [(type(reward).__name__, partial(reward.__call__, "", ""))]
    return found + [function for part in parts_of(reward) for function in _functions(part)]


def _compares(reward: RewardFunction) -> bool:
    """Return whether a reward or a part of it compares answers with the reference."""
    own = isinstance(reward, functions.CorrectnessReward | functions.GSM8KReward)
    return own or any(map(_compares, parts_of(reward)))


def is_built_in(reward: RewardFunction) -> bool:
    """Return whether a reward and all its parts are built in; such a reward needs no time limit."""
    return type(reward).__module__ == functions.__name__ and all(map(is_built_in, parts_of(reward)))


def parts_of(reward: RewardFunction) -> Iterable[RewardFunction]:
    """Return the parts of a CombinedReward; () for any other reward."""
    return reward.parts.values() if isinstance(reward, functions.CombinedReward) else ()
