"""The metrics of a training step (`area/name`), and what a run prints of them: the progress lines,
the warnings and the summary.

An alert is a warning with a rule, which is evaluated on the last steps. It is printed when its rule
begins to hold, and again only if the rule has stopped holding in between.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from statistics import fmean
from typing import Any

from torch import Tensor

from rlm.cli import command_of, required, terminal
from rlm.training.advantages import Group, has_signal
from rlm.training.batches import MicroBatch
from rlm.training.config import GRPOConfig
from rlm.training.distributed import Distributed
from rlm.training.loss import LossSums
from rlm.training.validation import validation_facts

PHASES = ("sample", "score", "learn")  # the phases of a step, in order
Row = Mapping[str, float]  # a line of metrics.jsonl
# A micro-batch of an update, its log-probabilities (n, T), its entropies (n, T), and its sums.
Learned = tuple[MicroBatch, Tensor, Tensor, LossSums]
RECENT_STEPS = 5  # the rules and the estimate of the time left use this many last steps
CUT_OFF = 0.1  # a larger share of truncated completions is reported, even after step 1
FLAT_STEPS = 30  # the reward of the last third of these steps is compared with the first third
FLAT_RISE = 0.01  # a smaller increase of the reward counts as flat
FLAT_CEILING = 0.9  # a higher reward is not reported, because it cannot rise much further


def summary_card(config: GRPOConfig, summary: Mapping[str, Any]) -> None:
    """Print the results of a run, and the next command."""
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


def mean_metrics(calls: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Average the metrics of the reward function over its calls in all processes.

    Each element of `calls` is the number of groups and the metrics. The average is weighted by the
    number of groups. A metric that a call lacks counts as 0, because the metrics are shares and
    means of completions. For metrics whose name ends in "_max", the maximum is returned.

    >>> mean_metrics([(3, {"a": 1.0, "a_max": 2}), (1, {"b": 4.0, "a_max": 5}), (0, {})])
    {'a': 0.75, 'a_max': 5, 'b': 1.0}
    """
    parts = [(count, metrics) for count, metrics in calls if count]
    total = sum(count for count, _ in parts)
    names = dict.fromkeys(name for _, metrics in parts for name in metrics)
    return {
        name: max(m[name] for _, m in parts if name in m)
        if name.endswith("_max")
        else sum(n * m.get(name, 0.0) for n, m in parts) / total
        for name in names
    }


def step_metrics(
    groups: Sequence[Group],
    rewards: Tensor,
    penalties: Tensor,
    kept: Tensor,
    seconds: Mapping[str, float],
    kind: str = "",
) -> dict[str, float]:
    """Return the metrics of the rewards, the completions and the times of a step.

    The metrics include the groups that dynamic sampling dropped. Without these groups, the mean
    reward would not be that of the policy.

    Args:
        rewards: the rewards returned by the reward function, (P, G), with NaN for a completion
            without a reward.
        penalties: the length penalties, (P, G).
        kept: whether each group is used for training, (P,) of bool. Dynamic sampling drops the
            other groups.
        seconds: the duration of each phase: "sample", "score" and "learn".
        kind: the kind of the advantages (see `has_signal`).
    """
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    judged = rewards[~rewards.isnan()]
    # Penalties may differ where rewards do not.
    teaches = has_signal(rewards + penalties, kind) & kept
    zero_signal = int((~teaches).sum())
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


def learn_metrics(
    updates: Sequence[Sequence[Learned]],
    grad_norms: Sequence[float],
    mini_batches: int,
    distributed: Distributed,
) -> dict[str, float]:
    """Return the training metrics of a step over all processes; empty if nothing was trained.

    The entropy is that of the first pass over the mini-batches, and the gap between sampler and
    trainer is that of the first update. All other metrics describe the last pass.

    Args:
        grad_norms: the gradient norm of each update, which is the same in all processes.
        mini_batches: the number of updates in a pass.
    """
    first, last = chain(*updates[:mini_batches]), chain(*updates[-mini_batches:])
    entropy = [(entropy * micro.completion_mask).sum().item() for micro, _, entropy, _ in first]
    gaps: list[tuple[float, float, int]] = []
    for micro, logprobs, *_ in chain(*updates[:1]):
        gap = (logprobs - micro.sampler_logprobs).abs()[micro.completion_mask]
        gaps.append((gap.sum().item(), gap.max().item(), len(gap)))
    entropy, gaps = distributed.gather(entropy), distributed.gather(gaps)
    sums = distributed.gather([sums for *_, sums in last])
    if not sums:
        return {}
    tokens, norms = sum(s.tokens for s in sums), grad_norms[-mini_batches:]
    # Updates whose norm is not finite were skipped, so the mean leaves out their norms.
    norms = [norm for norm in norms if math.isfinite(norm)] or norms
    total, gap_max, compared = zip(*gaps, strict=True)
    return {
        "loss/policy": sum(s.policy for s in sums) / mini_batches,
        "loss/kl": sum(s.kl_total for s in sums) / tokens,
        "loss/kl_weighted": sum(s.kl for s in sums) / mini_batches,  # as in the loss
        "policy/entropy": sum(entropy) / tokens,
        "policy/clip_fraction": sum(s.clipped for s in sums) / tokens,
        "optim/grad_norm": sum(norms) / len(norms),
        "sampler/logprob_gap_mean": sum(total) / sum(compared),
        "sampler/logprob_gap_max": max(gap_max),
    }


def remaining(
    config: GRPOConfig, done: int, a_step: float, validation: float, seconds: float
) -> tuple[int, float]:
    """Estimate the end of a run, which is determined by --steps or by --max-minutes.

    Args:
        done: the number of steps that are finished.
        a_step, validation: the duration of a step and of a validation, in seconds.
        seconds: the part of --max-minutes that is already used, in seconds.

    Returns:
        The step at which the run ends, and the remaining seconds.
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


def time_left(rows: Sequence[Row], config: GRPOConfig, minutes: float) -> float:
    """Estimate the remaining seconds of a run, including validations, from its last steps.

    Args:
        rows: the metrics of the finished steps.
        minutes: the number of minutes that this process has trained.
    """
    took = [sum(row[f"time/{phase}"] for phase in PHASES) for row in rows[-RECENT_STEPS:]]
    evaluated = [row["time/evaluate"] for row in rows if "time/evaluate" in row] or [0.0]
    a_step, validation = sum(took) / len(took), evaluated[-1]
    return remaining(config, int(rows[-1]["step"]) + 1, a_step, validation, 60 * minutes)[1]


def step_line(metrics: Mapping[str, float], steps: int, left: float) -> str:
    """Format the metrics of a step as one line for the terminal.

    Args:
        left: the remaining seconds of the run.
    """
    seconds = sum(metrics[f"time/{phase}"] for phase in PHASES)
    reward = metrics["reward/mean"]
    parts = [f"step {metrics['step'] + 1}/{steps}", f"reward {reward:.3f}"]
    right = metrics.get("reason/correct", reward)  # the share of right answers
    if abs(right - reward) >= 1e-6:
        parts.append(f"right {right:.0%}")
    parts += [
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


# Maps each metric to a condition on its mean over the last steps, and the advice if it is true. The
# mean replaces {:…}.
RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "reward/zero_signal_share": (
        lambda share: share >= 0.8,
        "in {:.0%} of the groups, all rewards are equal, so these groups give no training signal: "
        "try problems closer to the model's ability, a larger --group-size, or a higher "
        "--temperature",
    ),
    # In nats per token; 0.1 to 0.3 is usual for a model trained on one format.
    "policy/entropy": (
        lambda nats: nats < 0.02,
        "the entropy has fallen to {:.3f} nats per token, so the model explores little: "
        "lower --learning-rate, raise --clip-eps-high or --temperature",
    ),
    "loss/kl": (  # nats per token, relative to the initial adapter
        lambda nats: nats > 1,
        "the KL divergence from the initial adapter is {:.2g} nats per token: lower "
        "--learning-rate or raise --kl-weight, and read samples.jsonl",
    ),
    "sampler/logprob_gap_mean": (  # nats per token
        lambda nats: nats > 0.1,
        "the log-probabilities of sampler and trainer differ by {:.2g} nats per token: try "
        "--sampler unmerged, or check that the server serves this model",
    ),
}


def active_alerts(rows: Sequence[Row]) -> dict[str, str]:
    """Return the alerts that are active after these steps, as a map from rule to advice."""
    recent = rows[-RECENT_STEPS:]
    cut_off = _cut_off(recent)
    if len(recent) < RECENT_STEPS:
        return cut_off
    found = cut_off | _reward_without_difference(recent)
    for metric, (is_bad, advice) in RULES.items():
        values = [row[metric] for row in recent if metric in row]
        if len(values) == RECENT_STEPS and is_bad(fmean(values)):
            found[metric] = advice.format(fmean(values))
    if "reward" in found:
        # The alert "reward" already reports this problem, more precisely.
        found.pop("reward/zero_signal_share", None)
    return found or _flat_reward(rows)


def new_alerts(rows: Sequence[Row]) -> list[str]:
    """Return the alerts that are active after the last step but were not one step earlier."""
    before = active_alerts(rows[:-1])
    return [text for rule, text in active_alerts(rows).items() if rule not in before]


def _cut_off(recent: Sequence[Row]) -> dict[str, str]:
    """Return alerts for truncated completions, and for truncated replies of a recipe's agents."""
    remedies = {
        "completion": ("completions", "--max-new-tokens {}, or train the format longer with SFT"),
        "agents": ("agents' replies", "--agent-max-tokens {}"),
    }
    found = {}
    for area, (what, remedy) in remedies.items():
        rows = [row for row in recent if f"{area}/truncated_rate" in row]
        share = fmean(row[f"{area}/truncated_rate"] for row in rows) if rows else 0.0
        if share > CUT_OFF:
            length = 2 * int(max(row[f"{area}/length_max"] for row in rows))
            found[f"{area}/truncated_rate"] = (
                f"{share:.0%} of the {what} were cut off, often before their answer: use "
                f"{remedy.format(length)}"
            )
    return found


def _reward_without_difference(recent: Sequence[Row]) -> dict[str, str]:
    """Return an alert if all completions have the same reward."""
    rewards = {row["reward/mean"] for row in recent}
    if len(rewards) > 1 or any(row["reward/std"] for row in recent):
        return {}
    (reward,) = rewards
    steps = f"the last {RECENT_STEPS} steps"
    if not reward:
        text = (
            f"no completion of {steps} earned a reward: see samples.jsonl for the reasons; "
            "try easier problems, a larger --group-size, or SFT first"
        )
    elif any(row.get("reward/no_verdict") for row in recent):
        text = (
            f"all completions of {steps} that got a reward have the reward {reward:g}, and the "
            "others got none (None or NaN): if these are wrong answers, let the reward return 0 "
            "for them"
        )
    else:
        text = (
            f"all completions of {steps} have the reward {reward:g}, so there is nothing to learn "
            "from: use harder problems or another reward"
        )
    return {"reward": text}


def _flat_reward(rows: Sequence[Row]) -> dict[str, str]:
    """Return an alert if the reward has not risen."""
    if len(rows) < FLAT_STEPS:
        return {}
    rewards = [row["reward/mean"] for row in rows[-FLAT_STEPS:]]
    third = FLAT_STEPS // 3
    before, after = fmean(rewards[:third]), fmean(rewards[-third:])
    if after - before >= FLAT_RISE or after >= FLAT_CEILING:
        return {}
    text = (
        f"the reward has not risen in {FLAT_STEPS} steps (from {before:.2f} to {after:.2f}): try a "
        "higher --learning-rate (LoRA needs about ten times the rate of full fine-tuning), more "
        "problems per step, or problems closer to the model's ability"
    )
    return {"flat": text}
