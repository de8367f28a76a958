"""Selects the problems for training and for evaluation.

The sets are disjoint. Word problems are split by a hash of their numbers, the test families are in
no other split, and GSM8K's practice problems exclude those whose solutions SFT gets.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.evidence.plan import EvidenceConfig
from rlm.cli import UsageError
from rlm.data import Problem, generate_word_problems, load_problems, load_word_problem_table
from rlm.runs import file_hash
from rlm.tools import Calculator

LEVEL = 1
FAMILIES = load_word_problem_table().families
# One family per operation. SFT never sees these families; GRPO trains on them with answers only.
PRACTISED = ("money_at_first", "still_to_go", "distance_travelled", "make_groups")
TAUGHT = tuple(
    f.name for f in FAMILIES if f.level == LEVEL and not f.held_out and f.name not in PRACTISED
)

WORDS = ("taught", "practised", "unseen")  # test sets of word problems; most tables pool them
OTHER = "reasoning_gym"  # a test set that only older results contain
TITLES = {
    "taught": "types with worked solutions",
    "practised": "types with answers only",
    "unseen": "unseen types",
    OTHER: "reasoning-gym",
    "gsm8k": "GSM8K test",
}

# SHA-256 of the published files (github.com/openai/grade-school-math).
GSM8K_FILES = {
    "gsm8k_train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "gsm8k_test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}


@dataclass(frozen=True)
class Pools:
    """Contains the problems on which all methods of a seed are trained and validated."""

    solved: list[Problem]
    practice: list[Problem]  # problems without solutions, as many as GRPO uses
    practice_solved: list[Problem]  # the same problems with solutions, for sft_all_solved
    validation: list[Problem]


@dataclass(frozen=True)
class JudgedSet:
    name: str
    problems: list[Problem]  # decoded greedily
    sampled: int  # how many of the first problems are sampled as well


def pools(config: EvidenceConfig, seed: int) -> Pools:
    """Return the training and validation problems of a seed."""
    wanted = config.steps * config.batch_size
    if config.dataset == "word-problems":
        solved = made("train", config.solved, seed, TAUGHT)
        shown = {problem.question for problem in solved}
        new = made("train", wanted, seed + 1000, PRACTISED)
        more = made("train", wanted + config.solved, seed + 1000, TAUGHT)
        known = [problem for problem in more if problem.question not in shown]
        practice = [problem for pair in zip(new, known, strict=False) for problem in pair][:wanted]
    else:
        check_gsm8k(config.dataset)
        annotations = config.tool == Calculator.name
        rows = load_problems(config.dataset, "train", seed=seed, calculator_annotations=annotations)
        solved, practice = rows[: config.solved], rows[config.solved :][:wanted]
    answers = [replace(problem, solution="") for problem in practice]
    return Pools(solved, answers, practice, validation_problems(config, config.curve_problems))


def validation_problems(config: EvidenceConfig, count: int) -> list[Problem]:
    """Return the first `count` validation problems."""
    if config.dataset == "word-problems":
        return made("validation", count, 0, TAUGHT + PRACTISED)
    return load_problems(config.dataset, "validation", max_samples=count)


def judged_sets(config: EvidenceConfig, *, base: bool = False) -> list[JudgedSet]:
    """Return the test sets, which are the same for all cells.

    Sampled accuracy is measured on fewer problems, and for the base model on still fewer.
    """
    sampled = config.base_sampled if base else config.sampled_problems
    greedy, sets = config.greedy_problems, []
    if config.dataset == "word-problems":
        splits = {"taught": ("test", TAUGHT), "practised": ("test", PRACTISED)}
        splits["unseen"] = ("test_families", None)
        for name, (split, families) in splits.items():
            sets.append(JudgedSet(name, made(split, greedy, 0, families), min(sampled, greedy)))
    else:
        check_gsm8k(config.dataset)
        problems = load_problems(config.dataset, "test", max_samples=greedy)
        sets.append(JudgedSet("gsm8k", problems, min(sampled, len(problems))))
    return sets


def made(split: str, count: int, seed: int, families: Sequence[str] | None) -> list[Problem]:
    """Generate problems of the families in turn, so that every prefix is balanced."""
    return generate_word_problems(split, count, seed, (LEVEL,), families)


def without_golds(problems: Sequence[Problem], seed: int) -> list[Problem]:
    """Return the problems with shuffled reference answers, which no reasoning can predict."""
    order = list(range(len(problems)))
    random.Random(f"golds {seed}").shuffle(order)
    # Each problem gets the answer of the next one in this order, and the last that of the first.
    after = dict(zip(order, order[1:] + order[:1], strict=True))
    return [
        replace(problem, answer=problems[after[index]].answer)
        for index, problem in enumerate(problems)
    ]


def check_gsm8k(dataset: str) -> None:
    """Check that the directory's files equal the published ones byte for byte."""
    name, _, folder = dataset.partition(":")
    if name != "gsm8k" or not folder:
        raise UsageError(f"--dataset {dataset}: use word-problems or gsm8k:DIRECTORY")
    for file, digest in GSM8K_FILES.items():
        path = Path(folder) / file
        if not path.is_file():
            raise UsageError(f"--dataset {dataset}: {path} is missing")
        if file_hash(path) != digest:
            raise UsageError(f"--dataset {dataset}: {path} is not the published file")
