"""Uploads a trained adapter, or a merged model, to the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlm.cli import UsageError, terminal
from rlm.model.adapter_info import AdapterInfo
from rlm.model.hardware import EMBEDDED_MODEL

# What other programs need to load it; nothing else of a folder is uploaded.
SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")
EMBEDDED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Of run.json: what loading needs, and what was measured. The rest names places on this machine.
PUBLISHED = (
    "stage", "base_model", "base_hash", "quantize", "dataset", "step", "examples", "commit",
    "loss", "validation_loss", "start_accuracy", "accuracy", "validated_on",
    "validation", "exported", "seconds",
)  # fmt: skip
PUBLISHED_CONFIG = (
    "reasoning_format", "system_prompt", "tool", "algorithm", "steps", "batch_size", "group_size",
    "max_new_tokens", "learning_rate", "epochs", "lora_r", "lora_alpha", "seed",
)  # fmt: skip


def collect_uploads(folder: Path, info: AdapterInfo, card: str) -> dict[str, Path | bytes]:
    """List what is uploaded of a folder: its weights, tokenizer and settings, and the card.

    Each name in the repository has its content there: a file's path, or bytes.

    Paths of this machine are taken out of run.json and adapter_config.json.

    Args:
        folder: of an adapter, or of a model that it was merged into.
        info: of the adapter.
        card: the text of README.md.

    Raises:
        UsageError: the folder holds no weights.
    """
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in SUFFIXES)
    if not any(file.suffix == ".safetensors" for file in files):
        raise UsageError(f"--push-to-hub: {folder} holds no weights")
    changed = {"run.json": published_run(info.run)}
    config = folder / "adapter_config.json"
    if config.is_file():
        values = json.loads(config.read_text(encoding="utf-8"))
        changed[config.name] = values | {"base_model_name_or_path": hub_base(info)}
    uploads = {"README.md": card.encode()} | {file.name: file for file in files}
    for name in changed.keys() & uploads.keys():
        uploads[name] = json.dumps(changed[name], indent=2, ensure_ascii=False).encode()
    return uploads


def published_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """run.json without this machine's paths."""
    kept = {name: run[name] for name in PUBLISHED if name in run}
    if kept.get("dataset"):
        kept["dataset"] = public_dataset(kept["dataset"])
    config = run.get("config", {})
    return kept | {"config": {name: config[name] for name in PUBLISHED_CONFIG if name in config}}


def public_dataset(dataset: str) -> str:
    """The name of a data set, without the directories of this machine.

    >>> public_dataset("elementary+gsm8k:/home/me/data+/home/me/mine.jsonl")
    'elementary+gsm8k+mine.jsonl'
    """

    def public(part: str) -> str:
        name, _, rest = part.partition(":")
        if name.startswith(("/", ".", "~")) or Path(name).suffix:
            return Path(name).name
        return name if "/" in rest else part

    return "+".join(map(public, dataset.split("+")))


def hub_base(info: AdapterInfo) -> str:
    """The base model's name on the hub."""
    return EMBEDDED_HUB_ID if info.base_model == EMBEDDED_MODEL else str(info.base_model)


def show_uploads(name: str, uploads: Mapping[str, Path | bytes]) -> None:
    """Print what a push would upload: each file with its size, and the card."""
    terminal.line(f"--push-to-hub {name}: nothing is uploaded without --yes. It would be:")
    total = 0
    for file, content in uploads.items():
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        terminal.line(f"  {size / 1e6:9.3f} MB  {file}")
        total += size
    terminal.line(f"  {total / 1e6:9.3f} MB  in all, into a private repository if it is new")
    terminal.line(f"README.md:\n{uploads['README.md'].decode()}")


def push_to_hub(name: str, uploads: Mapping[str, Path | bytes]) -> str:
    """Upload in one commit, into a repository that is made private if it is new; its address.

    Raises:
        UsageError: the hub is out of reach, or refuses.
    """
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    operations = [CommitOperationAdd(*upload) for upload in uploads.items()]
    try:
        repository = api.create_repo(name, private=True, exist_ok=True).repo_id
        done = api.create_commit(repository, operations, commit_message="Upload by inference.py")
    except (OSError, ValueError, httpx2.HTTPError) as error:
        said = " ".join(str(error).split())[:200]
        raise UsageError(
            f"--push-to-hub {name}: {said}; `hf auth login` (or HF_TOKEN) gives access"
        ) from error
    return str(done.repo_url)
