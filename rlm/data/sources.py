"""Sources of rows: JSONL and parquet files, and the Hugging Face hub."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlm.cli import UsageError
from rlm.data.problem import Row

HUB: dict[str, dict[str, Any]] = {  # arguments of datasets.load_dataset, besides the split
    "gsm8k": {"path": "openai/gsm8k", "name": "main"},
    "openmathinstruct": {
        "path": "nvidia/OpenMathInstruct-1",
        "data_files": {s: f"correct_solutions/{s}.jsonl" for s in ("train", "validation")},
        "streaming": True,
    },
    "aime2024": {"path": "HuggingFaceH4/aime_2024", "split": "train"},  # its only one
    "aime2025": {"path": "math-ai/aime25"},
}
HUB_TIMEOUT = 5.0  # seconds
PARQUET = ".parquet"


def find_published(directory: Path, name: str, split: str) -> Path:
    """Find the file of a published data set in a directory."""
    names = [f"{name}_{split}.jsonl", f"{split}.jsonl", f"correct_solutions/{split}.jsonl"]
    if name == "gsm8k":
        names[2:] = [f"main/{split}-00000-of-00001.parquet", f"{split}-00000-of-00001.parquet"]
    if name.startswith("aime"):
        names = [f"{name}.jsonl"]
    for file in (directory / name for name in names):
        if file.exists():
            return file
    raise UsageError(f"the directory {directory} holds no {' or '.join(names)}")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1, without a byte order mark."""
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    yield number, text
    except OSError as error:
        raise UsageError(f"cannot read the data file {path}: {error.strerror}") from error


def read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows of a parquet file, numbered from 1."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"cannot read the data file {path}: {reason}") from error
    yield from enumerate(table.to_pylist(), 1)


def read_hub(name: str, split: str) -> Iterator[tuple[int, Row]]:
    """The rows of a data set on the hub, or in the hub's cache on this machine."""
    import datasets
    import httpx2
    from huggingface_hub import HfApi

    hub = {"split": split} | HUB[name]
    was_offline = datasets.config.HF_HUB_OFFLINE
    try:
        try:
            HfApi().dataset_info(hub["path"], timeout=HUB_TIMEOUT)
        except (OSError, httpx2.HTTPError):  # a refusal comes up again below
            # load_dataset would retry for 23 s before it looks in its cache. Now it looks at once.
            datasets.config.HF_HUB_OFFLINE = True
        yield from enumerate(datasets.load_dataset(**hub), 1)
    except (OSError, ValueError, httpx2.HTTPError, datasets.exceptions.DatasetsError) as error:
        offline = isinstance(error, ConnectionError)
        reason = "the hub is out of reach" if offline else " ".join(str(error).split())[:200]
        raise UsageError(
            f"data set {name}: {reason}; offline, use --dataset word-problems or a JSONL file "
            f"(--dataset {name}:PATH for downloaded files)"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline
