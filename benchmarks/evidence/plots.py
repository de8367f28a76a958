"""The report's pictures: opaque white, so that they read on a dark page as on a light one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from benchmarks.evidence.intervals import Interval
from benchmarks.evidence.plan import ARMS, OURS, START
from rlm.runs.plots import BLUE, GREY, ORANGE

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
    "drgrpo": "#56B4E9",
    "random_reward": "#CC79A7",
    "shuffled_golds": "#CC79A7",
    "rate_zero": "#CC79A7",
    "sft_all_solved": "#F0E442",
    "trl": "#D55E00",
}
Point = tuple[float, Interval]


def curves(panels: Mapping[str, Mapping[str, Sequence[Point]]], path: Path) -> None:
    """Accuracy of each arm against what each panel names: seconds, samples.

    Args:
        panels: "x label | title" → arm → points.
    """
    figure = Figure(figsize=(10, 4.0 * -(-len(panels) // 2)), layout="constrained")
    grid = figure.subplots(-(-len(panels) // 2), 2, squeeze=False)
    for axes, (label, arms) in zip(grid.flat, panels.items(), strict=False):
        x_label, _, title = label.partition(" | ")
        for arm, points in arms.items():
            _line(axes, arm, points)
        axes.set(xlabel=x_label)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlim(left=0)
        _tidy(axes)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    grid.flat[0].legend(frameon=False, fontsize=9)
    _save(figure, path)


def pass_at_k(arms: Mapping[str, Sequence[Point]], path: Path, title: str) -> None:
    """pass@k of each arm against k, on a scale on which k doubles."""
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for arm, points in arms.items():
        _line(axes, arm, points)
        ks = [k for k, _ in points]
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, [str(k) for k in ks])
    axes.set(xlabel="k", ylabel="pass@k, %", ylim=(0, None))
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    _tidy(axes)
    _save(figure, path)


def leads(
    panels: Mapping[str, Mapping[str, Sequence[Point]]], ticks: Sequence[str], path: Path
) -> None:
    """GRPO's lead over each arm, with its interval, grid beside grid.

    Args:
        panels: metric → arm → (index of a grid, lead), where the grid has the arm.
        ticks: what stands below each grid.
    """
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (metric, arms) in zip(grid, panels.items(), strict=True):
        axes.axhline(0, color="black", lw=0.8)
        for which, (arm, points) in enumerate(arms.items()):
            x = [place + 0.16 * (which - (len(arms) - 1) / 2) for place, _ in points]
            mean = [100 * i.mean for _, i in points]
            axes.errorbar(
                x, mean, _reach([i for _, i in points]), fmt="o", ms=5, capsize=3, lw=1.6,
                color=COLOURS[arm], label=f"over {ARMS[arm].title}",
            )  # fmt: skip
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_xlim(-0.5, len(ticks) - 0.5)
        axes.set_title(f"{metric}, strict: GRPO's lead, points", fontsize=10, loc="left")
        _tidy(axes)
    grid[0].legend(frameon=False, fontsize=9, loc="upper left")
    _save(figure, path)


def families(
    changed: Mapping[str, Mapping[tuple[str, str], Sequence[Interval]]],
    names: Sequence[str],
    path: Path,
) -> None:
    """Bars of each family before and after, with their intervals; a panel for each metric.

    Args:
        changed: metric → (family, …) → before, after, …, or nothing where it was not measured.
    """
    most = max(len(rows) for rows in changed.values())
    figure = Figure(figsize=(10, 0.8 + 0.36 * most), layout="constrained")
    panels = figure.subplots(1, len(changed), sharey=True, squeeze=False)[0]
    for axes, (metric, rows) in zip(panels, changed.items(), strict=True):
        for which, (colour, shift) in enumerate((("black", -0.2), (BLUE, 0.2))):
            there = {place: row[which] for place, row in enumerate(rows.values()) if row}
            intervals = there.values()
            means = [100 * i.mean for i in intervals]
            axes.barh(
                [place + shift for place in there], means, 0.38, color=colour,
                alpha=0.75, label=names[which], xerr=_reach(intervals),
                error_kw={"ecolor": GREY, "capsize": 2, "elinewidth": 1},
            )  # fmt: skip
        axes.set_yticks(range(len(rows)), [family for family, *_ in rows], fontsize=9)
        axes.set(xlabel=f"{metric}, strict, right in %", xlim=(0, 100))
        axes.margins(y=0.01)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    # Above the bars: some of them reach every corner.
    panels[-1].legend(
        frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(names)
    )
    _save(figure, path)


def _reach(intervals: Iterable[Interval]) -> tuple[list[float], list[float]]:
    """How far they go below and above their means: a percentile interval need not hold its mean."""
    pairs = [(100 * (i.mean - i.low), 100 * (i.high - i.mean)) for i in intervals]
    return [max(0.0, below) for below, _ in pairs], [max(0.0, above) for _, above in pairs]


def _line(axes: Axes, arm: str, points: Sequence[Point]) -> None:
    """An arm's means; its intervals too if it is the start or GRPO, for more bands hide all."""
    x = [place for place, _ in points]
    if arm in (START, OURS):
        low, high = ([100 * getattr(i, end) for _, i in points] for end in ("low", "high"))
        axes.fill_between(x, low, high, color=COLOURS[arm], alpha=0.12, linewidth=0)
    mean = [100 * i.mean for _, i in points]
    axes.plot(x, mean, color=COLOURS[arm], lw=1.6, marker="o", ms=4, label=ARMS[arm].title)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, facecolor="white", format="png")
