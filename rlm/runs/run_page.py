"""The page that shows a run: reads the data from the logs, and renders the HTML."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import socket
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rlm.grading import has_wrong_equation
from rlm.runs.atomic_files import LOCK, parse_row, read_json, read_log
from rlm.runs.plots import recent_means, series, with_start

PAGE = Path(__file__).parent / "view_page"
# The metrics that are shown for each step in the list of steps.
OF_A_STEP = ("reward/mean", "completion/truncated_rate", "eval/accuracy", "eval/reward")
CURVES = {  # maps each metric to its title; if the title ends in %, values are in per cent
    "reward/mean": "reward",
    "eval/accuracy": "validation, %",
    "eval/reward": "validation reward",
    "completion/length_mean": "length, tokens",
    "completion/truncated_rate": "truncated, %",
    "policy/entropy": "entropy, nats",
}
RECENT_STEPS = 5  # number of last steps from which the remaining time is estimated
MARKED = 4096  # maximum number of bytes that the checksum of a mark covers
MARK = re.compile(r"([0-9a-f]{1,12}\.[0-9a-f]{1,8})?/[0-9.]{0,40}|")


def read_run(path: Path, mark: str = "") -> dict[str, Any]:
    """Read the part of a run's logs that the page has not received yet.

    Args:
        mark: the mark that an earlier call returned; "" to read the whole logs.

    Returns:
        A dictionary with `name`, `running` (None if unknown), `age` (seconds since the last step),
        `mark` (for the next call), `groups` (the groups since the mark), and `again` (whether the
        log was truncated, so that `groups` contains all groups). If there are new steps, the
        dictionary also contains `steps` (the metrics of each step) and `curves` for all steps,
        `total` (the number of steps of the whole run), and `left` (the remaining seconds).

    Raises:
        UsageError: config.json is damaged.
    """
    metrics = path / "metrics.jsonl"
    samples_mark, _, metrics_mark = mark.partition("/")
    groups, samples_mark, again = _read_since(path / "samples.jsonl", samples_mark)
    state = metrics.stat() if metrics.exists() else None
    version = f"{state.st_mtime_ns}.{state.st_size}" if state else ""
    news: dict[str, Any] = {
        "name": str(path),
        "running": _is_running(path),
        "age": max(0.0, time.time() - state.st_mtime) if state else None,
        "mark": f"{samples_mark}/{version}",
        "again": again,
        "groups": [_group(group) for group in groups],
    }
    if version == metrics_mark and mark:
        return news
    rows, config = read_log(metrics), read_json(path / "config.json")
    # Each training process writes config.json when it starts or resumes the run.
    began = (path / "config.json").stat().st_mtime if config else math.inf
    trained = max(0.0, state.st_mtime - began) if state else 0.0
    return news | {
        "steps": {
            row["step"]: {k: row[k] for k in OF_A_STEP if _finite(row.get(k)) is not None}
            for row in rows
        },
        "curves": {t: _curve(rows, metric) if rows else [] for metric, t in CURVES.items()},
        "total": config.get("steps"),
        "left": _seconds_left(rows, config, trained),
    }


def _read_since(log: Path, mark: str) -> tuple[list[dict[str, Any]], str, bool]:
    """Read the rows of a log after a mark.

    A mark consists of an offset and a checksum of the last MARKED bytes before this offset.

    Returns:
        The rows, the next mark, and whether the log was truncated since the mark, as by a resumed
        or restarted run. If it was truncated, all rows are returned.
    """
    start, known = (int(part, 16) for part in mark.split(".")) if mark else (0, 0)
    if not log.exists():
        return [], "", bool(mark)
    with log.open("rb") as stream:
        if again := _checksum(stream, start) != known:
            start = 0
        stream.seek(start)
        content = stream.read()
        rows = []
        for line in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
            if not (row := parse_row(line)):  # damaged by a crash; a resumed run rewrites it
                break
            rows.append(row)
            start += len(line)
        # Read the same stream, because a resumed run may have replaced the file meanwhile.
        return rows, f"{start:x}.{_checksum(stream, start):x}", again


def _checksum(stream: BinaryIO, end: int) -> int:
    """Return the checksum of the last MARKED bytes before `end`; -1 if the file ends earlier."""
    stream.seek(max(0, end - MARKED))
    before = stream.read(min(MARKED, end))
    return zlib.crc32(before) if len(before) == min(MARKED, end) else -1


def _is_running(path: Path) -> bool | None:
    """Return whether the last training process is running; None if this is unknown.

    The state is unknown if the process was started on another machine.
    """
    try:
        found = re.fullmatch(r"process (\d+) on (.*)\n", (path / LOCK).read_text("utf-8"))
    except OSError:
        return None
    if not found or found[2] != socket.gethostname():
        return None
    try:
        os.kill(int(found[1]), 0)  # signal 0 only checks that the process exists
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    texts = group["completions"]
    # Missing columns, such as tool_calls in a run without a tool, are filled with None.
    nothing = [None] * len(texts)
    columns = (
        map(_finite, group["rewards"]),
        map(_finite, group["advantages"]),
        *(group.get(name) or nothing for name in ("verdicts", "truncated", "tool_calls")),
    )
    names = ("text", "reward", "advantage", "verdict", "truncated", "tool_calls")
    rows: list[dict[str, Any]] = [
        dict(zip(names, row, strict=True)) for row in zip(texts, *columns, strict=True)
    ]
    for row in rows:
        row["flawed"] = row["verdict"] == "correct" and has_wrong_equation(row["text"])
    kept = {name: group[name] for name in ("step", "problem", "question", "answer")}
    return kept | {"completions": rows}


def _curve(rows: Sequence[Mapping[str, float]], metric: str) -> list[list[float]]:
    """Return the points of a curve, each as [completed steps, value, mean, low, high].

    The mean and its 95 % interval are computed over a few steps. For a validation metric, the mean
    is the value itself, and the interval is the recorded interval, if there is one. The curve of a
    validation metric begins with the validation before training.
    """
    if metric.startswith("eval/"):
        kept = [row for row in with_start(rows) if _finite(row.get(metric)) is not None]
        steps, values = series(kept, metric)
        means, bands = values, [_interval(row, metric) for row in kept]
    else:
        steps, values = series(rows, metric)
        means, half = recent_means(values)
        bands = [(m - h, m + h) for m, h in zip(means, half, strict=True)]
    points = zip(values, means, bands, strict=True)
    return [
        [step, *(float(f"{number:.4g}") for number in (value, mean, *band))]
        for step, (value, mean, band) in zip(steps, points, strict=True)
    ]


def _interval(row: Mapping[str, Any], metric: str) -> list[float]:
    ends = [row.get(f"{metric}_{end}") for end in ("low", "high")]
    return [row[metric] if end is None else end for end in ends]  # null: an infinite interval


def _seconds_left(
    rows: Sequence[Mapping[str, float]], config: Mapping[str, Any], trained: float
) -> float | None:
    """Estimate the remaining seconds from the last steps; None before the first step.

    Args:
        trained: the seconds that the last process of the run has trained, which --max-minutes
            limits. `rows` may contain steps of earlier processes.
    """
    took = [sum(v for k, v in row.items() if k.startswith("time/") and v) for row in rows]
    if not (took and config.get("steps")):
        return None
    recent = took[-RECENT_STEPS:]
    left = (config["steps"] - rows[-1]["step"] - 1) * sum(recent) / len(recent)
    if config.get("max_minutes"):
        left = min(left, max(0.0, 60 * config["max_minutes"] - trained))
    return round(left, 1)


def _finite(value: float | None) -> float | None:
    """Return the value if it is finite, otherwise None."""
    return value if value is not None and math.isfinite(value) else None


# --- the page -------------------------------------------------------------------------------------


def render_page(runs: Sequence[Mapping[str, Any]], *, follow: bool = False) -> str:
    """Return the page as HTML, including the style, the script and the data of the runs.

    Model output is untrusted. It is therefore embedded as JSON without any `<`, and the script
    inserts it as text. The content security policy allows no other script and no other resources.

    Args:
        follow: whether the page may request updates from its server. It may never send requests
            to any other server.
    """
    html, style, script = (
        (PAGE / name).read_text(encoding="utf-8") for name in ("view.html", "view.css", "view.js")
    )
    content = {"follow": follow, "runs": runs}
    data = json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    policy += "; connect-src 'self'" if follow else ""
    parts = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": data}
    for name, text in parts.items():  # insert the data last, because they may contain a placeholder
        html = html.replace(f"@{name}@", text, 1)
    return html


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
