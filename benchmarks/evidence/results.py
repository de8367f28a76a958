"""The finished cells as the report reads them, and how it writes their numbers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evidence.intervals import (
    Interval,
    Scores,
    common,
    crossed_bootstrap,
    difference,
    matrix,
)
from benchmarks.evidence.plan import ARMS, EvidenceConfig, read_json
from benchmarks.evidence.pools import OTHER, WORDS
from rlm.cli.options import UsageError

Result = dict[str, Any]
Results = dict[str, list[Result]]  # by arm, in the order of ARMS; seeds in order
GRADINGS = ("strict", "lenient")
FEW_SEEDS = 10  # fewer, and an interval is too narrow as to seeds (see `verdict`)
NAMES = {"greedy": "greedy", "sampled": "sampled", "majority": "maj@8"}


def collect(config: EvidenceConfig) -> None:
    """Copy the results of the grid's finished cells to where they are committed."""
    target = config.docs / "evidence"
    target.mkdir(parents=True, exist_ok=True)
    for file in (config.grid / "cells").glob("*/result.json"):  # whatever seeds are asked for now
        shutil.copy(file, target / f"{file.parent.name}.json")


def load_results(folder: Path) -> Results:
    """
    Raises:
        UsageError: cells of different settings lie side by side.
    """
    found = [read_json(file) for file in sorted(folder.glob("*.json"))]
    for one in found[1:]:
        if one["settings"] != found[0]["settings"]:
            raise UsageError(f"{folder}: {one['cell']} and {found[0]['cell']} have other settings")
    by_arm = {arm: [one for one in found if one["arm"] == arm] for arm in ARMS}
    return {arm: sorted(rows, key=lambda r: r["seed"]) for arm, rows in by_arm.items() if rows}


def machine_name(cell: Result) -> str:
    """What decides a cell's seconds: equal for two cells whose seconds compare."""
    found = cell["machine"]
    sets = [name for name in found.get("instruction_sets") or () if name not in ("fma", "f16c")]
    limit = found.get("onednn_max_cpu_isa")
    parts = [
        found["cpu"] + (f" ({sets[-1]})" if sets else ""),
        f"{found['cores']} cores",
        f"{found['memory_gb']} GB",
        found["dtype"] + (f" (ONEDNN_MAX_CPU_ISA={limit})" if limit else ""),
        *([found["gpu"]] if found["gpu"] else []),
    ]
    return ", ".join(parts)


def shared_sets(results: Results) -> tuple[list[str], list[str]]:
    """Those that every cell was judged on, and the others, which compare with nothing."""
    judged = [cell["tests"] for cells in results.values() for cell in cells]
    names = list(dict.fromkeys(name for tests in judged for name in tests))
    shared = [name for name in names if all(name in tests for tests in judged)]
    return shared, [name for name in names if name not in shared]


def pooled_sets(results: Results) -> list[str]:
    """The test sets whose problems make up the headline."""
    tests, _ = shared_sets(results)
    return [name for name in WORDS if name in tests] or [n for n in tests if n != OTHER]


def accuracy(
    results: Results, arm: str, sets: Sequence[str], metric: str, grading: str
) -> Interval:
    return crossed_bootstrap(matrix(results[arm], sets, metric, grading))


def lead(
    results: Results, arm: str, over: str, sets: Sequence[str], metric: str, grading: str
) -> Interval:
    """By how much `arm` is ahead of `over`, on the seeds and problems that both have."""
    return difference(*common(results[over], results[arm], sets, metric, grading))


def lead_where_sampled(
    results: Results, arm: str, over: str, sets: Sequence[str], grading: str
) -> Interval:
    """The greedy lead on those problems alone that are sampled, too: the first of each set."""
    sides: tuple[list[Scores], list[Scores]] = ([], [])
    for name in sets:
        count = len(results[arm][0]["tests"][name]["sampled"][grading])
        pair = common(results[over], results[arm], [name], "greedy", grading)
        for side, scores in zip(sides, pair, strict=True):
            side.append(scores[:, :count])
    return difference(*(np.concatenate(side, axis=1) for side in sides))


def pairs_up(results: Results, one: str, other: str) -> bool:
    """Whether both arms are there and share a seed (the base has none, and stands beside each)."""
    if one not in results or other not in results:
        return False
    if "base" in (ARMS[one].kind, ARMS[other].kind):
        return True
    return bool({r["seed"] for r in results[one]} & {r["seed"] for r in results[other]})


# --- writing numbers ----------------------------------------------------------------------------


def per_cent(interval: Interval) -> str:
    """
    >>> per_cent(Interval(0.465, 0.421, 0.509, 3, 100))
    '46.5 (42.1–50.9)'
    """
    return f"{100 * interval.mean:.1f} ({100 * interval.low:.1f}–{100 * interval.high:.1f})"


def points(interval: Interval) -> str:
    """
    >>> points(Interval(0.038, -0.005, 0.08, 3, 100))
    '+3.8 (−0.5 to +8.0)'
    """
    shown = [f"{100 * v:+.1f}" for v in (interval.mean, interval.low, interval.high)]
    return "{} ({} to {})".format(*shown).replace("-", "−").replace("+0.0", "0.0")


def undecided(interval: Interval) -> bool:
    """Whether zero lies inside, as the bounds are printed: a bound of 0.0 decides nothing."""
    return round(interval.low, 3) <= 0 <= round(interval.high, 3)


def verdict(interval: Interval) -> str:
    """What the interval says, in words. With few seeds it says it of these seeds alone.

    The bootstrap resamples n seeds with (n − 1) / n of their variance, and knows no t: with few
    seeds the interval is too narrow. Where nothing but the seed varies, and that normally, one of
    95 % holds the truth in 74 % of the cases with 3 seeds, in 83 with 5, in 89 with 10 (simulated).
    One that holds zero would hold it if it were wider, too.
    """
    if undecided(interval):
        return "zero lies inside"
    side = "above zero" if interval.low > 0 else "below zero"
    if interval.seeds == 1:
        return f"{side}, for one seed"
    return side if interval.seeds >= FEW_SEEDS else f"{side}, for these {interval.seeds} seeds"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [headers, ["---"] * len(headers), *rows]
    return ["| " + " | ".join(str(entry) for entry in line) + " |" for line in lines]
