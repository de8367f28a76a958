"""Problems of a user's own files, of hub data sets, and the validation split held out of them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rlm.cli import UsageError
from rlm.data.columns import LeftOut, cut_rows, rename_columns, split_slice
from rlm.data.problem import NotAnAnswer, Problem, Row, parse_row, parse_rows
from rlm.data.sources import READERS, read_dataset, split_names

PUBLISHED_TRAIN = "train+validation"  # GSM8K's train file whole, in its order
HELD_OUT = 200  # questions in a validation split that is carved, and at most a tenth of all
# Of a larger split of the hub so many problems are read, where --max-samples asks for no more;
# validation is held out of these.
POOL = 5000
FILE_SPLITS = ("train", "validation", "test")


def load_file(dataset: str, split: str, columns: dict[str, str], rows: str | None) -> list[Problem]:
    """Of a user's file: test is all of it, validation a tenth, train the rest."""
    (role, bounds), (source, cut) = split_slice(split), split_slice(rows or "train")
    if role not in FILE_SPLITS:
        raise UsageError(f"{dataset} has no split {role!r}; it has {', '.join(FILE_SPLITS)}")
    if source != "train":
        raise UsageError(f"--split {rows}: a file has one split; write train[:500], say")
    suffix = next(suffix for suffix in READERS if dataset.lower().endswith(suffix))
    found = READERS[suffix](Path(dataset))
    bounds = cut if rows else bounds
    if bounds != (None, None):
        found = cut_rows(list(found), bounds)
    parse = partial(_parse_own, columns=columns)
    stem, quiet = Path(dataset).stem, role == "validation"
    return hold_out(parse_rows(found, dataset, stem, parse, quiet=quiet), role, dataset)


def load_hub(
    dataset: str,
    split: str,
    columns: dict[str, str],
    rows: str | None,
    max_samples: int | None = None,
) -> list[Problem]:
    """Of a hub data set, or of a directory laid out as one.

    Where it has no validation split, that is held out of the rows to train on.

    Args:
        max_samples: so many problems are enough. A split of more than POOL rows is then not read
            whole, but in an order of its own until POOL problems are there, or max_samples.
    """
    path, config = split_config(dataset)
    names = split_names(dataset, path, config)
    (role, bounds), (source, cut) = split_slice(split), split_slice(rows or "train")
    is_carved = role in ("train", "validation") and (
        source == "validation" or "validation" not in names
    )
    stored = source if is_carved or role == "train" else role
    if stored not in names:
        hint = "; --split validation takes problems held out of train" if role == "test" else ""
        raise UsageError(f"{dataset} has no split {stored!r}; it has {', '.join(names)}{hint}")
    arguments = {"path": path, "name": config, "split": stored}
    bounds = cut if rows and stored == source else bounds
    found = read_dataset(dataset, arguments, partial(choose_rows, bounds=bounds))
    parse, quiet = partial(_parse_hub, columns=columns), role == "validation" and is_carved
    prefix = f"{path.rpartition('/')[2]}-{stored}"
    limit = None if max_samples is None else max(max_samples, POOL)
    if quiet:
        limit = POOL  # validation is held out of these, however many are trained on
    problems = parse_rows(found, f"{dataset} {stored}", prefix, parse, limit=limit, quiet=quiet)
    if not is_carved:
        return hold_out(problems, "test", dataset)
    held_out = hold_out(problems[:POOL], "validation", dataset)
    if role == "validation":
        return held_out
    questions = {problem.question for problem in held_out}
    return [problem for problem in problems if problem.question not in questions]


def choose_rows(count: int, bounds: tuple[str | None, str | None]) -> Sequence[int]:
    """Return the indices of the rows between two bounds of a split's `count`; of more than POOL in
    an order that depends on nothing, because many sets are sorted by topic."""
    chosen = cut_rows(range(count), bounds)
    return random.Random(0).sample(chosen, len(chosen)) if len(chosen) > POOL else chosen


def split_config(dataset: str) -> tuple[str, str | None]:
    """Split `org/name:CONFIG` or `DIRECTORY:CONFIG` into what it names and the config."""
    if Path(dataset).is_dir() or ":" not in dataset:
        return dataset, None
    path, _, config = dataset.rpartition(":")
    return path, config


def _parse_own(row: Row, default_id: str, columns: dict[str, str]) -> list[Problem]:
    return parse_row(rename_columns(row, columns), default_id)


def _parse_hub(row: Row, default_id: str, columns: dict[str, str]) -> list[Problem]:
    """As of a file, but answers that cannot be verified are no mistake of the user's."""
    try:
        return _parse_own(row, default_id, columns)
    except NotAnAnswer as error:
        raise LeftOut(str(error).partition(": ")[0]) from error


def hold_out(
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
