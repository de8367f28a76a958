"""`Problem`, a question with its reference answer, and functions that parse rows to Problems."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from numbers import Number
from typing import Any

from rlm.cli import UsageError
from rlm.data.columns import (
    ANSWER_FIELDS,
    CHAT_FIELDS,
    FINAL_LINE,
    HOW_TO_NAME,
    QUESTION_FIELDS,
    REASONING_TAGS,
    LeftOut,
    MissingColumn,
    Row,
    column_names,
    find_layout,
    first_number,
    has_system_message,
    name_classes,
    read_answer,
    read_chat,
    read_choices,
    rename_columns,
    unread_texts,
    without_tags,
)
from rlm.grading import (
    ANSWER_TYPES,
    READERS,
    AnswerType,
    gold_from_gsm8k,
    normalize_answer,
    parse_number,
)

logger = logging.getLogger(__name__)

# Fields that are not passed to rewards as columns: the fields of `Problem`, and names that are
# already arguments of a reward's call.
TAKEN_FIELDS = {*QUESTION_FIELDS, *ANSWER_FIELDS, "id", "solution", "answer_type"}
TAKEN_FIELDS |= {"reasoning_format", "is_truncated", "strict_verdict"}
TAKEN_FIELDS |= {"self", "prompts", "completions", "completion"}
TAKEN_FIELDS |= {"reference_answer", "reference_answers"}
NEEDED = (
    f"expected rows with {' or '.join(QUESTION_FIELDS)}, and {' or '.join(ANSWER_FIELDS)}, or "
    "a list of Problems"
)
# Columns in which `rlm.data.columns.read_chat` may find the answer.
ANSWER_INSIDE = {*CHAT_FIELDS, "completion", "solution", "reward_model"}
MAX_BAD_SHARE, BAD_LINES_SHOWN = 0.05, 5
HEAD = 1000  # maximum number of rows searched to infer the number of the first choice (0 or 1)
# Matches the tags and marks that separate worked steps from an answer. No answer may contain them.
_FORMAT = re.compile(rf"</?(?:{'|'.join(REASONING_TAGS)}|answer)>|\n####")
# Texts that make the report of `parse_rows` a warning.
ANOTHER_ANSWER = "with another answer"
UNUSED = "with a system message, which is not used"


@dataclass(frozen=True)
class Problem:
    """A question and its reference answer.

    `rlm.grading.READERS[answer_type]` parses the reference answer. Only the user's own reward reads
    the reference answer of an open question.
    """

    id: str  # unique within the dataset; the seed of the problem's samples depends on the id
    question: str
    answer: str
    solution: str = ""  # the worked solution in words; "" if the dataset has no solutions
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)  # passed to rewards
    answer_type: AnswerType = "number"

    @property
    def has_steps(self) -> bool:
        """Whether there is an answer and a solution that differs from it, as SFT requires."""
        return bool(self.answer) and normalize_answer(self.solution) not in (
            None,
            normalize_answer(self.answer),
        )


def example_questions(problems: Iterable[Problem]) -> list[str]:
    """Return the first three questions of at most 160 characters, for trying out a model."""
    short = dict.fromkeys(p.question for p in problems if len(p.question) <= 160)
    return list(short)[:3]


class NotAnAnswer(ValueError):
    """Raised when a reference answer does not match the `answer_type` of its row."""


def answer_types(problems: Iterable[Problem]) -> tuple[AnswerType, ...]:
    """Return the answer types in a dataset, with the most frequent type first."""
    counts = Counter[AnswerType](p.answer_type for p in problems)
    return tuple(kind for kind, _ in counts.most_common())


def parse_rows(
    rows: Iterable[tuple[int, bytes | Row | Problem]],
    source: str,
    prefix: str,
    parse: Callable[..., Sequence[Problem]],
    limit: int | None = None,
    quiet: bool = False,
    columns: Mapping[str, str] | None = None,
    remedy: str = "fix them",
) -> list[Problem]:
    """Parse numbered rows to problems, and log how many rows were left out and why.

    A row without an id gets the id PREFIX-NUMBER.

    Args:
        rows: the row numbers and rows; bytes are a line of JSON, and a Problem is used unchanged.
        source: the name of the file or dataset in messages.
        parse: a function that takes a row and its default id and returns the row's problems. It
            raises a ValueError for an invalid row and `LeftOut` for an unwanted row.
        limit: the maximum number of problems.
        quiet: whether to log nothing, because the same rows were reported before.
        columns: a map from our fields to the columns of a user's own data (`rename_columns`). If
            given, the report also names the columns used, the repeated questions and the unused
            system messages, and `parse` receives the number of the first choice (0, 1 or None) as
            `first`.
        remedy: what the user can do about invalid rows, for the error message.

    Raises:
        UsageError: no row is valid, or the share of invalid rows is above MAX_BAD_SHARE.
    """
    seen = None
    if columns is not None:
        first, rows = _first_number(iter(rows), columns, min(HEAD, limit or HEAD))
        parse, seen = partial(parse, first=first), _SeenColumns(columns, from_1=first == 1)
    problems: dict[str, Problem] = {}
    unwanted, bad, used = Counter[str](), list[tuple[int, Exception]](), 0
    first_bad: bytes | Row | Problem = {}
    for number, row in rows:
        try:
            row = _decode(row) if isinstance(row, bytes) else row
            renamed = {} if isinstance(row, Problem) else rename_columns(row, columns or {})
            made = [row] if isinstance(row, Problem) else parse(renamed, f"{prefix}-{number}")
            ids = [problem.id for problem in made]
            if repeated := [each for each in ids if each in problems or ids.count(each) > 1]:
                raise ValueError(f"duplicate id: {repeated[0]!r}")
            problems |= zip(ids, made, strict=True)
            used += 1
            if seen and isinstance(row, Mapping):  # a user's list may hold Problems
                seen.add(row, renamed)
        except LeftOut as kind:
            unwanted[str(kind)] += 1
        except (ValueError, RecursionError) as error:  # RecursionError: deeply nested JSON
            first_bad = first_bad if bad else row
            bad.append((number, error))
        if len(problems) == limit:
            break
    left_out = len(bad) + unwanted.total()
    total = used + left_out
    if len(bad) > MAX_BAD_SHARE * total:
        raise UsageError(_refusal(source, *bad[0], f"{len(bad)} of {total}", remedy, first_bad))
    reasons = [*_by_reason(bad), *(f"{count} {kind}" for kind, count in unwanted.items())]
    if not problems:
        empty = "it is empty; write a row for each problem, with a question and an answer"
        raise UsageError(f"{source} contains no problems: {'; '.join(reasons) or empty}")
    found = list(problems.values())
    if not quiet and (reasons or seen):
        share = f"{used} of {total} rows used"
        said = [f"{share}, {left_out} left out: {'; '.join(reasons)}" if reasons else share]
        said += [*_repeats(found), *seen.lines()] if seen else []
        is_odd = reasons or any(text in line for line in said for text in (ANOTHER_ANSWER, UNUSED))
        level = logging.WARNING if is_odd else logging.INFO
        logger.log(level, "%s: %s", source, "; ".join(said))
    return found


class _SeenColumns:
    """Collects which columns of a user's rows are used, for the report of `parse_rows`."""

    def __init__(self, columns: Mapping[str, str], from_1: bool) -> None:
        self.columns, self.from_1, self.with_system = columns, from_1, 0
        self.layout: dict[str, str] = {}
        self.unread: dict[str, None] = {}

    def add(self, row: Row, renamed: Row) -> None:
        """Record the columns of a row; `renamed` is the same row with its columns renamed."""
        self.layout = self.layout or find_layout(row, self.columns)
        self.unread |= dict.fromkeys(unread_texts(row, renamed))
        self.with_system += has_system_message(renamed)

    def lines(self) -> list[str]:
        """Return the parts of the report."""
        lines = [f"{self.with_system} {UNUSED}"] if self.with_system else []
        if self.layout:
            layout = ", ".join(f"{field} from {column}" for field, column in self.layout.items())
            lines.append(layout + "; choices are numbered from 1" * self.from_1)
        if self.unread:
            lines.append(
                f"the model does not see {', '.join(self.unread)} (--columns "
                f"question=COLUMN+{self.layout['question']} puts a column into the question)"
            )
        return lines


def _first_number(
    rows: Iterator[tuple[int, bytes | Row | Problem]], columns: Mapping[str, str], count: int
) -> tuple[int | None, Iterator[tuple[int, bytes | Row | Problem]]]:
    """Infer from the first `count` rows whether choices are numbered from 0 or from 1.

    Returns:
        The number of the first choice, or None if no row reveals it, and an iterator over all rows.
    """
    head, first = [*itertools.islice(rows, count)], None
    for _, row in head:
        with suppress(ValueError, RecursionError):  # an invalid row is reported during parsing
            row = _decode(row) if isinstance(row, bytes) else row
            if not isinstance(row, Problem):
                first = first_number(rename_columns(row, columns))
        if first is not None:
            break
    return first, itertools.chain(head, rows)


def _repeats(problems: Sequence[Problem]) -> list[str]:
    """Describe how many rows repeat a question, and how many of these have a different answer."""
    answers: dict[str, str] = {}
    first = [answers.setdefault(plain_question(p.question), p.answer) for p in problems]
    repeated = len(problems) - len(answers)
    other = sum(answer != p.answer for answer, p in zip(first, problems, strict=True))
    text = f"{repeated} repeat a question" + (f", {other} {ANOTHER_ANSWER}" if other else "")
    return [text] if repeated else []


def plain_question(question: str) -> str:
    """Normalise the case and the white space of a question for comparison."""
    return " ".join(question.casefold().split())


def _refusal(
    source: str,
    number: int,
    error: Exception,
    how_many: str,
    remedy: str,
    row: bytes | Row | Problem,
) -> str:
    """Return the one-line error message for a file with too many invalid rows.

    If a required column is missing, the message lists the columns of the file.
    """
    text = f"{source}: line {number}: {error} ({how_many} lines are invalid: {remedy})"
    if isinstance(error, MissingColumn) and isinstance(row, Mapping):
        text += f"; the columns are {', '.join(column_names(row))}: {HOW_TO_NAME}"
    if str(error).startswith("duplicate id"):
        text += "; --columns id=COLUMN+COLUMN joins two columns into an id"
    if isinstance(error, NotAnAnswer) and re.search(r"not a number.*\d,\d+\W*$", str(error)):
        text += "; write decimals with a point, such as 0.5"
    elif isinstance(error, NotAnAnswer):
        text += (
            '; for words or letters, add "answer_type": "text" or "choice" (for all rows: '
            "--columns answer_type=text); for a worked solution that ends with the answer, pass "
            "--columns completion=COLUMN"
        )
    if isinstance(error, MissingColumn) and ANSWER_FIELDS[0] in str(error):
        text += (
            '; if the data has no reference answers, add "answer_type": "open" (for all rows: '
            "--columns answer_type=open) and pass a --reward"
        )
    return text


def _by_reason(bad: Sequence[tuple[int, Exception]]) -> list[str]:
    """Group the errors of invalid lines by reason: `2 not a JSON object (line 4; line 7)`.

    The text after the first colon of an error, such as the text of an answer, is shown per line.
    """
    places: dict[str, list[str]] = {}
    for number, error in bad:
        reason, colon, detail = str(error).partition(": ")
        places.setdefault(reason, []).append(f"line {number}{colon}{detail}")
    parts = []
    for reason, found in places.items():
        shown, more = found[:BAD_LINES_SHOWN], len(found) - BAD_LINES_SHOWN
        shown += [f"and {more} more"] if more > 0 else []
        parts.append(f"{len(found)} {reason} ({'; '.join(shown)})")
    return parts


def as_problems(dataset: Iterable[Problem | Row], name: str = "dataset") -> list[Problem]:
    """Convert a list of Problems or dicts, or a `datasets.Dataset`, to a list of Problems.

    Rows have the same fields as the lines of a JSONL file (see data/README.md).

    Raises:
        UsageError: `dataset` is empty or of another type, or its rows are invalid.
    """
    if isinstance(dataset, Mapping):  # a DatasetDict, or a dict of columns
        raise UsageError(
            f"{name} is a dict of {', '.join(map(str, dataset))}: pass one split, or a list of rows"
        )
    if isinstance(dataset, str) or not isinstance(dataset, Iterable):
        raise UsageError(f"{name} is {dataset!r:.60}: {NEEDED} (load_gsm8k, load_problems)")
    rows: list[Any] = list(dataset)
    if (features := getattr(dataset, "features", None)) is not None:  # of a `datasets.Dataset`
        rows = list(name_classes(rows, features))
    if not rows:
        raise UsageError(f"{name} is empty: {NEEDED}")
    problems = [row for row in rows if isinstance(row, Problem)]
    if len(problems) == len(rows):
        return problems
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Problem | Mapping):
            raise UsageError(f"row {number} of {name} is {row!r:.60}: {NEEDED}")
    columns = dict.fromkeys(key for row in rows if isinstance(row, Mapping) for key in row)
    # A row with an answer_type may lack an answer; `parse_row` checks each row.
    needed = (QUESTION_FIELDS, {*ANSWER_FIELDS, "answer_type"})
    has_answer_inside = bool(ANSWER_INSIDE & columns.keys())
    if not has_answer_inside and not all(columns.keys() & {*fields} for fields in needed):
        raise UsageError(f"{name} has the columns {', '.join(map(str, columns))}: {NEEDED}")
    return parse_rows(enumerate(rows, 1), name, name, parse_row, columns={})


def _decode(line: bytes) -> Row:
    """Parse a line to a JSON object; raise a ValueError if the line is not a JSON object."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text") from error
    except json.JSONDecodeError as error:
        if line.strip() == b"{":
            raise ValueError(
                "not JSON: an object spans several lines; write one object per line (jq -c . FILE)"
            ) from error
        if b"\0" in line:  # UTF-16 without a byte order mark, or UTF-32
            raise ValueError("not UTF-8 text, because it contains NUL bytes") from error
        # str(error) would contain "line 1", because each line is parsed separately.
        raise ValueError(f"not JSON ({error.msg})") from error
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row


def _text(row: Row, *names: str, default: str | None = None) -> str:
    """Return the first of the named fields that is not null, converted to a string.

    If all fields are null or missing, `default` is returned, or a `MissingColumn` is raised if
    `default` is None.
    """
    name = next((name for name in names if row.get(name) is not None), None)
    value = default if name is None else row[name]
    if value is None:
        raise MissingColumn(f"no field {' or '.join(names)}")
    if isinstance(value, bool) or not isinstance(value, str | Number):  # covers numpy and Decimal
        first = f" (--columns {name}=COLUMN.0 uses the first item of a list)"
        raise ValueError(f"{name} is neither text nor a number{first * isinstance(value, list)}")
    if isinstance(value, float) and not value.is_integer():
        value = float(f"{value:.15g}")  # 0.1 + 0.2 is 0.3
    text = str(value).strip() or default
    if text is None:
        raise ValueError(f"{name} is empty")
    text.encode()  # raises an error for lone surrogates, which JSON allows but tokenizers reject
    return text


def parse_row(
    row: Row, default_id: str, calculator_annotations: bool = False, first: int | None = None
) -> list[Problem]:
    """Parse a row of GSM8K, AIME or a user's file; data/README.md describes the fields.

    Args:
        calculator_annotations: whether to keep the calculator annotations in GSM8K's solutions.
        first: the number of the first choice, if answers are numbers of choices (`read_choices`).
    """
    row = read_choices(read_answer(read_chat(row)), first)
    kind, solution = _text(row, "answer_type", default="number"), ""
    if kind not in ANSWER_TYPES:
        known = f"{', '.join(ANSWER_TYPES)} (--columns answer_type=number sets it for all rows)"
        raise ValueError(f"answer_type is not one of {known}: {kind!r}")
    has_none = kind == "open" and all(row.get(name) in (None, "") for name in ANSWER_FIELDS)
    answer = "" if has_none else _text(row, *ANSWER_FIELDS)
    if kind == "number" and "####" in answer:
        solution, answer = gold_from_gsm8k(answer, calculator_annotations)
    elif kind != "open" and (READERS[kind](answer) is None or _FORMAT.search(answer)):
        raise NotAnAnswer(f"the answer is not a {kind}: {answer[:40]!r}")
    question, solution = _text(row, *QUESTION_FIELDS), _text(row, "solution", default=solution)
    columns = {k: v for k, v in row.items() if k not in TAKEN_FIELDS}
    name, solution = _text(row, "id", default=default_id), without_tags(solution)
    return [Problem(name, question, answer, solution, columns, answer_type=kind)]


def parse_openmath(row: Row, default_id: str, *, keep_code: bool) -> list[Problem]:
    """Parse a row of OpenMathInstruct-1, which contains one right or wrong solution of a problem.

    Raises:
        LeftOut: the solution is wrong, contains code, or has an answer that is not a number.
    """
    if not isinstance(row.get("is_correct"), bool):
        raise ValueError("is_correct is neither true nor false")
    question, answer = _text(row, "question"), _text(row, "expected_answer")
    solution = _text(row, "generated_solution")
    if not row["is_correct"]:
        raise LeftOut("wrong")
    if "<llm-code>" in solution and not keep_code:
        raise LeftOut("with code (--keep-code keeps them)")
    if parse_number(answer) is None:
        raise LeftOut("without a number for an answer")
    return [Problem(default_id, question, answer, solution)]


def parse_rollouts(row: Row, default_id: str) -> list[Problem]:
    """Convert the right rollouts in a row written by recipes/experience to problems."""
    rollouts = row.get("rollouts")
    if not isinstance(rollouts, list) or not rollouts:
        raise ValueError("no rollouts")
    question, answer = _text(row, "problem_text"), _text(row, "ground_truth")
    prefix, problems = f"{_text(row, 'problem_id')}-{_text(row, 'generator_id')}", []
    for rollout in rollouts:
        if not isinstance(rollout, dict) or not isinstance(rollout.get("is_correct"), bool):
            raise ValueError("is_correct of a rollout is neither true nor false")
        if rollout["is_correct"]:
            solution = without_tags(FINAL_LINE.sub("", _text(rollout, "solution")))
            name = f"{prefix}-{_text(rollout, 'rollout_id')}"
            problems += [Problem(name, question, answer, solution)] if solution else []
    if not problems:
        raise LeftOut("without a right rollout that shows its reasoning")
    return problems
