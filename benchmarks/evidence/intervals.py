"""Computes confidence intervals with a bootstrap that resamples both seeds and problems.

Every seed is evaluated on the same problems, so seeds and problems are crossed, not nested. A
resample therefore draws seeds, and one set of problems for all of them. Drawing other problems for
each seed would wrongly divide the variance of the problems by the number of seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rlm.evaluation import pass_at_k

RESAMPLES = 10_000
Scores = np.ndarray  # (seeds, problems), from 0 to 1


@dataclass(frozen=True)
class Interval:
    """Contains a mean and its 95 % confidence interval, in the units of the scores."""

    mean: float
    low: float
    high: float

    @property
    def percent(self) -> str:
        """The mean and the interval in percent.

        >>> Interval(0.465, 0.421, 0.509).percent
        '46.5 (42.1–50.9)'
        """
        return f"{100 * self.mean:.1f} ({100 * self.low:.1f}–{100 * self.high:.1f})"

    @property
    def points(self) -> str:
        """The mean and the interval of a difference, in percentage points.

        >>> Interval(0.038, -0.005, 0.08).points
        '+3.8 (−0.5 to +8.0)'
        """
        shown = [f"{100 * v:+.1f}" for v in (self.mean, self.low, self.high)]
        return "{} ({} to {})".format(*shown).replace("-", "−").replace("+0.0", "0.0")


def crossed_bootstrap(scores: ArrayLike) -> Interval:
    """Return the mean and its percentile interval (pigeonhole bootstrap, Owen 2007).

    Seeds (rows) and problems (columns) are drawn independently, with replacement. The interval is
    conservative for the problems. For n seeds it is too narrow: it scales their variance by
    (n − 1) / n and does not use the t distribution. In a simulation in which only the seed changes
    the scores, normally distributed, a 95 % interval contains the true value in 74 % of the cases
    with 3 seeds, 83 % with 5, and 89 % with 10.
    """
    table = np.atleast_2d(np.asarray(scores, dtype=float))
    seeds, problems = table.shape
    if not table.size:
        raise ValueError("no scores to resample")
    rows, columns = _weights(seeds, 0), _weights(problems, 1)
    means = np.einsum("rs,sp,rp->r", rows, table, columns, optimize=True)  # (resamples,)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(table.mean()), float(low), float(high))


@cache  # drawing is slow, and all intervals of a page share a few values of `count`
def _weights(count: int, seed: int) -> np.ndarray:
    """Return how often each of `count` items was drawn, divided by `count`: (resamples, count)."""
    drawn = np.random.default_rng([seed, count]).multinomial(
        count, np.full(count, 1 / count), size=RESAMPLES
    )
    return (drawn / count).astype(np.float32)


def difference(a: Scores, b: Scores) -> Interval:
    """Return the mean of b - a, paired by seed and problem, with its interval.

    Scores with a single row, which are those of the base model, are paired with every seed.
    """
    a, b = np.atleast_2d(a), np.atleast_2d(b)
    if a.shape[1] != b.shape[1] or (a.shape[0] != b.shape[0] and 1 not in (a.shape[0], b.shape[0])):
        raise ValueError(f"not paired: {a.shape} and {b.shape} (seeds, problems)")
    return crossed_bootstrap(b - a)


def scores(test: Mapping[str, Any], metric: str, grading: str) -> list[float]:
    """Return the score of each problem of a cell's test set.

    Args:
        metric: "greedy", "sampled" (share of right samples) or "pass@K".
        grading: "strict" or "lenient".
    """
    if metric == "greedy":
        return [float(bit) for bit in test["greedy"][grading]]
    groups = test["sampled"][grading]  # a string of zeros and ones for each problem
    if metric == "sampled":
        return [group.count("1") / len(group) for group in groups]
    k = int(metric.removeprefix("pass@"))
    return [pass_at_k(len(group), group.count("1"), k) for group in groups]
