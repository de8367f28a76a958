"""Export of an adapter: whether it may be written there; written whole or not at all."""

from __future__ import annotations

import errno
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save

from rlm.cli import UsageError, terminal
from rlm.model.adapter_info import AdapterInfo
from rlm.model.adapters import ADAPTER_FILES, exported_tensors
from rlm.runs import check_writable, replace_json, sync, writing_beside

if TYPE_CHECKING:  # bitsandbytes comes before peft: rlm.model.adapters sees to it
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

SHIPPED = "shipped_rlm_lora"  # the name under which the project's own adapter is kept


def check_output(path: Path, option: str = "--output") -> None:
    """Check that an adapter can be written here, before hours of work depend on it.

    Raises:
        UsageError: it can not, or something else than an adapter is there, which would be replaced.
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
            f"{option} {path}: {previous} is no folder, and the adapter that is there now would be "
            "kept under this name"
        )
    is_free = not here.exists() or (
        here.is_dir() and all(file.name.startswith(".") for file in here.iterdir())
    )
    if not is_free and not (here / ADAPTER_FILES[0]).is_file():
        raise UsageError(
            f"{option} {path} holds files that are no adapter and would be replaced: name an empty "
            "or a new folder"
        )


def save_adapter(
    policy: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    run: dict[str, object],
) -> None:
    """Write adapter, tokenizer and run.json under `path`, complete or not at all.

    Only the adapter "default" is saved. It takes the place of what stood there once its tensors
    have been read back; that is kept beside, as `<name>.prev`, or as `shipped_rlm_lora` if it is
    the one that came with the project.

    Raises:
        UsageError: it cannot be written, or does not read back; what stood there stays.
    """
    path = path.resolve()  # what a link leads to: it leads to the new adapter afterwards
    previous, moved = _kept_as(path), False
    with writing_beside(path) as scratch:
        try:
            # The base is as it was published: its embeddings need no look at the hub.
            policy.save_pretrained(
                scratch, selected_adapters=["default"], save_embedding_layers=False
            )
            tokenizer.save_pretrained(scratch)
            replace_json(scratch / "run.json", run)
            _check_export(policy, scratch)
            mode = (scratch / "run.json").stat().st_mode
            for file in scratch.iterdir():
                file.chmod(mode)  # safetensors' own are for their owner alone
                sync(file)
            sync(scratch)
            if path.exists():
                shutil.rmtree(previous, ignore_errors=True)
                path.rename(previous)
                moved = True
            scratch.rename(path)
            sync(path.parent)
            if previous.name == SHIPPED and moved:
                terminal.line(f"the adapter that came with the project is now in {previous}")
        except BaseException:
            if moved and not path.exists():
                previous.rename(path)
            raise


def _kept_as(path: Path) -> Path:
    """Where `save_adapter` keeps the adapter that stands there: the shipped one for good."""
    with suppress(UsageError):  # its run.json is broken, and that of the shipped one is not
        if AdapterInfo.load(path).run.get("shipped"):
            return path.with_name(SHIPPED)
    return path.with_name(f"{path.name}.prev")


def _check_export(policy: PeftModel, folder: Path) -> None:
    """Compare the file of tensors with what the model's make, byte for byte.

    Raises:
        OSError: the file holds something else.
    """
    expected = save(exported_tensors(policy), {"format": "pt"})
    if (folder / ADAPTER_FILES[1]).read_bytes() != expected:
        reason = "what was written does not read back (other tensors than the model's)"
        raise OSError(errno.EIO, reason)
