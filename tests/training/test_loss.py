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
ADVANTAGES = torch.tensor([1.0, -0.5, -0.5])


def sums(advantages, algorithm="grpo", ref=None, old=OLD):
    ids = torch.empty(0)  # the loss does not read the token ids
    weights = torch.tensor(row_weights(LENGTHS, "sequence", 8))
    batch = MicroBatch(ids, ids, ids, ids, ids, LENGTHS, advantages, weights, None)
    batch.old_logprobs, batch.ref_logprobs = old, ref
    return policy_loss(NEW, batch, ALGORITHMS[algorithm])[1]


def test_what_the_loss_counts():
    """The counts of clipped tokens and the KL estimate equal TRL's metrics."""
    found = sums(ADVANTAGES, ref=REF)
    assert (found.clipped, found.tokens) == (1 + 1, 9)  # one on either side
    assert found.kl_total / 9 == pytest.approx(0.025389, abs=1e-6)
    assert [sums(a).clipped for a in (-ADVANTAGES.abs(), ADVANTAGES.abs())] == [2, 3]
    # TOPR clips only the ratios of wrong completions, and only above 1.
    assert [sums(a, "topr").clipped for a in (-ADVANTAGES.abs(), ADVANTAGES.abs())] == [4, 0]
    # CISPO clips the ratio exp(1.8) of a token to 5, whichever the sign of the advantage.
    assert [sums(a, "cispo", old=NEW - 1.8).clipped for a in (-ADVANTAGES, ADVANTAGES)] == [9, 9]
