"""Measures whether a library helps: compares the same model with and without it.

All problems are unseen, that is, no library was made or tested with them. Each problem is answered
k times with the question alone, and k times with the nearest lessons before the question, with the
same seeds. The difference is paired by problem. With --placebo, a further row uses lessons of other
problems.

    python -m recipes.experience.evaluate
    python -m recipes.experience.evaluate --dataset aime2025 --samples 8
    python -m recipes.experience.evaluate --placebo \\
        --library data/grpo_experiences/selected_experiences.json
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from recipes.experience.agent import GENERATORS, Agent
from recipes.experience.answers import (
    AskingConfig,
    Replies,
    announce_cost,
    answer_all,
    is_right,
    open_agents,
    tokens_of,
)
from recipes.experience.library import LIBRARIES, problems_file, read_questions
from recipes.experience.select import LIBRARY, RECORD
from recipes.experience.train import RUN_DIR, load_problem_set
from recipes.experience.trainer import Row, records_path
from rlm.cli import UsageError, check_values, flag, run_main, terminal, to_dict
from rlm.data import (
    NEAREST,
    Experience,
    Problem,
    load_experiences,
    parse_dataset,
    plain_question,
    similarity,
)
from rlm.evaluation import paired_bootstrap, percent, points, show_table, summarize_scores
from rlm.runs import check_writable, lock_file, read_json, read_lines, replace_json

OTHER_SET = {"aime2024": "aime2025", "aime2025": "aime2024"}  # the datasets with only one split
BASELINE = "no library"


@dataclass
class EvaluateConfig(AskingConfig):
    CHANGED_FIRST = (
        *("library", "dataset", "split", "max_problems", "samples", "max_tokens"),
        *("max_cost", "plan", "api_config", "run_dir"),
    )

    library: tuple[Path, ...] = flag(
        tuple(LIBRARIES / f"{name}_experiences.json" for name in GENERATORS),
        "libraries to evaluate, one row per library",
        default_text=f"libraries of the three generators in {LIBRARIES}",
    )
    nearest: int = flag(NEAREST, "maximum number of lessons in a prompt", min=1)
    placebo: bool = flag(
        False, "add a control row per library, with lessons that do not match the problems"
    )
    dataset: str | None = flag(
        None, "evaluation problems", default_text="those that the run did not use for practice"
    )
    split: str = flag("test", "split of the dataset")
    max_problems: int | None = flag(30, "evaluate at most this many problems; none: all", min=1)
    samples: int = flag(4, "number k of answers per problem", min=1)
    temperature: float = flag(0.3, "sampling temperature", min=0)
    role: str = flag("generator_1", "role whose endpoint is evaluated", choices=GENERATORS)
    run_dir: Path = flag(RUN_DIR, "folder of the run that wrote the libraries, and of the results")

    def __post_init__(self) -> None:
        check_values(self)


def load_unseen(config: EvaluateConfig) -> list[Problem]:
    """Load the evaluation problems, without those used to make or to select the lessons.

    The problems left out are those that any generator of the run practised on, and those recorded
    with the libraries, which may be from other runs.
    """
    dataset, record = config.dataset, config.run_dir / RECORD
    selection = read_json(record)
    if dataset is None:
        file = config.run_dir / f"{config.role}_config.json"
        options = read_json(file)
        if selection and (not options or any(path.name == LIBRARY for path in config.library)):
            options = selection["config"]  # a library of recipes.experience.select
        if not options:
            raise UsageError(f"{config.run_dir} contains no run of {config.role}: pass a --dataset")
        practised: str = options["dataset"]
        dataset = OTHER_SET.get(str(parse_dataset(practised)[0]), practised)
    records = [read_lines(records_path(config.run_dir, n), repair=False) for n in GENERATORS]
    seen = {row["problem_text"] for rows in records for row in rows} | {*selection.get("seen", ())}
    seen |= {question for library in config.library for question in questions_of(library)}
    seen = {plain_question(question) for question in seen}
    most = config.max_problems and config.max_problems + len(seen)
    problems = load_problem_set(dataset, config.split, most)
    unseen = [problem for problem in problems if plain_question(problem.question) not in seen]
    if not unseen:
        raise UsageError(
            f"all {len(problems)} problems of {dataset} were used to make or to test the lessons: "
            "pass another --dataset"
        )
    if len(unseen) < len(problems):
        left_out = len(problems) - len(unseen)
        terminal.line(
            f"{left_out} problems are left out: they were used to make or to test the lessons"
        )
    return unseen[: config.max_problems]


def questions_of(library: Path) -> set[str]:
    """Return the questions of the problems that a library was made or tested with.

    If no file records these questions, print a message.
    """
    if not library.exists():
        return set()
    items = json.loads(library.read_text(encoding="utf-8"))
    recorded = read_questions(library)
    if recorded is None and any("source_problem" in item for item in items):
        terminal.line(
            f"{library}: {problems_file(library).name} is missing, so the problems that this "
            "library was made with are known only if --run-dir is the folder of its run"
        )
    sources = {item.get("source_question", "") for item in items}
    return (sources | {*(recorded or ())}) - {""}


def placebo(library: Sequence[Experience]) -> list[Experience]:
    """Return a control library, in which the least similar lesson replaces each lesson.

    The replacement is used for the problems of the original, so as many prompts contain lessons as
    with the real library. A lesson gets no replacement if even the least similar lesson is within
    its `reach`, that is, similar enough to be used for its problems. Lessons of
    recipes.experience.train have a reach of 0, so none of them gets a replacement.
    """
    others = [min(library, key=lambda e: similarity(e.about, place.about)) for place in library]
    return [
        replace(other, id=f"placebo {other.id}", about=place.about, reach=place.reach)
        for place, other in zip(library, others, strict=True)
        if other is not place and similarity(other.about, place.about) < place.reach
    ]


def compare(problems: Sequence[Problem], replies: Mapping[str, Replies]) -> dict[str, Row]:
    """Compute the metrics of each row and the differences from the first row.

    A problem with a failed call in any row is left out of all rows.
    """
    whole = [i for i in range(len(problems)) if all(None not in row[i] for row in replies.values())]
    if not whole:
        raise UsageError("a call failed on every problem: check the endpoint")
    rows: dict[str, Row] = {}
    for name, row in replies.items():
        given = [reply for group in row for reply in group if reply]
        scores = {
            problems[i].id: fmean(is_right(reply, problems[i]) for reply in row[i] if reply)
            for i in whole
        }
        values = [*scores.values()]
        before = [*rows[BASELINE]["scores"].values()] if rows else []
        rows[name] = {
            "problems": len(whole),
            # With one sample per problem, the scores are 0 or 1 and get Wilson's interval.
            "accuracy": summarize_scores(values, trials={*values} <= {0, 1}),
            "difference": paired_bootstrap(before, values) if rows else None,
            "tokens_read": sum(reply.prompt_tokens for reply in given),
            "tokens_written": sum(reply.completion_tokens for reply in given),
            "cost": sum(reply.cost for reply in given),
            "scores": scores,
        }
    return rows


def show(rows: Mapping[str, Row], libraries: Mapping[str, Sequence[Experience]], k: int) -> None:
    cells = {
        name: {
            "lessons": len(libraries.get(name, ())),
            "problems": row["problems"],
            f"mean@{k}, %": percent(row["accuracy"]),
            "difference, paired": points(row["difference"]) if row["difference"] else "–",
            "tokens read": row["tokens_read"],
            "written": row["tokens_written"],
            "cost": f"{row['cost']:.4g}",
        }
        for name, row in rows.items()
    }
    show_table("", cells, "library")


def load_libraries(config: EvaluateConfig) -> dict[str, Sequence[Experience]]:
    """Load the library of each row. The first row is the baseline and has no library."""
    libraries: dict[str, Sequence[Experience]] = {BASELINE: ()}
    for path in config.library:
        if path.stem in libraries:
            same = " and ".join(str(p) for p in config.library if p.stem == path.stem)
            raise UsageError(f"--library: {same} have the same name: rename one of them")
        libraries[path.stem] = lessons = load_experiences(path)
        if config.placebo and lessons:
            if others := placebo(lessons):
                libraries[f"placebo of {path.stem}"] = others
            else:
                terminal.line(
                    f"{path.stem} has no placebo row: its lessons are for one kind of problem, or "
                    "recipes.experience.select did not test them"
                )
    return libraries


def estimate(
    config: EvaluateConfig, problems: Sequence[Problem], libraries: Mapping[str, Sequence]
) -> dict[str, tuple[int, int]]:
    """Return the maximum number of requests and an estimate of the input tokens, by role."""
    one = tokens_of([problem.question for problem in problems])
    asked = {name for name, lessons in libraries.items() if lessons or name == BASELINE}
    read = config.samples * one * len(asked)
    for lessons in libraries.values():
        sizes = sorted((tokens_of([e.question + e.content]) for e in lessons), reverse=True)
        read += config.samples * len(problems) * sum(sizes[: config.nearest])
    return {config.role: (len(problems) * config.samples * len(asked), read)}


def main(config: EvaluateConfig) -> int:
    libraries = load_libraries(config)
    file = config.run_dir / "evaluate_calls.jsonl"
    check_writable("--run-dir", config.run_dir)
    with lock_file(config.run_dir / ".evaluate.lock", str(config.run_dir), "runs evaluate"):
        # The agent is opened before the data is loaded, so that a missing key is reported without
        # a download.
        agent = open_agents([config.role], config, config.temperature, file)[config.role]
        return evaluate_libraries(config, libraries, agent)


def evaluate_libraries(
    config: EvaluateConfig, libraries: Mapping[str, Sequence[Experience]], agent: Agent
) -> int:
    """Sample answers with each library, and print and write the comparison."""
    problems = load_unseen(config)
    announce_cost(estimate(config, problems, libraries), [agent], agent.client.budget)
    if config.plan:
        return 0
    replies = {}
    for name, lessons in libraries.items():
        terminal.line(f"{name}: {len(lessons)} lessons, {agent.model}")
        if lessons or name == BASELINE:
            options = {"stage": config.stage, "nearest": config.nearest}
            replies[name] = answer_all(agent, problems, lessons, config.samples, **options)
        else:  # the prompts are the same as without a library
            replies[name] = replies[BASELINE]
    rows = compare(problems, replies)
    show(rows, libraries, config.samples)
    record: dict[str, Any] = {"rows": rows, "config": to_dict(config), "model": agent.model}
    record["lessons"] = {n: [asdict(each) for each in lib] for n, lib in libraries.items()}
    replace_json(config.run_dir / "evaluation.json", record)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_main(main, EvaluateConfig, description=__doc__)
