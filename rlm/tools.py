"""Tools, which insert text into a completion while the model generates it.

This module contains the tool protocol, the loaders for `--tool` and `tool=`, and the calculator.
The calculator uses exact arithmetic to complete `<<11*5=` with `55>>` (GSM8K's notation). The
syntax of expressions is defined in rlm/grading/equations.py; their length is limited here.
`rlm.sampling.ToolTokens` writes the text of a tool into a completion.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Protocol, cast

from rlm.cli import UsageError, load_from_file
from rlm.grading import evaluate_expression

__all__ = ["Calculator", "Tool", "as_tool", "load_tool"]

MAX_LENGTH = 100  # characters of an expression; the longest expression in GSM8K has 30
MAX_DIGITS = 15  # digits before the decimal point
MAX_DECIMALS = 6  # digits after the decimal point


class Tool(Protocol):
    """A callable that returns the text to insert next into an unfinished completion.

    Attributes:
        name: recorded as `tool` in the config of a run that receives the tool as a Python object.
        trigger: the tool is called when the text ends with this string ("": after every token).
    """

    name: str
    trigger: str

    def __call__(self, text: str) -> str | None:
        """Return the text to insert after `text`, or None.

        The result must depend only on `text`, because completions must be reproducible from the
        prompt, the seed and the weights.

        Args:
            text: the last part of the completion so far (at most 256 tokens).
        """
        ...


def as_tool(tool: object) -> Tool:
    """Return `tool` as a `Tool`; a class is instantiated.

    Raises:
        TypeError: `tool` is not a Tool; the message names what is missing.
    """
    tool = tool() if isinstance(tool, type) else tool
    for attribute in ("name", "trigger"):
        if not isinstance(getattr(tool, attribute, None), str):
            raise TypeError(
                f"tool.{attribute} must be a str; it is missing or not a str in {tool!r:.60}"
            )
    if not callable(tool):
        raise TypeError(f"a tool must be callable with a str; {tool!r:.60} is not")
    return cast("Tool", tool)


def load_tool(spec: str) -> Tool | None:
    """Load the tool given by `--tool`: none, calculator, or FILE.py:NAME.

    Raises:
        UsageError: the tool, file or name does not exist, or the named object is not a tool.
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

    A result is inserted only if it is an integer or a finite decimal, so every inserted equation is
    exact. Otherwise (10/3, a result with too many digits, an invalid expression) nothing is
    inserted, and the model continues.
    """

    name = "calculator"
    trigger = "="

    def __call__(self, text: str) -> str | None:
        """Return `RESULT>>` if the text ends in `<<EXPRESSION=`.

        >>> Calculator()("So it is 3 * 0.5 = <<3*0.5=")
        '1.5>>'
        """
        _, mark, after = text[-MAX_LENGTH - 3 :].rpartition("<<")
        expression = after.removesuffix("=")
        if not mark or expression == after or len(expression) > MAX_LENGTH:
            return None
        try:
            result = write_decimal(evaluate_expression(expression))
        except (ValueError, ZeroDivisionError):
            return None
        return None if result is None else result + ">>"


def write_decimal(value: Fraction) -> str | None:
    """Format a number as GSM8K does (55, 0.25); return None if the decimal is inexact or too long.

    >>> [write_decimal(Fraction(n)) for n in ("55", "-1/4", "10/3", "1/1024")]
    ['55', '-0.25', None, None]
    """
    scaled = value * 10**MAX_DECIMALS
    if scaled.denominator != 1 or abs(value) >= 10**MAX_DIGITS:
        return None
    whole, rest = divmod(abs(scaled.numerator), 10**MAX_DECIMALS)
    text = f"{whole}.{rest:0{MAX_DECIMALS}}".rstrip("0").rstrip(".")
    return "-" + text if value < 0 else text
