"""Atomic checkpoints: a checkpoint is either complete or does not exist.

    checkpoints/step_000010/{state.safetensors, state.json, manifest.json}

A checkpoint is written under a temporary name and synced to disk. The manifest, which contains the
hashes of the other files, is written last. Then the folder is renamed. Loading selects the newest
valid checkpoint. Damaged checkpoints are renamed, never deleted. Loading executes no code, because
tensors are stored as safetensors.
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
CORRUPT_ERRORS = (
    *(FileNotFoundError, IsADirectoryError, NotADirectoryError, SafetensorError),
    *(ValueError, TypeError, KeyError, RecursionError),
)


class Checkpoints:
    """The checkpoints of a run. Only the process that holds the run's lock writes checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def clean(self) -> None:
        """Remove folders that a killed process left partly written or partly deleted."""
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
            keep: the number of checkpoints to keep.
            protect: a step; the newest checkpoint at or before this step is kept as well.

        Raises:
            UsageError: the checkpoint cannot be written. Earlier checkpoints are not changed.
        """
        target = self._path(step)
        with writing_beside(target) as scratch:
            save_file({k: v.contiguous() for k, v in tensors.items()}, scratch / TENSORS)
            sync(scratch / TENSORS)
            replace_json(scratch / STATE, {**state, "step": step})
            replace_json(scratch / MANIFEST, _hashes(scratch))
            sync(scratch)
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
        """Return the tensors and the state of the newest valid checkpoint; None if there is none.

        Args:
            at_most: load only checkpoints of this step or earlier.
            set_aside: whether to rename damaged checkpoints, so that they are not loaded again.

        Raises:
            UsageError: a file cannot be read, for example because of a disk error.
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
                    raise ValueError(f"its state belongs to step {state['step']}")
                return load_file(folder / TENSORS), state
            except CORRUPT_ERRORS as error:
                done = "damaged and set aside" if set_aside else "damaged"
                terminal.line(f"checkpoint {folder.name} is {done}: {error}")
            except OSError as error:  # the disk may be readable again later
                raise UsageError(f"{folder} cannot be read: {error.strerror}") from error
            if set_aside:
                folder.rename(_unused(folder.with_name(f"{folder.name}.damaged")))
        return None

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in ascending order.

        The steps are read from the folder names, because file times are not reliable.
        """
        names = [folder.name.removeprefix("step_") for folder in self.folder.glob("step_*")]
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def _delete(self, folder: Path) -> None:
        """Delete a checkpoint. It is renamed first, so that a kill leaves no partial checkpoint."""
        doomed = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def check_space(option: str, path: Path, needed: int) -> None:
    """Check that the disk of `path` has enough free space.

    Args:
        option: the option that sets the path, for the message.
        needed: the required number of bytes.

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
    """Convert an error while writing a file into a one-line message.

    Raises:
        UsageError: an OSError or SafetensorError was raised in the context.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{path} cannot be written: {reason}; files that were saved before are unchanged: free "
            "disk space and run the command again (with --resume if the run had started)"
        ) from error


@contextmanager
def writing_beside(path: Path) -> Iterator[Path]:
    """Create a hidden folder beside `path`, which the caller fills and renames.

    If the caller does not rename the folder, for example after an error, it is removed.

    Raises:
        UsageError: a file cannot be written (see `writing`).
    """
    scratch = path.with_name(f".{path.name}.new")
    with writing(path):
        try:
            shutil.rmtree(scratch, ignore_errors=True)  # a killed process may have left the folder
            scratch.mkdir(parents=True)
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _hashes(folder: Path) -> dict[str, str]:
    return {name: file_hash(folder / name) for name in (TENSORS, STATE)}


def file_hash(file: Path) -> str:
    """Return the SHA-256 hash of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _unused(path: Path) -> Path:
    others = (path.with_name(f"{path.name}{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], others) if not name.exists())
