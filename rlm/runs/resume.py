"""Resume of a run, the same for both stages: the newest checkpoint, if it is of this very run, and
the optimizer's state in it."""

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

NO_CHECKPOINT = "--resume: no checkpoint in {}; start without it"


def check_resumable(run_dir: Path) -> None:
    """Refuse to resume where no checkpoint is, before a model is loaded.

    One process of several may be on a machine without the run's directory: these are not checked.

    Raises:
        UsageError: there is none.
    """
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if is_alone and not Checkpoints(run_dir / "checkpoints").steps():
        raise UsageError(NO_CHECKPOINT.format(run_dir))


def run_origin(
    config: Mapping[str, object], base_hash: str, start_weights: Path | None, **data: str
) -> dict[str, Any]:
    """Describe what a run is made of: checkpoints hold it, a resumed run must have the same.

    Args:
        start_weights: the file of the adapter that training starts from.
        data: split → `data_id` of its rows.
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
    """Check that a checkpoint is of this run, cut the logs there, and return tensors and state.

    Args:
        loaded: the newest that is whole, as `Checkpoints.load` returns it.
        origin: `run_origin` of the run as it was started now.
        adapter: what is trained; the checkpoint has the same tensors as "adapter/<name>".
        may_change: options on which nothing that is learned depends.
        defaults: what options had that the run did not know yet.
        expected_keys: of the state, which a checkpoint of the other stage has not.

    Raises:
        UsageError: there is none, or it is of another script, base, adapter, config or data.
    """
    where, changed = f"--resume: {run.path}", origin["config"].get("accept_changes")
    if loaded is None:
        raise UsageError(NO_CHECKPOINT.format(run.path))
    tensors, state = loaded
    if not state.keys() >= {"origin", *expected_keys}:
        raise UsageError(f"{where} is a run of another script; name its own directory")
    began = state["origin"]
    if began["base_hash"] != origin["base_hash"]:
        raise UsageError(f"{where} was trained on another model or adapter")
    changes = differences(began, origin, may_change, defaults)
    if changes and not changed:
        way_on = "type what it was started with"
        if changed is not None:
            way_on = "add --accept-changes to continue anyway"
        raise UsageError(
            f"{where} was started with other options or data ({'; '.join(changes)}); {way_on}, or "
            "leave out --resume to start again"
        )
    saved = {key: t.shape for key, t in tensors.items() if key.startswith("adapter/")}
    if saved != {f"adapter/{name}": tensor.shape for name, tensor in adapter.items()}:
        raise UsageError(f"{where} was trained on another model or adapter")
    for change in changes:
        terminal.line(f"changed since: {change}")
    run.truncate(state["step"])
    terminal.line(f"resumed {run.path} before step {state['step'] + 1}")
    return tensors, state


def data_id(what: str, rows: Sequence[object]) -> str:
    """Identify data: how many rows there are, and a hash of them in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode())
    return f"{len(rows)} {what}, sha256 {digest.hexdigest()[:12]}"


def differences(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    may_change: Collection[str],
    defaults: Mapping[str, Any],
) -> list[str]:
    """List what would make the resumed run another one, each as "what: old → new".

    Args:
        old, new: `run_origin` then and now.
    """
    was, now = {**defaults, **old["config"]}, new["config"]
    free = {*may_change, *(["steps"] if now.get("lr_schedule") == "constant" else [])}
    found = [
        f"--{name.replace('_', '-')}: {was.get(name)} → {now[name]}"
        for name in now
        if name not in free and was.get(name) != now[name]
    ]
    if old.get("start", new["start"]) != new["start"]:
        found.append("the adapter that training started from: other tensors under its name")
    found += [
        f"{split} data: {old['data'][split]} → {identity}"
        for split, identity in new["data"].items()
        if old["data"][split] != identity
    ]
    return found


def checkpoint_tensors(
    adapter: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Name what is trained "adapter/<name>", its optimizer's state "optimizer/<entry>/<name>"."""
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
    """Copy `checkpoint_tensors` back into the adapter and the optimizer."""
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
    """Name the optimizer's parameters, in its order."""
    name_of = {id(tensor): name for name, tensor in adapter.items()}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]
