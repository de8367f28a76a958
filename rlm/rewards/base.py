"""What a user writes: a `RewardFunction`, or a plain function with TRL's keyword contract."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlm.cli import UsageError

Reward = float | None  # None: no verdict; the rollout leaves the group's statistics and the loss
Rollout = tuple[str, str, Mapping[str, Any]]  # completion, reference answer, columns
# Given to a plain function only if it names them: TRL's **kwargs hold columns and no more.
EXTRAS = ("reasoning_format", "is_truncated", "answer_type")


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
        return [
            self(text, answer, **{name: values[i] for name, values in columns.items()})
            for i, (text, answer) in enumerate(zip(completions, reference_answers, strict=True))
        ]

    def pop_metrics(self) -> dict[str, float]:
        """What to log of the calls since it was last asked, by name: sums over calls."""
        return {}


class PlainReward(RewardFunction):
    """A plain function `(prompts, completions, answer, **columns) -> list[float | None]`.

    It may be `async`. A parameter that it does not take is not passed.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, completion: str, reference_answer: str, **columns: Any) -> Any:
        columns = {name: [value] for name, value in columns.items()}
        rewards = self.batch_call([completion], [reference_answer], **columns)
        if inspect.isawaitable(rewards):
            return _only(rewards)
        (reward,) = rewards
        return reward

    def batch_call(
        self, completions: Sequence[str], reference_answers: Sequence[str], **columns: Sequence[Any]
    ) -> Any:
        parameters = inspect.signature(self.function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        prompts = columns.pop("question", [""] * len(completions))
        given = {"prompts": prompts, "completions": completions, "answer": reference_answers}
        given |= {k: v for k, v in columns.items() if k in parameters or k not in EXTRAS}
        return self.function(**{k: v for k, v in given.items() if takes_all or k in parameters})


async def _only(rewards: Awaitable[Any]) -> Any:
    (reward,) = await rewards
    return reward


def as_reward(reward: RewardFunction | Callable[..., Any]) -> RewardFunction:
    return reward if isinstance(reward, RewardFunction) else PlainReward(reward)


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
