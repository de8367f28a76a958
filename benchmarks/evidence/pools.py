"""The problems on which an arm is trained, and those on which it is judged.

The sets are disjoint. Word problems are split by a hash of their numbers, the test families are in
no other split, and GSM8K's practice problems exclude those whose solutions SFT gets.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.evidence.plan import EvidenceConfig
from rlm.cli import UsageError
from rlm.data import Problem, generate_word_problems, load_problems, load_word_problem_table

LEVEL = 1
FAMILIES = load_word_problem_table().families
# One family per operation, which SFT never sees and GRPO practises with answers only.
PRACTISED = ("money_at_first", "still_to_go", "distance_travelled", "make_groups")
TAUGHT = tuple(
    f.name for f in FAMILIES if f.level == LEVEL and not f.held_out and f.name not in PRACTISED
)

WORDS = ("taught", "practised", "unseen")  # sets of word problems, pooled in the headline
OTHER = "reasoning_gym"
TITLES = {
    "taught": "types that SFT saw solved",
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

# Tasks of reasoning-gym (Apache-2.0), with operands as small as in our word problems.
GYM_TASKS: Mapping[str, Mapping[str, object]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "basic_arithmetic": {
        "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2,
        "allow_parentheses": False, "allow_negation": False, "format_style": "natural",
    },
    "gsm_symbolic": {},
}  # fmt: skip
GYM_SEED = 20_000


@dataclass(frozen=True)
class Pools:
    """The training problems of a seed's arms."""

    solved: list[Problem]
    practice: list[Problem]  # without solutions; as many as GRPO uses
    practice_solved: list[Problem]  # the same with solutions, for sft_all_solved
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
        rows = load_problems(config.dataset, "train", seed=seed)
        solved, practice = rows[: config.solved], rows[config.solved :][:wanted]
    answers = [replace(problem, solution="") for problem in practice]
    return Pools(solved, answers, practice, validation_problems(config, config.curve_problems))


def validation_problems(config: EvidenceConfig, count: int) -> list[Problem]:
    """Return the first `count` validation problems."""
    if config.dataset == "word-problems":
        return made("validation", count, 0, TAUGHT + PRACTISED)
    return load_problems(config.dataset, "validation", max_samples=count)


def judged_sets(config: EvidenceConfig, *, base: bool = False) -> list[JudgedSet]:
    """Return the test sets: equal for all cells, but the base samples fewer problems."""
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
    if gym_installed():
        few = min(config.base_sampled if base else config.other_sampled, config.other_problems)
        sets.append(JudgedSet(OTHER, gym_problems(config.other_problems), few))
    return sets


def made(split: str, count: int, seed: int, families: Sequence[str] | None) -> list[Problem]:
    """Generate problems of the families in turn, so that every prefix is balanced."""
    return generate_word_problems(split, count, seed, (LEVEL,), families)


def without_golds(problems: Sequence[Problem], seed: int) -> list[Problem]:
    """Return the problems with shuffled golds, so that no reasoning can earn the reward."""
    order = list(range(len(problems)))
    random.Random(f"golds {seed}").shuffle(order)  # each gets the gold of the next in this order
    after = dict(zip(order, order[1:] + order[:1], strict=True))
    return [
        replace(problem, answer=problems[after[index]].answer)
        for index, problem in enumerate(problems)
    ]


# --- problems of other authors -------------------------------------------------------------------


def check_gsm8k(dataset: str) -> None:
    """Check that the directory's files equal the published ones byte for byte."""
    name, _, folder = dataset.partition(":")
    if name != "gsm8k" or not folder:
        raise UsageError(f"--dataset {dataset}: use word-problems or gsm8k:DIRECTORY")
    for file, digest in GSM8K_FILES.items():
        path = Path(folder) / file
        if not path.is_file():
            raise UsageError(f"--dataset {dataset}: {path} is missing")
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise UsageError(f"--dataset {dataset}: {path} is not the published file")


def gym_installed() -> bool:
    return importlib.util.find_spec("reasoning_gym") is not None


def gym_problems(count: int) -> list[Problem]:
    """Return distinct problems of reasoning-gym's arithmetic tasks, one of each task in turn."""
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    each = -(-count // len(GYM_TASKS))
    tasks = {}
    for task, options in GYM_TASKS.items():
        rows = reasoning_gym.create_dataset(task, size=4 * each, seed=GYM_SEED, **options)
        tasks[task] = list(_distinct(task, rows))[:each]
        if len(tasks[task]) < each:
            raise UsageError(f"reasoning-gym's {task} has fewer than {each} different questions")
    turns = zip(*tasks.values(), strict=True)
    return [problem for turn in turns for problem in turn][:count]


def _distinct(task: str, rows: Iterable[Mapping[str, object]]) -> Iterable[Problem]:
    seen = set()
    for index, row in enumerate(rows):
        question = str(row["question"])
        if question not in seen:
            seen.add(question)
            yield Problem(f"{task}-{index}", question, str(row["answer"]), "", {"family": task})
