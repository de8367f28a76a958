"""Stage 1: teach the format. A generic instruct model learns to reason inside <think></think>.

TRL's SFTTrainer does the training; what is ours is the data it sees. Every example is rendered to
token ids by the same function that GRPO, evaluation and inference use, and the loss is on the
completion alone, up to and with its first end token. LoRA on all linear layers; 4-bit on request.

    python train_sft.py                                    # picks model and data by what is here
    python train_sft.py --dataset gsm8k --model Qwen/Qwen2.5-1.5B-Instruct --use-4bit
    python train_sft.py --adapter weights/sft_lora --output weights/longer_lora   # go on from one
    python train_sft.py --resume                           # go on where a run stopped
    python train_sft.py --dry-run                          # show examples and what is learned
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlm.cli import terminal
from rlm.cli.main import run_main
from rlm.cli.options import UsageError, check_values, flag, to_dict
from rlm.data.loaders import load_problems
from rlm.data.problem import Problem
from rlm.data.prompts import FORMATS
from rlm.model.quantize import QUANTIZATIONS, import_bitsandbytes
from rlm.runs.trackers import TRACKER_NAMES
from rlm.training.config import ATTENTIONS
from rlm.training.sft_examples import Example, check_loss_mask, show_example, to_examples

if TYPE_CHECKING:
    import trl
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

    from rlm.model.hardware import Device
    from rlm.training.sft import Progress, SFTTrainer


# What changes when a GPU picks the 7B model on GSM8K.
GPU_DEFAULTS = {"max_samples": 2000, "learning_rate": 2e-4, "micro_batch": 4}


@dataclass(frozen=True)
class SFTConfig:
    model: str | None = flag(None, "hub id, directory, or smollm2-135m (default: by the machine)")
    dataset: str | None = flag(None, "gsm8k, openmathinstruct, word-problems[:LEVELS], FILE.jsonl")
    max_samples: int = flag(400, "training examples", min=1)
    keep_code: bool = flag(False, "OpenMathInstruct: keep solutions with code blocks")
    reasoning_format: str = flag("deepseek", "tags", choices=tuple(FORMATS))
    max_length: int = flag(
        1024, "longest example in tokens; longer ones are left out and counted", min=1
    )
    epochs: int = flag(1, "passes over the examples", aliases=["num_train_epochs"], min=1)
    batch_size: int = flag(16, "examples per optimizer step", min=1)
    micro_batch: int = flag(8, "examples per forward pass", min=1)
    learning_rate: float = flag(
        1e-3, "peak; LoRA wants about ten times full fine-tuning's", above=0
    )
    warmup_share: float = flag(
        0.05, "share of the steps in which the rate rises", aliases=["warmup_ratio"], min=0, max=1
    )
    adapter: Path | None = flag(None, "adapter to go on from (none: a new one)")
    lora_r: int = flag(16, "rank of a new adapter", min=1)
    lora_alpha: int = flag(32, "scale of a new adapter, over its rank", min=1)
    lora_dropout: float = flag(0.0, "dropout inside the adapter", min=0, max=1)
    quantize: str = flag("none", "quantize the base (bitsandbytes)", choices=QUANTIZATIONS)
    use_4bit: bool = flag(False, "the same as --quantize 4bit", same_as=("quantize", "4bit"))
    attn_implementation: str = flag("auto", "attention", choices=ATTENTIONS, old=["attn"])
    eval_samples: int = flag(
        50, "validation problems whose loss is measured at the end (0: none)", min=0
    )
    max_minutes: float | None = flag(
        None, "stop at the step after this many minutes, and save", above=0
    )
    tracker: str = flag("none", "show the run there too", choices=TRACKER_NAMES)
    use_wandb: bool = flag(False, "the same as --tracker wandb", same_as=("tracker", "wandb"))
    seed: int = flag(0, "seed of data order and adapter")
    output: Path = flag(Path("weights/sft_lora"), "where the adapter goes")
    run_dir: Path = flag(Path("runs/sft"), "where log and checkpoints go")
    resume: bool = flag(False, "go on from the newest checkpoint in --run-dir")
    dry_run: bool = flag(False, "print rendered examples with the loss mask, and stop")

    def __post_init__(self) -> None:
        check_values(self)
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
        from rlm.model.adapters import TEACH, check_adapter, read_run
        from rlm.model.hardware import default_values

        adapter = given.get("adapter")
        start_run = read_run(check_adapter(adapter, TEACH)) if adapter else {}
        return default_values(given, start_run, GPU_DEFAULTS)

    def steps(self, examples: int) -> int:
        """Optimizer steps of a run over so many examples."""
        return self.epochs * -(-examples // self.batch_size)


def main(config: SFTConfig) -> int:
    from rlm.model.hardware import prepare_process

    prepare_process()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("SFT is one process: start it with python, not with a launcher")
    problems = load_problems(
        config.dataset,
        "train",
        max_samples=config.max_samples,
        seed=config.seed,
        keep_code=config.keep_code,
    )
    validation = []
    if config.eval_samples:
        validation = load_problems(config.dataset, "validation", max_samples=config.eval_samples)
    train(config, problems, validation)
    return 0


def train(
    config: SFTConfig, problems: Sequence[Problem], validation: Sequence[Problem] = ()
) -> dict[str, object]:
    """Learn the problems' solutions, write the adapter, and return what its run.json says.

    Raises:
        UsageError: problems without solutions, or none that is short enough; nothing to resume,
            or it was begun otherwise.
        Interrupted: a signal asked to stop; the step was ended and saved.
    """
    import_bitsandbytes()  # before trl does
    import transformers

    from rlm.model.base import base_hash, load_tokenizer
    from rlm.model.export import check_output, save_adapter, write_run
    from rlm.model.hardware import pick_device
    from rlm.runs.checkpoints import writing
    from rlm.runs.directory import RunDirectory
    from rlm.training.sft import Progress

    device = pick_device()
    tokenizer = load_tokenizer(config.model)
    limits = {"dataset": config.dataset, "max_length": config.max_length}
    format = FORMATS[config.reasoning_format]
    examples, held_out = (
        to_examples(tokenizer, chosen, format, **limits) for chosen in (problems, validation)
    )
    if not examples:
        raise UsageError(f"no example fits in --max-length {config.max_length} tokens")
    if config.dry_run:
        for example in examples[:3]:
            show_example(tokenizer, example)
        return {}

    check_output(config.output)
    run = RunDirectory(config.run_dir, resume=config.resume)
    transformers.set_seed(config.seed)
    weights = base_hash(config.model)
    policy = start_policy(config, device, weights)
    announce(config, device, policy, len(problems), len(examples))
    steps = config.steps(len(examples))
    trainer = make_trainer(config, device, policy, tokenizer, examples)
    origin = origin_of(config, weights, examples)
    progress = Progress(run, policy, steps, origin, config.max_minutes)
    trainer.add_callback(progress)
    if config.resume:
        progress.restore()
    run.write_config(to_dict(config))
    run.track(config.tracker, to_dict(config))
    with run:
        trainer.train_from(progress.step)
        run.raise_if_interrupted(run.interrupted and trainer.state.global_step < steps)
        run.write_csv(run.metrics())
        history = history_of(config, weights, len(examples), trainer.state.global_step, progress)
        save_adapter(policy, tokenizer, config.output, history)
        if held_out:
            history["validation_loss"] = trainer.mean_loss(held_out)
            with writing(config.output):
                write_run(config.output, history)
    show_end(config, history)
    return history


def history_of(
    config: SFTConfig, weights: str, examples: int, step: int, progress: Progress
) -> dict[str, object]:
    """What the adapter's run.json says."""
    return {
        "stage": "sft",
        "base_model": config.model,
        "base_hash": weights,
        "start_adapter": str(config.adapter) if config.adapter else None,
        "quantize": config.quantize,
        "dataset": config.dataset,
        "examples": examples,
        "step": step,
        "loss": progress.mean_loss(),
        "validation_loss": None,  # measured when the adapter is safe
        "seconds": progress.seconds,
        "config": to_dict(config),
    }


def announce(
    config: SFTConfig, device: Device, policy: PeftModel, problems: int, examples: int
) -> None:
    left_out = f" ({problems - examples} too long, left out)" if examples < problems else ""
    terminal.facts(
        "Stage 1: supervised fine-tuning",
        {
            "model": config.model,
            "device": device,
            "data": f"{config.dataset}: {examples} examples{left_out}",
            "trainable": "{:,} of {:,} parameters".format(*policy.get_nb_trainable_parameters()),
            "steps": f"{config.steps(examples)} of {config.batch_size} examples, "
            f"rate {config.learning_rate:g}",
            "output": config.output,
        },
    )


def start_policy(config: SFTConfig, device: Device, weights: str) -> PeftModel:
    """The base, with the adapter to go on from or a new one."""
    from rlm.model.adapters import check_base, load_adapter, new_adapter
    from rlm.model.base import load_base
    from rlm.training.fused_layers import use_fused_layers

    if config.adapter:
        check_base(config.adapter, config.model, weights)
    packing = {"quantize": config.quantize, "attn": config.attn_implementation}
    base = load_base(config.model, device, **packing)
    if config.adapter:
        policy = load_adapter(base, config.adapter, trainable=True)
    else:
        new = {"r": config.lora_r, "alpha": config.lora_alpha, "dropout": config.lora_dropout}
        policy = new_adapter(base, **new)
    if device.type == "cpu" and not policy.peft_config["default"].lora_dropout:
        use_fused_layers(policy)  # in bf16 PEFT's go to fp32 and back, a seventh of a step
    return policy


def make_trainer(
    config: SFTConfig,
    device: Device,
    policy: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[Example],
) -> SFTTrainer:
    """TRL's trainer, with a loss of our own on a CPU; what it will learn is checked."""
    import datasets
    import transformers

    from rlm.training.sft import SFTTrainer

    trainer = SFTTrainer(
        model=policy,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(examples),
        args=trainer_arguments(config, device, config.steps(len(examples))),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    # TRL makes the adapter of a packed base bf16, in which small updates round to nothing.
    for tensor in policy.parameters():
        if tensor.requires_grad:
            tensor.data = tensor.data.float()
    first = examples[: config.micro_batch]
    check_loss_mask(trainer.data_collator(first), first)
    return trainer


def trainer_arguments(config: SFTConfig, device: Device, steps: int) -> trl.SFTConfig:
    import trl

    gpu = device.type == "cuda"
    arguments = trl.SFTConfig(
        output_dir=str(config.run_dir),
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.micro_batch,
        per_device_eval_batch_size=config.micro_batch,
        gradient_accumulation_steps=config.batch_size // config.micro_batch,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(config.warmup_share * steps),
        max_grad_norm=1.0,
        logging_steps=max(1, steps // 20),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="group_by_length",  # little padding
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        # Autocast, which on a CPU takes twice the time of computing in bf16 as it is.
        bf16=gpu and str(device.dtype) == "torch.bfloat16",
        fp16=gpu and str(device.dtype) == "torch.float16",
        use_cpu=not gpu,
        gradient_checkpointing=gpu,
        seed=config.seed,
    )
    if arguments.device.type == "cuda":  # which counts the GPUs: one of them is enough
        arguments._n_gpu = 1
    return arguments


def origin_of(config: SFTConfig, weights: str, examples: Sequence[Example]) -> dict[str, object]:
    """What a run is made of; one that is resumed must be made of the same."""
    from rlm.model.adapters import ADAPTER_FILES
    from rlm.runs.checkpoints import file_hash
    from rlm.runs.resume import data_id

    start, rows = config.adapter, [[e["input_ids"], e["labels"]] for e in examples]
    return {
        "config": to_dict(config),
        "base_hash": weights,
        "start": None if start is None else file_hash(start / ADAPTER_FILES[1]),
        "data": {"training": data_id("examples", rows)},
    }


def show_end(config: SFTConfig, history: dict) -> None:
    from rlm.model.hardware import peak_memory_gb

    held_out = history["validation_loss"]
    terminal.facts(
        "Stage 1 done",
        {
            "mean loss": f"{history['loss']:.3f}"
            + ("" if held_out is None else f", on held-out problems {held_out:.3f}"),
            "time": terminal.duration(history["seconds"]),
            "peak memory": f"{peak_memory_gb():.1f} GB",
            "adapter": config.output,
            "next": f"python train_grpo.py --sft-adapter {config.output}",
        },
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_main(main, SFTConfig, description=__doc__)
