"""The memory of a learning pass, as the plan computes it; test_gpu measures a whole plan."""

import pytest
from conftest import tiny_model

from rlm.training.memory_plan import _learning_bytes

LOGITS = 259 * (128 * 4 + 3 * 16 * 4)  # of a chunk, and what is computed in fp32 of 16 rows


@pytest.mark.parametrize(
    ("longest", "mask"), [(100, 512 * 100 * (4 + 1)), (1000, 1000 * 1000 * (4 + 1))]
)
def test_the_attention_mask_of_long_sequences_is_counted(longest, mask):
    """It exists in fp32 and as booleans. A sequence may be longer than 512 tokens."""
    assert _learning_bytes(tiny_model(), 0, False, longest, 512) == LOGITS + mask
