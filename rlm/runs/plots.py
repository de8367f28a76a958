"""Plots: accuracy of models side by side, and the learning curves of a GRPO run.

Figures are made without pyplot: no global state, no display, PNG by the Agg renderer.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette (2008): told apart with any colour vision, and in grey by lightness.
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#555555"
RUNNING = 5  # steps

Interval = Mapping[str, float]  # mean, low, high


def accuracy_bars(
    rows: Mapping[str, Mapping[str, Interval]], path: Path, title: str, note: str = ""
) -> None:
    """Bars with error bars: {row: {"strict": {mean, low, high}, "lenient": …}}, shares in 0…1.

    Args:
        note: a line below the picture (what a reader must know about the model).
    """
    groups = max(3, len(rows))
    figure = _figure(1.6 + 1.5 * groups, 4.2)
    axes = figure.subplots()
    _tidy(axes)
    width, top = 0.36, 5.0
    for side, grading, colour in ((-1, "strict", BLUE), (1, "lenient", ORANGE)):
        intervals = [row[grading] for row in rows.values()]
        means = [100 * i["mean"] for i in intervals]
        lows, highs = ([100 * i[end] for i in intervals] for end in ("low", "high"))
        places = [index + side * width / 2 for index in range(len(rows))]
        # A bootstrap interval need not hold the mean; an error bar of negative length is an error.
        below = [max(0.0, mean - low) for mean, low in zip(means, lows, strict=True)]
        above = [max(0.0, high - mean) for mean, high in zip(means, highs, strict=True)]
        bars = axes.bar(
            places,
            means,
            width,
            label=grading,
            color=colour,
            yerr=(below, above),
            error_kw={"ecolor": "black", "capsize": 3, "elinewidth": 1},
        )
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=9)
        top = max(top, *means, *highs)
    axes.set_xticks(range(len(rows)), list(rows))
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(0, 1.12 * top)
    axes.set_ylabel("accuracy, %")
    # A data set may be a long path: not into the legend.
    axes.set_title(textwrap.fill(title, 16 * groups), fontsize=11, loc="left")
    figure.legend(loc="outside right upper", frameon=False, title="grading", alignment="left")
    if note:
        figure.text(0.5, -0.03, note, fontsize=8, color=GREY, ha="center", va="top")
    _save(figure, path)


def learning_curves(metrics: Sequence[Mapping[str, float]], path: Path) -> None:
    """Six panels over the steps of a GRPO run, from the rows of its metrics.jsonl."""
    figure = _figure(11, 5.6)
    titles = {
        "reward/mean": f"reward, mean ± std; orange: mean of {RUNNING} steps",
        "eval/accuracy": "validation accuracy, %",
        "completion/length_mean": "completion length, tokens",
        "policy/entropy": "policy entropy, nats",
        "reward/zero_signal_share": "groups without a difference, %",
        "completion/truncated_rate": "truncated completions, %",
    }
    for axes, (key, title) in zip(figure.subplots(2, 3).flat, titles.items(), strict=True):
        _tidy(axes)
        axes.set_title(title, fontsize=10, loc="left")
        scale = 100 if title.endswith("%") else 1
        steps, values = _series(metrics, key)
        if not values:
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=GREY)
            axes.set(xticks=[], yticks=[])
            continue
        if key == "eval/accuracy" and metrics[0].get("eval/start_accuracy") is not None:
            steps, values = [0, *steps], [metrics[0]["eval/start_accuracy"], *values]
        marker = "o" if len(values) <= 30 else None  # few points must be seen as such
        axes.plot(steps, [scale * v for v in values], color=BLUE, lw=1.5, marker=marker, ms=3.5)
        if key == "reward/mean":
            steps, means, stds = _series(metrics, key, "reward/std")
            low, high = (
                [m + sign * s for m, s in zip(means, stds, strict=True)] for sign in (-1, 1)
            )
            axes.fill_between(steps, low, high, color=BLUE, alpha=0.15, linewidth=0)
            axes.plot(steps, _running_mean(means), color=ORANGE, lw=2)
        if scale == 100:
            axes.set_ylim(0, max(1, 108 * max(values)))
        axes.set_xlim(*_step_range(metrics))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("step", fontsize=9)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def _series(rows: Sequence[Mapping[str, float]], *keys: str) -> tuple[list[float], ...]:
    """Steps done and the values of the keys, from the rows that have a number for each."""
    kept = [
        (row["step"] + 1, *(row[key] for key in keys))
        for row in rows
        if all(row.get(key) is not None and math.isfinite(row[key]) for key in keys)
    ]
    return tuple(map(list, zip(*kept, strict=True))) or ([],) * (len(keys) + 1)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Each value's mean with the ones before it: the problems of one step may be harder."""
    windows = [values[max(0, i + 1 - RUNNING) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _step_range(rows: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """The same for all panels, so that what happened together stands in line."""
    steps = [0, *(row["step"] + 1 for row in rows)]
    margin = 0.02 * (max(steps) - min(steps)) or 0.5
    return min(steps) - margin, max(steps) + margin


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight", format="png")
