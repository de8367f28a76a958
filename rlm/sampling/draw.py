"""Draws one token per row from logits.

Letters: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from rlm.cli import UsageError
from rlm.ops import VOCAB_BLOCK
from rlm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from rlm.ops import Kernels

# Below it logits overflow, and nothing is left but the likeliest token anyway.
MIN_TEMPERATURE = 1e-30
NOT_FINITE = (
    "the model's logits are not finite: its weights or those of the adapter are damaged, or they "
    "overflow in this machine's number type"
)


def uniforms(seeds: Sequence[int], counters: Sequence[int]) -> torch.Tensor:
    """Compute one number in [0, 1) per row from (seed, counter) alone: (N,) float64.

    SplitMix64 (Steele, Lea and Flood, 2014) at position `counter` of the stream `seed`. Being
    counter-based, a row's draws do not depend on which rows are drawn beside it.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        golden = np.uint64(0x9E3779B97F4A7C15)
        state = np.asarray(seeds, dtype=np.uint64)
        for value in (np.uint64(0), np.asarray(counters, dtype=np.uint64)):
            # Two rounds: seeds of neighbouring rows differ by one, their streams must not overlap.
            state = state + golden * (value + np.uint64(1))
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def exclude_tokens(logits: torch.Tensor, allowed: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Set the logits (N, V) of tokens that a row does not allow, (V,) bool, to -inf, in place."""
    rows = [row for row, mask in enumerate(allowed) if mask is not None]
    if rows:
        mask = torch.stack([allowed[row] for row in rows]).to(logits.device)
        logits[rows] = logits[rows].masked_fill(~mask, -torch.inf)
    return logits


def sample_rows(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    params: Sequence[SamplingParams],
    kernels: Kernels | None = None,
) -> list[tuple[int, float]]:
    """Draw a token, with its log-probability, for each row by the row's own parameters."""
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
            kernels,
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
    logits: torch.Tensor,
    uniform: torch.Tensor,
    params: SamplingParams,
    kernels: Kernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw token ids (N,), with their log-probabilities (N,), from logits (N, V).

    Inverse transform: one uniform number a row, scaled by the total mass, is looked up in the
    running sum. It costs about what reading the logits costs: the running sum is made over blocks
    of the vocabulary, then within the one block that is hit. (`torch.multinomial` draws N × V
    random numbers on one thread.)

    Args:
        kernels: what is compiled for the number type of the logits, if anything is.

    Raises:
        UsageError: a row's logits are not finite: nothing can be drawn from them.
    """
    temperature = params.temperature and max(params.temperature, MIN_TEMPERATURE)
    if kernels and not params.top_k and params.top_p == 1:
        drawn = kernels.sample(logits, uniform, temperature)
        if drawn is None:
            raise UsageError(NOT_FINITE)
        return drawn
    logits = logits.float()
    if temperature == 0:
        tokens = logits.argmax(-1)
        mass = logits.logsumexp(-1)
        _check_finite(mass)
        return tokens, logits.gather(-1, tokens[:, None]).squeeze(-1) - mass
    if temperature != 1:
        logits = logits / temperature
    logits = apply_top_k_top_p(logits, params)
    probabilities = logits.softmax(-1)
    tokens, total = _sample(probabilities, uniform)
    chosen = probabilities.gather(-1, tokens[:, None]) / total  # which is one, but for rounding
    return tokens, chosen.log().squeeze(-1).float()


def _check_finite(mass: torch.Tensor) -> None:
    # On a GPU that would wait for it: `sample_rows` looks at the log-probabilities that follow.
    if not mass.is_cuda and not mass.isfinite().all():
        raise UsageError(NOT_FINITE)


def _sample(
    probabilities: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens (N,) from probabilities (N, V); also their total (N, 1), in double."""
    rows, vocabulary = probabilities.shape
    missing = -vocabulary % VOCAB_BLOCK
    mass = F.pad(probabilities, (0, missing)) if missing else probabilities
    mass = mass.unflatten(-1, (-1, VOCAB_BLOCK))  # (N, blocks, VOCAB_BLOCK)
    # Sums in double: in single, a vocabulary of 150,000 would blur the rare tokens.
    blocks = mass.sum(-1).double()
    before = blocks.cumsum(-1)
    total = before[:, -1:]
    _check_finite(total)
    wanted = uniform.to(total)[:, None] * total
    block = _search(before, wanted)
    wanted = wanted - (before.gather(-1, block) - blocks.gather(-1, block))
    inside = mass[torch.arange(rows, device=block.device), block[:, 0]].double().cumsum(-1)
    tokens = block * VOCAB_BLOCK + _search(inside, wanted)
    # If sums are not finite, take the last index until that is noticed: one beyond it would crash
    # a GPU.
    return tokens.clamp(max=vocabulary - 1).squeeze(-1), total


def _search(sums: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Find where running sums (N, K) pass the wanted mass (N, 1): always at a step up.

    Rounding may put `wanted` at the total itself; the last entry with mass is meant then.
    """
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    found = torch.minimum(torch.searchsorted(sums, wanted, right=True), last)
    return found.clamp(max=sums.shape[1] - 1)


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
