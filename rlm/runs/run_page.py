"""The page of a run: the data from its logs, and the HTML."""

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
from rlm.runs.atomic_files import LOCK, read_log
from rlm.runs.plots import recent_means, series

PAGE = Path(__file__).parent / "view_page"
# Metrics shown in the list of steps.
OF_A_STEP = ("reward/mean", "completion/truncated_rate", "eval/accuracy", "eval/reward")
CURVES = {  # metric → title; a title that ends in % is in per cent
    "reward/mean": "reward",
    "eval/accuracy": "validation, %",
    "eval/reward": "validation reward",
    "completion/length_mean": "length, tokens",
    "completion/truncated_rate": "truncated, %",
    "policy/entropy": "entropy, nats",
}
RECENT_STEPS = 5  # steps from which the remaining time is estimated
MARKED = 4096  # bytes before a mark that identify a log
MARK = re.compile(r"([0-9a-f]{1,12}\.[0-9a-f]{1,8})?/[0-9.]{0,40}|")


def read_run(path: Path, mark: str = "") -> dict[str, Any]:
    """Read the part of a run's logs that the page does not have yet.

    Args:
        mark: the mark of an earlier call; "": read all.

    Returns:
        name, running (None: unknown), age (seconds since the last step), mark; `groups` since the
        mark, or all of them if the log was restarted (`again`). If there are new steps,
        also all of `steps` (step → metrics), `curves`, `total` and `left` (seconds).
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
    rows, config = read_log(metrics), _config(path)
    return news | {
        "steps": {
            row["step"]: {k: row[k] for k in OF_A_STEP if _finite(row.get(k)) is not None}
            for row in rows
        },
        "curves": {t: _curve(rows, metric) if rows else [] for metric, t in CURVES.items()},
        "total": config.get("steps"),
        "left": _seconds_left(rows, config),
    }


def _read_since(log: Path, mark: str) -> tuple[list[dict[str, Any]], str, bool]:
    """Return the rows of a log after a mark, the next mark, and whether the log was cut since, as a
    resumed or restarted run does.

    A mark is an offset and a checksum of the bytes before it.
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
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):  # damaged by a crash; a resumed run rewrites it
            break
        start += len(line)
    with log.open("rb") as stream:
        return rows, f"{start:x}.{_checksum(stream, start):x}", again


def _checksum(stream: BinaryIO, end: int) -> int:
    """Return the checksum of the bytes before `end`; 0 at the start, -1 beyond the file's end."""
    stream.seek(max(0, end - MARKED))
    before = stream.read(min(MARKED, end))
    return zlib.crc32(before) if len(before) == min(MARKED, end) else -1


def _is_running(path: Path) -> bool | None:
    """Return whether the last trainer process is alive; None if it was on another machine."""
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


def _config(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((path / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # another recipe's run, or no run yet
        return {}


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    texts = group["completions"]
    nothing = [None] * len(texts)  # a run without a tool has no calls
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
    """Return the points of a curve: [steps done, value, mean, low, high].

    Mean and 95 % interval are over a few steps. A validation has its own value instead, with its
    recorded interval, if any; its curve begins with the validation before training.
    """
    if metric.startswith("eval/"):
        measured = [(0, _of_start(rows[0])), *((row["step"] + 1, row) for row in rows)]
        kept = [(step, row) for step, row in measured if _finite(row.get(metric)) is not None]
        steps, values = ([step for step, _ in kept], [row[metric] for _, row in kept])
        ends = (
            [row.get(f"{metric}_{end}", row[metric]) for _, row in kept] for end in ("low", "high")
        )
        means, bands = values, list(zip(*ends, strict=True))
    else:
        steps, values = series(rows, metric)
        means, half = recent_means(values)
        bands = [(m - h, m + h) for m, h in zip(means, half, strict=True)]
    points = zip(values, means, bands, strict=True)
    return [
        [step, *(float(f"{number:.4g}") for number in (value, mean, *band))]
        for step, (value, mean, band) in zip(steps, points, strict=True)
    ]


def _of_start(row: Mapping[str, float]) -> dict[str, float]:
    """Return the validation before training, which the first step's row contains, as a row."""
    start = "eval/start_"
    return {name.replace(start, "eval/"): v for name, v in row.items() if name.startswith(start)}


def _seconds_left(rows: Sequence[Mapping[str, float]], config: Mapping[str, Any]) -> float | None:
    """Estimate the remaining seconds from the last steps; None before the first."""
    took = [sum(v for k, v in row.items() if k.startswith("time/") and v) for row in rows]
    if not (took and config.get("steps")):
        return None
    recent = took[-RECENT_STEPS:]
    left = (config["steps"] - rows[-1]["step"] - 1) * sum(recent) / len(recent)
    if config.get("max_minutes"):
        left = min(left, max(0.0, 60 * config["max_minutes"] - sum(took)))
    return round(left, 1)


def _finite(value: float | None) -> float | None:
    """Return None for a value that is not finite."""
    return value if value is not None and math.isfinite(value) else None


# --- the page -------------------------------------------------------------------------------------


def render_page(runs: Sequence[Mapping[str, Any]], *, follow: bool = False) -> str:
    """Return the page with style, script and the runs' data in it.

    Model output is untrusted: it is embedded as JSON without any `<`, the script inserts it as
    text, and the content security policy allows no other script and loads nothing.

    Args:
        follow: the page may request updates from its server, and only from it.
    """
    html, style, script = (
        (PAGE / name).read_text(encoding="utf-8") for name in ("view.html", "view.css", "view.js")
    )
    content = {"follow": follow, "runs": runs}
    data = json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    policy += "; connect-src 'self'" if follow else ""
    parts = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": data}
    for name, text in parts.items():  # insert the data last: it may contain a placeholder
        html = html.replace(f"@{name}@", text, 1)
    return html


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
