"""`evaluate` without a model, its summary, and its tables and figures."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from conftest import byte_tokenizer

from rlm.cli import terminal
from rlm.data.problem import Problem
from rlm.data.prompts import FORMATS
from rlm.evaluation.config import default_split, pairs_to_compare
from rlm.evaluation.evaluator import Evaluation, Graded, evaluate
from rlm.evaluation.report import show_table, summarize, write_report
from rlm.evaluation.statistics import summarize_scores
from rlm.grading.answers import Verdict
from rlm.grading.numbers import parse_number
from rlm.model import AdapterInfo
from rlm.model.adapters import ADAPTER_FILES, adapter_hash
from rlm.runs.plots import accuracy_bars, accuracy_over_time, learning_curves, recent_means
from rlm.sampling import Completion, prompt_seed

PNG = b"\x89PNG\r\n"


@pytest.mark.parametrize(
    ("dataset", "trained_on", "split"),
    [
        ("gsm8k", "openmathinstruct", "test"),
        ("openmathinstruct", "word-problems", "validation"),
        ("gsm8k+rollouts:kept.jsonl", None, "validation"),
        ("hub", "hub", "validation"),
        ("hub", "other.jsonl", "validation"),
        ("gsm8k:hub/train.jsonl", "gsm8k:hub/train.jsonl", "validation"),  # one file, no test
        ("gsm8k:hub/train.jsonl", "gsm8k:/elsewhere/train.jsonl", "validation"),
        ("gsm8k:hub/train.jsonl", "gsm8k", "test"),
        ("hub/train.jsonl", "/elsewhere/train.jsonl", "validation"),
        ("hub/train.jsonl", "/elsewhere/other.jsonl", "test"),
    ],
)
def test_a_dataset_without_a_test_split_is_evaluated_on_validation(
    tmp_path, monkeypatch, dataset, trained_on, split
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    adapter = AdapterInfo(tmp_path, dataset=trained_on, run={"config": {"split": "train[:20]"}})
    assert default_split(dataset, [adapter]) == split


# --- Evaluation -----------------------------------------------------------------------------------


def verdict(reason, answer=None):
    return Verdict(reason == "correct", reason, answer, answer and parse_number(answer))


def graded(strict, lenient=None, *, answer=None, tokens=10, truncated=False):
    verdicts = verdict(strict, answer), verdict(lenient or strict, answer)
    return Graded("", *verdicts, [0] * tokens, truncated)


def problem(id="a", question="1 + 1?", answer="2", **columns):
    return Problem(id=id, question=question, answer=answer, solution="", columns=columns)


def test_right_answers_with_a_wrong_equation_are_counted_among_the_right_ones():
    texts = {
        "1 + 1 = 2": "correct",
        "1 + 1 = 3": "correct",
        "3 * 3 = <<3*3=9>>8": "no_reasoning",  # right leniently
        "2 + 2 = 5": "wrong",
    }
    group = [replace(graded(reason), text=text) for text, reason in texts.items()]
    group[2] = replace(group[2], lenient=verdict("correct"))
    result = Evaluation([problem()], [group])
    assert result.right_with_wrong_equation(strict=True) == {"count": 1, "rate": 1 / 2}
    assert result.right_with_wrong_equation(strict=False) == {"count": 2, "rate": 2 / 3}
    none_right = Evaluation([problem()], [[graded("wrong")]])
    assert none_right.right_with_wrong_equation(strict=True) == {"count": 0, "rate": 0.0}


def test_evaluation_of_one_completion_each():
    columns = {"family": "apples", "level": 1}, {"family": "apples", "level": 2}
    columns += {"family": "pears", "level": 2}, {}
    completions = (
        graded("correct", tokens=10),
        graded("wrong", tokens=20),
        graded("no_reasoning", "correct", tokens=30),
        graded("unclosed_reasoning", tokens=40, truncated=True),
    )
    result = Evaluation([problem(**c) for c in columns], [[each] for each in completions])
    assert result.per_problem(strict=True) == [1, 0, 0, 0]
    assert result.accuracy(strict=True) == summarize_scores([1, 0, 0, 0], trials=True)
    assert result.accuracy(strict=False)["correct"] == 2
    assert result.format_rate == 0.5  # right or wrong, one number stood where it belongs
    assert result.truncated_rate == 0.25
    assert result.length_mean == 25
    assert result.reasons(strict=False) == {"correct": 2, "wrong": 1, "unclosed_reasoning": 1}
    families = result.by_column("family", strict=False)
    counts = {name: (found["correct"], found["total"]) for name, found in families.items()}
    assert counts == {"apples": (1, 2), "pears": (1, 1)}
    assert list(result.by_column("level", strict=True)) == ["1", "2"]
    assert result.by_column("year", strict=True) == {}


def test_evaluation_of_several_completions_each():
    right, wrong, mute = (
        graded("correct", answer="1,000"),
        graded("wrong", answer="7"),
        graded("no_answer"),
    )
    groups = [
        [right, graded("correct", answer="1000.0"), wrong, mute],  # two spellings, one number
        [right, wrong, mute, mute],  # a tie of two
        [mute, mute, mute, mute],
    ]
    result = Evaluation([problem()] * 3, groups)
    assert result.per_problem(strict=True) == [0.5, 0.25, 0]
    assert result.accuracy(strict=True)["mean"] == pytest.approx(0.25)
    assert result.majority_accuracy(strict=True)["mean"] == pytest.approx((1 + 0.5 + 0) / 3)
    for k, expected in {1: 0.25, 2: (1 - 1 / 6 + 1 - 3 / 6 + 0) / 3, 4: 2 / 3}.items():
        assert result.pass_at(k, strict=True)["mean"] == pytest.approx(expected)
    interval = result.accuracy(strict=True)
    assert 0 <= interval["low"] <= interval["mean"] <= interval["high"] <= 0.5


def test_a_row_is_compared_with_the_one_above_it_and_better_is_positive(
    tmp_path, monkeypatch, capsys
):
    """The base model solves one of four problems, and the adapter this one and two more."""
    monkeypatch.setattr("rlm.evaluation.report.accuracy_bars", lambda *_: None)
    right, wrong = graded("correct"), graded("wrong")
    worse, better = (
        Evaluation([problem()] * 4, [[g] for g in groups])
        for groups in ([right, wrong, wrong, wrong], [right, right, right, wrong])
    )
    rows = {"base": {"greedy": worse}, "SFT": {"greedy": better}}
    write_report(rows, [("base", "SFT")], "toys", {}, tmp_path)
    said = json.loads((tmp_path / "evaluation.json").read_text())["greedy"]["compared"]
    assert list(said) == ["SFT − base"]
    for grading in ("strict", "lenient"):
        assert said["SFT − base"][grading]["points"] == 50
        assert said["SFT − base"][grading]["mcnemar_p"] == 0.5  # two against none: 2 / 2²
    shown = capsys.readouterr().out
    assert "SFT − base: +50.0 (+0.0 to +100.0) points strict\n" in shown
    assert "warning: with fewer than 6 problems, no difference is significant" in shown
    assert "wrong equation" not in shown  # it is in the file


def test_a_reward_of_ones_own_has_a_column_and_is_compared_in_pairs(tmp_path, capsys):
    """Open answers have no accuracy. The mean ignores a completion without a verdict."""
    asked = [replace(problem(), answer_type="open")] * 3
    groups = [[graded("ungraded")]] * 3
    before = Evaluation(asked, groups, [[0.0], [0.5], [None]])
    after = Evaluation(asked, groups, [[0.5], [1.0], [1.0]])
    assert after.mean_reward()["mean"] == pytest.approx(2.5 / 3)
    assert Evaluation(
        asked, [[*g, *g] for g in groups], [[0, 1], [None, 1], [None] * 2]
    ).mean_reward() == ({"mean": 0.75, "low": 0.5, "high": 1.0})
    rows = {"SFT": {"greedy": before}, "GRPO": {"greedy": after}}
    about = {"same_weights": [["SFT", "GRPO"]]}
    (tmp_path / "accuracy.png").touch()  # of an earlier evaluation
    write_report(rows, [("SFT", "GRPO")], "toys", about, tmp_path)
    said = json.loads((tmp_path / "evaluation.json").read_text())["greedy"]
    assert said["compared"] == {"GRPO − SFT": {"reward": {"points": 0.5, "low": 0.5, "high": 0.5}}}
    assert "strict" not in said["rows"]["GRPO"]
    assert "reward" not in summarize(replace(after, rewards=[[None]] * 3))  # NaN is not JSON
    assert (tmp_path / "failures.jsonl").read_text() == ""
    assert not (tmp_path / "accuracy.png").exists()
    out = capsys.readouterr().out
    assert "GRPO − SFT: reward +0.500 (+0.500 to +0.500) (both have the same weights)" in out
    assert "0.25 (0.00–0.50)" in out


@pytest.mark.parametrize("on_a_terminal", [True, False])
def test_a_table_has_a_column_for_every_key_and_no_cell_is_cut(monkeypatch, on_a_terminal):
    monkeypatch.setattr(terminal.console, "_force_terminal", on_a_terminal)
    rows = {"base": {"accuracy": 1, "wide": "x" * 250}, "SFT": {"tokens": 3, "wide": ""}}
    with terminal.console.capture() as said:
        show_table("toys", rows, "model")
    lines = said.get().splitlines()
    title, heads, _, base, sft = (line.split() for line in lines if line.strip())
    assert (title, heads) == (["toys"], ["model", "accuracy", "wide", "tokens"])
    assert (base, sft) == (["base", "1", "x" * 250], ["SFT", "3"])


# --- evaluate -------------------------------------------------------------------------------------


TOKENIZER = byte_tokenizer()


class ScriptedSampler:
    """A sampler that returns the given texts in turn."""

    def __init__(self, *texts):
        self.texts = texts

    def sample(self, prompts, n, params, seeds, on_finish):
        self.prompts = [TOKENIZER.decode(prompt) for prompt in prompts]
        self.n, self.params, self.seeds = n, params, seeds
        texts = itertools.cycle(self.texts)
        groups = []
        for _ in prompts:
            groups.append([])
            for _ in range(n):
                ids = TOKENIZER.encode(next(texts), add_special_tokens=False)
                reason = "stop" if ids[-1] == TOKENIZER.eos_token_id else "length"
                groups[-1].append(Completion(ids, [0.0] * len(ids), reason))
                on_finish()
        return groups


DEEPSEEK = FORMATS["deepseek"]
PROBLEMS = [problem("p1", "What is 40 + 2?", "42"), problem("p2", "What is 50 + 3?", "53")]


def evaluated(sampler, problems=PROBLEMS, format=DEEPSEEK, **options):
    options = {"max_new_tokens": 64} | options
    return evaluate(sampler, TOKENIZER, problems, format, **options)


def test_evaluate_grades_both_ways():
    sampler = ScriptedSampler(
        DEEPSEEK.completion("40 + 2 = 42", "42") + "<|im_end|>", "The answer is 53"
    )
    finished = []
    result = evaluated(sampler, on_finish=lambda: finished.append(1))
    assert result.per_problem(strict=True) == [1, 0]
    assert result.per_problem(strict=False) == [1, 1]
    first, second = result.completions
    assert first.text == DEEPSEEK.completion("40 + 2 = 42", "42")
    assert (len(first.token_ids), first.truncated) == (len(first.text) + 1, False)
    assert second.truncated
    assert len(finished) == 2
    assert (sampler.params.max_new_tokens, sampler.params.temperature, sampler.n) == (64, 0, 1)
    simple = FORMATS["simple"]
    sampler = ScriptedSampler(simple.completion("40 + 2 = 42", "42"))
    assert evaluated(sampler, PROBLEMS[:1], simple).per_problem(strict=True) == [1]


def test_evaluate_seeds_by_problem_and_not_by_place():
    seeds = {}
    for problems in (PROBLEMS, PROBLEMS[::-1]):
        sampler = ScriptedSampler("42<|im_end|>")
        evaluated(sampler, problems, temperature=0.7, k=3, seed=5)
        seeds[problems[0].id] = sampler.seeds
        assert (sampler.n, sampler.params.temperature) == (3, 0.7)
        assert sampler.params.top_p == 1
    assert seeds["p1"] == seeds["p2"][::-1] == [prompt_seed(5, "p1"), prompt_seed(5, "p2")]


def test_the_prompt_holds_question_and_examples_but_not_the_answer():
    sampler = ScriptedSampler("?")
    evaluated(sampler, examples=[("What is 1 + 1?", DEEPSEEK.completion("1 + 1 = 2", "2"))])
    for prompt, asked in zip(sampler.prompts, PROBLEMS, strict=True):
        assert asked.question in prompt
        assert "<answer>2</answer>" in prompt
        assert asked.answer not in prompt


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"problems": []}, "no problems"),
        ({"k": 2}, "greedy"),
        ({"examples": [(PROBLEMS[1].question, "53")]}, "contain its answer"),
    ],
)
def test_evaluate_refuses(changed, message):
    with pytest.raises(ValueError, match=message):
        evaluated(ScriptedSampler("42"), **changed)


# --- plots ----------------------------------------------------------------------------------------


def test_accuracy_bars(tmp_path):
    interval, zero = {"mean": 0.5, "low": 0.4, "high": 0.6}, {"mean": 0, "low": 0, "high": 0}
    odd = {"mean": 0.5, "low": 0.51, "high": 0.6}  # a mean outside its interval
    path = tmp_path / "new" / "accuracy.png"
    rows = {"base": interval, "SFT": zero, "GRPO": odd}
    accuracy_bars(rows, path, "title: $a_{$.jsonl", "note on $a_{$.jsonl")  # no formulas
    assert path.read_bytes().startswith(PNG)


def test_a_running_mean_has_the_interval_of_its_steps():
    """Neighbours differ by 2, so steps have a standard deviation of √2; a mean of n, √(2/n)."""
    means, half = recent_means([0.0, 2.0, 0.0, 2.0, 0.0, 2.0])
    assert means == [0, 1, pytest.approx(2 / 3), 1, 0.8, 1.2]
    assert half == pytest.approx([1.96 * math.sqrt(2 / n) for n in (1, 2, 3, 4, 5, 5)])
    assert recent_means([0.5]) == ([0.5], [0.0])


def test_accuracy_over_time_is_drawn_as_it_was_measured(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("rlm.runs.plots.save_figure", lambda figure, _: drawn.append(figure))
    start, end = ({"mean": m, "low": m - 0.1, "high": m + 0.1} for m in (0.25, 0.5))
    curves = {"greedy": [(0, start), (2, end)], "sampled": [(1, start), (1.5, end), (2, end)]}
    stages = {"SFT": (0, 1), "GRPO": (1, 2)}
    accuracy_over_time(curves, stages, tmp_path / "x.png", "what was found", "of 9, %")
    [axes] = drawn[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines == {"greedy": [[0, 25], [2, 50]], "sampled": [[1, 25], [1.5, 50], [2, 50]]}
    bands = [band.get_paths()[0].get_extents() for band in axes.collections]
    assert [(band.y0, band.y1) for band in bands] == [pytest.approx((15, 60))] * 2
    assert (axes.get_title(loc="left"), axes.get_ylabel()) == ("what was found", "of 9, %")
    assert {"SFT", "GRPO", "25.0", "50.0"} == {text.get_text() for text in axes.texts}


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [{"step": 0}],
        [{"step": 0, "reward/mean": 0.5}],
        [{"step": 0, "reward/mean": math.nan, "policy/entropy": None}],
        [{"step": s, "reward/mean": 0.1 * s, "reward/std": 0.2} for s in range(5)],
    ],
)
def test_learning_curves_tolerate_what_was_not_measured(tmp_path, metrics):
    learning_curves(metrics, tmp_path / "curves.png", "a run on $a_{$.jsonl")  # no formula
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_learning_curves_show_what_was_measured_from_zero_on(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("rlm.runs.plots.save_figure", lambda figure, path: figures.append(figure))
    rows = [
        {"step": s, "completion/length_mean": 30 + s, "completion/truncated_rate": 0.01 * s}
        for s in range(3)
    ]
    rows[0]["eval/start_accuracy"], rows[2]["eval/accuracy"] = 0.25, 0.5
    for name, bounds in {"start_accuracy": (0.1, 0.3), "accuracy": (0.4, 0.7)}.items():
        row = rows[0 if "start" in name else 2]
        row |= {f"eval/{name}_{end}": v for end, v in zip(("low", "high"), bounds, strict=True)}
    learning_curves(rows, tmp_path / "curves.png", "a run")
    panels = [axes for axes in figures[0].axes if axes.axison]
    titles = [axes.get_title(loc="left").split(",")[0] for axes in panels]
    assert titles == ["validation with 95 % interval", "completion length", "completions cut off"]
    (band,) = panels[0].collections
    corners = {tuple(map(round, point)) for point in band.get_paths()[0].vertices}
    assert corners == {(0, 10), (0, 30), (3, 40), (3, 70)}
    assert [axes.get_ylim() for axes in panels] == [
        (0, pytest.approx(75.6)),
        (0, pytest.approx(34.56)),
        (0, 5),
    ]
    assert panels[0].lines[0].get_xydata().tolist() == [[0, 25], [3, 50]]


def test_the_band_of_a_reward_is_whole_also_below_zero(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("rlm.runs.plots.save_figure", lambda figure, path: figures.append(figure))
    interval = {"eval/reward": 0.25, "eval/reward_low": -0.5, "eval/reward_high": 1.0}
    rows = [{"step": step, "reward/mean": -2.0, **interval} for step in range(2)]
    learning_curves(rows, tmp_path / "curves.png", "a run")
    reward, validation = (axes for axes in figures[0].axes if axes.axison)
    (band,) = (each.get_paths()[0].get_extents() for each in validation.collections)
    assert (band.y0, band.y1) == (-0.5, 1.0)
    assert validation.get_ylim() == pytest.approx((-0.54, 1.08))
    assert reward.get_ylim() == pytest.approx((-2.16, 0.0))


@pytest.mark.parametrize("recorded", ["this", "another", None])
def test_grpo_is_compared_with_sft_only_if_it_was_trained_from_it(recorded, tmp_path, capsys):
    """weights/final_rlm_lora may be the shipped adapter, and weights/sft_lora the user's own."""
    adapters = {"SFT": tmp_path / "sft", "GRPO": tmp_path / "grpo"}
    for name, path in adapters.items():
        path.mkdir()
        for file in ADAPTER_FILES:
            (path / file).write_text(name)
    start = {"this": adapter_hash(adapters["SFT"]), "another": "0" * 16}.get(recorded)
    (adapters["GRPO"] / "run.json").write_text(json.dumps({"start_adapter_hash": start}))
    pairs = pairs_to_compare(["base", "base, 4-shot", "SFT", "GRPO"], adapters)
    before_grpo = "SFT" if recorded == "this" else "base"
    assert pairs == [("base", "base, 4-shot"), ("base, 4-shot", "SFT"), (before_grpo, "GRPO")]
    assert ("not with SFT" in capsys.readouterr().out) == (recorded != "this")
    assert pairs_to_compare(["base", "SFT"], {"SFT": adapters["SFT"]}) == [("base", "SFT")]
