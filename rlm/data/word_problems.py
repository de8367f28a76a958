"""A seeded generator of arithmetic word problems with one to four steps and worked solutions.

Two tables describe families of problems, each with one story: word_problems.yaml (positive
integers) and elementary.yaml (plain arithmetic, decimals, fractions, percentages, larger numbers).
A hash of a problem's family and stated numbers determines its split, so no two splits share a
problem, whatever the seeds and counts are. The held-out families form a separate split, which
measures transfer to new stories.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, partial
from itertools import islice
from operator import add, mul, sub
from pathlib import Path

from rlm.data.problem import Problem

YAML_FILES = {
    "word-problems": Path(__file__).with_name("word_problems.yaml"),
    "elementary": Path(__file__).with_name("elementary.yaml"),
}

# Default for the largest value of a step, by level. The values are small, because a small model has
# to learn the arithmetic too.
LARGEST_VALUE = {1: 150, 2: 150, 3: 500, 4: 600}

OPERATORS = {"+": add, "-": sub, "*": mul, "/": Fraction}
_DECIMAL = r"(\d+(?:\.\d+)?)"
_RANGE = re.compile(rf"{_DECIMAL} to {_DECIMAL}(?: by {_DECIMAL})?", re.ASCII)


@dataclass(frozen=True)
class Family:
    """A family of problems with the same story, which is an entry of a table.

    The comment at the top of the table explains the fields.
    """

    name: str
    steps: Sequence[str]
    sentences: Sequence[str]  # one for each step
    numbers: Mapping[str, Sequence[int | Fraction]]
    wordings: Sequence[str]
    distractors: Sequence[str] = ()
    held_out: bool = False
    setup: Sequence[str] = ()
    decimals: int = 0
    zero: bool = False
    largest: int | None = None
    untrained: Sequence[Sequence[int]] = ()

    @property
    def level(self) -> int:
        """The number of arithmetic steps."""
        return len(self.steps)

    @cached_property
    def stated(self) -> Sequence[str]:
        """The names of the numbers that a question states."""
        names = [*self.numbers, *(step.split()[0] for step in self.setup)]
        return [name for name in names if re.search(rf"\{{{name}[}}:]", self.wordings[0])]

    def allows(self, value: int | Fraction) -> bool:
        """Return whether a step may have this value."""
        largest = LARGEST_VALUE[self.level] if self.largest is None else self.largest
        is_written_out = (value * 10**self.decimals).denominator == 1
        return is_written_out and (0 < value <= largest or (self.zero and value == 0))


@dataclass(frozen=True)
class Table:
    """The content of word_problems.yaml or elementary.yaml."""

    names: Sequence[str]  # names of people
    nouns: Mapping[str, Sequence[str]]  # nouns in the plural, by kind of thing
    families: Sequence[Family]
    women: Sequence[str] = ()  # the names for which a story uses "she"
    spelled_rate: float = 0.0  # share of the questions in which small numbers are spelled out


class Shown:
    """A number in a question, formatted as {n} (2345.5), {n:,} (2,345.5) or {n:$} (2345.50)."""

    def __init__(self, value: int | Fraction) -> None:
        self.value = value

    def __format__(self, spec: str) -> str:
        if spec == "$":
            return f"{float(self.value):.2f}" if self.value.denominator > 1 else str(self.value)
        plain = show_number(self.value)
        whole, point, rest = plain.partition(".")
        return f"{int(whole):{spec}}{point}{rest}"


def show_number(value: int | Fraction) -> str:
    """Format a number of at most six decimals exactly, such as 12 or 4.5."""
    return str(value) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0")


@cache
def load_word_problem_table(dataset: str = "word-problems") -> Table:
    """Load word_problems.yaml or elementary.yaml; the result is cached."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # CSafeLoader is ten times as fast
    content = yaml.load(YAML_FILES[dataset].read_text(encoding="utf-8"), loader)
    common, families = {"largest": content.pop("largest", None)}, []
    for entry in content.pop("families"):
        entry["numbers"] = {
            k: _options(v, YAML_FILES[dataset]) for k, v in entry["numbers"].items()
        }
        families.append(Family(**common | entry))
    return Table(families=families, **content)


def _options(entry: str | list[int], file: Path) -> Sequence[int | Fraction]:
    """Parse the numbers of an entry: `2 to 12`, `10 to 150 by 5`, `0.5 to 9 by 0.5`, or a list."""
    if isinstance(entry, list):
        return [value if isinstance(value, int) else Fraction(str(value)) for value in entry]
    if (match := _RANGE.fullmatch(str(entry))) is None:
        raise ValueError(f"{file.name}: {entry!r} is neither a list nor like '10 to 150 by 5'")
    first, last, step = map(Fraction, match.groups(default="1"))
    if first.denominator == step.denominator == 1:
        return range(int(first), int(last) + 1, int(step))
    return [first + index * step for index in range(int((last - first) / step) + 1)]


@dataclass(frozen=True)
class Step:
    """One worked step of a solution."""

    name: str
    left: int | Fraction
    operator: str
    right: int | Fraction
    value: int | Fraction

    def equation(self, calculator_annotation: bool = False) -> str:
        """Format the step as `3 + 5 = 8`, or as a calculator annotation, `<<3+5=8>>`."""
        left, right, value = map(show_number, (self.left, self.right, self.value))
        equation = f"{left} {self.operator} {right} = {value}"
        return f"<<{equation.replace(' ', '')}>>" if calculator_annotation else equation


def solve(steps: Sequence[str], numbers: Mapping[str, int | Fraction]) -> Iterator[Step]:
    """Compute steps such as `cost = price * count` exactly, and yield them one by one."""
    values = dict(numbers)
    for step in steps:
        name, _, left_term, operator, right_term = step.split()
        left, right = (
            Fraction(term) if term[0].isdigit() else values[term]
            for term in (left_term, right_term)
        )
        values[name] = value = OPERATORS[operator](left, right)
        yield Step(name, left, operator, right, value)


SPLITS = ("train", "validation", "test", "test_families")
LEVELS = (1, 2, 3, 4)

TRAIN_PERCENT = 80
VALIDATION_PERCENT = 10  # the remaining problems belong to the test split

DISTRACTOR_RATE = 0.25
DISTRACTOR_NUMBERS = range(6, 31)

# Maximum number of draws for one set of numbers. The family with the fewest valid combinations
# needs about 30 draws on average.
MAX_NUMBER_DRAWS = 10_000
# Maximum number of draws for a new problem. A problem is in the requested split with probability
# 0.1 or more, so all draws fail only if almost all problems of the family were drawn before.
MAX_PROBLEM_DRAWS = 2_000

_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
NUMBER_WORDS: dict[int | Fraction, str] = dict(enumerate(_WORDS, 2))

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
    calculator_annotations: bool = False,
    sentences: bool = False,
) -> list[Problem]:
    """Generate `count` problems with different questions, spread evenly over the families.

    The result depends only on the arguments, and a smaller count gives a prefix of the same list.
    Solutions have one line per step. The columns of a problem are its family and its level (the
    number of steps).

    Args:
        families: the names of the families to use; None uses all families.
        dataset: "word-problems", whose answers are positive integers, or "elementary".
        calculator_annotations: whether to write the equations in solutions as `<<3+5=8>>`.
        sentences: whether to write solutions as sentences ("4 boxes hold 4 * 6 = 24 eggs.") instead
            of labelled equations (`eggs: 4 * 6 = 24`).

    Raises:
        ValueError: an argument is unknown, no family is selected, or the selected families have
            fewer than `count` different problems.
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
        raise ValueError(f"no family of problems has split {split!r} and levels {list(levels)}")
    style = {"calculator_annotations": calculator_annotations, "sentences": sentences}
    draw = partial(draw_problem, table=table, **style)
    found = _draw_all(selected, split, random.Random(f"{split} {seed}"), draw)
    problems = list(islice(found, count))
    if len(problems) < count:
        raise ValueError(
            f"cannot make {count} different problems for split {split!r}: "
            f"the selected families have only about {len(problems)}"
        )
    return problems


def draw_problem(
    family: Family,
    rng: random.Random,
    table: Table,
    calculator_annotations: bool = False,
    sentences: bool = False,
) -> tuple[Problem, str]:
    """Draw a problem of a family; return the problem and its split.

    Raises:
        RuntimeError: the family's ranges of numbers almost never lead to allowed values.
    """
    numbers, solution = _draw_numbers(family, rng)
    words = _draw_words(table, rng)
    wording = rng.choice(family.wordings)
    if table.spelled_rate and rng.random() < table.spelled_rate:
        spelled = {f"{{{name}}}": NUMBER_WORDS.get(value) for name, value in numbers.items()}
        wording = _SPELLABLE.sub(lambda slot: spelled.get(slot[0]) or slot[0], wording)
    shown = {name: Shown(value) for name, value in numbers.items()}
    question = wording.format(**words, **shown)
    # The distractor is drawn last, so that it does not change the other draws.
    if family.distractors and rng.random() < DISTRACTOR_RATE:
        extra = rng.choice([n for n in DISTRACTOR_NUMBERS if n not in numbers.values()])
        distractor = rng.choice(family.distractors).format(**words, extra=extra)
        parts = _SENTENCE_BREAK.split(question)
        parts.insert(rng.choice((0, len(parts) - 1)), distractor)
        question = " ".join(parts)
    lines = []
    for step, sentence in zip(solution, family.sentences, strict=True):
        equation = step.equation(calculator_annotations)
        line = f"{step.name.replace('_', ' ')}: {equation}"
        lines.append(sentence.format(**words | shown, equation=equation) if sentences else line)
        shown[step.name] = Shown(step.value)
    problem = Problem(
        id=f"{family.name}-{_sha256(question)[:12]}",
        question=question,
        answer=show_number(solution[-1].value),
        solution="\n".join(lines),
        columns={"family": family.name, "level": family.level},
    )
    return problem, split_of(family, numbers)


def _draw_words(table: Table, rng: random.Random) -> dict[str, str]:
    """Draw the words of a story: the names of two people, their pronouns, and the nouns."""
    name, friend = rng.sample(table.names, 2)
    he, his, him = ("she", "her", "her") if name in table.women else ("he", "his", "him")
    words = {"name": name, "friend": friend, "he": he, "his": his, "him": him}
    words |= {"He": he.capitalize(), "His": his.capitalize()}
    return words | {noun: rng.choice(options) for noun, options in table.nouns.items()}


def split_of(family: Family, numbers: Mapping[str, int | Fraction]) -> str:
    """Return the split of a problem, which depends only on its family and its stated numbers."""
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
    """Draw numbers until the family allows the values of all steps."""
    for _ in range(MAX_NUMBER_DRAWS):
        numbers = {name: rng.choice(options) for name, options in family.numbers.items()}
        solution = []
        for step in solve([*family.setup, *family.steps], numbers):
            if not family.allows(step.value):  # stop, because the next step may divide by 0
                break
            solution.append(step)
        else:
            setup = solution[: len(family.setup)]
            return numbers | {step.name: step.value for step in setup}, solution[len(setup) :]
    raise RuntimeError(
        f"family {family.name!r}: no usable numbers in {MAX_NUMBER_DRAWS} draws; check the ranges "
        "in its table"
    )


def _draw_all(
    families: Sequence[Family],
    split: str,
    rng: random.Random,
    draw: Callable[[Family, random.Random], tuple[Problem, str]],
) -> Iterator[Problem]:
    """Yield new problems of a split from each family in turn until all families are exhausted."""
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
