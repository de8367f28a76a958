"""Validation between steps: greedy accuracy of the policy, the best adapter kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlm.cli import terminal
from rlm.data import Problem


def validate(trainer: Any, problems: Sequence[Problem], step: int) -> dict[str, float]:
    """Measure the accuracy of a `train_grpo.GRPOTrainer` after `step` steps; {} without problems.

    The processes of a run share the problems. After step 0 the best adapter so far is kept.
    """
    if not problems:
        return {}
    distributed = trainer.distributed
    mine = distributed.shard(problems)
    with terminal.progress("evaluating", len(mine)) as advance:
        correct = trainer.count_correct(mine, advance) if mine else 0
    trainer.sampler.release()
    correct, total = sum(distributed.gather([correct])), len(problems)
    accuracy = correct / total
    if step == 0:
        terminal.line(f"start: validation accuracy {accuracy:.1%} ({correct} of {total})")
        return {"eval/start_accuracy": accuracy}
    trainer.state.keep_if_best(accuracy, step)
    return {"eval/accuracy": accuracy}
