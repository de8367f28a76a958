"""Advantages of groups without signal, and the length penalty.

tests/conformance compares advantages with values that were computed by hand.
"""

import math

import pytest
import torch

from rlm.sampling import Completion
from rlm.training.advantages import Group, group_advantages, has_signal, overlong_penalties
from rlm.training.config import GRPOConfig

NAN = math.nan


@pytest.mark.parametrize("row", [[1.0] * 4, [0.0] * 4, [0.3] * 4, [NAN] * 4, [NAN, 1, NAN, NAN]])
@pytest.mark.parametrize("kind", ["std", "centred", "mean", "share"])
def test_a_group_without_a_difference_gets_exactly_zero(row, kind):
    rewards = torch.tensor([row])
    assert group_advantages(rewards, kind).tolist() == [[0.0] * 4]
    assert has_signal(rewards).tolist() == [False]


def test_a_rounding_error_has_no_share():
    """The kind "share" ignores the size of a difference, so rounding errors must count as equal."""
    rewards = torch.tensor([[0.5, 0.5, 0.5, 0.5009], [0.1, 0.1, 0.1, 0.102]])
    assert has_signal(rewards, "share").tolist() == [False, True]
    assert has_signal(rewards).tolist() == [True, True]
    found = group_advantages(rewards, "share", 0.25).tolist()
    assert found[0] == [0.0] * 4
    assert found[1] == pytest.approx([-1 / 3] * 3 + [4])
    assert group_advantages(rewards, "centred")[0, 3] == pytest.approx(0.000675, abs=1e-6)


def test_a_truncated_completion_of_any_length_gets_the_full_penalty():
    def penalties(*completions, **options):
        config = GRPOConfig(max_new_tokens=20, **options)
        return overlong_penalties([Group(None, [], completions, [], [])], config)[0].tolist()

    ended, cut = Completion([1] * 16, [], "stop"), Completion([1] * 3, [], "length")
    assert penalties(ended, cut, overlong_buffer=5) == pytest.approx([-0.2, -1])
    assert penalties(ended, cut, overlong_buffer=0) == [0, 0]
