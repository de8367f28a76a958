"""The algorithms, each defined by a set of values. This module does not import torch.

The modules `advantages`, `batches`, `logprobs` and `loss` read these values; they do not depend on
the names of the algorithms. The papers are listed in docs/explanation/algorithms.md.
"""

from __future__ import annotations

from dataclasses import dataclass

AGGREGATIONS = ("sequence", "token", "constant")


@dataclass(frozen=True)
class Algorithm:
    """The settings in which the variants of GRPO differ."""

    source: str
    advantage: str  # "std", "centred", "mean" or "share" (see `group_advantages`)
    aggregation: str  # one of AGGREGATIONS (see `row_weights`)
    clip_eps_low: float  # the lower bound of the ratio is 1 - clip_eps_low; 1: no lower bound
    clip_eps_high: float  # the upper bound of the ratio is 1 + clip_eps_high
    ratio: str = "token"  # probability ratio of each "token" or of the whole "sequence"
    # "ppo": the clipped surrogate objective. "weighted": A log π times the clipped ratio, which is
    # treated as a constant. "tapered": "weighted" for A < 0, and A log π for A > 0.
    objective: str = "ppo"
    negative_weight: float = 1.0  # multiplies negative advantages
    distinct: bool = False  # count equal completions with rewards above the mean only once
    signal_only: bool = False  # leave groups with equal rewards out of the update
    dynamic_sampling: bool = False  # replace groups with equal rewards
    overlong_share: float = 0.0  # the length penalty applies to this last share of max_new_tokens
    # Defaults of the options that depend on the algorithm.
    mini_batch_size: int | None = None  # problems per optimizer update; None: all problems
    learning_rate: float = 1e-4
    warmup_steps: int = 1

    def formula(self, length: str = "max_new_tokens") -> str:
        """Format the objective as one line for --help, the log and the docs.

        Args:
            length: the divisor of "constant" aggregation, as text.
        """
        low, high = f"{1 - self.clip_eps_low:g}", f"{1 + self.clip_eps_high:g}"
        bounds = f"clip(ρ, {low}, {high})" if self.clip_eps_low < 1 else f"min(ρ, {high})"
        parts = [
            {
                "std": "A = (r − mean)/(std + 1e-4)",
                "centred": "A = r − mean",
                "mean": "A = (r − mean)/mean",
                "share": "A = G (r − mean)/sum(|r − mean| on its side of the mean)",
            }[self.advantage],
            {
                "ppo": f"l = −min(ρ A, {bounds} A)",
                "weighted": f"l = −sg[{bounds}] A log π",
                "tapered": f"l = −A log π where A > 0, −sg[{bounds}] A log π where A < 0",
            }[self.objective],
            {
                "token": "ρ of each token",
                "sequence": "ρ of a completion: geometric mean over its tokens",
            }[self.ratio],
            {
                "sequence": "mean over tokens, then over rollouts",
                "constant": f"sum over tokens / (rollouts · {length})",
                "token": "mean over all tokens of the update",
            }[self.aggregation],
        ]
        if self.negative_weight != 1:
            parts.insert(1, f"A times {self.negative_weight:g} where A < 0")
        if self.distinct:
            parts.append("equal completions above the mean count once")
        if self.signal_only:
            parts.append("groups with equal rewards are excluded")
        if self.dynamic_sampling:
            parts.append("groups with equal rewards are replaced")
        if self.overlong_share:
            share = f"{self.overlong_share:.0%}".replace("%", " %")
            parts.append(f"r falls over the last {share} of max_new_tokens")
        return "; ".join(parts)


ALGORITHMS = {
    "grpo": Algorithm("DeepSeekMath, arXiv 2402.03300", "std", "sequence", 0.2, 0.2),
    "drgrpo": Algorithm("Dr. GRPO, arXiv 2503.20783", "centred", "constant", 0.2, 0.2),
    "dapo": Algorithm(
        "DAPO, arXiv 2503.14476",
        "std",
        "token",
        0.2,
        0.28,
        dynamic_sampling=True,
        overlong_share=0.2,
    ),
    "gspo": Algorithm("GSPO, arXiv 2507.18071", "std", "sequence", 3e-4, 4e-4, ratio="sequence"),
    # The clipped ratio is at most 5, as in ScaleRL (arXiv 2510.13786), and has no lower bound.
    "cispo": Algorithm(
        "CISPO in MiniMax-M1, arXiv 2506.13585", "std", "token", 1.0, 4.0, objective="weighted"
    ),
    "maxrl": Algorithm("MaxRL, arXiv 2602.02710", "mean", "token", 0.2, 0.2),
    # This variant of TOPR differs from GRPO as follows. The right completions of a group share a
    # total weight of 1, and the wrong completions a total weight of 1/4, so the weight of a right
    # completion is larger if it is rare. The likelihood of right completions is maximized without
    # clipping, because many small updates would soon reach the clipping bounds. In a wrong
    # completion, the gradient of a token shrinks as the token becomes less likely than when it was
    # sampled, because making it even less likely does not teach the right answer.
    "topr": Algorithm(
        "TOPR, arXiv 2503.14286",
        "share",
        "sequence",
        1.0,
        0.0,
        objective="tapered",
        negative_weight=0.25,
        distinct=True,
        signal_only=True,
        mini_batch_size=2,
        learning_rate=3e-4,
        warmup_steps=5,
    ),
}

# Option values set by `--preset NAME` and `from_preset`. Options on the command line and in a YAML
# file override these values.
PRESETS: dict[str, dict[str, object]] = {
    **{name: {"algorithm": name} for name in ("grpo", "drgrpo", "dapo", "maxrl", "topr")},
    "reasoning_small": {  # models of 0.5 to 3 billion parameters
        "algorithm": "drgrpo",
        "group_size": 8,
        "batch_size": 4,
        "max_new_tokens": 512,
        "learning_rate": 2e-5,
        "quantize": "auto",
    },
    "reasoning_large": {  # models of 7 billion parameters and more
        "algorithm": "dapo",
        "group_size": 16,
        "batch_size": 8,
        "max_new_tokens": 2048,
        "learning_rate": 1e-5,
        "quantize": "auto",
    },
}


def algorithms_help() -> str:
    """Return the table of ALGORITHMS for --help."""
    lines = [f"  {name}: {a.formula()}  ({a.source})" for name, a in ALGORITHMS.items()]
    return "\n".join(["algorithms:", *lines])
