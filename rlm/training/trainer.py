"""Supporting code for the training loop in train_grpo.py: components, data, validation, runs.

`TrainingRun` represents one call of `GRPOTrainer.train`; it manages the run directory, the memory
plan, the validations, the logs and the export. `Validator` samples as training does, for validation
and for --doctor.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from rlm.cli import UsageError, command_of, required, terminal, to_dict
from rlm.data import (
    FORMATS,
    Format,
    Problem,
    answer_types,
    as_problems,
    describe_other_forms,
    drop_long_prompts,
    example_questions,
    load_problems,
    longest_prompts,
    plain_question,
    stop_token_ids,
)
from rlm.evaluation import Evaluation, evaluate
from rlm.model import (
    HOW_TO_TRAIN_SFT,
    AdapterInfo,
    Device,
    adapter_hash,
    adapter_mismatch,
    adapter_without_base,
    announce_local_window,
    check_adapter,
    check_base,
    check_output,
    context_window,
    load_adapter,
    load_base,
    model_directory,
    new_adapter,
    peak_memory_gb,
    pick_device,
    release_memory,
    save_adapter,
    set_gradient_checkpointing,
)
from rlm.rewards import CorrectnessReward, Scorer, Scores, check_columns, is_built_in
from rlm.runs import (
    Checkpoints,
    RunDirectory,
    check_resumable,
    git_commit,
    learning_curves,
    writing,
)
from rlm.sampling import Sampler, sampling_dtype, tool_spans
from rlm.tools import Tool, as_tool, load_tool
from rlm.training.advantages import Group
from rlm.training.batches import MicroBatch, Rollout, make_micro_batches
from rlm.training.config import DEFAULT_SFT_ADAPTER, GRPOConfig
from rlm.training.distributed import Distributed
from rlm.training.memory_plan import plan_memory
from rlm.training.metrics import announce_run, new_alerts, step_line, time_left, timer
from rlm.training.resolve import KEPT_AS, follow_adapter
from rlm.training.state import Learner, MixedPrecisionAdapter, StepControl, TrainingState
from rlm.training.validation import (
    ProblemScores,
    Validation,
    choose_export,
    describe_mean,
    sample_count,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

    from rlm.grading import AnswerType
    from rlm.sampling import RolloutSampler

T = TypeVar("T")
P = ParamSpec("P")
Render = Callable[[Problem], list[int]]  # renders the prompt of a problem as token ids
# (problems, k, callback) → the mean score of each problem over k completions, for "accuracy" or
# "reward". The callback is called after each completion.
ScoreProblems = Callable[[Sequence[Problem], int, Callable[[], None]], Mapping[str, ProblemScores]]


class StepScorer(Protocol):
    """Scores all completions of a step; `rlm.rewards.Scorer`, or a scorer defined by a recipe."""

    def __call__(
        self,
        problems: Sequence[Problem],
        groups: Sequence[Sequence[str]],
        truncated: Sequence[Sequence[bool]] | None = None,
        token_ids: Sequence[Sequence[list[int]]] | None = None,
    ) -> Scores: ...


# --- components of a trainer ----------------------------------------------------------------------


def check_arguments(model_name: object, config: object) -> None:
    """Check the types of the arguments `model_name` and `config` before anything is loaded.

    Raises:
        TypeError: `model_name` is a loaded model, or `config` belongs to another library.
    """
    if not isinstance(model_name, str | Path):
        kind = type(model_name).__name__
        raise TypeError(
            f"model_name is a {kind}: pass a hub id or a directory; the trainer loads the model "
            "itself, as trainer.model"
        )
    if not isinstance(config, GRPOConfig | None):
        kind = f"{type(config).__module__}.{type(config).__name__}"
        raise TypeError(f"config is a {kind}: pass a rlm.GRPOConfig")


def resolve_start(
    config: GRPOConfig, model: str, base_hash: str, tool: Tool | None, processes: int
) -> tuple[GRPOConfig, AdapterInfo, Tool | None]:
    """Complete the config for this base model and machine, and load the start adapter's metadata.

    Each change to the config is printed. Values that `GRPOConfig.resolve` has set are not changed.
    A config made in Python may contain the default adapter, which is used only if it fits the base
    model, or `quantize="auto"`, which is resolved here.

    Returns:
        The completed config; the metadata of the start adapter; and the tool of the run, which is
        `tool` or the tool named by --tool.
    """
    if tool is None:
        tool = load_tool(config.tool)
    else:
        tool = as_tool(tool)
        config = replace(config, tool=tool.name)
    if config.batch_size < processes:
        too_small = f"--batch-size {config.batch_size} is too small"
        raise UsageError(f"{too_small}: each of the {processes} processes needs a problem")
    if config.sampler == "vllm" and not config.server_urls:
        from rlm.training.run_servers import split_command

        split_command(config.vllm_command)  # before loading the model, which may take minutes
    adapter = config.sft_adapter
    if config.backend == "tinker":
        if processes > 1:
            raise UsageError("--backend tinker computes on its server: start only one process here")
        adapter = None  # this can only be the default adapter: the config rejects all others
    elif adapter is not None and adapter == DEFAULT_SFT_ADAPTER:
        if problem := adapter_mismatch(adapter, model, base_hash):
            terminal.line(f"starts from a new adapter: {problem}")
            adapter = None
    elif adapter is not None:
        check_adapter(adapter, HOW_TO_TRAIN_SFT)
        check_base(adapter, model, base_hash)
    start = AdapterInfo.load(adapter) if adapter else None
    asked = replace(config, model=model, sft_adapter=adapter)
    config = follow_adapter(asked, start)
    if start is None:
        return config, AdapterInfo(Path()), tool
    for name in ("quantize", "tool"):
        then, now = getattr(start, name), getattr(config, name)
        if then != now:
            terminal.line(f"{adapter} was trained with --{name} {then}, now --{name} {now}")
    if asked.system_prompt not in (None, start.system_prompt):
        terminal.line(f"{adapter} was trained with a system prompt other than --system-prompt")
    return config, start, tool


def load_policy(config: GRPOConfig, model: str, device: Device | None) -> PeftModel:
    """Load the base model with the trainable adapter, in eval mode.

    With --backend tinker no weights are loaded, because the server has the base model.
    """
    if config.backend == "tinker":
        return adapter_without_base(model, r=config.lora_r, alpha=config.lora_alpha)
    # If SFT ran in this process, its trainer is a reference cycle that contains a gigabyte.
    gc.collect()
    release_memory()
    device = device or pick_device(config.dtype)
    base = load_base(model, device, quantize=config.quantize, attn="auto")
    if config.sft_adapter:
        return load_adapter(base, config.sft_adapter, trainable=True)
    torch.manual_seed(config.seed)  # seeds the random matrices of a new adapter
    return new_adapter(base, r=config.lora_r, alpha=config.lora_alpha).eval()


def make_engine(
    policy: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    config: GRPOConfig,
    distributed: Distributed,
    tool: Tool | None = None,
) -> tuple[Learner, RolloutSampler]:
    """Make the learner and the sampler of a run."""
    if config.backend == "tinker":
        from rlm.sampling import TinkerEngine

        engine = TinkerEngine(
            policy,
            model_directory(required(config.model, "--model")),
            stop_token_ids(tokenizer, policy.generation_config),
            rank=config.lora_r,
            seed=config.seed,
            max_grad_norm=config.max_grad_norm,
            url=config.server,
        )
        return engine, engine
    weights = MixedPrecisionAdapter(policy)
    if config.sampler == "vllm":
        from rlm.training.run_servers import make_vllm_sampler

        return weights, make_vllm_sampler(policy, tokenizer, config, distributed)
    return weights, Sampler(
        policy,
        tokenizer,
        max_num_seqs=config.max_num_seqs,
        merged={"merged": True, "unmerged": False}.get(config.sampler),
        dtype=sampling_dtype(policy, config.dtype),
        tool=tool,
    )


# --- data -----------------------------------------------------------------------------------------


def load_data(config: GRPOConfig) -> tuple[list[Problem], list[Problem]]:
    """Load the training problems and the validation problems."""
    if config.resume:
        check_resumable(config.run_dir)
    load = partial(
        load_problems,
        required(config.dataset, "--dataset"),
        columns=config.columns,
        rows=config.split,
    )
    train = load("train", max_samples=config.max_samples, seed=config.seed)
    limit = config.eval_samples
    return train, load("validation", max_samples=limit) if limit else []


@dataclass(frozen=True)
class TrainingData:
    """The problems of a run, whose prompts all fit into the model's context window."""

    problems: list[Problem]
    eval_problems: list[Problem]
    longest_prompts: list[list[int]]  # the token ids of the longest prompts
    answer_types: tuple[AnswerType, ...]  # types of the training problems, most frequent first
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def read(
        cls,
        config: GRPOConfig,
        policy: PeftModel,
        render: Render,
        scorer: StepScorer,
        dataset: Iterable[Problem | Mapping[str, Any]],
        eval_dataset: Iterable[Problem | Mapping[str, Any]] | None,
    ) -> TrainingData:
        """Load the problems, and leave out those that do not fit into the context window."""
        problems, render = as_problems(dataset), cache(render)  # renders each prompt only once
        if isinstance(eval_dataset, Sized) and not len(eval_dataset):
            eval_dataset = None
        eval_problems = []
        if eval_dataset is not None:
            eval_problems = as_problems(eval_dataset, "eval_dataset")
        announce_local_window(policy)
        room = context_window(policy), config.max_new_tokens
        problems = drop_long_prompts(problems, render, *room)
        if eval_problems:
            what = "validation problems"
            eval_problems = drop_long_prompts(eval_problems, render, *room, what)
        longest = longest_prompts(render, [*problems, *eval_problems])
        warnings = []
        questions = {plain_question(problem.question) for problem in problems}
        if shared := sum(plain_question(p.question) in questions for p in eval_problems):
            warnings.append(
                f"{shared} of {len(eval_problems)} validation problems are training problems too: "
                "the accuracy on these problems does not measure how well new problems are solved; "
                "remove these problems from one of the two sets"
            )
        tags = required(config.reasoning_format, "--reasoning-format")
        format = FORMATS[tags].with_prompt(config.system_prompt)
        if isinstance(scorer, Scorer):
            check_columns(scorer.reward, problems)
            if other_forms := describe_other_forms(problems, format):
                warnings.append(other_forms)
            if isinstance(scorer.reward, CorrectnessReward) and config.sft_adapter is None:
                warnings.append(
                    "training starts from a bare model, and only a right number in the right tags "
                    "is rewarded, so the model will likely learn nothing: teach the tags first "
                    f"({command_of('train_sft')} --model {config.model}), or reward the tags too "
                    "(in Python: reward_fn=[FormatReward(), CorrectnessReward()])"
                )
        kinds = answer_types(problems)
        return cls(problems, eval_problems, longest, kinds, warnings)

    def announce(self, config: GRPOConfig, weights: Learner, sampler: RolloutSampler) -> None:
        """Print an overview of the run, and the warnings about its data."""
        trainable = sum(tensor.numel() for tensor in weights.master_weights.values())
        counts = len(self.problems), len(self.eval_problems)
        announce_run(config, trainable, sampler.description, *counts)
        for warning in self.warnings:
            terminal.line(f"warning: {warning}")


# --- validation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Validator:
    """Samples completions in the same way as training does, and grades and scores them."""

    config: GRPOConfig
    sampler: RolloutSampler
    tokenizer: PreTrainedTokenizerBase
    format: Format
    scorer: StepScorer
    answer_types: Sequence[AnswerType]

    @property
    def measure(self) -> str:
        """The score that selects the adapter to export.

        The score is "reward" for a custom reward function or open answers, otherwise "accuracy".
        """
        is_own = isinstance(self.scorer, Scorer) and not is_built_in(self.scorer.reward)
        return "reward" if is_own or "open" in self.answer_types else "accuracy"

    def sample(
        self, problems: Sequence[Problem], k: int, advance: Callable[[], None]
    ) -> Evaluation:
        """Sample and grade k completions of each problem; call `advance` after each completion."""
        return evaluate(
            self.sampler,
            self.tokenizer,
            problems,
            self.format,
            max_new_tokens=self.config.max_new_tokens,
            temperature=self.config.temperature,
            k=k,
            seed=self.config.seed,
            on_finish=advance,
        )

    def scores(
        self, problems: Sequence[Problem], k: int, advance: Callable[[], None]
    ) -> dict[str, ProblemScores]:
        """Sample completions, and return the scores of each problem by the name of the score.

        The scores contain the strict accuracy, unless all answers are open, and the mean reward if
        the reward selects the adapter to export.
        """
        drawn = self.sample(problems, k, advance)
        scores: dict[str, ProblemScores] = {}
        if drawn.comparable:
            scores["accuracy"] = drawn.per_problem(strict=True)
        if self.measure == "reward":
            scores["reward"] = replace(drawn, rewards=drawn.score(self.scorer)).reward_per_problem()
        return scores


# --- one run --------------------------------------------------------------------------------------


def resume_if_restarted(config: GRPOConfig, distributed: Distributed) -> GRPOConfig:
    """Set `resume` if torchrun has restarted the processes (--max-restarts) of a run.

    torchrun repeats the command, which would start the run again from its first step.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    saved = distributed.broadcast(Checkpoints(config.run_dir / "checkpoints").steps())
    return replace(config, resume=config.resume or (bool(saved) and distributed.any(restarts > 0)))


def open_directory(config: GRPOConfig, distributed: Distributed) -> RunDirectory:
    """Open --run-dir, after checking --output.

    Inside the context of the directory, signals take effect only at the end of a step.
    """
    if distributed.is_main:
        check_output(config.output)  # must precede RunDirectory, which moves an old run away
    return RunDirectory(config.run_dir, resume=config.resume, writes=distributed.is_main)


class TrainingRun:
    """One call of `GRPOTrainer.train`: its directory, memory plan, validations, logs and export.

    Attributes:
        config: the config of the run, with its number of steps set.
        first_step: 0, or the step at which a resumed run continues.
        start_metrics: the metrics of the validation before training.
        memory_plan: the memory of the run, and the size of its micro-batches.
    """

    def __init__(
        self,
        config: GRPOConfig,
        data: TrainingData,
        state: TrainingState,
        sampler: RolloutSampler,
        tokenizer: PreTrainedTokenizerBase,
        directory: RunDirectory,
        score_problems: ScoreProblems,
    ) -> None:
        """Write the first checkpoint or load the newest one, plan the memory, and validate.

        The validation before training is skipped if the run is resumed after its first step.
        """
        self.config, self.data, self.state = config, data, state
        self.sampler, self.tokenizer, self.directory = sampler, tokenizer, directory
        self.policy, self.distributed = state.weights.policy, state.distributed
        self.start_hash = adapter_hash(config.sft_adapter) if config.sft_adapter else None
        self._score_problems = score_problems
        self.first_step = state.begin(directory, config, data.problems, data.eval_problems)
        self.steps_run = self.first_step  # including those before the run was resumed
        # The reason why the run stops because the accuracy fell, or "". A run that was killed after
        # such a stop, but before the end of its export, begins with a reason and only exports.
        self._stopped = state.brake(self.first_step)
        self.steps = self.first_step if self._stopped else required(config.steps, "--steps")
        plan = plan_memory(
            config, state.weights, sampler, data.longest_prompts, len(data.eval_problems)
        )
        self.memory_plan = self.distributed.broadcast(plan)
        self._largest = self.memory_plan.train_batch_tokens  # of the micro-batches made last
        set_gradient_checkpointing(self.policy, self.memory_plan.checkpointing)
        self.start_metrics = self.validate(0) if self.first_step == 0 else {}
        directory.raise_if_interrupted(self.distributed.any(directory.interrupted))

    def validate(self, step: int) -> dict[str, float]:
        """Validate the adapter after `step` steps, and keep a copy if it is the best so far.

        The processes of a run share the problems.

        Returns:
            The metrics of the validation; empty if there are no validation problems.
        """
        problems, validations = self.data.eval_problems, self.state.validations
        if not problems:
            return {}
        mine, k = self.distributed.shard(problems), self.config.eval_group_size_for(len(problems))
        seconds: dict[str, float] = {}
        shown = terminal.progress("evaluating", k * len(mine))
        with timer(seconds, "time/evaluate"), shown as advance:
            measured = self._score_problems(mine, k, advance) if mine else {}
        self.sampler.release()
        metrics: dict[str, float] = {}
        scores: dict[str, ProblemScores] = {}
        start = "" if step else "start_"
        for name in self.distributed.broadcast(list(measured)):  # never empty in the main process
            scores[name] = self.distributed.gather(measured.get(name, []))
            found = Validation(step, scores[name]).summary(name)
            metrics[f"eval/{start}{name}"] = found["mean"]
            metrics |= {f"eval/{start}{name}_{end}": found[end] for end in ("low", "high")}
        if (measure := validations.measure) in scores:
            self.state.keep_validation(step, scores[measure], scores.get("accuracy"))
            if step == 0:
                mean = describe_mean(metrics[f"eval/start_{measure}"], measure)
                samples = sample_count(k, len(problems))
                terminal.line(f"start: validation {measure} {mean}, {samples}")
        return metrics | seconds

    def micro_batches(self, rollouts: Sequence[Rollout]) -> list[MicroBatch]:
        """Split rollouts into micro-batches that fit into memory."""
        made = make_micro_batches(
            rollouts,
            max_rows=self.config.train_batch_size or len(rollouts),
            max_tokens=self.memory_plan.train_batch_tokens,
            device=next(iter(self.state.adapter.values())).device.type,
        )
        self._largest = max((micro.input_ids.numel() for micro in made), default=0)
        return made

    def repeat_if_out_of_memory(self, compute: Callable[P, T], *args: P.args, **kw: P.kwargs) -> T:
        """Call `compute`, and repeat the call if GPU memory runs out.

        The call is repeated at most once per run. From then on, the run uses half the micro-batch
        and gradient checkpointing.

        Args:
            compute: splits rollouts by `micro_batches`, and computes their gradient or their
                constant log-probabilities. It must neither apply the gradient nor exchange
                anything with other processes.
        """
        try:
            return compute(*args, **kw)
        except torch.OutOfMemoryError:
            if self.memory_plan.halved:
                raise
        # This is outside of `except`, because the exception keeps tensors alive.
        weights = self.state.weights
        for tensor in (*weights.model_weights.values(), *weights.master_weights.values()):
            tensor.grad = None
        release_memory()
        self.memory_plan = self.memory_plan.halve(self._largest)
        set_gradient_checkpointing(self.policy, True)
        terminal.line(
            "out of GPU memory: the computation is repeated in micro-batches of "
            f"{self.memory_plan.train_batch_tokens} tokens with gradient checkpointing; later "
            "updates use the same settings"
        )
        return compute(*args, **kw)

    def log_step(
        self, metrics: Mapping[str, float], groups: Sequence[Group], advantages: Tensor
    ) -> None:
        """Log the metrics to the terminal and metrics.jsonl, and all completions to samples.jsonl.

        A completion is printed at the first step, at the last of the planned steps and every
        `eval_every` steps.

        Args:
            advantages: the advantage of each rollout, (P, G).
        """
        directory, config = self.directory, self.config
        directory.log(metrics)
        if directory.writes:
            rows = directory.metrics()
            left = time_left(rows, config, self.state.minutes)
            terminal.line(step_line(metrics, self.steps, left))
            for warning in new_alerts(rows):
                terminal.line(f"warning: {warning}")
            validated = metrics.keys() & {"eval/accuracy", "eval/reward"}
            if validated and metrics["step"] + 1 < self.steps:
                self._draw_curves(rows)
        step, every = metrics["step"], config.eval_every
        shown = step in (0, self.steps - 1) or (every > 0 and (step + 1) % every == 0)
        directory.log_samples(
            [
                {
                    "step": metrics["step"],
                    "problem": group.problem.id,
                    "question": group.problem.question,
                    "answer": group.problem.answer,
                    "answer_type": group.problem.answer_type,
                    "completions": group.texts,
                    "truncated": [completion.truncated for completion in group.completions],
                    "verdicts": group.reasons,
                    **self._tool_calls(group),
                    "rewards": group.rewards,
                    "advantages": row,
                }
                for group, row in zip(groups, advantages.tolist(), strict=True)
            ],
            shown=shown,
        )
        if shown:
            first = groups[0]
            reward = "none" if first.rewards[0] is None else f"{first.rewards[0]:g}"
            verdict = f"reward {reward}, reference answer {first.problem.answer}"
            terminal.sample(first.problem.question, first.texts[0], verdict)

    def _tool_calls(self, group: Group) -> dict[str, object]:
        """Return the character ranges of each completion that a tool wrote, for samples.jsonl."""
        if not any(completion.tool_mask for completion in group.completions):
            return {}
        return {"tool_calls": [tool_spans(self.tokenizer, c) for c in group.completions]}

    def _draw_curves(self, rows: Sequence[Mapping[str, float]]) -> None:
        title = f"GRPO of {self.config.model} on {self.config.dataset}, {len(rows)} steps"
        path = self.directory.path / "curves.png"
        with writing(path):
            learning_curves(rows, path, title)

    def save_or_stop(self, step: int, control: StepControl) -> bool:
        """Save a checkpoint if one is due, and return whether the run ends at this step."""
        self.steps_run = step + 1
        if control.should_evaluate:
            self._stopped = self.state.brake(step + 1)
        # This is asked here, because a signal may arrive during the validation.
        interrupted = self.distributed.any(self.directory.interrupted)
        if control.should_save or self._stopped or interrupted:
            self.state.save(self.directory, step + 1)
        if control.should_stop or self._stopped:
            return True
        self.directory.raise_if_interrupted(interrupted)
        return False

    def export(self) -> dict[str, Any]:
        """Export the adapter selected by `choose_export`, and return the contents of run.json.

        The best adapter and the last adapter are also saved in --run-dir.
        """
        rows = self.distributed.broadcast(self.directory.metrics())
        metrics_after = {row["step"] + 1: row for row in rows}  # a damaged log may lack steps
        config, state, data = self.config, self.state, self.data
        validations, last_step = state.validations, self.steps_run
        validated_on = len(data.eval_problems)
        exported, reason = choose_export(validations, last_step, self._stopped)
        summary: dict[str, Any] = {
            "stage": "grpo",
            "base_model": config.model,
            "base_hash": state.base_hash or None,
            "quantize": config.quantize,
            "start_adapter": str(config.sft_adapter) if config.sft_adapter else None,
            "start_adapter_hash": self.start_hash,
            "inputs": state.origin["inputs"],
            "dataset": config.dataset,
            "answer_types": list(data.answer_types),
            "questions": example_questions(data.eval_problems or data.problems),
            "start_accuracy": metrics_after.get(1, {}).get("eval/start_accuracy"),
            "validated_on": validated_on,
            "validation": validations.summary(config.eval_group_size_for(validated_on)),
            "exported": exported,
            "reason": reason,
            "steps_run": last_step,
            "commit": git_commit(),
            "seconds": state.seconds,
            "peak_memory_gb": peak_memory_gb(),
            "config": to_dict(config),
        }
        last = {name: tensor.detach().clone() for name, tensor in state.adapter.items()}
        found: dict[str, tuple[int, Mapping[str, Tensor]]] = {"last": (last_step, last)}
        if validations.best:
            found["best"] = validations.best.step, state.best

        def save(name: str, path: Path, keep_previous: bool) -> dict[str, Any]:
            step, tensors = found[name]
            state.put_on_model(tensors)
            self.sampler.invalidate_weights()  # a recipe may sample with the exported adapter
            metrics = metrics_after.get(step, {})
            accuracy = metrics.get("eval/accuracy") if step else summary["start_accuracy"]
            of_step = summary | {"step": step, "accuracy": accuracy}
            if self.distributed.is_main:
                save_adapter(
                    self.policy, self.tokenizer, path, of_step, keep_previous=keep_previous
                )
            return of_step

        for name in found:
            save(name, config.run_dir / KEPT_AS[name], keep_previous=False)
        if self.distributed.is_main and rows:
            self.directory.write_csv(rows)
            self._draw_curves(rows)
        return save(exported, config.output, keep_previous=True)
