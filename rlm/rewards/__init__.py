"""Reward functions, and the scorer that calls them for a whole step."""

from rlm.rewards.base import BinaryReward, RewardFunction
from rlm.rewards.functions import (
    CombinedReward,
    ConstantReward,
    CorrectnessReward,
    FormatReward,
    GSM8KReward,
    ReasoningQualityReward,
    StepsReward,
)
from rlm.rewards.loading import as_reward, load_reward, write_reward_template
from rlm.rewards.scorer import Scorer, Scores

__all__ = [
    "BinaryReward",
    "CombinedReward",
    "ConstantReward",
    "CorrectnessReward",
    "FormatReward",
    "GSM8KReward",
    "ReasoningQualityReward",
    "RewardFunction",
    "Scorer",
    "Scores",
    "StepsReward",
    "as_reward",
    "load_reward",
    "write_reward_template",
]
