"""Arithmetic that models write as Python formulas, evaluated safely.

Exact (fractions) where it can be, bounded in size and time, never `eval`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

MAX_RULE = 300  # characters
MAX_BITS = 2048  # of an exact number
MAX_COUNTED = 300  # argument of factorial and comb
MAX_DIGITS = 300  # of round, before or behind the point

Value = Fraction | float


class RuleError(ValueError):
    """A rule that is no arithmetic, or has no value."""


def evaluate_rule(rule: str, values: Mapping[str, Value]) -> Value:
    """The value of `a * b`, or of the right-hand side of `c = a * b`.

    Raises:
        RuleError: no arithmetic, an unknown name, no real value, or a number out of bounds.
    """
    tree = _parse(rule)
    try:
        return _evaluate(tree, values)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise RuleError(str(error)) from error


def is_rule(rule: str) -> bool:
    """It is arithmetic over names, whatever their values."""
    try:
        tree = _parse(rule)
    except RuleError:
        return False
    allowed = (ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Load, ast.Constant, *_OPERATORS)
    return all(isinstance(node, allowed) for node in ast.walk(tree))


def _parse(rule: str) -> ast.expr:
    if len(rule) > MAX_RULE:
        raise RuleError("the rule is too long")
    try:
        (statement,) = ast.parse(rule.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RuleError(f"not one Python formula: {rule[:60]!r}") from error
    if isinstance(statement, ast.Expr | ast.Assign):
        return statement.value
    raise RuleError(f"not a formula: {rule[:60]!r}")


def _bounded(value: Any) -> Value:
    if isinstance(value, int | Fraction):
        value = Fraction(value)
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise RuleError("a number is too large")
    elif not isinstance(value, float) or not math.isfinite(value):
        raise RuleError("the value is no real number")
    return value


def _power(base: Value, exponent: Value) -> Any:
    if isinstance(base, float) or isinstance(exponent, float) or exponent % 1:
        return float(base) ** float(exponent)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent) > MAX_BITS:
        raise RuleError("a power is too large")
    return base ** int(exponent)


def _of_integers(function: Callable[..., int], limit: float) -> Callable[..., int]:
    def checked(*values: Value) -> int:
        if any(value % 1 or abs(value) > limit for value in values):
            raise RuleError(f"{function.__name__} takes integers up to {limit:g}")
        return function(*map(int, values))

    return checked


def _round(value: Value, digits: Value | None = None) -> Any:
    if digits is None:
        return round(value)
    if digits % 1 or abs(digits) > MAX_DIGITS:  # Fraction computes 10 ** digits
        raise RuleError(f"round takes an integer of digits, up to {MAX_DIGITS}")
    return round(value, int(digits))  # a float takes no other integers


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_REAL = "sin cos tan asin acos atan exp log log2 log10 sqrt radians degrees floor ceil"
_FUNCTIONS: dict[str, Callable[..., Any]] = {name: getattr(math, name) for name in _REAL.split()}
_FUNCTIONS |= {"abs": abs, "min": min, "max": max, "round": _round}
_FUNCTIONS |= {"factorial": _of_integers(math.factorial, MAX_COUNTED)}
_FUNCTIONS |= {"comb": _of_integers(math.comb, MAX_COUNTED), "gcd": _of_integers(math.gcd, 1e15)}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def _evaluate(node: ast.expr, values: Mapping[str, Value]) -> Value:
    def of(child: ast.expr) -> Value:
        return _evaluate(child, values)

    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(repr(number)))  # 0.1 is one tenth
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](of(left), of(right)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](of(operand)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(of, args)))
    raise RuleError(f"{ast.unparse(node)[:60]} is unknown or not arithmetic")
