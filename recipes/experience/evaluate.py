"""Does a library help? The same model with and without it, on problems nobody practised on.

Each problem is answered k times with the question alone and k times with the lessons in front, with
the same seeds; the difference is paired by problem. --ablations also writes libraries the ways that
did not help in the field, from the same practice: from one attempt without comparison, without the
gold, and directly, without any attempts.

    python -m recipes.experience.evaluate
    python -m recipes.experience.evaluate --dataset aime2025 --samples 8 --ablations
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from recipes.experience.apprentice import cache_path
from recipes.experience.attempts import Actor, Row, find_operations, show_attempts
from recipes.experience.judge import Judge, grade_answer
from recipes.experience.library import DIRECTORY, Library
from recipes.experience.prompting import Prompts
from recipes.experience.roles import (
    CONFIG,
    GENERATORS,
    Role,
    check_prices,
    client_of,
    load_settings,
    named,
)
from recipes.experience.scaffold import ScaffoldError
from recipes.experience.train import RUN, load
from rlm.api_client import APIError, Budget, ChatReply
from rlm.cli import UsageError, check_values, flag, run_main, terminal, to_dict
from rlm.data import Problem, load_experiences, with_experiences
from rlm.evaluation import bootstrap_interval, mean_at_k, paired_bootstrap
from rlm.runs import Journal, read_lines, replace_file, replace_json

OTHER_SET = {"aime2024": "aime2025", "aime2025": "aime2024"}  # sets without a split to spare
BASELINE = "no library"
REWARDS = ("r_ans", "r_logic", "r_graph", "r_total")


@dataclass
class EvaluateConfig:
    library: tuple[Path, ...] = flag(
        tuple(DIRECTORY / f"{name}_experiences.json" for name in GENERATORS), "a row for each"
    )
    dataset: str | None = flag(None, "what to ask (none: what the run did not practise on)")
    max_problems: int | None = flag(30, "problems (none: all)", min=1)
    samples: int = flag(4, "answers to each problem, k", min=1)
    temperature: float = flag(0.3, "of these answers", min=0)
    role: str = flag("generator_1", "whose endpoint answers", choices=GENERATORS)
    ablations: bool = flag(False, "also learn from the role's practice in three poorer ways")
    max_tokens: int = flag(2048, "longest reply", min=1)
    max_cost: float | None = flag(None, "stop before this is passed", min=0)
    seed: int = flag(0, "of requests")
    api_config: Path = flag(CONFIG, "keys and endpoints of the roles")
    run_dir: Path = flag(RUN, "the run that wrote the libraries; figures go there")

    def __post_init__(self) -> None:
        check_values(self)


def named_libraries(paths: Sequence[Path]) -> dict[str, Path]:
    """Each under its row's name.

    Raises:
        UsageError: two have one name.
    """
    named: dict[str, Path] = {}
    for path in paths:
        if path.stem in named:
            raise UsageError(f"{named[path.stem]} and {path} would be one row: rename one of them")
        named[path.stem] = path
    return named


def unseen_problems(config: EvaluateConfig) -> list[Problem]:
    """The problems to ask.

    Raises:
        UsageError: a generator of the run practised on some of them, whoever answers now.
    """
    dataset = config.dataset
    if dataset is None:
        options = config.run_dir / f"{config.role}_config.json"
        if not options.exists():
            raise UsageError(f"{config.run_dir} holds no run of {config.role}; give a --dataset")
        was = json.loads(options.read_text(encoding="utf-8"))["dataset"]
        dataset = OTHER_SET.get(was, was)
    problems = load(dataset, "test", config.max_problems)
    caches = [cache_path(config.run_dir, name) for name in GENERATORS]
    practised = {row["problem_text"] for c in caches for row in read_lines(c, repair=False)}
    if seen := practised & {p.question for p in problems}:
        raise UsageError(
            f"{len(seen)} of {len(problems)} problems of {dataset} were practised on; "
            "give another --dataset"
        )
    return problems


def poorer_libraries(actor: Actor, practised: Sequence[Row], run_dir: Path) -> dict[str, list[str]]:
    """Three libraries from the groups that taught something, each without one ingredient."""
    groups = [row for row in practised if row["extraction"]]
    written = {}
    for kind in ("no comparison", "no gold"):
        library = _fresh(actor, run_dir, kind)
        for row in groups:
            problem = Problem(row["problem_id"], row["problem_text"], row["ground_truth"])
            rollouts = [r | {"rewards": {k: r[k] for k in REWARDS}} for r in row["rollouts"]]
            shown = show_attempts(rollouts[:1] if kind == "no comparison" else rollouts)
            gold = problem.answer
            if kind == "no gold":
                shown, gold = show_attempts(rollouts, scores=False), "(unknown)"
            stage = "generator_experience_extraction"
            found = actor.extract(stage, problem, shown, library, gold, row["timestamp"])
            if found["error"]:
                terminal.line(f"{kind}: no lesson from {problem.id}: {found['error']}")
        written[kind] = library
    written["written directly"] = library = _fresh(actor, run_dir, "written directly")
    if groups:
        questions = "\n\n".join(row["problem_text"] for row in groups)
        reply = actor.ask("direct_lessons", "all", problems=questions, count=str(len(groups)))
        source = Problem("none", questions, groups[0]["ground_truth"])
        try:
            for operation in find_operations(reply.text):
                library.apply([operation], source, groups[0]["timestamp"])
        except ScaffoldError as error:
            terminal.line(f"written directly: no lessons: {error}")
    for library in written.values():
        replace_json(library.path, library.items)
    return {kind: library.lessons for kind, library in written.items()}


def _fresh(actor: Actor, run_dir: Path, kind: str) -> Library:
    directory = run_dir / "ablations" / kind.replace(" ", "_")
    shutil.rmtree(directory, ignore_errors=True)
    return Library(actor.role.name, directory, 20, 1200)


def answer_all(
    actor: Actor, problems: Sequence[Problem], lessons: Sequence[str], samples: int
) -> list[list[ChatReply | None]]:
    """k replies to each problem; None where a call failed for good."""

    def answer(problem: Problem, sample: int) -> ChatReply | None:
        question = with_experiences(problem.question, lessons)
        try:
            return actor.ask("solve", f"{problem.id} {sample}", problem=question)
        except APIError as error:
            terminal.line(f"{problem.id}: no reply: {error}")
            return None

    with ThreadPoolExecutor(actor.role.client.concurrency) as pool:
        try:
            tasks = [[pool.submit(answer, p, i) for i in range(samples)] for p in problems]
            return [[task.result() for task in group] for group in tasks]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # nothing new is sent, and paid
            raise


def compare(
    problems: Sequence[Problem],
    replies: Mapping[str, list[list[ChatReply | None]]],
    sizes: Mapping[str, int],
) -> list[Row]:
    """A row for each arm. Problems with a failed call in any arm are left out of all of them."""
    whole = [i for i in range(len(problems)) if all(None not in arm[i] for arm in replies.values())]
    if not whole:
        raise UsageError("no problem has all its replies; is the endpoint all right?")
    scores = {
        name: [
            mean_at_k([grade_answer(reply.text, problems[i])[0] for reply in arm[i]]) for i in whole
        ]
        for name, arm in replies.items()
    }
    rows = []
    for name, arm in replies.items():
        gain = paired_bootstrap(scores[BASELINE], scores[name])
        given = [reply for group in arm for reply in group if reply]
        rows.append(
            {
                "library": name,
                "lessons": sizes[name],
                "problems": len(whole),
                "mean": sum(scores[name]) / len(whole),
                "interval": bootstrap_interval(scores[name]),
                "difference": None if name == BASELINE else [gain.points, gain.low, gain.high],
                "tokens_read": sum(reply.prompt_tokens for reply in given),
                "tokens_written": sum(reply.completion_tokens for reply in given),
                "cost": sum(reply.cost for reply in given),
                "scores": {problems[i].id: s for i, s in zip(whole, scores[name], strict=True)},
            }
        )
    return rows


def table(rows: Sequence[Row], samples: int) -> str:
    """Markdown; per cent and points, with 95 % intervals by bootstrap over problems."""
    lines = [
        f"| library | lessons | problems | mean@{samples} | difference, paired "
        "| tokens read | written | cost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = (100 * bound for bound in row["interval"])
        gain = "–"
        if row["difference"]:
            gain = "{:+.1f} ({:+.1f} to {:+.1f})".format(*row["difference"])
        lines.append(
            f"| {row['library']} | {row['lessons']} | {row['problems']} "
            f"| {100 * row['mean']:.1f} ({low:.1f} to {high:.1f}) | {gain} "
            f"| {row['tokens_read']} | {row['tokens_written']} | {row['cost']:.4g} |"
        )
    return "\n".join(lines)


def main(config: EvaluateConfig) -> int:
    settings, prompts = load_settings([config.role], named(config.api_config)), Prompts()
    settings = {config.role: settings[config.role]}  # nothing is judged here
    if config.max_cost is not None:
        check_prices(settings, config.api_config)
    practised = read_lines(cache_path(config.run_dir, config.role), repair=False)
    if config.ablations and not practised:
        raise UsageError(
            f"Rollouts file not found: {cache_path(config.run_dir, config.role)}; "
            f"run: python -m recipes.experience.train generator {config.role[-1]}"
        )
    lessons: dict[str, Sequence[str]] = {BASELINE: ()}
    libraries = named_libraries(config.library)
    lessons |= {name: load_experiences(path) for name, path in libraries.items()}
    problems = unseen_problems(config)
    journal = Journal(config.run_dir / "evaluate_calls.jsonl")
    budget = Budget(config.max_cost)
    budget.cost = sum(row["cost"] for row in journal.rows.values())
    own = settings[config.role]
    role = Role(config.role, own, client_of(own, budget), journal)
    judge = Judge(None, prompts, config.max_tokens)
    actor = Actor(role, prompts, judge, config.temperature, config.max_tokens, (), seed=config.seed)
    if config.ablations:
        lessons |= poorer_libraries(actor, practised, config.run_dir)
    replies: dict[str, list] = {}
    for name, texts in lessons.items():  # an empty library asks the same as none
        terminal.line(f"{name}: {len(texts)} lessons")
        replies[name] = (
            answer_all(actor, problems, texts, config.samples)
            if texts or name == BASELINE
            else replies[BASELINE]
        )
    rows = compare(problems, replies, {name: len(texts) for name, texts in lessons.items()})
    shown = table(rows, config.samples)
    terminal.line(shown)
    made_with = {"config": to_dict(config), "model": role.model, "lessons": lessons}
    replace_json(config.run_dir / "evaluation.json", {"rows": rows} | made_with)
    replace_file(config.run_dir / "evaluation.md", shown + "\n")
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_main(main, EvaluateConfig, description=__doc__)
