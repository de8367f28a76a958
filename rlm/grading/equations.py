r"""Exact arithmetic in a text: evaluate an expression, find every `a op b = c` and check it.

It reads chains of numbers with + - * / × ÷ x, parentheses, `$`, `%` and thousands separators, and
GSM8K's calculator marks (`3 + 5 = <<3+5=8>>8` makes two claims). It skips expressions with words
between their numbers, or that begin inside a longer one (`2 apples + 3 * 4 = 14`). The patterns are
linear, sizes are bounded and nothing is evaluated as code: a parser reads an expression in one
pass, and hostile text costs milliseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

_TOKEN = re.compile(r"[ \t]*(?:(\d+(?:\.\d*)?|\.\d+)|([-+*/()%]))", re.ASCII)


def evaluate_expression(text: str) -> Fraction:
    """Return the exact value of an expression.

    >>> evaluate_expression("2 * (3 + 50%)")
    Fraction(7, 1)

    Raises:
        ValueError: the text is not an expression.
        ZeroDivisionError: the expression divides by zero.
    """
    tokens, end = [], 0
    while match := _TOKEN.match(text, end):
        tokens.append(match[1] or match[2])
        end = match.end()
    parser = _Parser(tokens)
    value = parser.sum()
    if parser.next is not None or text[end:].strip(" \t"):
        raise ValueError(f"{text!r} has text after its end")
    return value


class _Parser:
    """Recursive-descent parser; raises ValueError at an unexpected token."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]

    @property
    def next(self) -> str | None:
        return self._tokens[-1] if self._tokens else None

    def _take(self) -> str:
        if not self._tokens:
            raise ValueError("the expression ends too early")
        return self._tokens.pop()

    def sum(self) -> Fraction:
        value = self.product()
        while self.next in ("+", "-"):
            value += self.product() if self._take() == "+" else -self.product()
        return value

    def product(self) -> Fraction:
        value = self.factor()
        while self.next in ("*", "/"):
            value = value * self.factor() if self._take() == "*" else value / self.factor()
        return value

    def factor(self) -> Fraction:
        token, sign = self._take(), 1
        while token in ("+", "-"):
            sign = -sign if token == "-" else sign
            token = self._take()
        if token == "(":
            value = self.sum()
            if self._take() != ")":
                raise ValueError("a parenthesis is not closed")
        else:
            value = Fraction(token)  # raises ValueError for an operator
        while self.next == "%":
            self._take()
            value /= 100
        return sign * value


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
# Text which shows that the chain after it is only the end of an expression; bullets do not match.
_INSIDE = re.compile(
    r"(?:[^\s*][ \t]*(?:[-+*/×÷–−]|(?<=[ \t\d])x)|[\d)]|(?:[\d%]|half|third|quarter|fifth) of)"
    r"[ \t($]*\Z"
)
_MARK = re.compile(r"<<([^<>\n]{0,200})>>")
_DIVISOR = re.compile(r"(?<=/ )\d+/\d+(?![\d./])")  # 60 / 3/4 is 60 / (3/4)
_PLAIN = str.maketrans({"×": "*", "x": "*", "÷": "/", "$": None, ",": None})


@dataclass(frozen=True)
class Equation:
    """A claim that `left` equals `result`."""

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
        except ValueError:  # parentheses of the text around the chain
            continue
    return found
