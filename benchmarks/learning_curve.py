"""Does faster mean better sooner? Validation accuracy, ours and TRL's GRPOTrainer, as they train.

Both start from the same adapter and train with the same algorithm, optimizer, reward and problems
for the same minutes, one after the other, each in a process of its own. Their adapters are saved
on the way and evaluated afterwards by our evaluator (greedy, strict), so that evaluation takes no
training time. Accuracy is drawn against seconds and against samples: against samples the two
should be equal, because it is the same algorithm.

    python -m benchmarks.learning_curve --adapter weights/sft_lora \\
        --json docs/results/learning_curve.json --plot docs/results/learning_curve.png
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import harness, shapes
from benchmarks.trainers import FORMAT, ComparedConfig, Work, run_work, snapshot_path
from rlm.cli import flag, run_main, terminal
from rlm.data import load_problems
from rlm.evaluation import evaluate, paired_bootstrap, wilson_interval
from rlm.model import load_adapter, load_base, load_tokenizer, pick_device, prepare_process
from rlm.runs import BLUE, ORANGE, check_writable
from rlm.sampling import Sampler

COLOURS = {harness.OURS: BLUE, "trl": ORANGE}
Row = dict[str, Any]  # one evaluation: seconds, samples, correct, total, low, high, bits


@dataclass
class LearningCurveConfig(ComparedConfig):
    adapter: Path | None = flag(Path("weights/sft_lora"), "adapter to start from, or none")
    batch_size: int = flag(20, "problems in a step", aliases=("--prompts",), min=1)
    max_new_tokens: int = flag(96, "longest completion, in training and evaluation", min=1)
    learning_rate: float = flag(1e-4, "of AdamW, constant", min=0)
    minutes: float = flag(15.0, "training time of each arm", above=0)
    max_steps: int = flag(300, "and at most this many steps", min=1)
    eval_every: int = flag(1, "steps between evaluations", min=1)
    eval_samples: int = flag(200, "validation problems", min=1)
    work_dir: Path = flag(Path("runs/learning_curve"), "the adapters on the way (gigabytes)")
    plot: Path | None = flag(None, "file for the picture (PNG)")


# --- evaluation, in a process of its own --------------------------------------------------------


def evaluate_snapshots(work: dict[str, Any], steps: list[int], samples: int) -> dict[str, Any]:
    """Strict greedy verdict (1 or 0) on each validation problem, for each snapshot."""
    prepare_process()
    work = Work(**work)
    problems = load_problems(work.dataset, "validation", max_samples=samples)
    tokenizer = load_tokenizer(work.model)
    base = load_base(work.model, pick_device())
    bits = []
    for done in steps:
        policy = load_adapter(base, snapshot_path(work.snapshots, done), trainable=False)
        sampler = Sampler(policy, tokenizer)
        result = evaluate(sampler, tokenizer, problems, FORMAT, max_new_tokens=work.max_new_tokens)
        bits.append([int(score) for score in result.per_problem(strict=True)])
        base = policy.unload()
    return {"bits": bits}


def curve(work: Work, run: dict[str, Any], bits: Sequence[Sequence[int]]) -> list[Row]:
    """One row for each snapshot: how long training had taken, and how good it was."""
    seconds = [0.0, *accumulate(step["total"] for step in run["steps"])]
    rows = []
    for done, verdicts in zip(run["snapshots"], bits, strict=True):
        low, high = wilson_interval(sum(verdicts), len(verdicts))
        rows.append(
            {
                "step": done,
                "seconds": seconds[done],
                "samples": done * work.prompts * work.group_size,
                "correct": sum(verdicts),
                "total": len(verdicts),
                "accuracy": sum(verdicts) / len(verdicts),
                "low": low,
                "high": high,
                "bits": list(verdicts),
            }
        )
    return rows


# --- comparison ---------------------------------------------------------------------------------


def difference(trl: Sequence[Row], ours: Sequence[Row]) -> dict[str, float]:
    """Ours minus TRL in points, with its interval over problems; means of the given rows."""
    means = [
        [sum(bits) / len(rows) for bits in zip(*(row["bits"] for row in rows), strict=True)]
        for rows in (trl, ours)
    ]
    return asdict(paired_bootstrap(*means))


def compare(curves: dict[str, list[Row]]) -> dict[str, Any]:
    """At equal samples (the last that both have, and the mean of all such) and at the end."""
    ours, trl = curves[harness.OURS], curves["trl"]
    both = sorted({r["samples"] for r in ours} & {r["samples"] for r in trl})
    mine, theirs = ([r for r in rows if r["samples"] in both] for rows in (ours, trl))
    trained = [(a, b) for a, b in zip(mine, theirs, strict=True) if a["samples"]]
    result = {
        "last_equal_samples": {"samples": both[-1], **difference(theirs[-1:], mine[-1:])},
        "end": {
            "seconds": {"ours": ours[-1]["seconds"], "trl": trl[-1]["seconds"]},
            "samples": {"ours": ours[-1]["samples"], "trl": trl[-1]["samples"]},
            **difference(trl[-1:], ours[-1:]),
        },
    }
    if trained:  # without the start, which is one and the same adapter
        mean = difference([b for _, b in trained], [a for a, _ in trained])
        result["mean_equal_samples"] = {"evaluations": len(trained), **mean}
    return result


def draw(curves: dict[str, list[Row]], path: Path) -> None:
    """Accuracy against seconds and against samples, with 95 % Wilson bands."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, key, label in ((left, "seconds", "training seconds"), (right, "samples", "samples")):
        for arm, rows in curves.items():
            x = [row[key] for row in rows]
            low, high, middle = ([100 * r[n] for r in rows] for n in ("low", "high", "accuracy"))
            axes.fill_between(x, low, high, color=COLOURS[arm], alpha=0.15, linewidth=0)
            axes.plot(x, middle, color=COLOURS[arm], lw=1.5, marker="o", ms=3, label=arm)
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    left.set_ylabel("validation accuracy (greedy, strict), %")
    left.legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format="png")
    terminal.line(f"written: {path}")


def measure(config: LearningCurveConfig, model: str) -> dict[str, Any]:
    """Train both, evaluate both, compare; the report."""
    settings = config.trl_settings()
    works, runs, curves = {}, {}, {}
    for arm, trl in ((harness.OURS, None), ("trl", settings)):
        folder = (config.work_dir / arm).resolve()
        check_writable("--work-dir", folder)
        works[arm] = config.work(
            model,
            steps=config.max_steps,
            minutes=config.minutes,
            reward="strict",
            snapshots=str(folder),
            snapshot_every=config.eval_every,
        )
        runs[arm] = run_work(works[arm], trl)
        terminal.line(f"{arm}: {len(runs[arm]['steps'])} steps")
    for arm, run in runs.items():
        payload = {"work": asdict(works[arm]), "steps": run["snapshots"]}
        payload["samples"] = config.eval_samples
        child = harness.run_child("benchmarks.learning_curve", "evaluate_snapshots", payload)
        curves[arm] = curve(works[arm], run, child["bits"])
    compared = compare(curves)
    show(curves, compared)
    if config.plot:
        draw(curves, config.plot)
    seconds = {arm: [step["total"] for step in run["steps"]] for arm, run in runs.items()}
    cell = harness.cell(
        "seconds for the samples of a step",
        f"s/{config.batch_size * config.group_size} samples",
        {arm: [sum(steps) / len(steps)] for arm, steps in seconds.items()},
        more_is_better=False,
        curves=curves,
        steps={arm: run["steps"] for arm, run in runs.items()},
    )
    memory = {arm: run["peak_memory_gb"] for arm, run in runs.items()}
    return harness.report(
        "learning_curve", cell, [cell], memory, compared=compared, trl_settings=settings
    )


def show(curves: dict[str, list[Row]], compared: dict[str, Any]) -> None:
    harness.print_table(
        ["arm", "steps", "samples", "seconds", "start, %", "end, %"],
        [
            [
                arm,
                rows[-1]["step"],
                rows[-1]["samples"],
                f"{rows[-1]['seconds']:.0f}",
                *(f"{100 * row['accuracy']:.1f}" for row in (rows[0], rows[-1])),
            ]
            for arm, rows in curves.items()
        ],
    )
    for name, found in compared.items():
        terminal.line(
            f"ours - trl, {name.replace('_', ' ')}: {found['points']:+.1f} points "
            f"({found['low']:+.1f} to {found['high']:+.1f})"
        )


def main(config: LearningCurveConfig) -> int:
    prepare_process()
    with shapes.model_at(config.model) as model:
        adapter = config.adapter and config.adapter.resolve()
        harness.write_json(config.json, measure(replace(config, adapter=adapter), model))
    return 0


if __name__ == "__main__":
    run_main(main, LearningCurveConfig, description=__doc__)
