"""Exact arithmetic on text: numbers with + - * /, parentheses, signs and percent (20% is 1/5).

Nothing is evaluated as code: a parser reads the text in one pass.
"""

from __future__ import annotations

import re
from fractions import Fraction

_TOKEN = re.compile(r"[ \t]*(?:(\d+(?:\.\d*)?|\.\d+)|([-+*/()%]))", re.ASCII)


def evaluate_expression(text: str) -> Fraction:
    """Return the exact value of an expression.

    >>> evaluate_expression("2 * (3 + 50%)")
    Fraction(7, 1)

    Raises:
        ValueError: not an expression.
        ZeroDivisionError: division by zero.
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
            value = Fraction(token)  # a ValueError for an operator
        while self.next == "%":
            self._take()
            value /= 100
        return sign * value
