"""Alerts: rules that detect from the metrics that a run goes wrong, and give advice.

Each rule looks at the last steps. A warning is printed when its rule begins to hold, and again only
if the rule ceased to hold in between. All thresholds are in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

Row = Mapping[str, float]  # a line of metrics.jsonl

WINDOW = 5  # steps that a rule averages over
CUT_OFF = 0.1  # a larger share of truncated completions is reported, from step 1 on
FLAT_STEPS = 30  # the last third's reward is compared with the first third's
FLAT_RISE = 0.01  # less than this is no rise
FLAT_CEILING = 0.9  # above this, little is left to gain


@dataclass(frozen=True)
class Rule:
    """Warns if `bad` is true for the mean of `metric` over the window."""

    metric: str
    bad: Callable[[float], bool]
    advice: str  # its {:…} is filled with the mean


RULES = (
    Rule(
        "reward/zero_signal_share",
        lambda share: share >= 0.8,
        "in {:.0%} of the groups all rewards are equal, and these teach nothing: try problems "
        "closer to what the model can do, a larger --group-size, or a higher --temperature",
    ),
    Rule(
        "policy/entropy",  # nats per token; a model trained on one format sits at 0.1 to 0.3
        lambda nats: nats < 0.02,
        "the entropy has fallen to {:.3f} nats per token, so the model tries little that is new: "
        "lower --learning-rate, raise --clip-eps-high or --temperature",
    ),
    Rule(
        "loss/kl",  # nats per token, from the start adapter
        lambda nats: nats > 1,
        "the policy is {:.2g} nats per token away from where it started: lower --learning-rate or "
        "raise --kl-weight, and read samples.jsonl",
    ),
    Rule(
        "sampler/logprob_gap_mean",  # nats per token
        lambda nats: nats > 0.1,
        "sampler and trainer disagree by {:.2g} nats per token: try --sampler unmerged, or check "
        "that the server has this model",
    ),
)
NO_REWARD = (
    "no completion of the last {} steps earned a reward: samples.jsonl says why; try easier "
    "problems, a larger --group-size, or train_sft.py first"
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
FLAT = (
    "the reward has not risen in {} steps ({:.2f}, now {:.2f}): try a higher --learning-rate (LoRA "
    "wants about ten times full fine-tuning's), more problems per step, or problems nearer to what "
    "the model can do"
)


def active_alerts(rows: Sequence[Row]) -> dict[str, str]:
    """Return the alerts after these steps (oldest first): rule → one line with advice."""
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
        found.pop("reward/zero_signal_share", None)  # reported already, more exactly
    return found or _flat_reward(rows)


def new_alerts(rows: Sequence[Row]) -> list[str]:
    """Return the alerts of the last step that the previous step did not have."""
    before = active_alerts(rows[:-1])
    return [text for rule, text in active_alerts(rows).items() if rule not in before]


def _cut_off(recent: Sequence[Row]) -> dict[str, str]:
    """Describe completions, and replies of a recipe's agents, that were cut off at their limit."""
    found = {}
    for area, advice in {"completion": TOO_SHORT, "agents": AGENTS_TOO_SHORT}.items():
        name, length = f"{area}/truncated_rate", f"{area}/length_max"
        rows = [row for row in recent if name in row]
        share = fmean(row[name] for row in rows) if rows else 0.0
        if share > CUT_OFF:
            found[name] = advice.format(share, 2 * int(max(row[length] for row in rows)))
    return found


def _reward_without_difference(recent: Sequence[Row]) -> dict[str, str]:
    rewards = {row["reward/mean"] for row in recent}
    if len(rewards) > 1 or any(row["reward/std"] for row in recent):
        return {}
    (reward,) = rewards
    return {"reward": CONSTANT.format(WINDOW, reward) if reward else NO_REWARD.format(WINDOW)}


def _flat_reward(rows: Sequence[Row]) -> dict[str, str]:
    """Describe a flat reward, if no other rule explains it."""
    if len(rows) < FLAT_STEPS:
        return {}
    rewards = [row["reward/mean"] for row in rows[-FLAT_STEPS:]]
    third = FLAT_STEPS // 3
    before, after = fmean(rewards[:third]), fmean(rewards[-third:])
    if after - before >= FLAT_RISE or after >= FLAT_CEILING:
        return {}
    return {"flat": FLAT.format(FLAT_STEPS, before, after)}
