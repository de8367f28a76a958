"""`eval.py --audit-reward`: several graders judge the samples of a run."""

import json
import time
from contextlib import closing

import pytest
from conftest import exit_code

import eval as evaluate
from rlm.cli.options import UsageError
from rlm.data.prompts import FORMATS
from rlm.evaluation import audit as module
from rlm.evaluation.audit import MathVerify, audit_run, audit_samples

TAGS = FORMATS["deepseek"]
GROUPS = [
    {
        "step": 0,
        "problem": "a",
        "answer": "18",
        "completions": [
            TAGS.completion("so", "18"),  # all agree
            r"<think>so</think>\boxed{18}",  # strict misses it
            "<think>so</think>The answer is 18.",  # strict misses it
            TAGS.completion("so", "17"),
        ],
        "rewards": [1.0, 0.0, 0.0, 1.0],  # the last: a reward that is not strict correctness
    },
    {
        "step": 1,
        "problem": "b",
        "answer": "1/2",
        "completions": [TAGS.completion("so", "0.5"), "<think>0.5"],
        "rewards": [1.0, None],
    },
]


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "samples.jsonl").write_text("".join(json.dumps(g) + "\n" for g in GROUPS))
    (path / "config.json").write_text('{"reasoning_format": "deepseek"}')
    return path


def test_counts_of_two_graders():
    open_answer = GROUPS[0] | {"answer_type": "open", "answer": ""}  # no grader judges it
    result = audit_samples([open_answer, *GROUPS], TAGS, None, None)
    assert result.completions == 6
    assert result.correct == {"strict": 2, "lenient": 4}
    assert result.differ == {"lenient right, strict wrong": 2}
    assert result.reasons == {"no_answer": 2}
    assert result.reward_differs_from_strict == 1
    found = result.false_negatives()["lenient"]
    assert (found["share"], found["of"]) == (0.5, 4)
    assert 0 < found["low"] < 0.5 < found["high"] < 1
    (examples,) = result.examples.values()
    assert [example["strict"] for example in examples] == ["no_answer", "no_answer"]
    assert audit_samples(GROUPS, TAGS, None, 3).completions == 3


def test_a_third_opinion_is_asked_about_the_answer_alone():
    asked = []

    class Second(MathVerify):
        def __call__(self, gold, text):
            asked.append((gold, text))
            return None if gold == "1/2" else r"\boxed{18}" in text

    result = audit_samples(GROUPS, TAGS, Second(), None)
    assert asked[1] == ("18", r"\boxed{18}")
    assert result.correct["math-verify"] == 1
    assert result.differ["math-verify right, strict wrong"] == 1
    assert result.differ["strict right, math-verify wrong"] == 1  # <answer>18</answer>
    assert result.differ["lenient right, math-verify wrong"] == 2


def test_a_grader_that_hangs_dies_or_starts_too_slowly_is_stopped_by_the_clock(monkeypatch):
    slow = "import sys, time, json\nprint('ready', flush=True)\nfor line in sys.stdin:\n"
    slow += "    gold, text = json.loads(line)\n"
    slow += "    time.sleep(60) if text == 'slow' else None\n"
    slow += "    sys.exit() if text == 'dies' else print('true', flush=True)\n"
    monkeypatch.setattr(module, "WORKER", slow)
    monkeypatch.setattr(module, "TIME_LIMIT", 0.3)
    asked = ["fast", "slow", "slow", "fast", "dies", "fast"]  # the second by a fresh process
    with closing(MathVerify()) as second:
        started = time.monotonic()
        assert [second("1", text) for text in asked] == [True, None, None, True, None, True]
        assert time.monotonic() - started < 20  # the limits, and starting Python
        assert second.timeouts == 3
    late = "import time\ntime.sleep(1)\nprint('ready', flush=True)\ntime.sleep(60)\n"
    monkeypatch.setattr(module, "WORKER", late)
    monkeypatch.setattr(module, "START_LIMIT", 0.2)
    monkeypatch.setattr(module, "TIME_LIMIT", 2.0)
    with closing(MathVerify()) as second:
        assert second("1", "1") is None  # its late greeting is nobody's answer
        assert second.timeouts == 1


def test_math_verify_itself():
    pytest.importorskip("math_verify", reason="an extra: pip install -e '.[verify]'")
    with closing(MathVerify()) as second:
        assert second("18", r"\boxed{18}") is True
        assert second("18", r"\boxed{17}") is False
        assert second("1/2", r"$\frac{1}{2}$") is True
        assert second("18", r"\boxed{9^{9^{9^{9}}}}") in (False, None)
        assert second("18", r"\boxed{18}") is True  # and it goes on


def test_from_the_command_line(run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(MathVerify, "installed", staticmethod(lambda: False))
    argv = ["--audit-reward", "--run-dir", run_dir, "--output", tmp_path / "out"]
    assert exit_code(evaluate, evaluate.EvaluateConfig, *argv) == 0
    out = capsys.readouterr().out
    assert "rejected by strict, of those that lenient accepts: 50.0%" in out
    assert "lenient accepts 2 completions that strict rejects" in out
    assert "math-verify is not installed" in out
    written = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert written["false_negatives_of_strict"]["lenient"]["share"] == 0.5
    assert len(written["examples"]["lenient right, strict wrong"]) == 2


def test_samples_that_are_not_there_or_torn(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(MathVerify, "installed", staticmethod(lambda: False))
    with pytest.raises(UsageError, match="--run-dir"):
        audit_run(tmp_path / "nowhere", tmp_path)
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(UsageError, match=r"config\.json does not exist"):
        audit_run(tmp_path, tmp_path)
    with (run_dir / "samples.jsonl").open("a") as stream:
        stream.write('{"step": 2, "torn')
    assert audit_run(run_dir, tmp_path) == 0
    assert json.loads((tmp_path / "audit.json").read_text())["completions"] == 6
    with pytest.raises(UsageError, match=r"--output .* cannot be written"):
        audit_run(run_dir, tmp_path / "audit.json")
    (run_dir / "samples.jsonl").write_text("")
    with pytest.raises(UsageError, match="no completions"):
        audit_run(run_dir, tmp_path)
    for text in ("{", "[1]"):
        (run_dir / "config.json").write_text(text)
        with pytest.raises(UsageError, match=r"config\.json is not a JSON object"):
            audit_run(run_dir, tmp_path)
