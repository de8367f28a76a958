"""The options of supervised fine-tuning, which `train_sft.py --help` lists."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlm.cli import check_values, flag, takes_aliases
from rlm.data import FORMATS, OwnFile, own_files, parse_dataset
from rlm.model import QUANTIZATIONS
from rlm.ops import DTYPES
from rlm.runs import TRACKER_NAMES
from rlm.training.config import SWITCHES, start_info
from rlm.training.resolve import LARGE, check_output_place, check_start, resolve

MAX_SAMPLES = 400  # default, except for the user's own data files
# Number of steps that suffice for a small dataset. With 11 examples, a model learned nothing in one
# step, but it learned a text task in twenty steps.
ENOUGH_STEPS = 20
# Defaults for a large model; all but the learning rate apply only on a GPU (`defaults_by_size`).
GPU_DEFAULTS = {"max_samples": 2000, "learning_rate": 2e-4, "micro_batch": 4}


@takes_aliases
@dataclass(frozen=True)
class SFTConfig:
    CHANGED_FIRST = (
        *("model", "dataset", "max_samples", "output", "adapter"),
        *("epochs", "batch_size", "micro_batch", "learning_rate", "max_length"),
    )

    OTHER_SPELLINGS: ClassVar = SWITCHES

    model: str | None = flag(
        None,
        "base model: hub id, folder, or smollm2-135m",
        default_text="base model of --adapter, else one that fits this machine",
    )
    dataset: str | None = flag(
        None,
        "training examples: gsm8k, openmathinstruct, word-problems, elementary, FILE.jsonl, "
        "or several as A+B",
        default_text="dataset of --adapter, else one that fits the model",
    )
    columns: str | None = flag(
        None,
        "columns of a file or hub dataset, e.g. question=NAME,answer=NAME,solution=NAME",
        default_text="columns of --adapter, else question, answer, solution",
    )
    split: str | None = flag(
        None, "split of a file or hub dataset, e.g. train[:500]", default_text="train"
    )
    max_samples: int | None = flag(
        MAX_SAMPLES,
        "train on at most this many examples of each dataset; none: all",
        min=1,
        default_text=f"{MAX_SAMPLES}, or {GPU_DEFAULTS['max_samples']} on a GPU {LARGE}; all, if "
        "every dataset is a file of yours",
    )
    keep_code: bool = flag(False, "OpenMathInstruct: keep solutions that contain code blocks")
    reasoning_format: str | None = flag(
        None,
        "tags around the reasoning and the answer",
        choices=tuple(FORMATS),
        default_text="tags of --adapter, else deepseek",
    )
    system_prompt: str | None = flag(
        None,
        "system prompt, as a text or a file",
        default_text="system prompt of --adapter, else one that describes the tags",
    )
    tool: str = flag(
        "none",
        "tool that the model learns to use: calculator, FILE.py:NAME, or none",
        default_text="tool of --adapter",
    )
    max_length: int = flag(1024, "maximum length in tokens; longer examples are left out", min=1)
    epochs: int | None = flag(
        None,
        "number of passes over the examples",
        min=1,
        default_text=f"1; for your own file, as many as needed for {ENOUGH_STEPS} steps",
    )
    batch_size: int = flag(16, "examples per optimizer step", min=1)
    micro_batch: int = flag(
        8,
        "examples per forward pass",
        min=1,
        default_text=f"8, or {GPU_DEFAULTS['micro_batch']} on a GPU {LARGE}",
    )
    learning_rate: float = flag(
        1e-3,
        "peak learning rate; for LoRA about ten times that of full fine-tuning",
        above=0,
        default_text=f"0.001, or {GPU_DEFAULTS['learning_rate']:g} {LARGE}",
    )
    warmup_share: float = flag(
        0.05,
        "warmup: share of the steps in which the learning rate rises to its peak",
        min=0,
        max=1,
    )
    adapter: Path | None = flag(
        None, "adapter to continue training from", default_text="a new adapter"
    )
    lora_r: int = flag(16, "LoRA rank of a new adapter", min=1)
    lora_alpha: float = flag(32, "LoRA alpha of a new adapter (scale = alpha / rank)", min=1)
    lora_dropout: float = flag(0.0, "LoRA dropout of a new adapter", min=0, max=1)
    quantize: str = flag(
        "none", "load the base model quantized with bitsandbytes", choices=QUANTIZATIONS
    )
    dtype: str = flag(
        "auto", "dtype of the model; auto: the fastest dtype", choices=("auto", *DTYPES)
    )
    eval_samples: int = flag(
        50, "number of validation examples for the loss at the end; 0: none", min=0
    )
    max_minutes: float | None = flag(
        None, "stop after this many minutes, and save the adapter", above=0, default_text="no limit"
    )
    tracker: str = flag("none", "also log the metrics to this tracker", choices=TRACKER_NAMES)
    seed: int = flag(
        0, "random seed for the example order and for a new adapter", min=0, max=2**32 - 1
    )
    output: Path = flag(Path("weights/sft_lora"), "folder for the adapter")
    run_dir: Path = flag(Path("runs/sft"), "folder for the log and the checkpoints")
    resume: bool = flag(False, "continue the run in --run-dir from its newest checkpoint")
    dry_run: int = flag(
        0,
        "print this many examples (3 if no number is given) and how many are left out, without "
        "training",
        bare=3,
        min=0,
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.batch_size % self.micro_batch:
            divisor = math.gcd(self.batch_size, self.micro_batch)
            raise ValueError(
                f"--batch-size {self.batch_size} is not a multiple of --micro-batch "
                f"{self.micro_batch}: add --micro-batch {divisor}"
            )
        if self.adapter and self.lora_dropout:
            raise ValueError(
                "--lora-dropout is for a new adapter; the adapter of --adapter keeps its dropout"
            )
        if self.lora_dropout == 1:
            raise ValueError(
                "--lora-dropout must be below 1: a dropout of 1 would drop all of the adapter's "
                "input"
            )
        if not self.dry_run:  # --dry-run writes nothing
            option, start = "--adapter", self.adapter
            check_output_place(self.output, self.run_dir, start, option, resume=self.resume)

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in unset options from --adapter and the machine.

        `resolve_config` calls this method.
        """
        values = resolve(given, start_info(given.get("adapter")), GPU_DEFAULTS)
        parts = parse_dataset(values["dataset"])
        if "max_samples" not in given and all(isinstance(part, OwnFile) for part in parts):
            values["max_samples"] = None
        return values

    def check_files(self) -> None:
        """Check the adapter, the data and the tool before torch is imported."""
        start = start_info(self.adapter)
        check_start(start, self.dataset, self.columns, self.split, self.tool)

    def epochs_for(self, examples: int) -> int:
        """Return the number of passes over the examples.

        If `epochs` is unset, the default is 1. For the user's own data files, the default is the
        smallest number of passes with at least ENOUGH_STEPS steps.
        """
        enough = math.ceil(ENOUGH_STEPS / math.ceil(examples / self.batch_size))
        return self.epochs or (enough if self.dataset and own_files(self.dataset) else 1)

    def steps(self, examples: int) -> int:
        """Return the number of optimizer steps for this many examples."""
        return self.epochs_for(examples) * math.ceil(examples / self.batch_size)
