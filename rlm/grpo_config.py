"""The options of GRPO training: what `train_grpo.py --help` lists and `GRPOTrainer` takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rlm.config import flag
from rlm.prompts import FORMATS
from rlm.quantize import QUANTIZATIONS, chosen_quantization
from rlm.tracking import TRACKER_NAMES, chosen_tracker

ALGORITHM_NAMES = ("grpo", "drgrpo")
SAMPLER_NAMES = ("auto", "merged", "unmerged", "vllm")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")


@dataclass
class GRPOConfig:
    """One training run. A step is one round of sample → score → compare → learn."""

    model: str | None = flag(None, "hub id, directory, or smollm2-135m (default: by the machine)")
    dataset: str | None = flag(None, "gsm8k, word-problems[:LEVELS], or FILE.jsonl")
    max_samples: int | None = flag(None, "training problems (none: all; 2000 word problems)")
    sft_adapter: Path | None = flag(Path("weights/sft_lora"), "adapter to start from, or none")
    reasoning_format: str = flag("deepseek", "tags", choices=tuple(FORMATS))
    quantize: str = flag("none", "load the base packed", choices=QUANTIZATIONS)
    use_4bit: bool = flag(False, "the same as --quantize 4bit")
    attn: str = flag("sdpa", "attention of the learning pass", choices=ATTENTIONS)

    algorithm: str = flag("grpo", "advantage and aggregation", choices=ALGORITHM_NAMES)
    steps: int = flag(20, "rounds of sampling and learning")
    batch_size: int = flag(20, "problems in a step")
    group_size: int = flag(8, "completions of each problem")
    max_new_tokens: int = flag(96, "longest completion")
    temperature: float = flag(1.0, "of sampling and scoring alike")
    seats: int = flag(128, "completions decoded at the same time")
    sampler: str = flag("auto", "which weights draw (auto: by memory)", choices=SAMPLER_NAMES)
    sampler_url: str | None = flag(None, "of the server, for --sampler vllm")

    learning_rate: float = flag(2e-4, "peak; LoRA wants about ten times full fine-tuning's")
    lr_schedule: str = flag("linear", "after warm-up", choices=("constant", "linear", "cosine"))
    min_lr_ratio: float = flag(0.1, "where linear and cosine end, as a share of the peak")
    warmup_steps: int = flag(1, "steps in which the rate rises")
    weight_decay: float = flag(0.0, "AdamW's")
    max_grad_norm: float = flag(1.0, "gradients are scaled down to this norm")
    updates_per_batch: int = flag(1, "optimizer updates on the rollouts of a step")
    train_batch_size: int | None = flag(None, "completions in a micro-batch (none: by tokens)")
    train_batch_tokens: int | None = flag(None, "padded tokens in a micro-batch (none: by memory)")
    checkpointing: bool = flag(False, "compute activations twice rather than keep them")
    clip_eps_low: float = flag(0.2, "the ratio is clipped at 1 - this")
    clip_eps_high: float = flag(0.2, "and at 1 + this")
    kl_weight: float = flag(0.0, "pull toward the start adapter; 0 costs nothing")
    lora_r: int = flag(16, "rank, where no adapter is given to start from")
    lora_alpha: int = flag(32, "scale, likewise")

    eval_every: int = flag(10, "steps between greedy evaluations (0: only first and last)")
    eval_samples: int = flag(100, "validation problems, always the same")
    save_every: int = flag(10, "steps between checkpoints (0: only at the end)")
    keep_checkpoints: int = flag(2, "newest checkpoints kept")
    sample_every: int = flag(5, "steps between printed samples (0: none)")
    max_minutes: float | None = flag(None, "stop at the step after this many minutes, and export")
    resume: bool = flag(False, "continue the run in --run-dir from its newest checkpoint")
    accept_changes: bool = flag(False, "with --resume: go on though options or data are others")
    tracker: str = flag("none", "show the run there too", choices=TRACKER_NAMES)
    use_wandb: bool = flag(False, "the same as --tracker wandb")
    seed: int = flag(0, "of problems and sampling")
    run_dir: Path = flag(Path("runs/grpo"), "metrics, samples and checkpoints")
    output: Path = flag(Path("weights/final_rlm_lora"), "where the best adapter goes")

    def __post_init__(self) -> None:
        at_least_1 = (
            "steps batch_size max_new_tokens seats updates_per_batch lora_r lora_alpha "
            "eval_samples keep_checkpoints"
        )
        for name in at_least_1.split():
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        for name in ("eval_every", "save_every", "sample_every", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must be 0 or more")
        if self.group_size < 2:
            raise ValueError(
                "--group-size must be at least 2: a completion is compared inside its group"
            )
        if self.temperature <= 0:
            raise ValueError(
                "--temperature must be above 0: equal completions have nothing to compare"
            )
        if self.learning_rate < 0 or self.kl_weight < 0 or self.weight_decay < 0:
            raise ValueError("--learning-rate, --kl-weight and --weight-decay must be 0 or more")
        if not 0 <= self.clip_eps_low < 1 or self.clip_eps_high < 0:
            raise ValueError("--clip-eps-low must be in [0, 1), --clip-eps-high 0 or more")
        if self.max_grad_norm <= 0:
            raise ValueError("--max-grad-norm must be above 0")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError("--min-lr-ratio must be between 0 and 1")
        for name in ("train_batch_size", "train_batch_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        if (self.sampler == "vllm") != (self.sampler_url is not None):
            raise ValueError("--sampler vllm and --sampler-url go together")
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError("--max-samples must be at least 1")
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise ValueError("--max-minutes must be above 0")
        self.quantize = chosen_quantization(self.quantize, self.use_4bit)
        self.use_4bit = self.quantize == "4bit"
        if self.attn == "flash_attention_2":
            raise ValueError(
                "--attn flash_attention_2: completions share their prompt through a mask that it "
                "does not take; sdpa does (train_sft.py has no such mask)"
            )
        self.tracker = chosen_tracker(self.tracker, self.use_wandb)
        if self.output.resolve() == (self.sft_adapter or Path()).resolve():
            raise ValueError("--output would overwrite --sft-adapter; name another directory")

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then constant, linear or cosine down to min_lr_ratio of the peak."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        height = {
            "constant": 1.0,
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
        }[self.lr_schedule]
        return self.learning_rate * (self.min_lr_ratio + (1 - self.min_lr_ratio) * height)


# What changes when a GPU picks the 7B model on GSM8K.
GPU_DEFAULTS = {
    "max_new_tokens": 512,
    "steps": 200,
    "learning_rate": 2e-5,
}
