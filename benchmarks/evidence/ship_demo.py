"""The adapter of a run of `make demo`, rounded to bf16, with a model card: `ship runs/demo`.

The card's first table is of these very weights, judged again after rounding; the second is what
the run itself wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.evidence.model_card import card
from benchmarks.evidence.plan import EvidenceConfig, read_json
from benchmarks.evidence.pools import (
    OTHER,
    JudgedSet,
    gym_installed,
    gym_problems,
    made,
)
from benchmarks.evidence.ship import (
    counts,
    judge_rounded,
    made_in,
    write_json,
    write_rounded,
)
from rlm.cli import terminal
from rlm.cli.options import UsageError
from rlm.data.loaders import load_problems
from rlm.evaluation.evaluate import Evaluation
from rlm.evaluation.statistics import wilson_interval
from rlm.model import adapters
from rlm.model import hardware as machine

KEPT = (
    *("stage", "base_model", "base_hash", "dataset", "step", "commit"),
    *("start_accuracy", "accuracy", "validated_on"),
)
LEARNED, UNSEEN = "families it learned, other numbers", "families nobody saw"


def ship_demo(config: EvidenceConfig, run: Path) -> None:
    """
    Raises:
        UsageError: the directory does not hold a finished run, or the adapter is too large.
    """
    machine.prepare_process()
    adapter, summary_file = run / "final_rlm_lora", run / "summary.json"
    if not (adapter / "run.json").exists() or not summary_file.exists():
        raise UsageError(f"{run} holds no finished run: make demo")
    history, summary = adapters.read_run(adapter), read_json(summary_file)
    sft = adapters.read_run(run / "sft_lora")
    if history["base_model"] != config.model:
        raise UsageError(f"{run} trained {history['base_model']}, not --model {config.model}")
    if "command" not in summary:
        raise UsageError(f"{run} was made by an earlier version of the demo: run it again")
    total = summary["accuracy"]["grpo"]["strict"]["total"]
    tests = [
        JudgedSet(LEARNED, load_problems(history["dataset"], "test", max_samples=total), 0),
        JudgedSet(UNSEEN, made("test_families", config.greedy_problems, 0, None), 0),
    ]
    if gym_installed():
        tests.append(JudgedSet(OTHER, gym_problems(config.other_problems), 0))
    with made_in(config.weights) as folder:
        write_rounded(adapter, folder, config.model)
        judged = judge_rounded(config, folder, tests)
        steps = {key: history["config"][key] for key in ("steps", "batch_size", "group_size")}
        write_json(
            folder / "run.json",
            {key: history[key] for key in KEPT if key in history}
            | {
                "command": summary["command"],
                "numbers": "bfloat16",
                "greedy_after_rounding": {name: counts(found) for name, found in judged.items()},
                "config": {"reasoning_format": history["config"]["reasoning_format"]} | steps,
            },
        )
        (folder / "README.md").write_text(_card(history, sft, summary, judged), encoding="utf-8")
    terminal.line(f"{config.weights}: the adapter of {run} in bf16")


def _card(
    history: dict[str, Any],
    sft: dict[str, Any],
    summary: dict[str, Any],
    judged: dict[str, Evaluation],
) -> str:
    steps, gain = history["config"], summary["gain"]
    total = summary["accuracy"]["grpo"]["strict"]["total"]
    return card(
        title="SFT, then GRPO",
        base=history["base_model"],
        dataset=history["dataset"],
        origin=f"`{summary['command']}` at commit {history['commit'][:8]}: SFT on "
        f"{sft['examples']} worked solutions, then {history['step']} steps of "
        f"{steps['batch_size']} problems × {steps['group_size']} completions, "
        f"{summary['seconds']['total'] / 60:.0f} minutes in all on {summary['machine']}; then "
        "`python -m benchmarks.evidence ship RUN`, which writes it in bf16.",
        judged=judged,
        before_rounding=[
            f"What the run itself measured, before that, on {total} test problems of the families "
            "it learned:",
            "",
            "| | greedy, strict | greedy, lenient | sampled at temperature 1, strict |",
            "|---|---|---|---|",
            *_rows(summary),
            "",
            f"GRPO over SFT, sampled, paired by problem: {gain['points']:+.1f} points "
            f"({gain['low']:+.1f} to {gain['high']:+.1f}). On its {history['validated_on']} "
            f"validation problems, greedily, {_before_and_after(history)}.",
        ],
        limits=["One run, one seed."],
    )


def _before_and_after(history: dict[str, Any]) -> str:
    before, after = history.get("start_accuracy"), history["accuracy"]
    if before is None or after is None:
        return "nothing was measured"
    return f"GRPO went from {100 * before:.0f} to {100 * after:.0f} %"


def _rows(summary: dict[str, Any]) -> list[str]:
    rows = []
    for name, title in (("base", "base model"), ("sft", "after SFT"), ("grpo", "after GRPO")):
        found, drawn = summary["accuracy"][name], summary["sampled_accuracy"].get(name)
        greedy = [_share(found[grading]) for grading in ("strict", "lenient")]
        sampled = "–" if drawn is None else _percent(drawn["strict"])
        rows.append(f"| {title} | {greedy[0]} | {greedy[1]} | {sampled} |")
    return rows


def _share(found: dict[str, Any]) -> str:
    low, high = wilson_interval(found["correct"], found["total"])
    return _percent({"mean": found["correct"] / found["total"], "low": low, "high": high})


def _percent(found: dict[str, float]) -> str:
    return "{:.1f} ({:.1f}–{:.1f})".format(*(100 * found[key] for key in ("mean", "low", "high")))
