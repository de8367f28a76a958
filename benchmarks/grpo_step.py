"""A whole GRPO step: seconds and peak memory of ours and of TRL's GRPOTrainer on the same work.

Same model, start adapter, prompts, group size, lengths and optimizer; each trainer in a process of
its own, in turns. Rewards are scripted, so that the share of groups with signal is known: half of
them in the headline cell, all of them in the second.

    python -m benchmarks.grpo_step --adapter weights/sft_lora --json docs/results/grpo_step.json
    python -m benchmarks.grpo_step --scaling --batch-size 4     # ours alone, as a step grows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import harness, shapes
from benchmarks.scaling import measure_growth
from benchmarks.trainers import TRLFlags, Work, run_work
from rlm.cli import flag, run_main
from rlm.evaluation import show_table
from rlm.model import prepare_process

PARTS = ("sample", "score", "learn")
CELLS = {"half": "half of the groups with signal", "all": "all groups with signal"}


@dataclass
class GRPOStepConfig(TRLFlags, harness.BenchmarkConfig):
    adapter: Path | None = flag(None, "adapter to start from (none: a new one)")
    batch_size: int = flag(8, "problems in a step", aliases=("--prompts",), min=1)
    group_size: int = flag(8, "completions of each", min=2)
    max_new_tokens: int = flag(128, "longest completion", min=1)
    lora_r: int = flag(16, "rank of a new adapter", min=1)
    learning_rate: float = flag(1e-6, "of AdamW, constant", min=0)
    trl_attn: str = flag("sdpa", "TRL: attention", group="TRL", choices=("sdpa", "eager"))
    steps: int = flag(3, "measured steps of a process, after one to warm up", min=1)
    rounds: int = flag(2, "processes of each arm and cell, in turns", min=1)
    cells: tuple[str, ...] = flag(tuple(CELLS), "groups with signal", choices=tuple(CELLS))
    scaling: bool = flag(False, "instead: ours, as group size, length and model size grow")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_trl_batch(self.batch_size * self.group_size)

    def work(self, model: str, reward: str, **more: Any) -> Work:
        """
        Args:
            model: a directory where `self.model` asks for random weights.
            more: further fields of `Work`.
        """
        names = ("dataset", "batch_size", "group_size", "max_new_tokens", "learning_rate")
        same = {name: getattr(self, name) for name in (*names, "lora_r", "seed")}
        adapter = str(self.adapter) if self.adapter else None
        return Work(model, adapter, steps=1 + self.steps, reward=reward, **same, **more)


def step_cell(reward: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """One cell from what the processes of each arm handed back, without each one's first step."""
    steps = {arm: [s for run in found for s in run["steps"][1:]] for arm, found in runs.items()}
    totals = {arm: [step["total"] for step in rows] for arm, rows in steps.items()}
    cell = harness.cell(CELLS[reward], "s/step", totals, more_is_better=False)
    for arm, rows in steps.items():
        cell["arms"][arm] |= {
            "parts": {part: harness.summary([step[part] for step in rows]) for part in PARTS},
            "length_mean": mean(step["length_mean"] for step in rows),
            "signal": mean(step["signal"] for step in rows),
            # From one call of the reward to the next: the same clock for both, from outside.
            "between_calls": harness.summary([s for r in runs[arm] for s in r["between_calls"]]),
            "peak_memory_gb": harness.summary([r["peak_memory_gb"] for r in runs[arm]]),
        }
    cell["signal"] = cell["arms"][harness.OURS]["signal"]
    cell["memory_gb"] = {
        arm: figures["peak_memory_gb"]["median"] for arm, figures in cell["arms"].items()
    }
    cell["note"] = f"{cell['signal']:.0%} of the groups with signal"
    return cell


def show_parts(cells: Sequence[dict[str, Any]]) -> None:
    rows = {}
    for cell in cells:
        for arm, figures in cell["arms"].items():
            row = {f"{p}, s": f"{figures['parts'][p]['median']:.2f}" for p in PARTS}
            row["mean length"] = f"{figures['length_mean']:.0f}"
            row["peak memory, GB"] = f"{cell['memory_gb'][arm]:.2f}"
            rows[f"{cell['name']}, {arm}"] = row
    show_table("", rows, "cell, arm")


def compare(config: GRPOStepConfig, model: str) -> dict[str, Any]:
    """All cells; the report. Each process has its own warm-up step."""
    settings = config.trl_settings()
    cells = []
    for reward in config.cells:
        work = config.work(model, reward)
        arms = {
            harness.OURS: lambda _, work=work: run_work(work),
            "trl": lambda _, work=work: run_work(work, settings),
        }
        runs = harness.alternate(arms, config.rounds, warm_up=False)
        cells.append(step_cell(reward, runs))
        harness.show("GRPO step", cells[-1:])
    show_parts(cells)
    return harness.report(
        "grpo_step", cells[0], cells, cells[0]["memory_gb"], trl_settings=settings
    )


def main(config: GRPOStepConfig) -> int:
    prepare_process()
    if config.scaling:
        found = measure_growth(config.work(config.model, "all", ignore_ends=True))
    else:
        with shapes.model_at(config.model) as model:
            found = compare(config, model)
    harness.write_report(config.json, found)
    return 0


if __name__ == "__main__":
    run_main(main, GRPOStepConfig, description=__doc__)
