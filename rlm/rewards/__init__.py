"""Reward functions, and the scorer that calls them for a whole step."""

from rlm.rewards.functions import (
    CombinedReward,
    CorrectnessReward,
    FormatReward,
    GSM8KReward,
    MathReward,
    ReasoningQualityReward,
    TruncationPenalty,
)
from rlm.rewards.reward_function import RewardFunction, load_reward
from rlm.rewards.scorer import Scorer, Scores

__all__ = [
    "CombinedReward",
    "CorrectnessReward",
    "FormatReward",
    "GSM8KReward",
    "MathReward",
    "ReasoningQualityReward",
    "RewardFunction",
    "Scorer",
    "Scores",
    "TruncationPenalty",
    "load_reward",
]
