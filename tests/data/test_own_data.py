"""Files and hub datasets of a user: other columns, slices, chat rows, a directory, a fake hub."""

import csv
import gzip
import json
import logging
import math
import os
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from conftest import loop_seconds
from fake_hub import FakeHub
from pyarrow import Table, parquet

from rlm.cli import UsageError
from rlm.data import loaders, splits
from rlm.data.columns import REASONING_TAGS, LeftOut, parse_columns, read_chat, rename_columns
from rlm.data.loaders import (
    HubDataset,
    OwnFile,
    check_dataset,
    load_problems,
    parse_dataset,
)
from rlm.data.problem import as_problems
from rlm.data.prompts import FORMATS
from rlm.data.splits import cut_rows, split_slice

ROOT = Path(__file__).parents[2]
COLUMNS = "question=ask,answer=target"


def rows_of(count, start=0):
    return [{"ask": f"Question {i}?", "target": str(i)} for i in range(start, start + count)]


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def answers(problems):
    return [int(problem.answer) for problem in problems]


def refusal(*arguments, **options):
    with pytest.raises(UsageError) as caught:
        load_problems(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def load(tmp_path, rows, columns=None):
    return load_problems(write_jsonl(tmp_path / "mine.jsonl", rows), "test", columns=columns)


# Columns.


def test_columns_are_parsed_and_mistakes_refused():
    assert parse_columns("question=a, answer = b") == {"question": "a", "answer": "b"}
    assert parse_columns(None) == parse_columns("") == {}
    for text in ("question", "question=", "prompt=a", "question=a=b", "question=a,,answer=b"):
        with pytest.raises(UsageError, match="write FIELD=COLUMN"):
            parse_columns(text)
    with pytest.raises(UsageError, match="a field is named twice"):
        parse_columns("question=a,question=b")


def test_renaming_keeps_the_other_columns_and_wins_over_fields_of_ours():
    row = {"ask": "?", "answer": "unused", "target": "3", "level": 2}
    renamed = rename_columns(row, {"question": "ask", "answer": "target"})
    assert renamed == {"question": "?", "answer": "3", "level": 2}


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv", "parquet"])
def test_a_file_with_other_columns(tmp_path, suffix):
    rows = [row | {"topic": "sums, and more"} for row in rows_of(30)]
    path = tmp_path / f"mine.{suffix}"
    if suffix == "parquet":
        parquet.write_table(Table.from_pylist(rows), path)
    elif suffix == "jsonl":
        write_jsonl(path, rows)
    else:
        with path.open("w", newline="", encoding="utf-8-sig") as stream:
            writer = csv.DictWriter(stream, [*rows[0]], delimiter="," if suffix == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    problems = load_problems(str(path), "test", columns=COLUMNS)
    assert sorted(answers(problems)) == [*range(30)]
    assert problems[0].columns == {"topic": "sums, and more"}
    assert {problem.id for problem in problems} == {f"mine-{i}" for i in range(1, 31)}
    train, validation = (
        load_problems(str(path), s, columns=COLUMNS) for s in ("train", "validation")
    )
    assert (len(train), len(validation)) == (27, 3)


def test_a_missing_column_is_named_with_the_columns_that_are_there(tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", rows_of(30))
    assert refusal(path, columns="question=ask,answer=reply") == (
        f"{path}: line 1: no column 'reply' (30 of 30 lines are invalid: fix them); the columns "
        "are ask, target: map them with --columns question=COLUMN,answer=COLUMN"
    )
    (tmp_path / "mine.jsonl").write_text('{"ask": "1?", "target": "1"}\noops')
    said = refusal(path)
    assert "no field answer or response (2 of 2" in said
    assert "the columns are ask, target: map them with --columns" in said


def test_a_csv_file_that_is_broken_is_refused_in_a_line(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b"question,answer\nWhat?,\xff\xfe\x81\n")  # neither UTF-8 nor cp1252
    said = refusal(str(path))
    assert said.startswith(f"cannot read the data file {path}: it is neither UTF-8 nor cp1252")
    for encoding in ("utf-16-le", "utf-16-be", "utf-32"):
        path.write_bytes("question,answer\nWhat?,3\n".encode(encoding))
        assert refusal(str(path)).endswith("it contains NUL bytes: save it as UTF-8")
    assert "No such file" in refusal(str(tmp_path / "none.csv"))
    path.write_text("question,answer,answer\nWhat?,3,4\n")
    assert refusal(str(path)).endswith("several columns have the name answer")
    path.write_text("question,answer\nWhat?,3,\nAnd?,4\nOr?\n")
    assert "no field answer or response" in refusal(str(path), "test")  # the last row is short
    path.write_text("question,answer\nAnd?,4\nHow many?,1,000\n")  # 1 would be a wrong answer
    assert "row 2 has more cells than the first line has names" in refusal(str(path))
    rows = ['"Hm," he said,5', "What?,3", '"No," she said,4']  # no rows may be swallowed
    path.write_text("\n".join(["question,answer", *rows]))
    assert "row 1: ',' expected after '\"'; a cell that contains a quote" in refusal(str(path))
    tabs = tmp_path / "mine.tsv"  # usually written without quotes
    tabs.write_text(path.read_text().replace(",", "\t").replace('\t"', ',"'))
    assert answers(load_problems(str(tabs), "test")) == [5, 3, 4]


# Layouts of published datasets, with invented rows: the question that is asked and the gold.

STEM = "Which one is a solid?"
ASKED = f"{STEM}\n\nA. water\nB. rock"
LAYOUTS = {  # row, --columns → question, answer, kind
    "MMLU": ({"question": STEM, "choices": ["water", "rock"], "answer": 1}, None, ASKED, "B"),
    "ARC": (
        {"question": STEM, "choices": {"text": ["water", "rock"], "label": ["1", "2"]}, "key": "2"},
        "answer=key", ASKED, "B",
    ),
    "AQuA": (
        {"question": STEM, "options": ["A)water", "B)rock"], "correct": "B"},
        "answer=correct", ASKED, "B",
    ),
    "an object of choices": (
        {"question": STEM, "options": {"A": "water", "B": "rock"}, "answer": "A"}, None, ASKED, "A",
    ),
    "the text of a choice": (
        {"prompt": STEM, "choices": ["water", "rock"], "answer": "rock"}, None, ASKED, "B",
    ),
    "numbers to choose from": (
        {"question": "1 + 1?", "choices": ["1", "2", "0"], "answer": "2"},
        None, "1 + 1?\n\nA. 1\nB. 2\nC. 0", "B",
    ),
    "numbers, by value": (
        {"question": "1 + 1?", "choices": [1, 2, 3], "answer": 2},
        None, "1 + 1?\n\nA. 1\nB. 2\nC. 3", "B",
    ),
    "numbers, by index": (
        {"question": "1 + 1?", "choices": [5, 2, 3], "answer": 1},
        None, "1 + 1?\n\nA. 5\nB. 2\nC. 3", "B",
    ),
    "HellaSwag": (
        {"ctx": "He throws the", "endings": ["ball.", "sky."], "label": "0"},
        "question=ctx,choices=endings,answer=label", "He throws the\n\nA. ball.\nB. sky.", "A",
    ),
    "a column for each letter": (
        {"question": STEM, "A": "water", "B": "rock", "answer": "B"}, None, ASKED, "B",
    ),
    "WinoGrande": (
        {"sentence": STEM, "option1": "water", "option2": "rock", "answer": "2"},
        "question=sentence", ASKED, "B",
    ),
    "PIQA": ({"goal": STEM, "sol1": "water", "sol2": "rock", "label": 0},
             "question=goal,answer=label", ASKED, "A"),
    "SWAG": ({"sent2": STEM, "ending0": "water", "ending1": "rock", "label": 1},
             "question=sent2,answer=label", ASKED, "B"),
    "MedMCQA": ({"question": STEM, "opa": "water", "opb": "rock", "cop": 1},
                "answer=cop", ASKED, "B"),
    "TruthfulQA": (
        {"question": STEM, "targets": {"choices": ["water", "rock"], "labels": [0, 1]}},
        "choices=targets.choices,answer=targets.labels", ASKED, "B",
    ),
    "MathQA": ({"Problem": STEM, "options": "a ) water , b ) rock", "correct": "b"},
               "question=Problem,answer=correct", ASKED, "B"),
    "a list in a cell": (
        {"question": STEM, "choices": "['water', 'rock']", "answer": "1"}, None, ASKED, "B",
    ),
    "shown already": ({"question": ASKED, "choices": ["water", "rock"], "answer": 1},
                      None, ASKED, "B"),
    "verl": (
        {"prompt": [{"role": "user", "content": "2 + 3?"}],
         "reward_model": {"ground_truth": "5", "style": "rule"}, "ability": "math"},
        None, "2 + 3?", "5",
    ),
    "verl, named": (
        {"data_source": "x", "prompt": [{"role": "user", "content": "2 + 3?"}],
         "reward_model": {"ground_truth": 5}},
        "question=prompt,answer=reward_model.ground_truth", "2 + 3?", "5",
    ),
    "MetaMathQA": (
        {"query": "2 + 3?", "response": "It is 2+3=5.\n#### 5\nThe answer is: 5"},
        "question=query,answer=response", "2 + 3?", "5",
    ),
    "orca-math": (
        {"question": "2 + 3?", "answer": "Two and three. Adding gives 5."},
        "completion=answer", "2 + 3?", "5",
    ),
    "ShareGPT": (
        {"conversations": [{"from": "system", "value": "Be brief."},
                           {"from": "human", "value": "2 + 3?"},
                           {"from": "gpt", "value": "Two and three make 5."}]},
        None, "2 + 3?", "5",
    ),
    "a chat as the question": (
        {"dialog": [{"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]},
                    {"role": "model", "content": "It is 5."}]},
        "question=dialog", "2 + 3?", "5",
    ),
    "a chat in a cell": (
        {"messages": "[{'role': 'user', 'content': '2 + 3?'}]", "answer": "5"}, None, "2 + 3?", "5",
    ),
    "BoolQ": (
        {"passage": "Ice is water.", "question": "is ice wet", "answer": True},
        "question=passage+question",
        "Ice is water.\n\nis ice wet\n\nA. true\nB. false", "A",
    ),
    "true as text": (
        {"question": "is ice dry?", "answer": "False"}, None,
        "is ice dry?\n\nA. true\nB. false", "B",
    ),
    "true among choices": (
        {"question": "Is it?", "choices": ["True", "False"], "answer": False}, None,
        "Is it?\n\nA. True\nB. False", "B",
    ),
    "DROP": ({"question": "How many?", "answer": {"spans": ["5"], "types": ["number"]}},
             None, "How many?", "5"),
    "SQuAD": ({"question": "How many?", "answers": {"text": ["5", "5"], "answer_start": [1, 1]}},
              "answer=answers", "How many?", "5"),
    "SQuAD, the first": ({"question": "How many?", "answers": {"text": ["5", "five"]}},
                         "answer=answers.text.0", "How many?", "5"),
    "OlympiadBench": ({"question": "How many?", "final_answer": ["5"]},
                      "answer=final_answer", "How many?", "5"),
    "SVAMP": ({"Body": "He has 2 and 3.", "Question": "How many?", "Answer": 5.0},
              "question=Body+Question,answer=Answer", "He has 2 and 3.\n\nHow many?", "5.0"),
    "Alpaca": ({"instruction": "Add.", "input": "", "output": "2 + 3 = 5"},
               "question=instruction+input,completion=output", "Add.", "5"),
    "verl, in text": (
        {"prompt": '[{"role": "user", "content": "2 + 3?"}]',
         "reward_model": '{"ground_truth": "5", "style": "rule"}'},
        None, "2 + 3?", "5",
    ),
    "verl, in text, named": (
        {"ask": "2 + 3?", "reward_model": "{'ground_truth': '5'}"},
        "question=ask,answer=reward_model.ground_truth", "2 + 3?", "5",
    ),
    "MATH": (
        {"problem": "Half of one?", "solution": r"It is $\boxed{\frac12}$.", "level": "Level 1"},
        None, "Half of one?", r"\frac12",
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_layout(tmp_path, layout):
    row, columns, question, answer = LAYOUTS[layout]
    [problem] = load_problems(write_jsonl(tmp_path / "m.jsonl", [row]), "test", columns=columns)
    assert (problem.question, problem.answer) == (question, answer)
    kind = "choice" if answer in "AB" else "number"
    assert problem.answer_type == kind


def test_a_row_with_another_answer_type_has_no_choices(tmp_path):
    row = {"question": "What is 3 - 2?", "answer": "1", "op1": 3, "op2": 2, "answer_type": "number"}
    [problem] = load_problems(write_jsonl(tmp_path / "m.jsonl", [row]), "test")
    assert (problem.question, problem.answer) == ("What is 3 - 2?", "1")
    assert (problem.answer_type, problem.columns["op1"]) == ("number", 3)
    for named in ("", "Choice", "multiple_choice"):  # of a column of a CSV file
        row = {**PIQA, "answer": "1", "answer_type": named}
        [problem] = load_problems(write_jsonl(tmp_path / "c.jsonl", [row]), "test")
        assert (problem.answer, problem.answer_type) == ("A", "choice")


SOCIAL = {"question": STEM, "answerA": "water", "answerB": "rock", "answerC": "air"}
COSMOS = {"question": STEM, "answer0": "water", "answer1": "rock", "answer2": "air"}
PIQA = {"question": STEM, "sol1": "water", "sol2": "rock"}
LIST = {"question": STEM, "choices": ["water", "rock", "air"]}


@pytest.mark.parametrize(
    ("row", "labels", "letters"),
    [
        (SOCIAL, "1231", "ABCA"),  # from 1, and no row says 0
        (COSMOS, "0120", "ABCA"),
        (PIQA, "0110", "ABBA"),  # from 0, though the columns are from 1
        (PIQA, "1221", "ABBA"),
        (LIST, "0120", "ABCA"),
        (LIST, [2, 1, 3], "BAC"),
        (LIST, [2.0, 1.0, 0.0], "CBA"),
        (LIST, [1, 1], "BB"),  # nothing says more: an index
        ({"question": STEM, "choices": ["3", "8", "5"]}, ["3", "5"], "AC"),  # the texts
        ({"question": STEM, "choices": [7, 2, 1]}, [2, 1], "BC"),
        ({"question": STEM, "choices": [7, 2, 1]}, [2, 1, 0], "CBA"),  # 0 is an index
        ({"question": STEM, "choices": [7, 2, 1]}, [2, 1, 3], "BAC"),
        ({"question": STEM, "choices": [3.0, 1.5, 4.0]}, [3, 4], "AC"),
    ],
)
def test_a_file_says_from_where_its_choices_are_numbered(tmp_path, row, labels, letters):
    rows = [row | {"label": label} for label in labels]
    file = write_jsonl(tmp_path / "m.jsonl", rows)
    problems = load_problems(file, "test", columns="answer=label")
    assert "".join(problem.answer for problem in problems) == letters


@pytest.mark.parametrize(
    ("row", "labels", "is_said"), [(SOCIAL, "123", True), (COSMOS, "01", False)]
)
def test_the_report_says_that_choices_are_numbered_from_1(tmp_path, row, labels, is_said, caplog):
    caplog.set_level(logging.INFO, logger="rlm")
    rows = [row | {"label": label} for label in labels]
    load_problems(write_jsonl(tmp_path / "m.jsonl", rows), "test", columns="answer=label")
    first, last = [name for name in row if name != "question"][::2]
    assert f"choices from {first}, " in caplog.text
    assert (f"{last}; choices are numbered from 1" in caplog.text) == is_said


@pytest.mark.parametrize("outside", [0, 4])  # of three, numbered from 1
def test_a_number_outside_the_choices_of_its_file_is_refused(tmp_path, outside):
    rows = [SOCIAL | {"label": label} for label in (3, outside, 1)]
    said = refusal(write_jsonl(tmp_path / "m.jsonl", rows), "test", columns="answer=label")
    assert f"line 2: the answer is not one of the choices: '{outside}'" in said


@pytest.mark.parametrize("answer", [1, "1", 1.0])
def test_a_number_names_an_explicit_label(answer):
    """One row cannot show how its choices are numbered, but the labels do."""
    for choices in ({"text": ["x", "y", "z"], "label": [1, 2, 3]}, {"1": "x", "2": "y", "3": "z"}):
        [problem] = as_problems([{"question": STEM, "choices": choices, "answer": answer}])
        assert problem.answer == "A"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"choices": ["water", "rock"], "answer": 3}, "the answer is not one of the choices: '3'"),
        (
            {"choices": ["water", "rock"], "answer": "C"},
            "the answer is not one of the choices: 'C'",
        ),
        (
            {"choices": "water or rock", "answer": 1},
            "the choices are a single text that cannot be split; write a list",
        ),
        ({"choices": [["water"], ["rock"]], "answer": 1}, "not a list of two or more texts"),
        ({"choices": ["x"] * 27, "answer": 1}, "more than 26 choices"),
        (
            {"choices": {"text": ["x", "y"], "label": 1}, "answer": 1},
            "choice labels are",
        ),
    ],
)
def test_choices_that_cannot_be_shown_are_refused(row, why):
    with pytest.raises(UsageError, match=why):
        as_problems([{"question": STEM, **row}])


def test_a_worked_answer_in_words_is_no_reference_answer():
    """No right completion could contain it between its answer tags."""
    row = {"question": STEM, "answer_type": "text"}
    worked = "<think>It is in France.</think>\n<answer>Paris</answer>"
    for answer in (worked, "It is in France.\n#### Paris"):
        with pytest.raises(UsageError, match=r"the answer is not a text.*completion=COLUMN"):
            as_problems([row | {"answer": answer}])
    [problem] = as_problems([row | {"completion": worked}])
    assert (problem.answer, problem.solution) == ("Paris", "It is in France.")
    with pytest.raises(UsageError, match="an answer in <answer> tags"):
        as_problems([row | {"completion": "It is Paris."}])
    with pytest.raises(UsageError, match="answer_type is not one of"):
        as_problems([row | {"completion": worked, "answer_type": "Text"}])


@pytest.mark.parametrize(
    ("row", "columns", "why"),
    [
        ({"answer": {"value": "5", "aliases": ["five"]}}, None,
         "the answer is an object; name one of its keys: --columns answer=COLUMN.value"),
        ({"answer": ["5", "6"]}, None, "1 with different reference answers (--columns answer="
         "COLUMN.0 uses the first answer of a list)"),
        ({"answer": []}, None, "no field answer or response"),
        ({"a": {"b": [1]}}, "answer=a.b.1", "no column 'a.b.1'"),
        ({"a": "1"}, "answer=a,question=question+b", "no column 'b'"),
        ({"answer": "yes"}, None, "--columns answer_type=text"),
        ({"answer": "0,5"}, None, "invalid: fix them); write decimals with a point"),
        ({"answer": "1.234,50 \u20ac"}, None, "write decimals with a point, such as 0.5"),
        ({"task": {"gold": 5}}, None, "the columns are question, task.gold: map them with"),
        ({}, None, "--columns answer_type=open"),
        ({"answer": "5", "solution": ["5"]}, None, "--columns solution=COLUMN.0 uses the first"),
        ({"choices": ["water", "rock"], "label": -1}, "answer=label", "such as --split validation"),
        ({"choices": ["water", "rock"], "answer": ""}, None, "many test splits have none"),
        ({"answer": "5", "answer_type": "Float"}, None, "--columns answer_type=number sets it"),
    ],
)  # fmt: skip
def test_answers_that_are_refused_say_what_to_type(row, columns, why, tmp_path):
    path = write_jsonl(tmp_path / "m.jsonl", [{"question": STEM, **row}])
    assert why in refusal(path, "test", columns=columns)


def test_a_named_question_wins_over_a_chat(tmp_path):
    chat = [{"role": "user", "content": "old?"}, {"role": "assistant", "content": "so 4"}] * 2
    rows = [{"messages": chat, "prompt": chat, "q2": "3 + 4?", "gold": "7"}]
    (problem,) = load(tmp_path, rows, "question=q2,answer=gold")
    assert (problem.question, problem.answer, problem.solution) == ("3 + 4?", "7", "so 4")


def test_an_empty_cell_is_no_choice(tmp_path):
    file = tmp_path / "data.csv"
    file.write_text("question,A,B,C,answer\nWhich?,ice,fire,,B\n")
    (problem,) = load_problems(str(file), "test")
    assert (problem.question, problem.answer) == ("Which?\n\nA. ice\nB. fire", "B")
    file.write_text("question,choices,answer\n8 * 9?,,72\n")
    assert [(p.answer, p.answer_type) for p in load_problems(str(file), "test")] == [
        ("72", "number")
    ]


def test_a_worked_completion_keeps_its_steps_beside_an_answer(tmp_path):
    row = {"question": "2 + 3?", "answer": "5", "completion": "2+3=5\n#### 5"}
    assert [p.solution for p in load(tmp_path, [row])] == ["2+3=5"]
    text = {"question": "Capital?", "completion": "It is Paris.\n#### Paris"}
    with pytest.raises(UsageError, match="an answer in <answer> tags"):
        load(tmp_path, [text | {"answer_type": "text"}])
    assert load(tmp_path, [{"question": 5, "completion": "2 + 3 = 5, so 5"}])[0].answer == "5"


def test_the_kind_of_all_answers_is_named_with_the_columns(tmp_path):
    rows = [{"question": STEM, "answer": "rock"}, {"question": "Is it?", "answer": True}]
    path = write_jsonl(tmp_path / "m.jsonl", rows)
    problems = load_problems(path, "test", columns="answer_type=text")
    assert {(p.answer, p.answer_type) for p in problems} == {("rock", "text"), ("true", "text")}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (0.1 + 0.2, "0.3"), (1.1 * 3, "3.3"), (72.0, "72.0"), (1 / 3, "0.333333333333333"),
        (np.int64(5), "5"), (np.float32(0.1), "0.1"), (Decimal("5.10"), "5.10"),
        (Fraction(3, 4), "3/4"), (2**60, "1152921504606846976"),
    ],
)  # fmt: skip
def test_numbers_of_python_are_read_exactly(answer, text):
    assert as_problems([{"question": "How many?", "answer": answer}])[0].answer == text


def test_nan_is_a_missing_value(tmp_path):
    """pandas writes NaN into lists of dicts and into JSON."""
    row = dict.fromkeys(("solution", "id", "answer_type", "choices", "note"), math.nan)
    row |= {"question": "2 + 3?", "answer": 5}
    single = row | {"solution": np.float32("nan"), "note": Decimal("nan")}
    for [problem] in (as_problems([row]), as_problems([single]), load(tmp_path, [row])):
        assert (problem.solution, problem.answer_type) == ("", "number")
        assert problem.id.endswith("-1")
        assert problem.columns == {"choices": None, "note": None}
    with pytest.raises(UsageError, match="no field question"):
        as_problems([row | {"question": math.nan}])


def test_the_columns_that_are_used_and_odd_rows_are_reported(tmp_path, caplog):
    rows = [{"prompt": f"{i}?", "target": str(i), "level": 1} for i in range(20)]
    chat = {"prompt": [{"role": "developer", "content": "Be brief."}, USER], "target": "5"}
    again = [{"prompt": "1?", "target": "1"}, {"prompt": " 2? ", "target": "3"}]
    path = write_jsonl(tmp_path / "m.jsonl", [*rows, chat, *again])
    problems = load_problems(path, columns="answer=target")
    assert caplog.records[0].message == (
        f"{path}: 23 of 23 rows used; 2 repeat a question, 1 with another answer; 1 with a system "
        "message, which is not used; question from prompt, answer from target"
    )
    held_out = load_problems(path, "validation", columns="answer=target")
    assert not {p.question.strip() for p in problems} & {p.question.strip() for p in held_out}


@pytest.mark.parametrize("suffix", ["json", "jsonl.gz", "json.gz", "csv.gz", "parquet.gz"])
def test_other_endings(tmp_path, suffix):
    plain = tmp_path / f"mine.{suffix.removesuffix('.gz')}"
    if suffix.startswith("parquet"):
        parquet.write_table(Table.from_pylist(rows_of(30)), plain)
    elif suffix.startswith("csv"):
        plain.write_text("ask,target\n" + "".join(f"Question {i}?,{i}\n" for i in range(30)))
    elif suffix.startswith("jsonl"):
        write_jsonl(plain, rows_of(30))
    else:
        plain.write_text(json.dumps(rows_of(30), indent=1))
    path = plain
    if suffix.endswith(".gz"):
        path = tmp_path / f"mine.{suffix}"
        path.write_bytes(gzip.compress(plain.read_bytes()))
    assert sorted(answers(load_problems(str(path), "test", columns=COLUMNS))) == [*range(30)]
    path.write_bytes(path.read_bytes()[:40])  # cut off
    assert refusal(str(path), columns=COLUMNS).startswith((f"cannot read the data file {path}: ",
                                                           f"{path}: line 1: "))  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        b'[{"ask": "1?", "target": 1}]',
        b'{"version": 2, "data": [{"ask": "1?", "target": 1}]}',
        b'{"ask": "1?",\n "target": 1}'.replace(b"\n", b""),
        b'{"ask": {"0": "1?"}, "target": {"0": 1}}',  # as pandas writes a data frame
        b'{"q1": {"ask": "1?", "target": 1}, "q2": {"ask": "1?", "target": 1}}',
        '{"ask": "1?", "target": 1}\n'.encode("utf-16"),
    ],
)
def test_forms_of_json(tmp_path, text):
    for name in ("mine.json", "mine.jsonl"):
        (tmp_path / name).write_bytes(text)
        is_object_of_rows = text.startswith((b'{"version"', b'{"ask": {', b'{"q1"'))
        if name == "mine.jsonl" and is_object_of_rows:
            continue
        assert {*answers(load_problems(str(tmp_path / name), "test", columns=COLUMNS))} == {1}


def test_an_object_of_several_data_sets_is_refused_by_their_names(tmp_path):
    rows = [{"question": "1?", "answer": 1}]
    (tmp_path / "m.json").write_text(json.dumps({"train": rows, "test": rows}))
    assert refusal(str(tmp_path / "m.json")).endswith(
        "it contains several datasets (train, test): save each as a file"
    )
    chat = {"messages": [USER, {"role": "assistant", "content": "5"}], "rubrics": [{"a": 1}]}
    (tmp_path / "m.json").write_text(json.dumps(chat))
    assert answers(load_problems(str(tmp_path / "m.json"), "test")) == [5]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("ask;target\nWie groß, 1;1\n", "cp1252"),
        ("ask|target\nWie groß, 1|1\n", "utf-8"),
        ("ask\ttarget\nWie groß, 1\t1\n", "utf-16"),
        ('ask,target\n"Wie groß, 1",1\n', "utf-8-sig"),
        ('ask, target \n"Wie groß, 1", "1"\n', "utf-8"),
        ("ask\ttarget\rWie groß, 1\t1\r", "utf-8"),
    ],
)
def test_separators_and_encodings_of_csv(tmp_path, text, encoding):
    (tmp_path / "mine.csv").write_bytes(text.encode(encoding))
    [problem] = load_problems(str(tmp_path / "mine.csv"), "test", columns=COLUMNS)
    assert (problem.question, problem.answer) == ("Wie groß, 1", "1")


@pytest.mark.parametrize("name", ["mine.csv", "mine.tsv"])
def test_rows_without_any_text_are_skipped(tmp_path, name):
    """A spreadsheet whose lower cells were once used ends with rows of separators."""
    path, comma = tmp_path / name, "," if name.endswith(".csv") else "\t"
    rows = ["question,answer,notes", "What?,3,", ",,", " , , ", "And?,4,", *[",,"] * 30]
    path.write_text("\n".join(rows).replace(",", comma))
    assert sorted(answers(load_problems(str(path), "test"))) == [3, 4]
    path.write_text(f"question{comma}answer\n{comma}\n{comma}")
    assert "contains no problems: it is empty" in refusal(str(path), "test")


def test_what_is_on_the_disk_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "data" / "train.txt", rows_of(3))
    (tmp_path / "data" / "train.xlsx").write_bytes(b"PK")
    for path in ("data/train.txt", "data/train.xlsx"):
        assert parse_dataset(path) == [OwnFile(Path(path))]
        assert "the supported suffixes are .jsonl" in refusal(path, columns=COLUMNS)
    for path in ("data/missing.xlsx", "data/missing.jsonl.gz", "data/missing.foo.gz"):
        assert parse_dataset(path) == [OwnFile(Path(path))]
        assert "No such file or directory" in refusal(path)
        with pytest.raises(UsageError, match=f"--dataset {path}: the file does not exist") as error:
            check_dataset(path)
        is_read = path.endswith("jsonl.gz")
        assert ("; the supported suffixes are .jsonl, " in str(error.value)) is not is_read
    write_jsonl(tmp_path / "main", [{"question": "?", "answer": "#### 1"}])
    [main], [socratic], [data] = map(parse_dataset, ("gsm8k:main", "gsm8k:socratic", "gsm8k:data"))
    assert (main.config, socratic.config, data.config) == (None, "socratic", None)
    assert (main.path, socratic.path, data.path) == (Path("main"), None, Path("data"))


def test_a_directory_that_datasets_has_saved(tmp_path):
    from datasets import Dataset, DatasetDict

    Dataset.from_list(rows_of(20)).save_to_disk(tmp_path / "one")
    both = {"train": Dataset.from_list(rows_of(20)), "test": Dataset.from_list(rows_of(3, 50))}
    DatasetDict(both).save_to_disk(tmp_path / "both")
    for name in ("one", "both"):
        assert len(load_problems(str(tmp_path / name), columns=COLUMNS)) == 18
    assert len(load_problems(str(tmp_path / "both"), "test", columns=COLUMNS)) == 3


def test_a_class_of_a_dataset_has_its_name_as_the_answer(tmp_path):
    from datasets import ClassLabel, Dataset, Features, Value

    def save(names: list[str], **columns: list[str]) -> Dataset:
        features = dict.fromkeys(("prompt", *columns), Value("string"))
        rows = {"prompt": ["One?", "Two?", "?"], "answer": [0, 1, -1], **columns}
        dataset = Dataset.from_dict(rows, Features(features, answer=ClassLabel(names=names)))
        dataset.to_parquet(tmp_path / "file.parquet")
        dataset.select([0, 1]).save_to_disk(tmp_path / "folder")
        return dataset

    dataset = save(["no", "yes"]).select([0, 1])
    kind, path = "answer_type=text", str(tmp_path / "folder")
    problems = load_problems(str(tmp_path / "file.parquet"), "test[:2]", columns=kind)
    folder = [p for s in ("train", "validation") for p in load_problems(path, s, columns=kind)]
    for found in problems, folder:
        assert {(p.question, p.answer) for p in found} == {("One?", "no"), ("Two?", "yes")}
    with pytest.raises(UsageError, match=r"answer is empty \(1 of 3"):
        load_problems(str(tmp_path / "file.parquet"), "test", columns=kind)
    rows = dataset.add_column("answer_type", ["text"] * 2)
    assert [problem.answer for problem in as_problems(rows)] == ["no", "yes"]
    choices = {"choice1": ["a"] * 3, "choice2": ["b"] * 3}  # COPA
    save([*choices], **choices)
    problems = load_problems(str(tmp_path / "file.parquet"), "test[:2]")
    assert {(p.question[:4], p.answer) for p in problems} == {("One?", "A"), ("Two?", "B")}


# Slices.


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("train", range(10)), ("train[:3]", range(3)), ("train[8:]", range(8, 10)),
        ("train[20%:50%]", range(2, 5)), ("train[-2:]", range(8, 10)), ("train[:200]", range(10)),
        ("train[-4%:]", []), ("train[:-4%]", range(10)), ("train[-30%:]", range(7, 10)),
        ("train[26%:74%]", range(3, 7)),  # rounded to the nearest row, as by datasets
    ],
)  # fmt: skip
def test_slices(text, kept):
    name, bounds = split_slice(text)
    assert name == "train"
    assert cut_rows([*range(10)], bounds) == [*kept]


@pytest.mark.parametrize("text", ["train[3]", "train[a:b]", "train[:3", "", "a b"])
def test_what_is_no_slice_is_refused(text):
    with pytest.raises(UsageError, match="write NAME"):
        split_slice(text)


def test_a_slice_of_a_file_comes_before_its_splits(tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", rows_of(100))
    choice = {"columns": COLUMNS, "rows": "train[:40]"}
    train, validation = (load_problems(path, s, **choice) for s in ("train", "validation"))
    assert (len(train), len(validation)) == (36, 4)
    assert {*answers(train), *answers(validation)} == {*range(40)}
    assert load_problems(path, "train[:40]", columns=COLUMNS) == train  # shuffled, too
    # The same slice has the same held-out problems.
    assert load_problems(path, "validation[:40]", columns=COLUMNS) == validation
    assert sorted(answers(load_problems(path, "test[90:]", columns=COLUMNS))) == [*range(90, 100)]
    assert len(load_problems(path, "test", **choice)) == 100  # as for a dataset on the hub
    assert "select rows of a file as train" in refusal(path, rows="test[:5]")


def test_named_data_sets_take_neither_columns_nor_slices(tmp_path):
    assert "--columns is for files and org/name" in refusal("elementary", columns=COLUMNS)
    assert "--split is for files" in refusal("elementary", rows="train[:5]")
    path = write_jsonl(tmp_path / "mine.jsonl", rows_of(20))
    mixed = load_problems(f"elementary:1+{path}", max_samples=5, columns=COLUMNS)
    assert len(mixed) == 10
    mixture, choice = f"elementary:1+{path}", {"max_samples": 5, "columns": COLUMNS}
    assert len(load_problems(mixture, "validation[:10]", **choice)) == 5 + 1
    with pytest.raises(UsageError, match="slices are for files and org/name hub datasets"):
        load_problems("elementary:1+word-problems:1", "validation[:10]")


def test_a_mixture_trains_on_no_question_that_a_part_holds_out(tmp_path):
    """50 of 500 questions are held out, but only 200 of 3000, and these are others."""
    parts = [write_jsonl(tmp_path / f"{n}.jsonl", rows_of(n)) for n in (500, 3000)]
    train, validation = (
        {*answers(load_problems("+".join(parts), split, columns=COLUMNS))}
        for split in ("train", "validation")
    )
    assert not train & validation
    assert train | validation == {*range(3000)}


def test_few_samples_of_a_mixture_are_none_that_a_part_holds_out(tmp_path):
    """20 questions hold out 15 and 10, and 40 hold out 15, not 10, which seed 26 would draw."""
    mixture = "+".join(write_jsonl(tmp_path / f"{n}.jsonl", rows_of(n)) for n in (20, 40))
    one_each = {"columns": COLUMNS, "max_samples": 1, "seed": 26}
    train = answers(load_problems(mixture, "train", **one_each))
    held_out = answers(load_problems(mixture, "validation", columns=COLUMNS))
    assert not {*train} & {*held_out}


# Chat rows.

USER, SYSTEM = {"role": "user", "content": "2 + 3?"}, {"role": "system", "content": "Be brief."}
STEPS = "Two and three are five."
TRACE = f"<think>\n{STEPS}\n</think>\nThe answer is 5."
REPLY = {"role": "assistant", "content": TRACE}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, REPLY]},
        {"messages": [SYSTEM, USER, REPLY]},
        {"prompt": [USER], "completion": [REPLY]},
        {"prompt": [SYSTEM, USER], "completion": TRACE},
        {"prompt": "2 + 3?", "completion": TRACE},
        {"prompt": "2 + 3?", "completion": TRACE, "answer": "5"},
        {"prompt": [USER], "answer": 5, "solution": "Two and three are five."},
        {"question": "2 + 3?", "answer": "5", "solution": TRACE},
        *(
            {"messages": [USER, {"role": "Assistant", "content": "5", name: STEPS}]}
            for name in ("reasoning_content", "reasoning", "thinking")
        ),
    ],
)
def test_chat_rows_become_a_question_with_a_solution(row, tmp_path):
    [problem] = load(tmp_path, [row])
    assert (problem.question, problem.answer) == ("2 + 3?", "5")
    assert problem.solution == "Two and three are five."
    assert as_problems([row])[0].solution == problem.solution


@pytest.mark.parametrize(
    ("completion", "answer", "solution"),
    [
        ("2 + 3 = 5\nFinal answer: 5", "5", "2 + 3 = 5"),
        ("2 + 3 = 5\n<answer>5</answer>", "5", "2 + 3 = 5"),
        ("First 2, then 3 more.\n#### 5", "5", "First 2, then 3 more."),
        (
            "<think>\n\n</think>\n\n2 + 3 = 5, so 5",
            "5",
            "2 + 3 = 5, so 5",
        ),  # Qwen3 without thinking
        (r"Half of it is \boxed{1/2}", "1/2", r"Half of it is \boxed{1/2}"),
        ("5", "5", ""),  # nothing to learn from
    ],
)
def test_a_worked_solution_without_tags(completion, answer, solution):
    [problem] = as_problems([{"prompt": "2 + 3?", "completion": completion}])
    assert (problem.answer, problem.solution) == (answer, solution)


def test_a_solution_ends_before_its_answer():
    """In GSM-Plus, both columns contain the answer."""
    rows = [{"question": "2 + 3?", "answer": "5", "solution": "#### Step\n2+3=5\n#### 5"}]
    assert as_problems(rows)[0].solution == "#### Step\n2+3=5"


@pytest.mark.parametrize(
    "row",
    [
        {"solution": "{}\n<answer>5</answer>"},
        {"solution": "<reasoning>{}</reasoning>\n<answer>5</answer>"},
        {"solution": "<think>{}\n<answer>5</answer></think>5"},
        {"completion": "<reasoning>\n{}\n</reasoning>\n<answer>\n5\n</answer>"},
        {"answer": "{} <answer>5</answer>\n#### 5"},
    ],
)
def test_no_solution_teaches_tags_inside_the_reasoning(row):
    """Each such completion would be rejected: `repeated_reasoning`, `answer_in_reasoning`."""
    row = {name: text.format(STEPS) for name, text in row.items()}
    [problem] = as_problems([{"question": "2 + 3?", "answer": "5"} | row])
    assert (problem.solution, problem.answer) == (STEPS, "5")
    assert {format.reasoning_tag for format in FORMATS.values()} == {*REASONING_TAGS}


@pytest.mark.parametrize("blank", ["\n", " ", "\n \n"])
def test_blank_lines_cost_nothing(blank):
    blanks, started = blank * 30_000, time.process_time()
    asked, completion = f"2 + 3?{blanks}Show it.", f"2 + 3 = 5{blanks}Final answer: 5"
    [problem] = as_problems([{"prompt": asked, "completion": completion}])
    assert (problem.answer, problem.solution) == ("5", "2 + 3 = 5")
    assert time.process_time() - started < 200 * loop_seconds()


def test_a_prompt_without_an_assistant_needs_an_answer():
    row = {"messages": [USER], "answer": "5"}
    for more in ({}, {"completion": 5}):
        assert read_chat(row | more) == {"question": "2 + 3?", "answer": "5"}
    with pytest.raises(UsageError, match="no field answer or response"):
        as_problems([{"messages": [USER]}])


def test_a_role_that_is_no_text_is_refused():
    asked = {"role": ["user"], "content": "2 + 3?"}
    with pytest.raises(UsageError, match=r"the role of a message is not a string: \"\['user'\]\""):
        as_problems([{"messages": [asked, REPLY]}])


def test_chat_rows_that_are_not_used_are_counted_by_reason(tmp_path, caplog):
    good = [
        {"messages": [{"role": "user", "content": f"{i} + 1?"},
                      {"role": "assistant", "content": f"It is {i + 1}."}]}
        for i in range(30)
    ]  # fmt: skip
    several = {"messages": [USER, REPLY, USER, REPLY]}
    no_number = {"messages": [USER, {"role": "assistant", "content": "I do not know."}]}
    picture = {"messages": [{"role": "user", "content": [{"type": "image"}]}, REPLY]}
    path = write_jsonl(tmp_path / "chat.jsonl", [*good, several, several, no_number, picture])
    assert len(load_problems(path, "test")) == 30
    assert caplog.records[0].message == (
        f"{path}: 30 of 34 rows used, 4 left out: 2 with several turns or no user message; "
        "1 with a completion that does not end with a number; 1 with a message that is not text; "
        "question from messages, answer from the end of messages, solution from messages"
    )


def test_repeated_ids_are_refused_with_the_way_to_other_ids(tmp_path):
    rows = [{"question": f"{i}?", "answer": i, "id": i % 2, "instance": i} for i in range(4)]
    path = write_jsonl(tmp_path / "m.jsonl", rows)
    assert "--columns id=COLUMN+COLUMN joins two columns" in refusal(path, "test")
    assert len(load_problems(path, "test", columns="id=id+instance")) == 4


def test_the_last_number_of_a_proof_is_no_answer():
    proof = {"problem": "Prove that n(n + 1)(n + 2) is divisible.", "solution": "So 6 divides it."}
    with pytest.raises(LeftOut, match="with a proof instead of a final answer"):
        read_chat(proof)
    assert read_chat(proof | {"problem": "What divides it?"})["answer"] == "6"
    for asked in ("Records show that it is 6. Double it.", "Show that 2 divides it. Find it."):
        assert read_chat(proof | {"problem": asked})["answer"] == "6"
    assert read_chat(proof | {"answer_type": "open"})["solution"] == "So 6 divides it."
    assert read_chat(proof | {"solution": r"It is \boxed{6}."})["answer"] == "6"


def test_a_text_that_the_model_does_not_see_is_named(tmp_path, caplog):
    rows = [{"question": f"Is it {i}?", "passage": "It is a number.", "answer": i} for i in (1, 2)]
    path = write_jsonl(tmp_path / "m.jsonl", [row | {"topic": "sums, and more"} for row in rows])
    caplog.set_level(logging.INFO)
    load_problems(path, "test")
    load_problems(path, "test", columns="question=passage+question")
    hidden, shown = (record.message for record in caplog.records)
    assert "the model does not see passage (--columns question=COLUMN+question puts" in hidden
    assert "does not see" not in shown


# A directory laid out as on the hub, and a hub.

HUB_README = """---
configs:
- config_name: easy
  data_files:
  - {split: train, path: easy/train.jsonl}
  - {split: test, path: easy/test.jsonl}
- config_name: hard
  data_files: hard.csv
---
"""


def mirror(folder):
    """Write a dataset with two configs, one of which has a test split."""
    write_jsonl(folder / "easy/train.jsonl", rows_of(40))
    write_jsonl(folder / "easy/test.jsonl", [*rows_of(10, 100), {"ask": "Why?", "target": "so"}])
    (folder / "hard.csv").write_text(
        "ask,target\n" + "".join(f"Hard {i}?,{i}\n" for i in range(20))
    )
    (folder / "README.md").write_text(HUB_README)
    return str(folder)


def test_a_loading_script_is_refused_with_the_way_to_a_parquet_copy(tmp_path):
    write_jsonl(tmp_path / "mine/data.jsonl", rows_of(3))
    (tmp_path / "mine/mine.py").touch()
    assert "remove mine.py from the directory" in refusal(str(tmp_path / "mine"))


def test_a_directory_laid_out_as_on_the_hub(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = mirror(tmp_path / "org" / "name")
    assert parse_dataset(folder) == [HubDataset(folder)]
    train, validation, test = (
        load_problems(f"{folder}:easy", split, columns=COLUMNS)
        for split in ("train", "validation", "test")
    )
    assert {*answers(train), *answers(validation)} == {*range(40)}
    assert len(validation) == 4
    assert sorted(answers(test)) == [*range(100, 110)]
    [record] = caplog.records
    assert record.message == (
        f"{folder}:easy test: 10 of 11 rows used, 1 left out: 1 the answer is not a number "
        "(--columns answer_type=text accepts words, and completion=COLUMN accepts worked "
        "steps that end with the answer); "
        "question from ask, answer from target"
    )
    assert refusal(folder) == (
        f"dataset {folder} has several configs: pass --dataset {folder}:CONFIG, one of easy, hard"
    )
    # The ids contain the config, so several configs can be combined.
    assert all(problem.id.startswith("name-easy-train-") for problem in train)
    few = load_problems(f"{folder}:easy", columns=COLUMNS, rows="train[:20]")
    assert {*answers(few)} < {*range(20)}
    assert "has no split 'test'; it has train; --split validation" in refusal(
        f"{folder}:hard", "test", columns=COLUMNS
    )


@pytest.mark.parametrize("names", [("train", "test"), ("train", "validation", "test")])
def test_no_published_test_question_is_trained_on(tmp_path, monkeypatch, caplog, names):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = {"train": rows_of(40), "validation": rows_of(5, 90), "test": rows_of(10, 35)}
    for name in names:
        write_jsonl(tmp_path / f"set/{name}.jsonl", rows[name])
    found = {s: {*answers(load_problems(str(tmp_path / "set"), s, columns=COLUMNS))} for s in rows}
    assert found["test"] == {*range(35, 45)}
    assert found["train"] | found["validation"] & {*range(35)} == {*range(35)}
    assert not found["train"] & found["validation"]
    assert "training problems are also test problems and are left out of training" in caplog.text
    write_jsonl(tmp_path / "set/test.jsonl", [{"ask": "Question 39?", "target": ""}])  # hidden
    assert 39 in {
        *answers(load_problems(str(tmp_path / "set"), "train", columns=COLUMNS)),
        *answers(load_problems(str(tmp_path / "set"), "validation", columns=COLUMNS)),
    }


@pytest.mark.parametrize("split", ["train", "validation"])
def test_invalid_rows_of_a_published_dataset_are_refused_with_the_ways_out(
    split, tmp_path, monkeypatch
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("train", "validation"):
        rows = rows_of(20) + [{"ask": "", "target": "1"}] * 2 * (name == split)
        write_jsonl(tmp_path / f"set/{name}.jsonl", rows)
    assert refusal(str(tmp_path / "set"), columns=COLUMNS) == (
        f"{tmp_path}/set {split}: line 21: question is empty (2 of 22 lines are invalid: choose "
        "other --columns, another config or another --split, or write the valid rows into a "
        "JSONL file and pass that file)"
    )


def test_a_large_split_is_not_read_whole_for_a_few_samples(tmp_path, monkeypatch):
    """The validation problems do not depend on the number of training problems."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for module in (loaders, splits):
        monkeypatch.setattr(module, "POOL", 50)
    write_jsonl(tmp_path / "set/train.jsonl", rows_of(400))
    read, read_dataset = [], loaders.read_dataset

    def counted(*arguments):
        for row in read_dataset(*arguments):
            read.append(row[0])
            yield row

    monkeypatch.setattr(loaders, "read_dataset", counted)

    def load(split="train", **options):
        read.clear()
        return answers(load_problems(str(tmp_path / "set"), split, columns=COLUMNS, **options))

    few, count = load(max_samples=10), len(read)
    assert (len(few), count) == (10, 50)
    assert max(read) > 200  # not the first rows: a set may be sorted
    many, count = load(max_samples=100), len(read)
    assert (len(many), count) == (100 - 5, 100)  # the pool's tenth is held out
    validation, count = load("validation"), len(read)
    assert (len(validation), count) == (5, 50)
    everything, count = load(), len(read)
    assert (len(everything), count) == (395, 400)
    assert {*everything} == {*range(400)} - {*validation}
    assert {*load(rows="train[:60]")} <= {*range(60)}


def test_the_real_library_reads_from_a_hub(tmp_path):
    """The library `datasets` reads from a server that imitates the hub."""
    mirror(tmp_path / "repository")
    code = (
        "from rlm.data import load_problems\n"
        "from rlm.cli import UsageError\n"
        f"problems = load_problems('maths/sums:easy', 'test', columns={COLUMNS!r})\n"
        "print(sorted(int(p.answer) for p in problems))\n"
        "try:\n    load_problems('maths/none')\nexcept UsageError as error:\n    print(error)\n"
    )
    with FakeHub({"datasets/maths/sums": tmp_path / "repository"}) as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
    assert done.stdout.splitlines()[0] == str([*range(100, 110)]), done.stderr
    assert "doesn't exist on the Hub" in done.stdout.splitlines()[1], done.stdout
