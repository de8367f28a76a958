"""`Problem`, a question with its gold answer, and the parsers from a dataset's rows to Problems."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlm.cli import UsageError
from rlm.data.columns import (
    ANSWER_FIELDS,
    CHAT_FIELDS,
    FINAL_LINE,
    HOW_TO_NAME,
    QUESTION_FIELDS,
    LeftOut,
    MissingColumn,
    Row,
    column_names,
    describe_layout,
    first_number,
    has_system_message,
    read_answer,
    read_chat,
    read_choices,
    rename_columns,
    without_tags,
)
from rlm.grading import (
    ANSWER_TYPES,
    READERS,
    AnswerType,
    gold_from_gsm8k,
    parse_number,
    split_completion,
)

logger = logging.getLogger(__name__)

# Not passed to rewards as columns: our own fields, and names that a reward's call already takes.
TAKEN_FIELDS = {*QUESTION_FIELDS, *ANSWER_FIELDS, "id", "solution", "answer_type"}
TAKEN_FIELDS |= {"reasoning_format", "is_truncated", "strict_verdict"}
TAKEN_FIELDS |= {"self", "prompts", "completions", "completion", "reference_answer"}
NEEDED = (
    f"needed are rows with {' or '.join(QUESTION_FIELDS)}, and {' or '.join(ANSWER_FIELDS)}, or "
    "Problems"
)
# `rlm.data.columns.read_chat` finds the answer in these columns.
ANSWER_INSIDE = {*CHAT_FIELDS, "completion", "solution", "reward_model"}
MAX_BAD_SHARE, BAD_LINES_SHOWN = 0.05, 5
HEAD = 1000  # rows that are searched for the number of the first choice
ANOTHER_ANSWER = "with another answer"


@dataclass(frozen=True)
class Problem:
    """A question and its gold answer, which `rlm.grading.READERS[answer_type]` reads. The gold
    answer of an open question is not used.
    """

    id: str  # unique in its dataset; seeds the sampling for the problem
    question: str
    answer: str
    solution: str = ""  # worked, in words; "" if the dataset has none
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)  # for rewards
    answer_type: AnswerType = "number"


def example_questions(problems: Iterable[Problem], count: int = 3, longest: int = 160) -> list[str]:
    """Return the first few short questions, to try a model with.

    Args:
        longest: most characters per question.
    """
    short = dict.fromkeys(p.question for p in problems if len(p.question) <= longest)
    return list(short)[:count]


class NotAnAnswer(ValueError):
    """A reference answer is not of its row's `answer_type`."""


def answer_types(problems: Iterable[Problem]) -> tuple[AnswerType, ...]:
    """Return the answer types in a dataset, the most frequent first."""
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
) -> list[Problem]:
    """Parse numbered rows and report the bad ones; a row without an id gets PREFIX-NUMBER.

    Args:
        rows: bytes are a line of JSON; a Problem is kept as it is.
        parse: (row, default id) → its problems; raises ValueError for a bad row, LeftOut for an
            unwanted row.
        limit: stop after this many problems.
        quiet: report nothing, because the same rows were reported before.
        columns: field → column in a user's own data (`rename_columns`). The report then names the
            columns that are used, repeated questions, and system messages that are not used, and
            `parse` gets the number of the `first` choice.

    Raises:
        UsageError: there is no good row, or the share of bad rows is above MAX_BAD_SHARE.
    """
    first = None
    if columns is not None:
        first, rows = _first_number(iter(rows), columns, min(HEAD, limit or HEAD))
        parse = partial(parse, first=first)
    problems: dict[str, Problem] = {}
    unwanted, bad = Counter[str](), list[tuple[int, Exception]]()
    row: bytes | Row | Problem = {}
    layout, with_system = "", 0
    for number, row in rows:
        try:
            row = _decode(row) if isinstance(row, bytes) else row
            renamed = {} if isinstance(row, Problem) else rename_columns(row, columns or {})
            made = [row] if isinstance(row, Problem) else parse(renamed, f"{prefix}-{number}")
            for problem in made:
                if problem.id in problems:
                    raise ValueError(f"duplicate id: {problem.id!r}")
                problems[problem.id] = problem
            if columns is not None and isinstance(row, Mapping):  # not a Problem of a user's list
                layout = layout or describe_layout(row, columns)
                with_system += has_system_message(renamed)
        except LeftOut as kind:
            unwanted[str(kind)] += 1
        except (ValueError, RecursionError) as error:  # RecursionError: deeply nested JSON
            bad.append((number, error))
        if len(problems) == limit:
            break
    left_out = len(bad) + unwanted.total()
    total = len(problems) + left_out
    if len(bad) > MAX_BAD_SHARE * total:
        raise UsageError(_refusal(source, *bad[0], f"{len(bad)} of {total}", row))
    reasons = [*_by_reason(bad), *(f"{count} {kind}" for kind, count in unwanted.items())]
    if not problems:
        empty = "it is empty; write a row for each problem, with a question and an answer"
        raise UsageError(f"{source} contains no problems: {'; '.join(reasons) or empty}")
    found = list(problems.values())
    if not quiet and (reasons or columns is not None):
        used = f"{len(problems)} of {total} rows used"
        said = [f"{used}, {left_out} left out: {'; '.join(reasons)}" if reasons else used]
        said += _repeats(found) if columns is not None else []
        if with_system:
            said.append(f"{with_system} with a system message of their own, which is not used")
        said += [layout + "; choices are numbered from 1" * (first == 1)] if layout else []
        is_odd = reasons or with_system or any(ANOTHER_ANSWER in text for text in said)
        level = logging.WARNING if is_odd else logging.INFO
        logger.log(level, "%s: %s", source, "; ".join(said))
    return found


def _first_number(
    rows: Iterator[tuple[int, bytes | Row | Problem]], columns: Mapping[str, str], count: int
) -> tuple[int | None, Iterator[tuple[int, bytes | Row | Problem]]]:
    """Search the first `count` rows for one that shows the number of the first choice.

    Returns:
        `first_number` of that row, or None, and an iterator over all rows.
    """
    head, first = [*itertools.islice(rows, count)], None
    for _, row in head:
        with suppress(ValueError, RecursionError):  # a bad row is reported when it is parsed
            row = _decode(row) if isinstance(row, bytes) else row
            if not isinstance(row, Problem):
                first = first_number(rename_columns(row, columns))
        if first is not None:
            break
    return first, itertools.chain(head, rows)


def _repeats(problems: Sequence[Problem]) -> list[str]:
    """Report how many rows repeat a question, and how many of them have another answer."""
    answers: dict[str, str] = {}
    first = [answers.setdefault(plain_question(p.question), p.answer) for p in problems]
    repeated = len(problems) - len(answers)
    other = sum(answer != p.answer for answer, p in zip(first, problems, strict=True))
    text = f"{repeated} repeat a question" + (f", {other} {ANOTHER_ANSWER}" if other else "")
    return [text] if repeated else []


def plain_question(question: str) -> str:
    """Normalise a question for comparison: case and white space are ignored."""
    return " ".join(question.casefold().split())


def _refusal(
    source: str, number: int, error: Exception, how_many: str, row: bytes | Row | Problem
) -> str:
    """Explain in one line why a file is refused; list its columns if a needed one is missing."""
    text = f"{source}: line {number}: {error} ({how_many} lines are bad; repair these)"
    if isinstance(error, MissingColumn) and isinstance(row, Mapping):
        text += f"; the columns are {', '.join(column_names(row))}: {HOW_TO_NAME}"
    if isinstance(error, NotAnAnswer):
        text += (
            '; for words or letters add "answer_type": "text" or "choice" (of all rows: --columns '
            "answer_type=text), for worked text that ends with the answer name its column: "
            "--columns completion=COLUMN"
        )
    if isinstance(error, MissingColumn) and ANSWER_FIELDS[0] in str(error):
        text += (
            '; without reference answers add "answer_type": "open" (of all rows: --columns '
            "answer_type=open), and give a --reward"
        )
    return text


def _by_reason(bad: Sequence[tuple[int, Exception]]) -> list[str]:
    """Count bad lines by what is wrong with them: `2 not a JSON object (line 4; line 7)`.

    A detail, such as the text of an answer, follows the reason after a colon.
    """
    places: dict[str, list[str]] = {}
    for number, error in bad:
        reason, colon, detail = str(error).partition(": ")
        places.setdefault(reason, []).append(f"line {number}{colon}{detail}")
    shown = {reason: found[:BAD_LINES_SHOWN] for reason, found in places.items()}
    more = {reason: len(found) - len(shown[reason]) for reason, found in places.items()}
    return [
        f"{len(found)} {reason} ({'; '.join(shown[reason])}"
        + (f"; and {more[reason]} more)" if more[reason] else ")")
        for reason, found in places.items()
    ]


def as_problems(dataset: Iterable[Problem | Row], name: str = "dataset") -> list[Problem]:
    """Convert a list of Problems or dicts, or a `datasets.Dataset`, to problems.

    A row has the same fields as a line of a JSONL file (data/README.md).

    Raises:
        UsageError: `dataset` is empty or of another type, or its rows are bad or lack a field.
    """
    if isinstance(dataset, Mapping):  # a DatasetDict, a column-wise dict
        raise UsageError(f"{name} is a dict of {', '.join(map(str, dataset))}: give one of these")
    if isinstance(dataset, str) or not isinstance(dataset, Iterable):
        raise UsageError(f"{name} is {dataset!r:.60}: {NEEDED} (load_gsm8k, load_problems)")
    rows = list(dataset)
    if not rows:
        raise UsageError(f"{name} is empty: {NEEDED}")
    problems = [row for row in rows if isinstance(row, Problem)]
    if len(problems) == len(rows):
        return problems
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Problem | Mapping):
            raise UsageError(f"row {number} of {name} is {row!r:.60}: {NEEDED}")
    columns = dict.fromkeys(key for row in rows if isinstance(row, Mapping) for key in row)
    # Rows with an answer_type may have no answer: `parse_row` checks each row.
    needed = (QUESTION_FIELDS, {*ANSWER_FIELDS, "answer_type"})
    has_answer_inside = bool(ANSWER_INSIDE & columns.keys())
    if not has_answer_inside and not all(columns.keys() & {*fields} for fields in needed):
        raise UsageError(f"{name} has the columns {', '.join(map(str, columns))}: {NEEDED}")
    return parse_rows(enumerate(rows, 1), name, name, parse_row, columns={})


def _decode(line: bytes) -> Row:
    """Return a line's JSON object; raise ValueError if it is anything else."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text") from error
    except json.JSONDecodeError as error:
        if line.strip() == b"{":
            raise ValueError(
                "not JSON: an object over several lines; write each on one (jq -c . FILE)"
            ) from error
        raise ValueError(f"not JSON ({error.msg})") from error  # str(error) would say "line 1"
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row


def _text(row: Row, *names: str, default: str | None = None) -> str:
    """Return the first of these fields that is not null, as text; raise ValueError without one."""
    name = next((name for name in names if row.get(name) is not None), None)
    value = default if name is None else row[name]
    if value is None:
        raise MissingColumn(f"no field {' or '.join(names)}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{name} is neither text nor a number")
    text = str(value).strip() or default
    if text is None:
        raise ValueError(f"{name} is empty")
    text.encode()  # raises for lone surrogates, which JSON allows and a tokenizer refuses
    return text


def parse_row(
    row: Row, default_id: str, calculator_marks: bool = False, first: int | None = None
) -> list[Problem]:
    """Return the problem of a row of GSM8K, AIME or a user's file; data/README.md has the fields.

    Args:
        first: the number of the first choice, if answers are numbers of choices (`read_choices`).
    """
    row = read_choices(read_answer(read_chat(row)), first)
    kind, solution = _text(row, "answer_type", default="number"), ""
    if kind not in ANSWER_TYPES:
        raise ValueError(f"answer_type is none of {', '.join(ANSWER_TYPES)}: {kind!r}")
    has_none = kind == "open" and all(row.get(name) in (None, "") for name in ANSWER_FIELDS)
    answer = "" if has_none else _text(row, *ANSWER_FIELDS)
    if kind == "number" and "####" in answer:
        solution, answer = gold_from_gsm8k(answer, calculator_marks)
    elif kind != "open" and READERS[kind](answer) is None:
        raise NotAnAnswer(f"the answer is not a {kind}: {answer[:40]!r}")
    question, solution = _text(row, *QUESTION_FIELDS), _text(row, "solution", default=solution)
    columns = {k: v for k, v in row.items() if v is not None and k not in TAKEN_FIELDS}
    name, solution = _text(row, "id", default=default_id), without_tags(solution)
    return [Problem(name, question, answer, solution, columns, answer_type=kind)]


def parse_openmath(row: Row, default_id: str, *, keep_code: bool) -> list[Problem]:
    """Return the problem of a row of OpenMathInstruct-1, one of many solutions, right or wrong."""
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
    """Return the right rollouts of a line of recipes/experience, as problems with solutions."""
    rollouts = row.get("rollouts")
    if not isinstance(rollouts, list) or not rollouts:
        raise ValueError("no rollouts")
    question, answer = _text(row, "problem_text"), _text(row, "ground_truth")
    prefix, problems = f"{_text(row, 'problem_id')}-{_text(row, 'generator_id')}", []
    for rollout in rollouts:
        if not isinstance(rollout, dict) or not isinstance(rollout.get("is_correct"), bool):
            raise ValueError("a rollout does not say whether it is correct")
        if rollout["is_correct"]:
            reasoning, text = split_completion(_text(rollout, "solution"))
            # The text before the answer: the thinking if it was shown, else all but the last line.
            solution = (reasoning or FINAL_LINE.sub("", text)).strip()
            name = f"{prefix}-{_text(rollout, 'rollout_id')}"
            problems += [Problem(name, question, answer, solution)] if solution else []
    if not problems:
        raise LeftOut("without a right rollout that shows its reasoning")
    return problems
