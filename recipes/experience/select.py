"""Selects lessons by trial: a candidate lesson is kept if it improves answers on held-out problems.

The generators answer each problem a few times. A problem with both right and wrong attempts yields
up to three candidates: a right attempt as a worked example, a rule that the critic writes from a
right and a wrong attempt, and the critic's own answer if this answer is right. Each candidate is
tested alone on the held-out problems most similar to the problem it comes from. It is kept if the
model then solves significantly more of these problems, by McNemar's exact test with Holm's
correction.

    python -m recipes.experience.select --dataset gsm8k
    python -m recipes.experience.select --dataset word-problems --split test_families \\
        --no-instructions --max-tokens 128    # for a model trained with this project

To continue after an interruption, run the same command again: requests that were already paid for
are not sent again.
"""

from __future__ import annotations

import sys
from pathlib import Path

# If a script in this folder is run by its path, Python imports this file in place of the standard
# library's module `select`.
if __name__ == "select":
    sys.stderr.write(f"error: run it as python -m recipes.experience.{Path(sys.argv[0]).stem}\n")
    sys.exit(2)

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from recipes.experience.agent import GENERATORS, ROLES, Agent
from recipes.experience.answers import (
    AskingConfig,
    Replies,
    announce_cost,
    answer_all,
    format_attempt,
    is_right,
    open_agents,
    run_all,
    tokens_of,
)
from recipes.experience.library import LIBRARIES, replace_library, reveals_gold, shorten
from recipes.experience.train import RUN_DIR, load_problem_set
from rlm.api_client import ChatReply
from rlm.cli import UsageError, check_values, flag, run_main, terminal, to_dict
from rlm.data import WORKED_EXAMPLE, Experience, Problem, plain_question, similarity
from rlm.evaluation import holm, mcnemar, show_table
from rlm.grading import split_completion
from rlm.runs import check_writable, lock_file, replace_json

KINDS = ("example", "rule", "fusion")
LIBRARY = "selected_experiences.json"
RECORD = "selection.json"
UNCHANGED = "check the endpoint; the library was not changed"


@dataclass
class SelectConfig(AskingConfig):
    CHANGED_FIRST = (
        *("dataset", "split", "problems", "samples", "held_out", "max_tokens"),
        *("max_cost", "plan", "api_config", "run_dir"),
    )

    dataset: str = flag(
        "word-problems", "dataset, with the same names as for recipes.experience.train"
    )
    split: str = flag("train", "split of the dataset")
    problems: int = flag(48, "number of practice problems", min=1)
    samples: int = flag(2, "attempts per generator and problem", min=1)
    temperature: float = flag(0.7, "sampling temperature of the attempts", min=0)
    groups: int = flag(
        8,
        "maximum number of problems from which candidates are made; each has right and wrong "
        "attempts",
        min=1,
    )
    kinds: tuple[str, ...] = flag(KINDS, "kinds of candidates to make", choices=KINDS)
    held_out: int = flag(160, "number of held-out problems for testing the candidates", min=1)
    trial_size: int = flag(
        64,
        "number of held-out problems per candidate: those most similar to its own problem",
        min=6,
    )
    alpha: float = flag(
        0.05,
        "maximum probability of keeping at least one candidate that does not help",
        above=0,
        max=0.5,
    )
    seed: int = flag(0, "random seed for the problems and the requests")
    library_dir: Path = flag(LIBRARIES, f"folder for {LIBRARY}")
    run_dir: Path = flag(RUN_DIR, "folder for the replies and the results of all tests")

    def __post_init__(self) -> None:
        check_values(self)
        if self.trial_size > self.held_out:
            raise ValueError("--trial-size must not be larger than --held-out")


@dataclass(frozen=True)
class Group:
    """Contains a problem with its right and its wrong attempts."""

    problem: Problem
    right: list[ChatReply]
    wrong: list[ChatReply]


@dataclass(frozen=True)
class Candidate:
    kind: str
    problem: Problem
    content: str

    @property
    def lesson(self) -> Experience:
        question = "" if self.kind == "rule" else self.problem.question
        return Experience(self.content, self.problem.id, question, self.problem.question)


@dataclass(frozen=True)
class Trial:
    """Contains the outcome of a candidate: the number of right answers without it and with it."""

    problems: int
    without: int
    with_it: int
    p: float  # p-value of McNemar's test, without Holm's correction
    reach: float  # similarity of the least similar problem in the trial


def differing_groups(
    problems: Sequence[Problem], attempts: Sequence[Sequence[ChatReply | None]], most: int
) -> list[Group]:
    """Select at most `most` problems that have both right and wrong attempts.

    Each selected problem is as dissimilar as possible from those selected before.
    """
    left = []
    for problem, replies in zip(problems, attempts, strict=True):
        right = [reply for reply in replies if reply and is_right(reply, problem)]
        wrong = [reply for reply in replies if reply and not is_right(reply, problem)]
        if right and wrong:
            left.append(Group(problem, right, wrong))
    chosen: list[Group] = []
    while left and len(chosen) < most:
        best = min(left, key=lambda group: _closeness(group, chosen))
        left.remove(best)
        chosen.append(best)
    return chosen


def _closeness(group: Group, others: Sequence[Group]) -> float:
    texts = [other.problem.question for other in others]
    return max((similarity(group.problem.question, text) for text in texts), default=0.0)


def make_candidates(
    critic: Agent, groups: Sequence[Group], kinds: Sequence[str]
) -> list[Candidate]:
    """Create the candidates of these groups. The critic writes the rules and the fusions."""
    found: list[Candidate | None] = []
    if "example" in kinds:
        best = [min(group.right, key=lambda r: len(r.reasoning + r.text)) for group in groups]
        for group, reply in zip(groups, best, strict=True):
            found.append(Candidate("example", group.problem, format_attempt(reply, group.problem)))
    for kind, make in (("rule", _rule), ("fusion", _fusion)):
        if kind in kinds:
            found += run_all(critic, [(g.problem.id, partial(make, critic, g)) for g in groups])
    return [candidate for candidate in found if candidate and candidate.content]


def _rule(critic: Agent, group: Group) -> Candidate | None:
    problem, pair = group.problem, (group.right[0], group.wrong[0])
    right, wrong = (format_attempt(reply, problem) for reply in pair)
    values = {"problem": problem.question, "right": right, "wrong": wrong}
    text = shorten(split_completion(critic.ask("rule", problem.id, values).text)[1])
    if text is None or reveals_gold(text, problem):
        return None
    return Candidate("rule", problem, text)


def _fusion(critic: Agent, group: Group) -> Candidate | None:
    problem = group.problem
    shown = [format_attempt(reply, problem) for reply in (*group.wrong, *group.right)]
    attempts = "\n\n".join(f"Attempt {n}:\n{text}" for n, text in enumerate(shown, 1))
    values = {"problem": problem.question, "attempts": attempts}
    reply = critic.ask("critic_answer", problem.id, values)
    if not is_right(reply, problem):
        return None
    return Candidate("fusion", problem, format_attempt(reply, problem))


def most_similar(candidate: Candidate, held_out: Sequence[Problem], size: int) -> list[int]:
    """Return the indices of the problems most similar to the candidate's, most similar first."""
    about = candidate.problem.question
    scores = [similarity(about, problem.question) for problem in held_out]
    return sorted(range(len(held_out)), key=lambda i: -scores[i])[:size]


def judge_trial(
    candidate: Candidate, problems: Sequence[Problem], without: Replies, with_it: Replies
) -> Trial:
    """Compare the answers to the problems without and with the candidate.

    There is one answer per problem and side. Problems with a failed call are left out.
    """
    pairs = [
        (is_right(a, problem), is_right(b, problem))
        for problem, (a,), (b,) in zip(problems, without, with_it, strict=True)
        if a and b
    ]
    if not pairs:
        raise UsageError(f"a call failed on every problem of a test: {UNCHANGED}")
    before, after = ([pair[i] for pair in pairs] for i in (0, 1))
    reach = min(similarity(candidate.problem.question, problem.question) for problem in problems)
    return Trial(len(pairs), sum(before), sum(after), mcnemar(before, after), reach)


def select(trials: Sequence[Trial], alpha: float) -> list[bool]:
    """Return for each trial whether its candidate is kept.

    A candidate is kept if it gave more right answers, and if the difference is significant after
    Holm's correction over all trials.
    """
    significant = holm([trial.p for trial in trials], alpha)
    return [s and t.with_it > t.without for s, t in zip(significant, trials, strict=True)]


def try_all(
    agent: Agent, candidates: Sequence[Candidate], held_out: Sequence[Problem], config: SelectConfig
) -> list[Trial]:
    """Test each candidate alone on the held-out problems that are most similar to its own problem.

    The answers without a lesson are requested once per problem, for all trials.
    """
    near = [most_similar(candidate, held_out, config.trial_size) for candidate in candidates]
    union = sorted(set().union(*near))
    replies = answer_all(agent, [held_out[i] for i in union], (), 1, stage=config.stage)
    baseline = dict(zip(union, replies, strict=True))
    trials = []
    for number, (candidate, chosen) in enumerate(zip(candidates, near, strict=True), 1):
        asked = [held_out[i] for i in chosen]
        with_it = answer_all(agent, asked, [candidate.lesson], 1, stage=config.stage)
        trial = judge_trial(candidate, asked, [baseline[i] for i in chosen], with_it)
        trials.append(trial)
        terminal.line(
            f"{number} of {len(candidates)}, {candidate.kind}: {trial.without} → {trial.with_it} "
            f"of {trial.problems} right, p {trial.p:.2g}"
        )
    return trials


def as_item(candidate: Candidate, trial: Trial) -> dict[str, Any]:
    """Convert a candidate to an item of the library."""
    category = "problem_solving" if candidate.kind == "rule" else WORKED_EXAMPLE
    about = {"source_problem": candidate.problem.id, "source_question": candidate.problem.question}
    head = {"id": "", "content": candidate.content, "category": category}
    return head | about | {"kind": candidate.kind, "reach": trial.reach, "trial": vars(trial)}


def estimate(config: SelectConfig, problems: Sequence[Problem]) -> dict[str, tuple[int, int]]:
    """Return the maximum number of requests and an estimate of the input tokens, by role.

    The lesson of a trial and each attempt that the critic reads are counted with the maximum length
    of a reply.
    """
    read = 2 * (tokens_of([problem.question for problem in problems]) // len(problems))
    attempts = config.problems * config.samples
    trials = len(config.kinds) * config.groups * config.trial_size
    tested = attempts + config.held_out + trials  # the first generator also answers all trials
    asked = len({"rule", "fusion"} & set(config.kinds)) * config.groups
    compared = len(GENERATORS) * config.samples * config.max_tokens
    return {
        **dict.fromkeys(GENERATORS, (attempts, attempts * read)),
        GENERATORS[0]: (tested, tested * read + trials * config.max_tokens),
        "critic": (asked, asked * (read + compared)),
    }


def load_parts(config: SelectConfig) -> tuple[list[Problem], list[Problem]]:
    """Load the problems to practise on, and the held-out problems for trials.

    No held-out problem has the question of a practice problem.
    """
    count = config.problems + config.held_out
    problems = load_problem_set(config.dataset, config.split, count, config.seed)
    if len(problems) < count:
        raise UsageError(
            f"{config.dataset} has {len(problems)} problems, but {count} are needed: "
            "lower --problems or --held-out"
        )
    practise, rest = problems[: config.problems], problems[config.problems :]
    known = {plain_question(problem.question) for problem in practise}
    held_out = [problem for problem in rest if plain_question(problem.question) not in known]
    if len(held_out) < config.trial_size:
        raise UsageError(
            f"{config.dataset}: only {len(held_out)} held-out problems have other questions than "
            "the practice problems: lower --problems or --trial-size"
        )
    return practise, held_out


def main(config: SelectConfig) -> int:
    file = config.run_dir / "select_calls.jsonl"
    check_writable("--run-dir", config.run_dir)
    check_writable("--library-dir", config.library_dir)
    with lock_file(config.run_dir / ".select.lock", str(config.run_dir), "runs select"):
        agents = open_agents(ROLES, config, config.temperature, file)
        return select_lessons(config, agents)


def select_lessons(config: SelectConfig, agents: Mapping[str, Agent]) -> int:
    """Sample attempts, make candidates from them, and write those that help to the library."""
    practise, held_out = load_parts(config)
    budget = agents[GENERATORS[0]].client.budget
    announce_cost(estimate(config, [*practise, *held_out]), agents.values(), budget)
    if config.plan:
        return 0
    drawn = [
        answer_all(agents[name], practise, (), config.samples, stage=config.stage)
        for name in GENERATORS
    ]
    attempts = [[*chain(*each)] for each in zip(*drawn, strict=True)]
    if not any(reply for replies in attempts for reply in replies):
        raise UsageError(f"all requests failed: {UNCHANGED}")
    groups = differing_groups(practise, attempts, config.groups)
    terminal.line(f"{len(groups)} problems have both right and wrong attempts")
    asker, critic = (replace(agents[name], temperature=0.0) for name in (GENERATORS[0], "critic"))
    candidates = make_candidates(critic, groups, config.kinds)
    trials = try_all(asker, candidates, held_out, config) if candidates else []
    kept = select(trials, config.alpha)
    tried = zip(candidates, trials, kept, strict=True)
    rows = [as_item(candidate, trial) | {"kept": keep} for candidate, trial, keep in tried]
    items = [row for row in rows if row["kept"]]
    for number, item in enumerate(items, 1):
        item["id"] = f"S-{number:03d}"
    library = config.library_dir / LIBRARY
    seen = [problem.question for problem in (*practise, *held_out)]
    replace_library(library, items, seen)
    record = {"config": to_dict(config), "model": asker.model, "seen": seen, "tried": rows}
    replace_json(config.run_dir / RECORD, record)
    show(config.kinds, rows)
    terminal.line(f"{len(items)} lessons were written to {library}")
    return 0


def show(kinds: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Print a table with a row for each kind of candidate."""
    cells = {}
    for kind in kinds:
        mine = [row for row in rows if row["kind"] == kind]
        kept = sum(row["kept"] for row in mine)
        better = sum(row["trial"]["with_it"] > row["trial"]["without"] for row in mine)
        cells[kind] = {"tried": len(mine), "more right answers": better, "kept": kept}
    show_table("", cells, "candidates")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_main(main, SelectConfig, description=__doc__)
