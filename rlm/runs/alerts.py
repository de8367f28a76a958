"""Alerts: rules that detect problems of a run from its metrics, and give advice.

Each rule is evaluated on the last steps. A warning is printed when a rule begins to hold. It is
printed again only if the rule has stopped holding in between. All thresholds are in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

Row = Mapping[str, float]  # a line of metrics.jsonl

WINDOW = 5  # number of steps over which a rule averages
CUT_OFF = 0.1  # a larger share of truncated completions is reported, already after step 1
FLAT_STEPS = 30  # the reward of the last third of these steps is compared with the first third
FLAT_RISE = 0.01  # a smaller increase of the reward counts as flat
FLAT_CEILING = 0.9  # a higher reward is not reported, because it cannot rise much further


@dataclass(frozen=True)
class Rule:
    """Warns if `bad` is true for the mean of `metric` over the window."""

    metric: str
    bad: Callable[[float], bool]
    advice: str  # the placeholder {:…} is replaced by the mean


RULES = (
    Rule(
        "reward/zero_signal_share",
        lambda share: share >= 0.8,
        "in {:.0%} of the groups, all rewards are equal, so these groups give no training signal: "
        "try problems closer to the model's ability, a larger --group-size, or a higher "
        "--temperature",
    ),
    Rule(
        "policy/entropy",  # nats per token; 0.1 to 0.3 is usual for a model trained on one format
        lambda nats: nats < 0.02,
        "the entropy has fallen to {:.3f} nats per token, so the model explores little: "
        "lower --learning-rate, raise --clip-eps-high or --temperature",
    ),
    Rule(
        "loss/kl",  # nats per token, relative to the start adapter
        lambda nats: nats > 1,
        "the policy is {:.2g} nats per token away from where it started: lower --learning-rate or "
        "raise --kl-weight, and read samples.jsonl",
    ),
    Rule(
        "sampler/logprob_gap_mean",  # nats per token
        lambda nats: nats > 0.1,
        "sampler and trainer disagree by {:.2g} nats per token: try --sampler unmerged, or check "
        "that the server serves this model",
    ),
)
NO_REWARD = (
    "no completion of the last {} steps earned a reward: see samples.jsonl for the reasons; "
    "try easier problems, a larger --group-size, or train_sft.py first"
)
TOO_SHORT = (
    "{:.0%} of the completions were cut off before their answer: type --max-new-tokens {}, or "
    "train the format longer with train_sft.py"
)
AGENTS_TOO_SHORT = (
    "{:.0%} of the agents' replies were cut off, most before their answer: type "
    "--agent-max-tokens {}"
)
CONSTANT = (
    "all completions of the last {} steps have the reward {:g}, so there is nothing to learn from: "
    "use harder problems or another reward"
)
NO_VERDICT = (
    "all completions of the last {} steps that got a reward have the reward {:g}, and the others "
    "got none (None or NaN): if these are wrong answers, let the reward return 0 for them"
)
FLAT = (
    "the reward has not risen in {} steps (from {:.2f} to {:.2f}): try a higher --learning-rate "
    "(LoRA needs about ten times the rate of full fine-tuning), more problems per step, or "
    "problems closer to the model's ability"
)


def active_alerts(rows: Sequence[Row]) -> dict[str, str]:
    """Return the alerts that hold after the given steps, as a map from rule to advice.

    Args:
        rows: the metrics of the steps, oldest first.
    """
    recent = rows[-WINDOW:]
    cut_off = _cut_off(recent)
    if len(recent) < WINDOW:
        return cut_off
    found = cut_off | _reward_without_difference(recent)
    for rule in RULES:
        values = [row[rule.metric] for row in recent if rule.metric in row]
        if len(values) == WINDOW and rule.bad(fmean(values)):
            found[rule.metric] = rule.advice.format(fmean(values))
    if "reward" in found:
        # The alert "reward" already reports this problem, more precisely.
        found.pop("reward/zero_signal_share", None)
    return found or _flat_reward(rows)


def new_alerts(rows: Sequence[Row]) -> list[str]:
    """Return the alerts that hold after the last step but did not hold one step earlier."""
    before = active_alerts(rows[:-1])
    return [text for rule, text in active_alerts(rows).items() if rule not in before]


def _cut_off(recent: Sequence[Row]) -> dict[str, str]:
    """Return alerts for truncated completions, and for truncated replies of a recipe's agents."""
    found = {}
    for area, advice in {"completion": TOO_SHORT, "agents": AGENTS_TOO_SHORT}.items():
        name, length = f"{area}/truncated_rate", f"{area}/length_max"
        rows = [row for row in recent if name in row]
        share = fmean(row[name] for row in rows) if rows else 0.0
        if share > CUT_OFF:
            found[name] = advice.format(share, 2 * int(max(row[length] for row in rows)))
    return found


def _reward_without_difference(recent: Sequence[Row]) -> dict[str, str]:
    """Return an alert if all completions have the same reward."""
    rewards = {row["reward/mean"] for row in recent}
    if len(rewards) > 1 or any(row["reward/std"] for row in recent):
        return {}
    (reward,) = rewards
    if reward and any(row.get("reward/no_verdict") for row in recent):
        return {"reward": NO_VERDICT.format(WINDOW, reward)}
    return {"reward": CONSTANT.format(WINDOW, reward) if reward else NO_REWARD.format(WINDOW)}


def _flat_reward(rows: Sequence[Row]) -> dict[str, str]:
    """Return an alert if the reward has not risen."""
    if len(rows) < FLAT_STEPS:
        return {}
    rewards = [row["reward/mean"] for row in rows[-FLAT_STEPS:]]
    third = FLAT_STEPS // 3
    before, after = fmean(rewards[:third]), fmean(rewards[-third:])
    if after - before >= FLAT_RISE or after >= FLAT_CEILING:
        return {}
    return {"flat": FLAT.format(FLAT_STEPS, before, after)}
