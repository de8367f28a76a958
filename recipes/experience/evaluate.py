"""Measures whether a library helps: the same model with and without it, on unseen problems.

Each problem is answered k times with the question alone and k times with the lessons in front, with
the same seeds; the difference is paired by problem.

    python -m recipes.experience.evaluate
    python -m recipes.experience.evaluate --dataset aime2025 --samples 8
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from recipes.experience.agent import API_CONFIG, GENERATORS, Agent, load_endpoints, load_prompts
from recipes.experience.library import LIBRARIES
from recipes.experience.rewards import grade_answer
from recipes.experience.train import RUN_DIR, load_problem_set
from recipes.experience.trainer import Row, records_path
from rlm.api_client import APIError, Budget, ChatReply
from rlm.cli import UsageError, check_values, flag, run_main, terminal, to_dict
from rlm.data import Problem, load_experiences, with_experiences
from rlm.evaluation import (
    paired_bootstrap,
    percent,
    points,
    show_table,
    summarize_scores,
)
from rlm.runs import Journal, read_lines, replace_json

OTHER_SET = {"aime2024": "aime2025", "aime2025": "aime2024"}  # sets without a split to spare
BASELINE = "no library"

Replies = list[list[ChatReply | None]]  # k of each problem; None where a call failed for good


@dataclass
class EvaluateConfig:
    library: tuple[Path, ...] = flag(
        tuple(LIBRARIES / f"{name}_experiences.json" for name in GENERATORS), "a row for each"
    )
    dataset: str | None = flag(None, "what to ask (none: what the run did not practise on)")
    max_problems: int | None = flag(30, "problems (none: all)", min=1)
    samples: int = flag(4, "answers to each problem, k", min=1)
    temperature: float = flag(0.3, "of these answers", min=0)
    role: str = flag("generator_1", "whose endpoint answers", choices=GENERATORS)
    max_tokens: int = flag(2048, "longest reply", min=1)
    max_cost: float | None = flag(None, "stop before this is passed", min=0)
    seed: int = flag(0, "of requests")
    api_config: Path = flag(API_CONFIG, "keys and endpoints of the roles")
    run_dir: Path = flag(RUN_DIR, "the run that wrote the libraries; figures go there")

    def __post_init__(self) -> None:
        check_values(self)


def load_unseen(config: EvaluateConfig) -> list[Problem]:
    """Load the problems to ask; refuse those that any generator of the run practised on."""
    dataset = config.dataset
    if dataset is None:
        options = config.run_dir / f"{config.role}_config.json"
        if not options.exists():
            raise UsageError(f"{config.run_dir} holds no run of {config.role}; give a --dataset")
        practised = json.loads(options.read_text(encoding="utf-8"))["dataset"]
        dataset = OTHER_SET.get(practised, practised)
    problems = load_problem_set(dataset, "test", config.max_problems)
    records = [read_lines(records_path(config.run_dir, n), repair=False) for n in GENERATORS]
    practised = {row["problem_text"] for rows in records for row in rows}
    if seen := practised & {p.question for p in problems}:
        raise UsageError(
            f"{len(seen)} of {len(problems)} problems of {dataset} were practised on; "
            "give another --dataset"
        )
    return problems


def answer_all(
    agent: Agent, problems: Sequence[Problem], lessons: Sequence[str], samples: int
) -> Replies:
    """Sample k replies to each problem with the lessons in front."""

    def answer(problem: Problem, sample: int) -> ChatReply | None:
        question = with_experiences(problem.question, lessons)
        try:
            return agent.ask("solve", f"{problem.id} {sample}", problem=question)
        except APIError as error:
            terminal.line(f"{problem.id}: no reply: {error}")
            return None

    with ThreadPoolExecutor(agent.client.concurrency) as pool:
        try:
            tasks = [[pool.submit(answer, p, i) for i in range(samples)] for p in problems]
            return [[task.result() for task in group] for group in tasks]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # nothing new is sent, and paid
            raise


def compare(problems: Sequence[Problem], replies: Mapping[str, Replies]) -> dict[str, Row]:
    """Compare with the first row; a problem with a failed call in any row is left out of all."""
    whole = [i for i in range(len(problems)) if all(None not in row[i] for row in replies.values())]
    if not whole:
        raise UsageError("no problem has all its replies; is the endpoint all right?")
    rows: dict[str, Row] = {}
    for name, row in replies.items():
        given = [reply for group in row for reply in group if reply]
        right = [[grade_answer(reply.text, problems[i])[0] for reply in row[i]] for i in whole]
        scores = {problems[i].id: fmean(each) for i, each in zip(whole, right, strict=True)}
        without = rows.get(BASELINE, {"scores": scores})["scores"]
        gain = paired_bootstrap([*without.values()], [*scores.values()])
        rows[name] = {
            "problems": len(whole),
            "accuracy": summarize_scores([*scores.values()]),
            "difference": asdict(gain) if rows else None,
            "tokens_read": sum(reply.prompt_tokens for reply in given),
            "tokens_written": sum(reply.completion_tokens for reply in given),
            "cost": sum(reply.cost for reply in given),
            "scores": scores,
        }
    return rows


def show(rows: Mapping[str, Row], lessons: Mapping[str, Sequence[str]], samples: int) -> None:
    cells = {
        name: {
            "lessons": len(lessons[name]),
            "problems": row["problems"],
            f"mean@{samples}, %": percent(row["accuracy"]),
            "difference, paired": points(row["difference"]) if row["difference"] else "–",
            "tokens read": row["tokens_read"],
            "written": row["tokens_written"],
            "cost": f"{row['cost']:.4g}",
        }
        for name, row in rows.items()
    }
    show_table("", cells, "library")


def main(config: EvaluateConfig) -> int:
    lessons: dict[str, Sequence[str]] = {BASELINE: ()}
    for path in config.library:
        if path.stem in lessons:
            raise UsageError(f"two of {config.library} would be one row: rename one of them")
        lessons[path.stem] = load_experiences(path)
    problems = load_unseen(config)
    journal = Journal(config.run_dir / "evaluate_calls.jsonl")
    budget = Budget(config.max_cost)
    budget.cost = sum(row["cost"] for row in journal.rows.values())
    own = load_endpoints([config.role], config.api_config, max_cost=config.max_cost)[config.role]
    options = (config.temperature, config.max_tokens, config.seed)
    agent = Agent(config.role, own, own.client(budget), journal, load_prompts(), *options)
    replies: dict[str, Replies] = {}
    for name, texts in lessons.items():
        terminal.line(f"{name}: {len(texts)} lessons, {agent.model}")
        if texts or name == BASELINE:
            replies[name] = answer_all(agent, problems, texts, config.samples)
        else:  # an empty library asks the same as none
            replies[name] = replies[BASELINE]
    rows = compare(problems, replies)
    show(rows, lessons, config.samples)
    made_with = {"config": to_dict(config), "model": agent.model, "lessons": lessons}
    replace_json(config.run_dir / "evaluation.json", {"rows": rows} | made_with)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_main(main, EvaluateConfig, description=__doc__)
