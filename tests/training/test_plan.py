"""`train_grpo.py --plan` estimates a run from measurements, and changes nothing."""

from types import SimpleNamespace

import pytest
import torch

from rlm.sampling import Token
from rlm.training import plan
from rlm.training.config import GRPOConfig
from rlm.training.plan import SamplingTime, show_plan, time_learning, time_sampling
from tests.test_train_grpo import PROBLEMS, a_config, a_trainer, force_checkpointing


def state_of(trainer):
    """Copy all weights and the random state, and check that there are no gradients."""
    tensors = dict(trainer.policy.named_parameters())
    tensors |= {f"master {name}": tensor for name, tensor in trainer.adapter.items()}
    assert all(tensor.grad is None for tensor in tensors.values())
    assert not trainer.optimizer.state
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return copies | {"random": torch.get_rng_state()}


@pytest.mark.parametrize("options", [{}, {"kl_weight": 0.1, "sampler": "unmerged"}])
def test_a_plan_changes_nothing(options, model_dir, tmp_path, capsys, monkeypatch):
    if options:
        force_checkpointing(monkeypatch)
    trainer = a_trainer(model_dir, a_config(tmp_path, plan=True, **options))
    before = state_of(trainer)
    show_plan(trainer, trainer.prepare(PROBLEMS, PROBLEMS[:3]))
    after = state_of(trainer)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().out
    for text in (
        "40 problems, 3 to validate on",
        "GB at the peak",
        "sampling: cpu, float32 (",
        "learning: cpu, float32 (",
        "completions at a time",  # the number depends on the speed of the machine
        "3 of 3 steps",
        f"checkpointing {'on' if options else 'off'}",
    ):
        assert text in said, text
    assert "  run:" not in said  # a plan writes no run folder
    assert "warning: learning rate too high: 0.01 breaks a policy" in said


@pytest.mark.parametrize(("rate", "warns"), [(3e-4, True), (1e-4, True), (9e-5, False)])
def test_the_rates_of_a_small_model_are_reported_for_a_large_one(
    model_dir, tmp_path, capsys, monkeypatch, rate, warns
):
    """The learning rate of a config made in Python does not depend on the size of the model."""
    monkeypatch.setattr("rlm.training.trainer.LARGE_MODEL", 1000)
    a_trainer(model_dir, a_config(tmp_path, learning_rate=rate)).prepare(PROBLEMS, PROBLEMS[:3])
    said = f"warning: learning rate {rate:g} is usual for a model of 135M parameters"
    assert (said in capsys.readouterr().out) == warns


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(plan, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.mark.parametrize(
    ("tokens", "pace", "timed", "expected"),
    [(3, 0.25, 3, 0.625), (99, 0.25, 5, 0.25), (99, 1 / 64, 17, 1 / 64)],
)
def test_sampling_is_timed_by_the_first_tokens_of_the_batch(tokens, pace, timed, expected, clock):
    """Four rows are decoded at a time, and a finished row is replaced by another completion."""
    asked, drawn, released = [], [], []

    def stream(requests):
        asked.extend(requests)
        clock.now += 3.0
        for i in range(tokens):
            drawn.append(i)
            for row in range(4):
                yield Token(*((1, 3) if row == 1 and i > 1 else (0, row)), 5, -1.0, None)
            clock.now += 1.0 if i == 1 else pace  # a single pause must not change the estimate

    sampler = SimpleNamespace(stream=stream, release=lambda: released.append(True))
    config = GRPOConfig(group_size=4, max_new_tokens=64)
    found = time_sampling(sampler, config, [[2], [2]])
    assert found == SamplingTime(4, 3.0, expected)
    assert len(drawn) == timed
    assert [(r.n, r.params.max_new_tokens) for r in asked] == [(4, 64)] * 2
    assert released


def test_learning_is_timed_on_one_micro_batch_and_scaled_to_all(
    model_dir, tmp_path, clock, monkeypatch
):
    timed, seconds = [], [0.9, 0.25, 0.5]  # the minimum counts, because the first pass is a warm-up

    def pass_of(_, micro):
        clock.now += seconds[len(timed)]
        timed.append(micro)

    monkeypatch.setattr(plan, "_forward_and_backward", pass_of)
    options = {"train_batch_size": 2, "updates_per_batch": 3, "max_new_tokens": 5}
    trainer = a_trainer(model_dir, a_config(tmp_path, **options))
    memory = trainer.prepare(PROBLEMS, None).plan_memory(trainer)
    found, micro_batches = time_learning(trainer, memory, PROBLEMS[8:12])
    assert [micro.lengths for micro in micro_batches] == [[5, 5]] * 8
    assert all(micro is micro_batches[0] for micro in timed)
    assert len(timed) == 3
    sizes = [len(trainer.render(p)) + 2 * 4 for p in PROBLEMS[8:12] for _ in range(2)]
    assert len(set(sizes)) == 2
    assert found == pytest.approx(3 * 0.25 * sum(sizes) / max(sizes))


def test_what_a_plan_shows_by_hand(model_dir, tmp_path, monkeypatch, capsys):
    """The estimate contains all four sampling rounds of DAPO, each of 16 completions.

    A validation has 15 completions.
    """
    micro = SimpleNamespace(lengths=[6], input_ids=torch.zeros(1, 9))
    monkeypatch.setattr(plan, "time_sampling", lambda *_: SamplingTime(4, 2.0, 0.5))
    monkeypatch.setattr(plan, "time_learning", lambda *_: (3.0, [micro]))
    trainer = a_trainer(model_dir, a_config(tmp_path, algorithm="dapo"))
    show_plan(trainer, trainer.prepare(PROBLEMS, PROBLEMS[:3]))
    said = capsys.readouterr().out
    assert "a step: 75.0 s: sampling 72.0, learning 3.0" in said
    assert "different rewards in each group, but only after all 4 sampling rounds" in said
    assert "a validation: 18.0 s" in said
    assert "total: 4 min 21 s for 3 of 3 steps" in said  # includes two validations
