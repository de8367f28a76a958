"""Print tables with intervals, and write the files of an evaluation."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rlm.cli import terminal
from rlm.evaluation.evaluator import Evaluation
from rlm.evaluation.statistics import MIN_PROBLEMS, mcnemar, paired_bootstrap
from rlm.runs import accuracy_bars, json_lines, replace_file, replace_json

GRADINGS = {"strict": True, "lenient": False}
WIDEST = 1000  # maximum width of a table in characters


def show_table(title: str, rows: Mapping[str, Mapping[str, object]], corner: str = "") -> None:
    """Print a table with one row per name and one column per key, in their order.

    Missing cells are blank.

    Args:
        rows: the cells, by row name and column.
        corner: the heading of the column of names.
    """
    columns = dict.fromkeys(column for cells in rows.values() for column in cells)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(corner, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, cells in rows.items():
        table.add_row(name, *(str(cells.get(column, "")) for column in columns))
    # No cell is shortened: a terminal wraps lines that are longer than it is wide.
    text = io.StringIO()
    plain = Console(width=WIDEST, file=text, highlight=False, markup=False, emoji=False)
    table.width = plain.measure(table).maximum
    if terminal.console.is_terminal:
        terminal.console.print(table)
    else:
        plain.print(table)
        terminal.line("\n".join(map(str.rstrip, text.getvalue().splitlines())))


def percent(interval: Mapping[str, float]) -> str:
    """Format a share and its interval in per cent.

    >>> percent({"mean": 0.485, "low": 0.42, "high": 0.55})
    '48.5 (42–55)'
    """
    mean, low, high = (100 * interval[name] for name in ("mean", "low", "high"))
    return f"{mean:.1f} ({low:.0f}–{high:.0f})"


def points(difference: Mapping[str, float]) -> str:
    """Format a difference in percentage points and its interval.

    >>> points({"points": 2.5, "low": 0.1, "high": 5})
    '+2.5 (+0.1 to +5.0)'
    """
    return f"{difference['points']:+.1f} ({difference['low']:+.1f} to {difference['high']:+.1f})"


def write_report(
    results: Mapping[str, Mapping[str, Evaluation]],
    pairs: Sequence[tuple[str, str]],
    data: str,
    about: dict,
    output: Path,
) -> None:
    """Print the tables and write evaluation.json, accuracy.png and failures.jsonl to `output`.

    Args:
        results: the results, by row name and kind of decoding ("greedy" and optionally "sampled").
            All rows have the same kinds.
        pairs: the pairs (reference row, row) to compare.
        data: the name of the dataset and split, for titles.
        about: further entries for evaluation.json.

    Raises:
        UsageError: a file cannot be written.
    """
    from rlm.runs import writing

    content, note = dict(about), about.get("note", "")
    for kind in next(iter(results.values())):
        found = {name: row[kind] for name, row in results.items()}
        rows = {name: summarize(result) for name, result in found.items()}
        compared = {f"{b} − {a}": compare(found[a], found[b]) for a, b in pairs}
        k = next(iter(found.values())).k
        content[kind] = {"completions": k, "rows": rows, "compared": compared}
        title = f"{data}, {kind}, {k} completion{'s' * (k > 1)} each"
        show_table(title, {n: _cells(r) for n, r in rows.items()}, "per cent")
        for pair, (name, difference) in zip(pairs, compared.items(), strict=True):
            same = " (both have the same weights)" * ([*pair] in about.get("same_weights", ()))
            terminal.line(f"  {name}: {_difference(difference)}{same}")
        if pairs and len(next(iter(found.values())).problems) < MIN_PROBLEMS:
            terminal.line(
                f"  warning: with fewer than {MIN_PROBLEMS} problems, no difference is "
                "significant, whatever its interval is"
            )
    if note:
        terminal.line(f"  {note}")

    with writing(output):
        replace_json(output / "evaluation.json", content)
        replace_file(output / "failures.jsonl", json_lines(failures(results)))
        bars = {
            name: row["strict"]["accuracy"]
            for name, row in content["greedy"]["rows"].items()
            if "strict" in row
        }
        (output / "accuracy.png").unlink(missing_ok=True)  # may be that of an earlier evaluation
        if bars:
            accuracy_bars(bars, output / "accuracy.png", f"Greedy accuracy: {data}", note)
    picture = "accuracy.png, " if bars else ""
    terminal.line(f"written: {output}/evaluation.json, {picture}failures.jsonl")


def summarize(result: Evaluation) -> dict[str, object]:
    """Return a row of evaluation.json.

    With several samples, it contains pass@k for k = 1, 2, 4, … and for k = the number of samples.
    """
    summary: dict[str, object] = {}
    for name, strict in GRADINGS.items() if result.comparable else ():
        summary[name] = grading = {
            "accuracy": result.accuracy(strict),
            "reasons": result.reasons(strict),
            "right_with_wrong_equation": result.right_with_wrong_equation(strict),
            "by_family": result.by_column("family", strict),
            "by_level": result.by_column("level", strict),
        }
        if result.k > 1:
            ks = sorted({2**i for i in range(result.k.bit_length())} | {result.k})
            grading["majority"] = result.majority_accuracy(strict)
            grading["pass_at"] = {str(k): result.pass_at(k, strict) for k in ks}
    if any(reward is not None for reward in result.reward_per_problem()):
        summary["reward"] = result.mean_reward()
    rates = ("format_rate", "truncated_rate", "length_mean")
    return summary | {name: getattr(result, name) for name in rates}


def compare(a: Evaluation, b: Evaluation) -> dict[str, dict[str, float]]:
    """Return b minus a, paired by problem, for both gradings and for the reward if there is one."""
    compared = {}
    if a.rewards is not None and b.rewards is not None:
        pairs = zip(a.reward_per_problem(), b.reward_per_problem(), strict=True)
        judged = [(x, y) for x, y in pairs if x is not None and y is not None]
        if judged:
            found = paired_bootstrap([x for x, _ in judged], [y for _, y in judged])
            compared["reward"] = {name: value / 100 for name, value in found.items()}
    for name, strict in GRADINGS.items() if a.comparable else ():
        before, after = a.per_problem(strict), b.per_problem(strict)
        compared[name] = paired_bootstrap(before, after)
        if a.k == b.k == 1:
            compared[name]["mcnemar_p"] = mcnemar(list(map(bool, before)), list(map(bool, after)))
    return compared


def _difference(compared: Mapping[str, Mapping[str, float]]) -> str:
    """Format a comparison for the terminal."""
    parts = []
    if strict := compared.get("strict"):
        parts.append(f"{points(strict)} points strict")
    if reward := compared.get("reward"):
        difference, low, high = (f"{reward[name]:+.3f}" for name in ("points", "low", "high"))
        parts.append(f"reward {difference} ({low} to {high})")
    return "; ".join(parts)


def _cells(summary: Mapping) -> dict[str, str]:
    cells = {}
    if reward := summary.get("reward"):
        mean, low, high = (f"{reward[name]:.2f}" for name in ("mean", "low", "high"))
        cells["reward"] = f"{mean} ({low}–{high})"  # a reward is not in per cent
    if strict := summary.get("strict"):
        cells |= {name: percent(summary[name]["accuracy"]) for name in GRADINGS}
        if "majority" in strict:
            k, passed = list(strict["pass_at"].items())[-1]
            cells[f"maj@{k}"] = f"{100 * strict['majority']['mean']:.1f}"
            cells[f"pass@{k}"] = f"{100 * passed['mean']:.1f}"
    cells["format"] = f"{100 * summary['format_rate']:.0f}"
    cells["cut off"] = f"{100 * summary['truncated_rate']:.0f}"
    return cells | {"tokens": f"{summary['length_mean']:.0f}"}


def failures(results: Mapping[str, Mapping[str, Evaluation]]) -> list[dict[str, object]]:
    """Return the greedy completions that the strict grading does not accept.

    A completion of an open question is a failure only if it contains no answer.
    """
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
        if not (graded.strict.correct or graded.strict.reason == "ungraded")
    ]
