"""Tokens that a tool wrote are attended to, but not learned."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import tiny_model

from rlm.cli import UsageError
from rlm.data.problem import Problem
from rlm.model import AdapterInfo
from rlm.sampling import Completion
from rlm.training.advantages import Group
from rlm.training.algorithms import ALGORITHMS
from rlm.training.batches import Rollout, make_micro_batches
from rlm.training.distributed import Distributed
from rlm.training.logprobs import token_logprobs
from rlm.training.loss import policy_loss
from rlm.training.metrics import learn_metrics, step_metrics
from tests.test_train_grpo import CPU, PROBLEMS, a_config, likes_letters, rows
from tests.training.test_batches import AGGREGATIONS, rollouts_of
from train_grpo import GRPOTrainer

NAN = float("nan")
MASK = [True, True, False, False, True]  # a tool wrote the third and the fourth token
LONG = Completion([1, 2, 3, 4, 5], [-1.0, -2.0, NAN, NAN, -0.5], "stop", MASK)
SHORT = Completion([6, 7], [-1.0, -1.0], "stop", [True, True])
GROUP = Group(Problem("p", "?", "1"), [9], [LONG, SHORT], ["", ""], [1.0, 0.0])
WEIGHTS = {"sequence": (1 / 6, 1 / 4), "constant": (1 / 16, 1 / 16), "token": (1 / 5, 1 / 5)}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_denominators_count_the_models_own_tokens(aggregation):
    options = AGGREGATIONS[aggregation]
    rollouts = rollouts_of(GROUP, [1.0, -1.0], **options)
    assert [r.weight for r in rollouts] == pytest.approx(WEIGHTS[aggregation])
    assert [r.tool_mask for r in rollouts] == [MASK, [True, True]]
    only = Completion([1], [NAN], "length", [False])  # a tool wrote the whole completion
    group = replace(GROUP, completions=[LONG, only])
    (kept,) = rollouts_of(group, [1.0, -1.0], **options, kl_weight=0.1)
    weight = {"sequence": 1 / 6, "constant": 1 / 16, "token": 1 / 3}[aggregation]
    assert (kept.tool_mask, kept.weight) == (MASK, pytest.approx(weight))


def batch_of(aggregation):
    rollouts = rollouts_of(GROUP, [1.0, -1.0], **AGGREGATIONS[aggregation])
    (micro,) = make_micro_batches(rollouts, 9, 99, "cpu")
    assert micro.rows == [0, 1]
    return micro


def test_the_batch_holds_the_mask():
    micro = batch_of("sequence")
    assert micro.completion_mask.tolist() == [MASK, [True, True, False, False, False]]
    assert micro.sampler_logprobs.tolist() == [[-1.0, -2.0, 0, 0, -0.5], [-1.0, -1.0, 0, 0, 0]]
    assert micro.lengths == [5, 2]  # the inserted tokens stay in the batch
    assert micro.targets.tolist() == [1, 2, 3, 4, 5, 6, 7]
    mixed = [
        Rollout(0, [9], [1, 2], 1.0, 1.0, [-1.0] * 2),
        Rollout(0, [9], [3, 4], 1.0, 1.0, [-1.0, NAN], [True, False]),
        Rollout(1, [9] * 9, [5], 1.0, 1.0, [-1.0]),  # longer than the others, so it comes first
    ]
    (micro,) = make_micro_batches(mixed, 9, 99, "cpu")
    assert micro.completion_mask.tolist() == [[True, False], [True, True], [True, False]]
    plain = [replace(rollout, tool_mask=()) for rollout in mixed[:1]]
    assert make_micro_batches(plain, 9, 99, "cpu")[0].tool_mask is None


NEW = torch.tensor([[-1.0, -2.0, -9.0, -9.0, -0.5], [-1.5, -1.0, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_depends_on_the_probabilities_of_inserted_tokens(algorithm):
    """Neither loss nor gradient nor metrics may change, also for the sequence ratio of GSPO."""
    found = []
    for wild in (0.0, 3.0, -40.0):
        micro = batch_of("token")
        shift = torch.tensor([[0.3, -0.4, wild, wild / 2, 0.1], [-0.3, 0.6, 0, 0, 0]])
        micro.old_logprobs = NEW + shift
        micro.ref_logprobs = NEW - 2 * shift
        logprobs = NEW.clone().requires_grad_(True)
        options = {"correct_sampler": True, "kl_weight": 0.1}
        loss, sums = policy_loss(logprobs, micro, ALGORITHMS[algorithm], **options)
        loss.backward()
        entropy = torch.tensor([[0.5, 0.25, wild, wild, 1.0], [2.0, 1.0, 0.0, 0.0, 0.0]])
        learned = (micro, NEW + torch.where(micro.completion_mask, 0, wild), entropy, sums)
        metrics = learn_metrics([[learned]], [0.0], 1, Distributed())
        assert not logprobs.grad[~micro.completion_mask].any()
        assert logprobs.grad[micro.completion_mask].any()
        found.append((loss.item(), logprobs.grad.tolist(), sums, metrics))
    assert found[0] == found[1] == found[2]
    assert found[0][3]["policy/entropy"] == pytest.approx((0.5 + 0.25 + 1.0 + 2.0 + 1.0) / 5)
    assert found[0][3]["sampler/logprob_gap_mean"] == pytest.approx(0.5 / 5)


def test_inserted_tokens_stay_in_the_attention():
    policy = tiny_model()
    scored = []
    for inserted in (3, 200):
        rollout = Rollout(
            0, [9], [1, inserted, 5, 6], 1.0, 1.0, [-1.0] * 4, [True, False, True, True]
        )
        (micro,) = make_micro_batches([rollout], 9, 99, "cpu")
        with torch.no_grad():
            scored.append(token_logprobs(policy, micro, 1.0)[0][0])
    assert scored[0][0] == scored[1][0]
    assert (scored[0][2:] != scored[1][2:]).all()


def test_the_metric_of_a_step():
    """The metric counts the calls per completion; the length includes the tool's tokens."""
    seconds = {"sample": 1.0, "score": 0.0, "learn": 0.0}
    twice = Completion([1] * 4, [], "stop", [False, True, False, True])
    group = replace(GROUP, completions=[LONG, twice])
    arguments = (torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2), torch.ones(1, dtype=torch.bool))
    found = step_metrics([group], *arguments, seconds)
    assert found["tools/calls_per_completion"] == 3 / 2
    assert found["completion/length_mean"] == 4.5


# --- a whole run ----------------------------------------------------------------------------------


class Remark:
    """A tool that writes `!!` after about every third character, so a random model triggers it."""

    name, trigger = "remark", ""

    def __call__(self, text):
        return "!!" if text and not text.endswith("!") and ord(text[-1]) % 3 == 0 else None


config_of = partial(a_config, steps=2, max_new_tokens=12)


def a_run(model_dir, config, tool=Remark):
    torch.manual_seed(0)
    trainer = GRPOTrainer(str(model_dir), config, likes_letters, device=CPU, tool=tool)
    trainer.train(PROBLEMS)
    return rows(config), {name: t.detach().clone() for name, t in trainer.adapter.items()}


@pytest.mark.parametrize("sampler", ["merged", pytest.param("unmerged", marks=pytest.mark.slow)])
def test_a_run_with_a_tool(model_dir, tmp_path, sampler):
    """Sampler and trainer agree on the model's own tokens, and resuming changes nothing.

    samples.jsonl contains the spans of the tool's text.
    """
    config = config_of(tmp_path, sampler=sampler)
    metrics, adapter = a_run(model_dir, config)
    for row in metrics:
        assert row["tools/calls_per_completion"] > 1
        assert row["sampler/logprob_gap_max"] < 1e-4
        assert row["optim/grad_norm"] > 0
    for line in (config.run_dir / "samples.jsonl").open():
        group = json.loads(line)
        for text, spans in zip(group["completions"], group["tool_calls"], strict=True):
            asked = [Remark()(text[:end]) for end in range(len(text))]
            assert [start for start, _ in spans] == [i for i, said in enumerate(asked) if said]
            assert all("!!".startswith(text[start:end]) for start, end in spans)  # may be cut
    assert AdapterInfo.load(config.output).tool == "remark"
    short = replace(config, run_dir=tmp_path / "other", output=tmp_path / "b", steps=1)
    a_run(model_dir, short)
    _, resumed = a_run(model_dir, replace(short, steps=2, resume=True))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in adapter.items())


def test_vllm_takes_no_tool(model_dir, tmp_path):
    with pytest.raises(ValueError, match="--tool does not work with --sampler vllm"):
        config_of(tmp_path, sampler="vllm", tool="calculator")
    config = config_of(tmp_path, sampler="vllm")
    with pytest.raises(ValueError, match="--sampler vllm"):
        GRPOTrainer(str(model_dir), config, tool=Remark())
    with pytest.raises(UsageError, match="--tool abacus: use none, calculator"):
        GRPOTrainer(str(model_dir), config_of(tmp_path, tool="abacus"))
    with pytest.raises(TypeError, match=r"tool\.name must be a str"):
        GRPOTrainer(str(model_dir), config_of(tmp_path), tool=print)
