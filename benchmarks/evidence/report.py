"""Writes docs/results/README.md and its pictures: what the finished cells say, and nothing else.

`result.json` of each finished cell is copied to docs/results/evidence/ (no texts, a zero or a one
for each completion); the page and its pictures are made from these copies alone, so anybody can
make them again. The page's words are in report.md.jinja; a section without data is left out.
Sentences about an interval are written by rule: above zero, below zero (with few seeds: for these
alone), or zero lies inside. What a person concludes stands in docs/results/conclusions.md and goes
on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import jinja2

from benchmarks.evidence import checks, plots, tables
from benchmarks.evidence.intervals import FEW_SEEDS, crossed_bootstrap
from benchmarks.evidence.plan import ARMS, OURS, START, EvidenceConfig
from benchmarks.evidence.results import Results, copy_results
from rlm.cli import terminal
from rlm.cli.options import UsageError


def write_report(config: EvidenceConfig) -> None:
    """
    Raises:
        UsageError: no cell is done, or the cells do not belong together.
    """
    copy_results(config)
    results = Results.load(config.docs / "evidence")
    if not results.arms:
        raise UsageError(f"no cell is done, in {config.grid} or {config.docs}/evidence")
    page = config.docs / "README.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render("report.md.jinja", contents(results, config.docs)), encoding="utf-8")
    terminal.line(f"written: {page}")


def render(template: str, values: Mapping[str, Any]) -> str:
    """A template beside this file, filled in; a name it lacks is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)


def contents(results: Results, docs: Path) -> dict[str, Any]:
    """What the template is filled in with; draws the pictures into `docs`."""
    tests = results.cells[0]["tests"]
    trained = [rows for arm, rows in results.arms.items() if ARMS[arm].kind != "base"]
    conclusions = docs / "conclusions.md"
    names = [f"{tables.TITLES.get(n, n)} {len(tests[n]['problems'])}" for n in results.pooled]
    ours = results.arms.get(OURS)
    return {
        "settings": results.settings,
        "machines": checks.machines(results),
        "seeds": ", ".join(map(str, results.seeds)) or "none",
        "few_seeds": FEW_SEEDS,
        "left_out": ", ".join(tables.titles(results.left_out)),
        "conclusions": conclusions.read_text("utf-8").strip() if conclusions.exists() else "",
        "all_arms": tables.all_arms(results),
        "sizes": ", ".join(names),
        "other_starts": len({tuple(cell["seed"] for cell in rows) for rows in trained}) > 1,
        "leads": tables.leads(results),
        "controls": tables.controls(results),
        "by_set": tables.by_set(results),
        "sharper_or_wider": tables.sharper_or_wider(results),
        "curves_drawn": draw_curves(results, docs),
        "beside_trl": tables.beside_trl(results),
        "samples": ours and ours[0]["training"]["samples"],
        "algorithms": tables.algorithms(results),
        "algorithms_over_others": tables.algorithms_over_others(results),
        "watch": checks.watch(results),
        "watch_over_time": checks.watch_over_time(results),
        "failures": checks.failures(docs / "failures"),
        "prompts": checks.prompts(results),
        "tried_on": checks.tried_on(results),
        "hours": checks.hours(results),
        "cells": checks.cells(results),
        "not_run": checks.not_run(results),
        **_pass_at_k(results, docs),
        **_families(results, docs),
        **_grids(results, docs),
    }


def _pass_at_k(results: Results, docs: Path) -> dict[str, Any]:
    found = tables.pass_at_k(results)
    shown = {arm: line for arm, line in found.items() if ARMS[arm].role != "algorithm"}
    plots.pass_at_k(shown, docs / "pass_at_k.png", "pass@k, lenient, pooled test sets")
    return {"pass_at_k": tables.pass_at_k_table(found)}


def _families(results: Results, docs: Path) -> dict[str, Any]:
    if not results.share_a_seed(OURS, START):
        return {"families": ""}
    found = {metric: tables.families(results, metric) for metric in ("sampled", "greedy")}
    plots.families(found, [ARMS[START].title, ARMS[OURS].title], docs / "families.png")
    return {"families": tables.families_table(found)}


# --- other grids ----------------------------------------------------------------------------------


def _grids(results: Results, docs: Path) -> dict[str, Any]:
    """This grid ("here") and each in a folder of `docs`, the shortest runs first.

    Left out are those without GRPO and its start. Those that learn from the same data are drawn.
    """
    found = {"here": results}
    for folder in sorted(docs.iterdir()):
        if (folder / "evidence").is_dir():
            found[folder.name] = Results.load(folder / "evidence")
    found = {name: grid for name, grid in found.items() if grid.share_a_seed(OURS, START)}
    if len(found) < 2 or "here" not in found:
        return {"grids": ""}
    found = dict(sorted(found.items(), key=lambda item: item[1].completions))
    dataset = results.settings["dataset"]
    alike = [grid for grid in found.values() if grid.settings["dataset"] == dataset]
    if len(alike) > 1:
        _draw_grids(alike, docs / "longer_runs.png")
    return {"grids": tables.grids(found), "longer_runs_drawn": len(alike) > 1}


def _draw_grids(grids: Sequence[Results], path: Path) -> None:
    over = [arm for arm in ARMS if arm == START or ARMS[arm].role == "rival"]
    panels = {
        metric: {
            arm: [
                (place, grid.lead(OURS, arm, metric))
                for place, grid in enumerate(grids)
                if grid.share_a_seed(OURS, arm)
            ]
            for arm in over
        }
        for metric in tables.HEADLINE
    }
    ticks = [
        f"{grid.completions:,.0f} completions\nrate {grid.settings['learning_rate']:g}"
        for grid in grids
    ]
    plots.leads(panels, ticks, path)


# --- along the way --------------------------------------------------------------------------------


def draw_curves(results: Results, docs: Path) -> bool:
    """Validation against seconds and samples, from where SFT ended; False if no arm has a curve."""
    arms = [
        arm
        for arm in results.arms
        if ARMS[arm].kind not in ("base", "sft")
        and ARMS[arm].role not in ("control", "algorithm")
        and results.share_a_seed(START, arm)
    ]
    if not arms:
        return False
    panels: dict[str, dict[str, list[plots.Point]]] = {}
    last = {arm: results.arms[arm][0]["curve"][-1] for arm in [START, *arms]}
    for kind in [k for k in ("sampled", "greedy") if k in last[START]]:
        for axis, label in (("seconds", "training seconds"), ("samples", "samples")):
            panels[f"{label} | {kind}, strict, %"] = {
                arm: _curve_points(results, arm, axis, kind)
                for arm in arms
                if axis == "seconds" or last[arm]["samples"]
            }
    plots.curves(panels, docs / "curves.png")
    return True


def _curve_points(results: Results, arm: str, axis: str, kind: str) -> list[plots.Point]:
    starts = {cell["seed"]: cell["curve"][-1] for cell in results.arms[START]}
    cells = [cell for cell in results.arms[arm] if cell["seed"] in starts]
    rows = [[starts[c["seed"]] | {"seconds": 0, "samples": 0}, *c["curve"]] for c in cells]
    return [
        (
            mean(point[axis] for point in place),
            crossed_bootstrap([point[kind]["strict"] for point in place]),
        )
        for place in zip(*rows, strict=False)
    ]
