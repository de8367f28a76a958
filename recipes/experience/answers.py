"""Samples answers with lessons before the question, and prints beforehand what they may cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from tqdm import tqdm

from recipes.experience.agent import Agent, load_endpoints, load_prompts
from recipes.experience.rewards import grade_answer
from rlm.api_client import APIError, Budget, ChatReply
from rlm.cli import flag, terminal
from rlm.data import FORMATS, NEAREST, Experience, Problem, apply_experiences
from rlm.grading import majority_vote
from rlm.runs import Journal

Replies = list[list[ChatReply | None]]  # k per problem; None if a call failed for good
T = TypeVar("T")


@dataclass(kw_only=True)
class CostConfig:
    """Options of every command that sends requests: how much these may cost."""

    max_tokens: int = flag(2048, "longest reply, in tokens", min=1)
    max_cost: float | None = flag(
        None,
        "stop before the requests cost more, by the prices in --api-config",
        min=0,
        default_text="no limit",
    )
    plan: bool = flag(False, "send nothing; print the requests, tokens and costs to expect")


@dataclass(kw_only=True)
class AskingConfig(CostConfig):
    """Options of the commands that ask only for answers, not for plans."""

    instructions: bool = flag(
        True,
        "ask for steps and a final line; --no-instructions sends the bare question, which a model "
        "trained here expects",
    )
    seed: int = flag(0, "random seed sent with the requests")

    @property
    def stage(self) -> str:
        return "solve" if self.instructions else "question"


def open_agents(
    names: Sequence[str], config: AskingConfig, temperature: float, api_config: Path, file: Path
) -> dict[str, Agent]:
    """Open an agent per role; they share a journal, whose costs count against the limit."""
    endpoints = load_endpoints(names, api_config, max_cost=config.max_cost)
    journal, prompts, budget = Journal(file), load_prompts(), Budget(config.max_cost)
    budget.cost = sum(row["cost"] for row in journal.rows.values())
    options = (journal, prompts, temperature, config.max_tokens, config.seed)
    return {n: Agent(n, each, each.client(budget), *options) for n, each in endpoints.items()}


def run_all(agent: Agent, tasks: Sequence[tuple[str, Callable[[], T]]]) -> list[T | None]:
    """Run named requests concurrently, up to the role's limit; return None for a failed one."""

    def run(name: str, task: Callable[[], T]) -> T | None:
        try:
            return task()
        except APIError as error:
            terminal.line(f"{name}: no reply: {error}")
            return None

    with ThreadPoolExecutor(agent.client.concurrency) as pool:
        try:
            futures = [pool.submit(run, *task) for task in tasks]
            shown = tqdm(futures, agent.name, leave=False, file=sys.stderr)
            return [future.result() for future in shown]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # nothing more is sent and paid
            raise


def answer_all(
    agent: Agent,
    problems: Sequence[Problem],
    library: Sequence[Experience],
    samples: int,
    *,
    stage: str = "solve",
    nearest: int | None = NEAREST,
) -> Replies:
    """Sample k replies to each problem, with the nearest lessons before it."""

    def task(problem: Problem, sample: int) -> tuple[str, Callable[[], ChatReply]]:
        asked = apply_experiences(problem.question, library, nearest)
        values, seed = {"problem": asked.question}, f"{problem.id} {sample}"
        return problem.id, partial(agent.ask, stage, seed, values, examples=asked.examples)

    replies = run_all(agent, [task(p, i) for p in problems for i in range(samples)])
    return [replies[i : i + samples] for i in range(0, len(replies), samples)]


def format_attempt(reply: ChatReply, problem: Problem) -> str:
    """Format an attempt for a conversation; reasoning that came separately gets its tags."""
    if not reply.reasoning:
        return reply.text.strip()
    answer = grade_answer(reply.text, problem)[1]
    return FORMATS["deepseek"].completion(reply.reasoning, answer or reply.text)


def format_attempts(replies: Sequence[ChatReply], problem: Problem) -> str:
    """Format several attempts for the critic."""
    texts = [
        f"Attempt {n}:\n{format_attempt(reply, problem)}" for n, reply in enumerate(replies, 1)
    ]
    return "\n\n".join(texts)


def is_right(reply: ChatReply, problem: Problem) -> bool:
    return grade_answer(reply.text, problem)[0]


def mean_score(replies: Sequence[ChatReply], problem: Problem) -> float:
    return fmean(is_right(reply, problem) for reply in replies)


def vote_score(replies: Sequence[ChatReply], problem: Problem) -> float:
    """Return the chance that the majority's answer is right, ties broken at random."""
    graded = [grade_answer(reply.text, problem) for reply in replies]
    tied = majority_vote([answer or None for _, answer, _ in graded]).tied
    return fmean(graded[who[0]][0] for who in tied) if tied else 0.0


def tokens_of(texts: Sequence[str]) -> int:
    """Estimate the tokens of prompts: one per four bytes, and 64 for each template."""
    return sum(len(text.encode()) // 4 + 64 for text in texts)


def announce_cost(
    calls: Mapping[str, tuple[int, int]], agents: Iterable[Agent], max_cost: float | None
) -> None:
    """Print what each role's requests may cost, and the sum.

    The tokens written are a bound, those read an estimate; the limit applies in any case.

    Args:
        calls: role → (requests, tokens read).
    """
    total = 0.0
    for agent in agents:
        requests, read = calls.get(agent.name, (0, 0))
        written, price = requests * agent.reply_tokens, agent.endpoint.price
        total += price.cost(read, written)
        money = "no price given"
        if "price" in agent.endpoint.model_fields_set:
            money = f"cost {price.cost(read, written):.4g}"
        terminal.line(
            f"{agent.name}: at most {requests:,} requests, about {read:,} tokens read, at most "
            f"{written:,} written, {money}"
        )
    if total:
        limit = "no limit (--max-cost)" if max_cost is None else f"limit {max_cost:g}"
        terminal.line(f"in all a cost of at most about {total:.4g}; {limit}")
