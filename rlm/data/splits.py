"""Split problems into train, validation and test, and select rows with a slice such as train[:500].

Train and validation never have a question in common. The validation problems are selected by a hash
of their questions, so they do not depend on the order of the file. (GSM8K's are its first rows.)
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rlm.cli import UsageError
from rlm.data.problem import Problem, plain_question

PUBLISHED_TRAIN = "train+validation"  # GSM8K's whole train file, in the order of the file
FILE_SPLITS = ("train", "validation", "test")
# Maximum number of questions in a held-out validation split, which gets a tenth of all questions
# and at least one.
HELD_OUT = 200
# With --max-samples, only this many problems (or --max-samples, if that is more) are read from a
# split of OpenMathInstruct-1 or of an org/name hub dataset, because it may be large. Train is a
# sample of these problems. A validation split that is not published is held out of the first POOL.
POOL = 5000

Bounds = tuple[str | None, str | None]  # the first row and the end of a slice
WHOLE: Bounds = (None, None)

_SLICE = re.compile(r"([\w.-]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?", re.ASCII)


def split_slice(text: str) -> tuple[str, Bounds]:
    """Parse `train[100:10%]` into the split's name and the bounds of the slice.

    >>> split_slice("train[:500]"), split_slice("test")
    (('train', (None, '500')), ('test', (None, None)))

    Raises:
        UsageError: the text does not have this form.
    """
    if (match := _SLICE.fullmatch(text)) is None:
        raise UsageError(f"--split {text}: write NAME, NAME[:500], NAME[500:] or NAME[10%:20%]")
    return match[1], (match[2], match[3])


def cut_rows(rows: Sequence[Any], bounds: Bounds) -> Sequence[Any]:
    """Return the rows between two bounds.

    A bound is a row number or a percentage; negative bounds count from the end.
    """

    def index(bound: str | None) -> int | None:
        if bound is None or not bound.endswith("%"):
            return None if bound is None else int(bound)
        place = round(len(rows) * int(bound[:-1]) / 100)
        # -1% of 40 rows is 0 rows from the end, but the index 0 would be the first row.
        return max(0, len(rows) + place) if bound.startswith("-") else place

    first, last = map(index, bounds)
    return rows[first:last]


def choose_rows(count: int, bounds: Bounds) -> Sequence[int]:
    """Return the indices of the rows between two bounds in a split of `count` rows.

    If there are more than POOL rows, they are in a fixed random order, because many datasets are
    sorted by topic.
    """
    chosen = cut_rows(range(count), bounds)
    return random.Random(0).sample(chosen, len(chosen)) if len(chosen) > POOL else chosen


def sort_by_hash(problems: list[Problem]) -> list[Problem]:
    """Sort problems by a hash of their questions, because many files are sorted by topic."""
    return sorted(problems, key=lambda p: hashlib.sha256(p.question.encode()).digest())


def hold_out(
    problems: list[Problem], split: str, source: str, *, in_order: bool = False
) -> list[Problem]:
    """Return the problems of train or validation; all problems for test and train+validation.

    Train and validation have no question in common. Validation contains the questions with the
    smallest hashes, or the first questions if `in_order` is true. Without `in_order`, validation
    and test are sorted by hash.
    """
    ordered = problems if in_order else sort_by_hash(problems)
    if split in ("test", PUBLISHED_TRAIN):
        return ordered
    questions = list(dict.fromkeys(plain_question(problem.question) for problem in ordered))
    if len(questions) < 2:
        raise UsageError(f"{source}: one question is too few for a train and a validation split")
    held_out = set(questions[: min(HELD_OUT, max(1, len(questions) // 10))])
    if split == "validation":
        return [p for p in ordered if plain_question(p.question) in held_out]
    return [p for p in problems if plain_question(p.question) not in held_out]


def without_questions(problems: Iterable[Problem], held_out: Iterable[Problem]) -> list[Problem]:
    """Return the problems whose question is not held out."""
    questions = {plain_question(problem.question) for problem in held_out}
    return [p for p in problems if plain_question(p.question) not in questions]


def shuffle_train(problems: list[Problem], split: str, seed: int) -> list[Problem]:
    """Shuffle the list in place if the split is train, and return it."""
    if split == "train":
        random.Random(seed).shuffle(problems)
    return problems
