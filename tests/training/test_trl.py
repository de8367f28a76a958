"""Our loss equals TRL's in conformance cases with random numbers."""

import random

import pytest
import torch

from rlm.conformance.cases import Case, run_case
from rlm.conformance.ours import ours
from rlm.training.algorithms import ALGORITHMS

LENGTH = 11  # max_completion_length, the constant of Dr. GRPO


def random_case(seed, name, kl_weight):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, width = rng.randint(1, 6), rng.randint(1, LENGTH)
    lengths = [width, *(rng.randint(1, width) for _ in range(rows - 1))]
    apart = rng.choice([0.0, 1e-3, 0.3, 1.5])

    def ratios(spread):
        return (spread * torch.randn(rows, width, generator=generator)).exp().tolist()

    algorithm = ALGORITHMS[name]
    given = {
        "ratios": ratios(apart),
        "sampler_ratios": ratios(0.3),
        "ref_ratios": ratios(0.3),
        "advantages": (torch.randn(rows, generator=generator) * rng.choice([0.0, 1, 2])).tolist(),
        "mask": (torch.arange(width) < torch.tensor(lengths)[:, None]).int().tolist(),
        "clip_low": algorithm.clip_eps_low,
        "clip_high": algorithm.clip_eps_high,
        "constant": LENGTH,
        "importance_cap": 2.0,
        "kl_weight": kl_weight,
    }
    given |= {key: getattr(algorithm, key) for key in ("aggregation", "ratio", "objective")}
    return Case(f"{name} {seed}", "loss", given, expected={}, by="")


def branches(given):
    """Return the clipping cases that occur: (sign of the advantage, side of the ratio)."""
    ratios, mask = torch.tensor(given["ratios"]), torch.tensor(given["mask"]).bool()
    if given["ratio"] == "sequence":
        ratios = ((ratios.log() * mask).sum(1) / mask.sum(1)).exp()[:, None].expand_as(mask)
    above, below = ratios > 1 + given["clip_high"], ratios < 1 - given["clip_low"]
    sides = above.int() - below.int()
    signs = torch.tensor(given["advantages"]).sign()[:, None].expand_as(mask)
    return set(zip(signs[mask].tolist(), sides[mask].tolist(), strict=True))


FEW = [*range(8), 29]  # enough for every clipping case
MANY = range(70)  # more than a thousand cases over all algorithms and KL weights


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "topr"])  # TRL has no TOPR
def test_loss_and_gradient_equal_trls(name, seeds, monkeypatch):
    from rlm.conformance import peer_trl

    # TRL's default multiplies the KL term by the ratio (docs/reference/conformance.md).
    monkeypatch.setitem(peer_trl.DEFAULTS, "use_bias_correction_kl", False)
    sides = (0, 1) if name == "cispo" else (-1, 0, 1)  # CISPO has no lower bound
    for kl_weight in (0.0, 0.04, 0.5):
        seen = set()
        for seed in seeds:
            case = random_case(seed, name, kl_weight)
            mine, theirs = run_case(ours, case), run_case(peer_trl.adapter, case)
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=2e-5, rel=2e-5), seed
            gradients = torch.tensor(mine["gradient"]), torch.tensor(theirs["gradient"])
            assert torch.allclose(*gradients, atol=1e-5, rtol=1e-4), seed
            seen |= branches(case.given)
        assert seen >= {(sign, side) for sign in (-1, 1) for side in sides} | {(0, 0)}
