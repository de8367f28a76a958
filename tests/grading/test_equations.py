"""Equations in a text are found and checked exactly."""

import time
from fractions import Fraction

import pytest

from rlm.grading.equations import find_equations


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("cost: 3 * 4 = 12", [12]),
        ("3 × 4 = 12, then 12 ÷ 5 = 2.4", [12, Fraction(12, 5)]),
        ("1 + 2 * 3 - 8 / 4 = 5", [5]),  # products and quotients first
        ("0.1 + 0.2 = $0.3", [Fraction(3, 10)]),  # exact
        ("3 + 4 = 7 + 5 = 12", [12]),  # 7 is no result; it begins the next equation
        ("-2 - -3 = 1", [1]),
        ("x = 5, 7 = 7, 1.2.3 + 1 = 2, 3 + 4 = many", []),
    ],
)
def test_equations_are_found(text, values):
    found = find_equations(text)
    assert [equation.value for equation in found] == values
    assert all(equation.holds for equation in found)


def test_false_equations_do_not_hold():
    assert [e.holds for e in find_equations("3 * 4 = 13; 5 / 0 = 0; 2 + 2 = 4")] == [0, 0, 1]


def test_order_counts_only_where_it_matters():
    sums = find_equations("3 + 4 = 7, 4 + 3 = 7, 9 - 4 = 5, 4 - 9 = -5")
    a, b, c, d = (equation.operation for equation in sums)
    assert a == b
    assert c != d


@pytest.mark.parametrize(
    "text", ["1+" * 50_000, "9" * 100_000 + " + 1 = 2", "1 + 1" + " " * 100_000, "1-1 = -" * 20_000]
)
def test_hostile_text_costs_little(text):
    start = time.monotonic()
    find_equations(text)
    assert time.monotonic() - start < 1
