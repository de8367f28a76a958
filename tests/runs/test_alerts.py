"""Warnings: each rule begins where it should, says what to do, and is silent in a good run.

And the figures that the rules read, worked out by hand.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlm.training.loss import LossSums
from rlm.training.config import GRPOConfig
from rlm.runs.alerts import FLAT_STEPS, WINDOW, new_warnings, warnings
from rlm.training.metrics import LearningTally, log_step, step_metrics
from rlm.runs.directory import RunDirectory
from rlm.sampling import Completion

GOOD = {
    "reward/mean": 0.4,
    "reward/std": 0.49,
    "reward/zero_signal_share": 0.4,
    "completion/truncated_rate": 0.02,
    "policy/entropy": 0.12,
    "loss/kl": 0.0,
    "sampler/logprob_gap_mean": 3e-6,
}
DEMO = Path(__file__).parents[2] / "docs" / "results" / "demo" / "metrics.jsonl"


def rows(count=WINDOW, **changes):
    changes = {name.replace("__", "/"): value for name, value in changes.items()}
    return [GOOD | changes] * count


def test_a_good_run_is_silent():
    assert warnings(rows()) == {}
    demo = [json.loads(line) for line in DEMO.open()]
    assert len(demo) > WINDOW
    for end in range(len(demo) + 1):
        assert new_warnings(demo[:end]) == []


@pytest.mark.parametrize(
    ("metric", "silent", "bad", "advice"),
    [
        ("completion__truncated_rate", 0.49, 0.5, "50% of the completions have no end"),
        ("reward__zero_signal_share", 0.79, 0.8, "--group-size"),
        ("policy__entropy", 0.021, 0.019, "fallen to 0.019 nats"),
        ("loss__kl", 1.0, 1.1, "--kl-weight"),
        ("sampler__logprob_gap_mean", 0.1, 0.2, "--sampler unmerged"),
    ],
)
def test_each_rule_holds_beyond_its_threshold_and_gives_advice(metric, silent, bad, advice):
    assert warnings(rows(**{metric: silent})) == {}
    (text,) = warnings(rows(**{metric: bad})).values()
    assert advice in text
    assert "--" in text  # an option to change
    assert "\n" not in text


def test_one_bad_step_is_no_warning_and_neither_is_a_short_run():
    assert warnings([*rows(WINDOW - 1), *rows(1, policy__entropy=0.0)]) == {}
    assert warnings(rows(WINDOW - 1, policy__entropy=0.0)) == {}


def test_nothing_rewarded_and_everything_rewarded_are_told_apart():
    nothing = rows(reward__mean=0.0, reward__std=0.0, reward__zero_signal_share=1.0)
    assert list(warnings(nothing)) == ["reward"]  # and not the zero-signal groups once more
    assert "nothing was rewarded in 5 steps" in warnings(nothing)["reward"]
    everything = rows(reward__mean=1.0, reward__std=0.0, reward__zero_signal_share=1.0)
    assert "have the reward 1" in warnings(everything)["reward"]
    changing = [*rows(4, reward__std=0.0), *rows(1, reward__std=0.0, reward__mean=0.5)]
    assert "reward" not in warnings(changing)


def test_a_reward_that_does_not_rise():
    def climbing(rise, start=0.4):
        return [
            GOOD | {"reward/mean": start + rise * i / FLAT_STEPS, "reward/std": 0.1}
            for i in range(FLAT_STEPS)
        ]

    assert list(warnings(climbing(0.0))) == ["flat"]
    assert list(warnings(climbing(-0.2))) == ["flat"]
    assert warnings(climbing(0.1)) == {}
    assert warnings(climbing(0.0)[1:]) == {}  # too early to say
    assert warnings(climbing(0.0, start=0.95)) == {}  # nothing left to rise to
    bad = [row | {"policy/entropy": 0.0} for row in climbing(0.0)]
    assert list(warnings(bad)) == ["policy/entropy"]  # the cause, not the effect


def test_a_warning_comes_once_until_it_has_gone_and_comes_again():
    history, said = [], []
    for entropy in [0.1] * 5 + [0.0] * 10 + [0.5] * 5 + [0.0] * 10:
        history.append(GOOD | {"policy/entropy": entropy})
        said.append(len(new_warnings(history)))
    assert sum(said) == 2
    assert said.index(1) == 9  # the mean of 0.1 and four zeros is 0.02: not below


def test_figures_that_are_missing_or_not_numbers_are_passed_over():
    without = [{k: v for k, v in row.items() if "entropy" not in k} for row in rows()]
    assert warnings(without) == {}
    assert warnings(rows(policy__entropy=float("nan"))) == {}


def test_a_warning_is_printed_when_it_begins_and_not_again(tmp_path, capsys):
    said = []
    times = {"time/sample": 1.0, "time/score": 0.0, "time/learn": 1.0}
    with RunDirectory(tmp_path / "run", resume=False) as run:
        for step in range(WINDOW + 2):
            figures = GOOD | times | {"completion/length_mean": 9.0, "optim/grad_norm": 1.0}
            figures |= {"step": step, "completion/truncated_rate": 0.75}
            log_step(run, GRPOConfig(sample_every=0), figures, [], torch.zeros(0, 2))
            said.append(capsys.readouterr().out)
    assert ["warning: " in text for text in said] == [False] * (WINDOW - 1) + [True, False, False]
    (line,) = [line for line in said[WINDOW - 1].splitlines() if line.startswith("warning: ")]
    assert "75% of the completions have no end" in line
    assert "--max-new-tokens" in line


# --- figures --------------------------------------------------------------------------------------


def completion(length, reason="stop"):
    return Completion([1] * length, [0.0] * length, reason)


def test_the_figures_of_a_step_by_hand():
    nan = math.nan
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [nan, 1.0], [0.0, 1.0]])  # (P, G)
    groups = [
        [completion(2), completion(4)],
        [completion(6, "length"), completion(1)],
        [completion(3), completion(5, "length")],
        [completion(1), completion(2)],
    ]
    none, all_kept = torch.zeros(4, 2), torch.ones(4, dtype=torch.bool)
    seconds = {"sample": 2.0, "score": 0.5, "learn": 1.0}
    found = step_metrics(groups, rewards, none, all_kept, seconds)
    assert found == pytest.approx(
        {
            "reward/mean": 5 / 7,
            "reward/std": math.sqrt((5 * (2 / 7) ** 2 + 2 * (5 / 7) ** 2) / 6),
            "reward/no_verdict": 1,
            "reward/zero_signal_groups": 2,  # all equal; a single verdict
            "reward/zero_signal_share": 0.5,
            "completion/length_mean": 3.0,
            "completion/length_max": 6,
            "completion/truncated_rate": 0.25,
            "time/sample": 2.0,
            "time/score": 0.5,
            "time/learn": 1.0,
            "tokens/per_second": 12.0,
        }
    )
    penalties = none.clone()
    penalties[1, 0] = -0.8
    kept = torch.tensor([True, False, False, True])
    more = step_metrics(groups, rewards, penalties, kept, seconds)
    assert more.items() >= found.items()  # all rollouts count, kept or not, as they were rewarded
    assert {name: more[name] for name in more.keys() - found.keys()} == pytest.approx(
        {"reward/overlong": -0.1, "sampling/dropped_groups": 2, "reward/kept_mean": 0.5}
    )


def micro_batch(sampler_logprobs, *lengths):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return SimpleNamespace(sampler_logprobs=torch.tensor(sampler_logprobs), completion_mask=mask)


def test_the_figures_of_learning_by_hand():
    """Entropy and gap are of the first update, loss and clipping of the last; means are over
    tokens, not over rows or micro-batches."""
    long, short = micro_batch([[-1.0, -2.0], [-3.0, 0.0]], 2, 1), micro_batch([[-1.0]], 1)
    logprobs = torch.tensor([[-1.5, -2.0], [-3.0, -9.0]]), torch.tensor([[-3.0]])
    entropy = torch.tensor([[0.5, 0.25], [0.25, 0.0]]), torch.tensor([[2.0]])
    first = LossSums(9.0, 9.0, 9.0, 9, 9, tokens=3), LossSums(9.0, 9.0, 9.0, 9, 9, tokens=1)
    last = LossSums(0.5, 0.25, 2.0, 1, 0, tokens=3), LossSums(-0.25, 0.5, 1.0, 0, 1, tokens=1)
    tally = LearningTally(grad_norm=0.7)
    others = [LearningTally(grad_norm=0.7) for _ in range(2)]  # a micro-batch each
    for update, sums in enumerate((first, last)):
        for i, micro in enumerate((long, short)):
            # Of the second update, log-probabilities and entropy are not what was sampled.
            drift = float(update)
            arguments = (update, micro, logprobs[i] + drift, entropy[i] + drift, sums[i])
            tally.add(*arguments)
            others[i].add(*arguments)
    expected = {
        "loss/policy": 0.25,
        "loss/kl": 3 / 4,
        "loss/kl_weighted": 0.75,
        "policy/entropy": 3 / 4,
        "policy/clip_fraction": 2 / 4,
        "optim/grad_norm": 0.7,
        "sampler/logprob_gap_mean": (0.5 + 2) / 4,
        "sampler/logprob_gap_max": 2.0,
    }
    assert tally.metrics() == pytest.approx(expected)
    assert LearningTally.joined(others).metrics() == pytest.approx(expected)  # of two processes
    assert LearningTally.joined([LearningTally()]).metrics() == {}
