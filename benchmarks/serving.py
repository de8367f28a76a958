"""Requests at once against requests in a row: ours and `transformers serve`, on the base model.

Both speak OpenAI's protocol, both get the same messages (the format's system prompt, a word
problem), temperature 0 and the same token limit; each runs as a process of its own, started here,
and they take turns. Throughput counts completion tokens as the server reports them.

    python -m benchmarks.serving --json docs/results/serving.json
    python -m benchmarks.serving --no-peer
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import httpx2

from benchmarks import harness, shapes
from rlm.cli import flag, run_main, terminal
from rlm.data import FORMATS, load_problems
from rlm.model import model_directory
from rlm.serving import server_process

PEER = "transformers serve"


@dataclass
class ServingConfig(harness.BenchmarkConfig):
    requests: int = flag(8, "requests in a row, then at once", min=1)
    max_tokens: int = flag(64, "longest completion", min=1)
    repeats: int = flag(3, "measured repetitions, after a warm-up", min=1)
    peer: bool = flag(True, "also run transformers serve")


@dataclass(frozen=True)
class Timed:
    """What came of some requests: seconds in all, tokens, seconds to each first token."""

    seconds: float
    tokens: int
    first: list[float]


@dataclass(frozen=True)
class Server:
    """A running server, and the name it has for the model."""

    url: str
    model: str

    def work(self, questions: list[str], max_tokens: int, *, at_once: bool) -> Timed:
        return asyncio.run(self._work(questions, max_tokens, at_once))

    async def _work(self, questions: list[str], max_tokens: int, at_once: bool) -> Timed:
        async with httpx2.AsyncClient(base_url=self.url, timeout=600) as client:
            started = time.perf_counter()
            asked = [self._ask(client, question, max_tokens) for question in questions]
            answers = await asyncio.gather(*asked) if at_once else [await one for one in asked]
            seconds = time.perf_counter() - started
        return Timed(seconds, sum(tokens for tokens, _ in answers), [first for _, first in answers])

    async def _ask(
        self, client: httpx2.AsyncClient, question: str, max_tokens: int
    ) -> tuple[int, float]:
        """(completion tokens, seconds to the first one), streamed."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.model != "base":  # ours says it by itself
            system = {"role": "system", "content": FORMATS["deepseek"].system_prompt}
            body["messages"].insert(0, system)
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
            raise RuntimeError(f"{self.url} answered nothing")
        return tokens, first


def time_servers(
    config: ServingConfig, servers: dict[str, Server], *, at_once: bool
) -> dict[str, list[Timed]]:
    """The repetitions of each server, in turns, each on other problems."""
    problems = load_problems(config.dataset, "train", max_samples=200, seed=config.seed)

    def run(server: Server, repetition: int) -> Timed:
        first = repetition * config.requests
        numbers = (i % len(problems) for i in range(first, first + config.requests))
        questions = [problems[number].question for number in numbers]
        return server.work(questions, config.max_tokens, at_once=at_once)

    arms = {name: partial(run, server) for name, server in servers.items()}
    return harness.alternate(arms, config.repeats)


def measure(config: ServingConfig, servers: dict[str, Server]) -> dict[str, Any]:
    """Throughput, first tokens and seconds, at once and in a row; the report."""
    runs = {at_once: time_servers(config, servers, at_once=at_once) for at_once in (False, True)}
    figures: dict[str, tuple[bool, Callable[[Timed], float]]] = {  # unit → more is better, value
        "tokens/s": (True, lambda run: run.tokens / run.seconds),
        "s to the first token, median": (False, lambda run: median(run.first)),
        "s": (False, lambda run: run.seconds),
    }
    cells = [
        harness.cell(
            f"{config.requests} requests {'at once' if at_once else 'in a row'}",
            unit,
            {name: [value(run) for run in found] for name, found in runs[at_once].items()},
            more_is_better=more_is_better,
        )
        for unit, (more_is_better, value) in figures.items()
        for at_once in (True, False)
    ]
    harness.show("server", cells)
    at_once, in_a_row = cells[-2]["arms"], cells[-1]["arms"]
    speedup = {name: in_a_row[name]["median"] / at_once[name]["median"] for name in servers}
    for name, factor in speedup.items():
        terminal.line(
            f"{name}: {config.requests} at once are {factor:.1f} times as fast as in a row"
        )
    return harness.report("serving", cells[0], cells, {}, speedup_at_once=speedup)


def main(config: ServingConfig) -> int:
    with ExitStack() as stack, shapes.model_at(config.model) as model:

        def start(command: list[str], **options: Any) -> str:
            offline = {"HF_HUB_OFFLINE": "1"}
            running = server_process(command, environment=offline, **options)
            return stack.enter_context(running)[0]

        ours = ["server.py", "--base", "--model", model, "--max-num-seqs", str(config.requests)]
        servers = {harness.OURS: Server(start(ours), "base")}
        if config.peer:
            directory = model_directory(model)
            peer = ["-m", "transformers.cli.transformers", "serve"]
            peer += ["--device", "cpu", "--dtype", "float32", "--continuous-batching", directory]
            servers[PEER] = Server(start(peer, ready="/health"), directory)
        harness.write_report(config.json, measure(config, servers))
    return 0


if __name__ == "__main__":
    run_main(main, ServingConfig, description=__doc__)
