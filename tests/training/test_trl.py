"""Our loss beside TRL 1.16's own `_compute_loss`, called without a model on random tensors."""

import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from rlm.training.algorithms import ALGORITHMS
from rlm.training.batches import row_weights
from rlm.training.loss import importance_weights
from tests.training.test_loss import loss_and_gradient, micro_batch

LENGTH = 11  # TRL's max_completion_length, Dr. GRPO's constant
TRL = {  # what TRL calls each of ours
    "grpo": {"loss_type": "grpo"},
    "drgrpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "gspo": {"loss_type": "grpo", "level": "sequence"},
    "cispo": {"loss_type": "cispo"},
}


class Alone:
    """The parts of an Accelerator that the loss asks for."""

    num_processes = 1
    sync_gradients = True

    def gather(self, x):
        return x.reshape(-1)

    def gather_for_metrics(self, x):
        return x

    def reduce(self, x, reduction="sum"):
        return x


def trl_loss(draw, *, loss_type, level="token", low, high, beta):
    """(loss, gradient) of TRL's method, its `self` played by a namespace."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    logprobs = draw["new"].clone().requires_grad_(True)
    trainer = SimpleNamespace(
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH,
        accelerator=Alone(),
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
    )
    rows, width = draw["new"].shape
    loss = GRPOTrainer._compute_loss(
        trainer,
        None,
        {
            "prompt_ids": torch.ones(rows, 2, dtype=torch.long),
            "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
            "completion_ids": torch.ones(rows, width, dtype=torch.long),
            "completion_mask": draw["mask"].long(),
            "advantages": draw["advantages"],
            "old_per_token_logps": draw["old"],
            "ref_per_token_logps": draw["ref"],
            "num_items_in_batch": draw["mask"].sum(),
            "importance_sampling_ratio": importance_weights(draw["old"], draw["sampled"]),
        },
    )
    loss.backward()
    return loss.item(), logprobs.grad


def our_loss(draw, name, *, beta):
    algorithm = ALGORITHMS[name]
    weights = row_weights(draw["lengths"], algorithm.aggregation, LENGTH)
    ref = draw["ref"] if beta else None
    parts = (draw["lengths"], draw["old"], draw["advantages"], weights)
    batch = micro_batch(*parts, ref=ref, sampled=draw["sampled"])
    options = {"correct_sampler": True, "kl_weight": beta}
    return loss_and_gradient(draw["new"], batch, algorithm, **options)[:2]


def random_draw(seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, width = rng.randint(1, 6), rng.randint(1, LENGTH)
    lengths = [width, *(rng.randint(1, width) for _ in range(rows - 1))]
    new = -torch.rand(rows, width, generator=generator) * 3
    apart = rng.choice([0.0, 1e-3, 0.3, 1.0])
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    gap = 0.3 * torch.randn(rows, width, generator=generator)
    old = new + apart * torch.randn(rows, width, generator=generator)
    return {
        "new": new,
        "old": old,
        "sampled": old + gap,
        "ref": new + 0.3 * torch.randn(rows, width, generator=generator),
        "advantages": torch.randn(rows, generator=generator) * rng.choice([0.0, 1.0, 2.0]),
        "lengths": lengths,
        "mask": mask,
    }


def branches(draw, name):
    """What of the clipping a draw reaches: (sign of the advantage, side of the ratio)."""
    low, high = ALGORITHMS[name].clip_eps_low, ALGORITHMS[name].clip_eps_high
    gaps, mask = draw["new"] - draw["old"], draw["mask"]
    if TRL[name].get("level") == "sequence":
        gaps = ((gaps * mask).sum(1) / mask.sum(1))[:, None].expand_as(mask)
    ratios = gaps.exp()
    sides = (ratios > 1 + high).int() - (ratios < 1 - low).int()
    signs = draw["advantages"].sign()[:, None].expand_as(mask)
    return set(zip(signs[mask].tolist(), sides[mask].tolist(), strict=True))


def compare(seed, name, beta):
    draw = random_draw(seed)
    low, high = ALGORITHMS[name].clip_eps_low, ALGORITHMS[name].clip_eps_high
    # CISPO's bound is the ratio itself in TRL, 1 + clip_eps_high here.
    theirs = trl_loss(draw, **TRL[name], low=low, high=high + (name == "cispo"), beta=beta)
    ours = our_loss(draw, name, beta=beta)
    assert ours[0] == pytest.approx(theirs[0], abs=2e-5, rel=2e-5), seed
    assert torch.allclose(ours[1], theirs[1], atol=1e-5, rtol=1e-4), seed
    return branches(draw, name)


FEW = [*range(6), 7, 10, 54]  # enough for every branch
MANY = range(70)  # with each algorithm and each beta a thousand draws


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("name", TRL)
def test_loss_and_gradient_equal_trls(name, seeds):
    sides = (0, 1) if name == "cispo" else (-1, 0, 1)  # it has no lower bound
    for beta in (0.0, 0.04, 0.5):
        seen = set().union(*(compare(seed, name, beta) for seed in seeds))
        assert seen >= {(sign, side) for sign in (-1, 1) for side in sides} | {(0, 0)}
