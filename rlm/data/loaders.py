"""Load problems with reference answers from published datasets, hub datasets, files and generators.

`load_problems` accepts the same values as the option `--dataset`:

    gsm8k, openmathinstruct, aime2024, aime2025   a published dataset on the Hugging Face hub; the
                                                  hub's names are accepted too: openai/gsm8k, …
    openai/gsm8k:main, openai/gsm8k:socratic      one config of a dataset
    gsm8k:PATH, openmathinstruct:PATH, …          the published files: their directory, or one file
    word-problems, word-problems:1-2, …:1,3       generated word problems of the given levels
    word-problems:sentences, …:1,sentences        the same with solutions in sentences
    elementary, elementary:1-2, …                 generated everyday arithmetic, one to three steps
    rollouts:FILE                                 correct rollouts of recipes/experience, for SFT
    FILE.jsonl, .json, .csv, .tsv, .parquet       one problem per row, also with .gz; data/README.md
                                                  lists the fields
    org/name, org/name:CONFIG                     any other dataset on the hub
    DIRECTORY, DIRECTORY:CONFIG                   a local copy of a hub dataset in the same layout
    elementary+gsm8k:PATH                         several datasets; max_samples is per dataset

Train, validation and test have no question in common, except that the test split of your own file
is the whole file. If a dataset is published without a validation split, a fixed part of train is
held out for validation. `seed` shuffles train, and `max_samples` selects the first problems. The
other splits do not depend on `seed`, so that the scores of runs with different seeds are
comparable.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import random
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlm.cli import UsageError
from rlm.data import word_problems
from rlm.data.columns import LeftOut, Row, parse_columns
from rlm.data.problem import (
    NotAnAnswer,
    Problem,
    parse_openmath,
    parse_rollouts,
    parse_row,
    parse_rows,
    plain_question,
)
from rlm.data.sources import (
    HUB,
    READERS,
    find_published,
    read_dataset,
    read_file,
    split_names,
)

logger = logging.getLogger(__name__)

PUBLISHED_TRAIN = "train+validation"  # GSM8K's whole train file, in the order of the file
SPLITS: dict[str, tuple[str, ...]] = {
    # If no validation split is published, it is held out of train.
    "gsm8k": ("train", "validation", "test", PUBLISHED_TRAIN),
    "openmathinstruct": ("train", "validation"),
    "aime2024": ("test",),
    "aime2025": ("test",),
    "word-problems": word_problems.SPLITS,
    "elementary": word_problems.SPLITS,
    "rollouts": ("train", "validation"),
}
NAMES = {name: name for name in SPLITS} | {hub["path"].lower(): name for name, hub in HUB.items()}
CONFIGS = {"gsm8k": ("main", "socratic")}
# Maximum number of questions in a held-out validation split, which gets at most a tenth of all
# questions.
HELD_OUT = 200
# Number of problems that are read from OpenMathInstruct-1, which has a size of gigabytes, or from a
# larger split of any dataset on the hub, unless --max-samples is larger. Train is a sample of these
# problems, and a validation split that is not published is held out of them.
POOL = 5000
# Endings of other files, whose names are not taken for datasets on the hub.
OTHER_FILES = (".gz", ".zip", ".txt", ".xlsx", ".xls", ".ods", ".arrow", ".feather")
SMALL_FILE = 2**22  # maximum size of a file that is read twice, in bytes
FILE_SPLITS = ("train", "validation", "test")
# What a user can do about invalid rows of a dataset that others have published.
OTHER_ROWS = (
    "take other columns with --columns, another config or --split, or write the valid rows into a "
    "JSONL file and pass that file"
)
ALL_LEVELS, SENTENCES = "1-4", "sentences"  # default levels; word for solutions in sentences
# Default numbers of generated problems, for train by dataset and for the other splits.
TRAIN_SIZES, WORD_PROBLEMS = {"word-problems": 2000, "elementary": 8000}, 500

_SLICE = re.compile(r"([\w.-]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?", re.ASCII)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def load_problems(
    dataset: str,
    split: str = "train",
    *,
    max_samples: int | None = None,
    seed: int = 0,
    columns: str | None = None,
    rows: str | None = None,
    keep_code: bool = False,
    calculator_marks: bool = False,
) -> list[Problem]:
    """Load the problems of a dataset.

    Args:
        dataset: a value of --dataset; the docstring of the module `rlm.data.loaders` lists them.
        split: train, validation or test. For a file or hub dataset, it may include a slice of rows,
            such as test[:200].
        max_samples: the maximum number of problems per dataset. None loads all problems, or of
            generated datasets 2000 (word-problems) or 8000 (elementary) for train, and 500 for the
            other splits.
        columns: the columns of a file or hub dataset, such as "question=prompt,answer=target".
        rows: the rows of a file or hub dataset for train and validation, such as train[:500].
        keep_code: whether to keep solutions of OpenMathInstruct that contain code blocks.
        calculator_marks: whether the solutions of GSM8K and of generated problems contain
            calculator marks such as `<<3+5=8>>`.

    Raises:
        UsageError: the dataset or split is unknown, a file is invalid, or the hub is not available.
    """
    if max_samples is not None and max_samples < 1:
        raise UsageError(f"max_samples is {max_samples}; it must be at least 1")
    options = {"keep_code": keep_code, "calculator_marks": calculator_marks}
    parts = dataset_parts(dataset)
    if len(parts) > 1:
        load = partial(load_problems, max_samples=max_samples, seed=seed, **options)
        problems = _mix(_load_parts(parts, load, split, columns, rows), split, seed)
        if split_slice(split)[0] != "train":
            return problems
        # A question that one dataset holds out may be a training question of another.
        held_out = split.replace("train", "validation", 1)
        held_out = load_problems(dataset, held_out, columns=columns, rows=rows, **options)
        return _without(problems, held_out)
    if not is_named(dataset):
        if is_local_file(dataset):
            problems = load_file(dataset, split, parse_columns(columns), rows)
        elif is_hub(dataset):
            problems = load_hub(dataset, split, parse_columns(columns), rows, max_samples)
        else:
            raise _unknown(dataset)
        return _shuffled(problems, split, seed)[:max_samples]
    dataset = dataset_name(dataset)
    name, colon, rest = dataset.partition(":")
    for option, value in {"--columns": columns, "--split": rows}.items():
        if value:
            raise UsageError(f"{option} is for files and hub datasets, not for {name}")
    if split not in SPLITS[name]:
        raise UsageError(f"{dataset} has no split {split!r}; it has {', '.join(SPLITS[name])}")

    if name in TRAIN_SIZES:
        levels = rest if colon else ALL_LEVELS
        return _word_problems(name, levels, split, max_samples, seed, calculator_marks)
    if name == "rollouts" and not rest:
        raise UsageError("rollouts: name the file, as in rollouts:generator_1_rollouts.jsonl")
    path = Path(rest) if colon and not is_config(name, rest) else None
    if path and name in CONFIGS and not path.exists():
        raise UsageError(
            f"cannot read the data file {path}: No such file or directory; the configs of {name} "
            f"are {', '.join(CONFIGS[name])}"
        )
    config = rest if colon and path is None else None
    problems = _load_published(name, path, split, max_samples, config=config, **options)
    return _shuffled(problems, split, seed)[:max_samples]


def _load_parts(
    parts: Sequence[str],
    load: Callable[..., list[Problem]],
    split: str,
    columns: str | None,
    rows: str | None,
) -> list[list[Problem]]:
    """Load each dataset of a mixture; columns and slices do not apply to the named ones."""
    if all(map(is_named, parts)) and (rows or split_slice(split)[0] != split):
        raise UsageError(
            f"--split {rows or split}: slices are for files and hub datasets, not for "
            f"{'+'.join(parts)}"
        )
    return [
        load(part, split_slice(split)[0])
        if is_named(part)
        else load(part, split, columns=columns, rows=rows)
        for part in parts
    ]


def check_dataset(dataset: str) -> None:
    """Check that `--dataset` names a known dataset or an existing file, without reading the data.

    Raises:
        UsageError: the dataset is unknown or the file does not exist; the message suggests similar
            names.
    """
    for part in dataset_parts(dataset):
        if is_local_file(part) and not Path(part).is_file():
            there = sorted(file.name for file in Path(part).parent.glob("[!.]*"))
            there = [name for name in there if name.lower().endswith((*READERS,))]
            close = difflib.get_close_matches(Path(part).name, there, 1) or there[:3]
            others = f"; the folder contains {', '.join(close)}" if close else f" (in {Path.cwd()})"
            if not part.lower().removesuffix(".gz").endswith((*READERS,)):
                others += f"; the supported suffixes are {', '.join(READERS)}, each also with .gz"
            raise UsageError(f"--dataset {part}: the file does not exist{others}")
        if not (is_named(part) or is_local_file(part) or is_hub(part)):
            raise _unknown(part)


def peek_problems(dataset: str, columns: str | None, rows: str | None) -> list[Problem]:
    """Return the problems of the user's own files, so that they are checked before torch is loaded.

    Large files and other datasets are skipped.

    Raises:
        UsageError: a file contains too many invalid rows.
    """
    files = filter(is_local_file, dataset_parts(dataset))
    return [p for file in files for p in peek_file(file, parse_columns(columns), rows)]


def dataset_name(dataset: str) -> str:
    """Return the canonical name of a dataset, such as "gsm8k:DIR" for "OpenAI/gsm8k:DIR"."""
    name, colon, rest = dataset.partition(":")
    return NAMES.get(name.lower(), name) + colon + rest


def is_config(name: str, rest: str) -> bool:
    """Return whether `rest`, the text after the name and a colon, is a config and not a path."""
    return rest in CONFIGS.get(name, ()) and not Path(rest).exists()


def dataset_parts(dataset: str) -> list[str]:
    """Split the value of `--dataset` at + into datasets; a + inside a path is not a separator."""
    parts = dataset.split("+")
    known = (is_named, is_local_file, is_hub)
    return parts if all(any(is_one(part) for is_one in known) for part in parts) else [dataset]


def is_named(dataset: str) -> bool:
    """Return whether `dataset` has one of the names in `SPLITS`, with or without a suffix."""
    return dataset_name(dataset).partition(":")[0] in SPLITS


def is_local_file(dataset: str) -> bool:
    """Return whether `dataset` is the user's own file, whose test split is the whole file.

    A name with the ending of a file is one, even if the file does not exist.
    """
    if is_named(dataset):
        return False
    if Path(dataset).is_file():  # an existing file takes precedence over a hub name
        return True
    is_one = "+" not in dataset or dataset_parts(dataset) == [dataset]
    return is_one and dataset.lower().endswith((*READERS, *OTHER_FILES))


def is_hub(dataset: str) -> bool:
    """Return whether `dataset` is a hub dataset without a name in `SPLITS`, or a copy of one."""
    path, _ = split_config(dataset)
    is_one = Path(path).is_dir() or _HUB_NAME.fullmatch(path) is not None
    return is_one and not is_named(dataset) and not is_local_file(dataset)


def own_files(dataset: str) -> set[Path]:
    """Return the user's own files that `--dataset` names."""
    return {Path(part).resolve() for part in dataset_parts(dataset) if is_local_file(part)}


def data_files(dataset: str) -> set[Path]:
    """Return the files that contain all splits of `--dataset`: one's own, and FILE of gsm8k:FILE.

    A path with the ending of a file is one, even if the file does not exist.
    """
    paths = (Path(dataset_name(part).partition(":")[2]) for part in dataset_parts(dataset))
    named = (path for path in paths if path.is_file() or path.name.lower().endswith((*READERS,)))
    return own_files(dataset) | {path.resolve() for path in named}


def needs_hub(dataset: str) -> bool:
    """Return whether a dataset comes from the hub, so that it is neither generated nor local."""
    if is_named(dataset):
        name, _, path = dataset_name(dataset).partition(":")
        return name in HUB and (not path or is_config(name, path))
    return is_hub(dataset) and not Path(split_config(dataset)[0]).is_dir()


def has_only_test(dataset: str) -> bool:
    """Return whether a dataset that is not a local file publishes only a test split."""
    if is_named(dataset):
        return SPLITS[dataset_name(dataset).partition(":")[0]] == ("test",)
    return is_hub(dataset) and split_names(dataset, *split_config(dataset)) == ["test"]


def has_test(dataset: str) -> bool:
    """Return whether every dataset that `--dataset` names has a test split.

    The test split of a local file is the whole file.
    """

    def splits(part: str) -> Sequence[str]:
        if is_named(part):
            return SPLITS[dataset_name(part).partition(":")[0]]
        return split_names(part, *split_config(part)) if is_hub(part) else FILE_SPLITS

    return all("test" in splits(part) for part in dataset_parts(dataset))


def require_numeric_answers(dataset: str, problems: Iterable[Problem]) -> None:
    """Check that all answers are numbers, for programs that can verify only numbers.

    Raises:
        UsageError: the answer type of a problem is not "number".
    """
    kinds = {problem.answer_type for problem in problems} - {"number"}
    if kinds:
        raise UsageError(
            f"--dataset {dataset} has answers of the type {', '.join(sorted(kinds))}; this program "
            "can verify only numbers (train_grpo.py supports all answer types)"
        )


def load_gsm8k(
    split: str = "train", max_samples: int | None = None, path: str | Path | None = None
) -> list[Problem]:
    """Load GSM8K as published: 7,473 problems of train or 1,319 of test, in the order of the file.

    The split "validation" is the first 200 problems of train. To train on the others, use
    `load_problems("gsm8k", "train")`.

    Args:
        path: the published files (JSONL or parquet): their directory, or one of them; None loads
            the dataset from the hub.
    """
    spec = "gsm8k" if path is None else f"gsm8k:{path}"
    split = PUBLISHED_TRAIN if split == "train" else split
    return load_problems(spec, split, max_samples=max_samples)


def load_jsonl(path: str | Path) -> list[Problem]:
    """Load the problems of a UTF-8 file with one JSON object per line, in the order of the file.

    Invalid lines are left out, and a warning lists them. A line with a repeated id is invalid,
    because ids determine seeds and identify samples. A line without an id gets the id FILE-LINE.

    Raises:
        UsageError: the file cannot be read, has no valid line, or has more than 5 % invalid lines.
    """
    file = Path(path)
    return parse_rows(read_file(file), str(file), file.stem, parse_row, columns={})


def split_slice(text: str) -> tuple[str, tuple[str | None, str | None]]:
    """Parse `train[100:10%]` into the split's name and the bounds of the slice.

    >>> split_slice("train[:500]"), split_slice("test")
    (('train', (None, '500')), ('test', (None, None)))

    Raises:
        UsageError: the text does not have this form.
    """
    if (match := _SLICE.fullmatch(text)) is None:
        raise UsageError(f"--split {text}: write NAME, NAME[:500], NAME[500:] or NAME[10%:20%]")
    return match[1], (match[2], match[3])


def cut_rows(rows: Sequence[Any], bounds: tuple[str | None, str | None]) -> Sequence[Any]:
    """Return the rows between two bounds.

    A bound is a row number or a percentage; negative bounds count from the end.
    """

    def index(bound: str | None) -> int | None:
        if bound is None or not bound.endswith("%"):
            return None if bound is None else int(bound)
        return round(len(rows) * int(bound[:-1]) / 100)

    first, last = map(index, bounds)
    return rows[first:last]


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
    told = {"limit": limit, "quiet": quiet, "columns": columns, "remedy": OTHER_ROWS}
    problems = parse_rows(found, f"{dataset} {stored}", prefix, _parse_hub, **told)
    held_out = hold_out(problems[:POOL], "validation", dataset) if is_carved else []
    if quiet:
        return held_out
    problems = _without(problems, held_out)
    for name in ("test",) if is_carved else ("validation", "test"):
        if role == "train" and name in names and name != stored:
            problems = _without_split(problems, dataset, columns, name)
    return problems if is_carved else hold_out(problems, "test", dataset)


def choose_rows(count: int, bounds: tuple[str | None, str | None]) -> Sequence[int]:
    """Return the indices of the rows between two bounds in a split of `count` rows.

    If there are more than POOL rows, they are in a fixed random order, because many datasets are
    sorted by topic.
    """
    chosen = cut_rows(range(count), bounds)
    return random.Random(0).sample(chosen, len(chosen)) if len(chosen) > POOL else chosen


def _without_split(
    problems: list[Problem], dataset: str, columns: dict[str, str], name: str
) -> list[Problem]:
    """Remove training problems whose question is also in the published split `name`."""
    path, config = split_config(dataset)
    rows = read_dataset(dataset, {"path": path, "name": config, "split": name})
    told = {"quiet": True, "columns": columns, "remedy": OTHER_ROWS}
    try:
        published = parse_rows(rows, f"{dataset} {name}", name, _parse_hub, **told)
    except UsageError as error:
        if name != "test":
            raise
        logger.warning("training may contain questions of the test split: %s", error)
        return problems  # many test splits have no answers
    kept = _without(problems, published)
    if len(kept) < len(problems):
        logger.warning(
            "%s: %d training problems are also %s problems and are left out of training",
            dataset,
            len(problems) - len(kept),
            name,
        )
    return kept


def _without(problems: Iterable[Problem], held_out: Iterable[Problem]) -> list[Problem]:
    """Return the problems whose question is not held out."""
    questions = {plain_question(problem.question) for problem in held_out}
    return [p for p in problems if plain_question(p.question) not in questions]


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


def _unknown(dataset: str) -> UsageError:
    known = [name for name in SPLITS if name != "rollouts"]
    close = difflib.get_close_matches(dataset.partition(":")[0].lower(), known, 1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return UsageError(
        f"unknown dataset {dataset!r}{meant}; use {', '.join(known)}, a dataset of the hub "
        f"(org/name), a file ({', '.join(READERS)}) or a directory"
    )


def _load_published(
    name: str,
    path: Path | None,
    split: str,
    max_samples: int | None,
    keep_code: bool,
    calculator_marks: bool,
    config: str | None,
) -> list[Problem]:
    stored = "train" if name == "gsm8k" and split != "test" else split
    one_file = path is not None and not path.is_dir()
    parse, limit = partial(parse_row, calculator_marks=calculator_marks), None
    if name == "openmathinstruct":
        parse = partial(parse_openmath, keep_code=keep_code)
        limit = max(max_samples, POOL) if max_samples and not one_file else None
    elif name == "rollouts":
        parse = parse_rollouts
    if path is None:
        chosen = {"name": config} if config else {}
        source, rows = name, read_dataset(name, {"split": stored} | HUB[name] | chosen)
    else:
        file = path if one_file else find_published(path, name, stored)
        source, rows = str(file), read_file(file)
    problems = parse_rows(rows, source, f"{name}-{stored}", parse, limit=limit)
    if name != "gsm8k" and (not one_file or split == "test"):
        return problems
    return hold_out(problems, split, source, in_order=name == "gsm8k")


def _mix(parts: Sequence[list[Problem]], split: str, seed: int) -> list[Problem]:
    """Combine the problems of several datasets; train is shuffled, other splits stay in order."""
    problems = [problem for part in parts for problem in part]
    repeated = len(problems) - len({problem.id for problem in problems})
    if repeated:
        raise UsageError(
            f"{repeated} ids are in more than one of the datasets: rename the files or the ids"
        )
    return _shuffled(problems, split, seed)


def _shuffled(problems: list[Problem], split: str, seed: int) -> list[Problem]:
    if split == "train":
        random.Random(seed).shuffle(problems)
    return problems


def _word_problems(
    name: str,
    levels: str,
    split: str,
    max_samples: int | None,
    seed: int,
    calculator_marks: bool,
) -> list[Problem]:
    parts = levels.split(",")
    if sentences := SENTENCES in parts:
        parts = [part for part in parts if part != SENTENCES] or [ALL_LEVELS]
    if not all(re.fullmatch(r"\d(-\d)?", part, re.ASCII) for part in parts):
        raise UsageError(f"{name}:{levels}: write levels as 2, 1-2 or 1,3, or {SENTENCES}")
    wanted = [level for part in parts for level in range(int(part[0]), int(part[-1]) + 1)]
    count = max_samples or (TRAIN_SIZES[name] if split == "train" else WORD_PROBLEMS)
    seed = seed if split == "train" else 0
    choice = {"dataset": name, "calculator_marks": calculator_marks, "sentences": sentences}
    try:
        return word_problems.generate_word_problems(split, count, seed, wanted, **choice)
    except ValueError as error:  # an unknown level, or fewer different problems than requested
        raise UsageError(f"{name}:{levels}: {error}") from error
