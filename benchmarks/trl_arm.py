"""TRL's GRPOTrainer as an arm of a benchmark: the same work as `trainers.run_ours`.

Imported only in the arm's own process: TRL takes seconds and memory to load. `settings` are what a
user of TRL can choose without changing what is learned (`TRLFlags`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, TrainerCallback

from benchmarks.trainers import FORMAT, ScriptedReward, Work
from rlm.data import Problem, render_prompt, stop_token_ids
from rlm.model import (
    load_adapter,
    load_base,
    load_tokenizer,
    new_adapter,
    pick_device,
    prepare_process,
)


class TimedTrainer(trl.GRPOTrainer):
    """Notes how long the two parts of a step take that are not learning."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.spent = {"sample": 0.0, "score": 0.0}
        self.length_mean = 0.0

    def _generate(self, *args: Any, **options: Any) -> Any:
        started = time.monotonic()
        result = super()._generate(*args, **options)
        self.spent["sample"] += time.monotonic() - started
        lengths = [len(ids) for ids in result[1]]
        self.length_mean = sum(lengths) / len(lengths)
        return result

    def _calculate_rewards(self, *args: Any, **options: Any) -> Any:
        started = time.monotonic()
        result = super()._calculate_rewards(*args, **options)
        self.spent["score"] += time.monotonic() - started
        return result


class Clock(TrainerCallback):
    """Cuts the run into steps."""

    def __init__(self) -> None:
        self.trainer: TimedTrainer | None = None
        self.steps: list[dict[str, float]] = []
        self.step_started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step_started = time.monotonic()
        self.trainer.spent = {"sample": 0.0, "score": 0.0}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now, spent = time.monotonic(), self.trainer.spent
        if not all(spent.values()):  # a version of TRL whose methods are called otherwise
            raise RuntimeError(f"no time was noted for a part of the step: {spent}")
        learn = now - self.step_started - sum(spent.values())
        self.steps.append({**spent, "learn": learn, "length_mean": self.trainer.length_mean})


def run_trl(work: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Train as `work` says; seconds of every step, of which the first is the warm-up."""
    work = Work(**work)
    if settings["malloc"]:
        prepare_process()
    policy, tokenizer = load_policy(work, settings["attn"])
    reward, clock = ScriptedReward(work.reward, work.group_size), Clock()
    with tempfile.TemporaryDirectory() as folder:
        clock.trainer = TimedTrainer(
            model=policy,
            reward_funcs=reward.score,
            args=config_for(work, settings, folder),
            train_dataset=dataset(work.problems(work.pool()), tokenizer),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        clock.trainer.train()
    return reward.result(clock.steps)


def load_policy(work: Work, attn: str = "sdpa") -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """The model with the adapter that the work starts from, as both trainers have it."""
    tokenizer = load_tokenizer(work.model)
    base = load_base(work.model, pick_device(), attn=attn)
    # TRL stops at the ends that the model's config names: all of those that ours stops at.
    base.generation_config.eos_token_id = sorted(stop_token_ids(tokenizer, base.generation_config))
    if work.adapter:
        return load_adapter(base, Path(work.adapter), trainable=True), tokenizer
    torch.manual_seed(work.seed)
    return new_adapter(base, r=work.lora_r, alpha=2 * work.lora_r), tokenizer


def config_for(work: Work, settings: Mapping[str, Any], folder: str, **more: Any) -> trl.GRPOConfig:
    """The algorithm as ours has it, one update over all rows of a step, and nothing logged.

    Args:
        more: other options of TRL's, which win.
    """
    rows = work.batch_size * work.group_size
    if rows % settings["batch"]:
        raise ValueError(f"a batch of {settings['batch']} does not divide the {rows} rows")
    use_cpu = pick_device().type == "cpu"
    options = {
        "output_dir": folder,
        "max_steps": work.steps,
        "per_device_train_batch_size": settings["batch"],
        "gradient_accumulation_steps": rows // settings["batch"],
        "num_generations": work.group_size,
        "max_completion_length": work.max_new_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "num_iterations": 1,
        "learning_rate": work.learning_rate,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "disable_dropout": True,
        "gradient_checkpointing": settings["checkpointing"],
        "use_transformers_continuous_batching": settings["continuous"],
        "bf16": settings["autocast"],
        "use_cpu": use_cpu,
        "dataloader_pin_memory": not use_cpu,
        "shuffle_dataset": False,
        "seed": work.seed,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return trl.GRPOConfig(**options | more)


def dataset(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Problems as text that TRL turns into the very token ids that ours gets.

    Raises:
        ValueError: it would not.
    """
    rows = []
    for problem in problems:
        ids = render_prompt(tokenizer, problem.question, FORMAT)
        prompt = tokenizer.decode(ids)
        if tokenizer(text=prompt)["input_ids"] != ids:
            raise ValueError(f"TRL would see other token ids than ours for {problem.id}")
        rows.append({"prompt": prompt, "answer": problem.answer})
    return Dataset.from_list(rows)
