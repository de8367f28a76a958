"""Turns what a user gives as `reward_fn` or `--reward FILE.py:NAME` into one RewardFunction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlm.cli import UsageError, load_from_file
from rlm.rewards.base import RewardFunction, adapt_reward
from rlm.rewards.functions import CombinedReward, CorrectnessReward, StepsReward


def as_reward(
    reward: RewardFunction | Callable[..., Any] | Sequence[Any] | None,
) -> RewardFunction:
    """Return the one reward that is meant: `CorrectnessReward` for None, a sum for a list.

    Args:
        reward: a RewardFunction, a class of it, a function, or a list of these or of
            (reward, weight) pairs.

    Raises:
        TypeError, ValueError: it is something else; the message says what to write.
    """
    if reward is None:
        return CorrectnessReward()
    if isinstance(reward, list | tuple):
        return CombinedReward(reward)
    return adapt_reward(reward)


def write_reward_template(path: Path) -> None:
    """Write a reward to begin with, which runs as it is, to a new file.

    Raises:
        UsageError: it is no .py file, it exists already, or it cannot be written.
    """
    if path.suffix != ".py":
        raise UsageError(f"{path}: name a new file that ends with .py")
    text = Path(__file__).with_name("template.py").read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text.replace("FILE", str(path)))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def load_reward(spec: str | None) -> RewardFunction | None:
    """Load what `--reward` names: `steps`, or by FILE.py:NAME whatever `as_reward` takes.

    Raises:
        UsageError: there is no such file or name, or the file fails when it is run.
    """
    if spec is None:
        return None
    if spec == "steps":
        return StepsReward()
    found = load_from_file("--reward", spec, (list, tuple))
    try:
        return as_reward(found)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--reward {spec}: {error}") from error
