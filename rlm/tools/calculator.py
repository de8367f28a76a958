"""The calculator: complete `<<11*5=` with `55>>` (GSM8K's notation) by exact arithmetic.

What an expression may hold is in rlm/grading/arithmetic.py; its length is bounded.
"""

from __future__ import annotations

from fractions import Fraction

from rlm.grading import evaluate_expression

MAX_LENGTH = 100  # characters of an expression; GSM8K's longest has 30
MAX_DIGITS = 15  # digits before the decimal point
MAX_DECIMALS = 6  # digits after it


class Calculator:
    """Completes `<<EXPRESSION=` with the result and `>>`.

    A result is an exact integer or finite decimal, so no false equation is written. Otherwise
    (10/3, a long result, no expression) nothing is inserted and the model continues.
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
        if len(expression) > MAX_LENGTH:
            return None
        try:
            result = write_decimal(evaluate_expression(expression[:-1]))
        except (ValueError, ZeroDivisionError):
            return None
        return None if result is None else result + ">>"


def write_decimal(value: Fraction) -> str | None:
    """Format a number as GSM8K does (55, 0.25); None if that is not exact or too long.

    >>> [write_decimal(Fraction(n)) for n in ("55", "-1/4", "10/3", "1/1024")]
    ['55', '-0.25', None, None]
    """
    scaled = value * 10**MAX_DECIMALS
    if scaled.denominator != 1 or abs(value) >= 10**MAX_DIGITS:
        return None
    whole, rest = divmod(abs(scaled.numerator), 10**MAX_DECIMALS)
    text = f"{whole}.{rest:0{MAX_DECIMALS}}".rstrip("0").rstrip(".")
    return "-" + text if value < 0 else text
