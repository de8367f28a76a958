"""Samples answers to questions with lessons, and estimates the cost of the requests beforehand."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from recipes.experience.agent import API_CONFIG, Agent, load_endpoints, load_prompts
from recipes.experience.rewards import grade_answer
from rlm.api_client import APIError, Budget, ChatReply
from rlm.cli import flag, terminal
from rlm.data import FORMATS, NEAREST, Experience, Problem, apply_experiences
from rlm.runs import Journal

# k replies per problem, with None for a call that failed after all retries.
Replies = list[list[ChatReply | None]]
T = TypeVar("T")


@dataclass(kw_only=True)
class CostConfig:
    """Contains the options of all commands that send requests."""

    max_tokens: int = flag(2048, "maximum length of a reply in tokens", min=1)
    max_cost: float | None = flag(
        None,
        "stop before the requests cost more than this, at the prices in --api-config",
        min=0,
        default_text="no limit",
    )
    plan: bool = flag(
        False, "print the expected requests, tokens and costs, without sending requests"
    )
    api_config: Path = flag(API_CONFIG, "file with the keys and endpoints of the roles")


@dataclass(kw_only=True)
class AskingConfig(CostConfig):
    """Contains the options of the commands that request only answers and no plans."""

    instructions: bool = flag(
        True,
        "add instructions to the question: write steps and a final line with the answer; turn "
        "this off for models trained with this project",
    )
    seed: int = flag(0, "random seed for the requests")

    @property
    def stage(self) -> str:
        return "solve" if self.instructions else "question"


def open_agents(
    names: Sequence[str], config: AskingConfig, temperature: float, file: Path
) -> dict[str, Agent]:
    """Create an agent for each role.

    All agents share a budget and the journal in `file`, whose costs count towards --max-cost. The
    caller holds the lock of the run: reading a journal that another process writes may damage it.
    """
    endpoints = load_endpoints(names, config.api_config, max_cost=config.max_cost)
    journal, prompts, budget = Journal(file), load_prompts(), Budget(config.max_cost)
    budget.cost = sum(row["cost"] for row in journal.rows.values())
    options = (journal, prompts, temperature, config.max_tokens, config.seed)
    return {n: Agent(n, each, each.client(budget), *options) for n, each in endpoints.items()}


def run_all(agent: Agent, tasks: Sequence[tuple[str, Callable[[], T]]]) -> list[T | None]:
    """Run named tasks, with the concurrency limit of the agent's role, and return their results.

    If the request of a task fails, print the name of the task; its result is None.
    """

    def run(name: str, task: Callable[[], T]) -> T | None:
        try:
            return task()
        except APIError as error:
            terminal.line(f"{name}: the request failed: {error}")
            return None

    with ThreadPoolExecutor(agent.client.concurrency) as pool:
        try:
            futures = [pool.submit(run, *task) for task in tasks]
            shown = tqdm(futures, agent.name, leave=False, file=sys.stderr)
            return [future.result() for future in shown]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # no further request is sent or paid for
            raise


def answer_all(
    agent: Agent,
    problems: Sequence[Problem],
    library: Sequence[Experience],
    samples: int,
    *,
    stage: str,
    nearest: int = NEAREST,
) -> Replies:
    """Sample replies to each problem, with the nearest lessons of the library in its prompt."""

    def task(problem: Problem, sample: int) -> tuple[str, Callable[[], ChatReply]]:
        asked = apply_experiences(problem.question, library, nearest)
        values, seed = {"problem": asked.question}, f"{problem.id} {sample}"
        return problem.id, partial(agent.ask, stage, seed, values, examples=asked.examples)

    replies = run_all(agent, [task(p, i) for p in problems for i in range(samples)])
    return [replies[i : i + samples] for i in range(0, len(replies), samples)]


def format_attempt(reply: ChatReply, problem: Problem) -> str:
    """Format an attempt as text for a prompt.

    If the endpoint returned the reasoning separately, it is put into the reasoning tags.
    """
    if not reply.reasoning:
        return reply.text.strip()
    answer = grade_answer(reply.text, problem)[1]
    return FORMATS["deepseek"].completion(reply.reasoning, answer or reply.text)


def is_right(reply: ChatReply, problem: Problem) -> bool:
    return grade_answer(reply.text, problem)[0]


def tokens_of(texts: Sequence[str], extra: int = 64) -> int:
    """Estimate the number of tokens: one per four bytes, and `extra` for the template of a text."""
    return sum(len(text.encode()) // 4 + extra for text in texts)


def announce_cost(
    calls: Mapping[str, tuple[int, int]], agents: Iterable[Agent], budget: Budget
) -> None:
    """Print the expected cost of each role, and the total cost.

    The number of output tokens is an upper bound, and the number of input tokens is an estimate.
    The budget is enforced even if the estimate is too low.

    Args:
        calls: the number of requests and of input tokens of each role.
    """
    total = 0.0
    for agent in agents:
        requests, read = calls.get(agent.name, (0, 0))
        written, price = requests * agent.reply_tokens, agent.endpoint.price
        total += price.cost(read, written)
        money = "no price given"
        if "price" in agent.endpoint.model_fields_set:
            money = f"cost {price.cost(read, written):.4g}"
        limit = ""
        if agent.reply_tokens < agent.max_tokens:
            limit = f" (each reply at most {agent.reply_tokens}: {agent.limited_by})"
        terminal.line(
            f"{agent.name}: at most {requests:,} requests, about {read:,} tokens read, at most "
            f"{written:,} written{limit}, {money}"
        )
    if total:
        limit = f"limit {budget.max_cost:g}, of which earlier replies cost {budget.cost:.4g}"
        limit = "no limit (--max-cost)" if budget.max_cost == math.inf else limit
        terminal.line(f"total cost: at most about {total:.4g}; {limit}")
