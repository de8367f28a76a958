"""The sums that the policy loss returns. tests/conformance and test_trl.py check its values."""

import pytest
import torch

from rlm.training.algorithms import ALGORITHMS
from rlm.training.batches import MicroBatch, row_weights
from rlm.training.loss import policy_loss

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


def micro_batch(lengths, old, advantages, weights, ref=None):
    """Make a micro-batch that contains only what the loss reads."""
    ids = torch.empty(0)
    batch = MicroBatch(ids, ids, ids, ids, ids, lengths, advantages, torch.tensor(weights), None)
    batch.old_logprobs, batch.ref_logprobs = old, ref
    return batch


def gradient_and_sums(new, batch, **options):
    logprobs = new.clone().requires_grad_(True)
    loss, sums = policy_loss(logprobs, batch, ALGORITHMS["grpo"], **options)
    loss.backward()
    return logprobs.grad, sums


def test_what_the_loss_counts():
    """The counts of clipped tokens and the KL estimate, equal TRL's metrics."""
    weights = row_weights(LENGTHS, "sequence", 8)
    batch = micro_batch(LENGTHS, OLD, ADVANTAGES, weights, ref=REF)
    gradient, sums = gradient_and_sums(NEW, batch, kl_weight=0.04)
    assert (sums.clipped, sums.tokens) == (1 + 1, 9)  # one on either side
    for advantages, clipped in ((-ADVANTAGES.abs(), 2), (ADVANTAGES.abs(), 3)):
        _, others = gradient_and_sums(NEW, micro_batch(LENGTHS, OLD, advantages, weights))
        assert others.clipped == clipped
    # TOPR clips only the ratios of wrong completions, and only above 1.
    for advantages, clipped in ((ADVANTAGES.abs(), 0), (-ADVANTAGES.abs(), 4)):
        wrong = micro_batch(LENGTHS, OLD, advantages, weights)
        found = policy_loss(NEW, wrong, ALGORITHMS["topr"])[1]
        assert found.clipped == clipped
    assert sums.kl_total / 9 == pytest.approx(0.025389, abs=1e-6)
    assert gradient[~MASK].abs().max() == 0
