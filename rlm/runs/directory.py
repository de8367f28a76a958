"""The run directory, which contains the files of a run, and the handling of signals.

runs/grpo/config.json  metrics.jsonl  train_logs.csv  samples.jsonl  curves.png
          checkpoints/step_000010/{state.safetensors, state.json, manifest.json}

After the first signal to stop, the run stops at the end of the current step.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from rlm.cli import Interrupted, UsageError, terminal
from rlm.runs.atomic_files import (
    LOCK,
    append_lines,
    check_writable,
    json_lines,
    lock_file,
    read_log,
    read_rows,
    replace_file,
    replace_json,
)
from rlm.runs.checkpoints import Checkpoints, delete_folder, writing
from rlm.runs.trackers import RUN_ID, Tracker, open_tracker

# Each of these logs has one or more lines per step.
LOGS = ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl")


class RunDirectory:
    """The directory of one training run.

    Inside the context, a signal to stop takes effect at the end of a step. The directory is locked
    until the context ends, so no second process can train in it.
    """

    tracker: Tracker | None = None  # receives everything that is logged

    def __init__(self, path: Path, *, resume: bool, writes: bool = True) -> None:
        """Open or create the directory.

        Args:
            resume: whether to continue the run in the directory. If False, an earlier run of at
                least one step is moved to NAME.prev. The files of a run without a step are deleted.
            writes: False in all processes except the main process. The logs of these processes are
                dropped.

        Raises:
            UsageError: the directory cannot be written, another process is training in it, it
                contains files that are not a run, or an earlier run cannot be moved to NAME.prev.
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
                f"--run-dir {path} contains files that are not a run and would be deleted: choose "
                "an empty or a new directory"
            )
        self._lock = self._lock_directory()
        if not resume:
            if any(self.checkpoints.steps()) or read_log(self.metrics_file):
                self._put_away()
            elif self.checkpoints.folder.exists():  # an earlier run that made no step
                shutil.rmtree(self.checkpoints.folder)
            for name in (*LOGS, RUN_ID):
                (path / name).unlink(missing_ok=True)
        self.checkpoints.clean()

    def _lock_directory(self) -> IO[str]:
        advice = "trains there; wait for it or choose another directory"
        return lock_file(self.path / LOCK, f"--run-dir {self.path}", advice)

    def _put_away(self) -> None:
        here = self.path.resolve()  # resolve a symlink, so that it leads to the new run afterwards
        if Path.cwd().is_relative_to(here):
            raise UsageError(
                f"--run-dir {self.path} contains another run, which cannot be moved away because "
                "the current directory is in it: choose a new directory, or start elsewhere"
            )
        previous = here.with_name(here.name + ".prev")
        try:
            if previous.is_dir():
                if not _is_run(previous):
                    raise UsageError(
                        f"--run-dir {self.path} contains another run, which cannot be moved away "
                        f"because {previous} contains files that are not a run: choose a new "
                        "directory"
                    )
                delete_folder(previous)
            here.rename(previous)  # the lock moves with it
            here.mkdir(exist_ok=True)
        except OSError as error:  # for example, the directory is a mount point
            raise UsageError(
                f"--run-dir {self.path} contains another run, which cannot be moved to {previous} "
                f"({error.strerror}): choose a new directory"
            ) from error
        self._lock.close()
        self._lock = self._lock_directory()
        (previous / LOCK).unlink()
        terminal.line(f"the earlier run in {self.path} was moved to {previous}")

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
        """Whether this process has received a signal to stop after the current step."""
        return self._interrupts.received is not None

    def raise_if_interrupted(self, interrupted: bool) -> None:
        """Raise Interrupted if any process of the run has received a signal to stop.

        Args:
            interrupted: whether any process has received a signal.

        Raises:
            Interrupted: with the received signal, or with SIGTERM if only another process has
                received a signal.
        """
        if interrupted:
            saved = self.checkpoints.steps()
            note = f"{self.path} is saved up to step {saved[-1]}" if saved else "interrupted"
            number = self._interrupts.received or signal.SIGTERM
            raise Interrupted(number, note if self.writes else "")

    def begin(self, config: Mapping[str, Any], first_step: int) -> None:
        """Write config.json, and open the tracker that the config selects.

        Args:
            first_step: 0, or the step at which a resumed run continues.
        """
        if self.writes:
            # With `resume` off, `--config config.json` starts a new run.
            with writing(self.path / "config.json"):
                replace_json(self.path / "config.json", {**config, "resume": False})
            self.tracker = open_tracker(config["tracker"], self.path, config, first_step)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step. Values that are not finite are written as null."""
        row = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self.append(self.metrics_file, [row])
        if self.tracker:
            self.tracker.log(metrics)

    def log_samples(self, rows: list[dict[str, object]], *, shown: bool = False) -> None:
        """Append the completions of a step; with `shown`, also send them to the tracker."""
        self.append(self.samples_file, rows)
        if self.tracker and shown:
            self.tracker.log_samples(rows)

    def append(self, file: Path, rows: Sequence[Mapping[str, object]]) -> None:
        """Append rows to a log, and sync the log to disk, because checkpoints rely on the rows."""
        if self.writes:
            with writing(file):
                append_lines(file, rows)

    def metrics(self) -> list[dict[str, float]]:
        """Return the metrics of all logged steps before the first damaged row."""
        return [
            {name: math.nan if value is None else value for name, value in row.items()}
            for row in read_log(self.metrics_file)
        ]

    def write_csv(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write the metrics of each step to train_logs.csv, for use in a spreadsheet."""
        file = self.path / "train_logs.csv"
        columns = list(dict.fromkeys(name for row in rows for name in row))
        stream = io.StringIO(newline="")
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)
        with writing(file):
            replace_file(file, stream.getvalue())

    def truncate(self, step: int) -> None:
        """Remove the rows from `step` on from the logs. A resumed run logs these steps again.

        A damaged row is removed, too, with a warning if it is followed by a row that is kept.
        """
        if not self.writes:
            return
        for file in [self.path / name for name in LOGS if (self.path / name).exists()]:
            rows = [row for row in read_rows(file) if row.get("step", -1) < step]
            while rows and not rows[-1]:  # written after the checkpoint
                rows.pop()
            kept = [row for row in rows if row]
            if damaged := len(rows) - len(kept):
                terminal.line(f"warning: number of damaged rows removed from {file}: {damaged}")
            with writing(file):
                replace_file(file, json_lines(kept))


def _is_run(path: Path) -> bool:
    """Return whether a directory contains a run, or contains no files except hidden ones.

    A killed process may leave hidden files. Empty folders do not count: `check_output` creates
    them if --output is below the directory.
    """
    marks = [LOCK, *LOGS, "checkpoints/step_*/manifest.json", "vllm*.log"]
    marks += ["sampler_adapter/adapter_config.json"]  # --doctor with a vLLM server writes only this
    return _is_empty(path) or any(next(path.glob(mark), None) for mark in marks)


def _is_empty(path: Path) -> bool:
    if not os.access(path, os.R_OK):  # such as lost+found
        return False
    return all(f.name.startswith(".") or (f.is_dir() and _is_empty(f)) for f in path.iterdir())


def git_commit() -> str | None:
    """Return the commit of the running code; None outside a git checkout or without `git`.

    Git also fails if another repository contains this file without tracking it, as in .venv.
    """
    file = Path(__file__)
    command = ["git", "-C", str(file.parent), "rev-parse", "HEAD", f"HEAD:./{file.name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split()[0]


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Records the first SIGINT, SIGTERM or SIGHUP in `received` instead of ending the process.

    A second signal ends the process at once through the system's default handler, even during a
    matrix multiplication. No data is lost, because files are written either completely or not at
    all. If the process is not `alone`, later signals are ignored, because the launcher repeats the
    signal from the terminal and kills processes that take too long. In a notebook, a second signal
    raises KeyboardInterrupt, because the kernel must survive. A signal that was already ignored
    (with nohup or in a background job) stays ignored.
    """

    def __init__(self, *, alone: bool) -> None:
        self.received: int | None = None
        self._then = signal.SIG_DFL if alone else signal.SIG_IGN
        self._notice = " (a second signal stops at once)" if alone else ""
        self._before: dict[int, Any] = {}  # earlier handlers by signal

    def __enter__(self) -> Interrupts:
        # Only the main thread may set handlers.
        if threading.current_thread() is threading.main_thread():
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
        for other, before in self._before.items():
            signal.signal(other, before if "ipykernel" in sys.modules else self._then)
        with contextlib.suppress(OSError):  # the terminal may be gone
            # print() is not safe here: the signal may have interrupted a print().
            os.write(2, f"\nstopping after this step{self._notice}\n".encode())
