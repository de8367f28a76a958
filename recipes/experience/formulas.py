"""Evaluates the arithmetic that models write as Python formulas, safely and never by `eval`.

Values are exact (fractions) where they can be, and bounded in size and time.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

MAX_LENGTH = 300  # characters
MAX_BITS = 2048  # of an exact number
MAX_ARGUMENT = 300  # of factorial and comb; of round, digits before or behind the point

Value = Fraction | float


def evaluate_formula(formula: str, values: Mapping[str, Value]) -> Value | None:
    """Compute `a * b`, or the right-hand side of `c = a * b`.

    None for what is no arithmetic, has an unknown name or no real value, or gets out of bounds.
    """
    tree = _parse(formula)
    try:
        return _evaluate(tree, values) if tree else None
    except (ArithmeticError, TypeError, ValueError):
        return None


def is_formula(text: str) -> bool:
    """Tell whether a text is arithmetic over names, whatever their values."""
    tree = _parse(text)
    allowed = (ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Load, ast.Constant, *_OPERATORS)
    return tree is not None and all(isinstance(node, allowed) for node in ast.walk(tree))


def _parse(formula: str) -> ast.expr | None:
    try:
        (statement,) = ast.parse(formula.strip()).body if len(formula) <= MAX_LENGTH else ()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return statement.value if isinstance(statement, ast.Expr | ast.Assign) else None


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
    raise ValueError("unknown or not arithmetic")


def _bounded(value: Any) -> Value:
    if isinstance(value, int | Fraction):
        value = Fraction(value)
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise ValueError("a number is too large")
    elif not isinstance(value, float) or not math.isfinite(value):
        raise ValueError("the value is no real number")
    return value


def _power(base: Value, exponent: Value) -> Any:
    if isinstance(base, float) or isinstance(exponent, float) or exponent % 1:
        return float(base) ** float(exponent)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent) > MAX_BITS:
        raise ValueError("a power is too large")
    return base ** int(exponent)


def _integers(values: tuple[Value, ...], limit: float) -> list[int]:
    if any(value % 1 or abs(value) > limit for value in values):
        raise ValueError(f"only integers up to {limit:g} are taken here")
    return list(map(int, values))


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
_FUNCTIONS |= {
    "abs": abs,
    "min": min,
    "max": max,
    "round": lambda value, *digits: round(value, *_integers(digits, MAX_ARGUMENT)),
    "factorial": lambda *values: math.factorial(*_integers(values, MAX_ARGUMENT)),
    "comb": lambda *values: math.comb(*_integers(values, MAX_ARGUMENT)),
    "gcd": lambda *values: math.gcd(*_integers(values, 1e15)),
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
