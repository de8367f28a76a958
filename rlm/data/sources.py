"""Read rows from JSONL, CSV and parquet files, and from the Hugging Face hub.

`rlm.data.loaders` selects the source from the value of `--dataset`.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlm.cli import UsageError
from rlm.data.columns import CHAT_FIELDS, Row, name_classes

logger = logging.getLogger(__name__)

HUB: dict[str, dict[str, Any]] = {  # arguments of datasets.load_dataset for published datasets
    "gsm8k": {"path": "openai/gsm8k", "name": "main"},  # the other config is "socratic"
    "openmathinstruct": {
        "path": "nvidia/OpenMathInstruct-1",
        "data_files": {s: f"correct_solutions/{s}.jsonl" for s in ("train", "validation")},
        "streaming": True,
    },
    "aime2024": {"path": "HuggingFaceH4/aime_2024", "split": "train"},  # the only split
    "aime2025": {"path": "math-ai/aime25"},
}
HUB_TIMEOUT = 5.0  # time limit for checking that the hub is available, in seconds
MAX_CELL = 2**24  # maximum length of a CSV field in characters; Python's default is 131,072


def find_published(directory: Path, name: str, split: str) -> Path:
    """Return the file in a directory that contains a split of a published dataset.

    Raises:
        UsageError: the directory contains no such file.
    """
    names = [f"{name}_{split}.jsonl", f"{split}.jsonl", f"correct_solutions/{split}.jsonl"]
    if name == "gsm8k":
        names[2:] = [f"main/{split}-00000-of-00001.parquet", f"{split}-00000-of-00001.parquet"]
    if name.startswith("aime"):
        names = [f"{name}.jsonl"]
    for file in (directory / name for name in names):
        if file.exists():
            return file
    raise UsageError(f"the directory {directory} contains no {' or '.join(names)}")


def read_file(path: Path) -> Iterator[tuple[int, bytes | Row]]:
    """Yield the rows of a file, numbered from 1. The suffix of the file determines its format.

    Raises (when the rows are read):
        UsageError: the file cannot be read, or its suffix is not supported.
    """
    suffix = path.name.lower().removesuffix(".gz")
    if not path.exists():
        raise UsageError(f"cannot read the data file {path}: No such file or directory")
    reader = next((read for ending, read in READERS.items() if suffix.endswith(ending)), None)
    if reader is None:
        raise UsageError(
            f"cannot read the data file {path}: the supported suffixes are "
            f"{', '.join(READERS)}, each also with .gz; save a spreadsheet as CSV"
        )
    try:
        yield from reader(path)
    except (OSError, EOFError) as error:  # EOFError or BadGzipFile: a damaged .gz file
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the data file {path}: {reason}") from error
    except (ValueError, csv.Error) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"cannot read the data file {path}: {reason}") from error


def _open(path: Path) -> io.BufferedIOBase:
    return gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")


def read_json(path: Path) -> Iterator[tuple[int, bytes | Row]]:
    """Yield the rows of a JSON file.

    The file contains one object per line, an array of objects, or an object with one such array.
    Blank lines and a byte order mark are skipped. Lines are yielded unparsed, so that an invalid
    line does not affect the other rows.
    """
    with _open(path) as stream:
        start = stream.read(64)
        encoding = "utf-16" if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else ""
        is_array = start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        is_json = path.name.lower().removesuffix(".gz").endswith(".json")
        stream.seek(0)
        if encoding or is_array or is_json:
            data = stream.read()
            data = data.decode(encoding).encode() if encoding else data
            data = data.removeprefix(codecs.BOM_UTF8)
            rows = _read_whole(data)
            if rows is None and is_array and is_json:
                raise ValueError("the file is not a JSON array of objects")
            if rows is not None:
                yield from enumerate(rows, 1)
                return
            stream = io.BytesIO(data)
        for number, line in enumerate(stream, 1):
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if text.strip():
                yield number, text


def _read_whole(data: bytes) -> list[Row] | None:
    """Return the rows of a file that is a single JSON value; None for a file with one row per line.

    The value may be an array of rows, an object that contains one such array, or an object of
    columns or rows in the form in which pandas writes a data frame.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    parts = list(found.values()) if isinstance(found, dict) else []
    if len(parts) > 1 and _is_rows(parts) and len({tuple(part) for part in parts}) == 1:
        if not all(number.isdecimal() for number in parts[0]):
            return parts
        return [{name: column[n] for name, column in found.items()} for n in parts[0]]
    lists = list(filter(_is_rows, parts)) if isinstance(found, dict) else [found]
    if len(lists) == len(parts) > 1 and not {*CHAT_FIELDS} & found.keys():
        raise ValueError(f"it contains several datasets ({', '.join(found)}): save each as a file")
    if len(lists) != 1 or not _is_rows(lists[0]):
        return None
    return lists[0]


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a parquet file, numbered from 1."""
    import pyarrow.parquet

    with _open(path) as stream:
        try:
            table = pyarrow.parquet.read_table(stream)
        except pyarrow.ArrowException as error:
            raise ValueError(str(error)) from error
    features = None
    if b"huggingface" in (table.schema.metadata or {}):  # written by `datasets`
        import datasets

        features = datasets.Features.from_arrow_schema(table.schema)
    yield from enumerate(name_classes(table.to_pylist(), features), 1)


def read_csv(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a CSV file, numbered from 1. All values are strings.

    The first line contains the names of the columns. The separator is the comma, semicolon, tab or
    bar that splits the first line into the most columns; spaces after it are skipped. The encoding
    is UTF-8, UTF-16 with a byte order mark, or cp1252 (Windows) if the file is not valid UTF-8.
    Rows without any text are skipped, because spreadsheets often end with such rows.

    Raises:
        ValueError, csv.Error: the encoding is another one, a row has more cells than the first
            line, two columns have the same name, or a quote is misplaced (in a tab-separated file,
            quotes are then plain text). Reading on would lose parts of answers or whole rows.
    """
    csv.field_size_limit(MAX_CELL)
    with _open(path) as stream:
        data = stream.read()
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    for encoding in ("utf-16",) if is_utf16 else ("utf-8-sig", "cp1252"):
        with suppress(UnicodeDecodeError):
            text = data.decode(encoding)
            break
    else:
        raise ValueError("it is neither UTF-8 nor cp1252 (Windows): save it as UTF-8")
    if encoding == "cp1252":
        logger.warning("%s: not UTF-8, so it is read as cp1252 (Windows)", path)
    if "\0" in text:  # UTF-16 without a byte order mark, UTF-32, or not a text
        raise ValueError("it contains NUL bytes: save it as UTF-8")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    head = text.split("\n", 1)[0]
    separator = max(",;\t|", key=lambda mark: len(next(csv.reader([head], delimiter=mark), [])))
    rows: list[dict[Any, Any]] = []
    try:
        rows.extend(_named_cells(text, delimiter=separator, strict=True))
    except csv.Error as error:
        if "expected" not in str(error):  # the error is not about a quote
            raise
        if separator != "\t":
            raise ValueError(
                f"row {len(rows) + 1}: {error}; a cell that contains a quote needs quotes around "
                'it, and the quote itself is written as ""'
            ) from error
        # Tab-separated files often do not use quotes.
        logger.warning("%s: row %d: %s, so quotes are plain text", path, len(rows) + 1, error)
        rows = list(_named_cells(text, delimiter=separator, quoting=csv.QUOTE_NONE))
    for number, row in enumerate(rows, 1):
        if any(cell.strip() for cell in row.pop(None, [])):  # cells beyond the last column
            raise ValueError(
                f"row {number} has more cells than the first line has names: put quotes around a "
                f"cell that contains {separator!r}"
            )
        if any((cell or "").strip() for cell in row.values()):
            yield number, row


def _named_cells(text: str, **layout: Any) -> csv.DictReader[str]:
    """Return a DictReader of a CSV text, whose first line names the columns."""
    reader = csv.DictReader(io.StringIO(text, ""), skipinitialspace=True, **layout)
    reader.fieldnames = names = [name.strip() for name in reader.fieldnames or []]
    repeated = [name for name, count in Counter(filter(None, names)).items() if count > 1]
    if repeated:
        raise ValueError(f"several columns have the name {', '.join(repeated)}")
    return reader


# The function that reads each format, by file suffix without .gz.
READERS: dict[str, Callable[[Path], Iterator[tuple[int, bytes | Row]]]] = {
    **dict.fromkeys((".jsonl", ".json-lines", ".jsonlines", ".ndjson", ".json"), read_json),
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
}


def read_dataset(
    name: str,
    arguments: dict[str, Any],
    choose: Callable[[int], Sequence[int]] | None = None,
) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a dataset that `datasets.load_dataset` can load, numbered from 1.

    Args:
        name: the name of the dataset in messages.
        arguments: the arguments of `load_dataset`; `path` is a name on the hub or a directory with
            the layout of a hub dataset.
        choose: a function that takes the number of rows and returns the indices of the rows to
            read; None reads all rows.
    """
    import datasets

    with _reaching_hub(name, arguments["path"]):
        saved = _saved_splits(arguments["path"])
        rows = saved[arguments["split"]] if saved else datasets.load_dataset(**arguments)
        chosen = None if choose is None else choose(len(rows))
        numbers = itertools.count(1) if chosen is None else (i + 1 for i in chosen)
        found = rows if chosen is None else (rows[i] for i in chosen)
        yield from zip(numbers, name_classes(found, getattr(rows, "features", None)), strict=False)


def split_names(name: str, path: str, config: str | None) -> list[str]:
    """Return the split names of a dataset on the hub or in a directory with the same layout."""
    import datasets

    with _reaching_hub(name, path):
        return [*_saved_splits(path)] or datasets.get_dataset_split_names(path, config)


def _saved_splits(path: str) -> dict[str, Any]:
    """Return the splits that the `save_to_disk` method of a dataset wrote to `path`, by name.

    The result is empty if `path` is not a directory that this method wrote.
    """
    import datasets

    if not any(Path(path, name).is_file() for name in ("dataset_dict.json", "state.json")):
        return {}
    found = datasets.load_from_disk(path)
    splits = found if isinstance(found, datasets.DatasetDict) else {"train": found}
    return {str(name): split for name, split in splits.items()}


@contextmanager
def _reaching_hub(name: str, path: str) -> Iterator[None]:
    """Run a block that reads from the hub, and convert its errors to a UsageError.

    If the hub does not respond, the block uses the local cache without further attempts.
    """
    import httpx2
    from datasets import config, exceptions
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    was_offline = config.HF_HUB_OFFLINE
    try:
        if not Path(path).is_dir():
            try:
                HfApi().dataset_info(path, timeout=HUB_TIMEOUT)
            except RepositoryNotFoundError:  # missing or gated, which the block reports
                pass
            except (OSError, httpx2.HTTPError):
                # Without offline mode, load_dataset would retry for 23 s before using its cache.
                config.HF_HUB_OFFLINE = True
        yield
    except (OSError, ValueError, httpx2.HTTPError, exceptions.DatasetsError) as error:
        offline = isinstance(error, ConnectionError)
        if "Config name is missing" in str(error):
            configs = str(error).partition("[")[2].partition("]")[0].replace("'", "")
            raise UsageError(
                f"dataset {name} has several configs: pass --dataset {name}:CONFIG, one of "
                f"{configs:.1000}"
            ) from error
        reason = "the hub is out of reach" if offline else " ".join(str(error).split())[:200]
        folder = Path(path).parent
        if "/" in path and folder.is_dir() and not Path(path).exists():  # a mistyped path?
            reason += f" (the folder {folder} contains no {Path(path).name})"
        local = f"--dataset {name}:PATH" if name in HUB else "--dataset DIRECTORY"
        raise UsageError(
            f"dataset {name}: {reason}; offline, use --dataset word-problems or a JSONL file "
            f"({local} for downloaded files)"
        ) from error
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        remedy = (
            f"try the hub's Parquet copy of it: hf download {path} --repo-type dataset "
            "--revision refs/convert/parquet --local-dir DIRECTORY, then --dataset DIRECTORY/CONFIG"
        )
        if Path(path).is_dir():
            remedy = f"remove {Path(path).name}.py from the directory, or pass one of its files"
        raise UsageError(
            f"dataset {name} has a loading script, which cannot be run; {remedy}"
        ) from error
    finally:
        config.HF_HUB_OFFLINE = was_offline
