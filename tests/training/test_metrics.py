"""The metrics of a step against values that were computed by hand."""

import json
import math
import time
from types import SimpleNamespace

import pytest
import torch

from rlm.data import Problem
from rlm.rewards import Scorer
from rlm.runs import RunDirectory
from rlm.sampling import Completion
from rlm.training.advantages import Group
from rlm.training.config import GRPOConfig
from rlm.training.distributed import Distributed
from rlm.training.loss import LossSums
from rlm.training.metrics import (
    learn_metrics,
    remaining,
    step_metrics,
    time_left,
)
from rlm.training.state import TrainingState
from rlm.training.trainer import TrainingData, TrainingRun


def completion(length, reason="stop"):
    return Completion([1] * length, [0.0] * length, reason)


def test_the_metrics_of_a_step_by_hand():
    nan = math.nan
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [nan, 1.0], [0.0, 1.0]])  # (P, G)
    groups = [
        Group(None, [], completions, [], [])
        for completions in (
            [completion(2), completion(4)],
            [completion(6, "length"), completion(1)],
            [completion(3), completion(5, "length")],
            [completion(1), completion(2)],
        )
    ]
    none, all_kept = torch.zeros(4, 2), torch.ones(4, dtype=torch.bool)
    seconds = {"sample": 2.0, "score": 0.5, "learn": 1.0}
    found = step_metrics(groups, rewards, none, all_kept, seconds)
    assert found == pytest.approx(
        {
            "reward/mean": 5 / 7,
            "reward/std": math.sqrt((5 * (2 / 7) ** 2 + 2 * (5 / 7) ** 2) / 6),
            "reward/no_verdict": 1,
            "reward/zero_signal_groups": 2,  # one has equal rewards, and one has a single verdict
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
    punished = step_metrics(groups, rewards, penalties, all_kept, seconds)
    assert punished["reward/zero_signal_groups"] == 1  # penalties give this group different scores
    near = step_metrics(groups, rewards, penalties / 1000, all_kept, seconds, "share")
    assert near["reward/zero_signal_groups"] == 2
    kept = torch.tensor([True, False, False, True])
    more = step_metrics(groups, rewards, penalties, kept, seconds)
    assert more.items() >= found.items()  # dropped groups and rewards without penalties count
    assert {name: more[name] for name in more.keys() - found.keys()} == pytest.approx(
        {"reward/overlong": -0.1, "sampling/dropped_groups": 2, "reward/kept_mean": 0.5}
    )


def micro_batch(sampler_logprobs, *lengths):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return SimpleNamespace(sampler_logprobs=torch.tensor(sampler_logprobs), completion_mask=mask)


def test_the_metrics_of_learning_by_hand():
    """Entropy and gap describe the first update, loss and clipping the last one.

    Means are over tokens, not over rows or micro-batches.
    """
    long, short = micro_batch([[-1.0, -2.0], [-3.0, 0.0]], 2, 1), micro_batch([[-1.0]], 1)
    logprobs = torch.tensor([[-1.5, -2.0], [-3.0, -9.0]]), torch.tensor([[-3.0]])
    entropy = torch.tensor([[0.5, 0.25], [0.25, 0.0]]), torch.tensor([[2.0]])
    first = LossSums(9.0, 9.0, 9.0, 9, tokens=3), LossSums(9.0, 9.0, 9.0, 9, tokens=1)
    last = LossSums(0.5, 0.25, 2.0, 1, tokens=3), LossSums(-0.25, 0.5, 1.0, 1, tokens=1)
    # The second update has other log-probabilities and entropies than sampling.
    updates = [
        [
            (micro, logprobs[i] + drift, entropy[i] + drift, sums[i])
            for i, micro in enumerate((long, short))
        ]
        for drift, sums in ((0.0, first), (1.0, last))
    ]
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
    assert learn_metrics(updates, [0.9, 0.7], 1, Distributed()) == pytest.approx(expected)
    shares = [[], []]  # what the two processes gather
    for i in range(2):
        alone = SimpleNamespace(gather=lambda share, i=i: shares[i].append(share) or share)
        learn_metrics([update[i : i + 1] for update in updates], [0.9, 0.7], 1, alone)
    other = iter(shares[1])
    two = SimpleNamespace(gather=lambda share: [*share, *next(other)])
    mine = [update[:1] for update in updates]
    assert learn_metrics(mine, [0.9, 0.7], 1, two) == pytest.approx(expected)
    assert learn_metrics([], [], 0, Distributed()) == {}
    # Both updates are mini-batches of one pass: losses and norms are means over them.
    of_a_pass = expected | {
        "loss/policy": (18.0 + 0.25) / 2,
        "loss/kl": (18.0 + 3.0) / 8,
        "loss/kl_weighted": (18.0 + 0.75) / 2,
        "policy/entropy": (3.0 + 7.0) / 8,
        "policy/clip_fraction": (18 + 2) / 8,
        "optim/grad_norm": 0.8,
    }
    assert learn_metrics(updates, [0.9, 0.7], 2, Distributed()) == pytest.approx(of_a_pass)


def test_a_process_without_rollouts_adds_a_gradient_of_zero(monkeypatch):
    other = torch.tensor([1.0, 2.0, 3.0])  # the gradients of the other process
    monkeypatch.setattr("torch.distributed.all_reduce", lambda flat: flat.add_(other))
    one, two = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(2, 1))
    one.grad = torch.tensor([10.0])
    Distributed(0, 2).all_reduce([one, two])
    assert one.grad.tolist() == [11.0]
    assert two.grad.tolist() == [[2.0], [3.0]]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 3, 5], [2, 4], [1, 2, 3, 4, 5]),  # the shares that `shard` makes
        ([1], [2, 4, 5], [1, 2, 4, 5]),
        ([], [2, 4], [2, 4]),
    ],
)
def test_gather_loses_nothing_whoever_has_more(monkeypatch, first, second, expected):
    def all_gather(parts, mine):
        parts[:] = first, second

    monkeypatch.setattr("torch.distributed.all_gather_object", all_gather)
    assert Distributed(0, 2).gather(first) == expected


@pytest.mark.parametrize("size", [7, 8])
def test_a_run_says_what_it_will_do_and_that_a_small_group_is_noisy(
    size, tmp_path, monkeypatch, capsys
):
    """The default folders need not fit together if the run uses none of them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "sft_lora").symlink_to(tmp_path / "runs" / "grpo" / "adapter_last")
    config = GRPOConfig(
        model="m", dataset="d", group_size=size, steps=20, max_minutes=3.0, run_dir="r"
    )
    data = TrainingData([None] * 9, [None] * 4, [], ("number",), "accuracy")
    weights = SimpleNamespace(master_weights={"lora_A": torch.zeros(32)})
    sampler = SimpleNamespace(description="merged")
    data.announce(SimpleNamespace(config=config, weights=weights, sampler=sampler))
    said = capsys.readouterr().out
    for text in (
        "d: 9 problems, 4 to validate on",
        "32 parameters",
        "20, or 3 minutes",
        config.formula,
    ):
        assert text in said.replace("\n", " ")
    assert ("the group's mean is noisy" in said) == ("group_size 7" in said) == (size < 8)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"steps": 7, "eval_every": 3}, (7, 7 * 30 + 3 * 10)),  # validations after 3, 6, 7
        ({"steps": 6, "eval_every": 3}, (6, 6 * 30 + 2 * 10)),  # 3, 6
        ({"steps": 7, "eval_every": 0}, (7, 7 * 30 + 10)),  # 7
        # The limit is exceeded in step 4. Steps 2 and 4 are followed by a validation.
        ({"steps": 7, "eval_every": 2, "max_minutes": 2.0}, (4, 4 * 30 + 2 * 10)),
    ],
)
def test_where_a_run_ends_and_when_by_hand(options, expected):
    assert remaining(GRPOConfig(**options), 0, 30.0, 10.0, seconds=10.0) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Six steps are left. The last five took 1, 2, 3, 4 and 5 seconds, so 3 seconds on average.
        ({"eval_every": 4}, 6 * 3 + 3 * 20),  # validations after 8, 12 and 13
        ({"eval_every": 4, "max_minutes": 5.0}, 4 * 3 + 2 * 20),  # validations after 8 and 11
        ({"eval_every": 4, "max_minutes": 4.0}, 3 + 20),  # the limit is over: one more step
    ],
)
def test_the_time_that_is_left_by_hand(options, expected):
    times = [(90, 0, 9), (9, 0, 0), (1, 0, 0), (1, 0, 1), (1, 1, 1), (2, 0, 2), (1, 1, 3)]
    phases = ("time/sample", "time/score", "time/learn")
    rows = [
        {"step": step, **dict(zip(phases, took, strict=True))} for step, took in enumerate(times)
    ]
    rows[0]["time/evaluate"], rows[4]["time/evaluate"] = 99.0, 20.0
    assert time_left(rows[:1], GRPOConfig(steps=1), 0.0) == 0
    assert time_left(rows, GRPOConfig(steps=13, **options), minutes=4.5) == expected


def test_the_limit_of_a_run_is_in_minutes():
    state = TrainingState(None, None, "", _began=time.monotonic() - 90)
    for limit, over in ((1, True), (60, False)):
        made = TrainingRun.__new__(TrainingRun)  # only the attributes that this reads
        made.data = TrainingData([], [], [], (), "accuracy")
        config = GRPOConfig(steps=9, max_minutes=limit, save_every=0)
        made.trainer = SimpleNamespace(config=config, state=state, distributed=Distributed())
        assert made.validate_if_due(0) == {}
        assert made._is_last is over


def test_samples_hold_the_strict_verdict_and_what_was_cut(tmp_path):
    texts = ["<think>\n1 + 1 = 2\n</think>\n<answer>2</answer>", "<think>\n1 + 1"]
    problem, drawn = Problem("p", "1 + 1?", "2"), [completion(2), completion(3, "length")]
    scores = Scorer(lambda completion: 0.0)([problem], [texts])
    group = Group(problem, [], drawn, texts, *scores.rewards, *scores.reasons)
    rewards, none = torch.zeros(1, 2), torch.zeros(1, 2)
    seconds = {"sample": 1.0, "score": 1.0, "learn": 1.0}
    kept = torch.ones(1, dtype=torch.bool)
    metrics = {"step": 0} | step_metrics([group], rewards, none, kept, seconds)
    config = GRPOConfig(steps=1, reasoning_format="deepseek")
    with RunDirectory(tmp_path / "run", resume=False) as run:
        made = TrainingRun.__new__(TrainingRun)  # only the attributes that log_step reads
        made.directory, made.steps = run, 1
        made.trainer = SimpleNamespace(config=config, state=SimpleNamespace(minutes=0.0))
        made.log_step(metrics, [group], none)
    (row,) = map(json.loads, (tmp_path / "run" / "samples.jsonl").open())
    assert row["truncated"] == [False, True]
    assert row["verdicts"][0] == "correct"  # although the reward was 0
    assert row["verdicts"][1] not in ("correct", "wrong")
