"""Which adapters a server offers: those of one folder, looked at once, at the start.

A request chooses by name from this fixed list, so no name can become a path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rlm.cli.options import UsageError
from rlm.data.prompts import Format, trained_format
from rlm.model.adapters import ADAPTER_FILES, check_adapter, check_base, read_run
from rlm.model.base import base_hash
from rlm.model.hardware import EMBEDDED_MODEL
from rlm.model.quantize import trained_on
from rlm.runs.checkpoints import file_hash

BASE = "base"  # the name of no adapter
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CAN_EXECUTE = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".py"}


@dataclass(frozen=True)
class Offered:
    """An adapter by name; BASE has no path."""

    name: str
    path: Path | None
    sha256: str | None  # of its tensors
    stage: str  # base | sft | grpo | unknown
    format: Format


@dataclass(frozen=True)
class Catalog:
    """What a server offers, and the base that all of it stands on."""

    model: str  # as --model takes it
    base_hash: str
    quantize: str  # of rlm.model.quantize.QUANTIZATIONS
    offered: dict[str, Offered]
    default: str


def find_adapters(
    adapter: Path,
    folder: Path | None,
    model: str | None,
    quantize: str = "auto",
    *,
    base: bool = False,
) -> Catalog:
    """The adapter served by default, and its neighbours in a folder.

    Args:
        quantize: how the base is packed; auto: as it was when the adapter was trained.
        base: leave the adapter out; its run still says which base it was, and with which tags.

    Raises:
        UsageError: one of them is missing, could execute code, or belongs to another base.
    """
    paths = [] if base else [adapter]
    if folder is not None:
        if not folder.is_dir():
            raise UsageError(f"--adapters {folder}: no such directory")
        # `save_adapter` keeps what it replaced as NAME.prev, and writes into .NAME.new.
        here = sorted(
            path
            for path in folder.iterdir()
            if (path / ADAPTER_FILES[0]).is_file()
            and not path.name.startswith(".")
            and path.suffix != ".prev"
        )
        paths += [path for path in here if base or path.resolve() != adapter.resolve()]
    for path in paths:
        check_adapter(path, "run: python train_sft.py && python train_grpo.py")
        _check_files(path, folder)
    runs = [read_run(path) for path in paths]
    own = read_run(adapter)
    if runs and own.get("base_hash") not in {run.get("base_hash") for run in runs}:
        own = runs[0]  # with --base the folder may be of another base than the adapter left out
    named = (run["base_model"] for run in (own, *runs) if "base_model" in run)
    model = model or next(named, None)
    if model is None and (paths or adapter.exists()):
        raise UsageError(f"{adapter} does not say what it was trained on; name it with --model")
    model = model or EMBEDDED_MODEL
    model_hash = base_hash(model)
    offered = {BASE: Offered(BASE, None, None, "base", trained_format(own))}
    for path, run in zip(paths, runs, strict=True):
        check_base(path, model, model_hash)
        if path.name in offered:
            raise UsageError(f"{path}: another adapter already has the name {path.name}")
        digest = file_hash(path / ADAPTER_FILES[1])
        stage = run.get("stage", "unknown")
        offered[path.name] = Offered(path.name, path, digest, stage, trained_format(run))
    if quantize == "auto":
        quantize = trained_on(own)
    return Catalog(model, model_hash, quantize, offered, BASE if base else adapter.name)


def _check_files(path: Path, folder: Path | None) -> None:
    if not _NAME.fullmatch(path.name):
        raise UsageError(f"{path}: an adapter's name is made of letters, digits and . _ -")
    if folder is not None and path.parent == folder and path.resolve().parent != folder.resolve():
        raise UsageError(f"{path} is a link that leads out of {folder}")
    unsafe = [file.name for file in path.iterdir() if file.suffix in _CAN_EXECUTE]
    if unsafe:
        raise UsageError(f"{path} holds {unsafe[0]}, which could execute code: only safetensors")
