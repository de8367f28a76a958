"""Reward functions, and the scorer that calls them for a whole step."""

import lazy_loader

# File → what other packages import of it.
EXPORTS = {
    "base": "BinaryReward RewardFunction",
    "functions": (
        "CombinedReward ConstantReward CorrectnessReward FormatReward GSM8KReward "
        "ReasoningQualityReward StepsReward"
    ),
    "loading": "as_reward load_reward write_reward_template",
    "scorer": "Scorer Scores is_built_in",
}
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={file: names.split() for file, names in EXPORTS.items()}
)
