"""Solve rates of each family of problems, before GRPO and after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence import plots
from benchmarks.evidence.intervals import Interval, common, crossed_bootstrap, difference
from benchmarks.evidence.plan import ARMS, OURS, START
from benchmarks.evidence.pools import TITLES
from benchmarks.evidence.results import Results, pairs_up, per_cent, points, shared_sets, table


def families(results: Results, docs: Path) -> list[str]:
    """A table and a picture, sampled and greedy."""
    if not pairs_up(results, OURS, START):
        return []
    changed = {metric: changes(results, metric) for metric in ("sampled", "greedy")}
    names = [ARMS[START].title, ARMS[OURS].title]
    plots.families(changed, names, docs / "families.png")
    rows = [
        [*family, *(text for metric in changed for text in _texts(changed[metric][family]))]
        for family in changed["greedy"]
    ]
    heads = [f"{metric}: {name}" for metric in changed for name in ("problems", *names, "points")]
    return [
        "## By family",
        "",
        "Right in per cent, strict. With few problems a family, read the picture, not the digits.",
        "",
        *table(["family", "test set", *heads], rows),
        "",
        "![families](families.png)",
    ]


def changes(results: Results, metric: str) -> dict[tuple[str, str], list[Interval]]:
    """(family, title of its test set) → before, after, change; none if it was not measured."""
    found: dict[tuple[str, str], list[Interval]] = {}
    tests = results[OURS][0]["tests"]
    for name in shared_sets(results)[0]:
        old, new = common(results[START], results[OURS], [name], metric, "strict")
        of = tests[name]["families"]
        for family in sorted(set(of)):
            columns = [i for i in range(old.shape[1]) if of[i] == family]
            before, after = old[:, columns], new[:, columns]
            row = found[family or name, TITLES.get(name, name)] = []
            if columns:
                row += [crossed_bootstrap(before), crossed_bootstrap(after)]
                row.append(difference(before, after))
    return found


def _texts(row: Sequence[Interval]) -> list[str]:
    if not row:
        return ["0", "–", "–", "–"]
    before, after, change = row
    return [str(change.problems), per_cent(before), per_cent(after), points(change)]
