"""Reward functions, and the scorer that calls them for a whole step."""

from rlm.rewards.base import RewardFunction, load_reward
from rlm.rewards.functions import (
    CombinedReward,
    CorrectnessReward,
    FormatReward,
    GSM8KReward,
    ReasoningQualityReward,
)
from rlm.rewards.scorer import Scorer, Scores

__all__ = [
    "CombinedReward",
    "CorrectnessReward",
    "FormatReward",
    "GSM8KReward",
    "ReasoningQualityReward",
    "RewardFunction",
    "Scorer",
    "Scores",
    "load_reward",
]
