"""Equations in a text: finds every `a op b = c` of a reasoning and checks it exactly.

Read by rule, for reports on how a model reasons; no reward depends on it. The pattern is linear,
sizes are bounded and nothing is evaluated, so that hostile text costs milliseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

NUMBER = r"-?\d++(?:\.\d++)?+"
MAX_LENGTH = 1000  # characters of one equation; a longer one is not read
_SIGN = r"[-+*/x×÷]"
# A chain without a result is matched too, so that none is searched again from its second number.
_CHAIN = re.compile(
    rf"(?<![\d.])(?P<left>{NUMBER}(?:\s*+{_SIGN}\s*+{NUMBER})++)"
    rf"(?:\s*+=\s*+\$?(?P<result>{NUMBER})(?!\d|\.\d|\s*+{_SIGN}))?"
)
_TERM = re.compile(rf"\s*+({_SIGN})\s*+({NUMBER})")
_SIGNS = {"x": "*", "×": "*", "÷": "/"}


@dataclass(frozen=True)
class Equation:
    """A claim of a text: `numbers` joined by `signs` are `result`."""

    numbers: tuple[Fraction, ...]
    signs: tuple[str, ...]  # one fewer, of + - * /
    result: Fraction

    @property
    def value(self) -> Fraction | None:
        """What the left side is, products and quotients first; None after a division by zero."""
        terms = [self.numbers[0]]
        for sign, number in zip(self.signs, self.numbers[1:], strict=True):
            if sign == "*":
                terms[-1] *= number
            elif sign == "/":
                if number == 0:
                    return None
                terms[-1] /= number
            else:
                terms.append(number if sign == "+" else -number)
        return sum(terms, Fraction(0))

    @property
    def holds(self) -> bool:
        return self.value == self.result

    @property
    def operation(self) -> tuple[tuple[str, ...], tuple[Fraction, ...]]:
        """Signs and numbers of the left side; equal for 3 + 4 and 4 + 3."""
        commutes = set(self.signs) in ({"+"}, {"*"})
        return self.signs, tuple(sorted(self.numbers)) if commutes else self.numbers


def find_equations(text: str) -> list[Equation]:
    """All equations of a text, in order.

    >>> [(equation.value == 12, equation.holds) for equation in find_equations("cost: 3 * 4 = 13")]
    [(True, False)]
    """
    found = []
    for match in _CHAIN.finditer(text):
        left, result = match["left"], match["result"]
        if result is None or len(match[0]) > MAX_LENGTH:
            continue
        first = re.match(NUMBER, left)[0]
        terms = _TERM.findall(left[len(first) :])
        numbers = tuple(Fraction(number) for number in (first, *(number for _, number in terms)))
        signs = tuple(_SIGNS.get(sign, sign) for sign, _ in terms)
        found.append(Equation(numbers, signs, Fraction(result)))
    return found
