"""What evaluations are shown as: tables, evaluation.json, a picture, and the failures to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from rlm.cli import terminal
from rlm.evaluation.evaluate import Evaluation, mcnemar, paired_bootstrap
from rlm.runs.atomic_files import replace_json
from rlm.runs.plots import accuracy_bars

GRADINGS = {"strict": True, "lenient": False}


def report(
    results: Mapping[str, Mapping[str, Evaluation]], data: str, about: dict, output: Path
) -> None:
    """Tables in the terminal; evaluation.json, accuracy.png and failures.jsonl in `output`.

    Raises:
        UsageError: a file cannot be written.
    """
    from rlm.runs.checkpoints import writing  # loads torch

    content = dict(about)
    for kind in ("greedy", "sampled"):
        found = {name: row[kind] for name, row in results.items() if kind in row}
        if not found:
            continue
        rows = {name: figures(result) for name, result in found.items()}
        compared = {f"{b} − {a}": compare(found[a], found[b]) for a, b in pairwise(found)}
        k = next(iter(found.values())).k
        content[kind] = {"completions": k, "rows": rows, "compared": compared}
        show(f"{data}, {kind}, {k} each", rows, compared)
    if about.get("note"):
        terminal.line(f"  {about['note']}")

    with writing(output):
        replace_json(output / "evaluation.json", content)
        with (output / "failures.jsonl").open("w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(f, ensure_ascii=False) + "\n" for f in failures(results))
        bars = {
            name: {grading: row[grading]["accuracy"] for grading in GRADINGS}
            for name, row in content["greedy"]["rows"].items()
        }
        accuracy_bars(
            bars, output / "accuracy.png", f"Greedy accuracy: {data}", about.get("note", "")
        )
    terminal.line(f"written: {output}/evaluation.json, accuracy.png, failures.jsonl")


def figures(result: Evaluation) -> dict[str, object]:
    """What evaluation.json says of a row; pass@k for k = 1, 2, 4, … and all samples."""
    by_grading = {}
    for name, strict in GRADINGS.items():
        accuracy = result.accuracy if result.k == 1 else result.mean_accuracy
        by_grading[name] = {
            "accuracy": accuracy(strict),
            "reasons": result.reasons(strict),
            "by_family": result.by_column("family", strict),
            "by_level": result.by_column("level", strict),
        }
        if result.k > 1:
            ks = sorted({2**i for i in range(result.k.bit_length())} | {result.k})
            by_grading[name]["majority"] = result.majority_accuracy(strict)
            by_grading[name]["pass_at"] = {str(k): result.pass_at(k, strict) for k in ks}
    return by_grading | {
        "format_rate": result.format_rate,
        "truncated_rate": result.truncated_rate,
        "length_mean": result.length_mean,
    }


def compare(a: Evaluation, b: Evaluation) -> dict[str, dict[str, float]]:
    """b minus a, paired by problem, under both gradings."""
    compared = {}
    for name, strict in GRADINGS.items():
        before, after = a.per_problem(strict), b.per_problem(strict)
        compared[name] = asdict(paired_bootstrap(before, after))
        if a.k == b.k == 1:
            compared[name]["mcnemar_p"] = mcnemar(list(map(bool, before)), list(map(bool, after)))
    return compared


def show(title: str, rows: Mapping[str, Mapping], compared: Mapping[str, Mapping]) -> None:
    """A table of one kind of decoding, and how each row differs from the one above it."""
    table = Table(
        "per cent", title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for row, found in rows.items():
        intervals = {name: found[name]["accuracy"] for name in GRADINGS}
        cells = {
            name: f"{100 * i['mean']:.1f} ({100 * i['low']:.0f}–{100 * i['high']:.0f})"
            for name, i in intervals.items()
        }
        if "majority" in found["strict"]:
            k, passed = list(found["strict"]["pass_at"].items())[-1]
            cells[f"maj@{k}"] = f"{100 * found['strict']['majority']['mean']:.1f}"
            cells[f"pass@{k}"] = f"{100 * passed['mean']:.1f}"
        cells["format"] = f"{100 * found['format_rate']:.0f}"
        cells["cut off"] = f"{100 * found['truncated_rate']:.0f}"
        cells["tokens"] = f"{found['length_mean']:.0f}"
        if not table.row_count:
            for name in cells:
                table.add_column(name, justify="right", no_wrap=True)
        table.add_row(row, *cells.values())
    terminal.console.print(table)
    for pair, by_grading in compared.items():
        strict = by_grading["strict"]
        p = f", McNemar p = {strict['mcnemar_p']:.2g}" if "mcnemar_p" in strict else ""
        terminal.line(
            f"  {pair}: {strict['points']:+.1f} points strict "
            f"({strict['low']:+.1f} to {strict['high']:+.1f}{p})"
        )


def failures(results: Mapping[str, Mapping[str, Evaluation]]) -> list[dict[str, object]]:
    """Every greedy completion that is not right under strict grading, to read."""
    return [
        {
            "row": row,
            "id": problem.id,
            "question": problem.question,
            "answer": problem.answer,
            "completion": graded.text,
            "strict": graded.strict.reason,
            "lenient": graded.lenient.reason,
        }
        for row, kinds in results.items()
        for problem, (graded,) in zip(kinds["greedy"].problems, kinds["greedy"].groups, strict=True)
        if not graded.strict.correct
    ]
