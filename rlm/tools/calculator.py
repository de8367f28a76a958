"""The calculator: completes `<<11*5=` with `55>>`, in GSM8K's notation, by exact arithmetic.

An expression has numbers, + - * /, parentheses, a sign before a term, and percent (20% is 1/5).
Nothing is evaluated: a parser reads it in one pass, and its length is bounded.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_LENGTH = 100  # characters of an expression; GSM8K's longest has 30
MAX_DIGITS = 15  # before the point of a result
MAX_DECIMALS = 6  # after it
_TOKEN = re.compile(r" *(?:(\d+(?:\.\d*)?|\.\d+)|([-+*/()%]))", re.ASCII)


class Calculator:
    """Completes `<<EXPRESSION=` with the result and `>>`.

    A result is an integer or a finite decimal, exactly: it never writes a false equation. Where
    there is none (10/3), or it is too long, and for whatever is no expression, the model goes on by
    itself.
    """

    name = "calculator"
    trigger = "="

    def __call__(self, text: str) -> str | None:
        """Return `RESULT>>` if the text ends in `<<EXPRESSION=`.

        >>> Calculator()("So it is 3 * 0.5 = <<3*0.5=")
        '1.5>>'
        """
        _, mark, expression = text[-MAX_LENGTH - 3 :].rpartition("<<")
        if not mark or not expression.endswith("="):
            return None
        value = evaluate_expression(expression[:-1])
        result = None if value is None else write_decimal(value)
        return None if result is None else result + ">>"


def evaluate_expression(text: str) -> Fraction | None:
    """Return the exact value of an expression; None if it is none, is too long, or divides by 0."""
    if len(text) > MAX_LENGTH:
        return None
    tokens, end = [], 0
    while match := _TOKEN.match(text, end):
        tokens.append(match[1] or match[2])
        end = match.end()
    if text[end:].strip(" "):
        return None
    try:
        parser = _Parser(tokens)
        value = parser.sum()
    except (ValueError, ZeroDivisionError):
        return None
    return value if parser.next is None else None


class _Parser:
    """Reads tokens from left to right, products before sums; ValueError where it can not go on."""

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
            value = Fraction(token)  # a ValueError for an operator
        while self.next == "%":
            self._take()
            value /= 100
        return sign * value


def write_decimal(value: Fraction) -> str | None:
    """Write a number as GSM8K does, 55 or 0.25; None where that is not exact, or too long.

    >>> [write_decimal(Fraction(n)) for n in ("55", "-1/4", "10/3", "1/1024")]
    ['55', '-0.25', None, None]
    """
    scaled = value * 10**MAX_DECIMALS
    if scaled.denominator != 1 or abs(value) >= 10**MAX_DIGITS:
        return None
    whole, rest = divmod(abs(scaled.numerator), 10**MAX_DECIMALS)
    text = f"{whole}.{rest:0{MAX_DECIMALS}}".rstrip("0").rstrip(".")
    return "-" + text if value < 0 else text
