"""A grid beside those that are reported in folders of its own docs: what longer runs are worth."""

from __future__ import annotations

from pathlib import Path

from benchmarks.evidence import plots
from benchmarks.evidence.plan import ARMS, OURS, START
from benchmarks.evidence.results import (
    Results,
    lead,
    load_results,
    pairs_up,
    points,
    pooled_sets,
    table,
)

METRICS = ("greedy", "sampled")


def grids(results: Results, docs: Path) -> dict[str, Results]:
    """This grid ("here") and each in a folder of `docs`, the shortest runs first.

    Left out are those without GRPO and its start. Folder → results.
    """
    found = {"here": results}
    for folder in sorted(docs.iterdir()):
        if (folder / "evidence").is_dir():
            found[folder.name] = load_results(folder / "evidence")
    found = {name: grid for name, grid in found.items() if pairs_up(grid, OURS, START)}
    return dict(sorted(found.items(), key=lambda item: samples_of(item[1])))


def longer_runs(results: Results, docs: Path) -> list[str]:
    """GRPO's lead in each grid, and a picture of those that learn from the same data."""
    found = grids(results, docs)
    if len(found) < 2 or "here" not in found:
        return []
    over = [arm for arm in ARMS if arm == START or ARMS[arm].role == "rival"]
    lines = [
        "## Longer runs and other data",
        "",
        "GRPO's lead in points, strict, here and in grids that have their own starts and reports.",
        "",
    ]
    for metric in METRICS:
        rows = [
            [
                name if name == "here" else f"[{name}]({name}/README.md)",
                *_described(grid),
                *(_lead(grid, arm, metric) for arm in over),
            ]
            for name, grid in found.items()
        ]
        heads = ["data", "GRPO", "numbers", "seeds", *(ARMS[arm].title for arm in over)]
        lines += [*table([f"{metric}, over", *heads], rows), ""]
    dataset = _settings(results)["dataset"]
    alike = [grid for grid in found.values() if _settings(grid)["dataset"] == dataset]
    if len(alike) < 2:
        return lines
    panels = {
        metric: {
            arm: [
                (place, lead(grid, OURS, arm, pooled_sets(grid), metric, "strict"))
                for place, grid in enumerate(alike)
                if pairs_up(grid, OURS, arm)
            ]
            for arm in over
        }
        for metric in METRICS
    }
    ticks = [
        f"{samples_of(grid):,.0f} completions\nrate {_settings(grid)['learning_rate']:g}"
        for grid in alike
    ]
    plots.leads(panels, ticks, docs / "longer_runs.png")
    return [*lines, "![longer runs](longer_runs.png)"]


def samples_of(results: Results) -> float:
    """How many completions GRPO learned from, in the mean over its seeds."""
    drawn = [cell["training"]["samples"] for cell in results[OURS]]
    return sum(drawn) / len(drawn)


def _lead(results: Results, over: str, metric: str) -> str:
    if not pairs_up(results, OURS, over):
        return "–"
    return points(lead(results, OURS, over, pooled_sets(results), metric, "strict"))


def _described(results: Results) -> list[str]:
    settings = _settings(results)
    each = settings["batch_size"] * settings["group_size"]
    types = sorted({cell["machine"]["dtype"] for cell in results[OURS]})
    return [
        settings["dataset"].partition(":")[0],
        f"{settings['steps']} × {each}, rate {settings['learning_rate']:g}",
        ", ".join(types),
        str(len(results[OURS])),
    ]


def _settings(results: Results) -> dict:
    return results[OURS][0]["settings"]
