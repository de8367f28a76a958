"""What the trainers of a benchmark are asked to do, and ours as one of them; TRL's is trl_arm.py.

Each runs in a process of its own (`harness.run_child`), so that peak memory is its own.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness
from rlm.cli import flag
from rlm.data import FORMATS, Problem, load_problems
from rlm.model import prepare_process
from rlm.rewards import CorrectnessReward
from rlm.training import GRPOConfig, problems_for_step

FORMAT = FORMATS["deepseek"]
Reward = Callable[..., list[float]]


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


@dataclass(frozen=True)
class Work:
    """What both trainers are asked to do. JSON can hold it: it travels to a child process."""

    model: str
    adapter: str | None  # to start from; None: a new one of rank lora_r
    dataset: str = "word-problems:1"
    batch_size: int = 8
    group_size: int = 8
    max_new_tokens: int = 128
    steps: int = 4
    learning_rate: float = 1e-6
    lora_r: int = 16
    reward: str = "half"  # of the groups have signal, scripted; or "all" of them
    ignore_ends: bool = False  # every completion has max_new_tokens (ours only)
    seed: int = 0

    def pool(self) -> list[Problem]:
        return load_problems(self.dataset, "train", max_samples=2000, seed=self.seed)

    def problems(self, pool: Sequence[Problem]) -> list[Problem]:
        """The problems of all steps, in the order in which our trainer takes them."""
        return [
            problem
            for step in range(self.steps)
            for problem in problems_for_step(pool, step, self.batch_size, self.seed)
        ]


def run_work(work: Work, trl: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The work in a process of its own.

    Args:
        trl: settings of TRL's trainer; None: ours does it.
    """
    if trl is None:
        return harness.run_child("benchmarks.trainers", "run_ours", asdict(work))
    payload = {"work": asdict(work), "settings": dict(trl)}
    return harness.run_child("benchmarks.trl_arm", "run_trl", payload)


# --- rewards --------------------------------------------------------------------------------------


def strict_reward(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """The reward of training, as a plain function: TRL takes no other."""
    correct = CorrectnessReward()
    return [correct(text, gold) for text, gold in zip(completions, answer, strict=True)]


@dataclass
class ScriptedReward:
    """Gives 1 and 0 in turn in a group with signal, 0 in one without, whatever was said.

    So the share of groups with signal is the same in both arms. Both trainers call it exactly once
    a step, which makes it a second clock: from call to call is a whole step, whatever a trainer
    says of itself.
    """

    kind: str  # "half" or "all" of the groups have signal
    group_size: int
    calls: list[float] = field(default_factory=list)  # when
    signal: list[float] = field(default_factory=list)  # share of groups with a difference, by call

    def score(self, completions: Sequence[str], **_: Any) -> list[float]:
        size, every = self.group_size, {"half": 2, "all": 1}[self.kind]
        rewards = [
            float(row // size % every == 0 and row % size % 2 == 0)
            for row in range(len(completions))
        ]
        groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
        self.signal.append(sum(len(set(group)) > 1 for group in groups) / len(groups))
        self.calls.append(time.monotonic())
        return rewards

    def result(self, steps: list[dict[str, float]]) -> dict[str, Any]:
        """What an arm's process hands back.

        Args:
            steps: sample, score and learn in seconds and length_mean of each step.
        """
        for step, signal in zip(steps, self.signal, strict=True):
            step["signal"] = signal
            step["total"] = step["sample"] + step["score"] + step["learn"]
        between = [b - a for a, b in zip(self.calls, self.calls[1:], strict=False)]
        return {"steps": steps, "between_calls": between}


# --- ours -----------------------------------------------------------------------------------------


def run_ours(**work: Any) -> dict[str, Any]:
    """Train as `work` says; seconds of every step, of which the first is the warm-up."""
    from rlm import GRPOTrainer

    prepare_process()
    work = Work(**work)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            model=work.model,
            dataset=work.dataset,
            sft_adapter=Path(work.adapter) if work.adapter else None,
            steps=work.steps,
            batch_size=work.batch_size,
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
        reward = ScriptedReward(work.reward, work.group_size)
        trainer = GRPOTrainer(work.model, config, reward_fn=reward.score)
        if work.ignore_ends:
            trainer.sampler.stop_ids = frozenset()
        trainer.train(work.pool())
        rows = (config.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [
        {name: row[f"time/{name}"] for name in ("sample", "score", "learn")}
        | {"length_mean": row["completion/length_mean"]}
        for row in map(json.loads, rows)
    ]
    planned = trainer.memory_plan.peak / 2**30  # to stand beside the measured peak
    return reward.result(steps) | {"planned_memory_gb": planned}
