"""Trains generators and a critic with training-free GRPO, which changes lessons, not weights.

For each problem a generator makes several attempts: it writes a plan and follows this plan to an
answer. Code scores the attempts. If the scores differ (σ > τ), the generator is asked for one
lesson, which is added to later prompts. The critic then merges the plans of each generator into
one, and learns in the same way from the three merged plans of a problem.

    python -m recipes.experience.train generator 1 --dataset aime2024 --max-problems 10
    python -m recipes.experience.train critic
    python -m recipes.experience.train all --dataset word-problems --max-problems 10

To continue after an interruption, run the same command again: requests that were already paid for
are not sent again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipes.experience.agent import (
    GENERATORS,
    ROLES,
    Agent,
    Endpoint,
    load_endpoints,
    load_prompts,
)
from recipes.experience.answers import CostConfig, announce_cost, tokens_of
from recipes.experience.library import LIBRARIES, MAX_TOKENS, Library
from recipes.experience.rewards import relative_tolerance
from recipes.experience.trainer import MAX_SHOWN, Task, Trainer, records_path, shown_summary
from rlm.api_client import APIClient, Budget
from rlm.cli import UsageError, check_values, flag, run_main, terminal
from rlm.data import OwnFile, Problem, load_problems, parse_dataset, require_numeric_answers
from rlm.runs import Journal, check_writable, lock_file, read_lines, replace_json

PHYSICS = Path(__file__).parents[2] / "data" / "physics.jsonl"
RUN_DIR = Path("runs/experience/default")
SHARED = ("tau", "max_tokens", "seed")


@dataclass
class TrainConfig(CostConfig):
    CHANGED_FIRST = (
        *("dataset", "max_problems", "rollouts", "temperature", "max_tokens", "max_cost"),
        *("plan", "api_config", "library_dir", "run_dir"),
    )

    target: str = flag(
        "all",
        "roles to train; generator1 is short for generator 1",
        choices=("generator", "critic", "all", "generator1", "generator2", "generator3"),
        positional=True,
    )
    number: int | None = flag(
        None, "number of the generator: 1, 2 or 3", choices=(1, 2, 3), positional=True
    )
    dataset: str = flag(
        "aime2024", "problems: aime2024, aime2025, physics, gsm8k, word-problems or FILE.jsonl"
    )
    max_problems: int | None = flag(
        None, "use at most this many problems", min=1, default_text="all"
    )
    rollouts: int = flag(3, "attempts per generator and problem", min=2)
    temperature: float | None = flag(
        None, "sampling temperature", min=0, default_text="0.3; 0.0 for the critic"
    )
    tau: float = flag(
        0.05, "use only problems whose rewards have a standard deviation above this value", min=0
    )
    seed: int = flag(0, "random seed for the problem order and the requests")
    library_dir: Path = flag(LIBRARIES, "folder of the libraries")
    run_dir: Path = flag(RUN_DIR, "folder for the records of the run")

    def __post_init__(self) -> None:
        check_values(self)
        if self.target[-1].isdigit() and self.number is None:
            self.target, self.number = "generator", int(self.target[-1])
        if (self.target == "generator") != (self.number is not None):
            raise ValueError("the roles to train must be: generator 1 (or 2 or 3), critic, or all")

    def temperature_of(self, role: str) -> float:
        """Return a role's temperature. For `all`, --temperature applies only to the generators."""
        if role == "critic":
            return (self.temperature or 0.0) if self.target == "critic" else 0.0
        return 0.3 if self.temperature is None else self.temperature


def load_problem_set(
    dataset: str, split: str, max_problems: int | None, seed: int = 0
) -> list[Problem]:
    """Load the problems of a dataset.

    `split` does not apply to a local file or to a dataset that publishes only a test split. AIME
    problems get ids like aime2024_001.
    """
    source = str(PHYSICS) if dataset == "physics" else dataset
    parts = parse_dataset(source)
    if len(parts) > 1:
        raise UsageError(
            f"--dataset {dataset}: pass one dataset, because this recipe does not mix them"
        )
    if isinstance(parts[0], OwnFile):
        problems = parts[0].read()[:max_problems]  # in the order of the file
    else:
        chosen = "test" if [*parts[0].splits] == ["test"] else split
        problems = load_problems(source, chosen, max_samples=max_problems, seed=seed)
    require_numeric_answers(dataset, problems)
    for problem in problems:
        relative_tolerance(problem)  # raises before any answers are paid for
    name = parts[0].name
    if name in ("aime2024", "aime2025"):
        return [replace(p, id=f"{name}_{number:03d}") for number, p in enumerate(problems, 1)]
    return problems


def load_proposals(run_dir: Path) -> list[Task]:
    """Load the problems that all three generators practised on, with the generators' rollouts."""
    records = {}
    where = f" --run-dir {run_dir}" if run_dir != RUN_DIR else ""
    for number, name in enumerate(GENERATORS, 1):
        path = records_path(run_dir, name)
        records[name] = {row["problem_id"]: row for row in read_lines(path, repair=False)}
        if not records[name]:
            raise UsageError(
                f"Rollouts file not found: {path}; "
                f"create it with: python -m recipes.experience.train generator {number}{where}"
            )
    tasks = []
    for key, row in records[GENERATORS[0]].items():
        if all(key in rows for rows in records.values()):
            if len({rows[key]["problem_text"] for rows in records.values()}) > 1:
                raise UsageError(
                    f"{run_dir}: the generators practised on different problems with the id {key}: "
                    "run them again on the same data, with another --run-dir"
                )
            about = (key, row["problem_text"], row["ground_truth"])
            group = [(name, rows[key]["rollouts"]) for name, rows in records.items()]
            tasks.append((Problem(*about, columns=row["columns"]), group))
    return tasks


def open_trainer(
    name: str,
    config: TrainConfig,
    endpoints: Mapping[str, Endpoint],
    clients: Mapping[str, APIClient],
) -> Trainer:
    """Create the trainer of a role: open its files, and set up its agent and the optional judge."""
    journal, prompts = Journal(config.run_dir / f"{name}_calls.jsonl"), load_prompts()

    def agent(role: str, **options: Any) -> Agent:
        given = (endpoints[role], clients[role], journal, prompts)
        return Agent(role, *given, max_tokens=config.max_tokens, **options)

    judge = agent("judge", temperature=0.0) if "judge" in endpoints else None
    own = agent(name, temperature=config.temperature_of(name), seed=config.seed)
    return Trainer(own, judge, Library(name, config.library_dir), config.run_dir, config.tau)


def main(config: TrainConfig) -> int:
    single = f"generator_{config.number}" if config.target == "generator" else config.target
    names = ROLES if config.target == "all" else (single,)
    endpoints = load_endpoints((*names, "judge"), config.api_config, max_cost=config.max_cost)
    budget = Budget(config.max_cost)
    clients = {name: endpoint.client(budget) for name, endpoint in endpoints.items()}
    with ExitStack() as locks:
        check_writable("--run-dir", config.run_dir)
        check_writable("--library-dir", config.library_dir)
        for directory in {config.run_dir.resolve(), config.library_dir.resolve()}:
            for name in names:
                lock = lock_file(directory / f".{name}.lock", str(directory), f"runs {name}")
                locks.enter_context(lock)
        trainers = [open_trainer(name, config, endpoints, clients) for name in names]
        if config.target == "critic":
            tasks = load_proposals(config.run_dir)
        else:
            problems = load_problem_set(config.dataset, "train", config.max_problems, config.seed)
            tasks = [(p, [(n,) for n in range(1, config.rollouts + 1)]) for p in problems]
        agents = {agent.name: agent for t in trainers for agent in (t.agent, t.judge) if agent}
        budget.cost = sum(row["cost"] for t in trainers for row in t.agent.journal.rows.values())
        announce_cost(estimate(config, tasks), agents.values(), budget)
        if config.plan:
            return 0
        for trainer in trainers:
            own = () if trainer.is_critic else ("dataset", "rollouts")
            trainer.check_options({name: getattr(config, name) for name in SHARED + own})
        try:
            train_at_once(trainers[: len(GENERATORS)], tasks)
            if config.target == "all":  # the critic trains on the rollouts of these problems
                asked = {problem.id for problem, _ in tasks}
                proposed = load_proposals(config.run_dir)
                train_at_once(trainers[-1:], [task for task in proposed if task[0].id in asked])
        finally:
            for trainer in trainers:
                shown = trainer.summary()
                replace_json(config.run_dir / f"{trainer.name}_summary.json", shown)
                terminal.table(trainer.name, shown_summary(shown))
    return 0


def estimate(config: TrainConfig, tasks: Sequence[Task]) -> dict[str, tuple[int, int]]:
    """Return the maximum number of requests and an estimate of the input tokens, by role.

    Every plan is counted with the maximum length of a reply.
    """
    count, rollouts = len(tasks), config.rollouts
    if config.target == "critic":  # the generators' recorded rollouts
        rollouts = max((len(rows) for _, group in tasks for _, rows in group), default=0)
    prompts = [prompt.template for prompt in load_prompts().values()]
    one = max(tokens_of([text]) for text in prompts) + MAX_TOKENS
    one += tokens_of([problem.question for problem, _ in tasks]) // max(count, 1)
    compared = one + rollouts * (MAX_SHOWN // 4 + config.max_tokens)
    generator = count * (2 * rollouts * one + rollouts * config.max_tokens + compared)
    critic = count * (6 * one + 3 * (rollouts + 1) * config.max_tokens + compared)
    calls = dict.fromkeys(GENERATORS, (count * (2 * rollouts + 1), generator))
    by_generator, by_critic = count * rollouts, count * len(GENERATORS)
    judged = {"all": len(GENERATORS) * by_generator + by_critic, "critic": by_critic}.get(
        config.target, by_generator
    )
    judge = (judged, judged * (one + 2 * config.max_tokens))
    return calls | {"critic": (7 * count, critic), "judge": judge}


def train_at_once(trainers: Sequence[Trainer], tasks: Sequence[Task]) -> None:
    """Run the trainers in parallel threads.

    If a trainer fails, or on Ctrl-C, every trainer stops after its current problem.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(len(GENERATORS)) as pool:
        running = [pool.submit(trainer.train, tasks, stop) for trainer in trainers]
        try:
            for future in as_completed(running):
                future.result()
        finally:
            stop.set()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_main(main, TrainConfig, description=__doc__)
