"""Compare the validations of a GRPO run, and choose the adapter to export.

The best of several validations looks better than it is: with six problems, chance alone changes the
mean by tens of points. Therefore the adapter of the last step is exported, unless a paired
confidence interval shows that the best adapter is better by more than chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlm.evaluation import MIN_PROBLEMS, is_extreme, t_interval, wilson_interval

CONFIDENCE = 0.95
# The mean score of each problem over its completions; None if no completion has a score.
ProblemScores = Sequence[float | None]


@dataclass(frozen=True)
class Validation:
    """The scores of the adapter on the validation problems after `step` steps."""

    step: int
    scores: ProblemScores

    @property
    def mean(self) -> float:
        """The mean over the problems that have a score; 0 if no problem has a score."""
        scores = [score for score in self.scores if score is not None]
        return sum(scores) / len(scores) if scores else 0.0

    @property
    def worth(self) -> float:
        """The mean, or -inf if no problem has a score; validations are compared by this value."""
        return self.mean if any(score is not None for score in self.scores) else -math.inf

    def summary(self, measure: str) -> dict[str, float]:
        """Return the mean and its confidence interval, which for an accuracy lies in 0…1."""
        scores = [score for score in self.scores if score is not None]
        low, high = t_interval(scores) if scores else (-math.inf, math.inf)
        if measure == "accuracy" and is_extreme(scores):
            low, high = wilson_interval(int(sum(scores)), len(scores))
        elif measure == "accuracy":
            low, high = max(0.0, low), min(1.0, high)
        return {"mean": self.mean, "low": low, "high": high}


@dataclass(frozen=True)
class Gain:
    """The gain of one validation over another: the mean difference and its confidence interval."""

    mean: float
    low: float
    high: float
    comparisons: int = 1  # number of validations from which the better one was selected


def gain(before: Validation, after: Validation, comparisons: int = 1) -> Gain:
    """Return the mean gain of `after` over `before` with its interval, paired by problem.

    Args:
        comparisons: the number of validations from which `after` was selected. The interval is
            widened accordingly (Bonferroni correction).
    """
    pairs = zip(before.scores, after.scores, strict=True)
    differences = [b - a for a, b in pairs if a is not None and b is not None]
    mean = sum(differences) / max(1, len(differences))
    if len(differences) < MIN_PROBLEMS:
        return Gain(mean, -math.inf, math.inf, comparisons)
    interval = t_interval(differences, 1 - (1 - CONFIDENCE) / comparisons)
    return Gain(mean, *interval, comparisons)


@dataclass
class Validations:
    """The validations of a run: before training, at the best step, and at the last step."""

    measure: str = "accuracy"  # the kind of score: "accuracy" or "reward"
    count: int = 0  # number of validations, including the one before training
    start: Validation | None = None
    best: Validation | None = None
    last: Validation | None = None
    # The strict accuracy, which is recorded for both measures.
    start_accuracy: Validation | None = None
    last_accuracy: Validation | None = None

    def fall(self) -> str:
        """Describe how far the accuracy has fallen since the start of training.

        If a reward ignores the answers, the accuracy may fall while the mean reward stays the same,
        so the mean reward alone does not reveal the damage.

        Returns:
            The description, or "" if the fall may be due to chance, or if the measure has risen by
            more than chance.
        """
        if not (self.start_accuracy and self.last_accuracy and self.start and self.last):
            return ""
        looks = max(1, self.count - 1)
        lost = gain(self.start_accuracy, self.last_accuracy, looks)
        if lost.high >= 0 or gain(self.start, self.last).low > 0:
            return ""
        return f"the accuracy changed by {describe(lost, 'accuracy')} since the start"

    def add(self, step: int, scores: ProblemScores, accuracy: ProblemScores | None = None) -> bool:
        """Record a validation, and return whether it is the best so far.

        If two validations are equal, the later one is better. A validation that shows a `fall` is
        never the best.
        """
        self.last, self.count = Validation(step, list(scores)), self.count + 1
        self.last_accuracy = None if accuracy is None else Validation(step, list(accuracy))
        if step == 0:
            self.start, self.start_accuracy = self.last, self.last_accuracy
        is_best = self.best is None or (self.last.worth >= self.best.worth and not self.fall())
        if is_best:
            self.best = self.last
        return is_best

    def summary(self, completions: int) -> dict[str, Any] | None:
        """Return the validations for run.json, with intervals and gains; None if there is none.

        Args:
            completions: the number of completions of each problem.
        """
        if self.start is None or self.best is None or self.last is None:
            return None
        said: dict[str, Any] = {"measure": self.measure, "completions": completions}
        for name, one in {"start": self.start, "best": self.best, "last": self.last}.items():
            said[name] = {"step": one.step, **_finite(one.summary(self.measure))}
        tried = max(1, self.count - 1)
        gains = {"best": gain(self.start, self.best, tried), "last": gain(self.start, self.last)}
        return said | {f"{name}_gain": _finite(asdict(one)) for name, one in gains.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Validations:
        """Restore the validations from the result of `asdict`."""
        names = ("start", "best", "last", "start_accuracy", "last_accuracy")
        kept = {name: values.get(name) and Validation(**values[name]) for name in names}
        return cls(**{**values, **kept})


def choose_export(validations: Validations, last_step: int, stopped: str = "") -> tuple[str, str]:
    """Choose the adapter to export.

    The adapter of the last step is chosen, unless the best adapter is better than it by more than
    chance: the confidence interval of the difference must be above zero.

    Args:
        last_step: the number of steps that were run.
        stopped: the reason why the run was stopped early, if its last weights are not usable. In
            this case the best adapter is chosen.

    Returns:
        The name of the adapter, "best" or "last", and the reason as one line.
    """
    best, last = validations.best, validations.last
    the_last = f"the adapter after the last step ({last_step})"
    if best is None or last is None:
        return "last", f"{the_last}; nothing was validated"
    named = f"step {best.step}" if best.step else "the initial adapter"
    if last.step != last_step:  # more steps were made without a validation
        return "last", f"{the_last}; it was not validated"
    if best.step == last_step:
        return "last", f"{the_last}, which is also the best"
    lead = gain(last, best, validations.count - 1)  # the last is not a candidate
    by, is_sure = describe(lead, validations.measure), lead.low > 0
    if stopped or is_sure:
        better = "significantly better" if is_sure else "better"
        why = "" if best.step else "; no step was better; try a lower --learning-rate"
        why = f"; {stopped}" if stopped else why
        return "best", f"{named}, which scored {better} than {the_last}, by {by}{why}"
    why = ", but not significantly"
    if math.isinf(lead.low):
        why = f"; too few validation problems to compare (fewer than {MIN_PROBLEMS})"
    return "last", f"{the_last}; {named} scored better by {by}{why}"


def describe_mean(mean: float, measure: str) -> str:
    """Format a mean score; an accuracy is formatted in per cent."""
    return f"{mean:.1%}" if measure == "accuracy" else f"{mean:.3f}"


def sample_count(completions: int, problems: int) -> str:
    """Describe the samples of a validation, such as "1 completion of each of 50 problems"."""
    return f"{completions} completion{'s' * (completions > 1)} of each of {problems} problems"


def describe(gain: Gain, measure: str) -> str:
    """Format a gain with its interval; a gain in accuracy is formatted in percentage points."""
    scale, digits, unit = (100, 1, " points") if measure == "accuracy" else (1, 3, "")
    mean, low, high = (f"{scale * x:+.{digits}f}" for x in (gain.mean, gain.low, gain.high))
    of = f", best of {gain.comparisons}" if gain.comparisons > 1 else ""
    interval = f"95 % interval {low} to {high}" if gain.low > -math.inf else "no interval"
    return f"{mean}{unit} ({interval}{of})"


def validation_facts(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the lines of a run's summary about its validations and its export, by label.

    Args:
        summary: the return value of `TrainingRun.export`.
    """
    said = summary["validation"]
    if said is None:
        is_partial = summary["validated_on"] > 0  # the measure was changed when the run was resumed
        why = "measured, but the start by another score" if is_partial else "not measured"
        return {"validation": why, "exported": summary["reason"]}
    measure = said["measure"]

    def text(name: str) -> str:
        one = said[name]
        at = f" (step {one['step']})" if one["step"] else ""
        return f"{name} {describe_mean(one['mean'], measure)}{at}"

    unbounded: dict[str, Any] = {"low": -math.inf, "high": math.inf}

    def gained(name: str) -> str:
        known: dict[str, Any] = {k: v for k, v in said[f"{name}_gain"].items() if v is not None}
        return f"{name} {describe(Gain(**{**unbounded, **known}), measure)}"

    names = ["last"] if said["best"]["step"] in (0, said["last"]["step"]) else ["best", "last"]
    samples = sample_count(said["completions"], summary["validated_on"])
    return {
        f"validation {measure}": f"{', '.join(map(text, ('start', 'best', 'last')))}; {samples}",
        "since the start": ", ".join(map(gained, names)),
        "exported": summary["reason"],
    }


def _finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Replace infinite values and NaN by None, because JSON cannot represent them."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}
