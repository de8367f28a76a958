"""A request's way through the server, whatever its protocol: checked, queued, drawn, reported."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from rlm.data.prompts import render_prompt
from rlm.sampling.params import SamplingParams, prompt_seed
from rlm.serving.catalog import Catalog, Offered
from rlm.serving.engine import Engine, Job
from rlm.serving.errors import Problem
from rlm.serving.metrics import Metrics
from rlm.serving.thinking import Thinking

TEMPERATURE_OF_SEVERAL = 0.7


@dataclass(frozen=True)
class Limits:
    """What one request and all together may ask for."""

    prompt_tokens: int
    new_tokens: int
    requests: int  # accepted and not finished
    tokens: int  # which these may take up at most
    seconds: float  # from acceptance to the last token


@dataclass(frozen=True)
class Ask:
    """What both protocols boil down to. None: the server decides."""

    question: str
    n: int = 1
    max_new_tokens: int | None = None
    thinking_budget: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()
    adapter: str | None = None
    examples: Sequence[tuple[str, str]] = ()  # earlier turns
    system: str | None = None  # said after the format's own system prompt
    stream: bool = False


@dataclass
class Running:
    """An accepted request. Iterate it for the text as it comes; at the end it is finished."""

    id: str
    offered: Offered
    created: int  # seconds since 1970
    job: Job
    news: asyncio.Queue
    outcome: str = "cancelled"  # until it is finished, or has failed with a problem's code

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, str, str]]]:
        """The (row, reasoning, answer) text of each step.

        Raises:
            Problem: the request failed.
        """
        while (news := await self.news.get()) is not None:
            if isinstance(news, Problem):
                self.outcome = news.code
                raise news
            yield news
        self.outcome = "finished"

    async def finish(self) -> None:
        """Wait for the end."""
        async for _ in self:
            pass


class Service:
    """Admission to the engine. Lives in the event loop."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        catalog: Catalog,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self.engine, self.tokenizer, self.catalog = engine, tokenizer, catalog
        self.limits, self.metrics = limits, metrics
        self.public_url: str | None = None
        self._running: dict[str, Running] = {}
        # One: the tokenizer encodes one text at a time, and every thread keeps memory of its own.
        self._renderer = ThreadPoolExecutor(1, "render")

    def not_ready(self) -> Problem | None:
        """What keeps new requests out now."""
        if self.engine.state == "loading":
            return Problem(503, "loading", "the model is still being loaded", retry_after=5)
        if self.engine.state == "draining":
            return Problem(503, "draining", "the server is shutting down", retry_after=10)
        if not self.engine.alive:
            return Problem(503, "engine_down", "the engine does not answer", retry_after=10)
        return None

    async def accept(self, ask: Ask) -> Running:
        """Check a request against the limits and hand it to the engine.

        Raises:
            Problem: it asks for too much, or there is no room, or the engine is not ready.
        """
        self._admit(0)
        offered = self._offered(ask.adapter)
        new_tokens = ask.max_new_tokens or self.limits.new_tokens
        if any(tag in stop for stop in ask.stop for tag in offered.format.answer_tags):
            detail = "stop: the answer's own tags never stand in it, and so end nothing"
            raise Problem(422, "validation", detail, param="stop")
        if new_tokens > self.limits.new_tokens:
            raise _too_much("max_new_tokens", new_tokens, self.limits.new_tokens)
        rendering = partial(self._render, ask, offered)
        prompt = await asyncio.get_running_loop().run_in_executor(self._renderer, rendering)
        if len(prompt) > self.limits.prompt_tokens:
            raise _too_much("prompt", len(prompt), self.limits.prompt_tokens, "tokens")
        self._admit(len(prompt) + ask.n * new_tokens)  # again: time has passed
        several = TEMPERATURE_OF_SEVERAL if ask.n > 1 else 0.0
        temperature = several if ask.temperature is None else ask.temperature
        if ask.n > 1 and temperature == 0:
            raise Problem(422, "validation", "n above 1 needs a temperature above 0", param="n")
        queue, loop = asyncio.Queue(), asyncio.get_running_loop()

        def notify(news: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, news)

        new_thinking = partial(
            Thinking,
            self.tokenizer,
            offered.format,
            self.engine.stop_ids,
            n=ask.n,
            max_new_tokens=new_tokens,
            budget=ask.thinking_budget,
            stop=ask.stop,
        )
        job = Job(
            replica=offered.name,
            prompt=prompt,
            params=SamplingParams(new_tokens, temperature, ask.top_p),
            seed=prompt_seed(ask.seed),
            new_thinking=new_thinking,
            notify=notify,
            n=ask.n,
            streamed=ask.stream,
        )
        running = Running(f"rsn_{secrets.token_hex(12)}", offered, int(time.time()), job, queue)
        self.engine.submit(job)
        self._running[running.id] = running
        return running

    def release(self, running: Running) -> None:
        """Whoever listened has left: what is not finished is cancelled."""
        if self._running.pop(running.id, None) is not None and running.job.left:
            self.engine.cancel(running.job)

    def answer_now(self, id: str) -> None:
        """Close the reasoning of a running request at its next token."""
        running = self._running.get(id)
        if running is None:
            raise Problem(404, "not_found", "no such request is running")
        running.job.thinking.answer_now = True

    def fail_all(self, problem: Problem) -> None:
        """Give every listener this end (the engine hangs, or time to drain is over)."""
        for running in self._running.values():
            running.news.put_nowait(problem)

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let what runs finish, and end what has not by then."""
        self.engine.drain()
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.fail_all(Problem(503, "draining", "the server is shutting down", retry_after=10))

    @property
    def requests(self) -> int:
        return len(self._running)

    @property
    def tokens(self) -> int:
        return sum(running.job.tokens for running in self._running.values())

    def _admit(self, tokens: int) -> None:
        if problem := self.not_ready():
            raise problem
        if tokens > self.limits.tokens:
            raise _too_much("n", tokens, self.limits.tokens, "tokens in all")
        full = self.requests >= self.limits.requests
        if full or self.tokens + tokens > self.limits.tokens:
            self.metrics.rejected.labels("queue_full").inc()
            raise Problem(503, "queue_full", "the queue is full", retry_after=self._wait_estimate())

    def _wait_estimate(self) -> int:
        """Seconds until about a quarter of what is queued is done, from the rate so far."""
        rate = self.engine.tokens_per_second
        return min(60, max(1, math.ceil(self.tokens / 4 / rate))) if rate else 5

    def _offered(self, name: str | None) -> Offered:
        offered = self.catalog.offered.get(name or self.catalog.default)
        if offered is None:
            raise Problem(
                404,
                "adapter_not_found",
                "no adapter of this name; /phase1/info lists them",
                param="adapter",
            )
        return offered

    def _render(self, ask: Ask, offered: Offered) -> list[int]:
        system = f"{offered.format.system_prompt}\n{ask.system}" if ask.system else None
        shown = {"examples": ask.examples, "system_prompt": system}
        return render_prompt(self.tokenizer, ask.question, offered.format, **shown)


def _too_much(name: str, got: int, limit: int, unit: str = "") -> Problem:
    unit = f" {unit}" if unit else ""
    return Problem(422, "validation", f"{name}: {got}{unit}, the limit is {limit}", param=name)
