"""Writes an adapter, or an adapter merged into its base: complete or not at all."""

from __future__ import annotations

import errno
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save

from rlm.cli import UsageError, command_of, terminal
from rlm.data import stop_token_ids
from rlm.model.adapter_info import ADAPTER_FILES, AdapterInfo, check_adapter
from rlm.model.adapters import check_base, exported_tensors, load_adapter
from rlm.model.base import base_model_hash, load_base, load_tokenizer
from rlm.model.hardware import Device
from rlm.runs import check_space, check_writable, replace_json, sync, writing_beside

if TYPE_CHECKING:  # rlm.model.adapters imports bitsandbytes before peft
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHIPPED = "shipped_rlm_lora"  # the name under which the project's own adapter is kept
HOW_TO_TRAIN = f"run: {command_of('train_sft')} && {command_of('train_grpo')}"
README = """---
base_model: {base}
tags: [grpo, reasoning]
---
`{base}` ({hash}) with the adapter `{adapter}` merged into it in fp32. The base's licence holds.

{system_prompts}"""


def check_output(path: Path, option: str = "--output") -> None:
    """Check that an adapter can be written here, before hours of work depend on it.

    Raises:
        UsageError: it cannot, or it would replace something that is not an adapter.
    """
    here = path.resolve()
    check_writable(option, here.parent)
    if Path.cwd().is_relative_to(here) or here.is_mount():
        raise UsageError(
            f"{option} {path} is the current folder or a mount point, which an adapter cannot "
            "replace: name a new folder"
        )
    previous = _kept_as(here)
    if previous.exists() and not previous.is_dir():
        raise UsageError(
            f"{option} {path}: the old adapter would be moved to {previous}, which exists and is "
            "not a folder"
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
    """Write adapter, tokenizer and run.json under `path`, complete or not at all.

    Only the adapter "default" is saved. Once its tensors have been read back, it replaces the
    previous adapter, which is kept beside it as `<name>.prev`, or as `shipped_rlm_lora` if it came
    with the project. Without `keep_previous` the previous adapter is deleted.

    Raises:
        UsageError: the adapter cannot be written or read back; the previous one stays.
    """
    path = path.resolve()  # if it is a link, the adapter at its target is replaced
    previous, moved = _kept_as(path), False
    with writing_beside(path) as scratch:
        try:
            # The base is unchanged, so PEFT need not compare its embeddings with the hub's.
            policy.save_pretrained(
                str(scratch), selected_adapters=["default"], save_embedding_layers=False
            )
            tokenizer.save_pretrained(scratch)
            replace_json(scratch / "run.json", run)
            _check_export(policy, scratch)
            mode = (scratch / "run.json").stat().st_mode
            for file in scratch.iterdir():
                file.chmod(mode)  # safetensors makes files that only their owner can read
                sync(file)
            sync(scratch)
            if path.exists():
                shutil.rmtree(previous, ignore_errors=True)
                path.rename(previous)
                moved = True
            scratch.rename(path)
            sync(path.parent)
            if not keep_previous:
                shutil.rmtree(previous, ignore_errors=True)
            elif previous.name == SHIPPED and moved:
                terminal.line(f"the adapter that came with the project is now in {previous}")
        except BaseException:
            if moved and not path.exists():
                previous.rename(path)
            raise


def _kept_as(path: Path) -> Path:
    """Return where `save_adapter` keeps a replaced adapter; the shipped one is kept for good."""
    with suppress(UsageError):  # a broken run.json: it is not the shipped adapter
        if AdapterInfo.load(path).run.get("shipped"):
            return path.with_name(SHIPPED)
    return path.with_name(f"{path.name}.prev")


def _check_export(policy: PeftModel, folder: Path) -> None:
    """Compare the written tensors with the model's, byte for byte.

    Raises:
        OSError: the file contains something else.
    """
    expected = save(exported_tensors(policy), {"format": "pt"})
    if (folder / ADAPTER_FILES[1]).read_bytes() != expected:
        reason = "the tensors in the written file are not the model's"
        raise OSError(errno.EIO, reason)


def check_new(option: str, path: Path) -> None:
    """Check that nothing is there yet and that it can be written.

    Raises:
        UsageError: something is there, or it cannot be written.
    """
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UsageError(f"{option} {path} exists: name a new one")
    check_writable(option, path.resolve().parent)


def merge_adapter(
    adapter: Path, model: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the base unquantized in fp32, and merge the adapter into it.

    Args:
        model: another copy of the base; needed if run.json names none.

    Raises:
        UsageError: there is no adapter, or it belongs to another base.
    """
    check_adapter(adapter, HOW_TO_TRAIN)
    model, _ = AdapterInfo.load(adapter).resolve_base(model)
    base = load_base(model, Device("cpu", torch.float32, "merging"))
    check_base(adapter, model, base_model_hash(model))
    tokenizer = load_tokenizer(model)
    merged = load_adapter(base, adapter, trainable=False).merge_and_unload()
    # Other programs must stop where ours does, also at the token that ends a turn.
    merged.generation_config.eos_token_id = sorted(
        stop_token_ids(tokenizer, merged.generation_config)
    )
    return merged, tokenizer


def save_merged(
    merged: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, adapter: Path, path: Path
) -> None:
    """Write model, tokenizer, chat template and README.md under `path`, complete or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    info, path = AdapterInfo.load(adapter), path.resolve()
    check_space("--merge", path.parent, sum(4 * p.numel() for p in merged.parameters()))
    with writing_beside(path) as scratch:
        merged.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        words = {
            "base": info.base_model or merged.config.name_or_path,
            "hash": info.base_hash or "no hash recorded",
            "adapter": adapter,
            "system_prompts": info.describe_prompts(),
        }
        (scratch / "README.md").write_text(README.format(**words), encoding="utf-8")
        mode = (scratch / "README.md").stat().st_mode
        for file in scratch.iterdir():
            file.chmod(mode)  # safetensors makes files that only their owner can read
        if path.exists():  # an empty directory
            path.rmdir()
        scratch.rename(path)
