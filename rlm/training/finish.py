"""Validates a GRPO run between its steps, and exports its best adapter with history and curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlm.cli import terminal, to_dict
from rlm.data import Problem
from rlm.evaluation import evaluate
from rlm.model import peak_memory_gb, save_adapter
from rlm.runs import git_commit, learning_curves
from rlm.sampling import SamplingParams
from rlm.training.metrics import timer


def validate(trainer: Any, problems: Sequence[Problem], step: int) -> dict[str, float]:
    """Measure the accuracy of a `train_grpo.GRPOTrainer` after `step` steps; {} without problems.

    The processes of a run share the problems. After step 0 the best adapter so far is kept.
    """
    if not problems:
        return {}
    distributed = trainer.distributed
    mine = distributed.shard(problems)
    seconds: dict[str, float] = {}
    with timer(seconds, "time/evaluate"), terminal.progress("evaluating", len(mine)) as advance:
        correct = trainer.count_correct(mine, advance) if mine else 0
    trainer.sampler.release()
    correct, total = sum(distributed.gather([correct])), len(problems)
    accuracy = correct / total
    trainer.state.keep_if_best(accuracy, step)  # the start, too
    if step == 0:
        terminal.line(f"start: validation accuracy {accuracy:.1%} ({correct} of {total})")
        return {"eval/start_accuracy": accuracy} | seconds
    return {"eval/accuracy": accuracy} | seconds


def export_run(trainer: Any, validated_on: int) -> dict[str, object]:
    """Export the best adapter of a `train_grpo.GRPOTrainer`, which `validated_on` problems chose;
    return what its run.json says."""
    trainer.state.load_best()
    if trainer.state.best_step == 0:
        terminal.line("no step was better than the start on validation: the start is exported")
    rows = trainer.distributed.broadcast(trainer.run.metrics())  # of all steps
    config, state = trainer.config, trainer.state
    summary = {
        "stage": "grpo",
        "base_model": trainer.model_name,
        "base_hash": state.base_hash,
        "quantize": config.quantize,
        "start_adapter": str(config.sft_adapter) if config.sft_adapter else None,
        "start_adapter_hash": trainer.start_hash,
        "dataset": config.dataset,
        "questions": trainer.questions,
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
    if trainer.distributed.is_main:
        save_adapter(trainer.policy, trainer.tokenizer, config.output, summary)
        trainer.run.write_csv(rows)
        title = f"GRPO of {trainer.model_name} on {config.dataset}, {len(rows)} steps"
        learning_curves(rows, trainer.run.path / "curves.png", title)
    return summary


def generate_text(trainer: Any, question: str) -> str:
    """Answer a question greedily with a `train_grpo.GRPOTrainer`, as text with its tags.

    Raises:
        TypeError: it is no text.
    """
    if not isinstance(question, str):
        raise TypeError(f"generate takes one question, as text, not {question!r:.60}")
    params = SamplingParams(trainer.config.max_new_tokens, temperature=0.0)
    prompt = trainer.render(Problem("", question, ""))
    [[completion]] = trainer.sampler.sample([prompt], 1, params, [trainer.config.seed])
    trainer.sampler.release()
    return trainer.tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def count_solved(trainer: Any, problems: Sequence[Problem], advance: Callable[[], None]) -> int:
    """Count the problems that a `train_grpo.GRPOTrainer` solves greedily, in the strict format."""
    result = evaluate(
        trainer.sampler,
        trainer.tokenizer,
        problems,
        trainer.format,
        max_new_tokens=trainer.config.max_new_tokens,
        on_finish=advance,
    )
    return result.accuracy(strict=True)["correct"]
