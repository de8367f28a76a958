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
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx2

from benchmarks import harness
from rlm.cli import terminal
from rlm.cli.main import run_main
from rlm.cli.options import UsageError, check_values, flag
from rlm.data.loaders import load_problems
from rlm.data.prompts import FORMATS
from rlm.model import base as models
from rlm.model import hardware as machine

PEER = "transformers serve"
START_SECONDS = 180


@dataclass
class ServingConfig:
    model: str = flag(machine.EMBEDDED_MODEL, "hub id or directory")
    dataset: str = flag("word-problems:1", "where the questions come from")
    requests: int = flag(8, "requests in a row, then at once", min=1)
    max_tokens: int = flag(64, "longest completion", min=1)
    repeats: int = flag(3, "measured repetitions, after a warm-up", min=1)
    peer: bool = flag(True, "also run transformers serve")
    continuous: bool = flag(True, "its continuous batching (without, it takes one at a time)")
    json: Path | None = flag(None, "file for the report")

    def __post_init__(self) -> None:
        check_values(self)


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


@contextmanager
def running(command: list[str], model: str, ready: str) -> Iterator[Server]:
    """A server's process on a free port; `ready` answers 200 when it is up."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = {k: v for k, v in os.environ.items() if k != "RLM_API_KEY"}
    process = subprocess.Popen(
        [sys.executable, *command, "--port", str(port)],
        env=environment | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise UsageError(f"{' '.join(command[:3])} did not start")
            try:
                if httpx2.get(url + ready, timeout=2).status_code == 200:
                    break
            except httpx2.TransportError:
                pass  # not listening yet
            time.sleep(0.5)
        yield Server(url, model)
    finally:
        process.terminate()
        process.wait(30)


def cells(config: ServingConfig, servers: dict[str, Server]) -> list[dict[str, Any]]:
    problems = load_problems(config.dataset, "train", max_samples=200, seed=0)
    results: dict[bool, dict[str, list[Timed]]] = {}
    for at_once in (False, True):

        def arm(server: Server, at_once: bool = at_once):
            def run(repetition: int) -> Timed:
                start = repetition * config.requests
                numbers = (i % len(problems) for i in range(start, start + config.requests))
                chosen = [problems[number].question for number in numbers]
                return server.work(chosen, config.max_tokens, at_once=at_once)

            return run

        arms = {name: arm(server) for name, server in servers.items()}
        results[at_once] = harness.alternate(arms, config.repeats)

    def figures(unit: str, at_once: bool, more_is_better: bool, value: Any) -> dict[str, Any]:
        how = "at once" if at_once else "in a row"
        runs = {name: [value(run) for run in runs] for name, runs in results[at_once].items()}
        name = f"{config.requests} requests {how}"
        return harness.cell(name, unit, runs, more_is_better=more_is_better)

    return [
        figures("tokens/s", True, True, lambda run: run.tokens / run.seconds),
        figures("tokens/s", False, True, lambda run: run.tokens / run.seconds),
        figures("s to the first token, median", True, False, lambda run: median(run.first)),
        figures("s to the first token, median", False, False, lambda run: median(run.first)),
        figures("s", True, False, lambda run: run.seconds),
        figures("s", False, False, lambda run: run.seconds),
    ]


def main(config: ServingConfig) -> int:
    directory = models.model_directory(config.model)
    ours = ["server.py", "--base", "--model", config.model, "--max-num-seqs", str(config.requests)]
    cb = ["--continuous-batching"] if config.continuous else []
    peer = ["-m", "transformers.cli.transformers", "serve", "--device", "cpu", "--dtype", "float32"]
    with running(ours, "base", "/ready") as own:
        if config.peer:
            with running([*peer, *cb, directory], directory, "/health") as other:
                rows = cells(config, {harness.OURS: own, PEER: other})
        else:
            rows = cells(config, {harness.OURS: own})
    in_a_row, at_once = (
        {name: arm["median"] for name, arm in rows[i]["arms"].items()} for i in (5, 4)
    )
    speedup = {name: in_a_row[name] / at_once[name] for name in in_a_row}
    harness.show("server", rows)
    for name, factor in speedup.items():
        terminal.line(
            f"{name}: {config.requests} at once are {factor:.1f} times as fast as in a row"
        )
    harness.write_json(
        config.json, harness.report("serving", rows[0], rows, {}, speedup_at_once=speedup)
    )
    return 0


if __name__ == "__main__":
    run_main(main, ServingConfig, description=__doc__)
