"""What a completion did, read by rule: its equations, a first sorting of its mistake, and whether
a reward is earned without reasoning. A person corrects the sorting; the rules only save reading.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rlm.grading.answers import split_completion
from rlm.grading.numbers import parse_number

NUMBER = r"-?\d+(?:\.\d+)?"
EQUATION = re.compile(
    rf"(?<![\d.])({NUMBER}(?:\s*[-+*/x×÷]\s*{NUMBER})+)\s*=\s*\$?({NUMBER})(?!\d|\.\d|\s*[-+*/x×÷])"
)
TERM = re.compile(rf"\s*([-+*/x×÷])\s*({NUMBER})")
SIGNS = {"x": "*", "×": "*", "÷": "/"}
REPEATS, WORDS_IN_A_ROW = 3, 4

SORTS = {
    "truncated": "cut off before it ended",
    "format": "no single answer where it belongs",
    "no equation": "nothing was calculated",
    "dropped step": "fewer steps than the solution",
    "extra step": "more steps than the solution",
    "distractor": "used a number that the solution does not need",
    "invented number": "used a number that is neither given nor calculated",
    "wrong operation": "the first step that is not right has another operation",
    "wrong order": "the right operation on the right numbers, the other way round",
    "wrong numbers": "the right operation, on others of the right numbers",
    "arithmetic": "the right operation on the right numbers, a false result",
    "answer differs": "the answer is not what was calculated",
    "other": "none of these rules",
}


@dataclass(frozen=True)
class Equation:
    """`numbers` joined by `signs` are said to be `result`."""

    numbers: tuple[Fraction, ...]
    signs: tuple[str, ...]  # one fewer, of + - * /
    result: Fraction

    @property
    def value(self) -> Fraction | None:
        """What they are, products and quotients first; None after a division by zero."""
        sums, sign = [self.numbers[0]], ""
        for sign, number in zip(self.signs, self.numbers[1:], strict=True):
            if sign == "*":
                sums[-1] *= number
            elif sign == "/":
                if number == 0:
                    return None
                sums[-1] /= number
            else:
                sums.append(number if sign == "+" else -number)
        return sum(sums, Fraction(0))

    @property
    def holds(self) -> bool:
        return self.value == self.result

    @property
    def work(self) -> tuple[tuple[str, ...], tuple[Fraction, ...]]:
        """Signs and numbers, so that 3 + 4 and 4 + 3 are the same work."""
        commutes = set(self.signs) in ({"+"}, {"*"})
        return self.signs, tuple(sorted(self.numbers)) if commutes else self.numbers


def equations(text: str) -> list[Equation]:
    """
    >>> [str(e.value) for e in equations("cost: 3 * 4 = 13")]
    ['12']
    """
    found = []
    for left, right in EQUATION.findall(text):
        first = re.match(NUMBER, left)[0]
        terms = TERM.findall(left[len(first) :])
        numbers = [Fraction(number) for number in (first, *(number for _, number in terms))]
        signs = [SIGNS.get(sign, sign) for sign, _ in terms]
        found.append(Equation(tuple(numbers), tuple(signs), Fraction(right)))
    return found


def first_sort(row: Mapping[str, Any], completion: Mapping[str, Any]) -> str:
    """Which of SORTS a wrong completion looks like.

    Args:
        row: question and solution ("" where the data have none).
        completion: text, strict (the reason), truncated.
    """
    if completion["truncated"]:
        return "truncated"
    if completion["strict"] not in ("correct", "wrong"):
        return "format"
    reasoning, answer = split_completion(completion["text"])
    did = equations(reasoning or "")
    if not did:
        return "no equation"
    should = equations(row["solution"])
    if should and len(did) != len(should):
        return "dropped step" if len(did) < len(should) else "extra step"
    if should:
        given = {Fraction(n) for n in re.findall(NUMBER, row["question"])}
        known = given | {e.result for e in did} | {n for e in should for n in e.numbers}
        needed = {n for e in should for n in (*e.numbers, e.result)} | {e.result for e in did}
        used = {abs(number) for e in did for number in e.numbers}
        if used - known:
            return "invented number"
        if used - needed:
            return "distractor"
        for mine, right in zip(did, should, strict=True):
            if mine.signs != right.signs:
                return "wrong operation"
            if mine.work != right.work:
                same = sorted(mine.numbers) == sorted(right.numbers)
                return "wrong order" if same else "wrong numbers"
            if not mine.holds:
                return "arithmetic"
    elif not all(e.holds for e in did):
        return "arithmetic"
    said = parse_number(answer_text(answer))
    if said is not None and said != did[-1].result:
        return "answer differs"
    return "other"


def answer_text(after: str) -> str:
    return re.sub(r"</?\w+>", " ", after).strip()


# --- is the reward earned -----------------------------------------------------------------------


def reasoning_of(text: str) -> str:
    """What stands in the think tags; everything, where there are none (the base)."""
    reasoning, after = split_completion(text)
    return after if reasoning is None else reasoning


def without_reasoning(text: str, gold: str) -> bool:
    """Nothing in the reasoning leads to the answer: no equation there ends in it."""
    return all(e.result != parse_number(gold) for e in equations(reasoning_of(text)))


def with_false_step(text: str) -> bool:
    """An equation in the reasoning does not hold."""
    return not all(e.holds for e in equations(reasoning_of(text)))


def repeats(text: str) -> bool:
    """Some four words in a row stand there three times or more."""
    words = text.split()
    rows = zip(*(words[i:] for i in range(WORDS_IN_A_ROW)), strict=False)
    return max(Counter(rows).values(), default=0) >= REPEATS


def watch(rows: Sequence[tuple[str, str, bool]]) -> dict[str, float]:
    """What could be a reward earned in another way than by reasoning.

    Args:
        rows: text, gold and whether it counts as right, of each completion.

    Returns:
        Of the right ones the shares without reasoning and with a false step; of all the share
        with repeated text and the mean number of words in the reasoning.
    """
    right = [(text, gold) for text, gold, correct in rows if correct]
    reasoning = [reasoning_of(text) for text, _, _ in rows]
    return {
        "completions": len(rows),
        "right": len(right),
        "right_without_reasoning": share(without_reasoning(*pair) for pair in right),
        "right_with_false_step": share(with_false_step(text) for text, _ in right),
        "repeated": share(repeats(text) for text, _, _ in rows),
        "reasoning_words": sum(len(text.split()) for text in reasoning) / max(1, len(rows)),
    }


def share(bits: Any) -> float:
    bits = list(bits)
    return sum(bits) / max(1, len(bits))
