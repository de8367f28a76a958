"""Draws one token per row from logits.

Letters: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from rlm.cli import UsageError
from rlm.ops import Ops, TorchOps
from rlm.sampling.params import SamplingParams

# Below this temperature logits overflow, and only the likeliest token is left anyway.
MIN_TEMPERATURE = 1e-30
NOT_FINITE = (
    "the model's logits are not finite: its weights or those of the adapter are damaged, or they "
    "overflow in the dtype of this machine"
)


def uniforms(seeds: Sequence[int], counters: Sequence[int]) -> torch.Tensor:
    """Compute one number in [0, 1) per row from (seed, counter) alone: (N,) float64.

    SplitMix64 (Steele, Lea and Flood, 2014) at position `counter` of the stream `seed`. It is
    counter-based, so a row's numbers do not depend on the other rows.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is intended
        golden = np.uint64(0x9E3779B97F4A7C15)
        state = np.asarray(seeds, dtype=np.uint64)
        for value in (np.uint64(0), np.asarray(counters, dtype=np.uint64)):
            # Two rounds, so that the streams of neighbouring rows, one seed apart, do not overlap.
            state = state + golden * (value + np.uint64(1))
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def exclude_tokens(logits: torch.Tensor, allowed: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Set the logits (N, V) of tokens outside a row's mask (V,) to -inf, in place."""
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
    """Draw a token, with its log-probability, for each row with the row's own parameters."""
    members: dict[tuple, list[int]] = {}
    for row, own in enumerate(params):
        members.setdefault((own.temperature, own.top_p, own.top_k), []).append(row)
    drawn: list[tuple[int, float]] = [(0, 0.0)] * len(params)
    for rows in members.values():
        every = len(rows) == len(params)
        tokens, logprobs = sample_tokens(
            logits if every else logits[rows],
            (uniform if every else uniform[rows]).to(logits.device),
            params[rows[0]],
            ops,
        )
        if logits.is_cuda:  # one transfer, for which the whole batch waits, instead of three
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
    """Draw token ids (N,), with their log-probabilities (N,), from logits (N, V).

    Args:
        ops: the `Ops` for the dtype of the logits.

    Raises:
        UsageError: a row's logits are not finite.
    """
    temperature = params.temperature and max(params.temperature, MIN_TEMPERATURE)
    if params.top_k or params.top_p < 1:
        logits, ops = logits.float(), TorchOps()
        if temperature:
            logits, temperature = apply_top_k_top_p(logits / temperature, params), 1.0
    drawn = ops.sample(logits, uniform, temperature)
    if drawn is None:
        raise UsageError(NOT_FINITE)
    return drawn


def apply_top_k_top_p(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Mask logits outside top_k and top_p with -inf; the same tensor when both are off.

    top_p keeps the smallest set of most likely tokens whose mass reaches it, at least one.
    """
    if params.top_k:
        kept = logits.topk(min(params.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kept, -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        probabilities = ordered.softmax(-1)
        mass_before = probabilities.cumsum(-1) - probabilities
        beyond = mass_before >= params.top_p
        beyond[:, 0] = False  # a top_p below the smallest single-precision number compares as 0
        excluded = beyond.scatter(-1, order, beyond)
        logits = logits.masked_fill(excluded, -torch.inf)
    return logits
