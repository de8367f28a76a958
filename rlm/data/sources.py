"""Sources of rows: JSONL, CSV and parquet files, and the Hugging Face hub."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
JSONL_SUFFIXES = (".jsonl", ".json-lines", ".jsonlines", ".ndjson")
PARQUET = ".parquet"
MAX_CELL = 2**24  # characters in a field of a CSV file; Python's own limit is 131,072


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


def read_csv(path: Path, separator: str = ",") -> Iterator[tuple[int, Row]]:
    """The rows of a CSV file whose first line names the columns, numbered from 1, all as text."""
    csv.field_size_limit(MAX_CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            for number, row in enumerate(csv.DictReader(stream, delimiter=separator), 1):
                row.pop(None, None)  # cells beyond the last column
                yield number, row
    except OSError as error:
        raise UsageError(f"cannot read the data file {path}: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the data file {path}: {error}") from error


# How a file of the user's own is read, by what its name ends with.
READERS: dict[str, Callable[[Path], Iterator[tuple[int, bytes | Row]]]] = {
    **dict.fromkeys(JSONL_SUFFIXES, read_lines),
    ".csv": read_csv,
    ".tsv": lambda path: read_csv(path, "\t"),
    PARQUET: read_parquet,
}


def read_hub(name: str, split: str) -> Iterator[tuple[int, Row]]:
    """The rows of a published data set on the hub, or in the hub's cache on this machine."""
    yield from read_dataset(name, {"split": split} | HUB[name])


def read_dataset(
    name: str,
    arguments: dict[str, Any],
    choose: Callable[[int], Sequence[int]] | None = None,
) -> Iterator[tuple[int, Row]]:
    """The rows that `datasets.load_dataset` finds, numbered from 1, read one by one.

    Args:
        name: for messages.
        arguments: of load_dataset; path is a name on the hub, or a directory laid out as there.
        choose: returns which rows, from 0, of so many; None: all.
    """
    import datasets

    with _reaching_hub(name, arguments["path"]):
        rows = datasets.load_dataset(**arguments)
        if choose is None:
            yield from enumerate(rows, 1)
        else:
            yield from ((i + 1, rows[i]) for i in choose(len(rows)))


def split_names(name: str, path: str, config: str | None) -> list[str]:
    """The splits of a data set on the hub, or in a directory laid out as there."""
    import datasets

    with _reaching_hub(name, path):
        return datasets.get_dataset_split_names(path, config)


@contextmanager
def _reaching_hub(name: str, path: str) -> Iterator[None]:
    """Look in the cache at once where the hub does not answer; a failure is one line."""
    import datasets
    import httpx2
    from huggingface_hub import HfApi

    was_offline = datasets.config.HF_HUB_OFFLINE
    try:
        if not Path(path).is_dir():
            try:
                HfApi().dataset_info(path, timeout=HUB_TIMEOUT)
            except (OSError, httpx2.HTTPError):  # a refusal comes up again below
                # load_dataset would retry for 23 s before it looks in its cache.
                datasets.config.HF_HUB_OFFLINE = True
        yield
    except (OSError, ValueError, httpx2.HTTPError, datasets.exceptions.DatasetsError) as error:
        offline = isinstance(error, ConnectionError)
        reason = "the hub is out of reach" if offline else " ".join(str(error).split())[:200]
        local = f"--dataset {name}:PATH" if name in HUB else "--dataset DIRECTORY"
        raise UsageError(
            f"data set {name}: {reason}; offline, use --dataset word-problems or a JSONL file "
            f"({local} for downloaded files)"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline
