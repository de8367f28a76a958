"""Finds answers that the orchestrator gives away in what it tells the agents.

A text leaks if it holds the gold as a whole number that the problem itself does not give. A gold
below 10 also stands in texts that tell no quantity of the problem: "Think in 2 steps", "Step 2",
"2. Check it". Such digits are left out: one that numbers an item, and one that counts what the
problem does not speak of.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from rlm.data import Problem
from rlm.grading import numbers_in, parse_number

SMALL = 10  # a gold below it is a digit that instructions hold, too
_IN_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
# A word that goes on about the number, in place of a noun that it counts: "7 plus 5", "7 is right".
_NO_NOUN = "is|as|was|plus|minus|times|divided|equals"
_ITEM = re.compile(
    r"(?i:\b(?:step|part|line|rule|number|agent|point) )\d(?![\d.]*\d)"  # step 2, but not step 2.5
    r"|(?:^|[.;\n])\s*\d[.)](?=\s[A-Z])"  # Read it. 2. Check it.
)
_COUNT = re.compile(rf"(?<![\w.,/])\d (?!(?:{_NO_NOUN})\b)([a-z]+s|step|line|sentence|word)\b")


def is_leaked(problem: Problem, texts: Sequence[str]) -> bool:
    """Tell whether one of the texts holds the gold, and the problem does not."""
    gold = parse_number(problem.answer)
    if gold is None or abs(gold) in numbers_in(problem.question):
        return False
    if abs(gold) < SMALL and gold.denominator == 1:
        return _is_small_leaked(problem.question, abs(gold), texts)
    return any(abs(gold) in numbers_in(text) for text in texts)


def _is_small_leaked(question: str, gold: Fraction, texts: Sequence[str]) -> bool:
    words = set(re.findall(r"[a-z]+", question.lower()))
    if _IN_WORDS[int(gold)] in words:
        return False

    def keep_quantity(match: re.Match[str]) -> str:
        return match[0] if match[1] in words else match[1]

    kept = (_COUNT.sub(keep_quantity, _ITEM.sub(" ", text)) for text in texts)
    return any(gold in numbers_in(text) for text in kept)
