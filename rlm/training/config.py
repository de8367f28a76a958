"""The options of GRPO training: what `train_grpo.py --help` lists and `GRPOTrainer` takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlm.cli import by_field, check_values, find_choice, flag, merge_switches, takes_aliases
from rlm.data import FORMATS
from rlm.model import DTYPES, QUANTIZATIONS
from rlm.runs import PROJECT, TRACKER_NAMES, check_project
from rlm.training.algorithms import ALGORITHMS, PRESETS, Algorithm

SAMPLER_NAMES = ("auto", "merged", "unmerged", "vllm")
KL_ESTIMATORS = ("k1", "k2", "k3")
DEFAULT_SFT_ADAPTER = Path("weights/sft_lora")  # taken if it is there
ATTENTIONS = ("auto", "sdpa", "eager", "flash_attention_2")
# What changes when the model is picked by the GPU's memory, on GSM8K.
GPU_DEFAULTS = {"max_new_tokens": 512, "steps": 200, "learning_rate": 2e-5}
STEPS = 20  # of the command line, where neither steps nor passes are said


@takes_aliases
@dataclass(frozen=True)
class GRPOConfig:
    """One training run. A step is one round of sample → score → compare → learn."""

    model: str | None = flag(None, "hub id, directory, or smollm2-135m (default: by the machine)")
    dataset: str | None = flag(None, "elementary, gsm8k, word-problems[:LEVELS], FILE.jsonl, A+B")
    columns: str | None = flag(
        None, "columns of a file or hub data set: question=NAME,answer=NAME,solution=NAME"
    )
    split: str | None = flag(None, "its rows to train on, as in train[:500] (none: train)")
    max_samples: int | None = flag(None, "training problems, of each in A+B (none: all)", min=1)
    max_prompt_length: int | None = flag(
        None, "leave out problems with longer prompts, in tokens", min=1
    )
    sft_adapter: Path | None = flag(DEFAULT_SFT_ADAPTER, "adapter to start from, or none")
    reasoning_format: str | None = flag(
        None, "tags (none: the start adapter's, else deepseek)", choices=tuple(FORMATS)
    )
    system_prompt: str | None = flag(
        None, "text or file (none: the start adapter's, else it asks for the tags)"
    )
    tool: str = flag(
        "none",
        "writes into completions: calculator, FILE.py:NAME, none (not given: the start adapter's)",
    )
    reward: str | None = flag(None, "steps, or FILE.py:NAME (none: strict correctness, 0 or 1)")
    reward_timeout: float = flag(60.0, "seconds that one call of a reward may take", above=0)
    quantize: str = flag(
        "none",
        "quantize the base (bitsandbytes) (auto: 4bit on a CUDA GPU)",
        choices=("auto", *QUANTIZATIONS),
    )
    use_4bit: bool = flag(False, "the same as --quantize 4bit", same_as=("quantize", "4bit"))
    use_8bit: bool = flag(False, "the same as --quantize 8bit", same_as=("quantize", "8bit"))
    attn_implementation: str = flag(
        "auto", "attention of the learning pass", choices=ATTENTIONS, old=["attn"]
    )
    dtype: str = flag("auto", "number type of learning (auto: measured)", choices=("auto", *DTYPES))
    sampler_dtype: str = flag(
        "auto", "of the sampler's merged copy (auto: measured)", choices=("auto", *DTYPES)
    )
    doctor: bool = flag(False, "train nothing: say what is wrong with this set-up")
    plan: bool = flag(False, "train nothing: say how much memory and time", aliases=["dry_run"])

    algorithm: str = flag("grpo", "sets what is none below; see the end", choices=tuple(ALGORITHMS))
    use_std_normalization: bool | None = flag(None, "divide advantages by the group's std")
    token_level_loss: bool | None = flag(None, "mean over all tokens of the step")
    fixed_length_normalizer: int | None = flag(None, "sum over tokens / (rollouts x this)", min=1)
    clip_eps: float | None = flag(
        None, "sets those of the next two that are not given", min=0, max=1
    )
    clip_eps_low: float | None = flag(
        None, "the ratio is clipped to at least 1 - this (1: to no bound)", min=0, max=1
    )
    clip_eps_high: float | None = flag(None, "and at most 1 + this", min=0)
    dynamic_sampling: bool | None = flag(None, "replace groups without a difference")
    max_refill_rounds: int = flag(3, "times a step may sample replacements", min=0)
    overlong_buffer: int | None = flag(
        None, "last tokens over which the reward falls (0: none)", min=0
    )
    overlong_penalty: float = flag(-1.0, "its depth, at max_new_tokens and if truncated", max=0)
    mask_truncated: bool = flag(False, "leave completions without an end token out of the loss")
    kl_weight: float = flag(0.0, "pull toward the start adapter; 0 costs nothing", min=0)
    kl_estimator: str = flag("k3", "how KL is estimated", choices=KL_ESTIMATORS)
    kl_target: float | None = flag(
        None, "KL per token to which the weight is adapted (none: no)", above=0
    )

    steps: int | None = flag(
        None,
        f"rounds of sampling and learning (none: {STEPS}; {GPU_DEFAULTS['steps']} on a GPU that "
        "picks the model; in Python one pass)",
        min=1,
    )
    num_epochs: float | None = flag(None, "instead of --steps: passes over the problems", above=0)
    batch_size: int = flag(20, "problems in a step", min=1)
    group_size: int = flag(8, "completions of each problem, compared with each other", min=2)
    max_new_tokens: int = flag(96, "longest completion", min=1)
    temperature: float = flag(1.0, "of sampling and scoring alike", above=0)
    top_p: float = flag(1.0, "1: another value would not be the distribution that is scored")
    top_k: int = flag(0, "0: off, for the same reason")
    max_num_seqs: int = flag(128, "completions decoded at the same time", old=["seats"], min=1)
    sampler: str = flag("auto", "which weights draw (auto: by memory)", choices=SAMPLER_NAMES)
    sampler_url: str | None = flag(
        None, "for --sampler vllm: of a running server, or several: A,B (none: starts one)"
    )
    vllm_command: str = flag("vllm serve", "program that it starts, with more of its options")

    learning_rate: float = flag(1e-4, "peak; LoRA wants about ten times full fine-tuning's", min=0)
    lr_schedule: str = flag("linear", "after warm-up", choices=("constant", "linear", "cosine"))
    min_lr_ratio: float = flag(
        0.1, "where linear and cosine end, as a share of the peak", min=0, max=1
    )
    warmup_steps: int = flag(1, "steps in which the rate rises", min=0)
    weight_decay: float = flag(0.0, "AdamW's", min=0)
    max_grad_norm: float = flag(1.0, "gradients are scaled down to this norm", above=0)
    updates_per_batch: int = flag(1, "optimizer updates on the rollouts of a step", min=1)
    train_batch_size: int | None = flag(
        None, "completions in a micro-batch (none: by tokens)", min=1
    )
    train_batch_tokens: int | None = flag(
        None, "padded tokens in a micro-batch (none: by memory)", min=1
    )
    checkpointing: bool | None = flag(
        None, "compute activations twice rather than keep them (none: where they would not fit)"
    )
    use_lora: bool = flag(True, "train an adapter; the base is never written", aliases=["lora"])
    lora_r: int = flag(16, "rank of a new adapter", min=1)
    lora_alpha: int = flag(32, "scale times rank, of a new adapter", min=1)
    lora_dropout: float = flag(0.0, "0: dropped units would not be the policy that sampled")

    eval_every: int = flag(10, "steps between greedy evaluations (0: only first and last)", min=0)
    eval_samples: int = flag(100, "validation problems, always the same (0: none)", min=0)
    save_every: int = flag(10, "steps between checkpoints (0: only at the end)", min=0)
    keep_checkpoints: int = flag(2, "newest checkpoints kept", min=1)
    sample_every: int = flag(5, "steps between printed samples (0: none)", min=0)
    max_minutes: float | None = flag(
        None, "stop at the step after this many minutes, and export", above=0
    )
    resume: bool = flag(False, "continue the run in --run-dir from its newest checkpoint")
    accept_changes: bool = flag(False, "with --resume: go on though options or data are others")
    tracker: str = flag("none", "show the run there too", choices=TRACKER_NAMES)
    use_wandb: bool = flag(False, "the same as --tracker wandb", same_as=("tracker", "wandb"))
    wandb_project: str | None = flag(
        None, f"project at the tracker (none: WANDB_PROJECT, else {PROJECT})"
    )
    seed: int = flag(0, "of problems and sampling")
    run_dir: Path = flag(Path("runs/grpo"), "metrics, samples and checkpoints")
    output: Path = flag(Path("weights/final_rlm_lora"), "where the best adapter goes")

    def __post_init__(self) -> None:
        check_values(self)
        check_project(self.wandb_project, self.tracker)
        self._set_clip_bounds()
        self._follow_algorithm()
        self._check_contradictions()

    @classmethod
    def from_preset(cls, name: str, **options: object) -> GRPOConfig:
        """Build a config from a preset's values, and over them `options`.

        Raises:
            ValueError: there is no such preset; the message names those that are.
        """
        preset = PRESETS.get(find_choice(name, list(PRESETS)))
        if preset is None:
            raise ValueError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
        return cls(**preset | merge_switches(cls, by_field(cls, options)))

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Add what the adapter to start from and the machine decide: `resolve_config` calls it.

        Raises:
            UsageError: the adapter to start from is not there. The default one is required only if
                no model is named: then training goes on where SFT ended.
        """
        from rlm.model import TEACH, AdapterInfo, check_adapter, default_values, misfit

        adapter, model = given.get("sft_adapter", DEFAULT_SFT_ADAPTER), given.get("model")
        is_default, start = adapter == DEFAULT_SFT_ADAPTER, None
        if adapter is not None and not (is_default and model and not adapter.exists()):
            start = AdapterInfo.load(check_adapter(adapter, TEACH))
            is_renamed = model not in (None, start.base_model)
            if is_default and is_renamed and misfit(adapter, model):  # `resolve_start`
                start = None  # says why
        values = default_values(given, start, GPU_DEFAULTS)
        if start is not None:
            values["tool"] = start.resolve_tool(given.get("tool", "auto"))
            values |= start.resolve_data(values.get("dataset"), values.get("columns"))
        asked = given.get("system_prompt")
        values["system_prompt"] = (start or AdapterInfo(Path())).resolve_system_prompt(asked)
        if values.get("num_epochs"):
            return values | {"steps": given.get("steps")}
        return values | {"steps": values.get("steps") or STEPS}

    @property
    def aggregation(self) -> str:
        """Name how the loss sums tokens, as `batches.row_weights` takes it."""
        if self.token_level_loss:
            return "token"
        return "constant" if self.fixed_length_normalizer else "sequence"

    @property
    def choices(self) -> Algorithm:
        """Return the algorithm as it is with these options."""
        return replace(
            ALGORITHMS[self.algorithm],
            scale_by_std=self.use_std_normalization,
            aggregation=self.aggregation,
            clip_eps_low=self.clip_eps_low,
            clip_eps_high=self.clip_eps_high,
            dynamic_sampling=self.dynamic_sampling,
            overlong_share=self.overlong_buffer / self.max_new_tokens,
        )

    @property
    def formula(self) -> str:
        """Write in a line what is minimised with these options."""
        constant = self.fixed_length_normalizer
        return self.choices.formula(str(constant) if constant else "max_new_tokens")

    @property
    def sampling_rounds(self) -> int:
        """Return how often a step may sample."""
        return 1 + self.max_refill_rounds if self.dynamic_sampling else 1

    def steps_for(self, problem_count: int) -> int:
        """Return the number of steps: as given, else what the passes (one by default) take."""
        passes = self.num_epochs or 1
        return self.steps or math.ceil(passes * problem_count / self.batch_size)

    def _set_clip_bounds(self) -> None:
        """Spread --clip-eps, and forget it: a `replace` of it later is refused, not ignored."""
        bounds = [n for n in ("clip_eps_low", "clip_eps_high") if getattr(self, n) is None]
        if self.clip_eps is not None and not bounds:
            raise ValueError(
                "--clip-eps sets --clip-eps-low and --clip-eps-high where they are not given, and "
                "both are; leave it out"
            )
        for name in bounds:
            object.__setattr__(self, name, self.clip_eps)
        object.__setattr__(self, "clip_eps", None)

    def _follow_algorithm(self) -> None:
        """Set what the algorithm decides and no option does."""
        algorithm = ALGORITHMS[self.algorithm]
        token_level = self.fixed_length_normalizer is None and algorithm.aggregation == "token"
        by_constant = not self.token_level_loss and algorithm.aggregation == "constant"
        values = {
            "use_std_normalization": algorithm.scale_by_std,
            "token_level_loss": token_level,
            "fixed_length_normalizer": self.max_new_tokens if by_constant else None,
            "clip_eps_low": algorithm.clip_eps_low,
            "clip_eps_high": algorithm.clip_eps_high,
            "dynamic_sampling": algorithm.dynamic_sampling,
            "overlong_buffer": int(algorithm.overlong_share * self.max_new_tokens),
        }
        for name, value in values.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _check_contradictions(self) -> None:
        cuts_short = self.top_p != 1 or self.top_k != 0
        looks, by_vllm = self.doctor or self.plan, self.sampler == "vllm"
        two_denominators = self.token_level_loss and self.fixed_length_normalizer
        overwrites = self.output.resolve() == (self.sft_adapter or Path()).resolve()
        refused = {
            "--steps and --num-epochs contradict each other; give one of them": (
                self.steps is not None and self.num_epochs is not None
            ),
            "--kl-target needs a --kl-weight to begin with": self.kl_target and not self.kl_weight,
            "--top-p must be 1 and --top-k 0 in training: tokens would be drawn from a "
            "distribution cut short, and scored under the whole one": cuts_short,
            "--lora-dropout must be 0 in training: the policy that is updated would not be the "
            "one that sampled, and no ratio would begin at 1": self.lora_dropout != 0,
            "--no-use-lora: the base is never written, an adapter is trained": not self.use_lora,
            "--token-level-loss divides by the step's tokens, --fixed-length-normalizer by a "
            "constant; give one of them": two_denominators,
            f"--overlong-buffer {self.overlong_buffer} is longer than --max-new-tokens "
            f"{self.max_new_tokens}: every completion would be punished": (
                self.overlong_buffer > self.max_new_tokens
            ),
            "--sampler-url needs --sampler vllm": self.sampler_url is not None and not by_vllm,
            "--vllm-command is for --sampler vllm without --sampler-url": (
                self.vllm_command != "vllm serve" and (not by_vllm or self.sampler_url is not None)
            ),
            "--tool writes into a completion while it is generated, which a vLLM server does not "
            "offer; leave out --sampler vllm": self.tool != "none" and self.sampler == "vllm",
            "--attn-implementation flash_attention_2: completions share their prompt through a "
            "mask that it does not take; sdpa does (train_sft.py has no such mask)": (
                self.attn_implementation == "flash_attention_2"
            ),
            "--doctor and --plan look at a start; leave out --resume": looks and self.resume,
            "--doctor and --plan are two commands; give one of them": self.doctor and self.plan,
            "--plan times our own sampler; leave out --sampler vllm": self.plan and by_vllm,
            "--output would overwrite --sft-adapter; name another directory": overwrites,
        }
        for reason, is_so in refused.items():
            if is_so:
                raise ValueError(reason)

    def learning_rate_at(self, step: int) -> float:
        """Return the rate: linear warm-up, then constant or down to min_lr_ratio of the peak."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        height = {"constant": 1, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        share = self.min_lr_ratio + (1 - self.min_lr_ratio) * height[self.lr_schedule]
        return self.learning_rate * share
