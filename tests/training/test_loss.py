"""The policy loss against values of TRL 1.16's own `_compute_loss` on fixed tensors."""

import math
from dataclasses import replace

import pytest
import torch

from rlm.training.algorithms import ALGORITHMS
from rlm.training.batches import MicroBatch, row_weights
from rlm.training.loss import importance_weights, kl_estimate, policy_loss

NEW = torch.tensor(
    [[-0.10, -0.90, -2.00, -0.30], [-0.50, -1.20, -0.05, -3.00], [-0.70, -0.20, -1.00, -0.40]]
)
OLD = torch.tensor(
    [[-0.20, -0.60, -2.50, -0.30], [-0.40, -1.70, -0.05, -2.00], [-0.70, -0.50, -0.60, -0.40]]
)
REF = torch.tensor(
    [[-0.15, -0.80, -1.50, -0.50], [-0.60, -1.00, -0.10, -2.50], [-0.90, -0.30, -1.10, -0.20]]
)
LENGTHS = [4, 2, 3]
MASK = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
ADVANTAGES = torch.tensor([1.0, -0.5, -0.5])
GRPO = ALGORITHMS["grpo"]


def micro_batch(lengths, old, advantages, weights, ref=None, sampled=None):
    """Of what the loss reads."""
    ids = torch.empty(0)
    batch = MicroBatch(ids, ids, ids, ids, ids, lengths, advantages, torch.tensor(weights), sampled)
    batch.old_logprobs, batch.ref_logprobs = old, ref
    return batch


def loss_and_gradient(new, batch, algorithm=GRPO, **options):
    logprobs = new.clone().requires_grad_(True)
    loss, sums = policy_loss(logprobs, batch, algorithm, **options)
    loss.backward()
    return loss.item(), logprobs.grad, sums


KL = {"ref": REF}  # classic k3; TRL's default multiplies it by the ratio
HALVED = {"sampled": OLD + math.log(2)}
GSPO = {"ratio": "sequence"}
TIGHT = GSPO | {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}
CISPO = {"objective": "weighted", "clip_eps_low": 1.0}  # TRL's bound is the ratio: 1 + ours
CLIPS = [  # aggregation, algorithm, batch, loss, gradient of the first row and of the second
    ("sequence", {}, {}, 0.050623, [-0.09210, -0.06173, 0, -0.08333], [0.07540, 0.13739]),
    ("constant", {}, {}, -0.049762, [-0.04605, -0.03087, 0, -0.04167], [0.01885, 0.03435]),
    ("token", {"clip_eps_high": 0.28}, {}, -0.141587, [-0.12280, -0.08231, 0, -0.11111],
     [0.05027, 0.09160]),
    ("sequence", {}, KL, 0.051504, [-0.09194, -0.06209, -0.00216, -0.08273], [0.07604, 0.13592]),
    ("sequence", {}, HALVED, 0.025311, [-0.04605, -0.03087, 0, -0.04167], [0.03770, 0.06870]),
    ("sequence", TIGHT, {}, 0.036717, [0.0] * 4, [0.10178, 0.10178]),
    ("sequence", GSPO, {}, 0.005475, [-0.08982] * 4, [0.10178, 0.10178]),
    ("token", CISPO | {"clip_eps_high": 4.0}, {}, 0.259901,
     [-0.12280, -0.08231, -0.18319, -0.11111], [0.05027, 0.09160]),
    ("token", CISPO, {}, 0.191765, [-0.12280, -0.08231, -0.13333, -0.11111], [0.05027, 0.06667]),
]  # fmt: skip


@pytest.mark.parametrize(("aggregation", "choices", "more", "loss", "row_0", "row_1"), CLIPS)
def test_loss_and_gradient_are_trls(aggregation, choices, more, loss, row_0, row_1):
    batch = micro_batch(LENGTHS, OLD, ADVANTAGES, row_weights(LENGTHS, aggregation, 8), **more)
    options = {"kl_weight": 0.04, "correct_sampler": "sampled" in more}
    value, gradient, sums = loss_and_gradient(NEW, batch, replace(GRPO, **choices), **options)
    assert value == pytest.approx(loss, abs=2e-6)
    assert gradient[0].tolist() == pytest.approx(row_0, abs=1e-5)
    assert gradient[1, :2].tolist() == pytest.approx(row_1, abs=1e-5)
    assert gradient[~MASK].abs().max() == 0
    assert sums.tokens == 9
    if not choices or ("clip_eps_high" in choices and len(choices) == 1):
        assert (sums.clipped_low, sums.clipped_high) == (1, 1)
    if more is KL:
        assert sums.kl_total / 9 == pytest.approx(0.025389, abs=1e-6)  # TRL's metric


def test_every_algorithm_is_its_papers_choices():
    """A row of the table that changes must be meant."""
    table = {
        name: (a.scale_by_std, a.aggregation, a.clip_eps_low, a.clip_eps_high, a.ratio, a.objective)
        for name, a in ALGORITHMS.items()
    }
    assert table == {
        "grpo": (True, "sequence", 0.2, 0.2, "token", "ppo"),
        "drgrpo": (False, "constant", 0.2, 0.2, "token", "ppo"),
        "dapo": (True, "token", 0.2, 0.28, "token", "ppo"),
        "gspo": (True, "sequence", 3e-4, 4e-4, "sequence", "ppo"),
        "cispo": (True, "token", 1.0, 4.0, "token", "weighted"),
    }
    only_dapo = [a.dynamic_sampling and a.overlong_share == 0.2 for a in ALGORITHMS.values()]
    assert only_dapo == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("estimator", "values"),
    [
        ("k1", [0.2, -0.5, 0.0]),
        ("k2", [0.02, 0.125, 0.0]),
        ("k3", [0.0187308, 0.1487212, 0.0]),
    ],
)
def test_kl_estimators(estimator, values):
    logprobs, ref = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-1.2, -1.5, -0.5]])
    assert kl_estimate(logprobs, ref, estimator)[0].tolist() == pytest.approx(values, abs=1e-6)


def test_kl_gradients_are_what_the_docs_say():
    """Over all tokens of a distribution: k1 pulls nowhere, k2 as KL(policy, reference) does."""
    logits = torch.tensor([0.3, -1.0, 0.8], requires_grad=True)
    ref = torch.tensor([0.1, 0.5, -0.2]).log_softmax(0)
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - ref)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)

    def expectation(estimator):
        estimate = kl_estimate(policy[None], ref[None], estimator)[0]
        (found,) = torch.autograd.grad((policy.detach().exp() * estimate).sum(), logits,
                                       retain_graph=True)  # fmt: skip
        return found

    assert expectation("k1").abs().max() < 1e-6
    assert torch.allclose(expectation("k2"), expected, atol=1e-6)
    value = (policy.exp() * kl_estimate(policy[None], ref[None], "k3")[0]).sum()
    assert value.item() == pytest.approx(exact.item(), abs=1e-6)  # unbiased


def test_kl_pulls_toward_the_reference():
    batch = micro_batch(LENGTHS, NEW, torch.zeros(3), [1 / 9] * 3, ref=REF)
    _, gradient, _ = loss_and_gradient(NEW, batch, kl_weight=1.0)
    moved = NEW - 0.1 * gradient
    apart = (NEW - REF)[MASK].abs() > 1e-6
    assert ((moved - REF)[MASK].abs() < (NEW - REF)[MASK].abs())[apart].all()


def test_on_policy_value_is_minus_advantage_and_gradient_is_not_zero():
    """Why "loss is 0" is no cause for alarm: the value says nothing, the gradient does."""
    batch = micro_batch([4, 4, 4], NEW, ADVANTAGES, row_weights([4, 4, 4], "sequence", 4))
    loss, gradient, _ = loss_and_gradient(NEW, batch)
    assert loss == pytest.approx(0, abs=1e-7)
    assert gradient.tolist() == [pytest.approx([-a / 12] * 4) for a in ADVANTAGES.tolist()]


def test_truncated_importance_weights():
    old = torch.log(torch.tensor([[0.2, 0.5, 0.9], [0.3, 0.1, 0.5]]))
    sampled = torch.log(torch.tensor([[0.4, 0.5, 0.3], [0.2, 0.1, 0.5]]))
    weights = importance_weights(old, sampled)
    assert torch.allclose(weights, torch.tensor([[0.5, 1.0, 2.0], [1.5, 1.0, 1.0]]))  # 3 is cut
    batch = micro_batch([3, 2], old, torch.tensor([1.0, -2.0]), [0.5, 0.25], sampled=sampled)
    _, gradient, _ = loss_and_gradient(old, batch, correct_sampler=True)
    # -advantage · weight · importance; the third token of the second row is padding.
    assert torch.allclose(gradient, torch.tensor([[-0.25, -0.5, -1.0], [0.75, 0.5, 0.0]]))
