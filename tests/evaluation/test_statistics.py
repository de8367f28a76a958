"""Statistics compared with values that were computed by hand or by brute force."""

import itertools

import numpy as np
import pytest

from rlm.evaluation.statistics import (
    bootstrap_interval,
    mcnemar,
    paired_bootstrap,
    pass_at_k,
    summarize_scores,
    t_interval,
    t_quantile,
    wilson_interval,
)

# --- intervals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [
        # With p = 0: (z²/2n ± z²/2n) / (1 + z²/n) = 0 and z² / (n + z²) = 3.8416 / 13.8416.
        (0, 10, 0.0, 0.277540),
        (10, 10, 0.722460, 1.0),
        # With p = 1/2 the centre is 1/2 and the half-width z / (2 √(n + z²)) = 0.263405.
        (5, 10, 0.236595, 0.763405),
        # Newcombe 1998, table I: 81 of 263 is 0.2553 … 0.3662.
        (81, 263, 0.255289, 0.366211),
    ],
)
def test_wilson_interval(correct, total, low, high):
    assert wilson_interval(correct, total) == pytest.approx((low, high), abs=2e-5)
    for n in (1, 2, 7, total, 1319):  # no rounding past what a share can be
        assert (wilson_interval(0, n)[0], wilson_interval(n, n)[1]) == (0, 1)


@pytest.mark.parametrize(
    ("p", "df", "t"),
    [
        # Fisher's table, as every textbook prints it; df 1 is Cauchy's tan(π (p - 1/2)).
        (0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.975, 5, 2.5706), (0.975, 30, 2.0423),
        (0.995, 5, 4.0321), (0.9, 4, 1.5332), (0.975, 1000, 1.9623), (0.5, 7, 0.0),
    ],
)  # fmt: skip
def test_quantiles_of_t(p, df, t):
    assert t_quantile(p, df) == pytest.approx(t, abs=5e-5)


def test_t_interval():
    """For 1, 2, 3 the mean is 2 and s = 1: 2 ± 4.3027 / √3. A single value has no interval."""
    assert t_interval([1, 2, 3]) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-4)
    assert t_interval([1, 2, 3], 0.8)[0] > t_interval([1, 2, 3])[0]
    assert t_interval([4.0]) == (-np.inf, np.inf)
    with pytest.raises(ValueError, match="cannot compute Student's t quantile"):
        t_quantile(0.4, 3)


@pytest.mark.parametrize(("correct", "total"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_interval_refuses_what_is_no_proportion(correct, total):
    with pytest.raises(ValueError, match="cannot compute a proportion"):
        wilson_interval(correct, total)


def test_bootstrap_interval_is_that_of_drawing_indices():
    values = np.random.default_rng(1).choice([0, 0.25, 0.5, 1], size=80)
    indices = np.random.default_rng(2).integers(80, size=(20_000, 80))
    expected = np.percentile(values[indices].mean(1), [2.5, 97.5])
    assert bootstrap_interval(values) == pytest.approx(expected, abs=0.006)


def test_scores_are_summed_up_by_what_they_are():
    low, high = wilson_interval(1, 4)
    expected = {"mean": 0.25, "low": low, "high": high, "correct": 1, "total": 4}
    assert summarize_scores([1, 0, 0, 0], trials=True) == expected
    low, high = bootstrap_interval([0.5, 0.25])
    assert summarize_scores([0.5, 0.25]) == {"mean": 0.375, "low": low, "high": high}
    for score in (0.0, 1.0):  # of several completions each; the bootstrap would claim certainty
        low, high = wilson_interval(int(4 * score), 4)
        assert summarize_scores([score] * 4) == {"mean": score, "low": low, "high": high}
        assert summarize_scores([score] * 4, bounded=False)["low"] == score  # rewards


# --- several completions --------------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_at_k(8, 3, 1) == 3 / 8  # the mean


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2)])
def test_pass_at_k_refuses_what_it_cannot_estimate(n, c, k):
    with pytest.raises(ValueError, match="requires"):
        pass_at_k(n, c, k)


# --- two models -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [
        (0, 0, 1.0),
        (0, 1, 1.0),
        (0, 6, 2 / 2**6),
        (6, 0, 2 / 2**6),
        (1, 9, 2 * (1 + 10) / 2**10),
        (5, 5, 1.0),
        (3, 12, 2 * (1 + 15 + 105 + 455) / 2**15),
    ],
)
def test_mcnemar_is_the_exact_binomial_test(only_a, only_b, p):
    a = [True] * only_a + [False] * only_b + [True, False] * 4
    b = [False] * only_a + [True] * only_b + [True, False] * 4
    assert mcnemar(a, b) == pytest.approx(p)


def test_mcnemar_takes_thousands_of_problems():
    assert 0 < mcnemar([True] * 3000 + [False] * 3200, [False] * 3000 + [True] * 3200) < 0.05


def test_paired_bootstrap_is_b_minus_a_in_points():
    scores = [0, 1, 0.1, 0.7, 1 / 3] * 10
    assert paired_bootstrap(scores, scores) == {"points": 0, "low": 0, "high": 0}
    difference = paired_bootstrap([0, 0, 0, 1], [1, 0, 1, 1])
    assert difference["points"] == 50
    assert 0 <= difference["low"] <= 50 <= difference["high"] <= 100
    with pytest.raises(ValueError, match="not paired"):
        paired_bootstrap([0, 1], [0])


def test_paired_bootstrap_covers_a_known_shift_95_times_in_100():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        a = rng.random(100) < 0.4
        b = a | (rng.random(100) < 0.25)  # right where a is, and on a quarter of the rest
        difference = paired_bootstrap(a, b)
        covered += difference["low"] <= 100 * 0.6 * 0.25 <= difference["high"]
    assert 0.90 <= covered / 300 <= 0.99
