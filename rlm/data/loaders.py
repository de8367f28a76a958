"""Load problems with reference answers from published datasets, hub datasets, files and generators.

`parse_dataset` parses the value of `--dataset` into its parts, and `load_problems` loads them:

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

Train has no question in common with validation and test, except that the test split of your own
file is the whole file. If a dataset is published without a validation split, a fixed part of train
is held out for validation. `seed` shuffles train, and `max_samples` selects the first problems. The
other splits do not depend on `seed`, so that the scores of runs with different seeds are
comparable.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

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
)
from rlm.data.sources import (
    HUB,
    READERS,
    find_published,
    read_dataset,
    read_file,
    split_names,
)
from rlm.data.splits import (
    FILE_SPLITS,
    POOL,
    PUBLISHED_TRAIN,
    WHOLE,
    Bounds,
    choose_rows,
    cut_rows,
    hold_out,
    shuffle_train,
    sort_by_hash,
    split_slice,
    without_questions,
)

logger = logging.getLogger(__name__)

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
# Suffixes of unsupported files. A name with such a suffix is not taken for a dataset on the hub.
OTHER_FILES = (".gz", ".zip", ".txt", ".xlsx", ".xls", ".ods", ".arrow", ".feather")
SMALL_FILE = 2**22  # maximum size of a file that `check_dataset` reads, in bytes
# What a user can do about invalid rows of a dataset that others have published.
OTHER_ROWS = (
    "choose other --columns, another config or another --split, or write the valid rows into a "
    "JSONL file and pass that file"
)
# The default levels, and the word in --dataset that requests solutions in sentences.
ALL_LEVELS, SENTENCES = "1-4", "sentences"
# Default number of generated problems: in train, by dataset, and in each other split.
TRAIN_SIZES, OTHER_SIZE = {"word-problems": 2000, "elementary": 8000}, 500

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class Selection:
    """Which problems of a dataset to load; the fields are arguments of `load_problems`."""

    max_samples: int | None = None
    seed: int = 0
    columns: str | None = None
    rows: str | None = None
    keep_code: bool = False
    calculator_annotations: bool = False


@dataclass(frozen=True)
class NamedDataset:
    """A published or generated dataset with a name in `SPLITS`."""

    name: str
    rest: str | None = None  # the text after the colon: config, levels or path of downloaded files

    def __str__(self) -> str:
        return self.name if self.rest is None else f"{self.name}:{self.rest}"

    @property
    def is_generated(self) -> bool:
        return self.name in TRAIN_SIZES

    @property
    def config(self) -> str | None:
        """The config of the dataset on the hub, unless there is a path with the same name."""
        rest = self.rest or ""
        return rest if rest in CONFIGS.get(self.name, ()) and not Path(rest).exists() else None

    @property
    def path(self) -> Path | None:
        """The downloaded files: a directory or a file."""
        is_path = not self.is_generated and self.config is None
        return Path(self.rest) if self.rest and is_path else None

    @property
    def data_file(self) -> Path | None:
        """The file that contains all splits; None for a directory, the hub or generated data."""
        path = self.path
        is_file = path and (path.is_file() or path.name.lower().endswith((*READERS,)))
        return path.resolve() if path and is_file else None

    @property
    def needs_hub(self) -> bool:
        return self.name in HUB and self.path is None

    @property
    def splits(self) -> Sequence[str]:
        return SPLITS[self.name]

    def check(self) -> None:
        """Check that the downloaded files exist."""
        if self.name == "rollouts" and self.path is None:
            raise UsageError("rollouts: name the file, as in rollouts:generator_1_rollouts.jsonl")
        if self.path and not self.path.exists():
            configs = ", ".join(CONFIGS.get(self.name, ()))
            others = f"; the configs of {self.name} are {configs}" if configs else ""
            raise UsageError(
                f"cannot read the data file {self.path}: No such file or directory{others}"
            )

    def load(self, split: str, selection: Selection) -> list[Problem]:
        for option, value in {"--columns": selection.columns, "--split": selection.rows}.items():
            if value:
                raise UsageError(
                    f"{option} is for files and org/name hub datasets, not for {self.name}"
                )
        if split not in self.splits:
            raise UsageError(f"{self} has no split {split!r}; it has {', '.join(self.splits)}")
        if self.is_generated:
            return self._generate(split, selection)
        self.check()
        problems = self._load_published(split, selection)
        return shuffle_train(problems, split, selection.seed)[: selection.max_samples]

    def _load_published(self, split: str, selection: Selection) -> list[Problem]:
        name, path, max_samples = self.name, self.path, selection.max_samples
        stored = "train" if name == "gsm8k" and split != "test" else split
        one_file = path is not None and not path.is_dir()
        parse = partial(parse_row, calculator_annotations=selection.calculator_annotations)
        limit = None
        if name == "openmathinstruct":
            parse = partial(parse_openmath, keep_code=selection.keep_code)
            limit = max(max_samples, POOL) if max_samples and not one_file else None
        elif name == "rollouts":
            parse = parse_rollouts
        if path is None:
            chosen = {"name": self.config} if self.config else {}
            source, rows = name, read_dataset(name, {"split": stored} | HUB[name] | chosen)
        else:
            file = path if one_file else find_published(path, name, stored)
            source, rows = str(file), read_file(file)
        problems = parse_rows(rows, source, f"{name}-{stored}", parse, limit=limit)
        if name != "gsm8k" and (not one_file or split == "test"):
            return problems
        return hold_out(problems, split, source, in_order=name == "gsm8k")

    def _generate(self, split: str, selection: Selection) -> list[Problem]:
        parts = (ALL_LEVELS if self.rest is None else self.rest).split(",")
        if sentences := SENTENCES in parts:
            parts = [part for part in parts if part != SENTENCES] or [ALL_LEVELS]
        if not all(re.fullmatch(r"\d(-\d)?", part, re.ASCII) for part in parts):
            raise UsageError(f"{self}: write levels as 2, 1-2 or 1,3, or {SENTENCES}")
        levels = [level for part in parts for level in range(int(part[0]), int(part[-1]) + 1)]
        size = TRAIN_SIZES[self.name] if split == "train" else OTHER_SIZE
        try:
            return word_problems.generate_word_problems(
                split,
                selection.max_samples or size,
                selection.seed if split == "train" else 0,
                levels,
                dataset=self.name,
                calculator_annotations=selection.calculator_annotations,
                sentences=sentences,
            )
        except ValueError as error:  # an unknown level, or fewer different problems than requested
            raise UsageError(f"{self}: {error}") from error


@dataclass(frozen=True)
class OwnFile:
    """A file of the user, whose test split is the whole file."""

    path: Path

    is_generated = needs_hub = False
    splits = FILE_SPLITS

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def data_file(self) -> Path:
        return self.path.resolve()

    def check(self) -> None:
        """Check that the file exists, and suggest another one if it does not."""
        path = self.path
        if path.is_file():
            return
        there = sorted(file.name for file in path.parent.glob("[!.]*"))
        there = [name for name in there if name.lower().endswith((*READERS,))]
        close = difflib.get_close_matches(path.name, there, 1) or there[:3]
        others = f"; the folder contains {', '.join(close)}" if close else f" (in {Path.cwd()})"
        if not path.name.lower().removesuffix(".gz").endswith((*READERS,)):
            others += f"; the supported suffixes are {', '.join(READERS)}, each also with .gz"
        raise UsageError(f"--dataset {path}: the file does not exist{others}")

    def load(self, split: str, selection: Selection) -> list[Problem]:
        """Load a split: test is the whole file, validation a part of it, and train the rest."""
        (role, bounds), (source, cut) = split_slice(split), split_slice(selection.rows or "train")
        if role not in FILE_SPLITS:
            raise UsageError(f"{self} has no split {role!r}; it has {', '.join(FILE_SPLITS)}")
        if source != "train":
            raise UsageError(
                f"--split {selection.rows}: select rows of a file as train, for example train[:500]"
            )
        bounds = cut if selection.rows and role != "test" else bounds
        problems = self.read(selection.columns, bounds, quiet=role == "validation")
        problems = hold_out(problems, role, str(self))
        return shuffle_train(problems, role, selection.seed)[: selection.max_samples]

    def read(
        self, columns: str | None = None, bounds: Bounds = WHOLE, quiet: bool = False
    ) -> list[Problem]:
        """Return the problems between two bounds, in the order of the file."""
        rows = read_file(self.path)
        if bounds != WHOLE:
            rows = cut_rows(list(rows), bounds)
        names = parse_columns(columns)
        return parse_rows(rows, str(self), self.path.stem, parse_row, quiet=quiet, columns=names)


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the hub without a name in `SPLITS`, or a directory with the same layout."""

    path: str
    config: str | None = None

    is_generated = False
    data_file = None

    def __str__(self) -> str:
        return f"{self.path}:{self.config}" if self.config else self.path

    @property
    def name(self) -> str:
        return self.path

    @property
    def is_valid(self) -> bool:
        return Path(self.path).is_dir() or _HUB_NAME.fullmatch(self.path) is not None

    @property
    def needs_hub(self) -> bool:
        return not Path(self.path).is_dir()

    @property
    def splits(self) -> Sequence[str]:
        self.check()
        return split_names(str(self), self.path, self.config)

    def check(self) -> None:
        """Check that the text is the name of a hub dataset or a directory."""
        if self.is_valid:
            return
        known = [name for name in SPLITS if name != "rollouts"]
        close = difflib.get_close_matches(self.path.lower(), known, 1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise UsageError(
            f"unknown dataset {str(self)!r}{meant}; use {', '.join(known)}, a dataset of the hub "
            f"(org/name), a file ({', '.join(READERS)}) or a directory"
        )

    def load(self, split: str, selection: Selection) -> list[Problem]:
        """Load a split; a validation split that is not published is held out of train.

        With `max_samples`, a split of more than POOL rows is read only until
        max(POOL, max_samples) problems are found, in a fixed random order.
        """
        names, max_samples = self.splits, selection.max_samples
        (role, bounds), (source, cut) = split_slice(split), split_slice(selection.rows or "train")
        is_carved = role in ("train", "validation") and (
            source == "validation" or "validation" not in names
        )
        stored = source if is_carved or role == "train" else role
        if stored not in names:
            hint = "; --split validation uses problems held out of train" if role == "test" else ""
            raise UsageError(f"{self} has no split {stored!r}; it has {', '.join(names)}{hint}")
        bounds = cut if selection.rows and stored == source else bounds
        rows = self._rows(stored, bounds)
        quiet = role == "validation" and is_carved
        prefix = "-".join(filter(None, (self.path.rpartition("/")[2], self.config, stored)))
        limit = None if max_samples is None else max(max_samples, POOL)
        if quiet:
            limit = POOL  # the validation split must not depend on max_samples
        columns = parse_columns(selection.columns)
        options = {"limit": limit, "quiet": quiet, "columns": columns, "remedy": OTHER_ROWS}
        problems = parse_rows(rows, f"{self} {stored}", prefix, _parse_hub, **options)
        held_out = hold_out(problems[:POOL], "validation", str(self)) if is_carved else []
        if quiet:
            return held_out[:max_samples]
        problems = without_questions(problems, held_out)
        for name in ("test",) if is_carved else ("validation", "test"):
            if role == "train" and name in names and name != stored:
                problems = self._without_split(problems, columns, name)
        problems = problems if is_carved else sort_by_hash(problems)
        return shuffle_train(problems, role, selection.seed)[:max_samples]

    def _rows(self, split: str, bounds: Bounds = WHOLE) -> Iterable[tuple[int, Row]]:
        arguments = {"path": self.path, "name": self.config, "split": split}
        return read_dataset(str(self), arguments, partial(choose_rows, bounds=bounds))

    def _without_split(
        self, problems: list[Problem], columns: dict[str, str], name: str
    ) -> list[Problem]:
        """Remove training problems whose question is also in the published split `name`."""
        options = {"quiet": True, "columns": columns, "remedy": OTHER_ROWS}
        try:
            rows = self._rows(name)
            published = parse_rows(rows, f"{self} {name}", name, _parse_hub, **options)
        except UsageError as error:
            if name != "test":
                raise
            logger.warning("training may contain questions of the test split: %s", error)
            return problems  # many test splits have no answers
        kept = without_questions(problems, published)
        if len(kept) < len(problems):
            logger.warning(
                "%s: %d training problems are also %s problems and are left out of training",
                self,
                len(problems) - len(kept),
                name,
            )
        return kept


Dataset = NamedDataset | OwnFile | HubDataset


def parse_dataset(text: str) -> list[Dataset]:
    """Parse the value of `--dataset` into its datasets, which are joined by +.

    A + inside a path is not a separator. Text that denotes nothing known becomes a HubDataset,
    whose `check` fails.
    """
    if "+" in text and Path(text).is_file():
        return [OwnFile(Path(text))]
    parts = [_parse_one(part) for part in text.split("+")]
    is_mixture = all(part.is_valid for part in parts if isinstance(part, HubDataset))
    return parts if is_mixture else [_parse_one(text)]


def _parse_one(text: str) -> Dataset:
    name, colon, rest = text.partition(":")
    if name.lower() in NAMES:
        return NamedDataset(NAMES[name.lower()], rest if colon else None)
    # A name with the ending of a file counts as a file, even if it does not exist.
    if Path(text).is_file() or text.lower().endswith((*READERS, *OTHER_FILES)):
        return OwnFile(Path(text))
    path, _, config = text.rpartition(":")
    return HubDataset(text) if Path(text).is_dir() or not path else HubDataset(path, config)


def load_problems(
    dataset: str,
    split: str = "train",
    *,
    max_samples: int | None = None,
    seed: int = 0,
    columns: str | None = None,
    rows: str | None = None,
    keep_code: bool = False,
    calculator_annotations: bool = False,
) -> list[Problem]:
    """Load the problems of a dataset.

    Args:
        dataset: a value of --dataset; the docstring of the module `rlm.data.loaders` lists them.
        split: train, validation or test. For a file or hub dataset, it may include a slice of rows,
            such as test[:200].
        max_samples: the maximum number of problems per dataset. None loads all problems. Generated
            datasets then have 2000 (word-problems) or 8000 (elementary) problems in train, and 500
            in other splits.
        columns: the columns of a file or hub dataset, such as "question=prompt,answer=target".
        rows: the rows of a file or hub dataset for train and validation, such as train[:500].
        keep_code: whether to keep solutions of OpenMathInstruct that contain code blocks.
        calculator_annotations: whether the solutions of GSM8K and of generated problems contain
            calculator annotations such as `<<3+5=8>>`.

    Raises:
        UsageError: the dataset or split is unknown, a file is invalid, or the hub is not available.
    """
    if max_samples is not None and max_samples < 1:
        raise UsageError(f"max_samples is {max_samples}; it must be at least 1")
    selection = Selection(max_samples, seed, columns, rows, keep_code, calculator_annotations)
    parts = parse_dataset(dataset)
    if len(parts) == 1:
        return parts[0].load(split, selection)
    problems = _load_mixture(parts, split, selection)
    if split_slice(split)[0] != "train":
        return problems
    # A question that one dataset holds out may be a training question of another.
    held_out = split.replace("train", "validation", 1)
    return without_questions(
        problems, _load_mixture(parts, held_out, replace(selection, max_samples=None))
    )


def _load_mixture(parts: Sequence[Dataset], split: str, selection: Selection) -> list[Problem]:
    """Load several datasets; columns and slices apply only to files and org/name hub datasets."""
    role, _ = split_slice(split)
    all_named = all(isinstance(part, NamedDataset) for part in parts)
    if all_named and (selection.rows or role != split):
        raise UsageError(
            f"--split {selection.rows or split}: slices are for files and org/name hub datasets, "
            f"not for {'+'.join(map(str, parts))}"
        )
    plain = replace(selection, columns=None, rows=None)
    problems: list[Problem] = []
    for part in parts:
        is_named = isinstance(part, NamedDataset)
        problems += part.load(role, plain) if is_named else part.load(split, selection)
    repeated = len(problems) - len({problem.id for problem in problems})
    if repeated:
        raise UsageError(
            f"{repeated} ids are in more than one of the datasets: change the ids or rename the "
            "files"
        )
    return shuffle_train(problems, role, selection.seed)


def check_dataset(
    dataset: str, columns: str | None = None, rows: str | None = None
) -> list[Problem]:
    """Check the value of `--dataset` without the hub, and return the problems of the user's files.

    Files of more than SMALL_FILE bytes are not read.

    Raises:
        UsageError: a dataset is unknown, a file does not exist (the message suggests similar
            names), or a file contains too many invalid rows.
    """
    problems: list[Problem] = []
    for part in parse_dataset(dataset):
        part.check()
        if isinstance(part, OwnFile) and part.path.stat().st_size <= SMALL_FILE:
            problems += part.read(columns, split_slice(rows or "train")[1], quiet=True)
    return problems


def own_files(dataset: str) -> set[Path]:
    """Return the user's own files that `--dataset` names."""
    return {part.data_file for part in parse_dataset(dataset) if isinstance(part, OwnFile)}


def data_files(dataset: str) -> set[Path]:
    """Return the local files that contain all splits: the user's own, and FILE of gsm8k:FILE.

    A path with the ending of a file counts as a file, even if it does not exist.
    """
    return {part.data_file for part in parse_dataset(dataset) if part.data_file}


def has_test(dataset: str) -> bool:
    """Return whether every dataset that `--dataset` names has a test split."""
    return all("test" in part.splits for part in parse_dataset(dataset))


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


def _parse_hub(row: Row, default_id: str, first: int | None = None) -> list[Problem]:
    """Parse a row of a hub dataset; a row whose answer cannot be verified is left out."""
    try:
        return parse_row(row, default_id, first=first)
    except NotAnAnswer as error:
        reason = str(error).partition(": ")[0]
        raise LeftOut(
            f"{reason} (--columns answer_type=text accepts words, and completion=COLUMN accepts "
            "worked steps that end with the answer)"
        ) from error
