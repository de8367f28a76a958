"""Problems with gold answers: GSM8K, OpenMathInstruct-1, AIME, word problems, any JSONL file.

`load_problems` takes what a user writes after `--dataset`:

    gsm8k, openmathinstruct, aime2024, aime2025   from the Hugging Face hub; its own names do, too:
                                                  openai/gsm8k, nvidia/OpenMathInstruct-1, …
    gsm8k:PATH, openmathinstruct:PATH, …          the published files: their directory, or one file
    word-problems, word-problems:1-2, …:1,3       our own generator, of these levels
    rollouts:FILE                                 correct rollouts of recipes/experience, for SFT
    FILE.jsonl                                    one problem a line; data/README.md has the fields

Train and validation share no question, and test none with them, but for a file of your own, all of
which is its test split. Where no validation split is published, a fixed part of train is held out.
`seed` shuffles train, of which `max_samples` keeps the first; the other splits do not depend on it,
so that scores of runs with different seeds compare.
"""

from __future__ import annotations

import codecs
import hashlib
import random
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rlm.cli import UsageError
from rlm.data import word_problems
from rlm.data.problem import Problem, Row, parse_openmath, parse_rollouts, parse_row, parse_rows

PUBLISHED_TRAIN = "train+validation"  # GSM8K's train file whole, in its order
SPLITS: dict[str, tuple[str, ...]] = {
    # validation is carved out of train here
    "gsm8k": ("train", "validation", "test", PUBLISHED_TRAIN),
    "openmathinstruct": ("train", "validation"),
    "aime2024": ("test",),
    "aime2025": ("test",),
    "word-problems": word_problems.SPLITS,
    "rollouts": ("train", "validation"),
}
HUB: dict[str, dict[str, Any]] = {  # arguments of datasets.load_dataset, besides the split
    "gsm8k": {"path": "openai/gsm8k", "name": "main"},
    "openmathinstruct": {
        "path": "nvidia/OpenMathInstruct-1",
        "data_files": {s: f"correct_solutions/{s}.jsonl" for s in SPLITS["openmathinstruct"]},
        "streaming": True,
    },
    "aime2024": {"path": "HuggingFaceH4/aime_2024", "split": "train"},  # its only one
    "aime2025": {"path": "math-ai/aime25"},
}
NAMES = {name: name for name in SPLITS} | {hub["path"].lower(): name for name, hub in HUB.items()}
HUB_TIMEOUT = 5.0  # seconds
# OpenMathInstruct-1 is gigabytes: with max_samples it is read until this many problems are there
# (or max_samples, if that is more), and train is a sample of these.
OPENMATH_POOL = 5000
HELD_OUT = 200  # questions in a validation split that is carved, and at most a tenth of all
WORD_PROBLEMS, WORD_PROBLEMS_TRAIN = 500, 2000  # made if max_samples is None

PARQUET = ".parquet"
JSONL_SUFFIXES = (".jsonl", ".json-lines", ".jsonlines", ".ndjson")


def load_problems(
    dataset: str,
    split: str = "train",
    *,
    max_samples: int | None = None,
    seed: int = 0,
    keep_code: bool = False,
) -> list[Problem]:
    """Load what `dataset` names (see the module's docstring); no network unless it names the hub.

    Args:
        max_samples: at most so many; None is all, and 2000 (train) or 500 word problems.
        keep_code: OpenMathInstruct: keep solutions that hold code blocks. No code is ever run.

    Raises:
        UsageError: unknown data set or split, unreadable or bad file, hub out of reach.
    """
    if max_samples is not None and max_samples < 1:
        raise UsageError(f"max_samples is {max_samples}; it must be at least 1")
    dataset = dataset_name(dataset)
    name, colon, rest = dataset.partition(":")
    if name not in SPLITS and not is_file(dataset):
        known = ", ".join(known for known in SPLITS if known != "rollouts")
        raise UsageError(f"unknown data set {dataset!r}; use {known} or a FILE.jsonl")
    splits = SPLITS.get(name, ("train", "validation", "test"))
    if split not in splits:
        raise UsageError(f"{dataset} has no split {split!r}; it has {', '.join(splits)}")

    if name == "word-problems":
        return _word_problems(rest if colon else "1-4", split, max_samples, seed)
    if name == "rollouts" and not rest:
        raise UsageError("rollouts: name the file, as in rollouts:generator_1_rollouts.jsonl")
    if name in SPLITS:
        path = Path(rest) if colon else None
        problems = _load_published(name, path, split, max_samples, keep_code)
    else:
        problems = _hold_out(load_jsonl(dataset), split, dataset)
    if split == "train":
        random.Random(seed).shuffle(problems)
    return problems[:max_samples]


def dataset_name(dataset: str) -> str:
    """The same under the name that it has here: of "OpenAI/gsm8k:DIR" that is "gsm8k:DIR"."""
    name, colon, rest = dataset.partition(":")
    return NAMES.get(name.lower(), name) + colon + rest


def is_file(dataset: str) -> bool:
    """Whether that is a JSONL file of the user's own, all of which is its test split."""
    named = dataset_name(dataset).partition(":")[0] in SPLITS
    return not named and dataset.lower().endswith(JSONL_SUFFIXES)


def only_numbers(dataset: str, problems: Iterable[Problem]) -> None:
    """
    Raises:
        UsageError: a problem whose answer is a choice or a text, where only numbers are verified.
    """
    kinds = {problem.answer_type for problem in problems} - {"number"}
    if kinds:
        raise UsageError(
            f"--dataset {dataset} has answers of the type {', '.join(sorted(kinds))}; here only "
            "numbers can be verified (train_grpo.py takes all)"
        )


def load_gsm8k(
    split: str = "train", max_samples: int | None = None, path: str | Path | None = None
) -> list[Problem]:
    """Load GSM8K as published: 7,473 problems to train in the file's order, or 1,319 to test.

    "validation" is the first 200 of train: whoever validates on it trains on the rest,
    `load_problems("gsm8k", "train")`, as train_grpo.py does.

    Args:
        path: a directory of the published files (JSONL, or the hub's parquet), or one of them; None
            is the hub.
    """
    spec = "gsm8k" if path is None else f"gsm8k:{path}"
    split = PUBLISHED_TRAIN if split == "train" else split
    return load_problems(spec, split, max_samples=max_samples)


def load_jsonl(path: str | Path) -> list[Problem]:
    """All problems of a UTF-8 file with one JSON object a line, in the file's order.

    Bad lines are left out with a warning that names them. A repeated id is bad, for seeds and
    samples would be mixed up; a line without an id gets FILE-LINE.

    Raises:
        UsageError: unreadable, no good line, or more than 5 % bad lines.
    """
    file = Path(path)
    return parse_rows(_lines(file), str(file), file.stem, parse_row)


def _load_published(
    name: str, path: Path | None, split: str, max_samples: int | None, keep_code: bool
) -> list[Problem]:
    stored = "train" if name == "gsm8k" and split != "test" else split
    one_file = path is not None and not path.is_dir()
    parse, limit = parse_row, None
    if name == "openmathinstruct":
        parse = partial(parse_openmath, keep_code=keep_code)
        limit = max(max_samples, OPENMATH_POOL) if max_samples and not one_file else None
    elif name == "rollouts":
        parse = parse_rollouts
    if path is None:
        source, rows = name, _hub_rows(name, stored)
    else:
        file = path if one_file else _find(path, name, stored)
        source, rows = str(file), (_parquet_rows if file.suffix == PARQUET else _lines)(file)
    problems = parse_rows(rows, source, f"{name}-{stored}", parse, limit=limit)
    if name != "gsm8k" and (not one_file or split == "test"):
        return problems
    return _hold_out(problems, split, source, in_order=name == "gsm8k")


def _word_problems(levels: str, split: str, max_samples: int | None, seed: int) -> list[Problem]:
    parts = levels.split(",")
    if not all(re.fullmatch(r"\d(-\d)?", part, re.ASCII) for part in parts):
        raise UsageError(f"word-problems:{levels}: write levels as 2, 1-2 or 1,3")
    wanted = [level for part in parts for level in range(int(part[0]), int(part[-1]) + 1)]
    count = max_samples or (WORD_PROBLEMS_TRAIN if split == "train" else WORD_PROBLEMS)
    try:
        seed = seed if split == "train" else 0
        return word_problems.generate_word_problems(split, count, seed, wanted)
    except ValueError as error:  # an unknown level, or fewer different problems than asked for
        raise UsageError(f"word-problems:{levels}: {error}") from error


def _hold_out(
    problems: list[Problem], split: str, source: str, *, in_order: bool = False
) -> list[Problem]:
    """All of the problems to test; else train or validation, which have no question in common.

    Validation gets the first questions, or those with the smallest hashes, and comes in the order
    of these, as test does: nothing depends on the order of a file, and many are sorted by topic or
    difficulty.
    """
    ordered = (
        problems
        if in_order
        else sorted(problems, key=lambda p: hashlib.sha256(p.question.encode()).digest())
    )
    if split in ("test", PUBLISHED_TRAIN):
        return ordered
    questions = list(dict.fromkeys(problem.question for problem in ordered))
    if len(questions) < 2:
        raise UsageError(f"{source}: one question is too few for a train and a validation split")
    held_out = set(questions[: min(HELD_OUT, max(1, len(questions) // 10))])
    if split == "validation":
        return [problem for problem in ordered if problem.question in held_out]
    return [problem for problem in problems if problem.question not in held_out]


def _find(directory: Path, name: str, split: str) -> Path:
    names = [f"{name}_{split}.jsonl", f"{split}.jsonl", f"correct_solutions/{split}.jsonl"]
    if name == "gsm8k":
        names[2:] = [f"main/{split}-00000-of-00001.parquet", f"{split}-00000-of-00001.parquet"]
    if name.startswith("aime"):
        names = [f"{name}.jsonl"]
    for file in (directory / name for name in names):
        if file.exists():
            return file
    raise UsageError(f"the directory {directory} holds no {' or '.join(names)}")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1, without a byte order mark."""
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    yield number, text
    except OSError as error:
        raise UsageError(f"cannot read the data file {path}: {error.strerror}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows of a parquet file, numbered from 1."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"cannot read the data file {path}: {reason}") from error
    yield from enumerate(table.to_pylist(), 1)


def _hub_rows(name: str, split: str) -> Iterator[tuple[int, Row]]:
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
