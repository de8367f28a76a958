"""Generator of seeded arithmetic word problems of one to four steps, with worked solutions.

The stories are the families of word_problems.yaml. A problem's split is a hash of its family and
its numbers, so that no two splits share a problem, whichever seeds and counts they were asked with.
The held-out families make up a split of their own, which measures transfer.
"""

import hashlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from operator import add, mul, sub
from pathlib import Path

from rlm.data.problem import Problem

SPLITS = ("train", "validation", "test", "test_families")
LEVELS = (1, 2, 3, 4)
YAML_FILE = Path(__file__).with_suffix(".yaml")

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

_RANGE = re.compile(r"(\d+) to (\d+)(?: by (\d+))?", re.ASCII)
_SENTENCE_BREAK = re.compile(r"(?<=[.?]) ")


@dataclass(frozen=True)
class Family:
    """One story, an entry of word_problems.yaml, which says what the fields hold."""

    name: str
    steps: Sequence[str]
    numbers: Mapping[str, Sequence[int]]
    wordings: Sequence[str]
    distractors: Sequence[str] = ()
    held_out: bool = False

    @property
    def level(self) -> int:
        """The number of arithmetic steps."""
        return len(self.steps)


@dataclass(frozen=True)
class Table:
    """All of word_problems.yaml."""

    names: Sequence[str]  # of people
    nouns: Mapping[str, Sequence[str]]  # plural
    families: Sequence[Family]


@cache
def load_word_problem_table() -> Table:
    """Read word_problems.yaml, once."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former takes a tenth of the time
    content = yaml.load(YAML_FILE.read_text(encoding="utf-8"), loader)
    families = [
        Family(**entry | {"numbers": {k: _options(v) for k, v in entry["numbers"].items()}})
        for entry in content["families"]
    ]
    return Table(content["names"], content["nouns"], families)


def _options(entry: str | list[int]) -> Sequence[int]:
    """The numbers that an entry allows: `2 to 12`, `10 to 150 by 5`, or a list."""
    if isinstance(entry, list):
        return entry
    if (match := _RANGE.fullmatch(str(entry))) is None:
        raise ValueError(f"{YAML_FILE.name}: {entry!r} is neither a list nor like '10 to 150 by 5'")
    first, last, step = match.groups(default="1")
    return range(int(first), int(last) + 1, int(step))


def generate_word_problems(
    split: str,
    count: int,
    seed: int = 0,
    levels: Sequence[int] = LEVELS,
    families: Sequence[str] | None = None,
) -> list[Problem]:
    """Make `count` problems with different questions, spread evenly over the families.

    The result is a function of the arguments alone, and a smaller count gives a prefix of it. An
    answer is a positive integer, a solution has a line for each step; the columns are the family
    and the level (the number of steps). `families` narrows the selection by name.

    Raises:
        ValueError: an argument is unknown, nothing is selected, or the selection has fewer than
            `count` different problems.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    held_out = split == "test_families"
    in_split = {f.name: f for f in load_word_problem_table().families if f.held_out == held_out}
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
    problems = list(islice(_draw_all(selected, split, random.Random(f"{split} {seed}")), count))
    if len(problems) < count:
        raise ValueError(
            f"cannot make {count} different problems for split {split!r}: "
            f"the selection ran out after about {len(problems)}"
        )
    return problems


def draw_problem(family: Family, rng: random.Random) -> tuple[Problem, str]:
    """Draw one problem of the family, and say which split it belongs to.

    Raises:
        RuntimeError: the family's ranges hardly ever give positive integers of moderate size.
    """
    numbers, solution = _draw_numbers(family, rng)
    table = load_word_problem_table()
    name, friend = rng.sample(table.names, 2)
    words = {"name": name, "friend": friend}
    words |= {noun: rng.choice(options) for noun, options in table.nouns.items()}
    question = rng.choice(family.wordings).format(**words, **numbers)
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
        answer=str(solution[-1][1]),
        solution="\n".join(line for line, _ in solution),
        columns={"family": family.name, "level": family.level},
    )
    return problem, split_of(family, numbers)


def split_of(family: Family, numbers: Mapping[str, int]) -> str:
    """The split of a problem; it depends on the family and the numbers only."""
    if family.held_out:
        return "test_families"
    bucket = int(_sha256(" ".join([family.name, *map(str, numbers.values())])), 16) % 100
    if bucket < TRAIN_PERCENT:
        return "train"
    return "validation" if bucket < TRAIN_PERCENT + VALIDATION_PERCENT else "test"


def solve(steps: Sequence[str], numbers: Mapping[str, int]) -> list[tuple[str, int]] | None:
    """Work out steps such as ``cost = price * count``: for each a line of the solution and a value.

    None if a value is no positive integer.
    """
    values, solution = dict(numbers), []
    for step in steps:
        name, _, left_term, operator, right_term = step.split()
        left, right = (
            int(term) if term.isdigit() else values[term] for term in (left_term, right_term)
        )
        values[name] = value = OPERATORS[operator](left, right)
        if value < 1:
            return None
        line = f"{name.replace('_', ' ')}: {left} {operator} {right} = {value}"
        solution.append((line, value))
    return solution


def _draw_numbers(
    family: Family, rng: random.Random
) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """Draw numbers until every step gives a positive integer that is not too large."""
    for _ in range(MAX_NUMBER_DRAWS):
        numbers = {name: rng.choice(options) for name, options in family.numbers.items()}
        solution = solve(family.steps, numbers)
        if solution and max(value for _, value in solution) <= LARGEST_VALUE[family.level]:
            return numbers, solution
    raise RuntimeError(
        f"family {family.name!r}: no usable numbers in {MAX_NUMBER_DRAWS} draws; check its ranges"
    )


def _draw_all(families: Sequence[Family], split: str, rng: random.Random) -> Iterator[Problem]:
    """Yield new problems of the split in rounds of one per family, until a family runs out."""
    seen: set[str] = set()
    while True:
        for family in rng.sample(families, len(families)):
            draws = (draw_problem(family, rng) for _ in range(MAX_PROBLEM_DRAWS))
            new = (p for p, where in draws if where == split and p.question not in seen)
            problem = next(new, None)
            if problem is None:
                return
            seen.add(problem.question)
            yield problem


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
