"""Measures the time and peak memory of a GRPO step in our trainer and in TRL's GRPOTrainer.

Both have the same model, initial adapter, prompts, group size, lengths and optimizer. They run in
turns, each in its own process. The rewards are scripted: they differ in half of the groups (the
headline case) or in all groups.

    python -m benchmarks.grpo_step --adapter weights/sft_lora --json docs/results/grpo_step.json
    python -m benchmarks.grpo_step --alone --group-size 16    # only our trainer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import harness
from rlm.cli import flag, run_main, to_dict
from rlm.evaluation import show_table
from rlm.model import prepare_process
from rlm.training import GRPOConfig

PARTS = ("sample", "score", "learn")
CELLS = {"half": "rewards differ in half of the groups", "all": "rewards differ in all groups"}


@dataclass
class GRPOStepConfig(harness.BenchmarkConfig):
    adapter: Path | None = flag(None, "adapter to start from (none: a new adapter)")
    batch_size: int = flag(8, "problems per step", min=1)
    group_size: int = flag(8, "completions per problem", min=2)
    max_new_tokens: int = flag(128, "maximum completion length in tokens", min=1)
    steps: int = flag(3, "measured steps per process, after one warmup step", min=1)
    rounds: int = flag(2, "processes of each trainer in each case, run in turns", min=1)
    alone: bool = flag(
        False, "measure only rlm; the rewards of all groups differ, and end tokens are ignored"
    )
    trl_batch: int = flag(8, "TRL: completions per forward pass", group="TRL", min=1)
    trl_autocast: bool = flag(False, "TRL: its bf16 option (mixed precision)", group="TRL")
    trl_malloc: bool = flag(False, "TRL: use rlm's allocator settings", group="TRL")
    trl_attn: str = flag(
        "sdpa", "TRL: attention implementation", group="TRL", choices=("sdpa", "eager")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size * self.group_size % self.trl_batch:
            raise ValueError(
                "--trl-batch must divide the number of completions per step "
                "(--batch-size x --group-size)"
            )

    def trl_settings(self) -> dict[str, Any]:
        """Return TRL's settings for `trl_arm`, without the prefix `trl_`."""
        names = ("batch", "autocast", "malloc", "attn")
        return {name: getattr(self, f"trl_{name}") for name in names}

    def training(self) -> GRPOConfig:
        """Return the config that both trainers run with."""
        return GRPOConfig(
            model=self.model,
            dataset=self.dataset,
            sft_adapter=self.adapter,
            steps=1 + self.steps,
            batch_size=self.batch_size,
            group_size=self.group_size,
            max_new_tokens=self.max_new_tokens,
            algorithm="grpo",
            learning_rate=1e-6,
            lr_schedule="constant",
            warmup_steps=0,
            eval_every=0,
            save_every=0,
            output=Path("adapter"),  # replaced by a scratch folder in each process
            seed=self.seed,
        )


def step_cell(reward: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Make a case of the report, without the first step of each process, which is the warmup."""
    steps = {arm: [s for run in found for s in run["steps"][1:]] for arm, found in runs.items()}
    totals = {arm: [step["total"] for step in rows] for arm, rows in steps.items()}
    cell = harness.cell(CELLS[reward], "s/step", totals, more_is_better=False)
    for arm, rows in steps.items():
        cell["arms"][arm] |= {
            "parts": {part: harness.summary([step[part] for step in rows]) for part in PARTS},
            "length_mean": mean(step["length_mean"] for step in rows),
            # The seconds between two calls of the reward do not depend on a trainer's own timing.
            "between_calls": harness.summary([s for r in runs[arm] for s in r["between_calls"]]),
            "peak_memory_gb": harness.summary([r["peak_memory_gb"] for r in runs[arm]]),
        }
    cell["planned_memory_gb"] = runs[harness.OURS][0]["planned_memory_gb"]
    cell["memory_gb"] = {
        arm: figures["peak_memory_gb"]["median"] for arm, figures in cell["arms"].items()
    }
    return cell


def finished(reward: str, arm: str, process: int, result: dict[str, Any]) -> str:
    """Return a line with the seconds of the measured steps of a process."""
    steps = [f"{step['total']:.1f}" for step in result["steps"][1:]]
    return f"{CELLS[reward]}, {arm}, process {process}: {', '.join(steps)} s/step"


def show_parts(cells: Sequence[dict[str, Any]]) -> None:
    rows = {}
    for cell in cells:
        for arm, figures in cell["arms"].items():
            row = {f"{p}, s": f"{figures['parts'][p]['median']:.2f}" for p in PARTS}
            row["mean length"] = f"{figures['length_mean']:.0f}"
            row["peak memory, GB"] = f"{cell['memory_gb'][arm]:.2f}"
            planned = f"{cell['planned_memory_gb']:.2f}"
            row["planned, GB"] = planned if arm == harness.OURS else ""
            rows[f"{cell['name']}, {arm}"] = row
    show_table("", rows, "case, trainer")


def main(config: GRPOStepConfig) -> int:
    """Run all cases. Each process begins with a warmup step."""
    prepare_process()
    settings, cells = config.trl_settings(), []
    for reward in ("all",) if config.alone else CELLS:
        work = {"config": to_dict(config.training()), "signal": reward}
        asked = {harness.OURS: ("trainers", "run_ours", work | {"ignore_ends": config.alone})}
        if not config.alone:
            asked["trl"] = ("trl_arm", "run_trl", work | {"settings": settings})
        arms = {
            name: lambda _, ask=ask: harness.run_child(f"benchmarks.{ask[0]}", *ask[1:])
            for name, ask in asked.items()
        }
        say = partial(finished, reward)
        found = harness.alternate(arms, config.rounds, warm_up=False, say=say)
        cells.append(step_cell(reward, found))
        harness.show("GRPO step", cells[-1:])
    show_parts(cells)
    memory = cells[0]["memory_gb"]
    found = harness.report("grpo_step", cells[0], cells, memory, trl_settings=settings)
    harness.write_report(config.json, found)
    return 0


if __name__ == "__main__":
    run_main(main, GRPOStepConfig, description=__doc__)
