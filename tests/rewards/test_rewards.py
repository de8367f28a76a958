"""Reward functions: the built-in ones, and the adaptation of functions that users write."""

import asyncio
import math
import sys
import threading
import time

import numpy as np
import pytest

from rlm.cli.options import UsageError
from rlm.data.problem import Problem, as_problems
from rlm.data.prompts import FORMATS
from rlm.grading import Verdict, grade
from rlm.rewards import (
    CombinedReward,
    CorrectnessReward,
    FormatReward,
    GSM8KReward,
    ReasoningQualityReward,
    RewardFunction,
    StepsReward,
    functions,
)
from rlm.rewards.functions import as_reward, check_columns, load_reward
from rlm.rewards.scorer import Scorer

PROBLEMS = [Problem("a", "1 + 1?", "2", columns={"level": 1}), Problem("b", "2 + 3?", "5")]
RIGHT = FORMATS["deepseek"].completion("so", "2")
GROUPS = [[RIGHT, RIGHT.replace("2", "3")], ["5", FORMATS["deepseek"].completion("so", "5")]]


def test_correctness_is_strict_and_counts_reasons():
    scores = Scorer(CorrectnessReward())(PROBLEMS, GROUPS)
    assert scores.rewards == [[1.0, 0.0], [0.0, 1.0]]
    assert scores.metrics == {
        "reason/correct": 0.5, "reason/wrong": 0.25, "reason/no_reasoning": 0.25,
        "reward/right_with_wrong_equation_rate": 0.0,
    }  # fmt: skip
    again = Scorer(CorrectnessReward())(PROBLEMS, GROUPS)
    assert again.metrics == scores.metrics
    simple = FORMATS["simple"].completion("so", "2")
    scorer = Scorer(CorrectnessReward(), reasoning_format="simple")
    assert scorer(PROBLEMS[:1], [[simple, RIGHT]]).rewards == [[1.0, 0.0]]


def test_steps_pay_for_a_right_answer_only_if_every_equation_holds():
    write, two = FORMATS["deepseek"].completion, [PROBLEMS[0]]
    texts = [
        write("1 + 1 = 2", "2"),
        write("1 + 1 = <<1+1=2>>2, and 2 * 3 = 7", "2"),  # right, with a wrong equation
        write("1 + 1 = <<1+1=2>>3", "2"),  # the same: the result was copied wrongly
        write("one and one", "2"),  # no equation, so none that is wrong
        write("1 + 1 = 2", "3"),  # wrong, from right equations
    ]
    scorer, correctness = Scorer(StepsReward()), Scorer(None)(two, [texts])
    steps = scorer(two, [texts])
    assert steps.rewards == [[1.0, 0.0, 0.0, 1.0, 0.0]]
    assert correctness.rewards == [[1.0, 1.0, 1.0, 1.0, 0.0]]
    assert steps.metrics == correctness.metrics
    assert steps.metrics["reward/right_with_wrong_equation_rate"] == 0.4
    assert scorer(two, [texts]).metrics == steps.metrics  # of the next step, too
    assert steps.metrics["reason/correct"] == 0.8
    assert type(load_reward("steps")) is StepsReward
    both = Scorer([(StepsReward(), 1.0), (CorrectnessReward(), 3.0)])(two, [texts])
    assert both.rewards == [[1.0, 0.75, 0.75, 1.0, 0.0]]


def test_a_plain_function_has_trls_contract():
    seen = {}

    def reward(prompts, completions, answer, **columns):
        seen.update(prompts=prompts, completions=completions, answer=answer, **columns)
        return [0.0, None, math.nan, 1.0]

    assert Scorer(reward)(PROBLEMS, GROUPS).rewards == [[0.0, None], [None, 1.0]]
    in_a_list = Scorer([reward, FormatReward()])(PROBLEMS, GROUPS).rewards
    assert in_a_list == [[0.1, 0.2], [0.0, 0.6]]
    assert seen == {
        "prompts": ["1 + 1?"] * 2 + ["2 + 3?"] * 2,
        "completions": [text for group in GROUPS for text in group],
        "answer": ["2", "2", "5", "5"],
        "level": [1, 1, None, None],
    }


def test_a_function_gets_only_what_it_takes():
    scorer = Scorer(lambda completions: [float(len(c)) for c in completions])
    assert scorer(PROBLEMS[:1], [["a", "bb"]]).rewards == [[1.0, 2.0]]
    scorer = Scorer(lambda completions, question: [float(q == "1 + 1?") for q in question])
    check_columns(scorer.reward, PROBLEMS)
    assert scorer(PROBLEMS, GROUPS).rewards == [[1.0, 1.0], [0.0, 0.0]]
    with pytest.raises(UsageError, match="1 values for 4"):
        Scorer(lambda completions: [1.0])(PROBLEMS, GROUPS)


def test_a_parameter_that_is_no_column_is_said_before_anything_is_sampled():
    def reward(completions, answer, level, ground_truth, weight=1.0):
        return [0.0] * len(completions)

    with pytest.raises(
        UsageError, match=r"reward requires ground_truth, .* available columns: answer, .*lev"
    ):
        check_columns(as_reward([CorrectnessReward(), reward]), PROBLEMS)
    with pytest.raises(UsageError, match=r"requires refrence \(did you mean reference_answer\?\)"):
        check_columns(as_reward(lambda completion, refrence: 0.0), PROBLEMS)

    class Coloured(RewardFunction):
        def __call__(self, text, gold, colour):
            return 0.0

    with pytest.raises(UsageError, match="the reward Coloured requires colour"):
        check_columns(as_reward([CorrectnessReward(), Coloured()]), PROBLEMS)
    with pytest.raises(UsageError, match=r"reference_answer \(did you mean answer\?\), which a"):
        check_columns(as_reward(lambda completions, reference_answer: []), PROBLEMS)
    with pytest.raises(UsageError, match=r"requires prompt \(did you mean prompts\?\), .* receive"):
        check_columns(as_reward(lambda prompt, completions: []), PROBLEMS)
    with pytest.raises(UsageError, match=r"requires prompts \(did you mean prompt\?\)"):
        check_columns(as_reward(lambda prompts, completion: 0.0), PROBLEMS)
    check_columns(as_reward(lambda prompts, completions, answer, completion_ids: []), PROBLEMS)
    check_columns(as_reward(lambda prompt, completion, answer: 0.0), PROBLEMS)
    check_columns(as_reward(lambda completion, reference_answer, level: 0.0), PROBLEMS)
    check_columns(as_reward(lambda prompts, completions, **columns: []), PROBLEMS)


def told(capsys):
    return capsys.readouterr().out


def test_a_reward_that_reads_messages_is_given_messages(capsys):
    """Open-R1's rewards read completion[0]["content"], as TRL gives it for conversations."""

    def in_batches(completions, answer, **columns):
        contents = [completion[0]["content"] for completion in completions]
        return [float(a in text) for text, a in zip(contents, answer, strict=True)]

    def alone(completion, answer, prompt):
        return float(answer in completion[-1].get("content") and prompt[0]["role"] == "user")

    async def waited_for(prompts, completions, answer):
        texts = [completion[0]["content"] for completion in completions]
        asked = [prompt[-1]["content"] for prompt in prompts]
        return [float(a in t) for t, a, q in zip(texts, answer, asked, strict=True) if q]

    def of_texts(completions, answer):
        return [float(a in text) for text, a in zip(completions, answer, strict=True)]

    expected = Scorer(of_texts)(PROBLEMS, GROUPS).rewards
    assert told(capsys) == ""
    for reward in (in_batches, alone, waited_for):
        scorer = Scorer(reward)
        assert scorer(PROBLEMS, GROUPS).rewards == expected
        assert told(capsys).count(f"the reward {reward.__name__} reads messages") == 1
        assert scorer(PROBLEMS, GROUPS).rewards == expected
        assert told(capsys) == ""


def test_a_reply_without_its_key_does_not_make_a_reward_read_messages(capsys):
    replies = iter([{}, *[{"score": 1.0}] * 3])
    seen = []

    def judge(completion, reference_answer):
        seen.append(completion)
        return next(replies)["score"]

    assert Scorer(judge)(PROBLEMS, GROUPS).rewards == [[None, 1.0], [1.0, 1.0]]
    assert seen == [text for group in GROUPS for text in group]
    assert "KeyError: 'score'" in told(capsys)


def test_columns_that_published_rewards_ask_for(capsys):
    def reward(completions, solution, nums, completion_ids, **columns):
        assert (solution, nums) == (["One and one."] * 2, [[1, 1]] * 2)
        return [float(sum(ids)) for ids in completion_ids]

    problem = Problem("1", "1 + 1?", "2", "One and one.", columns={"nums": [1, 1]})
    scorer = Scorer(reward)
    check_columns(scorer.reward, [problem])
    assert scorer([problem], [["a", "b"]], None, [[[3, 4], [5]]]).rewards == [[7.0, 5.0]]
    with pytest.raises(
        UsageError,
        match=r"requires solution, which the data does not have \(a column that --columns renames",
    ):
        check_columns(scorer.reward, [Problem("1", "1 + 1?", "2", columns={"nums": [1]})])
    own = Scorer(lambda completions, trainer_state: [])
    with pytest.raises(UsageError, match="requires trainer_state, which only TRL's trainer passes"):
        check_columns(own.reward, [problem])


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        (lambda completion, reference_answer: None, "no number for any of 4 completions"),
        (lambda completions: [None] * 4, "no number for any of 4 completions"),
        (lambda completions: None, "returned None for its completions: return a list"),
        (lambda completions: dict.fromkeys("abcd", 1.0), "returned {'a': 1.0.* return a list"),
        (lambda completions: {1.0, 0.5, 0.2, 0.0}, "returned {.* return a list"),  # in any order
        (lambda completions: 0.5, "returned 0.5 for its completions: return a list"),
    ],
)
def test_a_reward_of_no_use_is_refused_at_its_first_call(reward, why):
    with pytest.raises(UsageError, match=why):
        Scorer(reward)(PROBLEMS, GROUPS)


def test_the_file_of_a_reward_can_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "neighbour_of_a_reward.py").write_text("def score(text): return float(len(text))\n")
    (tmp_path / "mine.py").write_text(
        "import neighbour_of_a_reward\n"
        "def reward(completion, reference_answer):\n"
        "    return neighbour_of_a_reward.score(completion)\n"
    )
    scorer = Scorer(load_reward(f"{tmp_path}/mine.py:reward"))
    assert scorer(PROBLEMS[:1], [["a", "bb"]]).rewards == [[1.0, 2.0]]
    assert sys.path[-1] == str(tmp_path)  # a neighbour hides no library


# --- rewards as people write them -----------------------------------------------------------------


class Weighted(RewardFunction):
    parts = ("an attribute of its own",)

    def __init__(self):
        super().__init__(weight=2.0)

    def __call__(self, completion, reference_answer):  # no **columns
        return float(reference_answer in completion)


class OneColumn(RewardFunction):
    weight = 3.0

    def __call__(self, completion, reference_answer, question):
        return float(question == "1 + 1?")


class WholeStep(RewardFunction):
    def __call__(self, prompts, completions, answer, **columns):
        return [float(a in c) for c, a in zip(completions, answer, strict=True)]

    def pop_metrics(self):
        return {"reward/whole": np.float32(4)}  # which JSON does not take


class Batch(RewardFunction):
    def batch_call(self, completions, reference_answers, question):
        return [float(asked == "1 + 1?") for asked in question]


def per_completion(completion, reference_answer):
    return float(reference_answer in completion)


def with_trls_words(prompt, completion, answer, **columns):
    assert columns["is_truncated"] is False
    return float(prompt == "1 + 1?" and answer in completion)


async def later(completion, reference_answer):
    await asyncio.sleep(0)
    return float(reference_answer in completion)


CONTAINED, FIRST = [[1.0, 0.0], [1.0, 1.0]], [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (Weighted(), CONTAINED),
        (Weighted, CONTAINED),
        (OneColumn, FIRST),
        (WholeStep(), CONTAINED),
        (Batch, FIRST),
        (per_completion, CONTAINED),
        (with_trls_words, [[1.0, 0.0], [0.0, 0.0]]),
        (later, CONTAINED),
        (lambda completion: float("5" in completion), [[0.0, 0.0], [1.0, 1.0]]),
        ([per_completion, OneColumn], [[1.0, 0.75], [0.25, 0.25]]),  # weights 1 and 3
        ([(per_completion, 3), (OneColumn(), 1.0)], [[1.0, 0.25], [0.75, 0.75]]),
        (CombinedReward([later, OneColumn]), [[1.0, 0.75], [0.25, 0.25]]),
        (None, [[1.0, 0.0], [0.0, 1.0]]),
    ],
)  # fmt: skip
def test_a_reward_is_taken_as_people_write_it(reward, expected, capsys):
    assert Scorer(reward)(PROBLEMS, GROUPS).rewards == expected
    assert "failed" not in capsys.readouterr().out
    found = Scorer(WholeStep())(PROBLEMS, GROUPS).metrics["reward/whole"]
    assert (found, type(found)) == (1.0, float)


def test_the_weight_of_a_reward_is_given_or_is_the_classs():
    assert (Weighted().weight, OneColumn().weight, OneColumn(weight=5.0).weight) == (2.0, 3.0, 5.0)
    assert Weighted().batch_call(["2", "3"], ["2", "2"], level=[1, 2]) == [1.0, 0.0]
    weighted = CombinedReward([Weighted(), (Weighted(), 0.5)])
    assert list(weighted.weights.values()) == [2.0, 0.5]


class NoCall(RewardFunction):
    pass


class Threshold(RewardFunction):
    def __init__(self, threshold, *, strict):
        self.threshold = threshold


def other_names(response, gold):
    return 1.0


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (other_names, "other_names(response, gold) names neither completion nor completions"),
        ("accuracy", "'accuracy' is not a reward: write f(completion, reference_answer) -> float"),
        ({"format": FormatReward()}, "is not a reward: write f(completion"),
        ((FormatReward(), 2.0), "2.0 is not a reward"),
        (NoCall, "NoCall has no __call__(self, completion, reference_answer)"),
        (Threshold, "pass Threshold(threshold=..., strict=...)"),
        (lambda text, **columns: 1.0, "names neither"),
        (max, "max"),
        ([], "CombinedReward needs at least one reward"),
        ([(FormatReward(), "2")], "the weight of FormatReward is '2', not a number"),
        ([FormatReward(), other_names], "other_names(response, gold) names neither"),
    ],
)
def test_what_is_no_reward_is_refused_with_what_to_write(reward, message):
    with pytest.raises((TypeError, ValueError)) as refused:
        as_reward(reward)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


# --- where calls run ----------------------------------------------------------------------------


@pytest.fixture
def no_threads(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread was started"))


def test_built_in_rewards_start_no_thread(no_threads):
    parts = [CorrectnessReward(), FormatReward(), GSM8KReward(), ReasoningQualityReward()]
    for reward in (*parts, CombinedReward(parts)):
        assert "reward/failed" not in Scorer(reward)(PROBLEMS, GROUPS).metrics


def test_a_built_in_reward_that_fails_costs_its_own_rollout(no_threads, monkeypatch, capsys):
    right = GROUPS[0][0]
    fail = lambda text: 1 / (text != right) < 0  # noqa: E731
    monkeypatch.setattr(functions, "has_wrong_equation", fail)
    assert Scorer(CorrectnessReward())(PROBLEMS, GROUPS).rewards == [[None, 0.0], [0.0, 1.0]]
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_a_users_reward_has_one_thread_for_a_step():
    threads = set()

    class Mine(CorrectnessReward):
        def __call__(self, completion, reference_answer, **columns):
            threads.add(threading.get_ident())
            return super().__call__(completion, reference_answer, **columns)

    mine = Mine()
    for reward in (mine, CombinedReward([mine, FormatReward()])):
        threads.clear()
        Scorer(reward)(PROBLEMS, [[RIGHT] * 20, [RIGHT] * 20])
        assert len(threads) == 1
        assert threading.get_ident() not in threads


# --- the rewards of the package -----------------------------------------------------------------


def block(reasoning, answer, tag="think"):
    return f"<{tag}>{reasoning}</{tag}><answer>{answer}</answer>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (block("x", "18"), 1.0),  # 1 + 0.1, at most 1
        (block("x", "$18.00"), 1.0),
        (block("x", "1,080"), 0.1),
        (block("x", "19"), 0.4),  # close, in the format
        (block("x", "x = 19"), 0.3),
        (block("x", "20"), 0.1),
        ("<answer>18</answer>", 1.0),
        ("<answer>17</answer>", 0.3),
        ("<think>x</think>#### 18", 1.0),
        ("she has 18", 0.0),  # a number that ends a text is no answer
        ("<think>x</think>\\boxed so she has 18", 0.0),
        ("<think>x</think>#### she has 18", 0.0),
        ("<think>x</think><answer>she has 18", 0.0),
        ("<think>18", 0.0),
        (block("18", ""), 0.0),
        (block("x", "17, 18"), 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k_reward(text, expected):
    assert GSM8KReward()(text, "18") == pytest.approx(expected)
    assert GSM8KReward()(text, "6 * 3\n#### 18\nThe answer is: 18") == pytest.approx(expected)
    assert GSM8KReward()("<think>x</think>#### 1,080", "1080") == 1.0


@pytest.mark.parametrize("reward", [CorrectnessReward(), GSM8KReward()])
def test_an_unreadable_reference_answer_is_an_error_and_not_a_reward_of_0(reward):
    with pytest.raises(ValueError, match="the reference answer is not a number: 'eighteen'"):
        reward(block("x", "18"), "eighteen")
    verdict = grade(block("x", "18"), "eighteen", strict=True)  # as a scorer passes it
    assert reward(block("x", "18"), "eighteen", strict_verdict=verdict) in (0.0, 0.1)


@pytest.mark.parametrize("name", ["deepseek", "simple"])
def test_format_reward(name):
    tags, reward = FORMATS[name], FormatReward()
    worth = {
        tags.completion("so", "5"): 0.2,
        f"<{tags.reasoning_tag}>so</{tags.reasoning_tag}> and then": 0.1,
        "<answer>5</answer>": 0.1,
        f"<answer>5</answer><{tags.reasoning_tag}>so</{tags.reasoning_tag}>": 0.1,  # wrong order
        tags.completion("so", "5") * 2: 0.0,
        tags.completion("", "5"): 0.1,
        "5": 0.0,
    }
    assert {text: reward(text, "5", reasoning_format=name) for text in worth} == worth
    assert FormatReward(format_reward=1.0)(tags.completion("so", "5"), "5", reasoning_format=name)


def test_reasoning_quality_reward_counts_different_things_once():
    reward = ReasoningQualityReward()
    assert reward("<answer>5</answer>", "5") == 0.0
    assert reward("<think>5</think>", "5") == 0.0
    words = "Tom has two apples and he buys three more at the shop"
    assert reward(f"<think>{words}</think>", "5") == pytest.approx(0.1)
    assert reward(f"<think>{'so ' * 500}</think>", "5") == pytest.approx(0.05)
    full = f"1. {words}\n2. therefore it is five, because 2 + 3 = 5"
    assert reward(f"<think>{full}</think>", "5") == pytest.approx(0.3)


def test_a_combined_reward_is_the_weighted_mean():
    """The three rewards of the quick start are called one by one and by the Scorer."""
    parts = [FormatReward(weight=1.0), ReasoningQualityReward(weight=0.5), GSM8KReward(weight=2.0)]
    combined = CombinedReward(parts)
    assert CombinedReward([(FormatReward(), np.float32(2))])(RIGHT, "2") == 0.2
    expected = (1.0 * 0.2 + 0.5 * 0.05 + 2.0 * 1.0) / 3.5
    assert combined(RIGHT, "2") == pytest.approx(expected)
    scores = Scorer(combined)(PROBLEMS[:1], [[RIGHT, "nothing"]])
    assert scores.rewards == [[pytest.approx(expected), 0.0]]
    assert scores.metrics == pytest.approx(
        {
            "reason/correct": 0.5,  # whatever the reward is
            "reason/no_reasoning": 0.5,
            "reward/FormatReward": 0.1,
            "reward/ReasoningQualityReward": 0.025,
            "reward/GSM8KReward": 0.5,
        }
    )


def test_parts_without_a_verdict_leave_the_mean():
    def silent(completions):
        return [None] * len(completions)

    def longer(prompts, completions, answer):
        return [float(len(c) > 3) for c in completions]

    assert CombinedReward([silent, FormatReward()])(RIGHT, "2") == pytest.approx(0.2)
    combined = CombinedReward([longer, longer, FormatReward(weight=2)])
    assert combined(RIGHT, "2", question="1 + 1?") == pytest.approx((1 + 1 + 0.4) / 4)
    assert list(combined.parts) == ["longer", "longer_2", "FormatReward"]

    def longer_3(completions):
        return [0.0] * len(completions)

    assert CombinedReward([longer_3, longer, longer])(RIGHT, "2", question="") == 2 / 3
    with pytest.raises(ValueError, match="weights"):
        CombinedReward([FormatReward(weight=0)])


@pytest.mark.parametrize("verdict", [None, math.nan])
def test_a_penalty_alone_never_becomes_a_reward(verdict):
    """Divided by a negative sum of weights, a penalty would change its sign."""

    class Silent(RewardFunction):
        weight = 2.0

        def __call__(self, completion, reference_answer, **columns):
            return verdict

    class Penalty(RewardFunction):
        weight = -1.0

        def __call__(self, completion, reference_answer, **columns):
            return 1.0

    combined = CombinedReward([Silent(), Penalty()])
    assert combined(RIGHT, "2") is None
    assert combined.pop_metrics() == {"reward/Penalty": 1.0}
    assert CombinedReward([Silent()])(RIGHT, "2") is None


GOLDS = [str(n) for n in range(0, 400, 7)] + ["1,080", "-3", "1/2"]
WORTHLESS = ["", block("x", ""), block("x", " or ".join(map(str, range(401)))), "x" * 100_000]
WORTHLESS += [r"\boxed{0, 1, 2, 3}", "<think>" + " ".join(map(str, range(401)))]


def test_a_constant_text_is_right_once_at_most():
    """Texts that list all answers, say nothing or stall earn at most the bonus for the format."""
    reward = GSM8KReward()
    for text in WORTHLESS:
        assert max(reward(text, gold) for gold in GOLDS) <= 0.1, text[:20]
    assert sum(reward(block("x", "7"), gold) >= 0.9 for gold in GOLDS) == 1
    for gold in GOLDS:
        assert reward(block("so", gold), gold) == 1.0
        assert reward(block("so", "123456"), gold) < 1.0


# --- other answers than numbers ------------------------------------------------------------------


def test_each_completion_is_graded_by_the_answer_type_of_its_problem():
    problems = [Problem(kind, "?", "B", answer_type=kind) for kind in ("choice", "text", "number")]
    group = [block("so", text) for text in ("B) Paris", " b. ", "C")]
    rewards = Scorer(CorrectnessReward())(problems, [group] * 3).rewards
    assert rewards == [[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


# --- a bad reward costs its own rollout ----------------------------------------------------------


class Moody(RewardFunction):
    """A reward that fails in a given way for one text, and is right for all others."""

    def __init__(self, how):
        self.how = how

    def __call__(self, completion, reference_answer, **columns):
        return self.how() if completion == "bad" else 1.0


def divide():
    return 1 / 0


def hang():
    time.sleep(60)


def cancel():
    raise asyncio.CancelledError


def time_out():
    raise TimeoutError("the judge's socket")


FAILURES = {  # what the call does, and what is printed
    "raises": (divide, "ZeroDivisionError"),
    "hangs": (hang, "did not return within 0.2 seconds"),
    "times out": (time_out, "TimeoutError: the judge's socket"),
    "infinite": (lambda: math.inf, "infinite"),
    "huge": (lambda: -1e20, "-1e+20; its square may be infinite in float32"),
    "large": (lambda: 10**400, "not a number"),
    "exits": (lambda: sys.exit("bye"), "SystemExit: bye"),
    "cancelled": (cancel, "CancelledError"),
    "text": (lambda: "1.x", "not a number"),
    "nan": (lambda: math.nan, ""),
    "none": (lambda: None, ""),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("plain", [False, True])
def test_a_failing_call_costs_its_own_rollout(failure, plain, capsys):
    how, message = FAILURES[failure]

    def reward(completions):
        return [how() if text == "bad" else 1.0 for text in completions]

    seconds = 0.2 if how is hang else 30.0
    scorer = Scorer(reward if plain else Moody(how), time_limit=seconds)
    scores = scorer(PROBLEMS, [["good", "bad"], ["good", "good"]])
    assert scores.rewards == [[1.0, None], [1.0, 1.0]]
    assert scores.metrics.get("reward/failed", 0) == (0.25 if message else 0)
    assert message in capsys.readouterr().out


@pytest.mark.parametrize("leave", [sys.exit, cancel])
def test_an_async_call_that_exits_costs_its_own_rollout_too(leave):
    class Leaving(RewardFunction):
        async def __call__(self, completion, reference_answer, **columns):
            await asyncio.sleep(0)
            return leave() if completion == "bad" else 1.0

    scores = Scorer(Leaving(), time_limit=5.0)(PROBLEMS, [["good", "bad"], ["good", "good"]])
    assert scores.rewards == [[1.0, None], [1.0, 1.0]]


@pytest.mark.parametrize("hangs", [False, True])
def test_an_async_call_that_times_out_says_whose_limit_it_was(hangs, capsys):
    class Judge(RewardFunction):
        async def __call__(self, completion, reference_answer, **columns):
            if completion == "bad":
                await (asyncio.sleep(60) if hangs else asyncio.sleep(0))
                time_out()
            return 1.0

    scores = Scorer(Judge(), time_limit=0.5 if hangs else 30.0)(PROBLEMS[:1], [["good", "bad"]])
    assert scores.rewards == [[1.0, None]]
    said = capsys.readouterr().out
    assert ("it did not return within 0.5 seconds" if hangs else "TimeoutError: the judge") in said


def test_calls_that_all_hang_do_not_add_up(capsys):
    asked = []

    def hang_too():
        asked.append("bad")
        hang()

    scorer = Scorer(Moody(hang_too), time_limit=0.2)
    rewards = scorer(PROBLEMS, [["good"] + ["bad"] * 50, ["bad"] * 51]).rewards
    assert len(asked) == 3  # the time limits that a step waits for
    assert rewards[0][:2] == [1.0, None]
    assert capsys.readouterr().out.count("warning") == 2


def test_a_thread_that_was_left_behind_asks_nothing_more():
    asked, threads, awake = [], {}, threading.Event()

    class Slow(RewardFunction):
        def __call__(self, completion, reference_answer, **columns):
            asked.append(completion)
            threads[completion] = threading.current_thread()
            return awake.wait(10) if completion == "slow" else 1.0

    scores = Scorer(Slow(), time_limit=0.2)(PROBLEMS, [["a", "slow"], ["b", "c"]])
    assert scores.rewards == [[1.0, None], [1.0, 1.0]]
    awake.set()
    threads["slow"].join(10)
    assert asked == ["a", "slow", "b", "c"]


def test_a_reward_that_never_works_ends_the_run():
    with pytest.raises(UsageError, match="every completion: ZeroDivisionError"):
        Scorer(Moody(divide))(PROBLEMS, [["bad"], ["bad"]])
    scorer = Scorer(Moody(divide))
    scorer(PROBLEMS, [["good"], ["bad"]])  # it has worked: one bad step is bad luck
    scorer(PROBLEMS, [["bad"], ["bad"]])
    scorer(PROBLEMS, [["bad"], ["bad"]])
    with pytest.raises(UsageError):
        scorer(PROBLEMS, [["bad"], ["bad"]])


def test_ctrl_c_in_a_reward_is_not_swallowed():
    assert Scorer(Moody(divide))([], []).rewards == []  # no rollouts, no call

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Scorer(Moody(interrupt))(PROBLEMS, [["bad"], ["good"]])


def test_an_async_reward_waits_for_all_at_once():
    asked = waiting = most = 0

    class Judge(RewardFunction):
        async def __call__(self, completion, reference_answer, **columns):
            nonlocal asked, waiting, most
            asked, waiting = asked + 1, waiting + 1
            most = max(most, waiting)
            await asyncio.sleep(0.05 if completion != "slow" else 60)
            waiting -= 1
            return 1 / (completion != "bad")

    scorer = Scorer(Judge(), time_limit=1.0)
    scores = scorer(PROBLEMS, [["good", "bad", "slow"], ["good"] * 3])
    assert scores.rewards == [[1.0, None, None], [1.0] * 3]
    assert (asked, most) == (6, 6)
    judge = Judge().__call__  # a function of one completion

    async def function(completion, reference_answer):
        return await judge(completion, reference_answer)

    class Plain:
        async def __call__(self, completion, reference_answer):
            return await judge(completion, reference_answer)

    for reward in (function, Plain()):
        asked = waiting = most = 0
        assert Scorer(reward)(PROBLEMS, [["good"] * 2] * 2).rewards == [[1.0] * 2] * 2
        assert most == 4
    combined = Scorer(CombinedReward([Judge(), FormatReward()]), time_limit=30.0)
    assert combined(PROBLEMS[:1], [["good"]]).rewards == [[0.5]]

    async def plain(completions, answer):
        await asyncio.sleep(0)
        return [float(a in c) for c, a in zip(completions, answer, strict=True)]

    calls = []

    def with_a_loop_of_its_own(completions, answer):
        calls.append(len(completions))
        return asyncio.run(plain(completions, answer))

    for reward in (plain, CombinedReward([plain, plain]), with_a_loop_of_its_own):
        assert Scorer(reward)(PROBLEMS, GROUPS).rewards == [[1.0, 0.0], [1.0, 1.0]]
    assert calls == [4]


def test_an_async_reward_keeps_its_event_loop_from_step_to_step():
    """A semaphore, or the connections of a client, belong to one event loop."""
    one_at_a_time, loops = asyncio.Semaphore(1), set()

    async def judge(completion, reference_answer):
        async with one_at_a_time:
            loops.add(asyncio.get_running_loop())
            await asyncio.sleep(0)
            return 1.0

    scorer = Scorer(judge)
    for _ in range(3):
        assert scorer(PROBLEMS, GROUPS).rewards == [[1.0, 1.0]] * 2
    assert len(loops) == 1


def test_a_batch_call_is_called_once_and_again_one_by_one_if_it_fails():
    sizes = []

    class Batch(RewardFunction):
        def __call__(self, completion, reference_answer, **columns):
            return 2.0

        def batch_call(self, completions, reference_answers, **columns):
            sizes.append((len(completions), columns["level"], threading.active_count()))
            if "bad" in completions:
                raise ValueError
            return [1.0] * len(completions)

    scorer = Scorer(Batch())
    assert scorer(PROBLEMS, GROUPS).rewards == [[1.0, 1.0], [1.0, 1.0]]
    assert sizes[0][:2] == (4, [1, 1, None, None])
    assert scorer(PROBLEMS[:1], [["bad"]]).rewards == [[2.0]]
    assert Moody(divide).batch_call(["good", "good"], ["1", "2"], level=[1, 2]) == [1.0, 1.0]


def test_columns_and_extras_reach_a_reward():
    seen = {}

    class Look(RewardFunction):
        def __call__(self, completion, reference_answer, **columns):
            seen.update(columns, completion=completion, answer=reference_answer)
            return 0.0

    Scorer(Look(), reasoning_format="simple")(PROBLEMS[:1], [["x"]], [[True]])
    assert seen == {
        "completion": "x", "answer": "2", "question": "1 + 1?", "level": 1,
        "answer_type": "number", "reasoning_format": "simple", "is_truncated": True,
        "solution": "", "completion_ids": [],
        "strict_verdict": Verdict(False, "no_reasoning", None),
    }  # fmt: skip


def test_a_column_that_a_row_lacks_is_none_or_the_default():
    rows = [{"question": "1?", "answer": "1", "unit": "m"}, {"question": "2?", "answer": "2"}]
    seen = []

    def needed(completion, reference_answer, unit):
        seen.append(unit)
        return 0.0

    def optional(completion, reference_answer, unit="km"):
        seen.append(unit)
        return 0.0

    for reward in (needed, optional):
        Scorer(reward)(as_problems(rows), [["x"], ["y"]])
    assert seen == ["m", None, "m", "km"]


# --- --reward FILE.py:NAME ------------------------------------------------------------------------


def test_a_reward_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from rlm.rewards import RewardFunction\n"
        "class Mine(RewardFunction):\n"
        "    def __call__(self, completion, reference_answer, **columns):\n"
        "        return float('yes' in completion)\n"
        "def short(completions):\n"
        "    return [float(len(c) < 3) for c in completions]\n"
        "def one(completion, reference_answer):\n"
        "    return float(completion == 'yes')\n"
        "both = [(one, 3), Mine]\n"
        "number = 3\n"
        "def wrong(text):\n"
        "    return 1.0\n"
    )
    for name, expected in (
        ("Mine", [[1.0, 0.0]]), ("short", [[0.0, 1.0]]), ("one", [[1.0, 0.0]]),
        ("both", [[1.0, 0.0]]),
    ):  # fmt: skip
        assert Scorer(load_reward(f"{file}:{name}"))(PROBLEMS[:1], [["yes", "no"]]).rewards == (
            expected
        )
    assert load_reward(None) is None
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)")
    (tmp_path / "empty.py").touch()
    for spec, message in {
        f"{file}:number": "the file defines Mine, short",
        f"{file}:wrong": r"wrong\(text\) names neither completion nor completions",
        f"{file}:other": "no function or class 'other'",
        f"{tmp_path}/empty.py:f": "the file defines none",
        str(file): "write FILE.py:NAME",
        f"{tmp_path}/none.py:f": "does not exist",
        f"{tmp_path}/broken.py:f": "ModuleNotFoundError",
        f"{tmp_path}/script.py:f": "SystemExit",
    }.items():
        with pytest.raises(UsageError, match=message):
            load_reward(spec)


def test_the_parts_of_a_combined_reward_are_seen_one_by_one():
    reward = CombinedReward([FormatReward(weight=1.0), (lambda completion, answer: 0.25, 2.0)])
    text = "<think>\nso\n</think>\n<answer>4</answer>"
    found = reward.get_component_rewards(text, "4")
    assert list(found.values()) == [FormatReward()(text, "4"), 0.25]
    assert not reward.pop_metrics()  # looking counts nothing
