"""Tools: what writes into a completion while the model generates it.

The protocol of a tool, how `--tool` and `tool=` name one, and the calculator: it completes
`<<11*5=` with `55>>`, in GSM8K's notation, by exact arithmetic. What an expression may hold is in
rlm/grading/equations.py; its length is bounded.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Protocol

from rlm.cli import UsageError, load_from_file
from rlm.grading import evaluate_expression

__all__ = ["Calculator", "Tool", "as_tool", "load_tool"]

MAX_LENGTH = 100  # characters of an expression; GSM8K's longest has 30
MAX_DIGITS = 15  # before the point of a result
MAX_DECIMALS = 6  # after it


class Tool(Protocol):
    """Decides from a completion's text so far what is inserted next.

    name: how the run's records call it. trigger: the tool is asked only where the text ends in it
    ("": after every token).
    """

    name: str
    trigger: str

    def __call__(self, text: str) -> str | None:
        """Return what is inserted after `text`, the end of a completion so far, or None.

        It must depend on the text alone: a completion is a function of prompt, seed and weights.
        """
        ...


def as_tool(tool: object) -> Tool:
    """Return the tool that is meant: a `Tool`, or an object of a class of it.

    Raises:
        TypeError: it is something else; the message says what is missing.
    """
    tool = tool() if isinstance(tool, type) else tool
    for attribute in ("name", "trigger"):
        if not isinstance(getattr(tool, attribute, None), str):
            raise TypeError(f"a tool has a {attribute}, as text; {tool!r:.60} has none")
    if not callable(tool):
        raise TypeError(f"a tool is called with a text; {tool!r:.60} can not be called")
    return tool


def load_tool(spec: str) -> Tool | None:
    """Load what `--tool` names: none, calculator, or FILE.py:NAME.

    Raises:
        UsageError: there is no such tool, file or name, or it is no tool.
    """
    if spec == "none":
        return None
    if spec == Calculator.name:
        return Calculator()
    if ":" not in spec:
        raise UsageError(f"--tool {spec}: use none, {Calculator.name} or FILE.py:NAME")
    found = load_from_file("--tool", spec)
    try:
        return as_tool(found)
    except TypeError as error:
        raise UsageError(f"--tool {spec}: {error}") from error


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
        if len(expression) > MAX_LENGTH:
            return None
        try:
            result = write_decimal(evaluate_expression(expression[:-1]))
        except (ValueError, ZeroDivisionError):
            return None
        return None if result is None else result + ">>"


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
