"""What the trainers of a benchmark are asked to do, and ours as one of them; TRL's is trl_arm.py.

Each runs in a process of its own (`harness.run_child`), so that peak memory is its own. Times
exclude evaluation and whatever the benchmark itself does in between.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import harness
from rlm.cli import flag
from rlm.data import FORMATS, Problem, load_problems
from rlm.model import prepare_process, save_adapter
from rlm.rewards import CorrectnessReward
from rlm.training import GRPOConfig, problems_for_step

if TYPE_CHECKING:
    from train_grpo import GRPOTrainer

FORMAT = FORMATS["deepseek"]
Reward = Callable[..., list[float]]


# --- options --------------------------------------------------------------------------------------


@dataclass
class TRLFlags:
    """TRL's settings, part of each benchmark that has it as an arm; the defaults are tuned."""

    trl_batch: int = flag(8, "TRL: rows in a forward pass", group="TRL", min=1)
    trl_checkpointing: bool = flag(False, "TRL: recompute activations", group="TRL")
    trl_continuous: bool = flag(False, "TRL: transformers' continuous batching", group="TRL")
    trl_autocast: bool = flag(False, "TRL: its bf16 option (mixed precision)", group="TRL")
    trl_malloc: bool = flag(False, "TRL: with our allocator settings", group="TRL")

    def trl_settings(self) -> dict[str, Any]:
        """As `trl_arm` takes them: without the prefix."""
        return {
            name.removeprefix("trl_"): value
            for name, value in asdict(self).items()
            if name.startswith("trl_")
        }

    def check_trl_batch(self, rows: int) -> None:
        if rows % self.trl_batch:
            raise ValueError("--trl-batch must divide the completions of a step")


@dataclass
class StepConfig(harness.BenchmarkConfig):
    """What a benchmark of training steps takes."""

    adapter: Path | None = flag(None, "adapter to start from (none: a new one)")
    batch_size: int = flag(8, "problems in a step", aliases=("--prompts",), min=1)
    group_size: int = flag(8, "completions of each", min=2)
    max_new_tokens: int = flag(128, "longest completion", min=1)
    lora_r: int = flag(16, "rank of a new adapter", min=1)
    learning_rate: float = flag(1e-6, "of AdamW, constant", min=0)

    def work(self, model: str, **more: Any) -> Work:
        """
        Args:
            model: a directory where `model` asks for random weights.
            more: further fields of `Work`.
        """
        return Work(
            model=model,
            adapter=str(self.adapter) if self.adapter else None,
            dataset=self.dataset,
            prompts=self.batch_size,
            group_size=self.group_size,
            max_new_tokens=self.max_new_tokens,
            learning_rate=self.learning_rate,
            lora_r=self.lora_r,
            seed=self.seed,
            **more,
        )


@dataclass
class ComparedConfig(TRLFlags, StepConfig):
    """What a benchmark of ours beside TRL's trainer takes."""

    trl_attn: str = flag("sdpa", "TRL: attention", group="TRL", choices=("sdpa", "eager"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_trl_batch(self.batch_size * self.group_size)


# --- the work -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What both trainers are asked to do. JSON can hold it: it travels to a child process."""

    model: str
    adapter: str | None  # to start from; None: a new one of rank lora_r
    dataset: str = "word-problems:1"
    prompts: int = 8  # problems in a step
    group_size: int = 8
    max_new_tokens: int = 128
    steps: int = 4
    minutes: float | None = None  # stop at the step after this many
    learning_rate: float = 1e-6
    lora_r: int = 16
    reward: str = "half"  # "half" or "all" groups with signal, scripted; or "strict"
    ignore_ends: bool = False  # every completion has max_new_tokens (ours only)
    snapshots: str | None = None  # folder for the adapter after every snapshot_every steps
    snapshot_every: int = 1
    seed: int = 0

    def pool(self) -> list[Problem]:
        return load_problems(self.dataset, "train", max_samples=2000, seed=self.seed)

    def problems(self, pool: Sequence[Problem]) -> list[Problem]:
        """The problems of all steps, in the order in which our trainer takes them."""
        return [
            problem
            for step in range(self.steps)
            for problem in problems_for_step(pool, step, self.prompts, self.seed)
        ]


def run_work(
    work: Work, trl: Mapping[str, Any] | None = None, memory_limit: int | None = None
) -> dict[str, Any]:
    """The work in a process of its own.

    Args:
        trl: settings of TRL's trainer; None: ours does it.
        memory_limit: bytes beyond which allocations of TRL's process fail, before the system has
            to choose which process to kill.
    """
    if trl is None:
        return harness.run_child("benchmarks.trainers", "run_ours", asdict(work))
    payload = {"work": asdict(work), "settings": dict(trl), "memory_limit": memory_limit}
    return harness.run_child("benchmarks.trl_arm", "run_trl", payload)


def reward_function(kind: str, group_size: int) -> Reward:
    """A plain reward function, which both trainers call with all completions of a step.

    "half" and "all" do not look at the completions: alternately 1 and 0 in a group with signal, 0
    in a group without. So the share of groups with signal is the same in both arms.
    """
    if kind == "strict":
        correct = CorrectnessReward()

        def strict(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
            return [correct(text, gold) for text, gold in zip(completions, answer, strict=True)]

        return strict
    every = {"half": 2, "all": 1}[kind]

    def scripted(completions: Sequence[str], **_: Any) -> list[float]:
        return [
            float(row // group_size % every == 0 and row % group_size % 2 == 0)
            for row in range(len(completions))
        ]

    return scripted


@dataclass
class Recorder:
    """Stands around a reward function: both trainers call it exactly once a step, before learning.

    So it is where an adapter is saved as it was after the steps so far, and an independent clock:
    from call to call is a whole step, whatever a trainer says of itself.
    """

    work: Work
    save: Callable[[Path], None]
    calls: list[float] = field(default_factory=list)  # when
    saving: list[float] = field(default_factory=list)  # seconds spent on snapshots, by call
    signal: list[float] = field(default_factory=list)  # share of groups with a difference, by call
    saved: list[int] = field(default_factory=list)  # steps done at each snapshot

    def around(self, reward: Reward) -> Reward:
        def recorded(**columns: Any) -> list[float]:
            started = time.monotonic()
            if self.work.snapshots and len(self.calls) % self.work.snapshot_every == 0:
                self.snapshot(len(self.calls))
            self.saving.append(time.monotonic() - started)
            rewards = reward(**columns)
            size = self.work.group_size
            groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
            self.signal.append(sum(len(set(group)) > 1 for group in groups) / len(groups))
            self.calls.append(time.monotonic())
            return rewards

        return recorded

    def snapshot(self, done: int) -> None:
        """Save the adapter as it is after `done` steps, once."""
        if self.work.snapshots and done not in self.saved:
            self.save(snapshot_path(self.work.snapshots, done))
            self.saved.append(done)

    def result(self, steps: list[dict[str, float]]) -> dict[str, Any]:
        """What an arm's process hands back.

        Args:
            steps: sample, score and learn in seconds and length_mean of each step.
        """
        for step, saving, signal in zip(steps, self.saving, self.signal, strict=True):
            step["score"] -= saving
            step["signal"] = signal
            step["total"] = step["sample"] + step["score"] + step["learn"]
        between = [b - a for a, b in zip(self.calls, self.calls[1:], strict=False)]
        return {"steps": steps, "between_calls": between, "snapshots": self.saved}


def snapshot_path(folder: str, done: int) -> Path:
    return Path(folder) / f"step_{done:06d}"


# --- ours -----------------------------------------------------------------------------------------


def run_ours(**work: Any) -> dict[str, Any]:
    """Train as `work` says; seconds of every step (the first is the warm-up), snapshots."""
    from train_grpo import GRPOTrainer

    prepare_process()
    work = Work(**work)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            model=work.model,
            dataset=work.dataset,
            sft_adapter=Path(work.adapter) if work.adapter else None,
            steps=work.steps,
            max_minutes=work.minutes,
            batch_size=work.prompts,
            group_size=work.group_size,
            max_new_tokens=work.max_new_tokens,
            learning_rate=work.learning_rate,
            lr_schedule="constant",
            warmup_steps=0,
            lora_r=work.lora_r,
            lora_alpha=2 * work.lora_r,
            eval_every=0,
            save_every=0,
            sample_every=0,
            seed=work.seed,
            run_dir=Path(folder) / "run",
            output=Path(folder) / "adapter",
        )
        recorder = Recorder(work, lambda path: _save(trainer, path))
        reward = recorder.around(reward_function(work.reward, work.group_size))
        trainer = GRPOTrainer(work.model, config, reward_fn=reward)
        if work.ignore_ends:
            trainer.sampler.stop_ids = frozenset()
        trainer.train(work.pool())
        rows = (config.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        recorder.snapshot(len(rows))
    steps = [
        {name: row[f"time/{name}"] for name in ("sample", "score", "learn")}
        | {"length_mean": row["completion/length_mean"]}
        for row in map(json.loads, rows)
    ]
    return recorder.result(steps) | {"planned_memory_gb": planned_memory_gb(trainer)}


def planned_memory_gb(trainer: GRPOTrainer) -> float:
    """The memory plan of our trainer, to stand beside the measured peak."""
    return trainer.memory_plan.peak / 2**30


def _save(trainer: GRPOTrainer, path: Path) -> None:
    save_adapter(trainer.policy, trainer.tokenizer, path, {"base_hash": trainer.base_hash})
