"""Problems with gold answers: GSM8K, OpenMathInstruct-1, AIME, word problems, any JSONL file.

`load_problems` takes what a user writes after `--dataset`:

    gsm8k, openmathinstruct, aime2024, aime2025   from the Hugging Face hub
    gsm8k:PATH, openmathinstruct:PATH, …          the published files: a directory, or one file
    word-problems, word-problems:1-2, …:1,3       our own generator, of these levels
    FILE.jsonl                                    one problem a line; data/README.md has the fields

The splits (train, validation, test) share no question. Where no validation split is published, a
fixed part of train is held out. `seed` shuffles train, of which `max_samples` keeps the first; the
other splits do not depend on it, so that scores of runs with different seeds compare.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlm import word_problems
from rlm.answers import gold_from_gsm8k, parse_number
from rlm.config import UsageError

logger = logging.getLogger(__name__)

JSONL_SUFFIXES = (".jsonl", ".json-lines", ".jsonlines", ".ndjson")
QUESTION_FIELDS = ("question", "prompt", "problem")
ANSWER_FIELDS = ("answer", "response")
# No columns for rewards: fields with a meaning here, and names that a reward's call already takes.
TAKEN_FIELDS = {*QUESTION_FIELDS, *ANSWER_FIELDS, "id", "solution"}
TAKEN_FIELDS |= {"self", "prompts", "completions", "completion", "reference_answer"}

MAX_BAD_SHARE = 0.05
BAD_LINES_SHOWN = 5
HELD_OUT = 200  # questions of a validation split that we make, and at most a tenth of all
WORD_PROBLEMS, WORD_PROBLEMS_TRAIN = 500, 2000  # made if max_samples is None
HUB_TIMEOUT = 5.0  # seconds
# OpenMathInstruct-1 is gigabytes: read from the hub until this many problems are there, or
# max_samples if that is more, and sample from these.
HUB_POOL = 5000

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """A question and its gold answer, a number as text that `rlm.answers.parse_number` reads."""

    id: str  # unique in its data set; seeds what is sampled for the problem
    question: str
    answer: str
    solution: str = ""  # worked, in words; "" where the data set has none
    columns: Mapping[str, str | int | float] = field(default_factory=dict, hash=False)  # to rewards


@dataclass(frozen=True)
class _Published:
    """A data set on the hub; the same files may lie in a directory."""

    hub_id: str
    config: str | None
    files: Mapping[str, tuple[str, ...]]  # by split: how its file may be called
    hub_splits: Mapping[str, str] = field(default_factory=dict)  # where the hub's name differs
    hub_files: bool = False  # ask the hub for the last of `files` only, as a stream

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.files) if "train" not in self.files else ("validation", *self.files)


PUBLISHED = {
    "gsm8k": _Published(
        *("openai/gsm8k", "main"),
        {split: (f"gsm8k_{split}.jsonl", f"{split}.jsonl") for split in ("train", "test")},
    ),
    "openmathinstruct": _Published(  # the other files hold the wrong solutions, six gigabytes
        *("nvidia/OpenMathInstruct-1", None),
        {s: (f"{s}.jsonl", f"correct_solutions/{s}.jsonl") for s in ("train", "validation")},
        hub_files=True,
    ),
    "aime2024": _Published(
        "HuggingFaceH4/aime_2024", None, {"test": ("aime2024.jsonl",)}, {"test": "train"}
    ),
    "aime2025": _Published("math-ai/aime25", None, {"test": ("aime2025.jsonl",)}),
}
