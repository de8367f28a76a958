"""Writes an adapter, or a model with a merged adapter, either completely or not at all."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from rlm.cli import UsageError, terminal
from rlm.data import opened_reasoning, stop_token_ids
from rlm.model.adapter_info import ADAPTER_FILES, HOW_TO_TRAIN, AdapterInfo, check_adapter
from rlm.model.adapters import check_base, load_adapter, lora_layers, merged_weight
from rlm.model.base import base_model_hash, load_base, load_tokenizer, save_model, save_tokenizer
from rlm.model.hardware import Device
from rlm.runs import (
    check_space,
    check_writable,
    delete_folder,
    file_hash,
    replace_json,
    sync,
    writing_beside,
)

if TYPE_CHECKING:  # at run time, rlm.model must import bitsandbytes before peft
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHIPPED = "shipped_rlm_lora"  # folder in which the project's own adapter is preserved


def check_output(path: Path, option: str = "--output") -> None:
    """Check that an adapter can be written to this path, before hours of work depend on it.

    Raises:
        UsageError: the path cannot be written, or an adapter must not replace what is there.
    """
    here = path.resolve()
    check_writable(option, here.parent)
    if Path.cwd().is_relative_to(here) or here.is_mount():
        raise UsageError(
            f"{option} {path} is the current folder or a mount point, which an adapter cannot "
            "replace: choose a new folder"
        )
    previous = _kept_as(here)
    if previous == here:
        raise UsageError(
            f"{option} {path} contains the adapter that came with the project: use another folder"
        )
    if previous.exists() and not (previous / ADAPTER_FILES[0]).is_file():
        raise UsageError(
            f"{option} {path}: the old adapter would be moved to {previous}, which exists and is "
            "not an adapter: use another folder"
        )
    is_free = not here.exists() or (
        here.is_dir() and all(file.name.startswith(".") for file in here.iterdir())
    )
    if not is_free and not (here / ADAPTER_FILES[0]).is_file():
        raise UsageError(
            f"{option} {path} contains files that are not an adapter and would be replaced: name "
            "an empty or a new folder"
        )


def save_adapter(
    policy: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    run: dict[str, object],
    keep_previous: bool = True,
) -> None:
    """Write the adapter, the tokenizer and run.json to `path`, completely or not at all.

    Only the adapter "default" is saved. When all files are on disk, the new adapter replaces the
    previous adapter. The previous adapter is moved to `<name>.prev` in the same folder, or to
    `shipped_rlm_lora` if it came with the project. It is deleted instead if `keep_previous` is
    False, or if it has the same weights, as when a resumed run exports again.

    Raises:
        UsageError: the adapter cannot be written; the previous adapter is preserved.
    """
    path = path.resolve()  # if the path is a link, the adapter at its target is replaced
    deleted = path.with_name(f".{path.name}.old")
    previous, moved = deleted, False
    with writing_beside(path) as scratch:
        try:
            # The base model is unchanged, so PEFT need not compare its embeddings with the hub's.
            policy.save_pretrained(
                str(scratch), selected_adapters=["default"], save_embedding_layers=False
            )
            save_tokenizer(tokenizer, scratch)
            replace_json(scratch / "run.json", run)
            _sync_files(scratch)
            with suppress(OSError):  # there is no folder, or it is not empty
                path.rmdir()  # an empty folder is not kept: it would replace an older adapter
            if path.exists():
                shutil.rmtree(deleted, ignore_errors=True)  # a killed process may have left it
                if keep_previous and not _same_weights(path, scratch):
                    previous = _kept_as(path)
                    delete_folder(previous)
                path.rename(previous)
                moved = True
            scratch.rename(path)
            sync(path.parent)
            shutil.rmtree(deleted, ignore_errors=True)
            if moved and previous.name == SHIPPED:
                terminal.line(f"the adapter that came with the project is now in {previous}")
        except BaseException:
            if moved and not path.exists():
                previous.rename(path)
            raise


def _sync_files(folder: Path) -> None:
    """Give all files the file mode of tokenizer_config.json, and sync them to disk.

    safetensors creates files that only their owner can read.
    """
    mode = (folder / "tokenizer_config.json").stat().st_mode
    for file in folder.iterdir():
        file.chmod(mode)
        sync(file)
    sync(folder)


def _same_weights(path: Path, other: Path) -> bool:
    files = path / ADAPTER_FILES[1], other / ADAPTER_FILES[1]
    return files[0].is_file() and file_hash(files[0]) == file_hash(files[1])


def _kept_as(path: Path) -> Path:
    """Return the path to which `save_adapter` moves the adapter that it replaces.

    The adapter that came with the project has a path of its own, so it is never overwritten.
    """
    with suppress(UsageError):  # an adapter with an invalid run.json is not the shipped one
        if AdapterInfo.load(path).run.get("shipped"):
            return path.with_name(SHIPPED)
    return path.with_name(f"{path.name}.prev")


def check_new(option: str, path: Path) -> None:
    """Check that a path does not exist yet, or is an empty folder, and that it can be written.

    Raises:
        UsageError: the path exists and is not an empty folder, or it cannot be written.
    """
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UsageError(f"{option} {path} exists: pass a new path")
    check_writable(option, path.resolve().parent)


def merge_adapter(
    adapter: Path, model: str | None = None, dtype: str = "float32"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the base model unquantized, and merge the adapter into it.

    Args:
        model: another copy of the base model; required if the adapter does not name its base model.
        dtype: the dtype of the base model and of the result. The sum is computed in fp32.
    """
    check_adapter(adapter, HOW_TO_TRAIN)
    model, _ = AdapterInfo.load(adapter).resolve_base(model)
    base = load_base(model, Device("cpu", getattr(torch, dtype), "merging"))
    if getattr(base, "is_quantized", False):  # the hub's files may be quantized
        base = base.dequantize(getattr(torch, dtype))
    check_base(adapter, model, base_model_hash(model))
    tokenizer = load_tokenizer(model)
    if tag := opened_reasoning(tokenizer):
        terminal.line(
            f"warning: the chat template begins the reply with {tag}, which the adapter was "
            f"trained to write itself: remove {tag} at the end of the template before another "
            "program uses it"
        )
    policy = load_adapter(base, adapter, trainable=False)
    for layer in lora_layers(policy):  # PEFT's merge_and_unload would compute the sum in `dtype`
        layer.get_base_layer().weight.data = merged_weight(cast("nn.Module", layer))
    merged = policy.unload()
    # Other programs must stop at the same tokens as ours, including the token that ends a turn.
    settings = merged.generation_config
    settings.eos_token_id = sorted(stop_token_ids(tokenizer, settings))
    try:
        settings.validate(strict=True)
    except ValueError:  # transformers refuses to save a temperature without do_sample
        settings.do_sample = True
    return merged, tokenizer


def save_merged(
    merged: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, card: str, path: Path
) -> None:
    """Write the model, its tokenizer, its chat template and README.md, completely or not at all.

    Args:
        card: the contents of README.md.
    """
    path = path.resolve()
    check_space("--merge", path.parent, sum(p.nbytes for p in merged.parameters()))
    with writing_beside(path) as scratch:
        save_model(merged, tokenizer, scratch)
        (scratch / "README.md").write_text(card, encoding="utf-8")
        _sync_files(scratch)
        if path.exists():  # an empty directory
            path.rmdir()
        scratch.rename(path)
