"""Writes the page and the plot of a grid from its finished cells.

The `result.json` of each finished cell is copied into `evidence/METHOD.json` beside the page. It
contains 1 for each right completion and 0 for each other one, but no texts. The page is rendered
from report.md.jinja and these copies alone, so that it can be reproduced. Sections without data are
left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.evidence import plots
from benchmarks.evidence.plan import ARMS, BEST, OURS, START, EvidenceConfig
from benchmarks.evidence.pools import TITLES
from benchmarks.evidence.results import Result, Results, copy_results, machine_name
from benchmarks.harness import template
from rlm.cli import UsageError, terminal


def write_report(config: EvidenceConfig) -> None:
    """Copy the results of finished cells, and write the page and the plot."""
    copy_results(config)
    results = Results.load(config.docs / "evidence")
    if not results.arms:
        raise UsageError(
            f"no cell is finished in {config.grid} or {config.docs}/evidence: run "
            "python -m benchmarks.evidence first"
        )
    page = config.docs / "README.md"
    values = contents(results)
    if values["learned"]:
        plots.curves(results, values["learned"], config.docs / "curves.png")
    page.write_text(render(results, values), encoding="utf-8")
    terminal.line(f"written: {page}")


def render(results: Results, values: dict[str, Any]) -> str:
    return template(
        Path(__file__).with_name("report.md.jinja"),
        title_of=lambda name: TITLES.get(name, name),
        average=average,
        timed_alike=partial(timed_alike, results),
    ).render(values)


def contents(results: Results) -> dict[str, Any]:
    """Return the variables of report.md.jinja.

    The tables begin with the best method: TOPR, or GRPO if there is no TOPR. The base model is only
    in the first table. The section about problem templates shows only those on which the best
    method has its largest lead over a baseline.
    """
    share = results.share_a_seed
    pass_at = f"pass@{min(8, results.settings['samples'])}"
    best = BEST if BEST in results.arms else OURS
    arms = sorted(results.arms, key=lambda arm: arm != best)
    trained = [arm for arm in arms if ARMS[arm].kind != "base"]
    main = [arm for arm in trained if arm == best or ARMS[arm].role in ("", "baseline")]
    beside_best = [
        arm
        for arm in trained
        if best in arms and ARMS[arm].role != "control" and arm != best and share(best, arm)
    ]
    baselines = [arm for arm in beside_best if arm == OURS or ARMS[arm].role == "baseline"]
    if not (results.templates and any(ARMS[arm].role == "baseline" for arm in baselines)):
        baselines = []
    largest = {arm: results.largest_lead(best, arm) for arm in baselines}
    learned = [arm for arm in main if ARMS[arm].kind != "sft" and share(START, arm)]
    # Without validations during training, a curve would only connect the start and the end.
    on_the_way = any(len(cell["curve"]) > 1 for arm in learned for cell in results.arms[arm])
    seconds = [c["training"].get("wall", 0) + c["judging_seconds"] for c in results.cells]
    return {
        "ARMS": ARMS,
        "START": START,
        "METRICS": ("greedy", "sampled", pass_at),
        "pass_at": pass_at,
        "results": results,
        "settings": results.settings,
        "adapter": results.settings.get("adapter"),  # older cells have no such setting
        "tests": results.cells[0]["tests"],
        "machines": machines(results),
        "arms": arms,
        "main": main,
        "best": best,
        "beside_best": beside_best,
        "largest": largest,
        "controls": [a for a in arms if ARMS[a].role == "control" and share(a, START)],
        "learned": learned if on_the_way else [],
        "hours": sum(seconds) / 3600,
    }


# --- rows ---------------------------------------------------------------------------------------


def average(cells: Sequence[Result], key: str) -> str:
    """Return the mean of `key` over the training records of the cells that were trained."""
    values = [cell["training"][key] for cell in cells if "seconds" in cell["training"]]
    return f"{mean(values):.0f}" if values else "–"


def timed_alike(results: Results, cells: Sequence[Result]) -> list[Result]:
    """Return the cells that ran on the machine on which most cells of the grid ran."""
    usual = Counter(map(machine_name, results.cells)).most_common(1)[0][0]
    return [cell for cell in cells if machine_name(cell) == usual]


def machines(results: Results) -> str:
    """Return the name of the most frequent machine, and other machines with their cells."""
    found: dict[str, list[str]] = {}
    for cell in results.cells:
        found.setdefault(machine_name(cell), []).append(cell["cell"])
    first, *others = sorted(found, key=lambda name: -len(found[name]))
    texts = [f"{', '.join(sorted(found[name]))}: {name}" for name in others]
    return "; ".join([first, *texts]) + (" (their times are not comparable)" if others else "")
