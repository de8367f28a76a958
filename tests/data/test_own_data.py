"""Files and hub data sets of a user: other columns, slices, chat rows, a directory, a fake hub."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import FakeHub
from pyarrow import Table, parquet

from rlm.cli import UsageError
from rlm.data import own_data
from rlm.data.columns import cut_rows, parse_columns, read_chat, rename_columns, split_slice
from rlm.data.loaders import is_hub, load_jsonl, load_problems
from rlm.data.problem import as_problems

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
        f"{path}: line 1: no column 'reply' (30 of 30 lines are bad; repair these); the columns "
        "are ask, target: name yours with --columns question=COLUMN,answer=COLUMN"
    )
    said = refusal(path)
    assert "no field answer or response" in said
    assert "the columns are ask, target: name yours with --columns" in said


def test_a_csv_file_that_is_broken_is_refused_in_a_line(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b"question,answer\nWhat?,\xff\n")
    assert refusal(str(path)).startswith(f"cannot read the data file {path}: 'utf-8' codec")
    assert "No such file" in refusal(str(tmp_path / "none.csv"))
    path.write_text("question,answer\nWhat?,3,left over\nAnd?,4\nOr?\n")
    assert "no field answer or response" in refusal(str(path), "test")  # the last row is short


# Slices.


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("train", range(10)), ("train[:3]", range(3)), ("train[8:]", range(8, 10)),
        ("train[20%:50%]", range(2, 5)), ("train[-2:]", range(8, 10)), ("train[:200]", range(10)),
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
    # What was held out of a slice is found again under the same slice.
    assert load_problems(path, "validation[:40]", columns=COLUMNS) == validation
    assert sorted(answers(load_problems(path, "test[90:]", columns=COLUMNS))) == [*range(90, 100)]
    assert "a file has one split" in refusal(path, rows="test[:5]")


def test_named_data_sets_take_neither_columns_nor_slices(tmp_path):
    assert "--columns is for files and hub data sets" in refusal("elementary", columns=COLUMNS)
    assert "--split is for files" in refusal("elementary", rows="train[:5]")
    path = write_jsonl(tmp_path / "mine.jsonl", rows_of(20))
    mixed = load_problems(f"elementary:1+{path}", max_samples=5, columns=COLUMNS)
    assert len(mixed) == 10


# Chat rows.

USER, SYSTEM = {"role": "user", "content": "2 + 3?"}, {"role": "system", "content": "Be brief."}
TRACE = "<think>\nTwo and three are five.\n</think>\nThe answer is 5."
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
    ],
)
def test_chat_rows_become_a_question_with_a_solution(row, tmp_path):
    [problem] = load_jsonl(write_jsonl(tmp_path / "chat.jsonl", [row]))
    assert (problem.question, problem.answer) == ("2 + 3?", "5")
    assert problem.solution == "Two and three are five."
    assert as_problems([row])[0].solution == problem.solution


@pytest.mark.parametrize(
    ("completion", "answer", "solution"),
    [
        ("2 + 3 = 5\nFinal answer: 5", "5", "2 + 3 = 5"),
        ("2 + 3 = 5\n<answer>5</answer>", "5", "2 + 3 = 5"),
        ("First 2, then 3 more.\n#### 5", "5", "First 2, then 3 more."),
        (r"Half of it is \boxed{1/2}", "1/2", r"Half of it is \boxed{1/2}"),
        ("5", "5", ""),  # nothing to learn from
    ],
)
def test_a_worked_solution_without_tags(completion, answer, solution):
    [problem] = as_problems([{"prompt": "2 + 3?", "completion": completion}])
    assert (problem.answer, problem.solution) == (answer, solution)


def test_a_prompt_without_an_assistant_needs_an_answer():
    assert read_chat({"messages": [USER], "answer": "5"}) == {"question": "2 + 3?", "answer": "5"}
    with pytest.raises(UsageError, match="no field answer or response"):
        as_problems([{"messages": [USER]}])


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
    assert len(load_jsonl(path)) == 30
    assert caplog.records[0].message == (
        f"{path}: 30 of 34 rows used, 4 left out: 2 with several turns, or none; "
        "1 with a completion that ends with no number; 1 with a message that is not text"
    )


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
    """A data set with two configs, one with a test split."""
    write_jsonl(folder / "easy/train.jsonl", rows_of(40))
    write_jsonl(folder / "easy/test.jsonl", [*rows_of(10, 100), {"ask": "Why?", "target": "so"}])
    (folder / "hard.csv").write_text(
        "ask,target\n" + "".join(f"Hard {i}?,{i}\n" for i in range(20))
    )
    (folder / "README.md").write_text(HUB_README)
    return str(folder)


def test_a_directory_laid_out_as_on_the_hub(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = mirror(tmp_path / "org" / "name")
    assert is_hub(folder)
    train, validation, test = (
        load_problems(f"{folder}:easy", split, columns=COLUMNS)
        for split in ("train", "validation", "test")
    )
    assert {*answers(train), *answers(validation)} == {*range(40)}
    assert len(validation) == 4
    assert sorted(answers(test)) == [*range(100, 110)]
    [record] = caplog.records
    assert record.message == (
        f"{folder}:easy test: 10 of 11 rows used, 1 left out: 1 the answer is not a number"
    )
    few = load_problems(f"{folder}:easy", columns=COLUMNS, rows="train[:20]")
    assert {*answers(few)} < {*range(20)}
    assert "has no split 'test'; it has train; --split validation" in refusal(
        f"{folder}:hard", "test", columns=COLUMNS
    )
    assert "Config name is missing" in refusal(folder, columns=COLUMNS)


def test_a_large_split_is_not_read_whole_for_a_few_samples(tmp_path, monkeypatch):
    """And what is validated on does not depend on how many are trained on."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(own_data, "POOL", 50)
    write_jsonl(tmp_path / "set/train.jsonl", rows_of(400))
    read, read_dataset = [], own_data.read_dataset

    def counted(*arguments):
        for row in read_dataset(*arguments):
            read.append(row[0])
            yield row

    monkeypatch.setattr(own_data, "read_dataset", counted)

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
    """`datasets` itself, against a server that answers as the hub does."""
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
    assert done.stdout.splitlines()[1].startswith("data set maths/none: "), done.stdout
