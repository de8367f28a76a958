"""Statistics against values worked out by hand or by brute force; `evaluate` without a model."""

import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from rlm.data.problem import Problem
from rlm.data.prompts import FORMATS
from rlm.evaluation.evaluate import (
    Evaluation,
    Graded,
    bootstrap_interval,
    evaluate,
    majority,
    majority_score,
    mcnemar,
    mean_at_k,
    paired_bootstrap,
    pass_at_k,
    wilson_interval,
)
from rlm.evaluation.report import report
from rlm.grading.answers import Verdict, grade
from rlm.grading.numbers import parse_number
from rlm.runs.plots import accuracy_bars, learning_curves
from rlm.sampling import Completion, prompt_seed

PNG = b"\x89PNG\r\n"


def test_the_statistics_load_no_torch():
    code = "import sys, rlm.evaluation.evaluate, rlm.runs.plots; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- intervals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [
        # With p = 0: (z²/2n ± z²/2n) / (1 + z²/n) = 0 and z² / (n + z²) = 3.8416 / 13.8416.
        (0, 10, 0.0, 0.277540),
        (10, 10, 0.722460, 1.0),
        # With p = 1/2 the centre is 1/2 and the half-width z / (2 √(n + z²)) = 0.263405.
        (5, 10, 0.236595, 0.763405),
        # Newcombe 1998, table I: 81 of 263 is 0.2553 … 0.3662.
        (81, 263, 0.255289, 0.366211),
    ],
)
def test_wilson_interval(correct, total, low, high):
    assert wilson_interval(correct, total) == pytest.approx((low, high), abs=2e-5)


@pytest.mark.parametrize(("correct", "total"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_interval_refuses_what_is_no_proportion(correct, total):
    with pytest.raises(ValueError, match="no proportion"):
        wilson_interval(correct, total)


def test_wilson_interval_holds_the_proportion_within_0_and_1():
    for total in (1, 2, 7, 1319):
        for correct in {0, 1, total // 2, total - 1, total}:
            low, high = wilson_interval(correct, total)
            assert 0 <= low <= correct / total <= high <= 1


def test_bootstrap_interval_is_that_of_drawing_indices():
    values = np.random.default_rng(1).choice([0, 0.25, 0.5, 1], size=80)
    indices = np.random.default_rng(2).integers(80, size=(20_000, 80))
    expected = np.percentile(values[indices].mean(1), [2.5, 97.5])
    assert bootstrap_interval(values, resamples=20_000) == pytest.approx(expected, abs=0.006)


# --- several completions --------------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_1_is_the_mean():
    assert pass_at_k(8, 3, 1) == mean_at_k([True] * 3 + [False] * 5) == 3 / 8


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2)])
def test_pass_at_k_refuses_what_it_cannot_estimate(n, c, k):
    with pytest.raises(ValueError, match="needs"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("answers", "winners"),
    [
        ([5, 7, 5], [5]),
        ([5, 7, None, None, None], [5, 7]),
        ([7, 5, 7, 5, 6], [7, 5]),
        ([None, None], []),
        ([], []),
    ],
)
def test_majority(answers, winners):
    assert majority(answers) == winners


# --- two models -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [
        (0, 0, 1.0),
        (0, 1, 1.0),
        (0, 6, 2 / 2**6),
        (6, 0, 2 / 2**6),
        (1, 9, 2 * (1 + 10) / 2**10),
        (5, 5, 1.0),
        (3, 12, 2 * (1 + 15 + 105 + 455) / 2**15),
    ],
)
def test_mcnemar_is_the_exact_binomial_test(only_a, only_b, p):
    a = [True] * only_a + [False] * only_b + [True, False] * 4
    b = [False] * only_a + [True] * only_b + [True, False] * 4
    assert mcnemar(a, b) == pytest.approx(p)


def test_mcnemar_takes_thousands_of_problems():
    assert 0 < mcnemar([True] * 3000 + [False] * 3200, [False] * 3000 + [True] * 3200) < 0.05


def test_paired_bootstrap_of_equals_is_exactly_zero():
    scores = [0, 1, 0.1, 0.7, 1 / 3] * 10
    difference = paired_bootstrap(scores, scores)
    assert (difference.points, difference.low, difference.high) == (0, 0, 0)


def test_paired_bootstrap_has_the_sign_of_b_minus_a_in_points():
    difference = paired_bootstrap([0, 0, 0, 1], [1, 0, 1, 1])
    assert difference.points == 50
    assert 0 <= difference.low <= 50 <= difference.high <= 100


def test_paired_bootstrap_is_seeded():
    a, b = np.random.default_rng(0).integers(2, size=(2, 50))
    assert paired_bootstrap(a, b, seed=1) == paired_bootstrap(a, b, seed=1)
    assert paired_bootstrap(a, b, seed=1) != paired_bootstrap(a, b, seed=2)


def test_paired_bootstrap_covers_a_known_shift_95_times_in_100():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        a = rng.random(100) < 0.4
        b = a | (rng.random(100) < 0.25)  # right where a is, and on a quarter of the rest
        difference = paired_bootstrap(a, b, resamples=1000)
        covered += difference.low <= 100 * 0.6 * 0.25 <= difference.high
    assert 0.90 <= covered / 300 <= 0.99


def test_paired_bootstrap_is_close_to_the_normal_interval():
    difference = paired_bootstrap([0] * 100, [0.5] * 50 + [0] * 50)
    half = 1.96 * 25 / math.sqrt(100)
    assert (difference.low, difference.high) == pytest.approx((25 - half, 25 + half), abs=0.5)


def test_paired_bootstrap_refuses_other_problems():
    with pytest.raises(ValueError, match="not paired"):
        paired_bootstrap([0, 1], [0])


# --- Evaluation -----------------------------------------------------------------------------------


def verdict(reason, answer=None):
    return Verdict(reason == "correct", reason, answer, answer and parse_number(answer))


def graded(strict, lenient=None, *, answer=None, tokens=10, truncated=False):
    return Graded(
        "", verdict(strict, answer), verdict(lenient or strict, answer), tokens, truncated
    )


def problem(id="a", question="1 + 1?", answer="2", **columns):
    return Problem(id=id, question=question, answer=answer, solution="", columns=columns)


def test_evaluation_of_one_completion_each():
    result = Evaluation(
        [
            problem(family="apples", level=1),
            problem(family="apples", level=2),
            problem(family="pears", level=2),
            problem(),
        ],
        [
            [graded("correct", tokens=10)],
            [graded("wrong", tokens=20)],
            [graded("no_reasoning", "correct", tokens=30)],
            [graded("unclosed_reasoning", tokens=40, truncated=True)],
        ],
    )
    assert result.per_problem(strict=True) == [1, 0, 0, 0]
    low, high = wilson_interval(1, 4)
    assert result.accuracy(strict=True) == {
        "mean": 0.25,
        "low": low,
        "high": high,
        "correct": 1,
        "total": 4,
    }
    assert result.accuracy(strict=False)["correct"] == 2
    assert result.format_rate == 0.5  # right or wrong, one number stood where it belongs
    assert result.truncated_rate == 0.25
    assert result.length_mean == 25
    assert result.reasons(strict=False) == {"correct": 2, "wrong": 1, "unclosed_reasoning": 1}
    families = result.by_column("family", strict=False)
    assert [(f, v["correct"], v["total"]) for f, v in families.items()] == [
        ("apples", 1, 2),
        ("pears", 1, 1),
    ]
    assert list(result.by_column("level", strict=True)) == ["1", "2"]
    assert result.by_column("year", strict=True) == {}


def test_choices_are_voted_for_by_their_letter():
    texts = ["B", "B) Paris", "Option B", "C", "C"]
    whole = [f"<think>x</think><answer>{text}</answer>" for text in texts]
    verdicts = [grade(text, "B", strict=True, kind="choice") for text in whole]
    assert majority_score(verdicts) == 1
    assert majority_score(verdicts[2:]) == 0


def test_evaluation_of_several_completions_each():
    right, wrong, mute = (
        graded("correct", answer="1,000"),
        graded("wrong", answer="7"),
        graded("no_answer"),
    )
    result = Evaluation(
        [problem(), problem(), problem()],
        [
            [right, graded("correct", answer="1000.0"), wrong, mute],  # two spellings, one number
            [right, wrong, mute, mute],  # a tie of two
            [mute, mute, mute, mute],
        ],
    )
    assert result.per_problem(strict=True) == [0.5, 0.25, 0]
    assert result.mean_accuracy(strict=True)["mean"] == pytest.approx(0.25)
    assert result.majority_accuracy(strict=True)["mean"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert result.pass_at(4, strict=True)["mean"] == pytest.approx(2 / 3)
    assert result.pass_at(1, strict=True)["mean"] == pytest.approx(0.25)
    assert result.pass_at(2, strict=True)["mean"] == pytest.approx((1 - 1 / 6 + 1 - 3 / 6 + 0) / 3)
    interval = result.mean_accuracy(strict=True)
    assert 0 <= interval["low"] <= interval["mean"] <= interval["high"] <= 0.5
    with pytest.raises(ValueError, match="mean_accuracy"):
        result.accuracy(strict=True)


def test_a_row_is_compared_with_the_one_above_it_and_better_is_positive(
    tmp_path, monkeypatch, capsys
):
    """Of four problems the base solves one, the adapter that and two more."""
    monkeypatch.setattr("rlm.evaluation.report.accuracy_bars", lambda *_: None)
    right, wrong = graded("correct"), graded("wrong")
    worse, better = (
        Evaluation([problem()] * 4, [[g] for g in groups])
        for groups in ([right, wrong, wrong, wrong], [right, right, right, wrong])
    )
    report({"base": {"greedy": worse}, "SFT": {"greedy": better}}, "toys", {}, tmp_path)
    said = json.loads((tmp_path / "evaluation.json").read_text())["greedy"]["compared"]
    assert list(said) == ["SFT − base"]
    for grading in ("strict", "lenient"):
        assert said["SFT − base"][grading]["points"] == 50
        assert said["SFT − base"][grading]["mcnemar_p"] == 0.5  # two against none: 2 / 2²
    assert "SFT − base: +50.0 points strict" in capsys.readouterr().out


def test_a_claim_that_is_no_number_has_no_vote():
    hedged = graded("several_numbers", answer="5 or 6")
    result = Evaluation([problem()], [[hedged, hedged, graded("correct", answer="2")]])
    assert result.majority_accuracy(strict=False)["mean"] == 1


# --- evaluate -------------------------------------------------------------------------------------


class CharacterTokenizer:
    """One id per character."""

    name_or_path = "characters"
    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **_):
        return "".join(f"[{m['role']}]{m['content']}\n" for m in messages) + "[assistant]"

    def encode(self, text, **_):
        return [ord(character) for character in text]

    def decode(self, ids, skip_special_tokens=False):
        assert skip_special_tokens
        return "".join(map(chr, ids)).removesuffix("\0")


class ScriptedSampler:
    """Gives each prompt's group the written completions in turn."""

    def __init__(self, *texts):
        self.texts = texts

    def sample(self, prompts, n, params, seeds, on_finish):
        self.prompts = ["".join(map(chr, prompt)) for prompt in prompts]
        self.n, self.params, self.seeds = n, params, seeds
        texts = itertools.cycle(self.texts)
        groups = []
        for _ in prompts:
            groups.append([])
            for _ in range(n):
                ids = [ord(character) for character in next(texts)]
                reason = "stop" if ids[-1] == 0 else "length"
                groups[-1].append(Completion(ids, [0.0] * len(ids), reason))
                on_finish()
        return groups


DEEPSEEK = FORMATS["deepseek"]
PROBLEMS = [problem("p1", "What is 40 + 2?", "42"), problem("p2", "What is 50 + 3?", "53")]


def test_evaluate_grades_both_ways():
    sampler = ScriptedSampler(DEEPSEEK.completion("40 + 2 = 42", "42") + "\0", "The answer is 53")
    finished = []
    result = evaluate(
        sampler,
        CharacterTokenizer(),
        PROBLEMS,
        DEEPSEEK,
        max_new_tokens=64,
        on_finish=lambda: finished.append(1),
    )
    assert result.per_problem(strict=True) == [1, 0]
    assert result.per_problem(strict=False) == [1, 1]
    first, second = result.completions
    assert first.text == DEEPSEEK.completion("40 + 2 = 42", "42")
    assert (first.tokens, first.truncated) == (len(first.text) + 1, False)
    assert second.truncated
    assert len(finished) == 2
    assert (sampler.params.max_new_tokens, sampler.params.temperature, sampler.n) == (64, 0, 1)


def test_evaluate_seeds_by_problem_and_not_by_place():
    seeds = {}
    for problems in (PROBLEMS, PROBLEMS[::-1]):
        sampler = ScriptedSampler("42\0")
        evaluate(
            sampler,
            CharacterTokenizer(),
            problems,
            DEEPSEEK,
            max_new_tokens=8,
            temperature=0.7,
            k=3,
            seed=5,
        )
        seeds[problems[0].id] = sampler.seeds
        assert (sampler.n, sampler.params.temperature) == (3, 0.7)
        assert (sampler.params.top_p, sampler.params.top_k) == (1, 0)
    assert seeds["p1"] == seeds["p2"][::-1] == [prompt_seed(5, "p1"), prompt_seed(5, "p2")]


def test_evaluate_reads_other_tags():
    simple = FORMATS["simple"]
    sampler = ScriptedSampler(simple.completion("40 + 2 = 42", "42"))
    result = evaluate(sampler, CharacterTokenizer(), PROBLEMS[:1], simple, max_new_tokens=64)
    assert result.accuracy(strict=True)["correct"] == 1


def test_the_prompt_holds_question_and_examples_but_not_the_answer():
    sampler = ScriptedSampler("?")
    examples = [("What is 1 + 1?", DEEPSEEK.completion("1 + 1 = 2", "2"))]
    evaluate(sampler, CharacterTokenizer(), PROBLEMS, DEEPSEEK, max_new_tokens=8, examples=examples)
    for prompt, asked in zip(sampler.prompts, PROBLEMS, strict=True):
        assert asked.question in prompt
        assert "<answer>2</answer>" in prompt
        assert asked.answer not in prompt


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"problems": []}, "no problems"),
        ({"k": 2}, "greedy"),
        ({"examples": [(PROBLEMS[1].question, "53")]}, "hold its answer"),
    ],
)
def test_evaluate_refuses(changed, message):
    arguments = {"problems": PROBLEMS, "format": DEEPSEEK, "max_new_tokens": 8} | changed
    with pytest.raises(ValueError, match=message):
        evaluate(ScriptedSampler("42"), CharacterTokenizer(), **arguments)


# --- plots ----------------------------------------------------------------------------------------


def test_accuracy_bars(tmp_path):
    interval = {"mean": 0.5, "low": 0.4, "high": 0.6}
    path = tmp_path / "new" / "accuracy.png"
    accuracy_bars({"base": {"strict": interval, "lenient": interval}}, path, "title", "note")
    assert path.read_bytes().startswith(PNG)


def test_accuracy_bars_of_zero_and_of_a_mean_outside_its_interval(tmp_path):
    zero = {"mean": 0.0, "low": 0.0, "high": 0.0}
    odd = {"mean": 0.5, "low": 0.51, "high": 0.6}
    accuracy_bars({"base": {"strict": zero, "lenient": odd}}, tmp_path / "a.png", "title")


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
    learning_curves(metrics, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)
