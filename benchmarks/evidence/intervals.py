"""Accuracy over seeds and problems, and how sure one can be of it.

Every seed is judged on the same problems, so seeds and problems are crossed, not nested: a
resample draws seeds and, once for all of them, problems. Drawing other problems for each seed
would divide the spread of the problems by the number of seeds, which no further seed could earn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from benchmarks.evidence.plan import ARMS
from rlm.evaluation.statistics import pass_at_k

RESAMPLES = 10_000
Scores = np.ndarray  # (seeds, problems), in 0…1


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval, in the units of the scores."""

    mean: float
    low: float
    high: float
    seeds: int
    problems: int


def crossed_bootstrap(scores: Scores, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Percentile interval of the mean over seeds and problems (pigeonhole bootstrap, Owen 2007).

    Rows and columns are drawn with replacement, independently of each other. It is conservative
    for the problems; three seeds are too few to say much about seeds, and a table must say so.

    Raises:
        ValueError: nothing to resample.
    """
    scores = np.atleast_2d(np.asarray(scores, dtype=float))
    seeds, problems = scores.shape
    if not scores.size:
        raise ValueError("no scores to resample")
    rows, columns = _weights(seeds, resamples, seed), _weights(problems, resamples, seed + 1)
    means = np.einsum("rs,sp,rp->r", rows, scores, columns, optimize=True)  # (resamples,)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(scores.mean()), float(low), float(high), seeds, problems)


@cache  # a page of intervals is over a few numbers of problems, and drawing takes the time
def _weights(count: int, resamples: int, seed: int) -> np.ndarray:
    """(resamples, count): how often each of `count` was drawn, over `count`."""
    drawn = np.random.default_rng([seed, count]).multinomial(
        count, np.full(count, 1 / count), size=resamples
    )
    return (drawn / count).astype(np.float32)


def difference(a: Scores, b: Scores) -> Interval:
    """b - a, paired by seed and problem; an arm without seeds (the base) is the same in each.

    Raises:
        ValueError: they cannot be paired.
    """
    a, b = np.atleast_2d(a), np.atleast_2d(b)
    if a.shape[1] != b.shape[1] or (a.shape[0] != b.shape[0] and 1 not in (a.shape[0], b.shape[0])):
        raise ValueError(f"not paired: {a.shape} and {b.shape} (seeds, problems)")
    return crossed_bootstrap(b - a)


# --- scores of one cell -------------------------------------------------------------------------

METRICS = ("greedy", "sampled", "majority")


def scores(test: Mapping[str, Any], metric: str, grading: str) -> list[float]:
    """Of each problem of one test set of one result.

    Args:
        metric: "greedy"; "sampled" (share of its samples that is right); "majority" (maj@8, mean
            over its disjoint groups of 8); "pass@K".
        grading: "strict" or "lenient".
    """
    if metric == "greedy":
        return [float(bit) for bit in test["greedy"][grading]]
    if metric == "majority":
        return test["sampled"]["majority"][grading]
    groups = test["sampled"][grading]  # of each problem a text of zeros and ones
    if metric == "sampled":
        return [group.count("1") / len(group) for group in groups]
    k = int(metric.removeprefix("pass@"))
    return [pass_at_k(len(group), group.count("1"), k) for group in groups]


def matrix(
    results: Sequence[Mapping[str, Any]], sets: Sequence[str], metric: str, grading: str
) -> Scores:
    """(seeds, problems) of an arm's results over several test sets.

    Raises:
        ValueError: the cells were judged on different problems.
    """
    names = [[result["tests"][name]["problems"] for name in sets] for result in results]
    if any(other != names[0] for other in names):
        raise ValueError("cells of one arm were judged on different problems")
    return np.array(
        [[s for name in sets for s in scores(r["tests"][name], metric, grading)] for r in results]
    )


def common(
    a: Sequence[Mapping[str, Any]],
    b: Sequence[Mapping[str, Any]],
    sets: Sequence[str],
    metric: str,
    grading: str,
) -> tuple[Scores, Scores]:
    """Both arms' scores where both have them: same seeds, same problems (prefixes of each set).

    The base samples fewer problems than the others, and has no seeds: it stands beside each.

    Raises:
        ValueError: no seed is done for both.
    """
    if not any(ARMS[rows[0]["arm"]].kind == "base" for rows in (a, b)):
        seeds = {r["seed"] for r in a} & {r["seed"] for r in b}
        a, b = ([r for r in rows if r["seed"] in seeds] for rows in (a, b))
        if not seeds:
            raise ValueError("no seed is done for both arms")
    left, right = [], []
    for name in sets:
        mine, theirs = (matrix(rows, [name], metric, grading) for rows in (a, b))
        count = min(mine.shape[1], theirs.shape[1])
        left.append(mine[:, :count])
        right.append(theirs[:, :count])
    return np.concatenate(left, axis=1), np.concatenate(right, axis=1)
