"""Warnings during a run: their thresholds, their advice, and when they are printed."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlm.runs.directory import RunDirectory
from rlm.training.config import GRPOConfig
from rlm.training.metrics import FLAT_STEPS, RECENT_STEPS, active_alerts, new_alerts
from rlm.training.trainer import TrainingRun

GOOD = {
    "reward/mean": 0.4,
    "reward/std": 0.49,
    "reward/zero_signal_share": 0.4,
    "completion/truncated_rate": 0.02,
    "completion/length_max": 96,
    "policy/entropy": 0.12,
    "loss/kl": 0.0,
    "sampler/logprob_gap_mean": 3e-6,
}
DEMO = Path(__file__).parents[2] / "docs" / "results" / "demo" / "metrics.jsonl"


def rows(count=RECENT_STEPS, **changes):
    changes = {name.replace("__", "/"): value for name, value in changes.items()}
    return [GOOD | changes] * count


def test_a_good_run_is_silent():
    assert active_alerts(rows()) == {}
    demo = [json.loads(line) for line in DEMO.open()]
    assert len(demo) > RECENT_STEPS
    for end in range(len(demo) + 1):
        assert new_alerts(demo[:end]) == []


@pytest.mark.parametrize(
    ("metric", "silent", "bad", "advice"),
    [
        ("completion__truncated_rate", 0.1, 0.12, "12% of the completions were cut off"),
        ("reward__zero_signal_share", 0.79, 0.8, "--group-size"),
        ("policy__entropy", 0.021, 0.019, "fallen to 0.019 nats"),
        ("loss__kl", 1.0, 1.1, "--kl-weight"),
        ("sampler__logprob_gap_mean", 0.1, 0.2, "--sampler unmerged"),
    ],
)
def test_each_rule_holds_beyond_its_threshold_and_gives_advice(metric, silent, bad, advice):
    assert active_alerts(rows(**{metric: silent})) == {}
    (text,) = active_alerts(rows(**{metric: bad})).values()
    assert advice in text
    assert "--" in text  # names an option to change
    assert "\n" not in text


def test_one_bad_step_is_no_warning_and_neither_is_a_short_run():
    assert active_alerts([*rows(RECENT_STEPS - 1), *rows(1, policy__entropy=0.0)]) == {}
    assert active_alerts(rows(RECENT_STEPS - 1, policy__entropy=0.0)) == {}


def test_completions_that_are_cut_off_are_said_at_the_first_step_with_what_to_type():
    (text,) = active_alerts(rows(1, completion__truncated_rate=0.34)).values()
    assert text.startswith("34% of the completions were cut off")
    assert "train_sft.py" not in text  # SFT does not train the orchestrator
    assert "--max-new-tokens 192" in text  # twice the length of the longest one
    assert active_alerts(rows(1, completion__truncated_rate=0.1)) == {}
    agents = rows(1, agents__truncated_rate=0.5, agents__length_max=96)
    (text,) = active_alerts(agents).values()
    assert text.startswith("50% of the agents' replies were cut off")
    assert text.endswith("--agent-max-tokens 192")


def test_nothing_rewarded_and_everything_rewarded_are_told_apart():
    nothing = rows(reward__mean=0.0, reward__std=0.0, reward__zero_signal_share=1.0)
    assert list(active_alerts(nothing)) == ["reward"]  # without the zero-signal rule
    assert "no completion of the last 5 steps earned a reward" in active_alerts(nothing)["reward"]
    assert "train_sft.py" not in active_alerts(nothing)["reward"]
    everything = rows(reward__mean=1.0, reward__std=0.0, reward__zero_signal_share=1.0)
    assert "have the reward 1" in active_alerts(everything)["reward"]
    some = [row | {"reward/no_verdict": 3} for row in everything]
    assert "let the reward return 0 for them" in active_alerts(some)["reward"]
    changing = [*rows(4, reward__std=0.0), *rows(1, reward__std=0.0, reward__mean=0.5)]
    assert "reward" not in active_alerts(changing)


def test_a_reward_that_does_not_rise():
    def climbing(rise, start=0.4):
        return [
            GOOD | {"reward/mean": start + rise * i / FLAT_STEPS, "reward/std": 0.1}
            for i in range(FLAT_STEPS)
        ]

    assert list(active_alerts(climbing(0.0))) == ["flat"]
    assert list(active_alerts(climbing(-0.2))) == ["flat"]
    assert active_alerts(climbing(0.1)) == {}
    assert active_alerts(climbing(0.03)) == {}  # rises by 0.02 from the first to the last third
    assert active_alerts(climbing(0.0)[1:]) == {}  # one step too few
    assert active_alerts(climbing(0.0, start=0.95)) == {}  # near the maximum
    bad = [row | {"policy/entropy": 0.0} for row in climbing(0.0)]
    assert list(active_alerts(bad)) == ["policy/entropy"]  # reports the cause, not the effect


def test_a_warning_comes_once_until_it_has_gone_and_comes_again():
    history, said = [], []
    for entropy in [0.1] * 5 + [0.0] * 10 + [0.5] * 5 + [0.0] * 10:
        history.append(GOOD | {"policy/entropy": entropy})
        said.append(len(new_alerts(history)))
    assert sum(said) == 2
    assert said.index(1) == 9  # at step 8 the mean is 0.02, which is not below


def test_metrics_that_are_missing_or_not_numbers_are_passed_over():
    without = [{k: v for k, v in row.items() if "entropy" not in k} for row in rows()]
    assert active_alerts(without) == {}
    assert active_alerts(rows(policy__entropy=float("nan"))) == {}


def test_a_warning_is_printed_when_it_begins_and_not_again(tmp_path, capsys):
    said = []
    times = {"time/sample": 1.0, "time/score": 0.0, "time/learn": 1.0}
    with RunDirectory(tmp_path / "run", resume=False) as run:
        made = TrainingRun.__new__(TrainingRun)  # only the attributes that log_step reads
        made.directory, made.steps = run, 20
        config = GRPOConfig(steps=20, eval_every=0)
        made.trainer = SimpleNamespace(config=config, state=SimpleNamespace(minutes=0.0))
        for step in range(1, RECENT_STEPS + 3):  # no sample is printed in these steps
            metrics = GOOD | times | {"completion/length_mean": 9.0, "optim/grad_norm": 1.0}
            metrics |= {"step": step, "completion/truncated_rate": 0.75}
            made.log_step(metrics, [], torch.zeros(0, 2))
            said.append(capsys.readouterr().out)
    assert ["warning: " in text for text in said] == [True] + [False] * (RECENT_STEPS + 1)
    (line,) = [line for line in said[0].splitlines() if line.startswith("warning: ")]
    assert "75% of the completions were cut off" in line
    assert "--max-new-tokens" in line
