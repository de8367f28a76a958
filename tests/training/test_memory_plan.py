"""The planned memory of a learning pass; tests/test_gpu.py compares a whole plan with reality."""

import pytest
from conftest import tiny_model

from rlm.training.memory_plan import _learning_bytes

LOGITS = 259 * (128 * 4 + 3 * 16 * 4)  # a chunk in fp32, and three fp32 copies of 16 rows


@pytest.mark.parametrize(
    ("longest", "mask"), [(100, 512 * 100 * (4 + 1)), (1000, 1000 * 1000 * (4 + 1))]
)
def test_the_attention_mask_of_long_sequences_is_counted(longest, mask):
    """The mask exists in fp32 and as booleans, and grows with the square of the length."""
    assert _learning_bytes(tiny_model(), 0, False, longest, 512) == LOGITS + mask
