"""Merges an adapter into its base in fp32 and saves the model for any program that loads one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlm.cli import UsageError, command_of
from rlm.data import stop_token_ids
from rlm.model.adapter_info import AdapterInfo
from rlm.model.adapters import check_adapter, check_base, load_adapter
from rlm.model.base import base_model_hash, load_base, load_tokenizer
from rlm.model.hardware import Device
from rlm.runs import check_space, check_writable, writing_beside

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HOW_TO_TRAIN = f"run: {command_of('train_sft')} && {command_of('train_grpo')}"
README = """---
base_model: {base}
tags: [grpo, reasoning]
---
`{base}` ({hash}) with the adapter `{adapter}` merged into it in fp32. The base's licence holds.

It was trained with this system prompt and no other:

```
{system_prompt}
```
"""


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
    """Load the base in fp32, unquantized however it was trained, and merge the adapter into it.

    Args:
        model: another copy of the base; needed if run.json names none.

    Raises:
        UsageError: no adapter, or one of another base.
    """
    check_adapter(adapter, HOW_TO_TRAIN)
    model, _ = AdapterInfo.load(adapter).resolve_base(model)
    base = load_base(model, Device("cpu", torch.float32, "merging"))
    check_base(adapter, model, base_model_hash(model))
    tokenizer = load_tokenizer(model)
    merged = load_adapter(base, adapter, trainable=False).merge_and_unload()
    # Other programs stop where ours does: also at the token that ends a turn of the template.
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
            "system_prompt": info.format.ask_for("number"),
        }
        (scratch / "README.md").write_text(README.format(**words), encoding="utf-8")
        mode = (scratch / "README.md").stat().st_mode
        for file in scratch.iterdir():
            file.chmod(mode)  # safetensors' own are for their owner alone
        if path.exists():  # an empty directory
            path.rmdir()
        scratch.rename(path)
