"""Statistics of an evaluation: 95 % intervals, paired comparison, pass@k. No torch, no scipy.

Problems are resampled, because completions of one problem are not independent. scipy has the same
tests, but its import takes longer than all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def wilson_interval(correct: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson interval of correct / total, valid for small samples and for 0 and 1.

    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)   (Wilson 1927)
    """
    if not 0 <= correct <= total or total == 0:
        raise ValueError(f"no proportion: {correct} correct of {total}")
    p = correct / total
    scale = 1 + z**2 / total
    centre = (p + z**2 / (2 * total)) / scale
    half = z * math.sqrt(p * (1 - p) / total + z**2 / (4 * total**2)) / scale
    # Rounding may push a bound beyond 0 or 1.
    low = 0.0 if correct == 0 else centre - half
    high = 1.0 if correct == total else centre + half
    return low, high


def bootstrap_interval(
    values: Sequence[float] | np.ndarray, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a mean (Efron and Tibshirani 1993).

    A resample is drawn as multinomial counts of the distinct values: the same distribution as
    drawing indices, with less memory. Equal values give an interval of width 0, which says
    nothing about a small sample.
    """
    if not len(values):
        raise ValueError("no values to resample")
    distinct, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(
        len(values), counts / len(values), size=resamples
    )  # (resamples, distinct)
    low, high = np.percentile(drawn @ distinct / len(values), [2.5, 97.5])
    return float(low), float(high)


def t_quantile(p: float, df: int) -> float:
    """Return the quantile p ≥ 1/2 of Student's t with `df` degrees of freedom.

    It bisects the distribution, which for an integer `df` is a finite sum (Abramowitz and Stegun
    1964, 26.7.3 and 26.7.4). scipy has the same function, but is not a dependency.
    """
    if df < 1 or not 0.5 <= p < 1:
        raise ValueError(f"no quantile {p} of Student's t with {df} degrees of freedom")
    low, high = 0.0, math.pi / 2  # bounds of θ = atan(t / √df)
    for _ in range(60):
        angle = (low + high) / 2
        odd, square = df % 2, math.cos(angle) ** 2
        term = math.cos(angle) if odd else 1.0
        total = term if df > 1 else 0.0
        for k in range(2 + odd, df - 1, 2):
            term *= square * (k - 1) / k
            total += term
        inside = math.sin(angle) * total  # P(|T| ≤ t)
        inside = 2 / math.pi * (angle + inside) if odd else inside
        low, high = (angle, high) if inside < 2 * p - 1 else (low, angle)
    return math.sqrt(df) * math.tan(low)


def t_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval mean ± t s / √n of Student's t with n - 1 degrees of freedom.

    It is for few values, where the bootstrap is too narrow. One value gives an infinite interval.
    """
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2:
        return -math.inf, math.inf
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = t_quantile((1 + confidence) / 2, n - 1) * math.sqrt(variance / n)
    return mean - half, mean + half


def summarize_scores(scores: Sequence[float], *, trials: bool = False) -> dict[str, float]:
    """Return mean, low and high of the problems' scores.

    Args:
        scores: if empty, the three are NaN.
        trials: scores are independent and 0 or 1: use Wilson's interval, and add `correct` and
            `total`.
    """
    if not len(scores):
        return dict.fromkeys(("mean", "low", "high"), math.nan)
    mean, total = sum(scores) / len(scores), len(scores)
    if not trials:
        low, high = bootstrap_interval(scores)
        return {"mean": mean, "low": low, "high": high}
    correct = round(sum(scores))
    low, high = wilson_interval(correct, total)
    return {"mean": mean, "low": low, "high": high, "correct": correct, "total": total}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that k of n completions, c of them right, include a right one:
    1 - C(n-c, k) / C(n, k).

    It is unbiased for k ≤ n, unlike 1 - (1 - c/n)^k (Chen et al. 2021, arXiv:2107.03374).
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} completions, {c} right: needs 0 ≤ c ≤ n and 1 ≤ k ≤ n")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


@dataclass(frozen=True)
class Difference:
    """b - a in percentage points, with its interval."""

    points: float
    low: float
    high: float


def paired_bootstrap(
    a: Sequence[float], b: Sequence[float], resamples: int = 10_000, seed: int = 0
) -> Difference:
    """Return b - a in points, from scores in 0…1 of the same problems in the same order.

    The problems' difficulty cancels, so the interval is narrower than two separate ones.
    """
    if len(a) != len(b):
        raise ValueError(f"not paired: {len(a)} and {len(b)} scores")
    points = 100 * (np.asarray(b, dtype=float) - np.asarray(a, dtype=float))
    return Difference(float(points.mean()), *bootstrap_interval(points, resamples, seed))


def mcnemar(a: Sequence[bool], b: Sequence[bool]) -> float:
    """Return McNemar's two-sided exact p, from the problems that only one of a and b solves.

    p = min(1, 2 · P(X ≤ m)), X ~ Binomial(n, 1/2), where n is the number of these problems and m
    the smaller of the two counts (McNemar 1947; exact form: Fagerland et al. 2013). n = 0 gives 1.
    """
    only_a = sum(x and not y for x, y in zip(a, b, strict=True))
    only_b = sum(y and not x for x, y in zip(a, b, strict=True))
    n = only_a + only_b
    tail = sum(math.comb(n, i) for i in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**n)


def holm(p_values: Sequence[float], alpha: float = 0.05) -> list[bool]:
    """Return which tests are significant by Holm's method (family-wise error rate alpha).

    The smallest p of m must be at most alpha / m, the next alpha / (m - 1), …; after the first
    failure all others fail (Holm 1979).

    >>> holm([0.03, 0.01, 0.04])  # 0.01 ≤ 0.05 / 3, but 0.03 > 0.05 / 2
    [False, True, False]
    """
    significant = [False] * len(p_values)
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[i] > alpha / (len(p_values) - rank):
            break
        significant[i] = True
    return significant
