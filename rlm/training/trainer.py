"""Supporting code for the training loop in train_grpo.py: components, data and runs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import psutil
import torch
from torch import Tensor

from rlm.cli import UsageError, command_of, required, terminal, to_dict
from rlm.data import (
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
from rlm.evaluation import Evaluation
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
    context_window,
    load_adapter,
    load_base,
    model_directory,
    new_adapter,
    parameter_count,
    peak_memory_gb,
    pick_device,
    release_memory,
    save_adapter,
    set_gradient_checkpointing,
)
from rlm.rewards import CorrectnessReward, Scorer, Scores, check_columns, is_built_in
from rlm.runs import (
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
from rlm.training.config import (
    DEFAULT_SFT_ADAPTER,
    GPU_DEFAULTS,
    USUAL_RATES,
    GRPOConfig,
    judge_learning_rate,
)
from rlm.training.distributed import Distributed
from rlm.training.memory_plan import MemoryPlan, plan_memory
from rlm.training.metrics import new_alerts, step_line, time_left, timer
from rlm.training.resolve import KEPT_AS, LARGE, LARGE_MODEL, follow_adapter
from rlm.training.state import Learner, MixedPrecisionAdapter, TrainingState
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
    from rlm.training.sft_config import SFTConfig

T = TypeVar("T")
P = ParamSpec("P")
LARGE_RATE = 1e-4  # for a large model, this learning rate and higher ones are reported


class StepScorer(Protocol):
    """A callable that scores groups of completions: a `rlm.rewards.Scorer` or a recipe's scorer."""

    def __call__(
        self,
        problems: Sequence[Problem],
        groups: Sequence[Sequence[str]],
        truncated: Sequence[Sequence[bool]] | None = None,
        token_ids: Sequence[Sequence[list[int]]] | None = None,
    ) -> Scores: ...


class Trainer(Protocol):
    """The attributes of a `GRPOTrainer` that this package reads."""

    config: GRPOConfig
    tokenizer: PreTrainedTokenizerBase
    policy: PeftModel
    weights: Learner
    sampler: RolloutSampler
    scorer: StepScorer
    format: Format
    state: TrainingState
    distributed: Distributed

    def render(self, problem: Problem) -> list[int]: ...

    def evaluate(
        self, problems: Sequence[Problem], k: int, advance: Callable[[], None]
    ) -> Evaluation: ...

    def validation_scores(
        self, problems: Sequence[Problem], k: int, advance: Callable[[], None]
    ) -> Mapping[str, ProblemScores]: ...


# --- components of a trainer ----------------------------------------------------------------------


def check_arguments(model_name: object, config: object) -> None:
    """Raise a TypeError if `model_name` is a loaded model or `config` is another library's."""
    if not isinstance(model_name, str | Path):
        kind = type(model_name).__name__
        raise TypeError(
            f"model_name is a {kind}: pass a hub id or a directory; the trainer loads the model "
            "itself, as trainer.model"
        )
    if not isinstance(config, GRPOConfig | None):
        kind = f"{type(config).__module__}.{type(config).__name__}"
        raise TypeError(f"config is a {kind}: pass an rlm.GRPOConfig")


def resolve_start(
    config: GRPOConfig, model: str, base_hash: str, tool: Tool | None, processes: int
) -> tuple[GRPOConfig, AdapterInfo, Tool | None]:
    """Complete the config for this base model and machine, and load the initial adapter's metadata.

    Values that `GRPOConfig.resolve` has set are not changed. A config made in Python may contain
    the default adapter, which is used only if it fits the base model, or `quantize="auto"`, which
    is resolved here. Options that differ from those of the adapter's training are printed.

    Returns:
        The completed config; the metadata of the initial adapter; and the tool of the run, which is
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
    elif adapter == DEFAULT_SFT_ADAPTER:
        if problem := adapter_mismatch(DEFAULT_SFT_ADAPTER, model, base_hash):
            terminal.line(f"training starts from a new adapter: {problem}")
            adapter = None
    elif adapter:
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
    # If SFT ran in this process, its trainer holds a gigabyte in a reference cycle.
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
        dtype=sampling_dtype(policy, config.dtype)[0],
        tool=tool,
    )


# --- data -----------------------------------------------------------------------------------------


def load_data(
    config: GRPOConfig | SFTConfig, **options: Any
) -> tuple[list[Problem], list[Problem]]:
    """Load the training and the validation problems; `options` are those of `load_problems`."""
    if config.resume:
        check_resumable(config.run_dir)
    load = partial(
        load_problems,
        required(config.dataset, "--dataset"),
        columns=config.columns,
        rows=config.split,
        **options,
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
    measure: str  # the score that selects the adapter to export: "accuracy" or "reward"
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def read(
        cls,
        trainer: Trainer,
        dataset: Iterable[Problem | Mapping[str, Any]],
        eval_dataset: Iterable[Problem | Mapping[str, Any]] | None,
    ) -> TrainingData:
        """Convert the datasets, and leave out problems that do not fit into the context window."""
        config, scorer = trainer.config, trainer.scorer
        problems, render = as_problems(dataset), cache(trainer.render)  # renders each prompt once
        if eval_dataset is None or (isinstance(eval_dataset, Sized) and not len(eval_dataset)):
            eval_problems = []
        else:
            eval_problems = as_problems(eval_dataset, "eval_dataset")
        announce_local_window(trainer.policy)
        room = context_window(trainer.policy), config.max_new_tokens
        problems = drop_long_prompts(problems, render, *room)
        eval_problems = drop_long_prompts(eval_problems, render, *room, "validation problems")
        longest = longest_prompts(render, [*problems, *eval_problems])
        warnings = []
        questions = {plain_question(problem.question) for problem in problems}
        if shared := sum(plain_question(p.question) in questions for p in eval_problems):
            warnings.append(
                f"{shared} of {len(eval_problems)} validation problems are training problems too: "
                "the accuracy on these problems does not measure how well new problems are solved; "
                "remove these problems from one of the two sets"
            )
        if isinstance(scorer, Scorer):
            check_columns(scorer.reward, problems)
            if other_forms := describe_other_forms(problems, trainer.format):
                warnings.append(other_forms)
            if isinstance(scorer.reward, CorrectnessReward) and config.sft_adapter is None:
                warnings.append(
                    "training starts without an SFT adapter, and only a right answer in the right "
                    "tags is rewarded, so the model will likely learn nothing: teach the tags "
                    f"first ({command_of('train_sft')} --model {config.model}), or reward the tags "
                    "too (in Python: reward_fn=[FormatReward(), CorrectnessReward()])"
                )
        kinds = answer_types(problems)
        is_own = isinstance(scorer, Scorer) and not is_built_in(scorer.reward)
        measure = "reward" if is_own or "open" in kinds else "accuracy"
        return cls(problems, eval_problems, longest, kinds, measure, warnings)

    def announce(self, trainer: Trainer) -> None:
        """Print an overview of the run, and warnings about its data and its learning rate."""
        config = trainer.config
        limit = f", or {config.max_minutes:g} minutes" if config.max_minutes else ""
        few = ""
        if config.group_size < 8:
            few = " (fewer than 8: the group's mean is noisy, and more groups have equal rewards)"
        problems = f"{config.batch_size} problem{'s' * (config.batch_size > 1)}"
        values = {option: getattr(config, option.name) for option in fields(config)}
        given = {"algorithm": config.algorithm, "max_new_tokens": config.max_new_tokens}
        usual = config.complete({o.name: o.default for o in values} | given)
        changed = {o.name: v for o, v in values.items() if v not in (o.default, usual[o.name])}
        trainable = sum(tensor.numel() for tensor in trainer.weights.master_weights.values())
        shown = {
            "model": f"{config.model} + {config.sft_adapter or 'a new adapter'}",
            "device": pick_device(config.dtype) if config.backend == "local" else "the server's",
            "data": f"{config.dataset or 'from Python'}: {len(self.problems)} problems, "
            f"{len(self.eval_problems)} to validate on",
            "trainable": f"{trainable:,} parameters",
            "sampler": trainer.sampler.description,
            "algorithm": f"{config.algorithm}: {config.formula}",
            "a step": f"{problems} × {config.group_size} completions{few}",
            "a completion": f"at most {config.max_new_tokens} tokens (--max-new-tokens)",
            "steps": f"{config.steps}{limit} (the first step's line says how long they take)",
            "signal": "share of groups whose rewards differ; the model learns only from these",
            "options": ", ".join(f"{name} {value}" for name, value in changed.items()),
        }
        if not config.plan:
            shown["run"] = f"{config.run_dir} (all options: config.json)"
            shown["watch it learn"] = f"rlm view {config.run_dir} --follow (in another terminal)"
        terminal.table("Stage 2: GRPO", shown)
        rate = config.learning_rate
        if problem := judge_learning_rate(rate, config.warmup_steps):
            terminal.line(f"warning: learning rate {problem[0]}: {problem[1]}; use {USUAL_RATES}")
        elif rate >= LARGE_RATE and parameter_count(str(config.model)) > LARGE_MODEL:
            terminal.line(
                f"warning: learning rate {rate:g} is usual for a model of 135M parameters; "
                f"{LARGE}, start with {GPU_DEFAULTS['learning_rate']:g}"
            )
        for warning in self.warnings:
            terminal.line(f"warning: {warning}")

    def plan_memory(self, trainer: Trainer) -> MemoryPlan:
        """Plan the memory of the run, and turn gradient checkpointing on if the plan needs it.

        The plan is the same in all processes.
        """
        plan = plan_memory(
            trainer.config,
            trainer.weights,
            trainer.sampler,
            self.longest_prompts,
            len(self.eval_problems),
        )
        plan = trainer.distributed.broadcast(plan)
        set_gradient_checkpointing(trainer.policy, plan.checkpointing)
        return plan


# --- one run --------------------------------------------------------------------------------------


def resume_if_restarted(config: GRPOConfig, distributed: Distributed) -> GRPOConfig:
    """Set `resume` if torchrun has restarted the processes (--max-restarts) of a run.

    torchrun repeats the command, which would start the run again from its first step. Checkpoints
    that are older than torchrun's start belong to an earlier run. That run is still in --run-dir if
    the first attempt ended while it loaded the model.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not distributed.any(restarts > 0):
        return config
    folders = (config.run_dir / "checkpoints").glob("step_*") if distributed.is_main else ()
    saved = distributed.broadcast(any(f.stat().st_mtime > launch_time() for f in folders))
    return replace(config, resume=config.resume or saved)


def launch_time() -> float:
    """Return the start time of torchrun, which is the first ancestor without its variables."""
    for ancestor in psutil.Process().parents():  # a script may be between torchrun and this process
        try:
            started = "TORCHELASTIC_RUN_ID" not in ancestor.environ()
        except psutil.AccessDenied:  # a process of another user, which torchrun did not start
            started = True
        if started:
            return ancestor.create_time()
    return 0.0


class TrainingRun:
    """One call of `GRPOTrainer.train`: its directory, memory plan, validations, logs and export.

    Attributes:
        first_step: 0, or the step at which a resumed run continues.
        start_metrics: the metrics of the validation before training.
        memory_plan: the memory of the run, and the size of its micro-batches.
    """

    def __init__(self, trainer: Trainer, data: TrainingData, directory: RunDirectory) -> None:
        """Write the first checkpoint or load the newest one, plan the memory, and validate.

        The validation before training is skipped if the run is resumed after its first step.
        """
        self.trainer, self.data, self.directory = trainer, data, directory
        config, state, distributed = trainer.config, trainer.state, trainer.distributed
        self.start_hash = adapter_hash(config.sft_adapter) if config.sft_adapter else None
        self.first_step = state.begin(directory, config, data.problems, data.eval_problems)
        if config.resume:  # `generate` may have loaded the initial adapter on a vLLM server
            trainer.sampler.invalidate_weights()
        self.steps_run = self.first_step  # including those before the run was resumed
        # The reason for stopping early, or "". If a run was killed after it stopped early, but
        # before the end of its export, the resumed run has this reason, and only exports.
        self._stopped = state.early_stopping_reason(self.first_step)
        self.steps = self.first_step if self._stopped else required(config.steps, "--steps")
        self.memory_plan = data.plan_memory(trainer)
        # Tokens in the largest of the micro-batches that were made last.
        self._largest = self.memory_plan.train_batch_tokens
        self._is_last = False  # whether the run ends after the current step
        self.start_metrics = self.validate(0) if self.first_step == 0 else {}
        directory.raise_if_interrupted(distributed.any(directory.interrupted))

    def validate(self, step: int) -> dict[str, float]:
        """Validate the adapter after `step` steps, and keep a copy if it is the best so far.

        The processes of a run share the problems.

        Returns:
            The metrics of the validation; empty if there are no validation problems.
        """
        trainer, problems = self.trainer, self.data.eval_problems
        state, distributed = trainer.state, trainer.distributed
        if not problems:
            return {}
        mine, k = distributed.shard(problems), trainer.config.eval_group_size_for(len(problems))
        seconds: dict[str, float] = {}
        shown = terminal.progress("evaluating", k * len(mine))
        with timer(seconds, "time/evaluate"), shown as advance:
            measured = trainer.validation_scores(mine, k, advance) if mine else {}
        trainer.sampler.release()
        metrics: dict[str, float] = {}
        scores: dict[str, ProblemScores] = {}
        start = "" if step else "start_"
        # A process may have no problems, or only open ones, which have no accuracy.
        for name in dict.fromkeys(distributed.gather(list(measured))):
            scores[name] = distributed.gather(measured.get(name, [None] * len(mine)))
            found = Validation(step, scores[name]).summary(name)
            metrics[f"eval/{start}{name}"] = found["mean"]
            metrics |= {f"eval/{start}{name}_{end}": found[end] for end in ("low", "high")}
        if (measure := state.validations.measure) in scores:
            if state.validations.add(step, scores[measure], scores.get("accuracy")):
                state.keep_best()
            if step == 0:
                mean = describe_mean(metrics[f"eval/start_{measure}"], measure)
                samples = sample_count(k, len(problems))
                terminal.line(f"start: validation {measure} {mean}, {samples}")
        return metrics | seconds

    def validate_if_due(self, step: int) -> dict[str, float]:
        """Decide whether the run ends after a step, and validate if a validation is due.

        The decision is the same in all processes.

        Returns:
            The metrics of the validation; empty if the adapter is not validated.
        """
        config, minutes = self.trainer.config, self.trainer.state.minutes
        out_of_time = config.max_minutes is not None and minutes >= config.max_minutes
        self._is_last = self.trainer.distributed.broadcast(out_of_time) or step + 1 == config.steps
        return self.validate(step + 1) if self._is_due(config.eval_every, step) else {}

    def _is_due(self, every: int, step: int) -> bool:
        """Return whether an action is due after a step: every `every` steps and at the end."""
        return self._is_last or (every > 0 and (step + 1) % every == 0)

    def micro_batches(self, rollouts: Sequence[Rollout]) -> list[MicroBatch]:
        """Split rollouts into micro-batches that fit into memory."""
        made = make_micro_batches(
            rollouts,
            max_rows=self.trainer.config.train_batch_size or len(rollouts),
            max_tokens=self.memory_plan.train_batch_tokens,
            device=next(iter(self.trainer.state.adapter.values())).device.type,
        )
        self._largest = max((micro.input_ids.numel() for micro in made), default=0)
        return made

    def repeat_if_out_of_memory(self, compute: Callable[P, T], *args: P.args, **kw: P.kwargs) -> T:
        """Call `compute`, and repeat the call if GPU memory runs out.

        The call is repeated at most once per run. From then on, the run uses half the micro-batch
        and gradient checkpointing.

        Args:
            compute: calls `micro_batches`, so a repeated call uses the smaller size. It must
                neither apply a gradient nor exchange anything with other processes.
        """
        try:
            return compute(*args, **kw)
        except torch.OutOfMemoryError:
            if self.memory_plan.halved:
                raise
        # This is outside of `except`, because the exception keeps tensors alive.
        weights = self.trainer.weights
        for tensor in (*weights.model_weights.values(), *weights.master_weights.values()):
            tensor.grad = None
        release_memory()
        self.memory_plan = self.memory_plan.halve(self._largest)
        set_gradient_checkpointing(self.trainer.policy, True)
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
        directory, config = self.directory, self.trainer.config
        step, every = metrics["step"], config.eval_every
        directory.log(metrics)
        if directory.writes:
            rows = directory.metrics()
            left = time_left(rows, config, self.trainer.state.minutes)
            terminal.line(step_line(metrics, self.steps, left))
            for warning in new_alerts(rows):
                terminal.line(f"warning: {warning}")
            validated = metrics.keys() & {"eval/accuracy", "eval/reward"}
            if validated and step + 1 < self.steps:
                self._draw_curves(rows)
        shown = step in (0, self.steps - 1) or (every > 0 and (step + 1) % every == 0)
        directory.log_samples(
            [
                {
                    "step": step,
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
        return {"tool_calls": [tool_spans(self.trainer.tokenizer, c) for c in group.completions]}

    def _draw_curves(self, rows: Sequence[Mapping[str, float]]) -> None:
        config, path = self.trainer.config, self.directory.path / "curves.png"
        with writing(path):
            title = f"GRPO of {config.model} on {config.dataset}, {len(rows)} steps"
            learning_curves(rows, path, title)

    def save_or_stop(self, step: int) -> bool:
        """Save a checkpoint if one is due, and return whether the run ends at this step."""
        trainer, self.steps_run = self.trainer, step + 1
        if self._is_due(trainer.config.eval_every, step):
            self._stopped = trainer.state.early_stopping_reason(step + 1)
        # This is checked here, because a signal may arrive during the validation.
        interrupted = trainer.distributed.any(self.directory.interrupted)
        if self._is_due(trainer.config.save_every, step) or self._stopped or interrupted:
            trainer.state.save(self.directory, step + 1)
        if self._is_last or self._stopped:
            return True
        self.directory.raise_if_interrupted(interrupted)
        return False

    def export(self) -> dict[str, Any]:
        """Export the adapter selected by `choose_export`, and return the contents of run.json.

        The best adapter and the last adapter are also saved in --run-dir.
        """
        trainer, state = self.trainer, self.trainer.state
        rows = trainer.distributed.broadcast(self.directory.metrics())
        summary = self._summary(rows)
        # The validation accuracy after each step; None: not measured. A damaged log may lack steps.
        accuracies = {row["step"] + 1: row.get("eval/accuracy") for row in rows}
        accuracies[0] = summary["start_accuracy"]
        last = {name: tensor.detach().clone() for name, tensor in state.adapter.items()}
        found: dict[str, tuple[int, Mapping[str, Tensor]]] = {"last": (self.steps_run, last)}
        if state.validations.best:
            found["best"] = state.validations.best.step, state.best

        def save(name: str, path: Path, keep_previous: bool) -> dict[str, Any]:
            step, tensors = found[name]
            state.put_on_model(tensors)
            trainer.sampler.invalidate_weights()  # a recipe may sample with the exported adapter
            of_step = summary | {"step": step, "accuracy": accuracies.get(step)}
            if trainer.distributed.is_main:
                save_adapter(
                    trainer.policy, trainer.tokenizer, path, of_step, keep_previous=keep_previous
                )
            return of_step

        for name in found:
            save(name, trainer.config.run_dir / KEPT_AS[name], keep_previous=False)
        if trainer.distributed.is_main and rows:
            self.directory.write_csv(rows)
            self._draw_curves(rows)
        return save(summary["exported"], trainer.config.output, keep_previous=True)

    def _summary(self, rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Return the contents of run.json that are the same for the best and the last adapter."""
        config, state, data = self.trainer.config, self.trainer.state, self.data
        validated_on = len(data.eval_problems)
        exported, reason = choose_export(state.validations, self.steps_run, self._stopped)
        first = next((row for row in rows if row["step"] == 0), {})
        return {
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
            "start_accuracy": first.get("eval/start_accuracy"),
            "validated_on": validated_on,
            "validation": state.validations.summary(config.eval_group_size_for(validated_on)),
            "exported": exported,
            "reason": reason,
            "steps_run": self.steps_run,
            "commit": git_commit(),
            "seconds": state.seconds,
            "peak_memory_gb": peak_memory_gb(),
            "config": to_dict(config),
        }
