"""The adapter of the installed verl, which calls `core_algos` in the same way as verl's workers.

Like `verl/workers/utils/losses.py`, the adapter adds the policy term and the KL term, and passes
the totals of the whole batch to every loss. Options that a case does not set have verl's default
values.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

# No extra of this project installs verl, because verl requires a specific version of torch.
import verl.trainer.ppo.core_algos as SOURCE  # pyright: ignore[reportMissingImports]
from torch import Tensor
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights  # pyright: ignore[reportMissingImports]
from verl.utils.torch_functional import get_response_mask  # pyright: ignore[reportMissingImports]
from verl.workers.config import ActorConfig  # pyright: ignore[reportMissingImports]

AGGREGATIONS = {
    "sequence": "seq-mean-token-mean",
    "token": "token-mean",
    "constant": "seq-mean-token-sum-norm",
}


def adapter(formula: str, given: SimpleNamespace) -> Tensor | None:
    """Compute the result of a case with verl's code."""
    if formula == "advantages":
        rewards = torch.tensor(given.rewards, dtype=torch.float32)  # (P, G)
        if rewards.isnan().any():  # verl does not support missing rewards
            return None
        rows, group = rewards.numel(), np.arange(rewards.shape[0]).repeat(rewards.shape[1])
        values, _ = SOURCE.compute_grpo_outcome_advantage(
            rewards.reshape(rows, 1),
            torch.ones(rows, 1),
            group,
            norm_adv_by_std_in_grpo=given.scale,
        )
        return values.view_as(rewards)
    if formula == "mask" and not given.mask_truncated:
        width = max(map(len, given.completions))
        ids = torch.tensor([row + [given.pad] * (width - len(row)) for row in given.completions])
        return get_response_mask(ids, given.end)
    return _loss(given) if formula == "loss" and given.objective != "tapered" else None


def _loss(given: SimpleNamespace) -> Tensor:
    mode = AGGREGATIONS[given.aggregation]
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=given.clip_low,
        clip_ratio_high=given.clip_high,
        loss_agg_mode=mode,
    )
    totals = {
        "dp_size": given.processes,
        "batch_num_tokens": given.step_mask.sum(),
        "global_batch_size": len(given.step_mask),
        "loss_scale_factor": given.constant,
    }
    config.global_batch_info.update(totals)
    weights = None
    if given.importance_cap:
        weights, _ = compute_rollout_correction_weights(
            given.old_logprobs - given.sampler_logprobs,
            given.mask,
            rollout_is="token",
            rollout_is_threshold=given.importance_cap,
        )
    name = "cispo" if given.objective == "weighted" else "vanilla"
    policy, _ = SOURCE.get_policy_loss_fn("gspo" if given.ratio == "sequence" else name)(
        old_log_prob=given.old_logprobs,
        log_prob=given.logprobs,
        advantages=given.advantages[:, None] * given.mask,
        response_mask=given.mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    kl = SOURCE.kl_penalty(given.logprobs, given.ref_logprobs, "k3")
    kl = SOURCE.agg_loss(kl, given.mask, mode, **totals)
    loss = policy + given.kl_weight * kl
    return loss / given.processes  # because FSDP averages gradients
