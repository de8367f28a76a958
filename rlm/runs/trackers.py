"""Trackers, which log a run to Weights & Biases, TensorBoard or Trackio.

The files metrics.jsonl, samples.jsonl and train_logs.csv are written with any tracker. If a tracker
is not installed, not reachable or fails, one line reports the problem, the tracker is no longer
used, and training continues.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import netrc
import os
import secrets
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlm.cli import terminal
from rlm.runs.atomic_files import replace_file

TRACKER_NAMES = ("none", "wandb", "tensorboard", "trackio")
# Maps our metrics to the names that dashboards of other GRPO tools use. Metrics are logged under
# both names.
ALIASES = {
    "reward/mean": "rollouts/returns_mean",
    "loss/policy": "training/loss",
    "loss/kl": "training/kl",
    "optim/grad_norm": "training/grad_norm",
    "eval/accuracy": "val/accuracy",
}
RUN_ID = ".run_id"  # file in the run directory with the id of the run for its tracker
WANDB_HEADER = 7  # size in bytes of a W&B log without entries, left by a process killed early
TABLE_COLUMNS = ("step", "question", "gold", "completion", "reward", "advantage")
TABLE_ROWS = 16  # maximum number of rows in a table; samples.jsonl contains all completions


class Tracker:
    """Sends logs to a backend until the backend raises an error."""

    def __init__(self, name: str, back_end: BackEnd) -> None:
        self._name = name
        self._back_end: BackEnd | None = back_end

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step under our names and under their `ALIASES`."""
        shown = {name: value for name, value in metrics.items() if math.isfinite(value)}
        shown |= {ALIASES[name]: value for name, value in shown.items() if name in ALIASES}
        self._call("log", int(shown.pop("step")), shown)

    def log_samples(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Log the first completions of a step as a table.

        Args:
            groups: the rows of the step in samples.jsonl.
        """
        step = groups[0]["step"]
        rows = [
            (step, group["question"], group["answer"], *completion)
            for group in groups
            for completion in zip(
                group["completions"], group["rewards"], group["advantages"], strict=True
            )
        ]
        self._call("table", step, rows[:TABLE_ROWS])

    def close(self) -> None:
        """Close the backend; later calls have no effect."""
        self._call("close")
        self._back_end = None

    def _call(self, method: str, *arguments: object) -> None:
        if self._back_end is None:
            return
        try:
            getattr(self._back_end, method)(*arguments)
        except Exception as error:  # an error of a tracker must not end the run
            self._back_end = None
            terminal.line(f"tracker {self._name} failed and is no longer used: {error!r}")


# Each backend has the attribute `where`, which tells the user how to view the run, and the methods
# `log`, `table` and `close`.


class _Wandb:
    def __init__(self, run_dir: Path, config: Mapping[str, object], first_step: int) -> None:
        wandb = self._wandb = importlib.import_module("wandb")
        offline = "WANDB_MODE" not in os.environ and not _has_wandb_key()
        self._run = wandb.init(
            project=_project(),
            name=run_dir.name,
            id=_run_id(run_dir),
            resume="allow",
            dir=run_dir,
            config=dict(config),
            mode="offline" if offline else None,  # with None, WANDB_MODE decides
            settings=wandb.Settings(silent=True, console="off"),
        )
        # A resumed run logs some steps again, and W&B's own step counter rejects repeated steps.
        self._run.define_metric("*", step_metric="step")
        # Reading the URL of an offline run prints a warning.
        if url := None if self._run.offline else self._run.url:
            self.where = url
        else:  # each process of a resumed run writes a log; `wandb sync` fails for an empty log
            own = Path(self._run.dir).parent
            logs = own.parent.glob(f"offline-run-*-{self._run.id}/*.wandb")
            parts = {own, *(log.parent for log in logs if log.stat().st_size > WANDB_HEADER)}
            self.where = f"run `wandb sync {' '.join(map(str, sorted(parts)))}` to upload the run"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def table(self, step: int, rows: Sequence[Sequence[object]]) -> None:
        table = self._wandb.Table(columns=list(TABLE_COLUMNS), data=[list(row) for row in rows])
        self._run.log({"step": step, "samples": table})

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    def __init__(self, run_dir: Path, config: Mapping[str, object], first_step: int) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        # TensorBoard drops what an earlier process of this run logged from `first_step` on.
        self._writer = module.SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)
        rows = "\n".join(f"| {name} | {value} |" for name, value in config.items())
        self._writer.add_text("config", f"| option | value |\n|---|---|\n{rows}")
        self.where = f"tensorboard --logdir {run_dir / 'tensorboard'}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, step: int, rows: Sequence[Sequence[object]]) -> None:
        lines = [TABLE_COLUMNS, ["---"] * len(TABLE_COLUMNS), *rows]
        cells = [[str(v).replace("|", "\\|").replace("\n", "<br>") for v in line] for line in lines]
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(c)} |" for c in cells), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, run_dir: Path, config: Mapping[str, object], first_step: int) -> None:
        self._trackio = importlib.import_module("trackio")
        with contextlib.redirect_stdout(None):  # trackio prints a page of advice
            self._run = self._trackio.init(
                project=_project(),
                # Trackio resumes the run of this name, in whatever directory it was made.
                name=f"{run_dir.name}-{_run_id(run_dir)}",
                config=dict(config),
                resume="allow",
            )
        self.where = f"trackio show --project {_project()}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, rows: Sequence[Sequence[object]]) -> None:
        table = self._trackio.Table(columns=list(TABLE_COLUMNS), data=[list(row) for row in rows])
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(None):
            self._trackio.finish()  # otherwise trackio calls finish() at exit, which prints lines


BackEnd = _Wandb | _TensorBoard | _Trackio
BACK_ENDS = {"wandb": _Wandb, "tensorboard": _TensorBoard, "trackio": _Trackio}


def open_tracker(
    name: str, run_dir: Path, config: Mapping[str, Any], first_step: int
) -> Tracker | None:
    """Open one of `TRACKER_NAMES`. Return None for "none" and for a tracker that does not start.

    Args:
        first_step: 0, or the step at which a resumed run continues.
    """
    if name == "none":
        return None
    try:
        back_end = BACK_ENDS[name](run_dir, config, first_step)
    except ImportError as error:
        terminal.line(f"no tracker: {error}; pip install -e '.[track]' installs {name}")
        return None
    except Exception as error:  # such as no network or no account; the run continues
        terminal.line(f"no tracker: {name} does not start: {error!r}")
        return None
    terminal.line(f"tracker: {name}; {back_end.where}")
    return Tracker(name, back_end)


def _project() -> str:
    return os.environ.get("WANDB_PROJECT") or "rlm"


def _has_wandb_key() -> bool:
    """Return whether W&B can log in without a prompt on the terminal."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _run_id(run_dir: Path) -> str:
    """Return the id of a run, which is kept in its directory, so that a resumed run finds it."""
    file = run_dir / RUN_ID
    if not file.exists():
        replace_file(file, secrets.token_hex(6))
    return file.read_text()
