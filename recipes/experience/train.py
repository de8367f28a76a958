"""Learning in words: three generators practise, a critic fuses, each keeps a library of lessons.

For each problem a generator writes a causal scaffold several times and follows it; code scores the
attempts; where they differ (σ > τ) it is asked for one lesson, which the next problem's prompts
carry. The critic then fuses each generator's scaffolds and learns from its three fusions likewise.

    python -m recipes.experience.train generator 1 --dataset aime2024 --max-problems 10
    python -m recipes.experience.train critic
    python -m recipes.experience.train all --dataset word-problems --max-problems 10

Run it again to go on after an interruption: what was paid for is not asked again.
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

from recipes.experience.apprentice import Apprentice, cache_path, sole_writer
from recipes.experience.attempts import Actor
from recipes.experience.judge import CRITIC_WEIGHTS, GENERATOR_WEIGHTS, Judge, tolerance_of
from recipes.experience.library import DIRECTORY, Library
from recipes.experience.prompting import Prompts
from recipes.experience.roles import (
    CONFIG,
    GENERATORS,
    Role,
    RoleSettings,
    check_prices,
    client_of,
    load_settings,
    named,
)
from recipes.experience.summary import summarise
from rlm.api_client import APIClient, Budget
from rlm.cli import UsageError, check_values, flag, run_main, terminal
from rlm.data import Problem, is_file, load_jsonl, load_problems, only_numbers
from rlm.runs import read_lines, replace_json

PHYSICS = Path(__file__).parents[2] / "data" / "physics.jsonl"
RUN = Path("runs/experience/default")
SHARED = ("tau", "max_tokens", "seed", "library_items", "library_tokens")


@dataclass
class TrainConfig:
    target: str = flag("all", "who learns", choices=("generator", "critic", "all"), positional=True)
    number: int | None = flag(None, "which generator", choices=(1, 2, 3), positional=True)
    dataset: str = flag("aime2024", "aime2024, aime2025, physics, gsm8k, word-problems or FILE")
    max_problems: int | None = flag(None, "practise on so many (none: all)", min=1)
    rollouts: int = flag(3, "attempts a generator makes at each problem", min=1)
    temperature: float | None = flag(None, "of every request (none: 0.3, the critic's 0.0)", min=0)
    tau: float = flag(0.05, "a group teaches if the σ of its rewards is above this", min=0)
    weights: tuple[float, ...] | None = flag(
        None, "of r_ans,r_logic,r_graph (none: 0.5,0.25,0.25); of the critic also r_fusion", above=0
    )
    max_tokens: int = flag(2048, "longest reply", min=1)
    max_cost: float | None = flag(
        None, "stop before this is passed, in the currency of the prices", min=0
    )
    library_items: int = flag(20, "lessons that a library holds at most", min=1)
    library_tokens: int = flag(
        1200, "tokens that its lessons take in a prompt at most, about", min=1
    )
    seed: int = flag(0, "of problems and requests")
    api_config: Path = flag(CONFIG, "keys and endpoints of the roles")
    library_dir: Path = flag(DIRECTORY, "where the libraries are")
    run_dir: Path = flag(RUN, "where the caches are")

    def __post_init__(self) -> None:
        check_values(self)
        if (self.target == "generator") != (self.number is not None):
            raise ValueError("write: generator 1 (or 2, 3), critic, or all")
        parts = len(CRITIC_WEIGHTS if self.target == "critic" else GENERATOR_WEIGHTS)
        if self.weights and len(self.weights) != parts:
            raise ValueError(f"--weights are {parts} numbers")

    def of(self, name: str) -> dict[str, Any]:
        """Temperature and weights of a role; under `all` the critic keeps its own defaults."""
        critic = name == "critic"
        asked = self.temperature, self.weights
        temperature, weights = (None, None) if critic and self.target == "all" else asked
        if temperature is None:
            temperature = 0.0 if critic else 0.3
        return {
            "temperature": temperature,
            "weights": weights or (CRITIC_WEIGHTS if critic else GENERATOR_WEIGHTS),
        }


def load(dataset: str, split: str, max_problems: int | None, seed: int = 0) -> list[Problem]:
    """The problems, AIME's with ids like aime2024_001; what has no such split comes whole."""
    name = dataset.partition(":")[0]
    source = str(PHYSICS) if dataset == "physics" else dataset
    split = split if name in ("gsm8k", "word-problems") else "test"
    if is_file(source):  # all of it, in its order
        problems = load_jsonl(source)[:max_problems]
    else:
        problems = load_problems(source, split, max_samples=max_problems, seed=seed)
    only_numbers(dataset, problems)
    for problem in problems:
        tolerance_of(problem)  # said now, not when answers have been paid for
    if name in ("aime2024", "aime2025"):
        return [replace(p, id=f"{name}_{number:03d}") for number, p in enumerate(problems, 1)]
    return problems


def connect(
    apprentice: Apprentice,
    config: TrainConfig,
    settings: Mapping[str, RoleSettings],
    clients: Mapping[str, APIClient],
    prompts: Prompts,
) -> Actor:
    """The role at its endpoint, and the judge if there is one.

    Raises:
        UsageError: no server, or the run directory holds a run with other options.
    """
    own = config.of(apprentice.name)
    found = {
        name: Role(name, settings[name], clients[name], apprentice.journal)
        for name in (apprentice.name, "judge")
        if name in settings
    }
    shared = SHARED + (() if apprentice.is_critic else ("dataset", "rollouts"))
    options = {name: getattr(config, name) for name in shared} | own
    options |= {f"{name} model": role.model for name, role in found.items()}
    apprentice.check_options(options | {"weights": list(own["weights"]), "prompts": prompts.digest})
    judge = Judge(found.get("judge"), prompts, config.max_tokens)
    role, limit = found[apprentice.name], config.max_tokens
    return Actor(role, prompts, judge, max_tokens=limit, seed=config.seed, **own)


def read_rollouts(run_dir: Path) -> tuple[list[Problem], dict[str, list[Any]]]:
    """The problems that all three generators have practised on, and their rollouts.

    Raises:
        UsageError: a generator has none.
    """
    caches = {}
    for number, name in enumerate(GENERATORS, 1):
        path = cache_path(run_dir, name)
        caches[name] = {row["problem_id"]: row for row in read_lines(path, repair=False)}
        if not caches[name]:
            raise UsageError(
                f"Rollouts file not found: {path}; "
                f"run: python -m recipes.experience.train generator {number}"
            )
    first, *others = caches.values()
    rows = [row for key, row in first.items() if all(key in other for other in others)]
    problems = [
        Problem(r["problem_id"], r["problem_text"], r["ground_truth"], columns=r["columns"])
        for r in rows
    ]
    return problems, {
        p.id: [(name, cache[p.id]["rollouts"]) for name, cache in caches.items()] for p in problems
    }


def main(config: TrainConfig) -> int:
    single = f"generator_{config.number}" if config.target == "generator" else config.target
    names = (*GENERATORS, "critic") if config.target == "all" else (single,)
    settings, prompts = load_settings(names, named(config.api_config)), Prompts()
    if config.max_cost is not None:
        check_prices(settings, config.api_config)
    limits = (config.library_dir, config.library_items, config.library_tokens)
    with ExitStack() as locks:
        apprentices = []
        for name in names:
            locks.enter_context(sole_writer(name, config.run_dir, config.library_dir))
            library = Library(name, *limits)
            apprentices.append(Apprentice(name, config.run_dir, library, config.tau))
        if config.target == "critic":
            problems, material = read_rollouts(config.run_dir)
        else:
            problems = load(config.dataset, "train", config.max_problems, config.seed)
            material = {p.id: [(n,) for n in range(1, config.rollouts + 1)] for p in problems}
        budget = Budget(config.max_cost)
        budget.cost = sum(row["cost"] for a in apprentices for row in a.journal.rows.values())
        clients = {name: client_of(one, budget) for name, one in settings.items()}
        actors = {a.name: connect(a, config, settings, clients, prompts) for a in apprentices}
        try:
            together(apprentices[: len(GENERATORS)], actors, problems, material)
            if config.target == "all":  # the critic, on what they have just written
                together(apprentices[-1:], actors, *read_rollouts(config.run_dir))
        finally:
            for apprentice in apprentices:
                calls, retries = apprentice.journal.rows.values(), actors[apprentice.name].retries
                shown = summarise(apprentice.rows, calls, retries)
                replace_json(config.run_dir / f"{apprentice.name}_summary.json", shown)
                terminal.facts(apprentice.name, shown)
    return 0


def together(
    apprentices: Sequence[Apprentice],
    actors: Mapping[str, Actor],
    problems: Sequence[Problem],
    material: Mapping[str, Sequence[Any]],
) -> None:
    """All of them at once; what ends one, or Ctrl-C, ends all after the problem in hand."""
    stop = threading.Event()
    with ThreadPoolExecutor(len(GENERATORS)) as pool:
        tasks = [
            pool.submit(apprentice.practise, actors[apprentice.name], problems, material, stop)
            for apprentice in apprentices
        ]
        try:
            for task in as_completed(tasks):
                task.result()
        finally:
            stop.set()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_main(main, TrainConfig, description=__doc__)
