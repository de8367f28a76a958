"""The run directory: config, metrics, samples, checkpoints; who may write there, and when to leave.

runs/grpo/config.json  metrics.jsonl  train_logs.csv  samples.jsonl  curves.png
          checkpoints/step_000010/{state.safetensors, state.json, manifest.json}

The first signal to stop is noted, and obeyed between two steps.
"""

from __future__ import annotations

import contextlib
import csv
import math
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from rlm.cli import Interrupted, UsageError, terminal
from rlm.runs.atomic_files import (
    LOCK,
    append_lines,
    json_lines,
    lock_file,
    read_log,
    replace_file,
    replace_json,
)
from rlm.runs.checkpoints import Checkpoints, writing
from rlm.runs.trackers import Tracker, open_tracker

LOGS = ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl")  # a line or more for each step


def check_writable(option: str, path: Path) -> None:
    """Check that the directory can be made and written, before hours of work depend on it.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write_test_{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror}") from error


class RunDirectory:
    """Directory in which one training run writes, alone. In `with`, signals wait for a step's end.

    A second process that opens it is refused until this one has left or died.
    """

    tracker: Tracker | None = None  # is shown all that is logged

    def __init__(self, path: Path, *, resume: bool, writes: bool = True) -> None:
        """Open or make it.

        Args:
            writes: false in the processes of a launch that only follow: what they log is dropped.

        Raises:
            UsageError: it cannot be written, another process trains in it, it holds what no run
                wrote, or an earlier run that is there cannot be moved away.
        """
        self.path = path
        self.writes = writes
        self.checkpoints = Checkpoints(path / "checkpoints")
        self.metrics_file = path / "metrics.jsonl"
        self.samples_file = path / "samples.jsonl"
        self._interrupts = Interrupts(alone="WORLD_SIZE" not in os.environ)
        if not writes:
            return
        check_writable("--run-dir", path)
        if not _is_run(path):
            raise UsageError(
                f"--run-dir {path} holds files that are no run and would be deleted: name an empty "
                "or a new folder"
            )
        self._lock = self._lock_directory()
        if not resume:
            if self.checkpoints.folder.exists():
                self._put_away()
            for name in LOGS:
                (path / name).unlink(missing_ok=True)
        self.checkpoints.clean()

    def _lock_directory(self) -> IO[str]:
        advice = "trains there; wait for it or name another directory"
        return lock_file(self.path / LOCK, f"--run-dir {self.path}", advice)

    def _put_away(self) -> None:
        here = self.path.resolve()  # what a link leads to: it leads to the new run afterwards
        if Path.cwd().is_relative_to(here):
            raise UsageError(
                f"--run-dir {self.path} holds another run, which cannot be moved away from under "
                "the current directory: name a new directory, or start this from elsewhere"
            )
        previous = here.with_name(here.name + ".prev")
        try:
            if previous.is_dir():
                shutil.rmtree(previous)
            here.rename(previous)  # and with it the lock
            here.mkdir(exist_ok=True)
        except OSError as error:  # a mount point, say
            raise UsageError(
                f"--run-dir {self.path} holds another run, which cannot be moved to {previous} "
                f"({error.strerror}): name a new directory"
            ) from error
        self._lock.close()
        self._lock = self._lock_directory()
        (previous / LOCK).unlink()
        terminal.line(f"{self.path} held an older run, which is now {previous}")

    def __enter__(self) -> RunDirectory:
        self._interrupts.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._interrupts.__exit__(*error)
        if self.tracker:
            self.tracker.close()
        if self.writes:
            self._lock.close()

    @property
    def interrupted(self) -> bool:
        """Whether a signal asks this process to stop after its step."""
        return self._interrupts.received is not None

    def raise_if_interrupted(self, interrupted: bool) -> None:
        """Leave if a signal asked to.

        Raises:
            Interrupted: with what was received; SIGTERM if another process received it.
        """
        if interrupted:
            saved = self.checkpoints.steps()
            note = f"{self.path} is saved up to step {saved[-1]}" if saved else "interrupted"
            number = self._interrupts.received or signal.SIGTERM
            raise Interrupted(number, note if self.writes else "")

    def begin(self, config: Mapping[str, object]) -> None:
        """Write config.json and open the tracker that it names."""
        if self.writes:
            with writing(self.path / "config.json"):
                replace_json(self.path / "config.json", config)
            self.tracker = open_tracker(config["tracker"], self.path, config)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Append one step's metrics; what is not finite is written as null."""
        row = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self.append(self.metrics_file, [row])
        if self.tracker:
            self.tracker.log(metrics)

    def log_samples(self, rows: list[dict[str, object]]) -> None:
        self.append(self.samples_file, rows)
        if self.tracker:
            self.tracker.log_samples(rows)

    def append(self, file: Path, rows: Sequence[Mapping[str, object]]) -> None:
        """Add lines to a log, and sync them to the disk: a checkpoint says that they are there."""
        if self.writes:
            with writing(file):
                append_lines(file, rows)

    def metrics(self) -> list[dict[str, float]]:
        """All steps logged so far; a torn last line (a kill while writing) is left out."""
        return [
            {name: math.nan if value is None else value for name, value in row.items()}
            for row in read_log(self.metrics_file)
        ]

    def write_csv(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write train_logs.csv: the metrics of each step, for a spreadsheet."""
        file = self.path / "train_logs.csv"
        columns = list(dict.fromkeys(name for row in rows for name in row))
        with writing(file), file.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, columns)
            writer.writeheader()
            writer.writerows(rows)

    def truncate(self, step: int) -> None:
        """Cut the logs at `step`: a resumed run will log it again."""
        if not self.writes:
            return
        for file in [self.path / name for name in LOGS if (self.path / name).exists()]:
            kept = [row for row in read_log(file) if row["step"] < step]
            with writing(file):
                replace_file(file, json_lines(kept))


def _is_run(path: Path) -> bool:
    """Whether nothing is in a directory (but for hidden files: a kill leaves some of ours), or what
    a run leaves there."""
    marks = [LOCK, *LOGS, "checkpoints/step_*/manifest.json", "vllm*.log"]
    empty = all(file.name.startswith(".") for file in path.iterdir())
    return empty or any(next(path.glob(mark), None) for mark in marks)


def git_commit() -> str | None:
    """The commit of the code that runs; None outside a git checkout, or without `git`."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTICE = b"\nstopping after this step (once more: at once)\n"


class Interrupts:
    """Notes a first SIGINT, SIGTERM or SIGHUP in `received` instead of ending the process.

    A second one ends the process at once, even inside a matrix product: the system does it, not
    Python. Nothing is lost by it, for all that is written is written complete or not at all. Where
    several processes share a run, later signals are ignored instead: their launcher passes on the
    signal that the terminal has already sent to all, and kills who takes too long.
    A signal that was ignored (nohup, a job in the background) stays ignored.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self.received: int | None = None
        self._then = signal.SIG_DFL if alone else signal.SIG_IGN
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # Python allows no other
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for other in self._before:
            signal.signal(other, self._then)
        with contextlib.suppress(OSError):  # the terminal may be what has gone
            os.write(2, NOTICE)  # not print: the signal may have come in the middle of one
