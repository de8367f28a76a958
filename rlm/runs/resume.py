"""What both stages do to go on from a checkpoint: find it, see that it is of the same run, and give
the optimizer its state back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlm.cli.options import UsageError
from rlm.runs.directory import RunDirectory


def newest_checkpoint(
    run: RunDirectory, holds: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the state to go on from.

    Args:
        holds: what the state of such a run has.

    Raises:
        UsageError: there is none, or it is of the other stage.
    """
    loaded = run.checkpoints.load(set_aside=run.writes)
    if loaded is None:
        raise UsageError(f"--resume: no checkpoint in {run.path}; start without it")
    tensors, state = loaded
    if not state.keys() >= set(holds):
        raise UsageError(f"--resume: {run.path} is a run of another script; name its own directory")
    return tensors, state


def data_id(what: str, rows: Sequence[object]) -> str:
    """How many there are, and a hash of them in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode())
    return f"{len(rows)} {what}, sha256 {digest.hexdigest()[:12]}"


def differences(
    old: Mapping[str, Mapping],
    new: Mapping[str, Mapping],
    may_change: Collection[str],
) -> list[str]:
    """What would make the resumed run another one than it was, each as "what: old → new".

    Args:
        old, new: config, start and data, as the checkpoints of both stages hold them.
        may_change: options on which nothing that is learned depends.
    """
    was, now = old["config"], new["config"]
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


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """The optimizer's state as named tensors: "optimizer/<entry>/<parameter>".

    Args:
        names: of its parameters, in its order.
    """
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer/{entry}/{names[index]}": torch.as_tensor(value)
        for index, entries in state.items()
        for entry, value in entries.items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: Mapping[str, Tensor]
) -> None:
    """Give it the state that `optimizer_tensors` took, found among other tensors."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, entry, name = key.split("/", 2)
            state.setdefault(names.index(name), {})[entry] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
