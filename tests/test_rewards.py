"""The reward seam: what users write, adapted once."""

import math

import pytest

from rlm.data import Problem
from rlm.prompts import FORMATS
from rlm.rewards import CorrectnessReward, RewardFunction, as_scorer

PROBLEMS = [Problem("a", "1 + 1?", "2", columns={"level": 1}), Problem("b", "2 + 3?", "5")]
RIGHT = FORMATS["deepseek"].completion("so", "2")
GROUPS = [[RIGHT, RIGHT.replace("2", "3")], ["5", FORMATS["deepseek"].completion("so", "5")]]


def test_correctness_is_strict_and_counts_reasons():
    scores = as_scorer(CorrectnessReward(FORMATS["deepseek"]))(PROBLEMS, GROUPS)
    assert scores.rewards == [[1.0, 0.0], [0.0, 1.0]]
    assert scores.metrics == {
        "reason/correct": 0.5, "reason/wrong": 0.25, "reason/no_reasoning": 0.25,
    }  # fmt: skip
    again = as_scorer(CorrectnessReward(FORMATS["deepseek"]))(PROBLEMS, GROUPS)
    assert again.metrics == scores.metrics


def test_other_tags_are_another_format():
    simple = FORMATS["simple"].completion("so", "2")
    assert as_scorer(CorrectnessReward(FORMATS["simple"]))(
        PROBLEMS[:1], [[simple, RIGHT]]
    ).rewards == [[1.0, 0.0]]


def test_a_plain_function_has_trls_contract():
    seen = {}

    def reward(prompts, completions, answer, **columns):
        seen.update(prompts=prompts, completions=completions, answer=answer, **columns)
        return [0.0, None, math.nan, 1.0]

    assert as_scorer(reward)(PROBLEMS, GROUPS).rewards == [[0.0, None], [None, 1.0]]
    assert seen == {
        "prompts": ["1 + 1?"] * 2 + ["2 + 3?"] * 2,
        "completions": [text for group in GROUPS for text in group],
        "answer": ["2", "2", "5", "5"],
        "level": [1, 1, None, None],
    }


def test_a_function_gets_only_what_it_takes():
    assert as_scorer(lambda completions: [float(len(c)) for c in completions])(
        PROBLEMS[:1], [["a", "bb"]]
    ).rewards == [[1.0, 2.0]]


def test_a_reward_class_needs_only_call():
    class MyReward(RewardFunction):
        def __call__(self, completion, reference_answer, **columns):
            return 1.0 if reference_answer in completion else 0.0

    assert as_scorer(MyReward())(PROBLEMS, GROUPS).rewards == [[1.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("returned", "message"),
    [([1.0], "1 rewards for 4"), ([1.0, 2.0, 3.0, math.inf], "infinite")],
)
def test_a_broken_reward_function_is_named(returned, message):
    with pytest.raises(ValueError, match=message):
        as_scorer(lambda completions: returned)(PROBLEMS, GROUPS)
