"""GSM8K's train split as equations, and more of it: the same problems with other numbers.

    python examples/gsm8k_equations.py DIRECTORY runs/gsm8k/train.jsonl --variants 2
    python train_sft.py --dataset runs/gsm8k/train.jsonl --max-samples 20000 --learning-rate 1e-3

GSM8K's solutions carry what its annotators' calculator computed, `<<48/2=24>>`. A line of these
each is the whole reasoning here. With `--variants` come the same problems with other numbers: each
whole number that the question writes once and that the equations use is drawn anew, the equations
are computed again, and the variant is kept if all their results are of the kind they were (whole
stays whole, positive stays positive). The first 200 rows, which `--dataset gsm8k` validates with,
are left out.
"""

from __future__ import annotations

import ast
import json
import operator
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package, when it is not installed

from rlm import terminal  # noqa: E402
from rlm.config import UsageError, check_values, flag  # noqa: E402
from rlm.data import HELD_OUT  # noqa: E402
from rlm.numerals import parse_number  # noqa: E402
from rlm.records import replace_file  # noqa: E402
from rlm.script import run_main  # noqa: E402

TRIES = 30  # draws of numbers before a problem is left without a variant
_NOTE = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
# A whole number that stands alone: no part of 1,000, 2.5, 1/2, 3:30, 1st or a word.
_WHOLE = re.compile(r"(?<![\w.,/:])\d+(?![\w/:]|[.,]\d)")

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

# What questions say in words: twice, a dozen, a year, per cent. Another number that an equation
# takes from nowhere was computed without the calculator, and may depend on what is drawn anew.
_IN_WORDS = {*map(Fraction, (*range(1, 13), 24, 30, 52, 60, 100, 365, 1000, "0.5"))}

Equation = tuple[str, str]  # what is computed, and what comes out, as written


@dataclass
class EquationsConfig:
    source: Path | None = flag(
        None, "gsm8k_train.jsonl, as published, or its directory", positional=True
    )
    output: Path | None = flag(None, "where the problems go, as JSONL", positional=True)
    variants: int = flag(1, "variants of each problem with other numbers", min=0)
    seed: int = flag(0, "of the variants' numbers")

    def __post_init__(self) -> None:
        check_values(self)
        if self.source is None or self.output is None:
            raise ValueError("two names are needed: GSM8K's train file, and the file to write")


def main(config: EquationsConfig) -> int:
    rows = read_rows(config.source)[HELD_OUT:]
    rng = random.Random(config.seed)
    written: list[dict[str, str]] = []
    solved = [(row["question"], read_equations(row["answer"])) for row in rows]
    solved = [(question, equations) for question, equations in solved if equations]
    for question, equations in solved:
        written.append(to_record(question, equations))
    for question, equations in solved:
        seen = {question}
        for _ in range(config.variants):
            variant = vary(question, equations, rng)
            if variant and variant[0] not in seen:
                seen.add(variant[0])
                written.append(to_record(*variant))
    try:
        replace_file(config.output, "".join(json.dumps(record) + "\n" for record in written))
    except OSError as error:
        raise UsageError(f"{config.output} cannot be written: {error.strerror}") from error
    terminal.line(
        f"{config.output}: {len(solved)} of {len(rows)} problems, whose last equation gives the "
        f"answer, and {len(written) - len(solved)} variants with other numbers"
    )
    return 0


def read_rows(source: Path) -> list[dict[str, str]]:
    file = source
    if source.is_dir():
        published = source / "gsm8k_train.jsonl"
        file = published if published.exists() else source / "train.jsonl"
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
        if not all("####" in row["answer"] and row["question"] for row in rows):
            raise KeyError("####")
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file} is not GSM8K's: every line needs `question` and, with ####, `answer`"
        ) from error
    if len(rows) <= HELD_OUT:
        raise UsageError(f"{file} has {len(rows)} rows; the first {HELD_OUT} are held out")
    return rows


def read_equations(answer: str) -> list[Equation]:
    """The calculator's equations; none if the last does not give the answer."""
    equations = [(left.replace(" ", ""), right.strip()) for left, right in _NOTE.findall(answer)]
    gold = parse_number(answer.rpartition("####")[2])
    right = gold is not None and equations and parse_number(equations[-1][1]) == gold
    return equations if right else []


def to_record(question: str, equations: Sequence[Equation]) -> dict[str, str]:
    solution = "\n".join(f"{left}={right}" for left, right in equations)
    return {"question": question, "answer": equations[-1][1], "solution": solution}


def vary(
    question: str, equations: Sequence[Equation], rng: random.Random
) -> tuple[str, list[Equation]] | None:
    """The problem with other numbers, or None where that cannot be done for certain.

    A number of an equation is the question's, or an earlier result, or a constant that stays. Where
    it could be both of the first two, or an equation is not exact, there is no variant.
    """
    written = _WHOLE.findall(question)
    used = {number for left, _ in equations for number in _NUMBER.findall(left)}
    free = [n for n in written if written.count(n) == 1 and n in used and int(n) > 1]
    results = [right for _, right in equations]
    given = {*map(Fraction, _NUMBER.findall(question.replace(",", "")) + results)} | _IN_WORDS
    if {*map(Fraction, used)} - given:
        return None
    if not free or {*free} & {*results[:-1]} or len({*results}) < len(results):
        return None
    if any(compute(left) != parse_number(right) for left, right in equations):
        return None
    for _ in range(TRIES):
        values = {number: str(draw_near(int(number), rng)) for number in free}
        changed = recompute(equations, values)
        if changed and any(number != drawn for number, drawn in values.items()):
            return _put_in(values, _WHOLE, question), changed
    return None


def _put_in(values: Mapping[str, str], numbers: re.Pattern[str], text: str) -> str:
    return numbers.sub(lambda match: values.get(match[0], match[0]), text)


def draw_near(number: int, rng: random.Random) -> int:
    """A number of about the same size and as round: 40 becomes 20, 30, …, 60; 7 becomes 4 … 10."""
    unit = next(unit for unit in (100, 10, 5, 1) if number % unit == 0)
    count = number // unit
    return unit * rng.randint(max(1, (count + 1) // 2), max(3, count * 3 // 2))


def recompute(equations: Sequence[Equation], values: Mapping[str, str]) -> list[Equation] | None:
    """The equations with other numbers put in, or None if a result is not of the kind it was."""
    known, changed = dict(values), []
    for left, right in equations:
        left = _put_in(known, _NUMBER, left)
        result, before = compute(left), parse_number(right)
        if result is None or before is None or (result > 0) != (before > 0):
            return None
        whole = result.denominator == 1
        if 100 % result.denominator or (before.denominator == 1 and not whole):
            return None
        known[right] = str(result) if whole else f"{float(result):.2f}".rstrip("0")
        changed.append((left, known[right]))
    return changed


def compute(expression: str) -> Fraction | None:
    """What +, -, *, / and brackets make of decimal numbers, exactly; None for anything else."""
    try:
        return _value(ast.parse(expression, mode="eval").body, expression)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr, source: str) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, source), _value(node.right, source))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, source)
    if isinstance(node, ast.Constant):
        return Fraction(ast.get_source_segment(source, node) or "")
    raise ValueError(f"{source} is no arithmetic")


if __name__ == "__main__":
    run_main(main, EquationsConfig, description=__doc__)
