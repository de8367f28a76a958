"""Generator of seeded arithmetic word problems of one to four steps, with worked solutions.

The stories are the families of two tables: word_problems.yaml (positive integers), and
elementary.yaml (plain arithmetic, decimals, fractions, percentages, larger numbers). A problem's
split is a hash of its family and its numbers, so that no two splits share a problem, whichever
seeds and counts they were asked with. The held-out families make up a split of their own, which
measures transfer.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import islice

from rlm.data.families import (
    Family,
    Shown,
    Step,
    Table,
    load_word_problem_table,
    show_number,
    solve,
)
from rlm.data.problem import Problem

SPLITS = ("train", "validation", "test", "test_families")
LEVELS = (1, 2, 3, 4)

TRAIN_PERCENT = 80
VALIDATION_PERCENT = 10  # The rest is test.

DISTRACTOR_RATE = 0.25
DISTRACTOR_NUMBERS = range(6, 31)

# Draws before giving up. The rarest story needs about 30 draws for one usable set of numbers.
MAX_NUMBER_DRAWS = 10_000
# A problem falls in its split with probability 0.1 at least, so this only runs out on repeats.
MAX_PROBLEM_DRAWS = 2_000

NUMBER_WORDS = dict(enumerate(("two", "three", "four", "five", "six", "seven", "eight", "nine"), 2))

_SENTENCE_BREAK = re.compile(r"(?<=[.?]) ")
_SPELLABLE = re.compile(r"(?<=[a-z] )\{\w+\}(?= [a-z{])")  # "buys {count} pens", not "${count}"


def generate_word_problems(
    split: str,
    count: int,
    seed: int = 0,
    levels: Sequence[int] = LEVELS,
    families: Sequence[str] | None = None,
    *,
    dataset: str = "word-problems",
    calculator_marks: bool = False,
) -> list[Problem]:
    """Make `count` problems with different questions, spread evenly over the families.

    The result is a function of the arguments alone, and a smaller count gives a prefix of it. A
    solution has a line for each step; the columns are the family and the level (the number of
    steps).

    Args:
        families: narrows the selection by name.
        dataset: "word-problems", whose answers are positive integers, or "elementary".
        calculator_marks: write the solutions' equations as `<<3+5=8>>`.

    Raises:
        ValueError: an argument is unknown, nothing is selected, or the selection has fewer than
            `count` different problems.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    held_out = split == "test_families"
    table = load_word_problem_table(dataset)
    in_split = {f.name: f for f in table.families if f.held_out == held_out}
    names = list(in_split) if families is None else families
    checks = ("split", [split], SPLITS), ("level", levels, LEVELS), ("family", names, in_split)
    for what, asked, known in checks:
        for value in asked:
            if value not in known:
                there_are = ", ".join(map(str, known))
                raise ValueError(f"unknown {what}: {value!r}; known: {there_are}")
    selected = [f for f in in_split.values() if f.level in levels and f.name in names]
    if not selected:
        raise ValueError(f"no family is selected: split {split!r}, levels {list(levels)}")
    draw = partial(draw_problem, table=table, calculator_marks=calculator_marks)
    found = _draw_all(selected, split, random.Random(f"{split} {seed}"), draw)
    problems = list(islice(found, count))
    if len(problems) < count:
        raise ValueError(
            f"cannot make {count} different problems for split {split!r}: "
            f"the selection ran out after about {len(problems)}"
        )
    return problems


def draw_problem(
    family: Family, rng: random.Random, table: Table, calculator_marks: bool = False
) -> tuple[Problem, str]:
    """Draw one problem of the family, and say which split it belongs to.

    Raises:
        RuntimeError: the family's ranges hardly ever give values that it allows.
    """
    numbers, solution = _draw_numbers(family, rng)
    words = _draw_words(table, rng)
    wording = rng.choice(family.wordings)
    if table.spelled_rate and rng.random() < table.spelled_rate:
        spelled = {f"{{{name}}}": NUMBER_WORDS.get(value) for name, value in numbers.items()}
        wording = _SPELLABLE.sub(lambda slot: spelled.get(slot[0]) or slot[0], wording)
    question = wording.format(**words, **{name: Shown(value) for name, value in numbers.items()})
    # Drawn last, so that a distractor changes nothing but the text.
    if family.distractors and rng.random() < DISTRACTOR_RATE:
        extra = rng.choice([n for n in DISTRACTOR_NUMBERS if n not in numbers.values()])
        distractor = rng.choice(family.distractors).format(**words, extra=extra)
        sentences = _SENTENCE_BREAK.split(question)
        sentences.insert(rng.choice((0, len(sentences) - 1)), distractor)
        question = " ".join(sentences)
    problem = Problem(
        id=f"{family.name}-{_sha256(question)[:12]}",
        question=question,
        answer=show_number(solution[-1].value),
        solution="\n".join(step.line(calculator_marks) for step in solution),
        columns={"family": family.name, "level": family.level},
    )
    return problem, split_of(family, numbers)


def _draw_words(table: Table, rng: random.Random) -> dict[str, str]:
    """Draw the two people of a story and its things."""
    name, friend = rng.sample(table.names, 2)
    he, his, him = ("she", "her", "her") if name in table.women else ("he", "his", "him")
    words = {"name": name, "friend": friend, "he": he, "his": his, "him": him}
    words |= {"He": he.capitalize(), "His": his.capitalize()}
    return words | {noun: rng.choice(options) for noun, options in table.nouns.items()}


def split_of(family: Family, numbers: Mapping[str, int | Fraction]) -> str:
    """The split of a problem; it depends on the family and the stated numbers only."""
    if family.held_out:
        return "test_families"
    stated = [numbers[name] for name in family.stated]
    if stated in family.untrained:
        return "test"
    bucket = int(_sha256(" ".join([family.name, *map(str, stated)])), 16) % 100
    if bucket < TRAIN_PERCENT:
        return "train"
    return "validation" if bucket < TRAIN_PERCENT + VALIDATION_PERCENT else "test"


def _draw_numbers(
    family: Family, rng: random.Random
) -> tuple[dict[str, int | Fraction], list[Step]]:
    """Draw numbers until the family allows the value of every step."""
    for _ in range(MAX_NUMBER_DRAWS):
        numbers = {name: rng.choice(options) for name, options in family.numbers.items()}
        solution = []
        for step in solve([*family.setup, *family.steps], numbers):
            if not family.allows(step.value):  # the next step could divide by it
                break
            solution.append(step)
        else:
            setup = solution[: len(family.setup)]
            return numbers | {step.name: step.value for step in setup}, solution[len(setup) :]
    raise RuntimeError(
        f"family {family.name!r}: no usable numbers in {MAX_NUMBER_DRAWS} draws; check its ranges"
    )


def _draw_all(
    families: Sequence[Family],
    split: str,
    rng: random.Random,
    draw: Callable[[Family, random.Random], tuple[Problem, str]],
) -> Iterator[Problem]:
    """Yield new problems of the split in rounds of one per family that has not run out."""
    seen: set[str] = set()
    families = list(families)
    while families:
        for family in rng.sample(families, len(families)):
            draws = (draw(family, rng) for _ in range(MAX_PROBLEM_DRAWS))
            new = (p for p, where in draws if where == split and p.question not in seen)
            problem = next(new, None)
            if problem is None:
                families.remove(family)
                continue
            seen.add(problem.question)
            yield problem


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
