"""Load a user's own files and hub datasets, and hold out a validation split."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rlm.cli import UsageError
from rlm.data.columns import LeftOut, cut_rows, split_slice
from rlm.data.problem import NotAnAnswer, Problem, Row, parse_row, parse_rows, plain_question
from rlm.data.sources import read_dataset, read_file, split_names

logger = logging.getLogger(__name__)

PUBLISHED_TRAIN = "train+validation"  # GSM8K's whole train file, in the order of the file
# Maximum number of questions in a held-out validation split, which gets at most a tenth of all
# questions.
HELD_OUT = 200
# Number of problems that are read from a larger split on the hub, unless --max-samples is larger.
# The validation split is held out of these problems.
POOL = 5000
SMALL_FILE = 2**22  # maximum size of a file that is read twice, in bytes
FILE_SPLITS = ("train", "validation", "test")


def load_file(dataset: str, split: str, columns: dict[str, str], rows: str | None) -> list[Problem]:
    """Load a split of a user's file.

    The test split is the whole file, validation is up to a tenth of it, and train is the rest.
    """
    (role, bounds), (source, cut) = split_slice(split), split_slice(rows or "train")
    if role not in FILE_SPLITS:
        raise UsageError(f"{dataset} has no split {role!r}; it has {', '.join(FILE_SPLITS)}")
    if source != "train":
        raise UsageError(
            f"--split {rows}: a file has one split, train; pass for example train[:500]"
        )
    found = read_file(Path(dataset))
    bounds = cut if rows else bounds
    if bounds != (None, None):
        found = cut_rows(list(found), bounds)
    told = {"quiet": role == "validation", "columns": columns}
    problems = parse_rows(found, dataset, Path(dataset).stem, parse_row, **told)
    return hold_out(problems, role, dataset)


def peek_file(dataset: str, columns: dict[str, str], rows: str | None) -> list[Problem]:
    """Return the problems of a user's file, or [] if the file is too large to be read twice."""
    path, (_, bounds) = Path(dataset), split_slice(rows or "train")
    if path.stat().st_size > SMALL_FILE:
        return []
    found = cut_rows(list(read_file(path)), bounds)
    return parse_rows(found, dataset, path.stem, parse_row, quiet=True, columns=columns)


def load_hub(
    dataset: str,
    split: str,
    columns: dict[str, str],
    rows: str | None,
    max_samples: int | None = None,
) -> list[Problem]:
    """Load a split of a hub dataset, or of a directory with the layout of a hub dataset.

    If the dataset has no validation split, validation problems are held out of the training rows.

    Args:
        columns: field → column (`rename_columns`).
        rows: the rows to use for train and validation, such as train[:500]; None uses all of train.
        max_samples: the number of problems needed. If it is given, a split of more than POOL rows
            is read only until max(POOL, max_samples) problems are found, in a fixed random order.
    """
    path, config = split_config(dataset)
    names = split_names(dataset, path, config)
    (role, bounds), (source, cut) = split_slice(split), split_slice(rows or "train")
    is_carved = role in ("train", "validation") and (
        source == "validation" or "validation" not in names
    )
    stored = source if is_carved or role == "train" else role
    if stored not in names:
        hint = "; --split validation uses problems held out of train" if role == "test" else ""
        raise UsageError(f"{dataset} has no split {stored!r}; it has {', '.join(names)}{hint}")
    arguments = {"path": path, "name": config, "split": stored}
    bounds = cut if rows and stored == source else bounds
    found = read_dataset(dataset, arguments, partial(choose_rows, bounds=bounds))
    quiet = role == "validation" and is_carved
    prefix = "-".join(filter(None, (path.rpartition("/")[2], config, stored)))
    limit = None if max_samples is None else max(max_samples, POOL)
    if quiet:
        limit = POOL  # the validation split must not depend on max_samples
    told = {"limit": limit, "quiet": quiet, "columns": columns}
    problems = parse_rows(found, f"{dataset} {stored}", prefix, _parse_hub, **told)
    if not is_carved:
        if role == "train":
            problems = _without_validation(problems, dataset, columns)
        return hold_out(problems, "test", dataset)
    held_out = hold_out(problems[:POOL], "validation", dataset)
    if role == "validation":
        return held_out
    questions = {plain_question(problem.question) for problem in held_out}
    return [p for p in problems if plain_question(p.question) not in questions]


def choose_rows(count: int, bounds: tuple[str | None, str | None]) -> Sequence[int]:
    """Return the indices of the rows between two bounds in a split of `count` rows.

    If there are more than POOL rows, they are in a fixed random order, because many datasets are
    sorted by topic.
    """
    chosen = cut_rows(range(count), bounds)
    return random.Random(0).sample(chosen, len(chosen)) if len(chosen) > POOL else chosen


def _without_validation(
    problems: list[Problem], dataset: str, columns: dict[str, str]
) -> list[Problem]:
    """Remove training problems whose question is also in the published validation split."""
    path, config = split_config(dataset)
    rows = read_dataset(dataset, {"path": path, "name": config, "split": "validation"})
    validation = parse_rows(rows, dataset, "validation", _parse_hub, quiet=True, columns=columns)
    questions = {plain_question(problem.question) for problem in validation}
    kept = [problem for problem in problems if plain_question(problem.question) not in questions]
    if len(kept) < len(problems):
        logger.warning(
            "%s: %d training problems are also validation problems and are left out of training",
            dataset,
            len(problems) - len(kept),
        )
    return kept


def split_config(dataset: str) -> tuple[str, str | None]:
    """Split `org/name:CONFIG` or `DIRECTORY:CONFIG` into the name or directory, and the config."""
    if Path(dataset).is_dir() or ":" not in dataset:
        return dataset, None
    path, _, config = dataset.rpartition(":")
    return path, config


def _parse_hub(row: Row, default_id: str, first: int | None = None) -> list[Problem]:
    """Parse a row of a hub dataset; a row whose answer cannot be verified is left out."""
    try:
        return parse_row(row, default_id, first=first)
    except NotAnAnswer as error:
        reason = str(error).partition(": ")[0]
        raise LeftOut(
            f"{reason} (--columns answer_type=text accepts words, completion=COLUMN worked steps "
            "that end with the answer)"
        ) from error


def hold_out(
    problems: list[Problem], split: str, source: str, *, in_order: bool = False
) -> list[Problem]:
    """Return the problems of a split: all problems for test, or those of train or validation.

    Train and validation have no question in common. Validation contains the questions with the
    smallest hashes, or the first questions if `in_order` is true. Without `in_order`, validation
    and test are sorted by hash, because many files are sorted by topic or difficulty.
    """
    ordered = (
        problems
        if in_order
        else sorted(problems, key=lambda p: hashlib.sha256(p.question.encode()).digest())
    )
    if split in ("test", PUBLISHED_TRAIN):
        return ordered
    questions = list(dict.fromkeys(plain_question(problem.question) for problem in ordered))
    if len(questions) < 2:
        raise UsageError(f"{source}: one question is too few for a train and a validation split")
    held_out = set(questions[: min(HELD_OUT, max(1, len(questions) // 10))])
    if split == "validation":
        return [p for p in ordered if plain_question(p.question) in held_out]
    return [p for p in problems if plain_question(p.question) not in held_out]
