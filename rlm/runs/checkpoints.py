"""Atomic checkpoints: a checkpoint is either complete or does not exist.

    checkpoints/step_000010/{state.safetensors, state.json, manifest.json}

A checkpoint is written under a temporary name and synced to disk. The manifest, which contains the
hashes of the other files, is written last. Then the folder is renamed. Loading selects the newest
valid checkpoint. Damaged checkpoints are renamed, never deleted. Loading executes no code, because
tensors are stored as safetensors.

SFT and GRPO resume from a checkpoint only if the weights, the data and most options are unchanged.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
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
CODE = ("reward", "tool")  # options whose value may name the user's own code, as FILE.py:NAME
NO_CHECKPOINT = "--resume: no checkpoint in {}; start without --resume"


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
                delete_folder(target)
            scratch.rename(target)
            sync(self.folder)
        steps = self.steps()
        kept = {*steps[-keep:], *[s for s in steps if protect is not None and s <= protect][-1:]}
        for old in set(steps) - kept:
            delete_folder(self._path(old))

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


def check_space(option: str, path: Path, needed: int) -> None:
    """Check that `needed` bytes are free on the disk of `path`, which `option` sets.

    Raises:
        UsageError: fewer bytes are free.
    """
    free = shutil.disk_usage(path).free
    if free < needed:
        raise UsageError(
            f"{option} {path}: {needed / 2**20:.0f} MB are needed, {free / 2**20:.0f} MB are free"
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an error while writing a file into a UsageError.

    Raises:
        UsageError: an OSError or SafetensorError was raised in the context, or the plain Exception
            that a tokenizer raises when the disk is full.
    """
    try:
        yield
    except Exception as error:
        full = type(error) is Exception and "os error" in str(error)
        if not full and not isinstance(error, OSError | SafetensorError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = "make it writable" if isinstance(error, PermissionError) else "free disk space"
        raise UsageError(
            f"{path} cannot be written: {reason}; files that were saved before are unchanged: "
            f"{remedy} and run the command again (with --resume if the run had started)"
        ) from error


@contextmanager
def writing_beside(path: Path) -> Iterator[Path]:
    """Create a hidden folder beside `path`, which the caller fills and renames.

    If the caller does not rename the folder, for example after an error, it is removed.
    """
    scratch = path.with_name(f".{path.name}.new")
    with writing(path), _one_at_a_time(path.parent):
        try:
            shutil.rmtree(scratch, ignore_errors=True)  # a killed process may have left the folder
            scratch.mkdir()
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Create a folder, and wait until no other process is in this context for the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems do not support locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def delete_folder(folder: Path) -> None:
    """Delete a folder if it exists.

    It is renamed first, so that a kill never leaves a partial folder under its name.
    """
    doomed = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)  # a killed process may have left the folder
    if folder.exists():
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _hashes(folder: Path) -> dict[str, str]:
    return {name: file_hash(folder / name) for name in (TENSORS, STATE)}


def file_hash(file: Path) -> str:
    """Return the SHA-256 hash of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _unused(path: Path) -> Path:
    others = (path.with_name(f"{path.name}{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], others) if not name.exists())


def check_resumable(run_dir: Path) -> None:
    """Check that a run has a checkpoint to resume from, before a model is loaded.

    With several processes, this check is skipped, because only the main process needs the run's
    directory.

    Raises:
        UsageError: no checkpoint exists.
    """
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if is_alone and not Checkpoints(run_dir / "checkpoints").steps():
        raise UsageError(NO_CHECKPOINT.format(run_dir))


def run_origin(
    config: Mapping[str, object], base_hash: str, start_weights: Path | None, **data: str
) -> dict[str, Any]:
    """Describe the inputs of a run. Each checkpoint stores this description.

    A resumed run must have the same description, except for the options in `may_change` of
    `resume_run`, and for the entry "inputs", which maps the user's own code files (--reward,
    --tool) to their hashes. A change of these inputs only causes a warning.

    Args:
        start_weights: the weights file of the adapter from which training starts.
        data: a map from the split to the `data_id` of its rows.
    """
    specs = {f"the file of --{name} {spec}": spec for name in CODE if (spec := config.get(name))}
    files = {w: Path(str(s).rpartition(":")[0]).expanduser() for w, s in specs.items()}
    return {
        "config": dict(config),
        "base_hash": base_hash,
        "start": None if start_weights is None else file_hash(start_weights),
        "data": data,
        "inputs": {what: file_hash(file) for what, file in files.items() if file.is_file()},
    }


def changed_inputs(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the inputs whose hashes differ; an input that was not recorded counts as unchanged."""
    return [what for what, value in now.items() if was.get(what, value) != value]


def resume_run(
    run_dir: Path,
    loaded: tuple[dict[str, Tensor], dict[str, Any]] | None,
    origin: Mapping[str, Any],
    adapter: Mapping[str, Tensor],
    *,
    may_change: Collection[str],
    expected_keys: Collection[str],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Check that a checkpoint belongs to this run, and return its tensors and state.

    Args:
        loaded: the result of `Checkpoints.load`.
        origin: the `run_origin` of the current command.
        adapter: the trained tensors, which are stored as "adapter/<name>".
        may_change: options that a resumed run may change, because they do not affect training.
        expected_keys: keys that a state of this stage (SFT or GRPO) must contain.

    Raises:
        UsageError: no checkpoint exists, or the checkpoint is from a run with another script,
            version, base model, adapter, config or data.
    """
    where = f"--resume: {run_dir}"
    if loaded is None:
        raise UsageError(NO_CHECKPOINT.format(run_dir))
    tensors, state = loaded
    if not state.keys() >= {"origin", *expected_keys}:
        raise UsageError(
            f"{where} is a run of another script or of another version; choose another run"
        )
    began = state["origin"]
    if began["base_hash"] != origin["base_hash"]:
        raise UsageError(f"{where} was trained on another base model; choose another run")
    may_change = {*may_change, *free_steps(began["config"], origin["config"])}
    if changes := differences(began, origin, may_change):
        raise UsageError(
            f"{where} was started with other options or data ({'; '.join(changes)}); use the "
            "original values, or leave out --resume to start again"
        )
    saved = {key: t.shape for key, t in tensors.items() if key.startswith("adapter/")}
    if saved != {f"adapter/{name}": tensor.shape for name, tensor in adapter.items()}:
        raise UsageError(f"{where} has an adapter with other tensors; choose another run")
    steps, asked = began["config"].get("steps"), origin["config"].get("steps")
    for what in changed_inputs(began.get("inputs", {}), origin["inputs"]):
        terminal.line(
            f"warning: {what} has changed since the last start, and the run continues with the "
            "new version: compare the metrics before and after with care"
        )
    longer = f"; {asked} steps instead of {steps}" if asked != steps else ""
    terminal.line(f"resumed {run_dir} before step {state['step'] + 1}{longer}")
    return tensors, state


def free_steps(was: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return {"steps"} if a resumed run may change its number of steps, else an empty set.

    The number of steps may always increase: the learning rate of the remaining steps then decays
    over the new total. With a constant learning rate, the number may also decrease.
    """
    is_longer = (now.get("steps") or 0) > (was.get("steps") or 0)
    return {"steps"} if is_longer or now.get("lr_schedule") == "constant" else set()


def data_id(what: str, rows: Sequence[object]) -> str:
    """Return an identifier of data: the number of rows, and a hash that depends on their order."""
    digest = hashlib.sha256()
    for row in rows:
        # The text of other objects, such as images, may differ between processes, so only their
        # type is used. Keys that JSON does not allow, such as tuples, are skipped.
        text = json.dumps(row, default=lambda value: type(value).__name__, skipkeys=True)
        digest.update(text.encode())
    return f"{len(rows)} {what}, sha256 {digest.hexdigest()[:12]}"


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], may_change: Collection[str]
) -> list[str]:
    """Return the differences between two runs, each in the form "name: old → new".

    Args:
        old, new: the `run_origin` of the earlier run and of this run.
    """
    was, now = old["config"], new["config"]
    found = [
        f"--{name.replace('_', '-')}: {was.get(name, 'not recorded')} → {now[name]}"
        for name in now
        if name not in may_change and was.get(name) != now[name]
    ]
    if old["start"] != new["start"]:
        found.append("the initial adapter: its file has changed")
    found += [
        f"{split} data: {old['data'][split]} → {identity}"
        for split, identity in new["data"].items()
        if old["data"][split] != identity
    ]
    return found


def checkpoint_tensors(
    adapter: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint.

    The adapter's tensors are named "adapter/<name>", and the optimizer's tensors are named
    "optimizer/<entry>/<name>".
    """
    names, state = _parameter_names(adapter, optimizer), optimizer.state_dict()["state"]
    return {f"adapter/{name}": tensor.detach() for name, tensor in adapter.items()} | {
        f"optimizer/{entry}/{names[index]}": torch.as_tensor(value)
        for index, entries in state.items()
        for entry, value in entries.items()
    }


@torch.no_grad()
def restore_tensors(
    tensors: Mapping[str, Tensor], adapter: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Copy the tensors from `checkpoint_tensors` back into the adapter and the optimizer."""
    names = _parameter_names(adapter, optimizer)
    for name, tensor in adapter.items():
        tensor.copy_(tensors[f"adapter/{name}"])
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, entry, name = key.split("/", 2)
            state.setdefault(names.index(name), {})[entry] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _parameter_names(adapter: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in the optimizer's order."""
    name_of = {id(tensor): name for name, tensor in adapter.items()}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]
