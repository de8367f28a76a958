"""The policy loss: clipped ratios, KL to the reference, importance weights.

Letters: n rollouts of a micro-batch, T their padded length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlm.training.algorithms import Algorithm
from rlm.training.batches import MicroBatch

IMPORTANCE_CAP = 2.0


@dataclass(frozen=True)
class LossSums:
    """Detached sums over the tokens of a micro-batch; `LearnMetrics` makes means of them."""

    policy: float
    kl: float  # Σ weight · estimate: the KL term of the loss
    kl_total: float  # Σ estimate
    clipped_low: float
    clipped_high: float
    tokens: int


def importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """Return weights (n, T) that correct for a sampler whose probabilities are not the trainer's.

    The weight of a token is min(π_old / π_sampler, 2), without gradient: truncated importance
    sampling (Ionides, 2008), which Yao et al. (2025) use for rollouts from another engine.
    """
    return (old_logprobs - sampler_logprobs).exp().clamp(max=IMPORTANCE_CAP).detach()


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(policy ‖ reference) from each sampled token: (n, T).

    The estimate exp(d) - d - 1 with d = ref_logprobs - logprobs is unbiased and never negative (k3
    of Schulman 2020, as in DeepSeekMath).
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def policy_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, of: str) -> Tensor:
    """Return the ratio of new to old probability by "token", (n, T), or by "sequence", (n, 1).

    A sequence's ratio is the geometric mean of its tokens' ratios (GSPO, arXiv 2507.18071).
    """
    log_ratio = logprobs - old_logprobs
    if of == "sequence":
        log_ratio = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def policy_loss(
    logprobs: Tensor,
    batch: MicroBatch,
    algorithm: Algorithm,
    *,
    correct_sampler: bool = False,
    kl_weight: float = 0.0,
) -> tuple[Tensor, LossSums]:
    """Compute the loss Σᵢ wᵢ Σₜ lᵢₜ + KL of a micro-batch, by the algorithm's choices.

    objective "ppo": l = -min(ρ A, clip(ρ, 1-ε_low, 1+ε_high) A), ρ = `policy_ratio`.
    With old = logprobs.detach() the value is -A and the gradient -A ∇logprob: REINFORCE with a
    group baseline. The minimum is taken for both signs of A (Schulman et al., arXiv 1707.06347).
    objective "weighted": l = -clip(ρ) A logprob with the clipped ratio as a constant, so no token
    loses its gradient (CISPO, arXiv 2506.13585).
    objective "tapered": the same where A < 0, and l = -A logprob where A > 0. A good completion is
    learned no matter how likely it has become. A bad token is pushed down less, the less likely it
    has become since it was sampled (TOPR, arXiv 2503.14286, with a ratio per token).
    TRL's default multiplies the KL term by ρ; here it is not multiplied.

    Args:
        logprobs: (n, T), of the current policy.
        batch: needs ref_logprobs for a KL term; without old_logprobs the detached logprobs are
            used.
        correct_sampler: whether the sampler's distribution differs from the policy's.
    """
    mask = batch.completion_mask.to(logprobs.dtype)  # (n, T)
    scale = batch.weights[:, None] * mask
    advantage = batch.advantages[:, None]
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    rho = policy_ratio(logprobs, old_logprobs, mask, algorithm.ratio)  # (n, T), or (n, 1)
    lowest, highest = 1 - algorithm.clip_eps_low, 1 + algorithm.clip_eps_high
    clipped = rho.clamp(lowest, highest)
    if algorithm.objective == "ppo":
        per_token = -torch.minimum(rho * advantage, clipped * advantage)
    else:
        weight = clipped.detach()
        if algorithm.objective == "tapered":
            weight = torch.where(advantage > 0, 1.0, weight)
        per_token = -weight * advantage * logprobs
    if correct_sampler:
        per_token = per_token * importance_weights(old_logprobs, batch.sampler_logprobs)
    policy = (per_token * scale).sum()
    loss = policy
    kl = kl_total = torch.zeros(())
    if batch.ref_logprobs is not None:
        estimate = kl_estimate(logprobs, batch.ref_logprobs)
        kl, kl_total = (estimate * scale).sum(), (estimate * mask).sum()
        loss = policy + kl_weight * kl
    low = ((rho < lowest) & (advantage < 0)) * mask
    bounded = advantage < 0 if algorithm.objective == "tapered" else advantage > 0
    high = ((rho > highest) & bounded) * mask
    sums = (policy, kl, kl_total, low.sum(), high.sum())
    return loss, LossSums(*(value.item() for value in sums), tokens=int(mask.sum()))
