"""Stage 1: teach the format. A generic instruct model learns to reason inside <think></think>.

Training uses TRL's SFTTrainer. The prompts come from the same function as in GRPO, evaluation and
inference. The loss is computed on the completion alone, up to and including its first end token.
LoRA adapts all linear layers except the LM head; --quantize 4bit loads the base model in 4 bits.

    python train_sft.py                                    # picks a model and data that fit here
    python train_sft.py --dataset gsm8k --model Qwen/Qwen2.5-1.5B-Instruct --quantize 4bit \\
        --max-samples 2000 --learning-rate 2e-4 --micro-batch 4
    python train_sft.py --adapter weights/sft_lora --output weights/longer_lora   # train it longer
    python train_sft.py --resume                           # continue a run that stopped
    python train_sft.py --dry-run 5                        # show five examples, train nothing
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlm.cli import check_command_line, run_main
from rlm.training import SFTConfig

if __name__ == "__main__":  # answers --help and reports mistakes before torch is loaded
    check_command_line(SFTConfig, description=__doc__)

from rlm.cli import UsageError, command_of, required, terminal, to_dict
from rlm.data import (
    FORMATS,
    Problem,
    answer_types,
    describe_other_forms,
    example_questions,
    own_files,
)
from rlm.model import (
    TRAINED_ADAPTER,
    AdapterInfo,
    Device,
    base_model_hash,
    check_base,
    check_output,
    load_adapter,
    load_base,
    load_tokenizer,
    new_adapter,
    peak_memory_gb,
    pick_device,
    prepare_process,
    save_adapter,
)
from rlm.ops import use_fused_layers
from rlm.runs import RunDirectory, replace_json, writing
from rlm.sampling import check_architecture
from rlm.tools import Calculator, load_tool
from rlm.training import (
    ENOUGH_STEPS,
    drop_unsolved,
    follow_adapter,
    load_data,
    show_counts,
    show_example,
    to_examples,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

    from rlm.training import Example


def main(config: SFTConfig) -> int:
    prepare_process()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("SFT runs in one process: start it with python, not with torchrun")
    load_tool(config.tool)  # reports an invalid --tool before the data is loaded
    problems, validation = load_data(
        config,
        keep_code=config.keep_code,
        calculator_annotations=config.tool == Calculator.name,
    )
    if config.max_samples is not None:
        terminal.line(f"{len(problems):,} training examples (--max-samples)")
    train(config, problems, validation)
    return 0


def train(
    config: SFTConfig, problems: Sequence[Problem], validation: Sequence[Problem] = ()
) -> dict[str, object]:
    """Train on the problems' solutions, write the adapter, and return the contents of run.json.

    With `dry_run`, print examples and counts instead, and return an empty dict.

    Raises:
        UsageError: no problem has a solution, or all examples are too long; the tags differ from
            those of --adapter; there is no run to resume, or the run to resume was started with
            other options.
        Interrupted: a signal was received; the current step was finished and saved.
    """
    config = follow_adapter(config, AdapterInfo.load(config.adapter) if config.adapter else None)
    model = required(config.model, "--model")
    tokenizer = load_tokenizer(model)
    tags = required(config.reasoning_format, "--reasoning-format")
    format = FORMATS[tags].with_prompt(config.system_prompt)
    problems = drop_unsolved(problems, config.dataset)
    if other_forms := describe_other_forms(problems, format):
        terminal.line(f"warning: {other_forms}")
    validation = [p for p in validation if p.has_steps]
    examples = to_examples(tokenizer, problems, format, config.max_length)
    held_out = to_examples(tokenizer, validation, format, config.max_length)
    if not examples:
        raise UsageError(f"no example fits in --max-length {config.max_length} tokens")
    if config.dry_run:
        for example in examples[: config.dry_run]:
            show_example(tokenizer, example)
        show_counts(len(problems), len(examples), config.max_length)
        if validation:
            show_counts(len(validation), len(held_out), config.max_length, "validation problems")
        return {}

    about = {
        "stage": "sft",
        "dataset": config.dataset,
        "answer_types": list(answer_types(problems)),
        "questions": example_questions(problems),
    }
    history = learn(config, tokenizer, examples, about, held_out, len(problems) - len(examples))
    summary_card(config, history)
    return history


def learn(
    config: SFTConfig,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[Example],
    about: Mapping[str, object],
    held_out: Sequence[Example] = (),
    left_out: int = 0,
    is_last: bool = True,
) -> dict[str, Any]:
    """Train on tokenized examples, write the adapter, and return the contents of run.json.

    Args:
        about: the description of the stage and the data, which is stored in run.json.
        left_out: the number of examples that were left out because they are too long.
        is_last: whether the command ends after this training. If not, a signal that is received
            after the last step raises Interrupted, too.

    Raises:
        UsageError: there is no run to resume, or the run to resume was started with other options;
            or --output or --run-dir is not writable; or no example fits into the context window.
        Interrupted: a signal was received; the current step was finished and saved.
    """
    from transformers import set_seed  # after rlm.model, which silences import warnings

    from rlm.training import CheckpointCallback, check_window, examples_within_window, make_trainer

    check_output(config.output)
    model = required(config.model, "--model")
    device, base_hash = pick_device(config.dtype), base_model_hash(model)
    set_seed(config.seed)  # seeds a new adapter and the order of the examples
    policy = start_policy(config, device, base_hash)
    read = len(examples) + left_out
    examples, held_out = (examples_within_window(policy, rows) for rows in (examples, held_out))
    if not examples:
        raise UsageError("no example fits into the context window of the model")
    config = replace(config, epochs=config.epochs_for(len(examples)))  # so run.json contains it
    with RunDirectory(config.run_dir, resume=config.resume) as run:  # moves an earlier run away
        announce(config, device, policy, len(examples), read - len(examples), is_last)
        check_window(policy, examples, config.dataset)
        trainer = make_trainer(config, device, policy, tokenizer, examples)
        progress = CheckpointCallback(config, run, policy, base_hash, examples)
        trainer.add_callback(progress)
        trainer.train_from(progress.step)
        run.raise_if_interrupted(run.interrupted and trainer.state.global_step < progress.steps)
        run.write_csv(run.metrics())
        history: dict[str, object] = {
            "base_model": config.model,
            "base_hash": base_hash,
            "start_adapter": str(config.adapter) if config.adapter else None,
            "quantize": config.quantize,
            "examples": len(examples),
            "config": to_dict(config),
            "step": trainer.state.global_step,
            "loss": progress.mean_loss(),
            "validation_loss": None,  # measured after the adapter is saved
            "seconds": progress.seconds,
            **about,
        }
        save_adapter(policy, tokenizer, config.output, history)
        if held_out:
            history["validation_loss"] = trainer.mean_loss(held_out)
            with writing(config.output):
                replace_json(config.output / "run.json", history)
        run.raise_if_interrupted(run.interrupted and not is_last)
    return history


def start_policy(config: SFTConfig, device: Device, base_hash: str) -> PeftModel:
    """Load the base model with the adapter from --adapter, or with a newly initialized one."""
    model = required(config.model, "--model")
    if config.adapter:
        check_base(config.adapter, model, base_hash)
    base = load_base(model, device, quantize=config.quantize, attn="auto")
    check_architecture(base)
    if config.adapter:
        policy = load_adapter(base, config.adapter, trainable=True)
    else:
        new = {"r": config.lora_r, "alpha": config.lora_alpha, "dropout": config.lora_dropout}
        policy = new_adapter(base, **new)
    if not getattr(policy.peft_config["default"], "lora_dropout", 0):
        # The fused layers support no dropout. PEFT's LoRA layers convert bf16 to fp32 and back,
        # which takes a seventh of a step's time.
        use_fused_layers(policy)
    return policy


def announce(
    config: SFTConfig,
    device: Device,
    policy: PeftModel,
    examples: int,
    left_out: int,
    is_last: bool,
) -> None:
    too_long = f" ({left_out} too long, left out)" if left_out else ""
    steps, epochs = config.steps(examples), config.epochs_for(examples)
    passes = f"{epochs} pass{'es' * (epochs > 1)}{' (--epochs)' * is_last}"
    terminal.table(
        "Stage 1: supervised fine-tuning",
        {
            "model": config.model,
            "device": device,
            "data": f"{config.dataset or 'from Python'}: {examples} examples{too_long}",
            "trainable": "{:,} of {:,} parameters".format(*policy.get_nb_trainable_parameters()),
            "steps": f"{steps} × {min(config.batch_size, examples)} examples, {passes}, learning "
            f"rate {config.learning_rate:g}",
            "output": config.output,
        },
    )
    if steps < ENOUGH_STEPS:
        enough = epochs * math.ceil(ENOUGH_STEPS / steps)
        number = f"{steps} steps are" if steps > 1 else "1 step is"
        remedy = f"use --epochs {enough}" if is_last else "use more --start-questions"
        terminal.line(f"warning: {number} too few: {remedy}")


def summary_card(config: SFTConfig, history: dict) -> None:
    held_out = history["validation_loss"]
    terminal.table(
        "Stage 1 done",
        {
            "mean loss": f"{history['loss']:.3f}"
            + ("" if held_out is None else f", on held-out problems {held_out:.3f}"),
            "time": terminal.duration(history["seconds"]),
            "peak memory": f"{peak_memory_gb():.1f} GB",
            "adapter": config.output,
            "next": next_command(config),
            "with your own reward": "add --reward FILE.py:NAME (rlm reward FILE.py writes one)",
        },
    )


def next_command(config: SFTConfig) -> str:
    """Return the command that starts stage 2 on the same data."""
    own = config.dataset and own_files(config.dataset)
    data = {"dataset": config.dataset, "columns": config.columns, "split": config.split}
    options = {"sft_adapter": config.output, **(data if own else {})}
    if config.output.resolve() == TRAINED_ADAPTER.resolve():  # also stage 2's default --output
        options["output"] = config.run_dir / "grpo_lora"
    return command_of("train_grpo", **options)


if __name__ == "__main__":
    run_main(main, SFTConfig, description=__doc__)
