"""Convert the rows of a user's data to our fields: rename columns, read chats and choices."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

from rlm.cli import UsageError
from rlm.grading import ANSWER_TYPES, grade, parse_number, read_choice, split_completion

FIELDS = ("question", "answer", "solution", "completion", "choices", "answer_type", "id")
HOW_TO_NAME = "map them with --columns question=COLUMN,answer=COLUMN"

QUESTION_FIELDS = ("question", "prompt", "problem")
ANSWER_FIELDS = ("answer", "response")
CHOICE_FIELDS = ("choices", "options")
# A column with one choice is named with one of these prefixes and a letter or a number, as in
# WinoGrande, PIQA, SWAG, COPA and MedMCQA.
CHOICE_PREFIXES = ("option", "option_", "choice", "choice_", "ending", "sol", "op")
CHAT_FIELDS = ("messages", "conversations")  # conversations: the format of ShareGPT
BOOLEANS = ("true", "false")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Choices may also be in the columns answerA, answerB, … (SocialIQA) or answer0, answer1, …
# (CosmosQA). Without answer0, the columns answer1, answer2, … may be several reference answers.
ANSWER_COLUMNS = (("answer", LETTERS), ("answer", "012345"))

Row = Mapping[str, Any]
# Matches an answer tag or a line "Final answer …" at the end. The callers strip the text before it.
FINAL_LINE = re.compile(r"(?:<answer>.*|[*_]*final answer\b[^\n]*)\s*\Z", re.I | re.S)
REASONING_TAGS = ("think", "reasoning")  # those of `rlm.data.prompts.FORMATS`
_STATED_AT_END = re.compile(r"(?:\n[^\S\n]*####[^\n]*|<answer>.*)\Z", re.S)
# Matches a request for a proof, but not "Surveys show that …".
_PROOF = re.compile(
    r"(?:(?:^|[.!?:;,])[^\S\n]*|\b(?:and|to|please)\s+)(?:prove|show) that\b",
    re.IGNORECASE | re.MULTILINE,
)
_ASKS = re.compile(r"\?|\b(?:find|compute|determine|calculate|evaluate|how many|how much)\b", re.I)
_STATED = re.compile(r"\\boxed|####|\banswer\b", re.I)


class LeftOut(Exception):
    """Raised for a row that is valid but not wanted; the message contains the reason."""


class MissingColumn(ValueError):
    """Raised for a row that lacks a required field or a column that --columns names."""


def parse_columns(text: str | None) -> dict[str, str]:
    """Parse the text of `--columns` to a map from our fields to columns.

    >>> parse_columns("question=prompt, answer=target")
    {'question': 'prompt', 'answer': 'target'}

    Raises:
        UsageError: the text does not have the form FIELD=COLUMN,…, or a field is unknown or
            repeated.
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
    """Return the row with the given columns renamed to our fields; other columns keep their names.

    NaN, with which pandas marks a missing value, becomes None.

    Args:
        columns: a map from our fields to columns, as `parse_columns` returns it. `a.b` is the value
            of key b of the object in column a (verl: `reward_model.ground_truth`), `a.0` is the
            first entry of the list in column a, and `a+b` joins the texts of columns a and b. For
            the field answer_type, an answer type instead of a column applies to all rows. If the
            map contains a question, this column replaces the question of a chat, and the
            assistant's last message becomes the completion.

    Raises:
        MissingColumn: the row lacks one of the columns.
    """
    found = {field: _field_of(row, field, column) for field, column in columns.items()}
    used = {*columns.values()} | {part for column in columns.values() for part in column.split("+")}
    rest = {name: value for name, value in row.items() if name not in used}
    if "question" in columns:
        if (reply := _reply(rest)) is not None:
            found = {"completion": reply} | found
        rest = {k: v for k, v in rest.items() if k not in (*CHAT_FIELDS, *QUESTION_FIELDS)}
    both = rest | found
    return {k: None if isinstance(v, Number) and v != v else v for k, v in both.items()}


def name_classes(rows: Iterable[Row], features: Mapping[str, Any] | None) -> Iterator[Row]:
    """Yield the rows of a dataset with the names of classes instead of their numbers.

    A column keeps its numbers if a class has the name of a column: COPA's class choice1 means the
    choice in the column choice1.

    Args:
        features: the features of a `datasets.Dataset`. Each `ClassLabel` has names.
    """
    columns = features or {}
    named = {column: getattr(feature, "names", None) or () for column, feature in columns.items()}
    named = {column: names for column, names in named.items() if not columns.keys() & {*names}}
    for row in rows:
        numbers = {column: row[column] for column, names in named.items() if names}
        known = {c: named[c][n] if n >= 0 else "" for c, n in numbers.items() if n is not None}
        yield {**row, **known}  # -1 marks a missing answer


def _reply(row: Row) -> str | None:
    """Return the last message of a chat in the row if it is the assistant's."""
    try:
        role, text = _messages(_chat(row) or [])[-1]
    except (LeftOut, ValueError):
        return None
    return text if role == "assistant" else None


def _field_of(row: Row, field: str, column: str) -> Any:
    if field == "answer_type" and column in ANSWER_TYPES:
        return column
    if column in row or "+" not in column:
        return _value_at(row, column)
    parts = [_value_at(row, part) for part in column.split("+")]
    return "\n\n".join(text for part in parts if part is not None and (text := str(part).strip()))


def _value_at(row: Row, column: str) -> Any:
    if column in row:
        return row[column]
    value: Any = row
    for key in column.split("."):
        value = _parsed(value)
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, Mapping) and key in value:
            value = value[key]
        else:
            raise MissingColumn(f"no column {column!r}")
    return value


def _parsed(value: Any) -> Any:
    """Parse a string that contains an object or a list as JSON or as a Python literal.

    Other values are returned unchanged.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        return found if isinstance(found, Mapping | list) else value
    return value


def column_names(row: Row) -> list[str]:
    """Return the names of a row's columns in the syntax of `--columns` (`a.b` for nested keys).

    >>> column_names({"id": 1, "task": {"ask": "2 + 3?", "gold": 5}})
    ['id', 'task.ask', 'task.gold']
    """
    names = []
    for name, value in row.items():
        inside = _parsed(value)
        names += [f"{name}.{key}" for key in inside] if isinstance(inside, Mapping) else [str(name)]
    return names


def find_layout(row: Row, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of a row that contain the question, answer, solution and choices.

    >>> find_layout({"prompt": "2 + 3?", "target": "5"}, {"answer": "target"})
    {'question': 'prompt', 'answer': 'target'}
    """
    names = {**{column: column for column in row}, **columns}  # maps our fields to columns
    solution = names.get("solution")
    renamed = rename_columns(row, columns)
    chat = next((name for name in CHAT_FIELDS if renamed.get(name) is not None), None)
    question = chat or _first(names, QUESTION_FIELDS)
    if chat is None and _reply(renamed) is not None:
        chat = question
    worked = chat or names.get("completion", solution)
    answer = _first(names, ANSWER_FIELDS) or (_verl_answer(row) and "reward_model.ground_truth")
    choices = _first(names, CHOICE_FIELDS) or ", ".join(_lettered(row)) or None
    taken = {
        "question": question,
        "answer": answer or (worked and f"the end of {worked}"),
        "solution": solution or worked,
        "choices": choices,
    }
    return {field: column for field, column in taken.items() if column}


def unread_texts(row: Row, renamed: Row) -> list[str]:
    """Return the columns of a row that contain four or more words and are not shown to the model.

    Args:
        renamed: the row after `rename_columns`.

    >>> row = {"question": "Is it?", "passage": "Ice is cold water.", "answer": True}
    >>> unread_texts(row, row)
    ['passage']
    """
    if _chat(renamed) is not None:
        return []
    read = {*FIELDS, *QUESTION_FIELDS, *ANSWER_FIELDS, *CHOICE_FIELDS, *_lettered(renamed)}
    rest = ((name, renamed[name]) for name in row if name in renamed and name not in read)
    return [name for name, text in rest if isinstance(text, str) and text.count(" ") > 2]


def has_system_message(row: Row) -> bool:
    """Return whether a row contains a chat with a non-empty system message."""
    chat = _chat(row)
    return chat is not None and any(role == "system" and text for role, text in _messages(chat))


def _first(names: Mapping[str, str], fields: Sequence[str]) -> str | None:
    return next((names[field] for field in fields if field in names), None)


def read_chat(row: Row) -> Row:
    """Convert a row with a chat or a worked answer to a row with a question and a solution.

    A chat row has the column `messages` (or ShareGPT's `conversations`), or a question (a text or
    messages) and a `completion`. The solution is the `<think>` block of the last assistant message,
    or else this message without an answer at its end. If the row has no `answer`, the answer is the
    final number of the message, or for another answer type the text in its `<answer>` tags. In a
    row with a `solution` but no answer, the solution is read like a completion. In verl's rows, the
    answer is in `reward_model`. System messages are ignored, because all rows use the same system
    prompt. Other rows are returned unchanged.

    Raises:
        LeftOut: the row has several turns, no user message or a message that is not text, or it
            has no answer and its completion does not end with one.
        ValueError: the messages are malformed.
    """
    if _given(row, ANSWER_FIELDS) is None and (answer := _verl_answer(row)) is not None:
        row = {**row, "answer": answer}
    asked = _given(row, QUESTION_FIELDS)
    chat, completion = _chat(row), row.get("completion")
    if not isinstance(completion, str | list):  # a number or an object
        completion = None
    if chat is not None:
        prompt = _messages(chat)
        is_answered = completion is None and prompt[-1:] and prompt[-1][0] == "assistant"
        last = prompt.pop()[1] if is_answered else _last_text(completion)
    elif completion is not None and asked is not None:
        prompt, last = [("user", str(asked))], _last_text(completion)
    elif isinstance(solution := row.get("solution"), str) and _given(row, ANSWER_FIELDS) is None:
        return {**row, **_read_completion(solution, row, str(asked))}
    else:
        return row
    turns = [text for role, text in prompt if role == "user"]
    if len(turns) != 1 or any(role == "assistant" for role, _ in prompt):
        raise LeftOut("with several turns or no user message")
    used = {*CHAT_FIELDS, "completion", *QUESTION_FIELDS}
    rest = {k: v for k, v in row.items() if k not in used}
    found = _read_completion(last, rest, turns[0]) if last else {}
    given = {k: v for k, v in rest.items() if v is not None}
    return {**rest, "question": turns[0], **found, **given}


def _chat(row: Row) -> list[Any] | None:
    """Return the list of messages in a row, or None if the row has no messages.

    The list may be stored as a string.
    """
    for name in (*CHAT_FIELDS, *QUESTION_FIELDS):
        value, found = row.get(name), _parsed(row.get(name))
        if isinstance(found, list) and (found is value or _are_messages(found)):
            return found
    return None


def _verl_answer(row: Row) -> Any:
    answer = _parsed(row.get("reward_model"))
    return answer.get("ground_truth") if isinstance(answer, Mapping) else None


def _given(row: Row, fields: Sequence[str]) -> Any:
    """Return the first of the fields that is not null, or None."""
    return next((row[name] for name in fields if row.get(name) is not None), None)


def read_answer(row: Row) -> Row:
    """Convert an answer that is a boolean, a list or an object of lists to a single answer.

    Answers in SQuAD have the form `{"text": [...]}`, and answers in DROP `{"spans": [...]}`. In a
    multiple-choice row, a list of zeros and a single 1 is a one-hot encoding of the right choice.
    Rows with other answers are returned unchanged.

    Raises:
        LeftOut: the list contains different answers.
        ValueError: the object has neither of these keys.
    """
    name = next((name for name in ANSWER_FIELDS if row.get(name) is not None), None)
    value = row[name] if name else None
    if isinstance(value, str) and value.lstrip().startswith("{"):  # but "[0, 1]" may be an interval
        value = _parsed(value)
    if isinstance(value, Mapping):
        key = next((key for key in ("text", "spans") if isinstance(value.get(key), list)), None)
        if key is None:
            example = next(iter(value), "KEY")
            raise ValueError(
                f"the answer is an object; name one of its keys: --columns answer=COLUMN.{example}"
            )
        value = value[key]
    if isinstance(value, list):
        is_marked = len(value) > 1 and sorted(map(str, value)) == ["0"] * (len(value) - 1) + ["1"]
        if is_marked and _choices(row)[1]:  # TruthfulQA marks the right one of the choices
            value = [[*map(str, value)].index("1")]
        values = list(dict.fromkeys(map(str, value)))
        if len(values) > 1:
            raise LeftOut(
                "with different reference answers (--columns answer=COLUMN.0 uses the first answer "
                "of a list)"
            )
        value = value[0] if value else None
    if isinstance(value, bool):
        value = str(value).lower()
    return row if name is None or value is row[name] else {**row, name: value}


def read_choices(row: Row, first: int | None = None) -> Row:
    """Convert a multiple-choice row: put the choices into the question and use a letter as answer.

    Supported layouts are a list `choices` or `options` of texts (MMLU, ScienceQA, and AQuA, whose
    texts begin with letters), an object with the lists `text` and `label` (ARC, CommonsenseQA), and
    one column per letter. The answer may be the letter, the label, the text or the number of a
    choice. One line per choice, `A. …`, is appended to the question. If the answer is true or false
    and the row has no other answer_type, true and false are the choices. Other rows are returned
    unchanged.

    Args:
        first: the number of the first choice, which `first_number` infers from the rows of the
            file. If it is None, a number that is neither a choice nor a label is an index from 0.

    Raises:
        ValueError: the choices are not texts, or the answer is not one of the choices.
    """
    labels, texts = _choices(row)
    answer, question = _given(row, ANSWER_FIELDS), _given(row, QUESTION_FIELDS)
    lowered = answer.strip().lower() if isinstance(answer, str) else None
    if lowered in BOOLEANS and not texts and row.get("answer_type") in (None, "choice"):
        texts, answer = [*BOOLEANS], lowered
    if not texts or answer is None or not isinstance(question, str):
        return row
    if len(texts) > len(LETTERS):
        raise ValueError(f"more than {len(LETTERS)} choices: {len(texts)}")
    listed = _given(row, CHOICE_FIELDS)
    # A number among numbers is the choice itself, unless other rows show that answers are indices.
    is_value = first is None and isinstance(listed, list) and not isinstance(answer, str)
    if is_value and answer in listed:
        place = listed.index(answer)
    elif isinstance(_parsed(listed), Mapping) and (label := str(_whole(answer))) in labels:
        place = labels.index(label)  # an index would be ambiguous, but the labels are explicit
    else:
        place = _place_of(answer, labels, texts, first)
    if place is None and str(answer).strip() in ("", "-1"):
        raise ValueError(
            "the row has no answer; many test splits have none, so choose another split, such as "
            "--split validation"
        )
    if place is None:
        raise ValueError(f"the answer is not one of the choices: {str(answer)[:40]!r}")
    shown = [f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False)]
    used = {*QUESTION_FIELDS, *ANSWER_FIELDS, *CHOICE_FIELDS, *_lettered(row)}
    rest = {name: value for name, value in row.items() if name not in used}
    is_shown = all(
        re.search(rf"\b{letter}\s*[).:]\s*{re.escape(text)}", question)
        for letter, text in zip(LETTERS, texts, strict=False)
    )
    return rest | {
        "question": question if is_shown else "\n".join([question.strip(), "", *shown]),
        "answer": LETTERS[place],
        "answer_type": "choice",
        "choices": texts,
    }


def first_number(row: Row) -> int | None:
    """Infer from the answer of a row whether the file numbers its choices from 0 or from 1.

    If the answer is 0, the choices are numbered from 0; if the answer equals the number of choices,
    they are numbered from 1. Any other answer is ambiguous, and None is returned.

    >>> first_number({"question": "?", "sol1": "a", "sol2": "b", "answer": "0"})
    0
    >>> first_number({"question": "?", "answerA": "a", "answerB": "b", "answer": "2"})
    1

    Raises:
        ValueError: the choices are not texts.
    """
    texts, number = _choices(row)[1], _whole(_given(row, ANSWER_FIELDS))
    if not texts or number is None or {str(number), f"{number}.0"} & {*texts}:
        return None
    return {0: 0, len(texts): 1}.get(number)


def _whole(answer: object) -> int | None:
    """Return an answer as an integer, or None if it is not an integer.

    The float 1.0 counts as an integer, because pandas converts integers to floats in a column with
    missing values.
    """
    text = str(answer).strip().removesuffix(".0" if isinstance(answer, float) else "")
    return int(text) if text.isascii() and text.isdigit() else None


_LABEL = re.compile(r"\s*\(?([A-Za-z])\s*[).:]\s*")
_LABELS = re.compile(r"(?:^|[,;\n])\s*\(?([A-Za-z])\s*[).:]")


def _split_choices(text: str) -> list[str]:
    """Split choices that are stored as a single text, such as MathQA's `a ) 38 , b ) 27`.

    Raises:
        ValueError: the text does not have this form.
    """
    _, *parts = _LABELS.split(text)
    if len(parts) < 4 or [letter.upper() for letter in parts[::2]] != [*LETTERS[: len(parts) // 2]]:
        raise ValueError("the choices are a single text that cannot be split; write a list")
    return [choice.strip() for choice in parts[1::2]]


def _choices(row: Row) -> tuple[list[str], list[str]]:
    """Return the labels and the texts of the choices in a row; both are empty without choices.

    A row whose answer_type is "number", "text" or "open" has no choices, whatever its columns are
    called.
    """
    if str(row.get("answer_type")).strip().lower() in ("number", "text", "open"):
        return [], []
    found = _given(row, CHOICE_FIELDS)
    if found in (None, ""):  # "": an empty cell of a CSV file
        names = _lettered(row)
        return [name[-1] for name in names], [str(row[name]) for name in names]
    found = _parsed(found)
    if isinstance(found, str):
        found = _split_choices(found)
    labels: object = None
    if isinstance(found, Mapping):
        texts, labels = found.get("text"), found.get("label")
        if texts is None:  # {"A": "water", "B": "rock"}
            labels, texts = list(found), list(found.values())
        found = texts
    is_list = isinstance(found, Sequence) and not isinstance(found, str) and len(found) > 1
    if not is_list or not all(isinstance(text, str | int | float) for text in found):
        raise ValueError("the choices are not a list of two or more texts")
    texts = [str(text).strip() for text in found]
    matches = [_LABEL.match(text) for text in texts]
    if [match and match[1].upper() for match in matches] == [*LETTERS[: len(texts)]]:
        texts = [text[match.end() :] for text, match in zip(texts, matches, strict=True) if match]
    labels = LETTERS[: len(texts)] if labels is None else labels
    if not isinstance(labels, Sequence):
        raise ValueError("the choice labels are not a list")
    return [str(label) for label in labels], texts


def _lettered(row: Row) -> list[str]:
    """Return the names of the columns that contain one choice each: A, B, … or option1, ….

    The list is empty if the row has fewer than two such columns.
    """
    numbered = itertools.product(CHOICE_PREFIXES, (LETTERS, LETTERS.lower(), "123456789", "012345"))
    named = (("", LETTERS), *ANSWER_COLUMNS, *numbered)
    for prefix, marks in named:
        names = [prefix + mark for mark in marks]
        found = [*itertools.takewhile(lambda name: row.get(name) not in (None, ""), names)]
        if len(found) > 1:
            return found
    return []


def _place_of(
    answer: object, labels: Sequence[str], texts: Sequence[str], first: int | None
) -> int | None:
    """Return the index of the choice that an answer names by text, label, letter or number.

    The result is None if the answer does not name a choice.
    """
    number = _whole(answer)
    text = str(answer if number is None else number).strip()
    is_named = isinstance(answer, str) and text in texts
    if number is not None and first is not None and not is_named:
        return number - first if first <= number < first + len(texts) else None
    if isinstance(answer, str):
        for names in (labels, texts):
            if text in names:
                return names.index(text)
        if (letter := read_choice(text)) and letter in LETTERS[: len(texts)]:
            return LETTERS.index(letter)
    if number is not None and number < len(texts):
        return number
    lowered = [text.lower() for text in texts]  # the answer true may mean the choice "True"
    return lowered.index(text.lower()) if text.lower() in lowered else None


def _read_completion(text: str, rest: Row, question: str) -> dict[str, str]:
    """Return the solution in a completion, and the answer if the row itself has no answer."""
    has_answer = _given(rest, ANSWER_FIELDS) is not None
    is_number = rest.get("answer_type") in (None, "number")
    if "####" in text and "<think>" not in text and is_number and not has_answer:
        return {"answer": text}  # the format of GSM8K, which `parse_row` splits
    solution = without_tags(FINAL_LINE.sub("", text))
    found = {} if parse_number(solution) is not None else {"solution": solution}
    if not has_answer and rest.get("answer_type") != "open":
        is_proof = _PROOF.search(question) and not _ASKS.search(question)
        if is_proof and not _STATED.search(text):
            raise LeftOut("with a proof instead of a final answer")
        kind = "number" if is_number else rest.get("answer_type")
        if kind not in ANSWER_TYPES:
            return found  # `parse_row` reports it
        if not is_number and "<answer>" not in text:
            raise LeftOut("without an answer field or an answer in <answer> tags")
        verdict = grade(text, None, strict=False, kind=kind)
        if not verdict.is_answer or verdict.answer is None:
            raise LeftOut(f"with a completion that does not end with a {kind}")
        # If the answer is "3 * 4 = 12", use its value.
        is_plain = not is_number or parse_number(verdict.answer) is not None
        found["answer"] = verdict.answer if is_plain else str(verdict.value)
    return found


def without_tags(solution: str) -> str:
    """Return the text inside the reasoning tags of a solution, or else the rest of the solution.

    An answer at the end, in `<answer>` tags or in a last line of the form `#### 5`, is left out.
    """
    for tag in REASONING_TAGS:
        reasoning, rest = split_completion(solution, tag)
        solution = reasoning if reasoning and reasoning.strip() else rest
    return _STATED_AT_END.sub("", solution).strip()


ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
ROLES["developer"] = "system"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # of DeepSeek, vLLM and gpt-oss


def _are_messages(found: Sequence[Any]) -> bool:
    return bool(found) and all(
        isinstance(each, Mapping) and each.keys() & {"role", "from"} for each in found
    )


def _messages(messages: Sequence[Any]) -> list[tuple[str, str]]:
    """Return the role and the text of each message.

    The keys are `role` and `content` (OpenAI's format), or `from` and `value` (ShareGPT's format).
    Reasoning in a field of its own is put into `<think>` tags before the text.
    """
    if not _are_messages(messages):
        raise ValueError("the messages are not a list of objects with role and content")
    found = []
    for message in messages:
        role = message["role"] if "role" in message else message["from"]
        if not isinstance(role, str):
            raise ValueError(f"the role of a message is not a string: {str(role)[:40]!r}")
        text = message["content"] if "content" in message else message.get("value")
        if isinstance(text, list):  # a list of content parts, which must all be text
            parts = [part.get("text") for part in text if isinstance(part, Mapping)]
            texts = [part for part in parts if isinstance(part, str)]
            text = "\n".join(texts) if texts and len(texts) == len(text) else None
        if not isinstance(text, str):
            raise LeftOut("with a message that is not text")
        if isinstance(reasoning := _given(message, REASONING_FIELDS), str) and reasoning.strip():
            text = f"<think>{reasoning}</think>{text}"
        found.append((ROLES.get(role.lower(), role.lower()), text))
    return found


def _last_text(completion: Any) -> str | None:
    return _messages(completion)[-1][1] if isinstance(completion, list) else completion
