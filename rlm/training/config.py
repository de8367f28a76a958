"""The options of GRPO training, which `train_grpo.py --help` lists and `GRPOTrainer` takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from rlm.cli import (
    Flag,
    UsageError,
    by_field,
    check_values,
    find_choice,
    flag,
    required,
    takes_aliases,
)
from rlm.data import FORMATS
from rlm.model import HOW_TO_TRAIN_SFT, QUANTIZATIONS, AdapterInfo, check_adapter
from rlm.ops import DTYPES
from rlm.runs import TRACKER_NAMES
from rlm.training.algorithms import AGGREGATIONS, ALGORITHMS, PRESETS, Algorithm
from rlm.training.resolve import (
    LARGE,
    LONGEST,
    MAX_NEW_TOKENS,
    check_output_place,
    check_start,
    choose_max_new_tokens,
    resolve,
)

VLLM_COMMAND = "vllm serve"
# Options that are not available with --backend tinker, because its server decides their values.
ON_SERVER = ("quantize", "dtype", "sampler", "max_num_seqs", "train_batch_size")
DEFAULT_SFT_ADAPTER = Path("weights/sft_lora")  # used if it fits the base model
# Defaults for a large model; that of --steps applies only on a GPU (see `defaults_by_size`).
GPU_DEFAULTS = {"steps": 200, "learning_rate": 2e-5}
STEPS = 20  # default number of steps on the command line
REFILL_ROUNDS = 3  # maximum number of rounds in which a step replaces groups with equal rewards
LAST_RATE = 0.1  # final learning rate of a schedule, as a share of the peak
LORA_RATES = 1e-5, 2e-3  # a lower rate hardly changes an adapter, a higher rate breaks it
# Without WARM warmup steps, a learning rate above COLD_RATE broke two of three runs
# (docs/how-to/training-guide.md).
COLD_RATE, WARM = 5e-4, 5
USUAL_RATES = "--learning-rate 1e-5 to 3e-4: about ten times that of full fine-tuning"
ALGORITHMS_OWN = "set by --algorithm"
# Options that replace the algorithm's values of the same names.
SETTINGS = ("advantage", "aggregation", "clip_eps_low", "clip_eps_high", "dynamic_sampling")


def algorithm_defaults(name: str, batch_size: int, max_new_tokens: int) -> dict[str, Any]:
    """Return the defaults of the options that depend on the algorithm."""
    algorithm = ALGORITHMS[name]
    size = algorithm.mini_batch_size
    return {
        **{s: getattr(algorithm, s) for s in (*SETTINGS, "learning_rate", "warmup_steps")},
        "mini_batch_size": size and min(size, batch_size),
        "overlong_buffer": int(algorithm.overlong_share * max_new_tokens),
    }


def switch(field: str, on: str) -> Flag:
    """Make an alias of an option: a boolean flag that sets `field` to `on` or "none"."""
    return Flag(kind=bool, becomes=lambda is_on: {field: on if is_on else "none"}, default=False)


def always(reason: str) -> Flag:
    """Make a boolean flag for a feature that is always on; False raises a ValueError."""

    def becomes(wanted: bool) -> dict[str, Any]:
        if not wanted:
            raise ValueError(reason)
        return {}

    return Flag(kind=bool, becomes=becomes, default=True)


# Flags of other programs' command lines (docs/reference/names.md), mapped to our config fields.
SWITCHES = {
    "use_4bit": switch("quantize", "4bit"),
    "use_wandb": switch("tracker", "wandb"),
}


@takes_aliases
@dataclass(frozen=True)
class GRPOConfig:
    """The options of a training run. A step is one round of sampling, scoring and updates."""

    CHANGED_FIRST = (
        *("model", "dataset", "sft_adapter", "reward", "output"),
        *("steps", "batch_size", "group_size", "max_new_tokens", "learning_rate"),
    )

    # Stands in for the default that depends on the machine until torch is imported.
    PROVISIONAL: ClassVar = {"max_new_tokens": LONGEST}

    OTHER_SPELLINGS: ClassVar = {
        **SWITCHES,
        "clip_eps": Flag(
            kind=float, becomes=lambda x: {"clip_eps_low": x, "clip_eps_high": x}, min=0, max=1
        ),
        "use_lora": always(
            "--no-use-lora is not supported: only LoRA adapters are trained, never the base model"
        ),
        "use_flash_attention": always(
            "--no-use-flash-attention is not supported: the fastest attention is always used"
        ),
    }

    model: str | None = flag(
        None,
        "base model: hub id, folder, or smollm2-135m",
        default_text="base model of --sft-adapter, else one that fits this machine",
    )
    dataset: str | None = flag(
        None,
        "training problems: gsm8k, word-problems, elementary, FILE.jsonl, or several as A+B",
        default_text="dataset of --sft-adapter, else one that fits the model",
    )
    columns: str | None = flag(
        None,
        "columns of a file or hub dataset, e.g. question=NAME,answer=NAME,solution=NAME",
        default_text="columns of --sft-adapter, else question, answer, solution",
    )
    split: str | None = flag(
        None, "split of a file or hub dataset, e.g. train[:500]", default_text="train"
    )
    max_samples: int | None = flag(
        None, "train on at most this many problems of each dataset", min=1, default_text="all"
    )
    sft_adapter: Path | None = flag(
        DEFAULT_SFT_ADAPTER, "adapter to start from; none: start from a new adapter"
    )
    reasoning_format: str | None = flag(
        None,
        "tags around the reasoning and the answer",
        choices=tuple(FORMATS),
        default_text="tags of --sft-adapter, else deepseek",
    )
    system_prompt: str | None = flag(
        None,
        "system prompt, as a text or a file",
        default_text="system prompt of --sft-adapter, else one that describes the tags",
    )
    tool: str = flag(
        "none",
        "tool that writes into completions: calculator, FILE.py:NAME, or none",
        default_text="tool of --sft-adapter",
    )
    reward: str | None = flag(
        None,
        "reward function: steps, or your own function as FILE.py:NAME",
        default_text="1 for a right answer in the right format, else 0",
    )
    quantize: str = flag(
        "none",
        "load the base model quantized with bitsandbytes; auto: 4bit on a CUDA GPU",
        choices=("auto", *QUANTIZATIONS),
    )
    dtype: str = flag(
        "auto",
        "dtype of the model; auto: the fastest dtype for training and the fastest for sampling",
        choices=("auto", *DTYPES),
    )
    doctor: bool = flag(
        False, "check the setup and explain why the reward does not rise, without training"
    )
    plan: bool = flag(False, "estimate memory and time, without training", aliases=["dry_run"])

    algorithm: str = flag(
        "topr",
        "algorithm that defines the loss; the formulas are at the end of --help",
        choices=tuple(ALGORITHMS),
    )
    advantage: str = flag(
        None,
        "divisor of reward - mean: the group's std, nothing, the mean, or 1/group_size of the sum "
        "of |reward - mean| over the rewards on the same side of the mean",
        choices=("std", "centred", "mean", "share"),
        default_text=ALGORITHMS_OWN,
    )
    aggregation: str = flag(
        None,
        "how the token losses are averaged: per completion and then over the completions, over all "
        "tokens, or as the sum divided by completions x --max-new-tokens",
        choices=AGGREGATIONS,
        default_text=ALGORITHMS_OWN,
    )
    clip_eps_low: float = flag(
        None,
        "lower bound of the ratio is 1 - this value; 1: no lower bound",
        min=0,
        max=1,
        default_text=ALGORITHMS_OWN,
    )
    clip_eps_high: float = flag(
        None, "upper bound of the ratio is 1 + this value", min=0, default_text=ALGORITHMS_OWN
    )
    dynamic_sampling: bool = flag(
        None,
        "replace groups whose rewards are all equal, "
        f"in up to {REFILL_ROUNDS} more sampling rounds",
        default_text=ALGORITHMS_OWN,
    )
    overlong_buffer: int = flag(
        None,
        "number of tokens before --max-new-tokens over which a length penalty rises to 1; 0: off",
        min=0,
        default_text=ALGORITHMS_OWN,
    )
    mask_truncated: bool = flag(False, "exclude truncated completions from the loss")
    kl_weight: float = flag(
        0.0,
        "coefficient of the KL penalty (TRL's beta); the reference model is the policy before "
        "training; 0: off",
        min=0,
    )

    steps: int | None = flag(
        None,
        "number of training steps",
        min=1,
        default_text=f"{STEPS}, or {GPU_DEFAULTS['steps']} on a GPU {LARGE}",
    )
    batch_size: int = flag(20, "problems per step", min=1)
    group_size: int = flag(8, "completions per problem", min=2)
    max_new_tokens: int = flag(
        None, "maximum completion length in tokens", min=1, default_text=MAX_NEW_TOKENS
    )
    temperature: float = flag(
        1.0, "sampling temperature, which is also used for the log-probabilities", above=0
    )
    max_num_seqs: int = flag(128, "maximum number of completions generated at the same time", min=1)
    sampler: str = flag(
        "auto",
        "sample with merged weights, with base model and adapter separately, or with vLLM; auto: "
        "merged if possible",
        choices=("auto", "merged", "unmerged", "vllm"),
    )
    server: str | None = flag(
        None,
        "URL of the server for --sampler vllm or --backend tinker; for vllm also several URLs as "
        "A,B, or the command that starts a server",
        default_text=f"{VLLM_COMMAND}; for tinker, Thinking Machines' service",
    )

    backend: str = flag(
        "local",
        "where to sample and train: on this machine, or on a server that implements Tinker's "
        "protocol",
        choices=("local", "tinker"),
    )

    mini_batch_size: int | None = flag(
        None,
        "problems per optimizer update",
        min=1,
        default_text=f"{ALGORITHMS_OWN}, else all problems of the step",
    )
    learning_rate: float = flag(
        None,
        "peak learning rate; for LoRA about ten times that of full fine-tuning",
        min=0,
        default_text=f"{ALGORITHMS_OWN}, or {GPU_DEFAULTS['learning_rate']:g} {LARGE}",
    )
    lr_schedule: str = flag(
        "linear",
        "learning rate schedule after the warmup; linear and cosine end at a tenth of the peak",
        choices=("constant", "linear", "cosine"),
    )
    warmup_steps: int = flag(
        None,
        "warmup: number of optimizer updates in which the learning rate rises to its peak",
        min=0,
        default_text=ALGORITHMS_OWN,
    )
    max_grad_norm: float = flag(1.0, "maximum gradient norm; larger gradients are clipped", above=0)
    updates_per_batch: int = flag(1, "training passes over the completions of each step", min=1)
    train_batch_size: int | None = flag(
        None, "maximum completions per micro-batch", min=1, default_text="as many as fit in memory"
    )
    lora_r: int = flag(16, "LoRA rank of a new adapter", min=1)
    lora_alpha: float = flag(32, "LoRA alpha of a new adapter (scale = alpha / rank)", min=1)

    eval_every: int = flag(
        5,
        "steps between validations; 0: only at the start and the end",
        min=0,
    )
    eval_samples: int = flag(
        100, "number of validation problems, the same at each validation; 0: none", min=0
    )
    save_every: int = flag(
        10,
        "steps between checkpoints, in addition to one before step 1 and one at the end (0: only "
        "these); the last two are kept",
        min=0,
    )
    max_minutes: float | None = flag(
        None,
        "stop after this many minutes, and export the adapter",
        above=0,
        default_text="no limit",
    )
    resume: bool = flag(False, "continue the run in --run-dir from its newest checkpoint")
    tracker: str = flag("none", "also log the metrics to this tracker", choices=TRACKER_NAMES)
    seed: int = flag(0, "random seed for a new adapter, problem order and sampling")
    run_dir: Path = flag(Path("runs/grpo"), "folder for metrics, completions and checkpoints")
    output: Path = flag(
        Path("weights/final_rlm_lora"),
        "folder for the exported adapter: that of the last step, or the best on validation if it "
        "is significantly better",
    )

    def __post_init__(self) -> None:
        check_values(self)
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        """Raise a ValueError that says what to change if two options contradict each other."""
        looks, by_vllm = self.doctor or self.plan, self.sampler == "vllm"
        refused = {
            f"--overlong-buffer {self.overlong_buffer} is longer than --max-new-tokens "
            f"{self.max_new_tokens}: every completion would be penalized": (
                self.overlong_buffer > self.max_new_tokens
            ),
            f"--mini-batch-size {self.mini_batch_size} is more than --batch-size "
            f"{self.batch_size}": (self.mini_batch_size or 0) > self.batch_size,
            "--server needs --sampler vllm or --backend tinker": (
                self.server is not None and not by_vllm and self.backend != "tinker"
            ),
            "--tool does not work with --sampler vllm: vLLM cannot insert text while it samples": (
                self.tool != "none" and by_vllm
            ),
            "--doctor and --plan inspect a run's start; leave out --resume": looks and self.resume,
            "--doctor and --plan exclude each other; give only one of them": (
                self.doctor and self.plan
            ),
            "--plan times our own sampler; leave out --sampler vllm": self.plan and by_vllm,
        }
        refused |= self._refused_by_backend()
        for reason, is_so in refused.items():
            if is_so:
                raise ValueError(reason)
        if not looks:  # --plan and --doctor write nothing
            option, start = "--sft-adapter", self.sft_adapter
            check_output_place(self.output, self.run_dir, start, option, resume=self.resume)

    def _refused_by_backend(self) -> dict[str, bool]:
        """Map each error message for --backend tinker to whether the error applies."""
        if self.backend != "tinker":
            return {}
        usual = {option.name: option.default for option in fields(self)}
        theirs = [name for name in ON_SERVER if getattr(self, name) != usual[name]]
        options = ", ".join(f"--{name.replace('_', '-')}" for name in theirs)
        return {
            f"{options}: not available with --backend tinker, whose server decides this; leave it "
            "out": bool(theirs),
            f"--sft-adapter {self.sft_adapter} cannot be sent to the server of --backend tinker: "
            "merge it (inference.py --merge FOLDER), and serve that folder": (
                self.sft_adapter not in (None, DEFAULT_SFT_ADAPTER)
            ),
            "--kl-weight must be 0 with --backend tinker, whose server has no reference model; a "
            "lower --learning-rate keeps the policy near its start": self.kl_weight > 0,
            "--temperature must be 1 with --backend tinker: its server computes log-probabilities "
            "only at temperature 1": self.temperature != 1,
            "--lora-alpha must be 32 with --backend tinker, whose servers use this value; change "
            "--learning-rate instead": self.lora_alpha != 32,
            "--tool does not work with --backend tinker: its server cannot insert text while it "
            "samples": self.tool != "none",
            "--plan times this machine; leave out --backend tinker": self.plan,
            f"--server {self.server} is not a URL: --backend tinker needs a running server": (
                self.server is not None and not self.server_urls
            ),
        }

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values, and fill in the defaults that depend on the data or the algorithm."""
        length = values["max_new_tokens"]
        if length is None:
            length = choose_max_new_tokens(values["dataset"])
        made = {**values, "max_new_tokens": length}
        if made["algorithm"] not in ALGORITHMS:  # `check_values` raises
            return made
        decided = algorithm_defaults(made["algorithm"], made["batch_size"], length)
        return made | {name: value for name, value in decided.items() if made[name] is None}

    @classmethod
    def without_replaced(
        cls, stored: Mapping[str, Any], chosen: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the values of a config.json without the defaults of an algorithm that is replaced.

        The config.json of a run contains all values. With another --algorithm, these defaults would
        remain, so that "grpo" would not be GRPO. A file that a user has written contains fewer
        values, and all of them apply.
        """
        old = stored.get("algorithm")
        if old not in ALGORITHMS or chosen.get("algorithm", old) == old:
            return dict(stored)
        usual = {**{option.name: option.default for option in fields(cls)}, **stored}
        decided = algorithm_defaults(old, usual["batch_size"], usual["max_new_tokens"] or 0)
        if not decided.keys() <= stored.keys():
            return dict(stored)
        return {k: v for k, v in stored.items() if k not in decided or v != decided[k]}

    @classmethod
    def from_preset(cls, name: str, **options: Any) -> GRPOConfig:
        """Build a config from a preset; `options` override its values.

        Raises:
            ValueError: the preset does not exist; the message lists the existing presets.
        """
        preset: Mapping[str, Any] | None = PRESETS.get(find_choice(name, list(PRESETS)))
        if preset is None:
            raise ValueError(f"unknown preset {name!r}; the presets are {', '.join(PRESETS)}")
        return cls(**{**preset, **by_field(cls, options)})

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in unset options from the initial adapter, the data and the machine.

        `resolve_config` calls this method.

        Raises:
            UsageError: --backend tinker lacks --model; or the initial adapter does not exist, or
                contradicts --lora-r or --lora-alpha. The default adapter must exist only if neither
                --model nor --plan is given, because training then continues from the result of SFT.
        """
        if given.get("backend") == "tinker":
            given = {"sft_adapter": None, **given}
            if not given.get("model"):
                raise UsageError(
                    "--backend tinker needs --model: the base model that its server serves"
                )
        adapter, model = given.get("sft_adapter", DEFAULT_SFT_ADAPTER), given.get("model")
        start = start_info(adapter, model, may_lack=bool(model or given.get("plan")))
        values = resolve(given, start, GPU_DEFAULTS)
        return values | {"steps": values.get("steps") or STEPS}

    def check_files(self) -> None:
        """Check the adapter, the data, the reward and the tool before torch is imported."""
        from rlm.rewards import load_reward

        may_lack = bool(self.model or self.plan or self.backend != "local")
        start = start_info(self.sft_adapter, self.model, may_lack)
        problems = check_start(start, self.dataset, self.columns, self.split, self.tool)
        load_reward(self.reward, problems)

    @property
    def server_urls(self) -> list[str]:
        """Return the URLs in --server; the list is empty if --server is a command or unset."""
        is_url = (self.server or "").startswith(("http://", "https://"))
        return [url.strip() for url in (self.server or "").split(",")] if is_url else []

    @property
    def vllm_command(self) -> str:
        """Return the command that starts vLLM, which is needed if `server_urls` is empty."""
        return self.server or VLLM_COMMAND

    @property
    def resolved_algorithm(self) -> Algorithm:
        """Return the algorithm's entry in ALGORITHMS, with the options of this config applied."""
        chosen: dict[str, Any] = {name: getattr(self, name) for name in SETTINGS}
        share = self.overlong_buffer / self.max_new_tokens
        return replace(ALGORITHMS[self.algorithm], **chosen, overlong_share=share)

    @property
    def formula(self) -> str:
        """Format the minimized objective as one line."""
        return self.resolved_algorithm.formula(str(self.max_new_tokens))

    @property
    def sampling_rounds(self) -> int:
        """Return the maximum number of sampling rounds in a step."""
        return 1 + REFILL_ROUNDS if self.dynamic_sampling else 1

    def steps_for(self, problem_count: int) -> int:
        """Return `steps`, or if it is unset, the number of steps in one pass over the problems."""
        return self.steps or math.ceil(problem_count / self.batch_size)

    def eval_group_size_for(self, problem_count: int) -> int:
        """Return the number of completions to sample for each validation problem, from 2 to 16.

        An additional problem is more informative than an additional completion of the same problem.
        Therefore completions are added only until a validation costs about as much as the sampling
        of a training step.
        """
        filling = round(self.batch_size * self.group_size / max(1, problem_count))
        return min(16, max(2, filling))

    def learning_rate_at(self, step: float, updates: int) -> float:
        """Return the learning rate of an update.

        The learning rate rises linearly during the warmup. Then it is constant, or decays to
        LAST_RATE times the peak.

        Args:
            step: the number of the step, plus the share of the step's updates already made.
            updates: the number of updates already made in the run, for the warmup.
        """
        if updates < self.warmup_steps:
            return self.learning_rate * (updates + 1) / self.warmup_steps
        a_step = math.ceil(self.batch_size / (self.mini_batch_size or self.batch_size))
        warmup = self.warmup_steps / (a_step * self.updates_per_batch)  # in steps
        steps = required(self.steps, "--steps")
        done = max(0.0, step - warmup) / max(1, steps - warmup)
        height = {"constant": 1, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        share = LAST_RATE + (1 - LAST_RATE) * height[self.lr_schedule]
        return self.learning_rate * share


def start_info(
    adapter: Path | None, model: str | None = None, may_lack: bool = False
) -> AdapterInfo | None:
    """Load the metadata of the initial adapter.

    Args:
        model: the base model that the user has named.
        may_lack: whether the default adapter may be missing, because --model names a model or
            because no weights are trained here.

    Returns:
        The metadata, or None if training starts from a new adapter, for example because the default
        adapter belongs to another model; `resolve_start` prints the reason.
    """
    is_default = adapter == DEFAULT_SFT_ADAPTER
    if adapter is None or (is_default and may_lack and not adapter.exists()):
        return None
    start = AdapterInfo.load(check_adapter(adapter, HOW_TO_TRAIN_SFT))
    if is_default and model not in (None, start.base_model):
        from rlm.model import adapter_mismatch  # imports torch

        return None if adapter_mismatch(adapter, model) else start
    return start


def judge_learning_rate(rate: float, warmup_steps: int) -> tuple[str, str] | None:
    """Judge a learning rate for GRPO with LoRA.

    Returns:
        "too low" or "too high", and the reason; None if the learning rate is in the range that is
        known to work.
    """
    slow, fast = LORA_RATES
    if rate < slow:
        return "too low", f"{rate:g} hardly moves a LoRA adapter"
    if rate > fast:
        return "too high", f"{rate:g} breaks a policy within a few steps"
    if rate > COLD_RATE and warmup_steps < WARM:
        return "too high", f"{rate:g} may break a policy without --warmup-steps {WARM}"
    return None
