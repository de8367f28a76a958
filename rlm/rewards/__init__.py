"""Reward functions, and the scorer that calls them for a whole step."""

import lazy_loader

# File → what other packages, and a user's own file, import of it.
EXPORTS = {
    "functions": "CombinedReward CorrectnessReward FormatReward GSM8KReward ReasoningQualityReward",
    "reward_function": "RewardFunction load_reward",
    "scorer": "Scorer Scores",
}
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={file: names.split() for file, names in EXPORTS.items()}
)
