"""Ends a GRPO run: exports the best adapter with its history and draws the learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlm.cli import to_dict
from rlm.model import peak_memory_gb, save_adapter
from rlm.runs import git_commit, learning_curves
from rlm.training.config import GRPOConfig
from rlm.training.state import TrainingState


def export_run(trainer: Any, validated_on: int) -> dict[str, object]:
    """Export the best adapter of a `train_grpo.GRPOTrainer` and return the run's summary.

    Args:
        validated_on: how many validation problems chose it.
    """
    trainer.state.load_best()
    rows, config = trainer.distributed.broadcast(trainer.run.metrics()), trainer.config
    summary = run_summary(config, trainer.model_name, trainer.state, rows, validated_on)
    if trainer.distributed.is_main:
        save_adapter(trainer.policy, trainer.tokenizer, config.output, summary)
        trainer.run.write_csv(rows)
        learning_curves(rows, trainer.run.path / "curves.png")
    return summary


def run_summary(
    config: GRPOConfig,
    model: str,
    state: TrainingState,
    rows: Sequence[Mapping[str, float]],
    validated_on: int,
) -> dict[str, object]:
    """The run.json beside the adapter: where it comes from and how it did.

    Args:
        rows: the metrics of all steps.
    """
    return {
        "stage": "grpo",
        "base_model": model,
        "base_hash": state.base_hash,
        "quantize": config.quantize,
        "start_adapter": str(config.sft_adapter) if config.sft_adapter else None,
        "dataset": config.dataset,
        "step": state.best_step if state.best else len(rows),
        "accuracy": state.best_accuracy if state.best else None,
        "start_accuracy": rows[0].get("eval/start_accuracy"),
        "validated_on": validated_on,
        "steps_run": len(rows),
        "commit": git_commit(),
        "seconds": state.seconds,
        "peak_memory_gb": peak_memory_gb(),
        "config": to_dict(config),
    }
