r"""Equations in a text: find every `a op b = c` and check it exactly.

It reads chains of numbers with + - * / × ÷ x, parentheses, `$`, `%` and thousands separators, and
GSM8K's calculator marks (`3 + 5 = <<3+5=8>>8` makes two claims). It skips expressions with words
between their numbers, or that begin inside a longer one (`2 apples + 3 * 4 = 14`). The patterns are
linear, sizes are bounded and nothing is evaluated, so that hostile text costs milliseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

from rlm.grading.arithmetic import evaluate_expression

MAX_LENGTH = 200  # characters of one equation; a longer one is not read
_NUMBER = r"(?:(?:\d{1,3}(?:,\d{3}){1,6}+(?!\d)|\d++)(?:\.\d++)?+|\.\d++)"
_OPERAND = rf"[($]{{0,5}}+-?+\$?+{_NUMBER}%?+\){{0,5}}+"
_SIGN = r"(?:[ \t]*+[-+*/×÷][ \t]*+|[ \t]++x[ \t]++|x(?=[\d(]))"  # "2x - 3 = 5" is algebra
# Also match a chain without a result, so that it is not searched again from its second number.
_CHAIN = re.compile(
    rf"(?<![\w.($])(?P<left>{_OPERAND}(?:{_SIGN}{_OPERAND})++)"
    rf"(?:\s*+=\s*+(?P<result>-?+\$?+-?+{_NUMBER})(?P<percent>%?+)"
    rf"(?!\d|[., \t]\d|{_SIGN}[($-]*+[\d.]))?"
)
# Text before a chain that is only the end of an expression. A bullet opens a line.
_INSIDE = re.compile(
    r"(?:[^\s*][ \t]*(?:[-+*/×÷–−]|(?<=[ \t\d])x)|[\d)]|(?:[\d%]|half|third|quarter|fifth) of)"
    r"[ \t($]*\Z"
)
_MARK = re.compile(r"<<([^<>\n]{0,200})>>")
_DIVISOR = re.compile(r"(?<=/ )\d+/\d+(?![\d./])")  # 60 / 3/4 is 60 / (3/4)
_PLAIN = str.maketrans({"×": "*", "x": "*", "÷": "/", "$": None, ",": None})


@dataclass(frozen=True)
class Equation:
    """A claim that `left` is `result`."""

    left: str  # an expression that `evaluate_expression` reads
    result: str  # a decimal
    is_percent: bool = False  # whether the result is in %
    value: Fraction | None = field(init=False)  # the left side; None after a division by zero

    def __post_init__(self) -> None:
        try:
            value = evaluate_expression(self.left)
        except ZeroDivisionError:
            value = None
        object.__setattr__(self, "value", value)

    @property
    def holds(self) -> bool:
        """Whether the result is the value, rounded to the result's decimals.

        10/3 = 3.33 holds; 2/3 = 0.66 and 10/3 = 3 do not. A percentage may be read as a number,
        too: 5 / 20 * 100 = 25% holds, as 5 / 20 = 25% does.
        """
        if self.value is None:
            return False
        values = {self.value, evaluate_expression(self.left.replace("%", ""))}
        decimals = len(self.result.partition(".")[2])
        claims = [(Fraction(self.result), decimals)]
        claims += [(Fraction(self.result) / 100, decimals + 2)] if self.is_percent else []
        return any(
            abs(value - claim) <= (Fraction(1, 2 * 10**digits) if digits else 0)
            for value in values
            for claim, digits in claims
        )


def find_equations(text: str) -> list[Equation]:
    """Return all equations of a text: first those in sentences, then in calculator marks.

    >>> [(equation.value == 12, equation.holds) for equation in find_equations("cost: 3 * 4 = 13")]
    [(True, False)]
    """
    parts = [_MARK.sub("", text), *_MARK.findall(text)]
    return [equation for part in parts for equation in _read_chains(part)]


def has_wrong_equation(text: str) -> bool:
    """Return whether a text has an equation that does not hold."""
    return not all(equation.holds for equation in find_equations(text))


def _read_chains(text: str) -> list[Equation]:
    found = []
    for match in _CHAIN.finditer(text):
        start = match.start()
        if match["result"] is None or len(match[0]) > MAX_LENGTH:
            continue
        if _INSIDE.search(text, max(0, start - 20), start):
            continue
        left = _DIVISOR.sub(r"(\g<0>)", match["left"].translate(_PLAIN))
        around = "(" * (left.count("(") - left.count(")"))  # as in "so (3 + 4 = 7)"
        result = match["result"].translate(_PLAIN)
        try:
            found.append(Equation(left.removeprefix(around), result, bool(match["percent"])))
        except ValueError:  # parentheses that are not its own
            continue
    return found
