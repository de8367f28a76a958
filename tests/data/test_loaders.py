import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from expected_skips import SHARED, needs_shared
from pyarrow import Table, parquet

from rlm.cli.options import UsageError
from rlm.data.loaders import (
    NamedDataset,
    OwnFile,
    check_dataset,
    load_gsm8k,
    load_problems,
    own_files,
    parse_dataset,
)
from rlm.data.problem import Problem, answer_types, as_problems
from rlm.data.splits import POOL
from rlm.grading.numbers import parse_number

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "data" / "sample_problems.jsonl"
OPENMATH_SAMPLE = ROOT / "data" / "openmathinstruct_sample.jsonl"
PUBLISHED = SHARED / "data"
GOOD = {"question": "What is 1 + 1?", "answer": "2"}


@pytest.fixture
def write(tmp_path):
    """Return a function that writes rows (objects, or lines as bytes) to a JSONL file."""

    def write(*rows, name="problems.jsonl"):
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path = tmp_path / name
        path.write_bytes(b"\n".join(lines))
        return str(path)

    return write


def read(path):
    return OwnFile(Path(path)).read()


def numbered(count, **fields):
    return [{"question": f"Question {i}?", "answer": str(i), **fields} for i in range(count)]


def questions(problems):
    return [problem.question for problem in problems]


def refusal(*arguments, **options):
    """Return the message of the UsageError that load_problems raises, which has one line."""
    with pytest.raises(UsageError) as caught:
        load_problems(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# One row.


def test_a_row_becomes_a_problem(write):
    row = {"id": 7, "problem": " How many? ", "answer": "1,000", "solution": "Count.", "level": 2}
    row |= {"topic": "sets", "weight": 0.5, "tags": ["a"], "note": None}
    # Names of a reward function's arguments are not columns.
    row |= dict.fromkeys(("self", "prompts", "completions", "completion", "reference_answer"), 1)
    [problem] = read(write(row))
    columns = {"level": 2, "topic": "sets", "weight": 0.5, "tags": ["a"], "note": None}
    assert problem == Problem("7", "How many?", "1,000", "Count.", columns)
    assert len({problem, *read(write(row))}) == 1  # it can be hashed
    problems = read(write(GOOD, b"", {**GOOD, "id": ""}))
    assert [problem.id for problem in problems] == ["problems-1", "problems-3"]


@pytest.mark.parametrize("question_field", ["question", "prompt", "problem"])
@pytest.mark.parametrize("answer_field", ["answer", "response"])
@pytest.mark.parametrize(("value", "answer"), [("5", "5"), (0.5, "0.5"), (-3, "-3"), (0, "0")])
def test_field_names_and_json_numbers(write, question_field, answer_field, value, answer):
    [problem] = read(write({question_field: "Why?", answer_field: value}))
    assert (problem.question, problem.answer, problem.columns) == ("Why?", answer, {})


def test_a_gsm8k_answer_is_taken_apart_and_keeps_its_annotations_when_asked(write):
    row = {"question": "?", "answer": "She has 2*3=<<2*3=6>>6.\n#### 6"}
    [problem] = read(write(row))
    assert (problem.answer, problem.solution) == ("6", "She has 2*3=6.")
    [problem] = read(write({**row, "solution": "Six."}))
    assert problem.solution == "Six."
    marked = load_problems(f"gsm8k:{write(row)}", "test", calculator_annotations=True)
    assert marked[0].solution == "She has 2*3=<<2*3=6>>6."
    [made] = load_problems("elementary", calculator_annotations=True, max_samples=1)
    assert "<<" in made.solution


def test_golds_that_are_no_numbers(write):
    choice = {"question": "Which?", "answer": "(b)", "answer_type": "choice", "topic": "x"}
    (problem,) = read(write(choice))
    assert (problem.answer, problem.answer_type) == ("(b)", "choice")
    assert problem.columns == {"topic": "x"}
    (problem,) = read(write({"question": "Where?", "answer": "Paris", "answer_type": "text"}))
    assert (problem.answer, problem.answer_type) == ("Paris", "text")
    assert read(write(GOOD))[0].answer_type == "number"
    (problem,) = read(write({"question": "A poem?", "answer_type": "open"}))
    assert (problem.answer, problem.answer_type) == ("", "open")
    (problem,) = read(write({"question": "A poem?", "answer": "…", "answer_type": "open"}))
    assert problem.answer == "…"  # for the reward to read
    assert as_problems([{"question": "A poem?", "answer_type": "open"}])[0].answer == ""
    kinds = [problem, problem, read(write(GOOD))[0]]
    assert answer_types(kinds) == answer_types(kinds[::-1]) == ("open", "number")
    with pytest.raises(UsageError, match='"answer_type": "open"'):
        read(write({"question": "A poem?"}))
    for row, why in [
        (choice | {"answer": "B or C"}, "not a choice"),
        (choice | {"answer_type": "essay"}, "number, choice, text"),
        (choice | {"answer_type": "number"}, "not a number"),
    ]:
        with pytest.raises(UsageError, match=why):
            read(write(row))


# Bad lines.

BAD_LINES = {
    "not JSON (Expecting value)": b"oops",
    "an object spans several lines; write one object per line (jq -c . FILE)": b"{ ",
    "not a JSON object": b"[1, 2]",
    "no field question or prompt or problem": {"answer": "1"},
    "no field answer or response": {"question": "?", "answer": None},
    "question is empty": {"question": "  ", "answer": "1"},
    "question is neither text nor a number": {"question": True, "answer": "1"},
    "the messages are not a list of objects with role": {"question": ["?"], "answer": "1"},
    "answer is neither text nor a number": {"question": "?", "answer": [[1]]},
    "the answer is an object; name one of its keys": {"question": "?", "answer": {"a": 1}},
    "the answer is not a number (line 31: 'inf')": b'{"question": "?", "answer": Infinity}',
    "the answer is not a number (line 31: 'seven or 8')": {"question": "?", "answer": "seven or 8"},
    "no number after ####": {"question": "?", "answer": "so\n#### many"},
    "not UTF-8 text": b'{"question": "\xff", "answer": "1"}',
    "surrogates not allowed": b'{"question": "\\ud800", "answer": "1"}',
    "recursion": b"[" * 100_000,
    "not UTF-8 text, because it contains NUL bytes": '{"question": 1}'.encode("utf-16-le"),
    "not JSON (Invalid control character at)": b'{"question": "a\x01b", "answer": "1"}',
    "not JSON": b'{"question": "' + b"a" * 10_000_000,  # 10 MB, cut off
}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_a_bad_line_is_left_out_and_named_and_a_file_of_them_refused(write, caplog, reason):
    path = write(*numbered(30), BAD_LINES[reason], *numbered(10, topic="more"))
    assert len(read(path)) == 40
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith(f"{path}: 40 of 41 rows used, 1 left out: 1 ")
    assert reason in record.message or f"{reason} (line 31" in record.message
    assert "(line 31" in record.message
    path = write(BAD_LINES[reason])  # and no good one
    message = refusal(path, "test")
    assert message.startswith(f"{path}: line 1: ")
    assert reason.partition(" (line 31: ")[0] in message


def test_bad_lines_are_counted_by_reason_and_too_many_refused(write, caplog):
    wrong = [{"question": "?", "answer": text} for text in ("seven", "8 or 9")]
    read(path := write(*[b"oops"] * 7, *wrong, *numbered(200)))
    [record] = caplog.records
    assert record.message == (
        f"{path}: 200 of 209 rows used, 9 left out: 7 not JSON (Expecting value) "
        "(line 1; line 2; line 3; line 4; line 5; and 2 more); "
        "2 the answer is not a number (line 8: 'seven'; line 9: '8 or 9'); "
        "question from question, answer from answer"
    )
    path = write(*numbered(18), b"oops", b"oops")
    assert refusal(path) == (
        f"{path}: line 19: not JSON (Expecting value) (2 of 20 lines are invalid: fix them)"
    )
    row = {**GOOD, "id": "a"}
    assert len(read(write(row, *numbered(30), row))) == 31
    assert "1 duplicate id (line 32: 'a')" in caplog.text


def test_what_is_left_out_is_said_once_for_train_and_validation(write, caplog):
    path = write(b"oops", *numbered(30))
    for split in ("train", "validation"):
        load_problems(path, split)
    assert len(caplog.records) == 1


def test_byte_order_mark_crlf_and_blank_lines_do_no_harm(write, caplog):
    line = json.dumps(GOOD).encode()
    path = write(b"\xef\xbb\xbf" + line + b"\r", b"\r", line + b"\r", b"")
    assert questions(read(path)) == ["What is 1 + 1?"] * 2
    assert not caplog.records


def test_a_file_that_cannot_be_read_is_refused(tmp_path, write):
    missing = tmp_path / "missing.jsonl"
    assert (
        refusal(str(missing)) == f"cannot read the data file {missing}: No such file or directory"
    )
    (tmp_path / "folder.jsonl").mkdir()
    assert "Is a directory" in refusal(str(tmp_path / "folder.jsonl"))
    needs = "contains no problems: it is empty; write a row for each problem, with a question and"
    assert needs in refusal(write())
    assert "line 1: not UTF-8 text (1 of 1 lines are invalid" in refusal(
        write(b'{"question": "\xb8"}')
    )
    assert "contains no gsm8k_train.jsonl or" in refusal(f"gsm8k:{tmp_path}")
    assert "contains no aime2024.jsonl" in refusal(f"aime2024:{tmp_path}", "test")


# Splits and order.


def test_the_splits_of_a_file(write):
    rows = numbered(500)
    path = write(*rows)
    train, validation = (load_problems(path, split) for split in ("train", "validation"))
    assert len(validation) == 50
    everything = load_problems(path, "test")
    assert sorted(questions(everything)) == sorted(row["question"] for row in rows)
    assert sorted(questions(train + validation)) == sorted(questions(everything))
    shuffled = write(*reversed(rows), name="reversed.jsonl")
    for split in ("validation", "test"):
        for count in (None, 20):
            mine, other = (load_problems(p, split, max_samples=count) for p in (path, shuffled))
            assert questions(mine) == questions(other)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_the_first_of_a_sorted_file_are_not_its_easiest(write, split):
    path = write(*numbered(1000))
    places = [int(p.id.rpartition("-")[2]) for p in load_problems(path, split, max_samples=60)]
    assert min(places) < 200
    assert max(places) > 800
    assert 300 < sum(places) / len(places) < 700


def test_a_question_is_in_one_split_only_and_validation_has_1_to_200(write):
    path = write(*numbered(20), *numbered(20), *numbered(20))
    train, validation = (load_problems(path, split) for split in ("train", "validation"))
    assert len(train + validation) == 60
    assert not set(questions(train)) & set(questions(validation))
    assert len(load_problems(write(*numbered(3000)), "validation")) == 200
    assert len(load_problems(write(*numbered(2)), "train")) == 1
    path = write(GOOD, GOOD)
    assert len(load_problems(path, "test")) == 2
    assert "one question is too few" in refusal(path, "train")


@pytest.mark.parametrize("dataset", [str(SAMPLE), "word-problems", "word-problems:1,3", None])
def test_the_seed_shuffles_train_alone_and_max_samples_keeps_the_first(write, dataset):
    dataset = dataset or write(*numbered(100))
    for split in ("train", "validation", "test"):
        options = {"split": split, "max_samples": 50}
        one, again, two = (load_problems(dataset, seed=seed, **options) for seed in (1, 1, 2))
        assert one == again
        assert (one == two) == (split != "train")
        assert load_problems(dataset, split, seed=1, max_samples=3) == one[:3]


@pytest.mark.parametrize("name", ["word-problems", "elementary"])
def test_solutions_in_sentences_are_of_the_same_problems(name):
    lines, told = (
        load_problems(f"{name}:{s}", "test", max_samples=9) for s in ("1", "1,sentences")
    )
    for plain, sentence in zip(lines, told, strict=True):
        equation = plain.solution.partition(": ")[2]
        assert sentence.solution.endswith(".")
        assert equation in sentence.solution
        assert replace(sentence, solution=plain.solution) == plain
    assert {p.columns["level"] for p in load_problems(f"{name}:sentences", "test")} > {1, 2}


@pytest.mark.parametrize(
    ("dataset", "split", "expected"),
    [
        ("gsm9k", "train", "use gsm8k, openmathinstruct, aime2024, aime2025, word-problems, elem"),
        ("no/such/data", "train", "unknown dataset 'no/such/data'; use gsm8k, "),
        ("GSM9k", "train", "unknown dataset 'GSM9k' (did you mean gsm8k?); use gsm8k, "),
        ("word-problem:1", "train", "'word-problem:1' (did you mean word-problems?); use"),
        ("word-problems:x", "train", "write levels as 2, 1-2 or 1,3, or sentences"),
        ("word-problems:", "train", "write levels as 2, 1-2 or 1,3"),
        ("word-problems:7", "train", "unknown level"),
        ("word-problems:2-1", "train", "no family of problems"),
        ("word-problems", "dev", "it has train, validation, test, test_families"),
        (str(SAMPLE), "test_families", "it has train, validation, test"),
        (
            "openai/gsm8k:all",
            "train",
            "No such file or directory; the configs of gsm8k are main, so",
        ),
        ("aime2024:all", "test", "cannot read the data file all: No such file or directory"),
        ("aime2024", "train", "aime2024 has no split 'train'; it has test"),
        ("openmathinstruct", "test", "it has train, validation"),
    ],
)
def test_what_is_not_known_is_refused(dataset, split, expected):
    assert expected in refusal(dataset, split)
    if expected.startswith("it has"):  # a good name
        assert "at least 1" in refusal(dataset, max_samples=0)


# Several datasets.


def test_data_sets_joined_by_plus_are_shuffled_together(write):
    path = write(*numbered(40))
    names, spec = ("elementary:1", path), f"elementary:1+{path}"
    train = load_problems(spec, "train", max_samples=20, seed=1)
    parts = [load_problems(name, "train", max_samples=20, seed=1) for name in names]
    by_id = {problem.id: problem for part in parts for problem in part}
    assert {problem.id: problem for problem in train} == by_id
    assert len(train) == 40
    own = [problem in parts[1] for problem in train]
    assert 4 < sum(own[:20]) < 16  # mixed, not one after the other
    assert train == load_problems(spec, "train", max_samples=20, seed=1)
    other = load_problems(spec, "train", max_samples=20, seed=2)
    assert [p.id for p in other] != [p.id for p in train]
    held_out = [load_problems(name, "validation", max_samples=3) for name in names]
    assert load_problems(spec, "validation", max_samples=3) == [*held_out[0], *held_out[1]]


def test_a_plus_inside_a_path_joins_nothing(write, tmp_path):
    file = tmp_path / "a+b.jsonl"
    file.write_text(Path(write(*numbered(20))).read_text())
    assert len(load_problems(str(file), "test")) == 20
    assert parse_dataset(str(file)) == [OwnFile(file)]
    spec = f"elementary+{SAMPLE}"
    assert parse_dataset(spec) == [NamedDataset("elementary"), OwnFile(Path(SAMPLE))]
    assert own_files(spec) == {Path(SAMPLE).resolve()}
    assert own_files("elementary+gsm8k:/a+b") == set()
    assert "unknown dataset 'elementary+gsm9k'" in refusal("elementary+gsm9k", "train")
    assert "ids are in more than one of the datasets" in refusal(f"{SAMPLE}+{SAMPLE}", "test")


# Word problems.


def test_word_problems_have_columns_and_default_sizes():
    train = load_problems("word-problems")
    assert len(train) == 2000
    assert {problem.columns["level"] for problem in train} == {1, 2, 3, 4}
    assert all(problem.columns["family"] and problem.solution for problem in train)
    assert len({problem.id for problem in train}) == len(train)
    assert len(load_problems("word-problems", "test_families")) == 500
    few = {"dataset": "word-problems", "split": "test_families", "max_samples": 9}
    assert load_problems(**few) == load_problems(**few, seed=1)


@pytest.mark.parametrize(
    ("spec", "levels"), [("2", {2}), ("1-2", {1, 2}), ("1,3", {1, 3}), ("1-2,4", {1, 2, 4})]
)
def test_word_problems_of_some_levels(spec, levels):
    problems = load_problems(f"word-problems:{spec}", max_samples=60)
    assert {problem.columns["level"] for problem in problems} == levels


# Our samples.


def test_the_sample_problems():
    problems = read(SAMPLE)
    assert len(problems) == 10
    for problem in problems:
        last_step = problem.solution.splitlines()[-1].rpartition("=")[2].split()[0]
        if problem.answer != "3/4":
            assert parse_number(last_step) == parse_number(problem.answer)


def test_openmathinstruct_takes_correct_solutions_with_a_number_and_code_on_request(caplog):
    caplog.set_level(logging.INFO)

    def both(**options):
        spec = f"openmathinstruct:{OPENMATH_SAMPLE}"
        return [p for s in ("train", "validation") for p in load_problems(spec, s, **options)]

    assert sorted(problem.answer for problem in both()) == ["84", "9"]
    assert all(text in caplog.text for text in ("1 with code", "2 wrong", "1 without a number"))
    problems = both(keep_code=True)
    [with_code] = [problem for problem in problems if "<llm-code>" in problem.solution]
    assert "<llm-code-output>\n84\n</llm-code-output>" in with_code.solution
    assert len(problems) == 3


def openmath_row(number, **fields):
    row = {"question": f"Question {number}?", "expected_answer": str(number)}
    return row | {"generated_solution": f"It is {number}.", "is_correct": True} | fields


def test_an_openmathinstruct_directory_has_its_own_validation_split(tmp_path, write):
    (tmp_path / "correct_solutions").mkdir()
    for split, rows in {"train": range(9), "validation": range(9, 12)}.items():
        write(*map(openmath_row, rows), name=f"correct_solutions/{split}.jsonl")
    spec = f"openmathinstruct:{tmp_path}"
    assert len(load_problems(spec, "train", max_samples=20)) == 9
    assert [p.answer for p in load_problems(spec, "validation")] == ["9", "10", "11"]


def test_the_validation_split_of_one_openmathinstruct_file_is_always_the_same(write, monkeypatch):
    spec = f"openmathinstruct:{write(*map(openmath_row, range(40)))}"
    whole = load_problems(spec, "validation")
    monkeypatch.setattr("rlm.data.loaders.POOL", 5)
    assert load_problems(spec, "validation", max_samples=2) == whole[:2]
    assert not {*questions(load_problems(spec, "train", max_samples=2))} & {*questions(whole)}


def test_openmathinstruct_without_a_usable_row_says_what_was_left_out(write):
    rows = openmath_row(1, is_correct=False), openmath_row(2, generated_solution="<llm-code>")
    message = refusal(f"openmathinstruct:{write(*rows)}")
    assert "1 wrong" in message
    assert "--keep-code" in message
    path = write(openmath_row(1, is_correct="true"))
    assert "line 1: is_correct is neither true nor false" in refusal(f"openmathinstruct:{path}")


# The published files.


@needs_shared("data")
def test_every_gold_of_gsm8k_is_read(tmp_path):
    lines = (PUBLISHED / "gsm8k_train.jsonl").read_text().splitlines()
    published = [json.loads(line)["question"].strip() for line in lines]
    validation, test = (load_gsm8k(split, path=PUBLISHED) for split in ("validation", "test"))
    train = load_problems(f"gsm8k:{PUBLISHED}", "train")
    assert [len(published), len(train), len(validation), len(test)] == [7473, 7273, 200, 1319]
    assert not set(questions(train)) & set(questions(validation))
    assert questions(validation) == published[:200]
    assert {*questions(train)} == {*published[200:]}
    # As published, the train split is the whole file, including the 200 validation problems.
    (tmp_path / "gsm8k_train.jsonl").write_text("\n".join(lines[:203]))
    assert load_gsm8k(path=tmp_path)[:200] == validation
    assert questions(load_gsm8k(path=tmp_path)) == published[:203]
    assert load_gsm8k(path=tmp_path / "gsm8k_train.jsonl", max_samples=3) == validation[:3]
    assert validation[0].question.startswith("Natalia sold clips")
    assert test[0].id == "gsm8k-test-1"
    for problem in train + validation + test:
        assert parse_number(problem.answer) is not None
        assert problem.solution
        assert "<<" not in problem.solution
        assert "####" not in problem.solution
    assert load_gsm8k("test", 50, PUBLISHED / "gsm8k_test.jsonl") == test[:50]


@needs_shared("data")
@pytest.mark.parametrize("year", [2024, 2025])
def test_aime(year):
    problems = load_problems(f"aime{year}:{PUBLISHED}", "test")
    assert len(problems) == 30
    assert problems[0].id == f"aime{year}_001"
    assert all(0 <= parse_number(problem.answer) <= 999 for problem in problems)
    assert problems == load_problems(f"aime{year}:{PUBLISHED / f'aime{year}.jsonl'}", "test")


# The hub.


class DatasetsError(Exception):
    """The base class of the errors of `datasets`."""


@pytest.fixture
def hub(monkeypatch):
    """Replace `datasets` and `huggingface_hub`; return their rows, their calls and their state."""
    state = SimpleNamespace(
        rows=[], calls=[], down=None, config=SimpleNamespace(HF_HUB_OFFLINE=False)
    )

    def load_dataset(**arguments):
        state.calls.append({**arguments, "offline": state.config.HF_HUB_OFFLINE})
        if isinstance(state.rows, Exception):
            raise state.rows
        return iter(state.rows)

    class HfApi:
        def dataset_info(self, repo_id, timeout):
            assert 0 < timeout <= 10
            if state.down:
                raise state.down

    exceptions = SimpleNamespace(DatasetsError=DatasetsError)
    library = SimpleNamespace(load_dataset=load_dataset, config=state.config, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=HfApi))
    return state


GSM8K = [{"question": f"Question {i}?", "answer": f"So.\n#### {i}"} for i in range(20)]


def test_gsm8k_from_the_hub(hub):
    hub.rows = GSM8K
    assert questions(load_gsm8k("train")) == [row["question"] for row in GSM8K]
    assert load_gsm8k() == load_gsm8k("train")
    assert len(load_gsm8k("validation")) == 2
    assert len(load_gsm8k("test", 4)) == 4
    assert [(call["path"], call["name"], call["split"]) for call in hub.calls] == [
        *[("openai/gsm8k", "main", "train")] * 4,
        ("openai/gsm8k", "main", "test"),
    ]


@pytest.mark.parametrize("folder", ["main", "."])
def test_gsm8k_from_the_hubs_parquet(tmp_path, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    file = tmp_path / folder / "train-00000-of-00001.parquet"
    parquet.write_table(Table.from_pylist(GSM8K), file)
    for path in (tmp_path, file):
        problems = load_gsm8k(split="train", path=path)
        assert [(p.question, p.answer) for p in problems] == [
            (f"Question {i}?", str(i)) for i in range(20)
        ]
        assert load_gsm8k("validation", path=path) == problems[:2]
        assert len(load_problems(f"gsm8k:{path}", "train")) == 18
    file.write_bytes(b"PAR1 and no more")
    assert refusal(f"gsm8k:{file}").startswith(f"cannot read the data file {file}: ")
    assert "no gsm8k_test.jsonl or test.jsonl or main/test-00000-of-00001.parquet" in refusal(
        f"gsm8k:{tmp_path}", "test"
    )
    assert refusal(f"gsm8k:{tmp_path / 'none.parquet'}").startswith("cannot read the data file")


def test_aime_from_the_hub(hub):
    hub.rows = [{"id": 60, "problem": "?", "answer": "025", "year": "2024"}]
    [problem] = load_problems("aime2024", "test")
    assert (problem.id, problem.answer, problem.columns) == ("60", "025", {"year": "2024"})
    assert hub.calls[0]["split"] == "train"


def test_openmathinstruct_is_streamed_until_the_pool_is_full(hub):
    read = []
    hub.rows = (read.append(i) or openmath_row(i) for i in range(3 * POOL))
    problems = load_problems("openmathinstruct", "train", max_samples=10)
    assert len(problems) == 10
    assert len(read) == POOL
    assert hub.calls[0]["streaming"] is True
    assert max(int(problem.answer) for problem in problems) > 1000


@pytest.mark.parametrize(
    "down", [ConnectionError("no route to host"), httpx2.ConnectTimeout("too slow")], ids=repr
)
def test_a_hub_out_of_reach_falls_back_to_its_cache(hub, down):
    hub.down = down
    hub.rows = [{"question": "?", "answer": "#### 1"}]
    assert len(load_gsm8k("test")) == 1
    assert hub.calls[0]["offline"]
    assert not hub.config.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("Couldn't reach it\non the Hub"), "the hub is out of reach"),
        (DatasetsError("gated\ndataset"), "gated dataset"),
        (httpx2.ReadTimeout("the read operation timed out"), "the read operation timed out"),
        (ValueError("no such configuration"), "no such configuration"),
    ],
)
def test_a_failure_of_the_hub_is_one_line_that_names_the_ways_out(hub, error, reason):
    hub.rows = error
    assert refusal("gsm8k") == (
        f"dataset gsm8k: {reason}; offline, use --dataset word-problems or a JSONL file "
        "(--dataset gsm8k:PATH for downloaded files)"
    )
    assert not hub.config.HF_HUB_OFFLINE


def test_a_path_that_may_be_mistyped_is_named_with_its_folder(hub, tmp_path, monkeypatch):
    hub.rows = ConnectionError("Couldn't reach it")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai").mkdir()
    said = "the hub is out of reach (the folder openai contains no gsm8k); offline, use"
    assert said in refusal("gsm8k")


def test_a_bug_behind_the_hub_keeps_its_traceback(hub):
    hub.rows = TypeError("load_dataset() got an unexpected argument")
    with pytest.raises(TypeError):
        load_gsm8k("test")
    assert not hub.config.HF_HUB_OFFLINE


def test_the_real_hub_library_told_to_stay_offline_prints_nothing_but_our_line(tmp_path):
    code = (
        "from rlm.cli.options import UsageError\nfrom rlm.data.loaders import load_gsm8k\n"
        "try:\n    load_gsm8k()\nexcept UsageError as error:\n    print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.startswith("dataset gsm8k: the hub is out of reach; offline, use")
    assert result.stderr == ""


# --- names on the hub, and what SFT is shown of a solution ------------------------------


@pytest.mark.parametrize(
    ("name", "known_as"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("OpenAI/GSM8K", "gsm8k"),
        ("GSM8K", "gsm8k"),
        ("nvidia/OpenMathInstruct-1", "openmathinstruct"),
        ("HuggingFaceH4/aime_2024", "aime2024"),
        ("Word-Problems:1", "word-problems:1"),
        ("openai/gsm8k:a/Directory", "gsm8k:a/Directory"),
        ("Mine.jsonl", "Mine.jsonl"),
    ],
)
def test_names_of_data_sets(name, known_as):
    assert [str(part) for part in parse_dataset(name)] == [known_as]


@pytest.mark.parametrize("dataset", ["aime2024:no/such", "elementary+gsm8k:no/such", "rollouts"])
def test_missing_files_are_found_before_the_data_is_read(dataset):
    with pytest.raises(UsageError, match=r"no/such: No such file|name the file"):
        check_dataset(dataset)


def test_a_solution_that_is_only_the_answer_has_no_steps():
    rows = [("34", "34"), ("34", r"\boxed{34}"), ("B", "b"), ("34", ""), ("34", "30 + 4 = 34")]
    problems = [Problem("1", "?", answer, solution) for answer, solution in rows]
    assert [problem.has_steps for problem in problems] == [False] * 4 + [True]
