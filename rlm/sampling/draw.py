"""Draws one token per row from logits.

Shape letters: N rows, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from rlm.cli import UsageError
from rlm.ops import Ops, TorchOps
from rlm.sampling.requests import SamplingParams

# Lower temperatures are raised to this minimum, so that logits / temperature does not overflow.
# At the minimum, the most likely token is always drawn.
MIN_TEMPERATURE = 1e-30
NOT_FINITE = (
    "the model's logits are not finite: the weights of the model or the adapter are damaged, or "
    "values overflow in this dtype (for training, pass --dtype float32)"
)


def uniforms(seeds: Sequence[int], counters: Sequence[int]) -> torch.Tensor:
    """Compute one pseudorandom number in [0, 1) per row from the row's seed and counter.

    The generator is a counter-based SplitMix64 (Steele, Lea and Flood, 2014), so a row's numbers do
    not depend on the other rows.

    Returns:
        The numbers, (N,) float64.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is intended
        golden = np.uint64(0x9E3779B97F4A7C15)
        # A seed may be negative.
        state = np.asarray([seed % 2**64 for seed in seeds], dtype=np.uint64)
        for value in (np.uint64(0), np.asarray(counters, dtype=np.uint64)):
            # The first round hashes the seed, the second the counter. With one round, all seeds
            # would read the same sequence, from different positions.
            state = state + golden * (value + np.uint64(1))
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def exclude_tokens(logits: torch.Tensor, allowed: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Set the logits of disallowed tokens to -inf, in place.

    Args:
        logits: (N, V).
        allowed: the mask of each row's allowed tokens, (V,) bool; None if all are allowed.
    """
    rows = [row for row, mask in enumerate(allowed) if mask is not None]
    if rows:
        mask = torch.stack([mask for mask in allowed if mask is not None]).to(logits.device)
        logits[rows] = logits[rows].masked_fill(~mask, -torch.inf)
    return logits


def sample_rows(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    params: Sequence[SamplingParams],
    ops: Ops,
) -> list[tuple[int, float]]:
    """Draw one token per row with the row's own parameters; return (token, logprob) pairs."""
    members: dict[tuple, list[int]] = {}
    for row, own in enumerate(params):
        members.setdefault((own.temperature, own.top_p), []).append(row)
    drawn: list[tuple[int, float]] = [(0, 0.0)] * len(params)
    for rows in members.values():
        every = len(rows) == len(params)
        tokens, logprobs = sample_tokens(
            logits if every else logits[rows],
            (uniform if every else uniform[rows]).to(logits.device),
            params[rows[0]],
            ops,
        )
        if logits.is_cuda:  # one transfer instead of three, because each one synchronizes
            ids, values = torch.stack([tokens.double(), logprobs.double()]).tolist()
            if not all(map(math.isfinite, values)):
                raise UsageError(NOT_FINITE)
            tokens_and_logprobs = zip(map(int, ids), values, strict=True)
        else:
            tokens_and_logprobs = zip(tokens.tolist(), logprobs.tolist(), strict=True)
        for row, pair in zip(rows, tokens_and_logprobs, strict=True):
            drawn[row] = pair
    return drawn


def sample_tokens(
    logits: torch.Tensor, uniform: torch.Tensor, params: SamplingParams, ops: Ops
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row from logits (N, V) with the same parameters for all rows.

    Args:
        ops: the `Ops` for the dtype of the logits.

    Returns:
        The token ids (N,) and their log-probabilities (N,).

    Raises:
        UsageError: on a CPU, a row has a logit of NaN or +inf, or only logits of -inf.
    """
    temperature = params.temperature and max(params.temperature, MIN_TEMPERATURE)
    if temperature and params.top_p < 1:
        logits, ops = logits.float(), TorchOps()
        logits, temperature = apply_top_p(logits / temperature, params.top_p), 1.0
    drawn = ops.sample(logits, uniform, temperature)
    if drawn is None:
        raise UsageError(NOT_FINITE)
    return drawn


def apply_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Mask the logits outside top_p with -inf.

    top_p keeps the smallest set of most likely tokens whose total probability is at least top_p.
    At least one token is always kept.
    """
    ordered, order = logits.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    beyond = mass_before >= top_p
    beyond[:, 0] = False  # keep one token even if top_p is so small that it is 0 in fp32
    return logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
