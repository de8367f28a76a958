"""The engine thread, which generates text for all requests, with one batch per adapter.

Only this thread runs the model. The event loop submits requests and receives their text.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rlm.cli import UsageError
from rlm.model import check_context_window
from rlm.reasoner import ReasoningStream
from rlm.sampling import CacheConfig, Request, Sampler, SamplingParams, Token
from rlm.serving.errors import HTTPProblem
from rlm.serving.logging import log_error
from rlm.serving.models import AdapterSampler, ServedAdapter

T = TypeVar("T")
PING_SECONDS = 15.0  # seconds without text after which a stream sends a comment
HANG_SECONDS = 60.0  # maximum duration of a step; after it, the engine is not `alive`

# Index of a completion, new reasoning text, new answer text, whether a tool wrote the text.
Text = tuple[int, str, str, bool]


@dataclass(frozen=True)
class Limits:
    """Limits of one request and of all requests together."""

    prompt_tokens: int
    new_tokens: int
    requests: int  # maximum number of accepted, unfinished requests
    tokens: int  # maximum number of tokens of all accepted, unfinished requests
    seconds: float  # seconds from acceptance to the last token
    request_tokens: int | None = None  # maximum number of new tokens of all samples of a request


@dataclass(eq=False)
class RunningRequest:
    """An accepted request. Iterating over the request yields its text as it is generated."""

    id: str
    api: str  # phase1 | openai
    adapter: ServedAdapter
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    stream: ReasoningStream
    experiences: Sequence[str]  # ids of the lessons in the prompt
    # The following times are on the clock of `time.monotonic`.
    started: float  # time of acceptance
    deadline: float
    first_token: float | None = None  # time of the first token
    last_token: float | None = None  # time of the last token so far
    error: Exception | None = None  # raised by a function that `guard` wrapped
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time
    outcome: str = "cancelled"  # becomes "finished" or the code of an HTTPProblem

    def __post_init__(self) -> None:
        self._loop, self._outputs = asyncio.get_running_loop(), asyncio.Queue()

    @property
    def n(self) -> int:
        return len(self.stream.completions)

    @property
    def first_token_seconds(self) -> float:
        """Seconds from acceptance to the first token, which must have arrived."""
        assert self.first_token is not None
        return self.first_token - self.started

    @property
    def seconds(self) -> float:
        """Seconds from acceptance to the last token so far. The client may still be downloading."""
        assert self.last_token is not None
        return self.last_token - self.started

    @property
    def unfinished(self) -> int:
        """The number of unfinished completions."""
        return sum(c.finish_reason is None for c in self.stream.completions)

    def guard(self, call: Callable[..., T]) -> Callable[..., T | None]:
        """Wrap a function that the sampler calls, so that its error fails only this request.

        The error is stored in `self.error`.
        """

        def guarded(*arguments: Any) -> T | None:
            try:
                return call(*arguments)
            except Exception as error:  # the engine ends the request with it
                self.error = error
                return None

        return guarded

    def put(self, output: list[Text] | HTTPProblem | None) -> None:
        """Pass new text, an error, or the end (None) to the event loop. Thread-safe."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)

    async def __aiter__(self) -> AsyncIterator[list[Text]]:
        """Yield the new text of each step, and an empty list after PING_SECONDS without text.

        Raises:
            HTTPProblem: the request failed or its deadline passed.
        """
        while True:
            wait = min(PING_SECONDS, self.deadline - time.monotonic())
            try:
                async with asyncio.timeout(wait):
                    output = await self._outputs.get()
            except TimeoutError:
                output = []
                if time.monotonic() >= self.deadline:
                    seconds = self.deadline - self.started
                    late = f"the request was not finished within {seconds:g} seconds"
                    output = HTTPProblem(504, "deadline", late)
            if output is None:
                self.outcome = "finished"
                return
            if isinstance(output, HTTPProblem):
                self.outcome = output.code
                raise output
            yield output

    async def wait(self) -> None:
        """Wait for the request to finish."""
        async for _ in self:
            pass


class Engine:
    """Runs the samplers of all adapters in a thread of its own.

    Attributes:
        state: "loading", "ready" or "dead".
    """

    def __init__(self, load: Callable[[], dict[str, AdapterSampler]], limits: Limits) -> None:
        """
        Args:
            load: a function that loads the samplers; it is called in the engine thread.
        """
        self._load, self._limits = load, limits
        self._samplers: dict[str, AdapterSampler] = {}
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: stop
        self._running: dict[str, dict[int, RunningRequest]] = {}  # by adapter and handle
        self._step_began: float | None = None
        self.state = "loading"
        self.load_error: Exception | None = None
        self.tokens_drawn = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- from the event loop --------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def add_request(self, request: RunningRequest) -> None:
        self._commands.put(partial(self._add, request))

    def abort(self, request: RunningRequest) -> None:
        """Abort a request; its rows are freed after the current step."""
        self._commands.put(partial(self._remove, request))

    def stop(self) -> None:
        self._commands.put(None)
        self._thread.join(10.0)  # a step may hang

    @property
    def alive(self) -> bool:
        """Whether the engine is ready and its current step, if any, does not hang."""
        began = self._step_began
        hung = began is not None and time.monotonic() - began > HANG_SECONDS
        return self.state == "ready" and not hung

    @property
    def has_thread(self) -> bool:
        """Whether the thread still runs, for example because `stop` timed out."""
        return self._thread.is_alive()

    @property
    def sampler(self) -> Sampler:
        """Any of the samplers: all share the tokenizer, the model and the end tokens."""
        return next(iter(self._samplers.values())).sampler

    @property
    def rows_running(self) -> int:
        """The number of completions that are in the batch or wait for it."""
        running = [list(requests.values()) for requests in list(self._running.values())]
        return sum(request.unfinished for requests in running for request in requests)

    # --- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        """Load the samplers, then run steps until the engine is stopped.

        An error outside a step ends the engine. The application watches the engine and fails the
        requests that wait for a dead engine.
        """
        try:
            self._samplers = self._load()
            for name in self._samplers:
                self._reset(name)
            self.state = "ready"
            self._loop()
        except Exception as error:
            log_error("engine_died", error)
            if self.state == "loading":
                self.load_error = error
            self.state = "dead"

    def _reset(self, name: str) -> None:
        """Remove all requests of an adapter, and allocate the full KV cache of its sampler."""
        served = self._samplers[name]
        served.activate()
        served.sampler.reset()
        rows, limits = served.sampler.max_num_seqs, self._limits
        check_context_window(served.sampler.model, limits.prompt_tokens + limits.new_tokens)
        config = CacheConfig(rows, rows, limits.prompt_tokens, limits.new_tokens)
        served.sampler.allocate_cache(config, served.prefix)
        self._running[name] = {}

    def _loop(self) -> None:
        while True:
            with suppress(Empty):  # raised if there are sequences to generate and no commands
                while command := self._commands.get(block=not any(self._running.values())):
                    command()
                return
            for name, running in self._running.items():
                if running:
                    self._step(name)

    def _add(self, request: RunningRequest) -> None:
        name, stream = request.adapter.name, request.stream
        force, allow = request.guard(stream), request.guard(stream.allowed_tokens)
        drawn = Request(request.prompt, request.params, request.seed, request.n, force, allow)
        try:
            handle = self._samplers[name].sampler.add_request(drawn)
        except ValueError as error:  # the request is larger than the KV cache
            request.put(HTTPProblem(422, "validation", str(error)))
        else:
            self._running[name][handle] = request

    def _remove(self, request: RunningRequest) -> None:
        name = request.adapter.name
        for handle in [h for h, other in self._running[name].items() if other is request]:
            self._samplers[name].sampler.abort_request(handle)
            del self._running[name][handle]

    def _step(self, name: str) -> None:
        served, running = self._samplers[name], self._running[name]
        self._step_began = time.monotonic()
        try:
            served.activate()
            tokens = served.sampler.step()
        except Exception as error:
            log_error("step_failed", error, adapter=name, requests=len(running))
            self._reset(name)
            _fail_batch(list(running.values()))
            return
        finally:
            self._step_began = None
        self.tokens_drawn += len(tokens)
        by_request: dict[int, list[Token]] = {}
        for token in tokens:
            by_request.setdefault(token.request, []).append(token)
        for handle, new in by_request.items():
            request = running[handle]
            try:
                _deliver(request, new)
            except UsageError as error:  # the grammar is too complex
                self._remove(request)
                request.put(HTTPProblem(422, "validation", str(error)))
            except Exception as error:  # only this request fails
                log_error("request_failed", error, adapter=name)
                self._remove(request)
                request.put(_not_computed())
            else:
                if not request.unfinished:
                    del running[handle]
                    request.put(None)


def _deliver(request: RunningRequest, tokens: Sequence[Token]) -> None:
    """Parse a request's tokens of a step and pass their text to the event loop."""
    if request.error is not None:
        raise request.error
    request.last_token = time.monotonic()
    request.first_token = request.first_token or request.last_token
    completions = request.stream.completions
    texts = [
        (token.row, *request.stream.add_token(token), completions[token.row].by_tool)
        for token in tokens
    ]
    if texts := [text for text in texts if text[1] or text[2]]:
        request.put(texts)


def _fail_batch(requests: Sequence[RunningRequest]) -> None:
    """Fail the requests of a failed step.

    A single request gets a 500. Several requests get a 503, so that their clients retry: probably
    only one of the requests caused the failure.
    """
    again = HTTPProblem(
        503, "engine_down", "a step of the batch failed: send the request again", retry_after=1
    )
    for request in requests:
        request.put(again if len(requests) > 1 else _not_computed())


def _not_computed() -> HTTPProblem:
    return HTTPProblem(500, "internal", "this request could not be computed")
