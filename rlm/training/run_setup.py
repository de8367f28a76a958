"""Sets up a GRPO run: its data, its number of steps, its first checkpoint and memory plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import replace
from typing import Any

from rlm.cli import command_of, terminal
from rlm.data import (
    Problem,
    answer_types,
    as_problems,
    drop_long_prompts,
    example_questions,
    load_problems,
)
from rlm.model import adapter_hash, check_output, context_window, set_gradient_checkpointing
from rlm.rewards import CorrectnessReward, Scorer
from rlm.runs import RunDirectory, check_resumable
from rlm.training.config import GRPOConfig
from rlm.training.finish import validate, validation_measure
from rlm.training.memory_plan import plan_memory
from rlm.training.metrics import announce_run


def load_data(config: GRPOConfig) -> tuple[list[Problem], list[Problem]]:
    """Load the problems to train on and to validate on.

    Raises:
        UsageError: they cannot be loaded, or the run to resume has no checkpoint.
    """
    if config.resume:
        check_resumable(config.run_dir)
    own = {"columns": config.columns, "rows": config.split}
    train = load_problems(config.dataset, max_samples=config.max_samples, seed=config.seed, **own)
    if not config.eval_samples:
        return train, []
    limit = config.eval_samples
    return train, load_problems(config.dataset, "validation", max_samples=limit, **own)


def prepare_run(
    trainer: Any, dataset: Iterable[Any], eval_dataset: Iterable[Any] | None
) -> tuple[list[Problem], list[Problem]]:
    """Read the data of a `train_grpo.GRPOTrainer`, settle its number of steps, and announce it.

    Raises:
        UsageError: no problem is there, or none that fits.
    """
    config = trainer.config
    trainer.start_hash = adapter_hash(config.sft_adapter) if config.sft_adapter else None
    problems = as_problems(dataset)
    is_empty = eval_dataset is None or (isinstance(eval_dataset, Sized) and not len(eval_dataset))
    eval_problems = [] if is_empty else as_problems(eval_dataset, "eval_dataset")
    problems = fit_prompts(trainer, problems)
    if eval_problems:
        eval_problems = fit_prompts(trainer, eval_problems, "validation problems")
    if isinstance(trainer.scorer, Scorer):
        trainer.scorer.check_columns(problems)
    trainer.answer_types = answer_types(problems)
    trainer.questions = example_questions(eval_problems or problems)
    steps = config.steps_for(len(problems))
    trainer.config = replace(config, steps=steps, num_epochs=None)  # recorded as a number
    announce_run(trainer, len(problems), len(eval_problems))
    questions = {problem.question for problem in problems}
    shared = sum(problem.question in questions for problem in eval_problems)
    if shared:
        terminal.line(
            f"warning: {shared} of {len(eval_problems)} validation problems are training problems "
            "too: their accuracy says nothing about new problems; remove them from one of the two"
        )
    is_strict = isinstance(getattr(trainer.scorer, "reward", None), CorrectnessReward)
    if is_strict and config.sft_adapter is None:
        terminal.line(
            "warning: training starts from a bare model, and only a right number in the right tags "
            "is rewarded, so it will likely learn nothing: teach the tags first ("
            f"{command_of('train_sft')} --model {trainer.model_name}), or reward them too "
            "(reward_fn=[FormatReward(), CorrectnessReward()])"
        )
    return problems, eval_problems


def fit_prompts(trainer: Any, problems: Sequence[Problem], what: str = "problems") -> list[Problem]:
    """Leave out the problems of a `train_grpo.GRPOTrainer` whose prompts are over
    --max-prompt-length, or leave no room for a completion, and say how many these are.

    Args:
        trainer: or what else has its `config`, `policy` and `render`.
        what: the problems are for.

    Raises:
        UsageError: that would be all.
    """
    config, window = trainer.config, context_window(trainer.policy)
    limits = {"--max-prompt-length": config.max_prompt_length}
    if window is not None:
        room = f"the model's window of {window} less --max-new-tokens {config.max_new_tokens}"
        limits[f"{room}; --max-prompt-length sets less"] = window - config.max_new_tokens
    known = {why: limit for why, limit in limits.items() if limit is not None}
    if not known:
        return list(problems)
    why = min(known, key=known.get)
    return drop_long_prompts(problems, trainer.render, known[why], why, what)


def open_run(trainer: Any) -> RunDirectory:
    """Open the run directory of a `train_grpo.GRPOTrainer`.

    Raises:
        UsageError: another process trains there, or no adapter can be written.
    """
    config, writes = trainer.config, trainer.distributed.is_main
    if writes:
        check_output(config.output)  # first: a run directory puts an old run away
    return RunDirectory(config.run_dir, resume=config.resume, writes=writes)


def set_memory_plan(
    trainer: Any, problems: Sequence[Problem], eval_problems: Sequence[Problem]
) -> None:
    """Plan the memory of a `train_grpo.GRPOTrainer`, the same in all processes, and follow it."""
    plan = plan_memory(trainer, [*problems, *eval_problems], len(eval_problems))
    trainer.memory_plan = trainer.distributed.broadcast(plan)
    set_gradient_checkpointing(trainer.policy, trainer.memory_plan.checkpointing)


def begin_run(
    trainer: Any, problems: Sequence[Problem], eval_problems: Sequence[Problem]
) -> tuple[int, dict[str, float]]:
    """Return the first step of a `train_grpo.GRPOTrainer`, and the validation before the first.

    Writes the first checkpoint or loads the newest, and plans the memory.
    """
    run, distributed = trainer.run, trainer.distributed
    trainer.state.validations.measure = validation_measure(trainer)
    first_step = trainer.state.begin(run, trainer.config, problems, eval_problems)
    set_memory_plan(trainer, problems, eval_problems)
    metrics = validate(trainer, eval_problems, 0) if first_step == 0 else {}
    run.raise_if_interrupted(distributed.any(run.interrupted))
    return first_step, metrics
