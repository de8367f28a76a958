"""Statistics of an evaluation: 95 % intervals, paired comparisons and pass@k.

The bootstrap resamples problems, because the completions of one problem are not independent. SciPy
offers the same statistics, but is not a dependency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000  # number of bootstrap resamples


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of the proportion correct / total.

    It is also valid for small samples and for the proportions 0 and 1.

    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)   (Wilson 1927)
    """
    if not 0 <= correct <= total or total == 0:
        raise ValueError(f"cannot compute a proportion: {correct} correct of {total}")
    p, z = correct / total, 1.96
    scale = 1 + z**2 / total
    centre = (p + z**2 / (2 * total)) / scale
    half = z * math.sqrt(p * (1 - p) / total + z**2 / (4 * total**2)) / scale
    # Without these special cases, rounding could move a bound outside 0…1.
    low = 0.0 if correct == 0 else centre - half
    high = 1.0 if correct == total else centre + half
    return low, high


def bootstrap_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of a mean (Efron and Tibshirani 1993).

    A resample is drawn as multinomial counts of the distinct values. This has the same distribution
    as drawing indices but needs less memory. If all values are equal, the interval has width 0.
    The same input always gives the same interval, because the random generator has a fixed seed.
    """
    if not len(values):
        raise ValueError("no values to resample")
    distinct, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    drawn = np.random.default_rng(0).multinomial(
        len(values), counts / len(values), size=RESAMPLES
    )  # (resamples, distinct)
    low, high = np.percentile(drawn @ distinct / len(values), [2.5, 97.5])
    return float(low), float(high)


def t_quantile(p: float, df: int) -> float:
    """Return the quantile p ≥ 1/2 of Student's t distribution with `df` degrees of freedom.

    The quantile is found by bisection of the distribution function, which is a finite sum for an
    integer `df` (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).
    """
    if df < 1 or not 0.5 <= p < 1:
        raise ValueError(f"cannot compute Student's t quantile for p={p}, df={df}")
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
    """Return the confidence interval mean ± t s / √n, with t from Student's distribution.

    The distribution has n - 1 degrees of freedom. Use this interval for few values, for which the
    bootstrap interval is too narrow. The interval of a single value is infinite.
    """
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2:
        return -math.inf, math.inf
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = t_quantile((1 + confidence) / 2, n - 1) * math.sqrt(variance / n)
    return mean - half, mean + half


def is_extreme(scores: Sequence[float]) -> bool:
    """Return whether all scores are 0, or all are 1.

    The bootstrap interval of such scores has width 0. Wilson's interval is valid for them if scores
    cannot lie outside 0…1.
    """
    return {*scores} in ({0}, {1})


def summarize_scores(
    scores: Sequence[float], *, trials: bool = False, bounded: bool = True
) -> dict[str, float]:
    """Return the mean of the problems' scores and its 95 % interval as `mean`, `low` and `high`.

    Args:
        scores: one score per problem; for an empty sequence, all three values are NaN.
        trials: whether the scores are independent and each is 0 or 1. If so, Wilson's interval is
            used, and the result also contains `correct` and `total`.
        bounded: whether scores cannot lie outside 0…1.
    """
    if not len(scores):
        return dict.fromkeys(("mean", "low", "high"), math.nan)
    correct, total = round(sum(scores)), len(scores)
    if trials or (bounded and is_extreme(scores)):
        low, high = wilson_interval(correct, total)
    else:
        low, high = bootstrap_interval(scores)
    summary = {"mean": sum(scores) / total, "low": low, "high": high}
    return summary | {"correct": correct, "total": total} if trials else summary


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return pass@k: the probability that k random completions out of n include a right one.

    The result is 1 - C(n-c, k) / C(n, k), where c is the number of right completions. This
    estimator is unbiased for k ≤ n, unlike 1 - (1 - c/n)^k (Chen et al. 2021, arXiv:2107.03374).
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k requires 0 ≤ c ≤ n and 1 ≤ k ≤ n, got n={n}, c={c}, k={k}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


# With fewer problems, no difference is significant: a sign test of 5 problems has p ≥ 2/2⁵ > 0.05.
MIN_PROBLEMS = 6


def paired_bootstrap(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """Return the difference b - a in percentage points, paired by problem, and its 95 % interval.

    The keys of the result are `points`, `low` and `high`. The interval is narrower than that of two
    independent samples, because the difficulty of each problem cancels out.

    Args:
        a, b: scores between 0 and 1 of the same problems in the same order.
    """
    if len(a) != len(b):
        raise ValueError(f"the scores are not paired: a has {len(a)} and b has {len(b)}")
    points = 100 * (np.asarray(b, dtype=float) - np.asarray(a, dtype=float))
    low, high = bootstrap_interval(points)
    return {"points": float(points.mean()), "low": low, "high": high}


def mcnemar(a: Sequence[bool], b: Sequence[bool]) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    The test uses the n problems that only one of a and b solves: p = min(1, 2 · P(X ≤ m)) with
    X ~ Binomial(n, 1/2), where m is the smaller of the two counts (McNemar 1947; exact form:
    Fagerland et al. 2013). For n = 0, p is 1.

    Args:
        a, b: whether each problem is solved, for the same problems in the same order.
    """
    only_a = sum(x and not y for x, y in zip(a, b, strict=True))
    only_b = sum(y and not x for x, y in zip(a, b, strict=True))
    n = only_a + only_b
    tail = sum(math.comb(n, i) for i in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**n)


def holm(p_values: Sequence[float], alpha: float = 0.05) -> list[bool]:
    """Return which tests are significant by Holm's method with family-wise error rate alpha.

    The smallest of the m p-values must be at most alpha / m, the next smallest at most
    alpha / (m - 1), and so on. After the first failed test, all tests with larger p-values fail
    too (Holm 1979).

    >>> holm([0.03, 0.01, 0.04])  # 0.01 ≤ 0.05 / 3, but 0.03 > 0.05 / 2
    [False, True, False]
    """
    significant = [False] * len(p_values)
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[i] > alpha / (len(p_values) - rank):
            break
        significant[i] = True
    return significant
