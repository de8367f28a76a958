"""Rows of a user's data as rows of ours: renamed columns, slices, chat messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlm.cli import UsageError
from rlm.grading import grade, parse_number, split_completion

FIELDS = ("question", "answer", "solution", "answer_type", "id")
HOW_TO_NAME = "name yours with --columns question=COLUMN,answer=COLUMN"

Row = Mapping[str, Any]
FINAL_LINE = re.compile(r"\s*(?:<answer>.*|[*_]*final answer\b[^\n]*)\s*\Z", re.I | re.S)
_SLICE = re.compile(r"([\w.-]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?", re.ASCII)


class LeftOut(Exception):
    """A row that is well-formed but not wanted; the text says of what kind."""


class MissingColumn(ValueError):
    """A row lacks a field that is needed, or a column that --columns names."""


def parse_columns(text: str | None) -> dict[str, str]:
    """Return field → column of a `--columns`.

    >>> parse_columns("question=prompt, answer=target")
    {'question': 'prompt', 'answer': 'target'}

    Raises:
        UsageError: it is written otherwise, or names a field that there is not.
    """
    pairs = [[side.strip() for side in part.split("=")] for part in text.split(",")] if text else []
    if not all(len(pair) == 2 and pair[0] in FIELDS and pair[1] for pair in pairs):
        raise UsageError(
            f"--columns {text}: write FIELD=COLUMN,…; the fields are {', '.join(FIELDS)}"
        )
    if len(dict(pairs)) < len(pairs):
        raise UsageError(f"--columns {text}: a field is named twice")
    return dict(pairs)


def rename_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """Return the row with its columns under the names of our fields; the others stay.

    Args:
        columns: field → column, as `parse_columns` returns them.

    Raises:
        MissingColumn: the row lacks one of them.
    """
    for column in columns.values():
        if column not in row:
            raise MissingColumn(f"no column {column!r}")
    rest = {name: value for name, value in row.items() if name not in columns.values()}
    return rest | {field: row[column] for field, column in columns.items()}


def split_slice(text: str) -> tuple[str, tuple[str | None, str | None]]:
    """Take `train[100:10%]` apart: the split's name, and where the slice begins and ends.

    >>> split_slice("train[:500]"), split_slice("test")
    (('train', (None, '500')), ('test', (None, None)))

    Raises:
        UsageError: it is written otherwise.
    """
    if (match := _SLICE.fullmatch(text)) is None:
        raise UsageError(f"--split {text}: write NAME, NAME[:500], NAME[500:] or NAME[10%:20%]")
    return match[1], (match[2], match[3])


def cut_rows(rows: Sequence[Any], bounds: tuple[str | None, str | None]) -> Sequence[Any]:
    """Return the rows between two bounds: numbers or percentages, below 0 from the end."""

    def index(bound: str | None) -> int | None:
        if bound is None or not bound.endswith("%"):
            return None if bound is None else int(bound)
        return round(len(rows) * int(bound[:-1]) / 100)

    first, last = map(index, bounds)
    return rows[first:last]


def read_chat(row: Row) -> Row:
    """Return a row of chat messages as a question with a solution; other rows as they are.

    Such a row has `messages`, or a `prompt` (a text or messages) and perhaps a `completion`. What
    the assistant wrote last is taken apart: the solution is its `<think>` block, or all but the
    final line; the answer is the final number, where the row has no `answer`. System messages are
    left out, for there is one system prompt for all rows.

    Raises:
        LeftOut: it has several turns, or the completion holds no number.
        ValueError: the messages are no messages.
    """
    if isinstance(row.get("messages"), list):
        *prompt, last = _messages(row["messages"])
        if last[0] != "assistant":
            prompt, last = [*prompt, last], ("assistant", None)
    elif isinstance(row.get("prompt"), list):
        prompt, last = _messages(row["prompt"]), ("assistant", _last_text(row.get("completion")))
    elif isinstance(row.get("completion"), str | list) and "prompt" in row:
        prompt = [("user", row["prompt"])]
        last = "assistant", _last_text(row["completion"])
    else:
        return row
    turns = [text for role, text in prompt if role == "user"]
    if len(turns) != 1 or any(role == "assistant" for role, _ in prompt):
        raise LeftOut("with several turns, or none")
    rest = {k: v for k, v in row.items() if k not in ("messages", "prompt", "completion")}
    found = _read_completion(last[1], rest) if last[1] else {}
    return {"question": turns[0], **found, **{k: v for k, v in rest.items() if v is not None}}


def _read_completion(text: str, rest: Row) -> dict[str, str]:
    """The solution in a completion, and the answer, where the row does not give it."""
    if "####" in text and "<think>" not in text:
        return {"answer": text}  # GSM8K's form, which is read like GSM8K's
    solution = without_tags(FINAL_LINE.sub("", text))
    found = {} if parse_number(solution) is not None else {"solution": solution}
    if not any(rest.get(name) is not None for name in ("answer", "response")):
        verdict = grade(text, None, strict=False)
        if not verdict.is_answer:
            raise LeftOut("with a completion that ends with no number")
        is_plain = parse_number(verdict.answer) is not None  # "3 * 4 = 12" is not
        found["answer"] = verdict.answer if is_plain else str(verdict.value)
    return found


def without_tags(solution: str) -> str:
    """The text inside `<think>` tags, where a solution has some, else all of it."""
    reasoning, _ = split_completion(solution)
    return (solution if reasoning is None else reasoning).strip()


def _messages(messages: Sequence[Any]) -> list[tuple[str, str]]:
    """(role, text) of each message."""
    if not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise ValueError("messages are no list of role and content")
    if not all(isinstance(message.get("content"), str) for message in messages):
        raise LeftOut("with a message that is not text")
    return [(message["role"], message["content"]) for message in messages]


def _last_text(completion: Any) -> str | None:
    return _messages(completion)[-1][1] if isinstance(completion, list) else completion
