"""Measures our server and `transformers serve` on sequential and on simultaneous requests.

Both serve the base model, and get the same requests by OpenAI's protocol: the format's system
prompt, a word problem, temperature 0 and the same token limit. This script starts each server as
its own process, and measures the servers in turns. The throughput is computed from the numbers of
completion tokens that the servers report.

    python -m benchmarks.serving --json docs/results/serving.json
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import httpx2

from benchmarks import harness
from rlm.cli import flag, run_main
from rlm.data import FORMATS, load_problems
from rlm.model import model_directory
from rlm.serving import server_process

PEER = "transformers serve"
SYSTEM = {"role": "system", "content": FORMATS["deepseek"].system_prompt}


@dataclass
class ServingConfig(harness.BenchmarkConfig):
    requests: int = flag(8, "requests, sent one by one and then all at once", min=1)
    max_tokens: int = flag(64, "maximum completion length in tokens", min=1)
    repeats: int = flag(3, "measured repetitions, after a warmup", min=1)


class Server(NamedTuple):
    """Describes a running server: its URL, its model, and the messages before each question."""

    url: str
    model: str
    before: Sequence[dict[str, str]]


class Timed(NamedTuple):
    """Contains the total seconds and tokens of requests, and the seconds to each first token."""

    seconds: float
    tokens: int
    first: list[float]


# Unit → (whether more is better, how to compute the value).
FIGURES: dict[str, tuple[bool, Callable[[Timed], float]]] = {
    "tokens/s": (True, lambda run: run.tokens / run.seconds),
    "s to the first token, median": (False, lambda run: median(run.first)),
    "s": (False, lambda run: run.seconds),
}


async def ask_all(server: Server, questions: list[str], max_tokens: int, at_once: bool) -> Timed:
    async with httpx2.AsyncClient(base_url=server.url, timeout=600) as client:
        started = time.perf_counter()
        asked = [ask(client, server, question, max_tokens) for question in questions]
        answers = await asyncio.gather(*asked) if at_once else [await one for one in asked]
        seconds = time.perf_counter() - started
    return Timed(seconds, sum(tokens for tokens, _ in answers), [first for _, first in answers])


async def ask(
    client: httpx2.AsyncClient, server: Server, question: str, max_tokens: int
) -> tuple[int, float]:
    """Stream a request; return (completion tokens, seconds to the first one)."""
    body = {
        "model": server.model,
        "messages": [*server.before, {"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, first, tokens = time.perf_counter(), None, 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            delta = chunk["choices"][0]["delta"] if chunk.get("choices") else {}
            if first is None and (delta.get("content") or delta.get("reasoning_content")):
                first = time.perf_counter() - started
            if usage := chunk.get("usage"):
                tokens = usage["completion_tokens"]
    if first is None or not tokens:
        raise RuntimeError(f"{server.url} streamed no text or no usage")
    return tokens, first


def time_servers(
    config: ServingConfig, servers: dict[str, Server], at_once: bool
) -> dict[str, list[Timed]]:
    """Time the servers in turns. Each repetition uses other problems."""
    problems = load_problems(config.dataset, "train", max_samples=200, seed=config.seed)

    def run(server: Server, repetition: int) -> Timed:
        first = repetition * config.requests
        numbers = (i % len(problems) for i in range(first, first + config.requests))
        questions = [problems[number].question for number in numbers]
        return asyncio.run(ask_all(server, questions, config.max_tokens, at_once))

    arms = {name: partial(run, server) for name, server in servers.items()}
    return harness.alternate(arms, config.repeats)


def measure(config: ServingConfig, servers: dict[str, Server]) -> dict[str, Any]:
    """Measure sequential and simultaneous requests, and return the report."""
    runs = {at_once: time_servers(config, servers, at_once) for at_once in (False, True)}
    cells = [
        harness.cell(
            f"{config.requests} requests {'at once' if at_once else 'in a row'}",
            unit,
            {name: [value(run) for run in found] for name, found in runs[at_once].items()},
            more_is_better=more_is_better,
        )
        for unit, (more_is_better, value) in FIGURES.items()
        for at_once in (True, False)
    ]
    harness.show("server", cells)
    return harness.report("serving", cells[0], cells)


def main(config: ServingConfig) -> int:
    offline, directory = {"HF_HUB_OFFLINE": "1"}, model_directory(config.model)
    ours = ["server.py", "--base", "--model", config.model, "--max-num-seqs", str(config.requests)]
    peer = ["-m", "transformers.cli.transformers", "serve", "--device", "cpu"]
    peer += ["--dtype", harness.describe_machine()["dtype"], "--continuous-batching", directory]
    with ExitStack() as stack:
        url, _ = stack.enter_context(server_process(ours, environment=offline))
        theirs, _ = stack.enter_context(server_process(peer, environment=offline, ready="/health"))
        servers = {
            harness.OURS: Server(url, "base", []),  # our server adds the system prompt itself
            PEER: Server(theirs, directory, [SYSTEM]),
        }
        harness.write_report(config.json, measure(config, servers))
    return 0


if __name__ == "__main__":
    run_main(main, ServingConfig, description=__doc__)
