"""A whole GRPO step: seconds and peak memory of ours and of TRL's GRPOTrainer on the same work.

Same model, start adapter, prompts, group size, lengths and optimizer; each trainer in a process of
its own, in turns. Rewards are scripted, so that the share of groups with signal is known: half of
them in the headline cell, all of them in the second.

    python -m benchmarks.grpo_step --adapter weights/sft_lora --json docs/results/grpo_step.json
    python -m benchmarks.grpo_step --adapter weights/sft_lora --tune   # TRL's best settings here
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import harness, shapes
from benchmarks.arms import Work
from rlm.cli import terminal
from rlm.cli.main import run_main
from rlm.cli.options import check_values, flag
from rlm.model import hardware as machine

PARTS = ("sample", "score", "learn")
CELLS = {"half": "half of the groups with signal", "all": "all groups with signal"}


@dataclass
class TRLFlags:
    """TRL's settings, part of each benchmark that has it as an arm; the defaults are tuned."""

    trl_batch: int = flag(8, "TRL: rows in a forward pass", group="TRL", min=1)
    trl_checkpointing: bool = flag(False, "TRL: recompute activations", group="TRL")
    trl_continuous: bool = flag(False, "TRL: transformers' continuous batching", group="TRL")
    trl_autocast: bool = flag(False, "TRL: its bf16 option (mixed precision)", group="TRL")
    trl_malloc: bool = flag(False, "TRL: with our allocator settings", group="TRL")

    def trl_settings(self) -> dict[str, Any]:
        """As `trl_arm.Settings` takes them."""
        return {
            name.removeprefix("trl_"): value
            for name, value in asdict(self).items()
            if name.startswith("trl_")
        }


@dataclass
class TimedTRLFlags(TRLFlags):
    """With what changes TRL's pace alone, and so is no setting of an evidence grid."""

    trl_attn: str = flag("sdpa", "TRL: attention", group="TRL", choices=("sdpa", "eager"))


@dataclass
class GRPOStepConfig(TimedTRLFlags):
    model: str = flag(machine.EMBEDDED_MODEL, "hub id, directory, or random:SHAPE (shapes.py)")
    adapter: Path | None = flag(None, "adapter to start from (none: a new one)")
    dataset: str = flag("word-problems:1", "where the prompts come from")
    prompts: int = flag(8, "problems in a step", min=1)
    group_size: int = flag(8, "completions of each", min=2)
    max_new_tokens: int = flag(128, "longest completion", min=1)
    lora_r: int = flag(16, "rank of a new adapter", min=1)
    learning_rate: float = flag(1e-6, "so small that the policy stays what it is", min=0)
    steps: int = flag(3, "measured steps of a process, after one to warm up", min=1)
    rounds: int = flag(2, "processes of each arm and cell, in turns", min=1)
    cells: tuple[str, ...] = flag(tuple(CELLS), "groups with signal", choices=tuple(CELLS))
    tune: bool = flag(False, "instead: one step with each of TRL's settings")
    seed: int = flag(0, "of problems and sampling")
    json: Path | None = flag(None, "file for the report")

    def __post_init__(self) -> None:
        check_values(self)
        if self.prompts * self.group_size % self.trl_batch:
            raise ValueError("--trl-batch must divide the completions of a step")


def work_of(config: GRPOStepConfig, model: str, reward: str) -> Work:
    return Work(
        model=model,
        adapter=str(config.adapter) if config.adapter else None,
        dataset=config.dataset,
        prompts=config.prompts,
        group_size=config.group_size,
        max_new_tokens=config.max_new_tokens,
        steps=1 + config.steps,
        learning_rate=config.learning_rate,
        lora_r=config.lora_r,
        reward=reward,
        seed=config.seed,
    )


def run_ours(work: Work) -> dict[str, Any]:
    return harness.run_child("benchmarks.arms", "run_ours", asdict(work))


def run_trl(
    work: Work, settings: dict[str, Any], memory_limit_gb: float | None = None
) -> dict[str, Any]:
    payload = {"work": asdict(work), "settings": settings}
    return harness.run_child("benchmarks.trl_arm", "run_trl", payload, memory_limit_gb)


def measured(runs: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """The steps of all processes of an arm, without each one's first."""
    return [step for run in runs for step in run["steps"][1:]]


def step_cell(reward: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """One cell from what the processes of each arm handed back."""
    steps = {arm: measured(results) for arm, results in runs.items()}
    cell = harness.cell(
        CELLS[reward],
        "s/step",
        {arm: [step["total"] for step in rows] for arm, rows in steps.items()},
        more_is_better=False,
    )
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
    headers = ["cell", "arm", *(f"{part}, s" for part in PARTS), "mean length", "peak memory, GB"]
    harness.print_table(
        headers,
        [
            [
                cell["name"],
                arm,
                *(f"{figures['parts'][part]['median']:.2f}" for part in PARTS),
                f"{figures['length_mean']:.0f}",
                f"{cell['memory_gb'][arm]:.2f}",
            ]
            for cell in cells
            for arm, figures in cell["arms"].items()
        ],
    )


def compare(config: GRPOStepConfig, model: str) -> dict[str, Any]:
    """All cells; the report. Each process has its own warm-up step."""
    settings = config.trl_settings()
    cells = []
    for reward in config.cells:
        work = work_of(config, model, reward)
        arms = {
            harness.OURS: lambda _, work=work: run_ours(work),
            "trl": lambda _, work=work: run_trl(work, settings),
        }
        runs = harness.alternate(arms, config.rounds, warm_up=False)
        cells.append(step_cell(reward, runs))
        harness.show("GRPO step", cells[-1:])
    show_parts(cells)
    headline = cells[0]
    return harness.report(
        "grpo_step", headline, cells, headline["memory_gb"], trl_settings=settings
    )


def variants(config: GRPOStepConfig) -> list[dict[str, Any]]:
    """Settings of TRL to try: batches with and without checkpointing, then each switch alone."""
    given = config.trl_settings()
    rows = config.prompts * config.group_size
    tried = [
        given | {"batch": batch, "checkpointing": checkpointing}
        for checkpointing in (False, True)
        for batch in (8, 16, 64)
        if rows % batch == 0
    ]
    tried += [given | {"continuous": True}, given | {"malloc": True}, given | {"attn": "eager"}]
    if machine.pick_device().dtype.itemsize == 2:  # where 16 bits are slow, autocast only costs
        tried.append(given | {"autocast": True})
    return [variant for i, variant in enumerate(tried) if variant not in tried[:i]]


def tune(config: GRPOStepConfig, model: str) -> dict[str, Any]:
    """One measured step for each setting, the fastest last named; the report.

    A setting that needs more memory than is free fails, and is reported as that.
    """
    work = replace(work_of(config, model, config.cells[0]), steps=2)
    cuda = machine.pick_device().type == "cuda"  # whose driver maps far more than it uses
    limit = None if cuda else machine.available_memory("cpu") / 2**30
    rows = []
    for settings in variants(config):
        row = {"settings": settings}
        try:
            result = run_trl(work, settings, limit)
            (step,) = measured([result])
            row |= {**step, "peak_memory_gb": result["peak_memory_gb"]}
        except harness.ChildFailed as error:
            row["failed"] = str(error)
        rows.append(row)
        terminal.line(describe(row))
    done = [row for row in rows if "failed" not in row]
    if not done:
        raise RuntimeError("no setting of TRL ran to its end")
    terminal.line(f"fastest: {describe(min(done, key=lambda row: row['total']))}")
    return {"benchmark": "grpo_step --tune", "tried": rows, **harness.provenance("grpo_step")}


def describe(row: dict[str, Any]) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in row["settings"].items())
    if "failed" in row:
        return f"{settings}: failed ({row['failed'].splitlines()[-1]})"
    parts = ", ".join(f"{part} {row[part]:.1f}" for part in PARTS)
    return f"{settings}: {row['total']:.1f} s ({parts}), {row['peak_memory_gb']:.1f} GB"


def main(config: GRPOStepConfig) -> int:
    machine.prepare_process()
    with shapes.model_at(config.model) as model:
        work = tune if config.tune else compare
        harness.write_json(config.json, work(config, model))
    return 0


if __name__ == "__main__":
    run_main(main, GRPOStepConfig, description=__doc__)
