"""Validates a GRPO run between its steps, and exports the adapter that `choose_export` names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlm.cli import terminal, to_dict
from rlm.data import Problem
from rlm.evaluation import evaluate
from rlm.model import peak_memory_gb, save_adapter
from rlm.rewards import Scorer, is_built_in
from rlm.runs import git_commit
from rlm.sampling import SamplingParams
from rlm.training.config_rules import KEPT_AS
from rlm.training.metrics import draw_curves, timer
from rlm.training.selection import Scores, Validation, choose_export, describe_mean, sample_count


def validation_measure(trainer: Any) -> str:
    """Return what chooses a `train_grpo.GRPOTrainer`'s adapter: "reward" if that is the user's own
    or some answers are open, else "accuracy"."""
    scorer = trainer.scorer
    is_own = isinstance(scorer, Scorer) and not is_built_in(scorer.reward)
    return "reward" if is_own or "open" in trainer.answer_types else "accuracy"


def validate(trainer: Any, problems: Sequence[Problem], step: int) -> dict[str, float]:
    """Validate a `train_grpo.GRPOTrainer` after `step` steps; {} without problems.

    The processes of a run share the problems. The best adapter so far is kept; the start is one.
    """
    if not problems:
        return {}
    distributed, validations = trainer.distributed, trainer.state.validations
    mine, k = distributed.shard(problems), trainer.config.eval_group_size_for(len(problems))
    seconds: dict[str, float] = {}
    with timer(seconds, "time/evaluate"), terminal.progress("evaluating", k * len(mine)) as advance:
        measured = trainer.validation_scores(mine, k, advance) if mine else {}
    trainer.sampler.release()
    metrics: dict[str, float] = {}
    for name in distributed.broadcast(list(measured)):  # the main process has a problem
        scores = distributed.gather(measured.get(name, []))
        found = Validation(step, scores).summary(name)
        start = "" if step else "start_"
        metrics[f"eval/{start}{name}"] = found["mean"]
        metrics |= {f"eval/{start}{name}_{end}": found[end] for end in ("low", "high")}
        if name == "accuracy":
            validations.add_accuracy(step, scores)
        if name == validations.measure:
            trainer.state.keep_validation(step, scores)
            if step == 0:
                shown = describe_mean(found["mean"], name)
                samples = sample_count(k, len(problems))
                terminal.line(f"start: validation {name} {shown}, {samples}")
    return metrics | seconds


def validation_scores(
    trainer: Any, problems: Sequence[Problem], k: int, advance: Callable[[], None]
) -> dict[str, Scores]:
    """Sample k completions of each problem as a `train_grpo.GRPOTrainer` does in training, and
    return each problem's strict accuracy, unless all answers are open, and its mean reward where
    that is what counts (`validation_measure`)."""
    config = trainer.config
    result = evaluate(
        trainer.sampler,
        trainer.tokenizer,
        problems,
        trainer.format,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        k=k,
        seed=config.seed,
        on_finish=advance,
    )
    scores: dict[str, Scores] = {}
    if result.comparable:
        scores["accuracy"] = result.per_problem(strict=True)
    if validation_measure(trainer) == "reward":
        texts = [[graded.text for graded in group] for group in result.groups]
        truncated = [[graded.truncated for graded in group] for group in result.groups]
        rewards = trainer.scorer(problems, texts, truncated).rewards
        judged = [[reward for reward in row if reward is not None] for row in rewards]
        scores["reward"] = [sum(row) / len(row) if row else None for row in judged]
    return scores


def export_run(trainer: Any, validated_on: int, stopped: str = "") -> dict[str, object]:
    """Export an adapter of a `train_grpo.GRPOTrainer`, keep the best and the last in --run-dir, and
    return what its run.json says.

    Args:
        validated_on: the number of validation problems.
        stopped: why the run ended early, as `choose_export` takes it.
    """
    rows = trainer.distributed.broadcast(trainer.run.metrics())  # of all steps
    config, state = trainer.config, trainer.state
    validations, last_step = state.validations, len(rows)
    choice = choose_export(validations, last_step, config.export, stopped)
    summary: dict[str, Any] = {
        "stage": "grpo",
        "base_model": trainer.model_name,
        "base_hash": state.base_hash,
        "quantize": config.quantize,
        "start_adapter": str(config.sft_adapter) if config.sft_adapter else None,
        "start_adapter_hash": trainer.start_hash,
        "dataset": config.dataset,
        "answer_types": list(trainer.answer_types),
        "questions": trainer.questions,
        "start_accuracy": rows[0].get("eval/start_accuracy"),
        "validated_on": validated_on,
        "validation": validations.summary(config.eval_group_size_for(validated_on)),
        "exported": choice.name,
        "reason": choice.reason,
        "steps_run": last_step,
        "commit": git_commit(),
        "seconds": state.seconds,
        "peak_memory_gb": peak_memory_gb(),
        "config": to_dict(config),
    }
    last = {name: tensor.detach().clone() for name, tensor in state.adapter.items()}
    found = {"last": (last_step, last)}
    if validations.best:
        found["best"] = validations.best.step, state.best

    def save(name: str, path: Path, keep_previous: bool) -> dict[str, object]:
        step, tensors = found[name]
        state.put_on_model(tensors)
        trainer.sampler.invalidate_weights()  # a recipe may sample from what is exported
        accuracy = rows[step - 1].get("eval/accuracy") if step else summary["start_accuracy"]
        of_step = summary | {"step": step, "accuracy": accuracy}
        if trainer.distributed.is_main:
            parts = trainer.policy, trainer.tokenizer, path, of_step
            save_adapter(*parts, keep_previous=keep_previous)
        return of_step

    for name in found:
        save(name, config.run_dir / KEPT_AS[name], keep_previous=False)
    if trainer.distributed.is_main:
        trainer.run.write_csv(rows)
        draw_curves(trainer)
    return save(choice.name, config.output, keep_previous=True)


def generate_text(trainer: Any, question: str) -> str:
    """Answer a question greedily with a `train_grpo.GRPOTrainer`, as text with its tags.

    Raises:
        TypeError: it is no text.
    """
    if not isinstance(question, str):
        raise TypeError(f"generate takes one question, as text, not {question!r:.60}")
    params = SamplingParams(trainer.config.max_new_tokens, temperature=0.0)
    prompt = trainer.render(Problem("", question, "", answer_type=trainer.answer_types[0]))
    [[completion]] = trainer.sampler.sample([prompt], 1, params, [trainer.config.seed])
    trainer.sampler.release()
    return trainer.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
