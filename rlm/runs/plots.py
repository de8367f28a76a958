"""Plots of the accuracy of models, and of the learning curves of a GRPO run.

Figures are created without pyplot, so they need no global state and no display. They are saved as
PNG by the Agg renderer.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from rlm.runs.atomic_files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours from the palette of Okabe and Ito (2008), which colour-blind readers can distinguish, and
# which are also distinct in greyscale.
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#555555"
RUNNING_MEAN_STEPS = 5  # number of steps in a running mean
FEW_POINTS = 4  # with at most this many points, each value is written beside its point

Interval = Mapping[str, float]  # with the keys mean, low and high


def accuracy_bars(rows: Mapping[str, Interval], path: Path, title: str, note: str = "") -> None:
    """Draw a bar with an error bar for each row.

    Args:
        rows: a map from the name of a row to its interval, as fractions between 0 and 1.
        note: a line of text below the figure.
    """
    count = max(3, len(rows))
    figure = new_figure(1.6 + 1.2 * count, 4.2)
    axes = figure.subplots()
    tidy(axes)
    means, lows, highs = ([100 * i[key] for i in rows.values()] for key in ("mean", "low", "high"))
    # A bootstrap interval need not contain the mean, but error bars must not be negative.
    below = [max(0.0, mean - low) for mean, low in zip(means, lows, strict=True)]
    above = [max(0.0, high - mean) for mean, high in zip(means, highs, strict=True)]
    error = {"ecolor": "black", "capsize": 3, "elinewidth": 1}
    bars = axes.bar(range(len(rows)), means, 0.5, color=BLUE, yerr=(below, above), error_kw=error)
    axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=9)
    axes.set_xticks(range(len(rows)), list(rows), parse_math=False)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(0, 1.12 * max(5.0, *means, *highs))
    axes.set_ylabel("right in the required format, %")
    # Wrap the title, because the name of a dataset may be a long path.
    axes.set_title(textwrap.fill(title, 16 * count), fontsize=11, loc="left", parse_math=False)
    if note:
        how = {"ha": "center", "va": "top", "parse_math": False}
        figure.text(0.5, -0.03, note, fontsize=8, color=GREY, **how)
    save_figure(figure, path)


def accuracy_over_time(
    curves: Mapping[str, Sequence[tuple[float, Interval]]],
    stages: Mapping[str, tuple[float, float]],
    path: Path,
    title: str,
    ylabel: str = "right, %",
) -> None:
    """Draw up to three curves with interval bands, over the minutes of training.

    Args:
        curves: a map from the name of a curve to its points, (minute, interval). Intervals are
            fractions between 0 and 1.
        stages: a map from the name of a training stage to its first and last minute.
    """
    figure = new_figure(7, 4.4)
    axes = figure.subplots()
    tidy(axes)
    for (name, points), colour in zip(curves.items(), (BLUE, ORANGE, GREY), strict=False):
        minutes = [minute for minute, _ in points]
        mean, low, high = ([100 * i[end] for _, i in points] for end in ("mean", "low", "high"))
        axes.fill_between(minutes, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(minutes, mean, color=colour, lw=2, marker="o", ms=5, label=name)
        for x, y in zip(minutes, mean, strict=True) if len(points) <= FEW_POINTS else ():
            axes.annotate(f"{y:.1f}", (x, y), (5, 5), textcoords="offset points", color=colour)
    top = 1.2 * max(100 * i["high"] for points in curves.values() for _, i in points)
    for number, (name, (first, last)) in enumerate(stages.items()):
        axes.axvspan(first, last, color=GREY, alpha=0.08 * (number % 2 == 0), linewidth=0)
        axes.text((first + last) / 2, 0.98 * top, name, ha="center", va="top", color=GREY)
    axes.set(xlabel="training, minutes", ylabel=ylabel, ylim=(0, top))
    # Leave space on the right for the labels of the last points.
    axes.set_xlim(0, 1.08 * max(last for _, last in stages.values()))
    axes.set_title(title, fontsize=12, loc="left")
    lines, names = axes.get_legend_handles_labels()
    names[-1] += " (bands: 95 % intervals)"
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False)
    save_figure(figure, path)


def learning_curves(metrics: Sequence[Mapping[str, float]], path: Path, title: str) -> None:
    """Draw the metrics of a GRPO run over its steps, in up to six panels.

    Every y axis includes 0, so that noise looks small. Metrics without values are left out. With a
    custom reward, the validation panel shows the reward instead of the accuracy.

    Args:
        metrics: the rows of metrics.jsonl.
    """
    by_reward = any("eval/reward" in row for row in metrics)
    validation = "eval/reward" if by_reward else "eval/accuracy"
    right = "reward" if by_reward else "accuracy, %"
    panels = {
        "reward/mean": f"reward; mean of {RUNNING_MEAN_STEPS} steps with 95 % interval",
        validation: f"validation with 95 % interval, {right}",
        "completion/length_mean": "completion length, tokens",
        "policy/entropy": "policy entropy, nats",
        "reward/zero_signal_share": "groups whose rewards are all equal, %",
        "completion/truncated_rate": "completions cut off, %",
    }
    shown = [key for key in panels if series(metrics, key)[1]]
    columns = min(3, max(1, len(shown)))
    rows = max(1, math.ceil(len(shown) / columns))
    last = max((row["step"] + 1 for row in metrics), default=0)
    margin = 0.02 * last or 0.5
    figure = new_figure(3.7 * columns, 2.8 * rows)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", parse_math=False)  # a path may have a $
    for axes, key in zip_longest(figure.subplots(rows, columns, squeeze=False).flat, shown):
        if key is None:
            axes.set_axis_off()
            continue
        _draw_panel(axes, panels[key], with_start(metrics), key)
        axes.set_xlim(-margin, last + margin)
    save_figure(figure, path)


def _draw_panel(axes: Axes, title: str, rows: Sequence[Mapping[str, float]], key: str) -> None:
    """Draw a metric with its recorded intervals, or the reward with its running mean."""
    tidy(axes)
    axes.set_title(title, fontsize=10, loc="left")
    scale = 100 if title.endswith("%") else 1
    steps, values = series(rows, key)
    marker = "o" if len(values) <= 30 else None  # draw markers if there are few points
    width, alpha = (0.8, 0.5) if key == "reward/mean" else (1.5, 1.0)
    scaled = [scale * value for value in values]
    axes.plot(steps, scaled, color=BLUE, marker=marker, ms=3.5, lw=width, alpha=alpha)
    (recorded, low), (others, high) = (series(rows, f"{key}_{end}") for end in ("low", "high"))
    bounds = [*low, *high] if recorded == others else []
    if bounds:
        low, high = ([scale * value for value in end] for end in (low, high))
        axes.fill_between(recorded, low, high, color=BLUE, alpha=0.18, linewidth=0)
    if key == "reward/mean":
        means, half = recent_means(values)
        low, high = ([m + sign * h for m, h in zip(means, half, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=ORANGE, alpha=0.25, linewidth=0)
        axes.plot(steps, means, color=ORANGE, lw=2)
    # An axis in per cent extends to at least 5 %, so that noise of 1 % looks small.
    floor = 5 if scale == 100 else 0
    ends = [1.08 * scale * value for value in (*values, *bounds)]
    bottom, top = min(0, *ends), max(0, floor, *ends)
    if top > bottom:
        axes.set_ylim(bottom, top)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("step", fontsize=9)


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure with the given width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: Axes) -> None:
    """Draw horizontal grid lines, and remove the frame above and on the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def series(rows: Sequence[Mapping[str, float]], key: str) -> tuple[list[float], list[float]]:
    """Return the numbers of completed steps and the values of a metric, where they are finite."""
    kept = [row for row in rows if row.get(key) is not None and math.isfinite(row[key])]
    return [row["step"] + 1 for row in kept], [row[key] for row in kept]


def with_start(rows: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Prepend a row for step -1 with the validation before training, and return all rows."""
    start = "eval/start_"
    first = {k.replace(start, "eval/"): v for k, v in rows[0].items() if k.startswith(start)}
    return [{"step": -1, **first}, *rows]


def recent_means(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return running means, and the half-widths of their 95 % intervals.

    The standard deviation is estimated from the differences between neighbouring steps (von Neumann
    1941). The progress of the model has little effect on these differences.
    """
    windows = [values[max(0, i + 1 - RUNNING_MEAN_STEPS) : i + 1] for i in range(len(values))]
    between = [(b - a) ** 2 for a, b in pairwise(values)] or [0.0]
    std = math.sqrt(sum(between) / len(between) / 2)
    means = [sum(window) / len(window) for window in windows]
    return means, [1.96 * std / math.sqrt(len(window)) for window in windows]


def save_figure(figure: Figure, path: Path) -> None:
    """Save a figure as a PNG file atomically, and create missing parent folders."""
    stream = io.BytesIO()
    figure.savefig(stream, dpi=150, bbox_inches="tight", format="png")
    replace_file(path, stream.getvalue())
