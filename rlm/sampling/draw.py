"""Drawing one token per row: tensors in, tensors out.

Letters: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlm.sampling.params import SamplingParams


def uniforms(seeds: Sequence[int], counters: Sequence[int]) -> torch.Tensor:
    """One number in [0, 1) per row, a pure function of (seed, counter): (N,) float64.

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


def draw(
    logits: torch.Tensor, uniform: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (N,) and their log-probabilities (N,) from logits (N, V).

    Inverse transform: softmax, running sum, one uniform number a row scaled by the sum. It costs
    a pass over the logits; `torch.multinomial` draws N × V random numbers on one thread.
    """
    logits = logits.float()
    if params.temperature == 0:
        tokens = logits.argmax(-1)
        chosen = logits.gather(-1, tokens[:, None]).squeeze(-1)
        return tokens, chosen - logits.logsumexp(-1)
    if params.temperature != 1:
        logits = logits / params.temperature
    probabilities = truncate(logits, params).softmax(-1)  # (N, V)
    cumulative = probabilities.cumsum(-1)
    # Rounding leaves the last sum off 1: scale by it, or rare tokens at the end gain mass.
    threshold = uniform.to(cumulative) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(-1)
    # u → 1 can round up to the total itself; the last token with mass is meant.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()).squeeze(-1)
    tokens = torch.minimum(tokens, last)
    return tokens, probabilities.gather(-1, tokens[:, None]).squeeze(-1).log()


def truncate(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits with what top_k and top_p exclude at -inf; the same tensor when both are off.

    top_p keeps the smallest set of most likely tokens whose mass reaches it, at least one.
    """
    if params.top_k:
        kept = logits.topk(min(params.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kept, -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        probabilities = ordered.softmax(-1)
        mass_before = probabilities.cumsum(-1) - probabilities
        excluded = (mass_before >= params.top_p).scatter(-1, order, mass_before >= params.top_p)
        logits = logits.masked_fill(excluded, -torch.inf)
    return logits
