"""Draws the plot of the report, on white so that it is legible on dark and light pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from benchmarks.evidence.intervals import Interval, crossed_bootstrap
from benchmarks.evidence.plan import ARMS, START
from benchmarks.evidence.results import Results
from rlm.runs import BLUE, ORANGE, new_figure, save_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The palette of Okabe and Ito (2008). A method has the same colour in all grids.
COLOURS = {
    "grpo": BLUE,
    "sft_continued": ORANGE,
    "rejection": "#009E73",
    "rejection_rounds": "#004D40",
    "harvest": "#8C564B",
    "topr": "#CC79A7",
    "sft_all_solved": "#F0E442",
    "trl": "#D55E00",
}
Point = tuple[float, Interval]


def curves(results: Results, arms: Sequence[str], path: Path) -> None:
    """Plot validation accuracy against seconds and samples, from the end of SFT.

    A band shows the interval of the first method. A line is dashed if only its ends were measured.
    """
    last = {arm: results.arms[arm][0]["curve"][-1] for arm in [START, *arms]}
    kinds = [kind for kind in ("sampled", "greedy") if kind in last[START]]
    problems = len(last[START][kinds[0]]["strict"])
    figure = new_figure(10, 4.0 * len(kinds))
    grid = figure.subplots(len(kinds), 2, squeeze=False)
    for row, kind in zip(grid, kinds, strict=True):
        for axes, axis in zip(row, ("seconds", "samples"), strict=True):
            for arm in arms:
                if axis == "seconds" or last[arm]["samples"]:
                    points = _curve_points(results, arm, axis, kind)
                    style = "-" if len(points) > 2 else "--"
                    _line(axes, arm, points, style, banded=arm == arms[0])
            axes.set_xlabel("training, seconds" if axis == "seconds" else "completions")
            axes.set_title(
                f"right on {problems} validation problems, {kind}, strict, %", loc="left"
            )
            axes.set_xlim(left=0)
            tidy(axes)
    lines, names = grid.flat[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=3, frameon=False)
    save_figure(figure, path)


def _curve_points(results: Results, arm: str, axis: str, kind: str) -> list[Point]:
    """Return the points that all seeds have: the start, the end, and the checkpoints in between.

    Checkpoints are matched by their number of samples. Those that are not in all seeds are left
    out, such as the additional checkpoint of an interrupted run.
    """
    starts = {cell["seed"]: cell["curve"][-1] for cell in results.arms[START]}
    rows = []
    for cell in results.arms[arm]:
        if start := starts.get(cell["seed"]):
            *way, end = cell["curve"]
            row = {0: start | {"seconds": 0, "samples": 0}}
            row |= {point["samples"]: point for point in way}
            rows.append(row | {"end": end})
    places = [[row[at] for row in rows] for at in rows[0] if all(at in row for row in rows)]
    return [
        (
            mean(point[axis] for point in place),
            crossed_bootstrap([point[kind]["strict"] for point in place]),
        )
        for place in places
    ]


def _line(axes: Axes, arm: str, points: Sequence[Point], style: str, *, banded: bool) -> None:
    """Draw the means of a method and, if `banded`, their intervals."""
    x = [place for place, _ in points]
    if banded:
        low, high = ([100 * getattr(i, end) for _, i in points] for end in ("low", "high"))
        band = {"color": COLOURS[arm], "alpha": 0.12, "linewidth": 0}
        axes.fill_between(x, low, high, label=f"{ARMS[arm].title}, 95 % interval", **band)
    middle = [100 * i.mean for _, i in points]
    look = {"color": COLOURS[arm], "lw": 1.6, "ls": style, "marker": "o", "ms": 4}
    axes.plot(x, middle, label=ARMS[arm].title, **look)
