"""docs/how-to/evaluate-with-lm-eval.md and the task that it uses, without lm-eval itself."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from rlm.data import FORMATS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/how-to/evaluate-with-lm-eval.md").read_text(encoding="utf-8")
TASK = yaml.safe_load((ROOT / "examples/lm_eval/rlm_numbers.yaml").read_text(encoding="utf-8"))


def blocks(language):
    """The fenced blocks of a language, "" for shell commands."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.M | re.S)
    return [block for name, block in found if name == language]


def commands():
    return [shlex.split(line) for block in blocks("") for line in block.splitlines()]


def test_lm_eval_is_given_this_task_and_the_system_prompt_of_training():
    theirs = [words for words in commands() if words[0].endswith("/lm_eval")]
    assert len(theirs) == 2
    for words in theirs:
        assert words[words.index("--tasks") + 1] == TASK["task"]
        assert words[words.index("--include_path") + 1] == "examples/lm_eval"
    system = theirs[1][theirs[1].index("--system_instruction") + 1]
    assert system == FORMATS["deepseek"].system_prompt


def test_the_python_block_writes_what_the_task_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("python")
    exec(block, {})
    rows = [json.loads(line) for line in Path("problems.jsonl").read_text().splitlines()]
    assert len(rows) == 200
    assert {*rows[0]} == {"question", "answer"} == {*re.findall(r"{{(\w+)}}", str(TASK))}
    assert TASK["dataset_kwargs"]["data_files"] == {"test": "problems.jsonl"}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("1,080", "1,080"),
        ("3/4", "3/4"),
        ("-7", "-7"),
        ("<think>\n6 * 7 = 42\n</think>\n<answer>42</answer>", "42"),
        ("<think>\n6 * 7 = 42", "42"),  # lm-eval has no strict format
        ("none", None),
    ],
)
def test_the_filter_takes_the_last_number(text, number):
    ((first, _),) = [each["filter"] for each in TASK["filter_list"]]
    found = re.findall(first["regex_pattern"], text)
    assert (found[-1] if found else None) == number
