"""Tables of the word-problem generator: families of stories with their numbers and steps."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from operator import add, mul, sub
from pathlib import Path

YAML_FILES = {
    "word-problems": Path(__file__).with_name("word_problems.yaml"),
    "elementary": Path(__file__).with_name("elementary.yaml"),
}

# The largest value that a step may give, by level, where the table says no other: a small model
# has to learn the arithmetic too.
LARGEST_VALUE = {1: 150, 2: 150, 3: 500, 4: 600}

OPERATORS = {"+": add, "-": sub, "*": mul, "/": Fraction}
_DECIMAL = r"(\d+(?:\.\d+)?)"
_RANGE = re.compile(rf"{_DECIMAL} to {_DECIMAL}(?: by {_DECIMAL})?", re.ASCII)


@dataclass(frozen=True)
class Family:
    """One story, an entry of a table, whose head says what the fields hold."""

    name: str
    steps: Sequence[str]
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
        """Whether a step may give this value."""
        largest = LARGEST_VALUE[self.level] if self.largest is None else self.largest
        is_written_out = (value * 10**self.decimals).denominator == 1
        return is_written_out and (0 < value <= largest or (self.zero and value == 0))


@dataclass(frozen=True)
class Table:
    """All of word_problems.yaml or elementary.yaml."""

    names: Sequence[str]  # people's names
    nouns: Mapping[str, Sequence[str]]  # plural
    families: Sequence[Family]
    women: Sequence[str] = ()  # those of the names that are "she"
    spelled_rate: float = 0.0  # how often small numbers stand in words


class Shown:
    """A number in a question: {n} is 2345.5, {n:,} is 2,345.5, {n:$} is 2345.50."""

    def __init__(self, value: int | Fraction) -> None:
        self.value = value

    def __format__(self, spec: str) -> str:
        if spec == "$":
            return f"{float(self.value):.2f}" if self.value.denominator > 1 else str(self.value)
        plain = show_number(self.value)
        whole, point, rest = plain.partition(".")
        return f"{int(whole):{spec}}{point}{rest}"


def show_number(value: int | Fraction) -> str:
    """Write a number of at most six decimals exactly: 12, or 4.5."""
    return str(value) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0")


@cache
def load_word_problem_table(dataset: str = "word-problems") -> Table:
    """Read word_problems.yaml or elementary.yaml, once."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former takes a tenth of the time
    content = yaml.load(YAML_FILES[dataset].read_text(encoding="utf-8"), loader)
    common, families = {"largest": content.pop("largest", None)}, []
    for entry in content.pop("families"):
        entry["numbers"] = {
            k: _options(v, YAML_FILES[dataset]) for k, v in entry["numbers"].items()
        }
        families.append(Family(**common | entry))
    return Table(families=families, **content)


def _options(entry: str | list[int], file: Path) -> Sequence[int | Fraction]:
    """The numbers that an entry allows: `2 to 12`, `10 to 150 by 5`, `0.5 to 9 by 0.5`, a list."""
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
    """One worked step of a solution: `name: left operator right = value`."""

    name: str
    left: int | Fraction
    operator: str
    right: int | Fraction
    value: int | Fraction

    def line(self, calculator_mark: bool = False) -> str:
        """Write the step as `total: 3 + 5 = 8`, or with a mark as `total: <<3+5=8>>`."""
        left, right, value = map(show_number, (self.left, self.right, self.value))
        equation = f"{left} {self.operator} {right} = {value}"
        if calculator_mark:
            equation = f"<<{equation.replace(' ', '')}>>"
        return f"{self.name.replace('_', ' ')}: {equation}"


def solve(steps: Sequence[str], numbers: Mapping[str, int | Fraction]) -> Iterator[Step]:
    """Work out steps such as ``cost = price * count`` one by one, exactly."""
    values = dict(numbers)
    for step in steps:
        name, _, left_term, operator, right_term = step.split()
        left, right = (
            Fraction(term) if term[0].isdigit() else values[term]
            for term in (left_term, right_term)
        )
        values[name] = value = OPERATORS[operator](left, right)
        yield Step(name, left, operator, right, value)
