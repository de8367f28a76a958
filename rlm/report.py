"""A training step in figures and in one line. Metrics are named `area/name`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from rlm.grpo import has_signal
from rlm.sampling import Completion


def step_metrics(
    groups: Sequence[Sequence[Completion]], rewards: Tensor, clock: Sequence[float]
) -> dict[str, float]:
    """What was sampled and how long it took.

    Args:
        rewards: (P, G), NaN where there was no verdict.
        clock: when sampling began, when it ended, when scoring ended, when learning ended.
    """
    completions = [completion for group in groups for completion in group]
    lengths = [len(completion.token_ids) for completion in completions]
    judged = rewards[~rewards.isnan()]
    zero_signal = int((~has_signal(rewards)).sum())
    sample, score, learn = (b - a for a, b in pairwise(clock))
    return {
        "reward/mean": judged.mean().item() if len(judged) else 0.0,
        "reward/std": judged.std().item() if len(judged) > 1 else 0.0,
        "reward/no_verdict": int(rewards.isnan().sum()),
        "reward/zero_signal_groups": zero_signal,
        "reward/zero_signal_share": zero_signal / len(groups),
        "completion/length_mean": sum(lengths) / len(lengths),
        "completion/length_max": max(lengths),
        "completion/truncated_rate": sum(c.truncated for c in completions) / len(completions),
        "time/sample": sample,
        "time/score": score,
        "time/learn": learn,
        "tokens/per_second": sum(lengths) / sample,
    }


def step_line(metrics: Mapping[str, float], steps: int) -> str:
    """The step as a person reads it."""
    seconds = metrics["time/sample"] + metrics["time/score"] + metrics["time/learn"]
    parts = [
        f"step {metrics['step'] + 1}/{steps}",
        f"reward {metrics['reward/mean']:.3f}",
        f"signal {1 - metrics['reward/zero_signal_share']:.0%}",
        f"length {metrics['completion/length_mean']:.0f}",
        f"truncated {metrics['completion/truncated_rate']:.0%}",
    ]
    if "policy/entropy" in metrics:
        parts.append(f"entropy {metrics['policy/entropy']:.3f}")
        parts.append(f"grad {metrics['optim/grad_norm']:.2f}")
    if metrics.get("loss/kl"):
        parts.append(f"kl {metrics['loss/kl']:.4f}")
    parts.append(
        f"{seconds:.0f} s (sample {metrics['time/sample']:.0f}, learn {metrics['time/learn']:.0f})"
    )
    if "eval/accuracy" in metrics:
        parts.append(f"validation {metrics['eval/accuracy']:.1%}")
    return "  ".join(parts)
