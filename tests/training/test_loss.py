"""The policy loss on fixed tensors: what it counts, KL estimators, importance weights."""

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


def test_what_the_loss_counts():
    """Clipped on either side, and the estimates of KL as TRL's metric has them; the loss itself and
    its gradient stand beside TRL's in test_trl.py."""
    weights = row_weights(LENGTHS, "sequence", 8)
    batch = micro_batch(LENGTHS, OLD, ADVANTAGES, weights, ref=REF)
    _, gradient, sums = loss_and_gradient(NEW, batch, kl_weight=0.04)
    assert (sums.clipped_low, sums.clipped_high, sums.tokens) == (1, 1, 9)
    for advantages, clipped in ((-ADVANTAGES.abs(), (2, 0)), (ADVANTAGES.abs(), (0, 3))):
        _, _, others = loss_and_gradient(NEW, micro_batch(LENGTHS, OLD, advantages, weights))
        assert (others.clipped_low, others.clipped_high) == clipped
    assert sums.kl_total / 9 == pytest.approx(0.025389, abs=1e-6)
    assert gradient[~MASK].abs().max() == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "has_gradient"),
    [
        (1.5, 1.0, -1.2, False),  # beyond 1 + 0.2 a good token gains no more
        (1.5, -1.0, 1.5, True),  # and a bad one is pushed back in full
        (0.5, 1.0, -0.5, True),
        (0.5, -1.0, 0.8, False),
        (1.1, 1.0, -1.1, True),
    ],
)
def test_the_clip_holds_on_the_side_that_would_gain(ratio, advantage, loss, has_gradient):
    batch = micro_batch([1], torch.tensor([[-1.0]]), torch.tensor([advantage]), [1.0])
    new = torch.tensor([[-1.0]]) + torch.tensor(ratio).log()
    value, gradient, _ = loss_and_gradient(new, batch)
    assert value == pytest.approx(loss)
    assert (gradient.item() != 0) == has_gradient


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
