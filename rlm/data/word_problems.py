"""Seeded arithmetic word problems of one to four steps, each with its worked solution.

Every problem is made from a story of `word_problem_families`. Its split is a hash of its
story and its numbers, so that no two splits share a problem, whichever seeds and counts they
were asked with. The held-out stories make up a split of their own, which measures transfer.
"""

import hashlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import add, mul, sub
from typing import NamedTuple

from rlm.data.word_problem_families import FAMILIES, NAMES, NOUNS, Family

SPLITS = ("train", "validation", "test", "test_families")
LEVELS = (1, 2, 3, 4)

TRAIN_PERCENT = 80
VALIDATION_PERCENT = 10  # The rest is test.

# The largest value that a step may give, by level: a small model has to learn the arithmetic too.
LARGEST_VALUE = {1: 150, 2: 150, 3: 500, 4: 600}

DISTRACTOR_RATE = 0.25
DISTRACTOR_NUMBERS = range(6, 31)

# Draws before giving up. The rarest story needs about 30 draws for one usable set of numbers.
MAX_NUMBER_DRAWS = 10_000
# A problem falls in its split with probability 0.1 at least, so this only runs out on repeats.
MAX_PROBLEM_DRAWS = 2_000

# A division with a remainder gives 0, which no step may give.
OPERATORS = {"+": add, "-": sub, "*": mul, "/": lambda a, b: 0 if a % b else a // b}

SENTENCE_BREAK = re.compile(r"(?<=[.?]) ")


class SolvedStep(NamedTuple):
    """A step with its operands and its value filled in."""

    label: str
    left: int
    operator: str
    right: int
    value: int

    def __str__(self) -> str:
        return f"{self.label}: {self.left} {self.operator} {self.right} = {self.value}"


@dataclass(frozen=True)
class Problem:
    """A family with its numbers chosen and its wording filled in."""

    family: Family
    numbers: Mapping[str, int]
    question: str
    steps: tuple[SolvedStep, ...]

    @property
    def split(self) -> str:
        """The split this problem belongs to; it depends on the family and the numbers only."""
        if self.family.held_out:
            return "test_families"
        identity = " ".join([self.family.name, *map(str, self.numbers.values())])
        bucket = int(_sha256(identity), 16) % 100
        if bucket < TRAIN_PERCENT:
            return "train"
        return "validation" if bucket < TRAIN_PERCENT + VALIDATION_PERCENT else "test"

    def record(self) -> dict[str, str | int]:
        """The problem as `generate` returns it."""
        return {
            "id": f"{self.family.name}-{_sha256(self.question)[:12]}",
            "question": self.question,
            "answer": str(self.steps[-1].value),
            "solution": "\n".join(map(str, self.steps)),
            "family": self.family.name,
            "level": self.family.level,
        }


def generate(
    split: str,
    count: int,
    seed: int = 0,
    levels: Sequence[int] = LEVELS,
    families: Sequence[str] | None = None,
) -> list[dict[str, str | int]]:
    """Return `count` problems with different questions, spread evenly over the families.

    The result is a function of the arguments alone, and a smaller count gives a prefix of it.
    Each record has id, question, answer (a positive integer, as text), solution (one line per
    step), family and level (the number of steps). `families` narrows the selection by name.

    Raises ValueError if an argument is unknown, if nothing is selected, or if the selection has
    fewer than `count` different problems.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    selected = _select(split, levels, families)
    rng = random.Random(f"{split} {seed}")
    records = [problem.record() for problem in islice(_problems(selected, split, rng), count)]
    if len(records) < count:
        raise ValueError(
            f"cannot make {count} different problems for split {split!r}: "
            f"the selection ran out after about {len(records)}"
        )
    return records


def draw_problem(family: Family, rng: random.Random) -> Problem:
    """Draw one problem of the family, of any split.

    Raises RuntimeError if the family's ranges hardly ever give positive integers of moderate size.
    """
    numbers, steps = _draw_numbers(family, rng)
    name, friend = rng.sample(NAMES, 2)
    words = {"name": name, "friend": friend}
    words |= {noun: rng.choice(options) for noun, options in NOUNS.items()}
    question = rng.choice(family.wordings).format(**words, **numbers)
    # Drawn last, so that a distractor changes nothing but the text.
    if family.distractors and rng.random() < DISTRACTOR_RATE:
        extra = rng.choice([n for n in DISTRACTOR_NUMBERS if n not in numbers.values()])
        distractor = rng.choice(family.distractors).format(**words, extra=extra)
        question = _insert_sentence(question, distractor, rng)
    return Problem(family, numbers, question, steps)


def solve(steps: Sequence[str], numbers: Mapping[str, int]) -> tuple[SolvedStep, ...] | None:
    """Work out steps such as ``cost = price * count``; None if a value is no positive integer."""
    values = dict(numbers)
    solved = []
    for step in steps:
        name, _, left_term, operator, right_term = step.split()
        left, right = (
            int(term) if term.isdigit() else values[term] for term in (left_term, right_term)
        )
        value = OPERATORS[operator](left, right)
        if value < 1:
            return None
        values[name] = value
        solved.append(SolvedStep(name.replace("_", " "), left, operator, right, value))
    return tuple(solved)


def _draw_numbers(
    family: Family, rng: random.Random
) -> tuple[dict[str, int], tuple[SolvedStep, ...]]:
    """Draw numbers until every step gives a positive integer that is not too large."""
    for _ in range(MAX_NUMBER_DRAWS):
        numbers = {name: rng.choice(options) for name, options in family.numbers.items()}
        steps = solve(family.steps, numbers)
        if steps and max(step.value for step in steps) <= LARGEST_VALUE[family.level]:
            return numbers, steps
    raise RuntimeError(
        f"family {family.name!r}: no usable numbers in {MAX_NUMBER_DRAWS} draws; check its ranges"
    )


def _insert_sentence(question: str, sentence: str, rng: random.Random) -> str:
    """Put the sentence first or just before the last sentence of the question."""
    sentences = SENTENCE_BREAK.split(question)
    sentences.insert(rng.choice((0, len(sentences) - 1)), sentence)
    return " ".join(sentences)


def _problems(families: Sequence[Family], split: str, rng: random.Random) -> Iterator[Problem]:
    """Yield new problems of the split in rounds of one per family, until a family runs out."""
    seen: set[str] = set()
    while True:
        for family in rng.sample(families, len(families)):
            draws = (draw_problem(family, rng) for _ in range(MAX_PROBLEM_DRAWS))
            new = (p for p in draws if p.split == split and p.question not in seen)
            problem = next(new, None)
            if problem is None:
                return
            seen.add(problem.question)
            yield problem


def _select(split: str, levels: Sequence[int], names: Sequence[str] | None) -> list[Family]:
    """The families of the split that have one of the levels and, if names are given, a name."""
    _require_known("split", [split], SPLITS)
    _require_known("level", levels, LEVELS)
    in_split = [family for family in FAMILIES if family.held_out == (split == "test_families")]
    known_names = [family.name for family in in_split]
    if names is None:
        names = known_names
    _require_known(f"family of split {split!r}", names, known_names)
    selected = [f for f in in_split if f.level in levels and f.name in names]
    if not selected:
        raise ValueError(
            f"no family is selected: split {split!r}, levels {list(levels)}, families {list(names)}"
        )
    return selected


def _require_known(what: str, asked: Sequence[object], known: Sequence[object]) -> None:
    for value in asked:
        if value not in known:
            raise ValueError(f"unknown {what}: {value!r}; known: {', '.join(map(str, known))}")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
