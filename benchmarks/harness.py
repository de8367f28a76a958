"""Contains the shared code of the benchmarks: options, timing, child processes and reports.

A benchmark compares programs (*arms*) in several cases (*cells*). Its report is a JSON file with
the `ratio` of the headline case (and its `memory_ratio`, if memory was measured), every repetition
of every program under `cells`, and the command, machine, commit and date, which are needed to
repeat the benchmark.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import torch

from rlm.cli import check_values, flag, terminal
from rlm.evaluation import show_table
from rlm.model import hardware as machine
from rlm.runs import git_commit, replace_json

T = TypeVar("T")

OURS = "ours"
ROOT = Path(__file__).parent.parent
# The instruction sets that decide how fast a CPU multiplies matrices, and in which dtypes.
INSTRUCTION_SETS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
LIBRARIES = ("torch", "transformers", "trl", "peft")


@dataclass
class BenchmarkConfig:
    """Contains the options that most benchmarks have."""

    model: str = flag(machine.EMBEDDED_MODEL, "hub id or folder (also from benchmarks.shapes)")
    dataset: str = flag("word-problems:1", "dataset that provides the prompts")
    seed: int = flag(0, "random seed for the problems and the sampling")
    json: Path | None = flag(None, "file for the report")

    def __post_init__(self) -> None:
        check_values(self)


# --- running ------------------------------------------------------------------------------------


def alternate(
    arms: Mapping[str, Callable[[int], T]],
    repeats: int,
    *,
    warm_up: bool = True,
    say: Callable[[str, int, T], str] | None = None,
) -> dict[str, list[T]]:
    """Run the programs in turns (A B A B …), so that disturbances affect all; return their results.

    Each program is called with the number of the repetition, so that all programs get the same
    work. Number 0 is the warmup, whose result is dropped.

    Args:
        say: returns a line about a result, which is printed with the progress and the time left.
    """
    results: dict[str, list[T]] = {name: [] for name in arms}
    repetitions = range(0 if warm_up else 1, repeats + 1)
    done, total, began = 0, len(repetitions) * len(arms), time.monotonic()
    for repetition in repetitions:
        for name, arm in arms.items():
            result = arm(repetition)
            if repetition:
                results[name].append(result)
            done += 1
            if say:
                left = (time.monotonic() - began) / done * (total - done)
                more = f"; {terminal.time_left(left)}" if done < total else ""
                terminal.line(f"[{done} of {total}] {say(name, repetition, result)}{more}")
    return results


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Call `work`, and return its duration in seconds and its result.

    The GPU is synchronized before and after the call.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


class ChildFailed(RuntimeError):
    """Raised if a child process fails; the message contains the end of its output."""


def run_child(
    module: str,
    function: str,
    payload: Mapping[str, Any],
    log: Path | None = None,
    inherited: Sequence[int] = (),
) -> dict[str, Any]:
    """Run `module.function(**payload)` in a child process; return its dict and `peak_memory_gb`.

    If this process is killed, the child ends too, so that it disturbs no later measurement.

    Args:
        log: file for the child's output (None: a temporary file).
        inherited: file descriptors that the child keeps open, such as that of a lock.
    """
    with tempfile.TemporaryDirectory() as folder:
        target, log = Path(folder) / "result.json", log or Path(folder) / "log.txt"
        child = ["-m", "benchmarks.harness", module, function, json.dumps(payload), str(target)]
        with log.open("a", encoding="utf-8") as stream:
            process = subprocess.Popen(
                [sys.executable, *child],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                pass_fds=inherited,
            )
            with process:  # if this process ends, the pipe closes and the child exits
                code = process.wait()
        if code:
            end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
            raise ChildFailed(f"{module}.{function} exited with {code}:\n{end}")
        return json.loads(target.read_text(encoding="utf-8"))


def _child(module: str, function: str, payload: str, target: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    result = getattr(importlib.import_module(module), function)(**json.loads(payload))
    result["peak_memory_gb"] = machine.peak_memory_gb()
    Path(target).write_text(json.dumps(result), encoding="utf-8")


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # stdin is a silent pipe: EOF when the parent ends
    os._exit(1)


# --- figures ------------------------------------------------------------------------------------


def summary(runs: Sequence[float]) -> dict[str, Any]:
    """Return all repetitions with their median, minimum and maximum.

    >>> summary([3.0, 1.0, 2.0])
    {'runs': [3.0, 1.0, 2.0], 'median': 2.0, 'min': 1.0, 'max': 3.0}
    """
    median = statistics.median(runs)
    return {"runs": list(runs), "median": median, "min": min(runs), "max": max(runs)}


def cell(
    name: str, unit: str, runs: Mapping[str, Sequence[float]], *, more_is_better: bool
) -> dict[str, Any]:
    """Make a case of a report. For any unit, a ratio above 1 means that this project is better.

    The ratio is computed from the medians, and its range from the ratios of single repetitions.

    Args:
        runs: program → its results; this project is "ours". Repetition i is the same work for every
            program.
    """
    arms = {arm: summary(values) for arm, values in runs.items()}
    ratio, ranges = {}, {}

    def ahead(mine: float, theirs: float) -> float:
        return mine / theirs if more_is_better else theirs / mine

    for arm in [arm for arm in arms if arm != OURS]:
        ratio[arm] = ahead(arms[OURS]["median"], arms[arm]["median"])
        pairs = [ahead(*pair) for pair in zip(runs[OURS], runs[arm], strict=True)]
        ranges[arm] = [min(pairs), max(pairs)]
    return {"name": name, "unit": unit, "arms": arms, "ratio": ratio, "ratio_range": ranges}


def report(
    benchmark: str,
    headline: Mapping[str, Any],
    cells: Sequence[Mapping[str, Any]],
    memory_gb: Mapping[str, float] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Make the report for `--json`; its `ratio` is that of the headline case."""
    if memory_gb:
        ratio = {arm: memory_gb[OURS] / peak for arm, peak in memory_gb.items() if arm != OURS}
        more = {"memory_ratio": ratio, "memory_gb": dict(memory_gb), **more}
    return {
        "benchmark": benchmark,
        "headline": headline["name"],
        "ratio": headline["ratio"],
        **more,
        "cells": list(cells),
        **provenance(benchmark),
    }


def provenance(benchmark: str) -> dict[str, Any]:
    """Return the command, machine, commit and date, which are needed to repeat the benchmark."""
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]),
        "machine": describe_machine(),
        "commit": code_commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def code_commit() -> str | None:
    """Return the commit of this code, with the suffix -dirty if tracked files have changed."""
    commit = git_commit()
    if commit is None:
        return None
    command = ["git", "--no-optional-locks", "-C", str(ROOT), "status", "--porcelain"]
    changed = subprocess.check_output([*command, "--untracked-files=no"], text=True).strip()
    return f"{commit}-dirty" if changed else commit


def describe_machine() -> dict[str, Any]:
    """Return hardware and library versions, without the host's name."""
    info = Path("/proc/cpuinfo")
    core = info.read_text().partition("\n\n")[0] if info.exists() else ""  # all cores are alike
    rows = (row.partition(":") for row in core.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in rows}
    flags = set(fields.get("flags", "").split())
    device = machine.pick_device()
    return {
        "cpu": fields.get("model name") or platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None,
        "dtype": str(device.dtype).removeprefix("torch."),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in LIBRARIES},
    }


# --- showing and writing ------------------------------------------------------------------------


def show(title: str, cells: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a row per case: each program's median (minimum – maximum), and the ratios.

    For any unit, a ratio above 1 means that this project is better.
    """
    rows = {}
    for row in cells:
        columns = {
            arm: f"{found['median']:.4g} ({found['min']:.4g} – {found['max']:.4g})"
            for arm, found in row["arms"].items()
        }
        for peer, (low, high) in row["ratio_range"].items():
            columns[f"ahead of {peer}"] = f"{row['ratio'][peer]:.2f} × ({low:.2f} – {high:.2f})"
        rows[f"{row['name']}, {row['unit']}"] = columns | {"note": row.get("note", "")}
    show_table("", rows, title)


def template(file: Path, **filters: Callable[..., Any]) -> jinja2.Template:
    """Load a template with the given filters; undefined names in it raise an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(file.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= filters
    return environment.get_template(file.name)


def write_report(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write the report to `--json`, if given."""
    if path is not None:
        replace_json(path, content)
        terminal.line(f"written: {path}")


if __name__ == "__main__":
    _child(*sys.argv[1:])
