"""Turns what a user gives as `reward_fn` or `--reward FILE.py:NAME` into one RewardFunction."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlm.cli import UsageError
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


def load_reward(spec: str | None) -> RewardFunction | None:
    """Load what `--reward` names: `steps`, or by FILE.py:NAME whatever `as_reward` takes.

    Raises:
        UsageError: there is no such file or name, or the file fails when it is run.
    """
    if spec is None:
        return None
    if spec == "steps":
        return StepsReward()
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
    except (Exception, SystemExit) as error:  # sys.exit would end the training, without a word
        raise UsageError(f"--reward {spec}: {type(error).__name__}: {error}") from error
    if not callable(found) and not isinstance(found, list | tuple):
        own = vars(module).items()
        names = ", ".join(n for n, v in own if getattr(v, "__module__", "") == module.__name__)
        raise UsageError(f"--reward {spec}: no function or class {name!r}; it has {names}")
    try:
        return as_reward(found)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--reward {spec}: {error}") from error
