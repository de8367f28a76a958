"""Resumes a run of either stage: checks that a checkpoint belongs to the run, and restores it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlm.cli import UsageError, terminal
from rlm.runs.checkpoints import Checkpoints, file_hash
from rlm.runs.directory import RunDirectory

NO_CHECKPOINT = "--resume: no checkpoint in {}; start without --resume"


def check_resumable(run_dir: Path) -> None:
    """Check that a run has a checkpoint to resume from, before a model is loaded.

    With several processes, this check is skipped, because the run's directory may not be available
    on every machine.

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

    A resumed run must have the same inputs.

    Args:
        config: the options of the run.
        base_hash: the hash of the base model's weights.
        start_weights: the weights file of the adapter from which training starts.
        data: a map from the split to the `data_id` of its rows.
    """
    return {
        "config": dict(config),
        "base_hash": base_hash,
        "start": None if start_weights is None else file_hash(start_weights),
        "data": data,
    }


def resume_run(
    run: RunDirectory,
    loaded: tuple[dict[str, Tensor], dict[str, Any]] | None,
    origin: Mapping[str, Any],
    adapter: Mapping[str, Tensor],
    *,
    may_change: Collection[str],
    defaults: Mapping[str, Any],
    expected_keys: Collection[str],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Check that a checkpoint belongs to this run, cut the logs, and return its tensors and state.

    Args:
        loaded: the result of `Checkpoints.load`.
        origin: the `run_origin` of the current command.
        adapter: the trained tensors, which are stored as "adapter/<name>".
        may_change: options that a resumed run may change, because they do not affect training.
        defaults: the values of options that were added after the run was started.
        expected_keys: keys of the state that distinguish this stage from the other stage.

    Raises:
        UsageError: no checkpoint exists, or the checkpoint is from a run with another script, base
            model, adapter, config or data.
    """
    where = f"--resume: {run.path}"
    if loaded is None:
        raise UsageError(NO_CHECKPOINT.format(run.path))
    tensors, state = loaded
    if not state.keys() >= {"origin", *expected_keys}:
        raise UsageError(f"{where} is a run of another script; choose a run of this script")
    began = state["origin"]
    if began["base_hash"] != origin["base_hash"]:
        raise UsageError(f"{where} was trained on another model or adapter")
    may_change = {*may_change, *free_steps(began["config"], origin["config"])}
    if changes := differences(began, origin, may_change, defaults):
        raise UsageError(
            f"{where} was started with other options or data ({'; '.join(changes)}); use the "
            "original values, or leave out --resume to start again"
        )
    saved = {key: t.shape for key, t in tensors.items() if key.startswith("adapter/")}
    if saved != {f"adapter/{name}": tensor.shape for name, tensor in adapter.items()}:
        raise UsageError(f"{where} was trained on another model or adapter")
    run.truncate(state["step"])
    steps, asked = began["config"].get("steps"), origin["config"].get("steps")
    longer = f"; {asked} steps instead of {steps}" if asked != steps else ""
    terminal.line(f"resumed {run.path} before step {state['step'] + 1}{longer}")
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
        # Of other objects, such as images, the text may differ between processes.
        digest.update(json.dumps(row, default=lambda value: type(value).__name__).encode())
    return f"{len(rows)} {what}, sha256 {digest.hexdigest()[:12]}"


def differences(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    may_change: Collection[str],
    defaults: Mapping[str, Any],
) -> list[str]:
    """Return the differences between two runs, each in the form "name: old → new".

    Args:
        old, new: the `run_origin` of the earlier run and of this run.
    """
    was, now = {**defaults, **old["config"]}, new["config"]
    found = [
        f"--{name.replace('_', '-')}: {was.get(name)} → {now[name]}"
        for name in now
        if name not in may_change and was.get(name) != now[name]
    ]
    if old["start"] != new["start"]:
        found.append("the start adapter: its file has changed")
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
