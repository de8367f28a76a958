"""Metrics of a training step (`area/name`), its line on the terminal, and the run's summary."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from rlm.cli import command_of, required, terminal
from rlm.model import pick_device
from rlm.training.advantages import Group, has_signal
from rlm.training.batches import MicroBatch
from rlm.training.config import USUAL_RATES, GRPOConfig, judge_learning_rate
from rlm.training.distributed import Distributed
from rlm.training.loss import LossSums
from rlm.training.validation import validation_facts

PHASES = ("sample", "score", "learn")  # in this order
RECENT_STEPS = 5  # steps from which the remaining time is estimated


def announce_run(
    config: GRPOConfig, trainable: int, sampler: str, problems: int, validation: int
) -> None:
    """Print what a run will do.

    Args:
        trainable: parameters that are trained.
        sampler: the sampler's description.
        problems, validation: the numbers of training and validation problems.
    """
    limit = f", or {config.max_minutes:g} minutes" if config.max_minutes else ""
    few = ""
    if config.group_size < 8:
        few = " (fewer than 8: the group's mean is noisy, and more groups teach nothing)"
    values = {option: getattr(config, option.name) for option in fields(config)}
    usual = type(config)(algorithm=config.algorithm, max_new_tokens=config.max_new_tokens)
    changed = {o.name: v for o, v in values.items() if v not in (o.default, getattr(usual, o.name))}
    terminal.table(
        "Stage 2: GRPO",
        {
            "model": f"{config.model} + {config.sft_adapter or 'a new adapter'}",
            "device": pick_device(config.dtype) if config.backend == "local" else "the server's",
            "data": f"{config.dataset or 'from Python'}: {problems} problems, {validation} to "
            "validate on",
            "trainable": f"{trainable:,} parameters",
            "sampler": sampler,
            "algorithm": f"{config.algorithm}: {config.formula}",
            "a step": f"{config.batch_size} problems × {config.group_size} completions{few}",
            "a completion": f"at most {config.max_new_tokens} tokens (--max-new-tokens)",
            "steps": f"{config.steps_for(problems)}{limit} (the first step's line says "
            "how long they take)",
            "signal": "share of groups whose rewards differ; the others teach nothing",
            "options": ", ".join(f"{name} {value}" for name, value in changed.items()),
            **(
                {}
                if config.plan
                else {
                    "run": f"{config.run_dir} (all options: config.json)",
                    "watch it learn": f"rlm view {config.run_dir} --follow (in another terminal)",
                }
            ),
        },
    )
    if problem := judge_learning_rate(config.learning_rate):
        terminal.line(f"warning: learning rate {problem[0]}: {problem[1]}; type {USUAL_RATES}")


def summary_card(config: GRPOConfig, summary: Mapping[str, Any]) -> None:
    """Print the results of a run, and the command to run next."""
    terminal.table(
        "Stage 2 done",
        {
            **validation_facts(summary),
            "time": terminal.duration(summary["seconds"]),
            "peak memory": f"{summary['peak_memory_gb']:.1f} GB",
            "curves": config.run_dir / "curves.png",
            "adapter": f"{config.output} (best and last are in {config.run_dir})",
            "next": f'{command_of("inference")} --adapter {config.output} "your question"',
        },
    )


@contextmanager
def timer(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds spent in the block to `seconds[phase]`."""
    began = time.monotonic()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - began


def mean_metrics(
    processes: Iterable[Sequence[tuple[int, Mapping[str, float]]]],
) -> dict[str, float]:
    """Average the reward's metrics over all calls and processes, weighted by the number of groups.

    >>> mean_metrics([[(3, {"a": 1.0}), (1, {"b": 4.0})], [(0, {})]])
    {'a': 0.75, 'b': 1.0}
    """
    parts = [(count, metrics) for calls in processes for count, metrics in calls if count]
    total = sum(count for count, _ in parts)
    names = dict.fromkeys(name for _, metrics in parts for name in metrics)
    return {name: sum(n * m.get(name, 0.0) for n, m in parts) / total for name in names}


def step_metrics(
    groups: Sequence[Group],
    rewards: Tensor,
    penalties: Tensor,
    kept: Tensor,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Return the metrics of rewards, completions and times.

    Dropped groups count too, because without them dynamic sampling would flatter the reward.

    Args:
        rewards: (P, G), as the reward returned them, NaN without a verdict.
        penalties: (P, G), the length penalties.
        kept: (P,) of bool, the groups that were learned from; dynamic sampling drops the others.
        seconds: by "sample", "score", "learn".
    """
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    judged = rewards[~rewards.isnan()]
    zero_signal = int((~has_signal(rewards)).sum())
    metrics = {
        "reward/mean": judged.mean().item() if len(judged) else 0.0,
        "reward/std": judged.std().item() if len(judged) > 1 else 0.0,
        "reward/no_verdict": int(rewards.isnan().sum()),
        "reward/zero_signal_groups": zero_signal,
        "reward/zero_signal_share": zero_signal / len(groups),
        "completion/length_mean": sum(lengths) / len(lengths),
        "completion/length_max": max(lengths),
        "completion/truncated_rate": sum(c.truncated for c in completions) / len(completions),
        **{f"time/{phase}": value for phase, value in seconds.items()},
        "tokens/per_second": sum(lengths) / seconds["sample"],
    }
    if any(completion.tool_mask for completion in completions):
        calls = sum(len(completion.tool_calls) for completion in completions)
        metrics["tools/calls_per_completion"] = calls / len(completions)
    if penalties.any():
        metrics["reward/overlong"] = penalties.mean().item()
    if not kept.all():
        used = rewards[kept]
        metrics["sampling/dropped_groups"] = int((~kept).sum())
        metrics["reward/kept_mean"] = used.nanmean().item() if len(used) else 0.0
    return metrics


@dataclass
class LearnMetrics:
    """Sums over the micro-batches of a step, and the training metrics made from them."""

    mini_batches: int = 1  # updates in a pass
    passes: int = 0  # passes that were begun
    grad_norms: list[float] = field(default_factory=list)  # one per update
    sums: list[LossSums] = field(default_factory=list)  # last pass only
    entropy: list[float] = field(default_factory=list)  # first pass only
    # First update only: sum and maximum of |log-probability - the sampler's|, and tokens.
    gaps: list[tuple[float, float, int]] = field(default_factory=list)

    def add(
        self, update: int, micro: MicroBatch, logprobs: Tensor, entropy: Tensor, sums: LossSums
    ) -> None:
        """Add a micro-batch of an update.

        Args:
            logprobs, entropy: (n, T), of the policy.
        """
        if update // self.mini_batches == self.passes:
            self.passes, self.sums = self.passes + 1, []
        self.sums.append(sums)
        mask = micro.completion_mask
        if self.passes == 1:
            self.entropy.append((entropy * mask).sum().item())
        if update == 0:
            gap = (logprobs - micro.sampler_logprobs).abs()[mask]
            self.gaps.append((gap.sum().item(), gap.max().item(), sums.tokens))

    def as_dict(self, distributed: Distributed) -> dict[str, float]:
        """Return means over the tokens of all processes; {} if no token was learned from."""
        sums, gaps = distributed.gather(self.sums), distributed.gather(self.gaps)
        entropy = distributed.gather(self.entropy)
        if not sums:
            return {}
        tokens, norms = sum(s.tokens for s in sums), self.grad_norms[-self.mini_batches :]
        gap, gap_max, compared = zip(*gaps, strict=True)
        return {
            "loss/policy": sum(s.policy for s in sums) / self.mini_batches,
            "loss/kl": sum(s.kl_total for s in sums) / tokens,
            "loss/kl_weighted": sum(s.kl for s in sums) / self.mini_batches,  # as in the loss
            "policy/entropy": sum(entropy) / tokens,
            "policy/clip_fraction": sum(s.clipped_low + s.clipped_high for s in sums) / tokens,
            "optim/grad_norm": sum(norms) / len(norms),  # the same in all processes
            "sampler/logprob_gap_mean": sum(gap) / sum(compared),
            "sampler/logprob_gap_max": max(gap_max),
        }


def remaining(
    config: GRPOConfig, done: int, a_step: float, validation: float, seconds: float
) -> tuple[int, float]:
    """Return the step at which a run ends, by --steps or --max-minutes, and the seconds left.

    Args:
        done: steps so far.
        a_step, validation: seconds of each.
        seconds: the part of --max-minutes already used.
    """
    until, limit = 0.0, 60 * (config.max_minutes or math.inf)
    steps = required(config.steps, "--steps")
    while done < steps:
        done, until = done + 1, until + a_step
        is_last = done == steps or seconds + until >= limit
        if is_last or done % (config.eval_every or steps) == 0:
            until += validation
        if is_last:
            break
    return done, until


def time_left(rows: Sequence[Mapping[str, float]], config: GRPOConfig, minutes: float) -> float:
    """Estimate a run's remaining seconds, validations included, from its last steps.

    Args:
        rows: the metrics of the steps so far.
        minutes: the minutes that this process has trained.
    """
    took = [sum(row[f"time/{phase}"] for phase in PHASES) for row in rows[-RECENT_STEPS:]]
    evaluated = [row["time/evaluate"] for row in rows if "time/evaluate" in row] or [0.0]
    a_step, validation = sum(took) / len(took), evaluated[-1]
    return remaining(config, int(rows[-1]["step"]) + 1, a_step, validation, 60 * minutes)[1]


def step_line(metrics: Mapping[str, float], steps: int, left: float) -> str:
    """Return a step as one line for the terminal; `left`: the remaining seconds."""
    seconds = sum(metrics[f"time/{phase}"] for phase in PHASES)
    parts = [
        f"step {metrics['step'] + 1}/{steps}",
        f"reward {metrics['reward/mean']:.3f}",
        *_exact(metrics),
        f"signal {1 - metrics['reward/zero_signal_share']:.0%}",
        f"length {metrics['completion/length_mean']:.0f}",
        f"truncated {metrics['completion/truncated_rate']:.0%}",
    ]
    if "sampling/dropped_groups" in metrics:
        parts.append(f"dropped {metrics['sampling/dropped_groups']} groups")
    if "policy/entropy" in metrics:
        parts.append(f"entropy {metrics['policy/entropy']:.3f}")
        parts.append(f"grad {metrics['optim/grad_norm']:.2f}")
    if metrics.get("loss/kl"):
        parts.append(f"kl {metrics['loss/kl']:.4f}")
    parts.append(
        f"{seconds:.0f} s (sample {metrics['time/sample']:.0f}, learn {metrics['time/learn']:.0f})"
    )
    if left:
        parts.append(terminal.time_left(left))
    if "eval/reward" in metrics:
        parts.append(f"validation reward {metrics['eval/reward']:.3f}")
    elif "eval/accuracy" in metrics:
        parts.append(f"validation {metrics['eval/accuracy']:.1%}")
    return "  ".join(parts)


def _exact(metrics: Mapping[str, float]) -> list[str]:
    """Return the share of right answers if it differs from the mean reward."""
    right = metrics.get("reason/correct", metrics["reward/mean"])
    return [] if abs(right - metrics["reward/mean"]) < 1e-6 else [f"right {right:.0%}"]
