"""The run directory: config, metrics, samples, checkpoints, and exact resume.

    runs/grpo/config.json  metrics.jsonl  train_logs.csv  samples.jsonl  curves.png
              checkpoints/step_000010/{adapter/, state.safetensors, state.json, manifest.json}

A checkpoint is complete or does not exist: it is written under another name, its manifest of
hashes last, synced to disk, then renamed. Nothing in it can execute: tensors are safetensors.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlm import terminal
from rlm.config import UsageError


def check_writable(option: str, path: Path) -> None:
    """Make the directory and write in it, before hours of work depend on it.

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
    """Where one training run writes."""

    def __init__(self, path: Path, *, resume: bool, writes: bool = True) -> None:
        """Open or make it.

        Args:
            writes: false in the processes of a launch that only follow: what they log is dropped.

        Raises:
            UsageError: it cannot be written.
        """
        self.path = path
        self.writes = writes
        self.metrics_file = path / "metrics.jsonl"
        self.samples_file = path / "samples.jsonl"
        if not writes:
            return
        check_writable("--run-dir", path)
        if not resume:
            if (path / "checkpoints").exists():
                previous = path.with_name(path.name + ".prev")
                shutil.rmtree(previous, ignore_errors=True)
                path.rename(previous)
                path.mkdir()
                terminal.line(f"{path} held another run; it is kept as {previous}")
            for file in path.glob("*.jsonl"):
                file.unlink()

    def write_config(self, config: Mapping[str, object]) -> None:
        if self.writes:
            _write_json(self.path / "config.json", config)

    def read_config(self) -> dict[str, object]:
        return json.loads((self.path / "config.json").read_text(encoding="utf-8"))

    def log(self, metrics: Mapping[str, float]) -> None:
        """Append one step's figures."""
        if not self.writes:
            return
        with self.metrics_file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(metrics) + "\n")

    def log_samples(self, rows: list[dict[str, object]]) -> None:
        if not self.writes:
            return
        with self.samples_file.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def metrics(self) -> list[dict[str, float]]:
        """All steps logged so far; a torn last line (a kill while writing) is left out."""
        return _read_jsonl(self.metrics_file)

    def write_csv(self) -> None:
        """train_logs.csv: the same figures, for a spreadsheet."""
        rows = self.metrics()
        columns = list(dict.fromkeys(name for row in rows for name in row))
        with (self.path / "train_logs.csv").open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, columns)
            writer.writeheader()
            writer.writerows(rows)

    def truncate(self, step: int) -> None:
        """Forget what any .jsonl file has from `step` on: a resumed run will log it again."""
        if not self.writes:
            return
        for file in self.path.glob("*.jsonl"):
            kept = [row for row in _read_jsonl(file) if row["step"] < step]
            scratch = file.with_suffix(".tmp")
            scratch.write_text(
                "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept),
                encoding="utf-8",
            )
            scratch.replace(file)

    # --- checkpoints ------------------------------------------------------------------------

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def save_checkpoint(
        self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, object], keep: int
    ) -> None:
        """Write checkpoint `step` (the next step to run) and drop all but the newest `keep`."""
        if not self.writes:
            return
        target = self._checkpoints / f"step_{step:06d}"
        scratch = self._checkpoints / f".{target.name}.{os.getpid()}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        save_file({k: v.contiguous() for k, v in tensors.items()}, scratch / "state.safetensors")
        _write_json(scratch / "state.json", {**state, "step": step})
        manifest = {f.name: _sha256(f) for f in sorted(scratch.iterdir())}
        for file in scratch.iterdir():
            _sync(file)
        _write_json(scratch / "manifest.json", manifest)
        _sync(scratch / "manifest.json")
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
        _sync(self._checkpoints)
        for old in self._complete()[:-keep]:
            shutil.rmtree(old)

    def load_checkpoint(self) -> tuple[dict[str, torch.Tensor], dict[str, object]] | None:
        """The newest checkpoint whose hashes hold, or None. Damaged ones are named."""
        for folder in reversed(self._complete()):
            try:
                manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
                damaged = [n for n, digest in manifest.items() if _sha256(folder / n) != digest]
                if damaged:
                    raise ValueError(f"{damaged[0]} has changed")
                state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
                return load_file(folder / "state.safetensors"), state
            except (OSError, ValueError, SafetensorError) as error:
                terminal.line(f"checkpoint {folder.name} is damaged and passed over: {error}")
        return None

    def _complete(self) -> list[Path]:
        """Checkpoints with a manifest, oldest first."""
        return sorted(file.parent for file in self._checkpoints.glob("step_*/manifest.json"))


def git_commit() -> str | None:
    """The commit of the code that runs; None outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read_jsonl(file: Path) -> list[dict]:
    rows = []
    if not file.exists():
        return rows
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:  # torn by a kill; the step it belongs to is run again
            break
    return rows


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
