"""Checkpoints that are complete or do not exist.

    checkpoints/step_000010/{state.safetensors, state.json, manifest.json}

A checkpoint is written under a temporary name and synced to disk. The manifest, which contains the
hashes of the other files, is written last; then the folder is renamed. A load takes the newest
valid checkpoint; damaged ones are set aside, never deleted. Loading executes no code: tensors are
safetensors.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlm.cli import UsageError, terminal
from rlm.runs.atomic_files import replace_json, sync

TENSORS, STATE, MANIFEST = "state.safetensors", "state.json", "manifest.json"
# Errors that reading a damaged or hostile checkpoint may raise.
CORRUPT_ERRORS = (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError)


class Checkpoints:
    """The checkpoints of a run; the writer holds the run's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def clean(self) -> None:
        """Remove what a killed process left half-written or half-deleted."""
        for leftover in self.folder.glob(".step_*"):
            shutil.rmtree(leftover)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, object],
        *,
        keep: int,
        protect: int | None = None,
    ) -> None:
        """Write the checkpoint `step`, then delete all but the newest `keep`.

        Args:
            protect: also keep the newest checkpoint at or before this step.

        Raises:
            UsageError: it cannot be written; earlier checkpoints are untouched.
        """
        target = self._path(step)
        with writing_beside(target) as scratch:
            save_file({k: v.contiguous() for k, v in tensors.items()}, scratch / TENSORS)
            sync(scratch / TENSORS)
            replace_json(scratch / STATE, {**state, "step": step})
            replace_json(scratch / MANIFEST, _hashes(scratch))
            if target.exists():
                self._delete(target)
            scratch.rename(target)
            sync(self.folder)
        steps = self.steps()
        kept = {*steps[-keep:], *[s for s in steps if protect is not None and s <= protect][-1:]}
        for old in set(steps) - kept:
            self._delete(self._path(old))

    def load(
        self, *, at_most: int | None = None, set_aside: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, object]] | None:
        """Return tensors and state of the newest valid checkpoint, or None.

        Args:
            at_most: load only checkpoints of this step or earlier.
            set_aside: rename damaged ones, so that they are not tried again.
        """
        for step in reversed(self.steps()):
            if at_most is not None and step > at_most:
                continue
            folder = self._path(step)
            try:
                if json.loads((folder / MANIFEST).read_text(encoding="utf-8")) != _hashes(folder):
                    raise ValueError("its files do not match its manifest")
                state = json.loads((folder / STATE).read_text(encoding="utf-8"))
                if state["step"] != step:
                    raise ValueError(f"its state is of step {state['step']}")
                return load_file(folder / TENSORS), state
            except CORRUPT_ERRORS as error:
                done = "damaged and set aside" if set_aside else "damaged"
                terminal.line(f"checkpoint {folder.name} is {done}: {error}")
            if set_aside:
                folder.rename(_unused(folder.with_name(f"{folder.name}.damaged")))
        return None

    def steps(self) -> list[int]:
        """Return the checkpoints' steps in order, from their names, because clocks may jump."""
        names = [folder.name.removeprefix("step_") for folder in self.folder.glob("step_*")]
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def _delete(self, folder: Path) -> None:
        """Rename, then delete, so that a kill leaves no half-deleted checkpoint under this name."""
        doomed = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def check_space(option: str, path: Path, needed: int) -> None:
    """Check the free space of the disk that holds `path`.

    Args:
        needed: bytes.

    Raises:
        UsageError: fewer than `needed` bytes are free.
    """
    free = shutil.disk_usage(path).free
    if free < needed:
        raise UsageError(
            f"{option} {path}: {needed / 2**20:.0f} MB are needed, {free / 2**20:.0f} MB are free"
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error in writing a file into a one-line message.

    Raises:
        UsageError: in place of OSError and SafetensorError.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{path} cannot be written: {reason}; what was saved before is untouched: make room "
            "and run it again (with --resume, if it was under way)"
        ) from error


@contextmanager
def writing_beside(path: Path) -> Iterator[Path]:
    """Make a hidden folder beside `path`, to be filled and renamed; on errors it is removed.

    Raises:
        UsageError: as `writing` does.
    """
    scratch = path.with_name(f".{path.name}.new")
    with writing(path):
        try:
            shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
            scratch.mkdir(parents=True)
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _hashes(folder: Path) -> dict[str, str]:
    return {name: file_hash(folder / name) for name in (TENSORS, STATE)}


def file_hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _unused(path: Path) -> Path:
    others = (path.with_name(f"{path.name}{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], others) if not name.exists())
