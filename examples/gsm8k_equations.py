"""Write GSM8K's train split as equations, with variants of its problems that have other numbers.

    python examples/gsm8k_equations.py DIRECTORY runs/gsm8k/train.jsonl --variants 2
    python train_sft.py --dataset runs/gsm8k/train.jsonl --max-samples 20000 --learning-rate 1e-3

GSM8K's solutions contain calculator annotations such as `<<48/2=24>>`. These equations, one per
line, become the whole reasoning; `--sentences` also keeps the text around them. `--variants` adds
the same problems with other numbers, if every number in the equations can be traced to the question
without doubt (`vary`). The equations are then computed again with random numbers. A variant is kept
only if each result is of the same kind as before: a whole number stays whole, a positive number
positive. The first 200 rows, which `--dataset gsm8k` uses for validation, are left out.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, combinations, zip_longest
from pathlib import Path
from typing import NamedTuple

import yaml

from rlm.cli import UsageError, check_values, flag, run_main, terminal
from rlm.data import HELD_OUT
from rlm.grading import evaluate_expression, parse_number
from rlm.runs import replace_file

TRIES = 30  # maximum number of draws of numbers for a variant
_NOTE = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_FACTOR = re.compile(rf"(?<=[*/(])(?:{_NUMBER.pattern})|(?:{_NUMBER.pattern})(?=[*/)])")
# A whole number that is not part of 1,000, 2.5, 1/2, 3:30, 1st or a word.
_WHOLE = re.compile(r"(?<![\w.,/:])\d+(?![\w/:]|[.,]\d)")

# A question with these words may need other equations if other numbers are the largest.
_CHOOSES = re.compile(
    r"(?i)\b(?:most|least|best|max\w*|minim\w*|cheaper|either|(?:high|low|larg|small|great|few|short|long"
    r"|tall|heavi|light|cheap|old|young|fast|slow|big|quick|clos|near|far)est|farthest|furthest)\b"
)

# Numbers as words, and the factors that words such as "week" imply.
_WORDS = yaml.safe_load(Path(__file__).with_name("number_words.yaml").read_text(encoding="utf-8"))

_RESULT = re.compile(r"\s*\$?(?P<number>\d[\d,]*(?:\.\d+)?|\.\d+)")

Equation = tuple[str, str]  # (left side, result), as written


class Solution(NamedTuple):
    equations: list[Equation]
    texts: list[str]  # before each equation, and after the last


@dataclass
class EquationsConfig:
    source: Path = flag(None, "the published gsm8k_train.jsonl, or its folder", positional=True)
    output: Path = flag(None, "JSONL file to which the problems are written", positional=True)
    variants: int = flag(1, "number of variants per problem, with other numbers", min=0)
    max_equations: int | None = flag(
        None, "leave out problems with more equations (none: keep all)", min=1
    )
    marks: bool = flag(False, "write equations as <<48/2=24>>, which --tool calculator completes")
    sentences: bool = flag(False, "keep the published sentences around the equations")
    seed: int = flag(0, "random seed for the numbers of the variants")

    def __post_init__(self) -> None:
        check_values(self)
        if self.source is None or self.output is None:
            raise ValueError("pass two paths: GSM8K's train file, and the file to write")


def main(config: EquationsConfig) -> int:
    rows = read_rows(config.source)[HELD_OUT:]
    rng = random.Random(config.seed)
    written: list[dict[str, str]] = []
    most = config.max_equations or math.inf
    read = read_sentences if config.sentences else read_equations
    solutions = [(row["question"], read(row["answer"])) for row in rows]
    solved = [(q, solution) for q, solution in solutions if 1 <= len(solution.equations) <= most]
    for question, solution in solved:
        written.append(to_record(question, solution, config.marks))
    for question, solution in solved:
        seen = {question}
        for _ in range(config.variants):
            variant = vary(question, solution, rng)
            if variant and variant[0] not in seen:
                seen.add(variant[0])
                written.append(to_record(*variant, config.marks))
    try:
        replace_file(config.output, "".join(json.dumps(record) + "\n" for record in written))
    except OSError as error:
        raise UsageError(f"{config.output} cannot be written: {error.strerror}") from error
    terminal.line(
        f"{config.output}: {len(solved)} of {len(rows)} problems (their last equation gives the "
        f"answer) and {len(written) - len(solved)} variants with other numbers"
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
            f"{file} is not a file of GSM8K: every line needs `question`, and `answer` with ####"
        ) from error
    if len(rows) <= HELD_OUT:
        raise UsageError(f"{file} has {len(rows)} rows; the first {HELD_OUT} are held out")
    return rows


def read_equations(answer: str) -> Solution:
    """Return the calculator's equations, or none if the last result is not the answer."""
    equations = [(left.replace(" ", ""), right.strip()) for left, right in _NOTE.findall(answer)]
    gold = parse_number(answer.rpartition("####")[2])
    right = gold is not None and equations and parse_number(equations[-1][1]) == gold
    equations = equations if right else []
    return Solution(equations, ["", *["\n"] * (len(equations) - 1), ""])


def read_sentences(answer: str) -> Solution:
    """Return the equations and the published text around them.

    The published text repeats both sides of each equation: `48 / 2 = <<48/2=24>>24 clips`. The
    returned solution reads `<<48/2=24>> clips`. It is empty if a number in the text differs from
    the calculator's result, or if the text contains a calculation without an annotation.
    """
    equations, nothing = read_equations(answer).equations, Solution([], [""])
    texts = _NOTE.split(answer.rpartition("####")[0].strip())[::3]
    if not equations or len(texts) != len(equations) + 1:
        return nothing
    for place, (left, right) in enumerate(equations):
        before = _as_written(left).sub("", texts[place])
        after = _RESULT.match(texts[place + 1])
        if after is None or parse_number(after["number"]) != parse_number(right):
            return nothing
        rest = texts[place + 1][after.end() :]
        is_money = before.endswith("$") or after[0].startswith("$")
        named = re.match(r"\s*(?:dollars?|cents?|%)", rest)
        texts[place] = before.removesuffix("$")
        texts[place + 1] = f" dollars{rest}" if is_money and not named else rest
    by_hand = re.compile(r"[\d)]\s*[-+*/xX×]\s*\$?[\d(]|=\s*\$?\d")
    computed = any(by_hand.search(text) for text in texts)
    return nothing if computed else Solution(equations, texts)


def _as_written(left: str) -> re.Pattern[str]:
    """Return a pattern for `left` and = at the end of a text; spaces, $ and commas are optional."""
    tokens = re.findall(r"\d+|\D", left)
    digits = [r",?".join(token) if token.isdigit() else re.escape(token) for token in tokens]
    spaced = [d.replace(r"\*", r"[*xX×]") for d in digits]
    return re.compile(r"(?<![\d.,])\$?" + r"\s*\$?".join(spaced) + r"\s*=\s*(?=\$?\s*$)")


def to_record(question: str, solution: Solution, marks: bool) -> dict[str, str]:
    shown = [f"{left}={right}" for left, right in solution.equations]
    shown = [f"<<{equation}>>" if marks else equation for equation in shown]
    text = "".join(chain(*zip_longest(solution.texts, shown, fillvalue="")))
    return {"question": question, "answer": solution.equations[-1][1], "solution": text}


def vary(question: str, solution: Solution, rng: random.Random) -> tuple[str, Solution] | None:
    """Return the problem with other numbers, or None if the variant might be wrong.

    A number in an equation may be written in the question, be an earlier result, or be a constant
    that the question says in words ("a week"). Only numbers that must come from the question are
    drawn anew. There is no variant if
    - a number may be both from the question and an earlier result;
    - the source of a number is unknown: it may depend on a number that is drawn anew;
    - the question writes a number that no equation uses, such as a total that would be wrong;
    - an equation is not exact, or the question asks for the largest of something;
    - the solution's text has a number that is neither in the question nor in an equation, or a
      number word that is not in the question.
    """
    equations = solution.equations
    # All numbers of the question, including those that _WHOLE skips, such as 5 and 8 in 5:8.
    written = [Fraction(n) for n in _NUMBER.findall(question.replace(",", ""))]
    used = [Fraction(n) for left, _ in equations for n in _NUMBER.findall(left)]
    counted, shares = said_in_words(question)
    prose = " ".join(solution.texts)
    results = {parse_number(right) for _, right in equations}
    told = {Fraction(n) for n in _NUMBER.findall(prose.replace(",", ""))}
    if not told <= {*written, *used, *results} or not said_in_words(prose)[0] <= counted:
        return None
    # A number that is used twice may stand for two equal quantities, such as 4 legs and 4 wheels.
    fixed = {1} | counted | shares | _bound(written)
    whole = [number for number in map(Fraction, _WHOLE.findall(question)) if number not in fixed]
    free = [n for n in whole if written.count(n) == used.count(n) == 1]
    follows = _follow(equations, {*written, *counted}, shares)
    if not free or not follows or not {*written} <= {*used} or _CHOOSES.search(question):
        return None
    for _ in range(TRIES):
        values = {number: str(draw_near(int(number), rng)) for number in free}
        changed = recompute(equations, values)
        if changed and any(number != Fraction(drawn) for number, drawn in values.items()):
            renewed = zip(equations, changed, strict=True)
            known = values | {Fraction(old): new for (_, old), (_, new) in renewed}
            texts = [
                _put_in(known, _NUMBER, re.sub(r"(?<=\d),(?=\d)", "", t)) for t in solution.texts
            ]
            return _put_in(values, _WHOLE, question), Solution(changed, texts)
    return None


def _bound(numbers: Sequence[Fraction]) -> set[Fraction]:
    """Return the numbers a, b and c for which a + b = c or a * b = c, because c may be a total."""
    bound = set()
    for a, b in combinations(numbers, 2):
        for total in {a + b, a * b} & {*numbers}:
            bound |= {a, b, total}
    return bound


def _follow(
    equations: Sequence[Equation], given: Collection[Fraction], shares: Collection[Fraction]
) -> bool:
    """Return whether the equations follow from the given numbers and from each other.

    Each equation must be exact. Its numbers must be given or be earlier results; factors and
    divisors may also be `shares`, such as 7 for "a week". Each result but the last must be used
    later, and may not equal another number, because it would be unclear which of the two is meant.
    """
    known, needed = {*given}, set()
    for number, (left, right) in enumerate(equations, 1):
        numbers = [Fraction(n) for n in _NUMBER.findall(left)]
        result, taken = parse_number(right), {*numbers}
        factors = {Fraction(n) for n in _FACTOR.findall(left)} & {*shares}
        if result is None or compute(left) != result or not taken <= known | factors:
            return False
        if any(numbers.count(n) > 1 for n in needed):  # such as 1.2/1.2, where one 1.2 is from 20 %
            return False
        if number < len(equations) and result in known | {*shares}:
            return False
        known.add(result)
        needed = needed - taken | {result}
    return needed == {result}


def said_in_words(question: str) -> tuple[set[Fraction], set[Fraction]]:
    """Return the numbers that words of the question stand for: counts, and factors.

    >>> counted, shares = said_in_words("Twice a week two of them work 9-hour days, at 20%.")
    >>> sorted(map(str, counted)), sorted(map(str, shares))
    (['2'], ['1', '100', '2', '24', '60', '7'])
    """
    words = {*re.findall("[a-z]+", question.lower().replace("%", " percent "))}
    counted = {
        Fraction(number) for number, word in enumerate(_WORDS["counts"].split()) if word in words
    }
    return counted, {
        Fraction(n) for n, names in _WORDS["shares"].items() if words & {*names.split()}
    }


def _put_in(values: Mapping[Fraction, str], numbers: re.Pattern[str], text: str) -> str:
    """Replace numbers in a text, however they are written (125, 125.0)."""
    return numbers.sub(lambda match: values.get(Fraction(match[0]), match[0]), text)


def draw_near(number: int, rng: random.Random) -> int:
    """Draw a number of about the same size and as round: 40 gives 20, 30, …, 60; 7 gives 4 … 10.

    It is never 1, because the question's plurals would be wrong.
    """
    unit = next(unit for unit in (100, 10, 5, 1) if number % unit == 0)
    count = number // unit
    return unit * rng.randint(max(2 if unit == 1 else 1, (count + 1) // 2), max(3, count * 3 // 2))


def recompute(
    equations: Sequence[Equation], values: Mapping[Fraction, str]
) -> list[Equation] | None:
    """Return the equations with new numbers, or None if a result changes its sign or its kind.

    A whole result must stay whole, and another result must have at most two decimals.
    """
    known, changed = dict(values), []
    for left, right in equations:
        left = _put_in(known, _NUMBER, left)
        result, before = compute(left), parse_number(right)
        if result is None or before is None or (result > 0) != (before > 0):
            return None
        whole = result.denominator == 1
        if 100 % result.denominator or (before.denominator == 1 and not whole):
            return None
        known[before] = str(result) if whole else f"{float(result):.2f}".rstrip("0")
        changed.append((left, known[before]))
    return changed


def compute(expression: str) -> Fraction | None:
    """Compute +, -, *, / and brackets of decimal numbers exactly; return None for anything else."""
    if re.search(r"%|(?:^|[-+*/(])\s*\+", expression):  # a percentage or a unary plus
        return None
    try:
        return evaluate_expression(expression)
    except (ValueError, ZeroDivisionError):
        return None


if __name__ == "__main__":
    run_main(main, EquationsConfig, description=__doc__)
