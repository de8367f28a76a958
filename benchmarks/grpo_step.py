"""A whole GRPO step: seconds and peak memory of ours and of TRL's GRPOTrainer on the same work.

Same model, start adapter, prompts, group size, lengths and optimizer; each trainer in a process of
its own, in turns. Rewards are scripted, so that the share of groups with signal is known: half of
them in the headline cell, all of them in the second.

    python -m benchmarks.grpo_step --adapter weights/sft_lora --json docs/results/grpo_step.json
    python -m benchmarks.grpo_step --adapter weights/sft_lora --tune   # TRL's best settings here
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

from benchmarks import harness, shapes
from benchmarks.trainers import ComparedConfig, run_work
from rlm.cli import flag, run_main, terminal
from rlm.model import available_memory, pick_device, prepare_process

PARTS = ("sample", "score", "learn")
CELLS = {"half": "half of the groups with signal", "all": "all groups with signal"}


@dataclass
class GRPOStepConfig(ComparedConfig):
    steps: int = flag(3, "measured steps of a process, after one to warm up", min=1)
    rounds: int = flag(2, "processes of each arm and cell, in turns", min=1)
    cells: tuple[str, ...] = flag(tuple(CELLS), "groups with signal", choices=tuple(CELLS))
    tune: bool = flag(False, "instead: one step with each of TRL's settings")


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
    harness.print_table(
        ["cell", "arm", *(f"{part}, s" for part in PARTS), "mean length", "peak memory, GB"],
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
        work = config.work(model, steps=1 + config.steps, reward=reward)
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


# --- TRL's best settings --------------------------------------------------------------------------


def variants(config: GRPOStepConfig) -> list[dict[str, Any]]:
    """Settings of TRL to try: batches with and without checkpointing, then each switch alone."""
    given = config.trl_settings()
    rows = config.batch_size * config.group_size
    tried = [
        given | {"batch": batch, "checkpointing": checkpointing}
        for checkpointing in (False, True)
        for batch in (8, 16, 64)
        if rows % batch == 0
    ]
    tried += [given | {"continuous": True}, given | {"malloc": True}, given | {"attn": "eager"}]
    if pick_device().dtype.itemsize == 2:  # where 16 bits are slow, autocast only costs
        tried.append(given | {"autocast": True})
    return [variant for i, variant in enumerate(tried) if variant not in tried[:i]]


def tune(config: GRPOStepConfig, model: str) -> dict[str, Any]:
    """One measured step for each setting, the fastest last named; the report.

    A setting that needs more memory than is free fails, and is reported as that.
    """
    cuda = pick_device().type == "cuda"  # whose driver maps far more than it uses
    limit = None if cuda else int(available_memory("cpu"))
    run = partial(run_work, config.work(model, steps=2, reward=config.cells[0]))
    rows = []
    for settings in variants(config):
        row = {"settings": settings}
        try:
            result = run(settings, limit)
            row |= {**measured([result])[0], "peak_memory_gb": result["peak_memory_gb"]}
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
    prepare_process()
    with shapes.model_at(config.model) as model:
        run = tune if config.tune else compare
        harness.write_json(config.json, run(config, model))
    return 0


if __name__ == "__main__":
    run_main(main, GRPOStepConfig, description=__doc__)
