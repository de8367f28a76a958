"""The options of supervised fine-tuning: what `train_sft.py --help` lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlm.cli import check_values, flag, takes_aliases
from rlm.data import FORMATS
from rlm.model import DTYPES, QUANTIZATIONS
from rlm.runs import PROJECT, TRACKER_NAMES, check_project
from rlm.training.config import ATTENTIONS

# What changes when the model is picked by the GPU's memory, on GSM8K.
GPU_DEFAULTS = {"max_samples": 2000, "learning_rate": 2e-4, "micro_batch": 4}


@takes_aliases
@dataclass(frozen=True)
class SFTConfig:
    model: str | None = flag(None, "hub id, directory, or smollm2-135m (default: by the machine)")
    dataset: str | None = flag(None, "as for GRPO, and openmathinstruct")
    columns: str | None = flag(
        None, "columns of a file or hub data set: question=NAME,answer=NAME,solution=NAME"
    )
    split: str | None = flag(None, "its rows to train on, as in train[:500] (none: train)")
    max_samples: int = flag(400, "training examples, of each in A+B", min=1)
    keep_code: bool = flag(False, "OpenMathInstruct: keep solutions with code blocks")
    reasoning_format: str | None = flag(
        None, "tags (none: those of --adapter, else deepseek)", choices=tuple(FORMATS)
    )
    system_prompt: str | None = flag(
        None, "text or file (none: the start adapter's, else it asks for the tags)"
    )
    tool: str = flag(
        "none",
        "the adapter is meant for: calculator (the solutions keep their <<a*b=c>>), FILE.py:NAME, "
        "none (not given: that of --adapter)",
    )
    max_length: int = flag(
        1024, "longest example in tokens; longer ones are left out and counted", min=1
    )
    epochs: int = flag(1, "passes over the examples", min=1)
    batch_size: int = flag(16, "examples per optimizer step", min=1)
    micro_batch: int = flag(8, "examples per forward pass", min=1)
    learning_rate: float = flag(
        1e-3, "peak; LoRA wants about ten times full fine-tuning's", above=0
    )
    warmup_share: float = flag(0.05, "share of the steps in which the rate rises", min=0, max=1)
    adapter: Path | None = flag(None, "adapter to go on from (none: a new one)")
    lora_r: int = flag(16, "rank of a new adapter", min=1)
    lora_alpha: int = flag(32, "scale of a new adapter, over its rank", min=1)
    lora_dropout: float = flag(0.0, "dropout inside the adapter", min=0, max=1)
    quantize: str = flag("none", "quantize the base (bitsandbytes)", choices=QUANTIZATIONS)
    use_4bit: bool = flag(False, "the same as --quantize 4bit", same_as=("quantize", "4bit"))
    dtype: str = flag("auto", "number type (auto: measured)", choices=("auto", *DTYPES))
    use_8bit: bool = flag(False, "the same as --quantize 8bit", same_as=("quantize", "8bit"))
    attn_implementation: str = flag("auto", "attention", choices=ATTENTIONS, old=["attn"])
    eval_samples: int = flag(
        50, "validation problems whose loss is measured at the end (0: none)", min=0
    )
    max_minutes: float | None = flag(
        None, "stop at the step after this many minutes, and save", above=0
    )
    tracker: str = flag("none", "show the run there too", choices=TRACKER_NAMES)
    use_wandb: bool = flag(False, "the same as --tracker wandb", same_as=("tracker", "wandb"))
    wandb_project: str | None = flag(
        None, f"project at the tracker (none: WANDB_PROJECT, else {PROJECT})"
    )
    seed: int = flag(0, "seed of data order and adapter")
    output: Path = flag(
        Path("weights/sft_lora"),
        "where the adapter goes",
    )
    run_dir: Path = flag(Path("runs/sft"), "where log and checkpoints go")
    resume: bool = flag(False, "go on from the newest checkpoint in --run-dir")
    dry_run: int = flag(
        0, "train nothing: print so many examples (alone: 3), and what is left out", bare=3, min=0
    )

    def __post_init__(self) -> None:
        check_values(self)
        check_project(self.wandb_project, self.tracker)
        if self.batch_size % self.micro_batch:
            raise ValueError(
                f"--batch-size {self.batch_size} is not a multiple of --micro-batch "
                f"{self.micro_batch}"
            )
        if self.adapter and self.lora_dropout:
            raise ValueError("--lora-dropout is of a new adapter; that of --adapter has its own")
        if self.lora_dropout == 1:
            raise ValueError("--lora-dropout must be below 1: nothing of the adapter would be left")
        if self.adapter and self.output.resolve() == self.adapter.resolve():
            raise ValueError("--output would overwrite --adapter; name another directory")

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Add what the adapter to go on from and the machine decide: `resolve_config` calls it."""
        from rlm.model import TEACH, AdapterInfo, check_adapter, default_values

        adapter = given.get("adapter")
        start = AdapterInfo.load(check_adapter(adapter, TEACH)) if adapter else None
        values = default_values(given, start, GPU_DEFAULTS)
        if start is not None:
            values["tool"] = start.resolve_tool(given.get("tool", "auto"))
            values |= start.resolve_data(values.get("dataset"), values.get("columns"))
        asked = given.get("system_prompt")
        values["system_prompt"] = (start or AdapterInfo(Path())).resolve_system_prompt(asked)
        return values

    def steps(self, examples: int) -> int:
        """Optimizer steps of a run over so many examples."""
        return self.epochs * -(-examples // self.batch_size)
