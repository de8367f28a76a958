r"""Exact arithmetic in texts: evaluate expressions, and find and check every equation `a op b = c`.

The left side of an equation is a chain of numbers with + - * / × · ÷ x, `\times`, `\cdot`, `\div`,
parentheses, `$`, `%` and thousands separators. GSM8K's calculator annotations are read too
(`3 + 5 = <<3+5=8>>8` contains two equations). An equation is skipped if it may be only a part of a
longer one. This is the case if words or units are between the numbers (`2 apples + 3 * 4 = 14`), or
if the equation is next to an unsupported operator, function or symbol (`10^2 + 5 = 105`,
`twice 5 + 1 = 11`, `2 + 2 = 4 dozen`). Other symbols around an equation do not hide it
(`✓ 3 + 4 = 8!`). A calculator annotation must be one complete equation: `<<3+4=7!>>` does not hold.
Nothing is evaluated as code: a parser reads each expression in one pass. Patterns run in linear
time and sizes are bounded, so hostile text takes only milliseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from math import factorial

from rlm.grading.numbers import FRACTION_WORD, NUMBER_WORD, OPERATOR_WORD, SCALE_WORD

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
        raise ValueError(f"unexpected text after the expression in {text!r}")
    return value


class _Parser:
    """A recursive-descent parser of expressions; an unexpected token raises a ValueError."""

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


MAX_LENGTH = 200  # maximum length of an equation in characters; longer equations are skipped
_NUMBER = r"(?:(?:\d{1,3}(?:,\d{3}){1,6}+(?!\d)|\d++)(?:\.\d++)?+|\.\d++)"
_OPERAND = rf"[($]{{0,5}}+-?+\$?+{_NUMBER}%?+\){{0,5}}+"
_SIGN = r"(?:[ \t]*+[-+*/][ \t]*+|[ \t]++x[ \t]++|x(?=[\d(]))"  # "2x - 3 = 5" is algebra
# Matches text after a result which shows that the result is only the start of a number or of an
# expression: 1,5 and 12:30, 18 000, 7 - 2 and 5 + x, 5x and 5k, 2^3, 50% of 14, 4 dozen. (For 3!,
# see `_FACTORIALS`.)
_CONTINUES = (
    rf"[.,:]?\d|[ \t]+\d|{_SIGN}[($-]*+(?:[\d.]|[A-Za-z]\b)|[A-Za-z]\b|[eE][-+]?\d|[(_]\w"
    r"|[ \t]*(?:\^[-\w({\\]|[√π±²³¼½¾]|\\(?:frac|sqrt|pi)|of[ \t]+\$?\d"
    rf"|(?i:(?:{OPERATOR_WORD}|minus|point)[ \t]+(?:[\d$(]|{NUMBER_WORD})"
    r"|(?:more|less) than[ \t]+\$?\d|(?:r|rem|remainder)[ \t]*\d"
    rf"|(?:{FRACTION_WORD}|{SCALE_WORD}|dozen|(?:and a )?half"
    r"|squared|cubed|factorial)\b))"
)
# The pattern also matches a chain without a result, so that the search does not start again at the
# second number of the chain. The minus in "apples -5 + 8" is an operator, not a sign.
_CHAIN = re.compile(
    rf"(?<![\w.($])(?!(?<=\w[ \t])-)(?P<left>{_OPERAND}(?:{_SIGN}{_OPERAND})++)"
    rf"(?:\s*+=\s*+(?P<result>-?+\$?+-?+{_NUMBER})(?P<percent>(?:[ \t]*+%)?+)(?!{_CONTINUES}))?"
)
_FACTORIALS = {str(n): factorial(n) for n in range(2, 21)}
# Matches the spaces before a chain, and bold type that ends or begins there: "**Step 1:** 3 + 4".
_AROUND = re.compile(r"(?:(?<=\S)(?:\*\*|__)(?=[ \t]))?[ \t($]*(?:(?<![\w)\]}])(?:\*\*|__))?\Z")
# Matches the context of a chain that is only the end of a longer expression. The context ends in
# an operator (a bullet stands alone), a number, a variable, a symbol, a function or ...
_INSIDE = re.compile(
    r"(?:[^\s\-+*/^–#•][ \t]*[-+*/^–][-+*/^– \t]*|[\d√∛±∓∑∏∫]|\d[ \t]*%|/\d+\)|[_^]\{[^{}]*\}"
    r"|(?<![^\W\d_])(?<!['’])[b-zB-Zα-ωΑ-Ω]"
    # ... words: 12 : 3 + 1, 20% of 50 + 3, add 5 to 3 * 4, the sum of 3 and 4 + 1, twice 5 + 1
    r"|(?i:\d[ \t]+:|[\d%][ \t]+(?:of|off)"
    r"|\d[ \t]+(?:\w+[ \t]+)?(?:to|from|by|less|point|over)|\b(?:of|between)[ \t\d.,$]+and"
    r"|\b(?:half|third|quarter|fifth|square|cube|root|power) of"
    rf"|\b(?:{OPERATOR_WORD}|minus|negative|than|twice|thrice|double|triple|half|third|quarter"
    r"|squared?|cubed?|root|sqrt|log|ln|sin|cos|tan|exp|d?frac)))\Z"
)
# Matches the context directly before a chain: 12:30 - 1, 1,5 + 2, factors of parentheses, -(3 + 4).
_ADJACENT = re.compile(r"\d[:,]\Z|(?:-|[)\]}!²³¼½¾][ \t]*)\(\Z")
_ANNOTATION = re.compile(r"<<([^<>\n]{0,200})>>")
_RESULT = re.compile(rf"\s*(-?{_NUMBER})(%?)\s*")
_DIVISOR = re.compile(r"(?<=/ )\d+/\d+(?![\d./])")  # 60 / 3/4 is 60 / (3/4)
_PLAIN = str.maketrans({"x": "*", "$": None, ",": None})
_REWRITES = {
    r"[×·⋅∗]|\\(?:times|cdot)(?![A-Za-z])": "*",
    r"÷|\\div(?![A-Za-z])": "/",
    r"(?m)^[ \t]*−[ \t]*|−": "-",  # at the start of a line, − is a sign; - may be a bullet
    r"\\(?=[$%])": "",
    r"\\[,;:!]": " ",
    # 5 – 2 = 3, but not the dash of a heading: Step 1 – 3 + 4 = 7
    r"([A-Za-z][ \t]+\d+[ \t]+–)|(?<=\d)[ \t]+–(?=[ \t]+\d)": lambda dash: dash[1] or " -",
    r"(=\s*)\*\*([-$\d.,]+)\*\*": r"\1\2",  # 3 + 4 = **7**
    r"(=\s*)\\boxed\{([-$\d.,]+)\}": r"\1\2",
    r"&[ \t]*=|=[ \t]*&": "=",  # the alignment of LaTeX
}
_PATTERNS = [(re.compile(pattern), new) for pattern, new in _REWRITES.items()]


@dataclass(frozen=True)
class Equation:
    """An equation in a text, which claims that `left` equals `result`."""

    left: str  # an expression; empty if the result of a calculator annotation is not a number
    result: str  # a decimal number
    is_percent: bool = False  # whether a percent sign follows the result
    value: Fraction | None = field(init=False)  # value of `left`; None if it has no value
    is_readable: bool = field(init=False, default=True)  # False only in calculator annotations

    def __post_init__(self) -> None:
        try:
            value = evaluate_expression(self.left)
        except ZeroDivisionError:
            value = None
        except ValueError:
            value = None
            object.__setattr__(self, "is_readable", False)
        object.__setattr__(self, "value", value)

    @property
    def holds(self) -> bool:
        """Whether the result equals the value of the left side, rounded to the result's decimals.

        10/3 = 3.33 holds; 2/3 = 0.66 and 10/3 = 3 do not hold. A percentage may also be meant as a
        plain number: both 5 / 20 = 25% and 5 / 20 * 100 = 25% hold.
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
    """Return all equations of a text; equations in calculator annotations come last.

    >>> [(equation.value == 12, equation.holds) for equation in find_equations("cost: 3 * 4 = 13")]
    [(True, False)]
    """
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    annotated = [one for inside in _ANNOTATION.findall(text) for one in _read_annotation(inside)]
    return _read_chains(_ANNOTATION.sub("", text)) + annotated


def has_wrong_equation(text: str) -> bool:
    """Return whether a text has an equation that does not hold."""
    return not all(equation.holds for equation in find_equations(text))


def _read_chains(text: str) -> list[Equation]:
    found = []
    for match in _CHAIN.finditer(text):
        start = match.start()
        if match["result"] is None or len(match[0]) > MAX_LENGTH:
            continue
        before = max(0, start - 40)
        if _ADJACENT.search(text, before, start + match[0].startswith("(")):
            continue
        if _INSIDE.search(_AROUND.sub("", text[before:start])):
            continue
        left = _DIVISOR.sub(r"(\g<0>)", match["left"].translate(_PLAIN))
        around = "(" * (left.count("(") - left.count(")"))  # as in "so (3 + 4 = 7)"
        result = match["result"].translate(_PLAIN)
        equation = Equation(left.removeprefix(around), result, bool(match["percent"]))
        if not equation.is_readable:  # it includes parentheses of the surrounding text
            continue
        if text.startswith("!", match.end()) and equation.value == _FACTORIALS.get(result, ""):
            continue  # 2 + 4 = 3!; in other equations, ! ends the sentence
        found.append(equation)
    return found


def _read_annotation(annotation: str) -> list[Equation]:
    """Return the equation of a calculator annotation; if it is unreadable, a wrong equation."""
    left, equals, result = annotation.translate(_PLAIN).rpartition("=")
    if not equals or left.strip() == result.strip():  # <<12=12>> computes nothing
        return []
    number = _RESULT.fullmatch(result)
    return [Equation(left, number[1], bool(number[2])) if number else Equation("", result)]
