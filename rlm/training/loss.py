"""The policy loss, with clipped ratios, a KL term to the reference model and importance weights.

In the shapes, n is the number of rollouts in a micro-batch and T their padded length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlm.training.algorithms import Algorithm
from rlm.training.batches import MicroBatch

IMPORTANCE_CAP = 2.0  # upper bound of the importance weights


@dataclass(frozen=True)
class LossSums:
    """Detached sums over the tokens of a micro-batch, from which `learn_metrics` computes means."""

    policy: float  # the policy loss, without the KL term
    kl: float  # Σ weight · KL estimate: the KL term of the loss, before multiplying by kl_weight
    kl_total: float  # Σ KL estimate, without weights
    # Number of tokens whose ratio is clipped. With "tapered", only tokens with A < 0 are clipped.
    clipped: float
    tokens: int


def importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """Return importance weights (n, T) that correct for a sampler with different probabilities.

    The weight of a token is min(π_old / π_sampler, 2) and has no gradient. This is truncated
    importance sampling (Ionides, 2008), which Yao et al. (2025) use for rollouts that were sampled
    by another inference engine.
    """
    return (old_logprobs - sampler_logprobs).exp().clamp(max=IMPORTANCE_CAP).detach()


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(policy ‖ reference) for each sampled token, (n, T).

    The estimate is exp(d) - d - 1, where d = ref_logprobs - logprobs (the estimator k3 of Schulman,
    2020, as in DeepSeekMath). Its value is never negative, and it is unbiased for tokens that the
    policy sampled. Its gradient is biased: the expected gradient is that of KL(reference ‖ policy).
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def policy_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, of: str) -> Tensor:
    """Return the ratio of the new to the old probability.

    The ratio of a sequence is the geometric mean of the ratios of its tokens (GSPO, arXiv
    2507.18071).

    Args:
        of: "token" for a ratio of each token, (n, T); "sequence" for a ratio of each sequence,
            (n, 1).
    """
    log_ratio = logprobs - old_logprobs
    if of == "sequence":
        log_ratio = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def token_losses(
    objective: str, logprobs: Tensor, rho: Tensor, clipped: Tensor, advantage: Tensor
) -> Tensor:
    """Return the loss l of each token, (n, T), for an objective of `Algorithm`.

    In the formulas, ρ is the `policy_ratio` and A the advantage.

    "ppo": l = -min(ρ A, clip(ρ, 1-ε_low, 1+ε_high) A), as in PPO (Schulman et al., arXiv
    1707.06347). If the old log-probabilities equal the current ones, the value is -A and the
    gradient is -A ∇logprob, as in REINFORCE with a group baseline.

    "weighted": l = -clip(ρ) A logprob, where the clipped ratio is a constant without gradient.
    Therefore every token has a gradient (CISPO, arXiv 2506.13585).

    "tapered": l = -A logprob where A > 0, and the same as "weighted" where A < 0. If A > 0, the
    gradient does not shrink, however likely the completion has become. If A < 0, the gradient of a
    token shrinks as the token becomes less likely than when it was sampled (TOPR, arXiv 2503.14286,
    but with a ratio per token).
    """
    if objective == "ppo":
        return -torch.minimum(rho * advantage, clipped * advantage)
    weight = clipped.detach()
    if objective == "tapered":
        weight = torch.where(advantage > 0, 1.0, weight)
    return -weight * advantage * logprobs


def policy_loss(
    logprobs: Tensor,
    batch: MicroBatch,
    algorithm: Algorithm,
    *,
    correct_sampler: bool = False,
    kl_weight: float = 0.0,
) -> tuple[Tensor, LossSums]:
    """Compute the loss of a micro-batch, Σᵢ wᵢ Σₜ (lᵢₜ + kl_weight · KLᵢₜ).

    w are the weights in `batch`, l the `token_losses` and KL the `kl_estimate`. By default, TRL
    multiplies KL by the ratio; this loss does not.

    Args:
        logprobs: the log-probabilities of the current policy, (n, T).
        batch: the micro-batch. Its `ref_logprobs` are needed for a KL term. If its `old_logprobs`
            are None, the detached `logprobs` are used.
        correct_sampler: whether to multiply l by importance weights, because the sampler's
            probabilities differ from the trainer's.

    Returns:
        The loss, and sums over the tokens for the metrics.
    """
    mask = batch.completion_mask.to(logprobs.dtype)  # (n, T)
    scale = batch.weights[:, None] * mask
    advantage = batch.advantages[:, None]
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    rho = policy_ratio(logprobs, old_logprobs, mask, algorithm.ratio)  # (n, T), or (n, 1)
    lowest, highest = 1 - algorithm.clip_eps_low, 1 + algorithm.clip_eps_high
    clipped = rho.clamp(lowest, highest)
    per_token = token_losses(algorithm.objective, logprobs, rho, clipped, advantage)
    if correct_sampler:
        per_token = per_token * importance_weights(old_logprobs, batch.sampler_logprobs)
    policy = (per_token * scale).sum()
    kl = kl_total = torch.zeros(())
    if batch.ref_logprobs is not None:
        estimate = kl_estimate(logprobs, batch.ref_logprobs)
        kl, kl_total = (estimate * scale).sum(), (estimate * mask).sum()
    low, high, wrong, right = rho < lowest, rho > highest, advantage < 0, advantage > 0
    if algorithm.objective == "ppo":  # min() makes the other bound ineffective
        limited = (low & wrong) | (high & right)
    else:
        limited = (low | high) & (wrong if algorithm.objective == "tapered" else wrong | right)
    sums = (policy, kl, kl_total, (limited * mask).sum())
    counted = LossSums(*(value.item() for value in sums), tokens=int(mask.sum()))
    return policy + kl_weight * kl, counted
