"""TRL's GRPOTrainer as a cell: GRPO's problems, schedule and optimizer, checkpoints to resume from.

Imported only in the cell's own process: TRL takes seconds and memory to load.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.evidence.plan import Cell, EvidenceConfig
from benchmarks.evidence.pools import pools
from benchmarks.evidence.training import is_whole
from benchmarks.trainers import Work, strict_reward
from benchmarks.trl_arm import Clock, TimedTrainer, config_for, dataset, load_policy
from rlm.model import adapter_tensors, base_model_hash, save_adapter

SPLIT_SECONDS = "steps.jsonl"


class KeptClock(Clock):
    """Writes each step's seconds down, so that they outlive a kill."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        super().on_step_end(args, state, control, **options)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(self.steps[-1]) + "\n")


def train_with_trl(config: EvidenceConfig, cell: Cell, start: Path) -> list[dict[str, float]]:
    """Seconds of every step; the adapter goes to `adapter/`, points on the way to checkpoint-N/."""
    folder = config.folder(cell) / "train"
    folder.mkdir(parents=True, exist_ok=True)
    begun, steps_file = _last_whole_checkpoint(folder), folder / SPLIT_SECONDS
    ours = config.grpo_config(cell, start)
    work = Work(
        model=config.model,
        adapter=str(start),
        batch_size=config.batch_size,
        group_size=config.group_size,
        max_new_tokens=config.max_new_tokens,
        steps=config.steps,
        learning_rate=config.learning_rate,
        seed=cell.seed,
    )
    policy, tokenizer = load_policy(work)
    optimizer = torch.optim.AdamW(
        adapter_tensors(policy).values(), lr=config.learning_rate, weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: ours.learning_rate_at(step) / ours.learning_rate
    )
    saving = {"save_strategy": "steps", "save_steps": config.curve_every}
    clock = KeptClock(steps_file)
    clock.trainer = TimedTrainer(
        model=policy,
        reward_funcs=strict_reward,
        args=config_for(work, config.trl_settings(), str(folder), **saving),
        train_dataset=dataset(work.problems(pools(config, cell.seed).practice), tokenizer),
        processing_class=tokenizer,
        callbacks=[clock],
        optimizers=(optimizer, schedule),
    )
    clock.trainer.train(resume_from_checkpoint=begun)
    run = {"base_model": config.model, "base_hash": base_model_hash(config.model)}
    save_adapter(policy, tokenizer, config.folder(cell) / "adapter", run)
    return [json.loads(row) for row in steps_file.read_text(encoding="utf-8").splitlines()]


def _last_whole_checkpoint(folder: Path) -> str | None:
    """What to resume from; what came after it, and a checkpoint that a kill left, is removed."""
    for checkpoint in folder.glob("checkpoint-*"):
        if not is_whole(checkpoint):
            shutil.rmtree(checkpoint)
    begun = get_last_checkpoint(str(folder))
    if begun is None:
        shutil.rmtree(folder)
        folder.mkdir()
        return None
    done, steps_file = int(begun.rpartition("-")[2]), folder / SPLIT_SECONDS
    rows = steps_file.read_text(encoding="utf-8").splitlines()[:done]
    steps_file.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    return begun
