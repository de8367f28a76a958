"""The report's pictures: opaque white, so that they read on a dark page as on a light one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from benchmarks.evidence.intervals import Interval, crossed_bootstrap
from benchmarks.evidence.plan import ARMS, OURS, START
from benchmarks.evidence.results import Results
from rlm.runs import BLUE, GREY, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette (2008); an arm has one colour in all pictures.
COLOURS = {
    "base_zero": "#999999",
    "base_few": GREY,
    "sft": "black",
    "grpo": BLUE,
    "sft_continued": ORANGE,
    "rejection": "#009E73",
    "rejection_rounds": "#004D40",
    "harvest": "#8C564B",
    "drgrpo": "#56B4E9",
    "random_reward": "#CC79A7",
    "shuffled_golds": "#CC79A7",
    "rate_zero": "#CC79A7",
    "sft_all_solved": "#F0E442",
    "trl": "#D55E00",
}
Point = tuple[float, Interval]


def curves(results: Results, arms: Sequence[str], path: Path) -> None:
    """Accuracy on validation problems against seconds and samples, from where SFT ended.

    A line is dashed where only its ends were measured.
    """
    last = {arm: results.arms[arm][0]["curve"][-1] for arm in [START, *arms]}
    kinds = [kind for kind in ("sampled", "greedy") if kind in last[START]]
    problems = len(last[START][kinds[0]]["strict"])
    figure = Figure(figsize=(10, 4.0 * len(kinds)), layout="constrained")
    grid = figure.subplots(len(kinds), 2, squeeze=False)
    for row, kind in zip(grid, kinds, strict=True):
        for axes, axis in zip(row, ("seconds", "samples"), strict=True):
            for arm in arms:
                if axis == "seconds" or last[arm]["samples"]:
                    points = _curve_points(results, arm, axis, kind)
                    _line(axes, arm, points, "-" if len(points) > 2 else "--")
            axes.set_xlabel("training, seconds" if axis == "seconds" else "samples learned from")
            axes.set_title(
                f"right on {problems} validation problems, {kind}, strict, %", loc="left"
            )
            axes.set_xlim(left=0)
            _tidy(axes)
    lines, names = grid.flat[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=3, frameon=False)
    _save(figure, path)


def _curve_points(results: Results, arm: str, axis: str, kind: str) -> list[Point]:
    """Where every seed has a point: the start, after as many samples, the end.

    A run that was interrupted has a checkpoint, and so a point, that the other seeds lack.
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


def pass_at_k(results: Results, arms: Sequence[str], ks: Sequence[int], path: Path) -> None:
    """pass@k of each arm against k, on a scale on which k doubles."""
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for arm in arms:
        _line(axes, arm, [(k, results.accuracy(arm, f"pass@{k}", "lenient")) for k in ks])
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, [str(k) for k in ks])
    axes.set(xlabel="k", ylabel="pass@k, %", ylim=(0, None))
    axes.set_title("pass@k, lenient, pooled test sets", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    _tidy(axes)
    _save(figure, path)


def leads(grids: Sequence[Results], over: Sequence[str], path: Path) -> None:
    """GRPO's lead over each arm, with its interval, grid beside grid."""
    ticks = [
        f"{grid.completions:,.0f}\ncompletions\nrate {grid.settings['learning_rate']:g}"
        for grid in grids
    ]
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, metric in zip(panels, ("greedy", "sampled"), strict=True):
        axes.axhline(0, color="black", lw=0.8)
        for which, arm in enumerate(over):
            found = {
                place + 0.16 * (which - (len(over) - 1) / 2): grid.lead(OURS, arm, metric)
                for place, grid in enumerate(grids)
                if grid.share_a_seed(OURS, arm)
            }
            middle = [100 * i.mean for i in found.values()]
            axes.errorbar(
                list(found), middle, _reach(found.values()), fmt="o", ms=5, capsize=3, lw=1.6,
                color=COLOURS[arm], label=f"over {ARMS[arm].title}",
            )  # fmt: skip
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_xlim(-0.5, len(ticks) - 0.5)
        axes.set_title(f"{metric}, strict: GRPO's lead, points", fontsize=10, loc="left")
        _tidy(axes)
    panels[0].legend(frameon=False, fontsize=9, loc="upper left")
    _save(figure, path)


def families(results: Results, path: Path) -> None:
    """Bars of each family before and after GRPO, with their intervals, sampled and greedy."""
    found = {metric: results.families(metric) for metric in ("sampled", "greedy")}
    most = max(len(rows) for rows in found.values())
    figure = Figure(figsize=(10, 0.8 + 0.36 * most), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (metric, rows) in zip(panels, found.items(), strict=True):
        for which, (arm, colour, shift) in enumerate(((START, "black", -0.2), (OURS, BLUE, 0.2))):
            there = {place: row[which] for place, row in enumerate(rows.values()) if row}
            intervals = there.values()
            means = [100 * i.mean for i in intervals]
            axes.barh(
                [place + shift for place in there], means, 0.38, color=colour,
                alpha=0.75, label=ARMS[arm].title, xerr=_reach(intervals),
                error_kw={"ecolor": GREY, "capsize": 2, "elinewidth": 1},
            )  # fmt: skip
        axes.set_yticks(range(len(rows)), [family for family, *_ in rows], fontsize=9)
        axes.set(xlabel=f"{metric}, strict, right in %", xlim=(0, 100))
        axes.margins(y=0.01)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    # Above the bars: some of them reach every corner.
    panels[-1].legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    _save(figure, path)


def _reach(intervals: Iterable[Interval]) -> tuple[list[float], list[float]]:
    """How far they go below and above their means: a percentile interval need not hold its mean."""
    pairs = [(100 * (i.mean - i.low), 100 * (i.high - i.mean)) for i in intervals]
    return [max(0.0, below) for below, _ in pairs], [max(0.0, above) for _, above in pairs]


def _line(axes: Axes, arm: str, points: Sequence[Point], style: str = "-") -> None:
    """An arm's means; its intervals too if it is the start or GRPO, for more bands hide all."""
    x = [place for place, _ in points]
    if arm in (START, OURS):
        low, high = ([100 * getattr(i, end) for _, i in points] for end in ("low", "high"))
        band = {"color": COLOURS[arm], "alpha": 0.12, "linewidth": 0}
        axes.fill_between(x, low, high, label=f"{ARMS[arm].title}, 95 % interval", **band)
    middle = [100 * i.mean for _, i in points]
    look = {"color": COLOURS[arm], "lw": 1.6, "ls": style, "marker": "o", "ms": 4}
    axes.plot(x, middle, label=ARMS[arm].title, **look)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, facecolor="white", format="png")
