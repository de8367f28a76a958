"""Check requests of both protocols, submit them to the engine, and release them at the end."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from rlm.cli import UsageError
from rlm.data import (
    NEAREST,
    ChatTemplateError,
    Experience,
    Format,
    apply_experiences,
    render_prompt,
)
from rlm.reasoner import (
    TEMPERATURE_OF_SEVERAL,
    GrammarCompiler,
    GrammarMatcher,
    ReasoningStream,
    StructuredOutputs,
)
from rlm.runs import data_id
from rlm.sampling import SamplingParams, ToolTokens, prompt_seed
from rlm.serving.engine import Engine, Limits, RunningRequest
from rlm.serving.errors import HTTPProblem
from rlm.serving.logging import log_error
from rlm.serving.metrics import Metrics
from rlm.serving.models import ServedAdapter, ServedModels
from rlm.serving.schema import JSONSchemaFormat, ReasoningRequest, TextFormat

T = TypeVar("T")
PREPARE_SECONDS = 10.0  # maximum time to compile a grammar or to render a prompt
MAX_ABANDONED = 2  # maximum number of abandoned calls that still run, for each `_Preparation`


class Service:
    """Admits requests to the engine and tracks the running ones. Runs in the event loop."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        models: ServedModels,
        limits: Limits,
        experiences: Sequence[Experience] = (),
        nearest: int = NEAREST,
    ) -> None:
        """
        Args:
            experiences: lessons from earlier problems. The lessons most similar to a question are
                added to its prompt.
            nearest: the maximum number of lessons in a prompt.
        """
        self.engine, self.tokenizer, self.models = engine, tokenizer, models
        self.limits, self.metrics = limits, Metrics(engine)
        self.experiences, self._nearest = experiences, nearest
        self.experiences_id = None
        if experiences:
            self.experiences_id = data_id("lessons", [asdict(lesson) for lesson in experiences])
        self.public_url: str | None = None
        self.draining = False  # if True, new requests are rejected, and accepted ones continue
        self._running: dict[str, RunningRequest] = {}
        # The tokens of each accepted, unfinished request. This includes requests in preparation.
        self._reserved: dict[str, int] = {}
        # A future for each request in preparation. An HTTPProblem as its result ends the request.
        self._preparing: set[asyncio.Future[HTTPProblem]] = set()
        # A slow schema must not hold up the requests without a schema.
        self._compiling, self._rendering = _Preparation(), _Preparation()

    def not_ready(self) -> HTTPProblem | None:
        """Return the reason why new requests are rejected now, or None if they are accepted."""
        if self.draining:
            return HTTPProblem(503, "draining", "the server is shutting down", retry_after=10)
        return self.engine_problem()

    def engine_problem(self) -> HTTPProblem | None:
        """Return the reason why the engine serves no requests now, or None."""
        if self.engine.state == "loading":
            return HTTPProblem(503, "loading", "the model is still being loaded", retry_after=5)
        if not self.engine.alive:
            return HTTPProblem(503, "engine_down", "the engine does not answer", retry_after=10)
        return None

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        sampler = self.engine.sampler
        return GrammarCompiler(self.tokenizer, sampler.stop_ids, sampler.vocab_size)

    async def accept(
        self,
        asked: ReasoningRequest,
        api: str,
        turns: Sequence[tuple[str, str, str]] = (),
        system: str = "",
    ) -> RunningRequest:
        """Check a request against the limits and submit it to the engine.

        Args:
            api: name of the protocol, for the metrics.
            turns: earlier turns of the conversation, as (question, reasoning, answer).
            system: text to append to the format's system prompt, unless the two are equal.

        Raises:
            HTTPProblem: the request exceeds a limit, the queue is full, or the engine is not ready.
        """
        started = time.monotonic()
        deadline = started + self.limits.seconds
        adapter = self._adapter(asked.adapter)
        params = self._params(asked, adapter)
        format, structured = adapter.info.format, structured_outputs(asked)
        kind = structured.answer_type if structured else format.answer_type
        format = format.with_answer_type(asked.answer_type or kind)
        id, new_tokens = f"rsn_{secrets.token_hex(12)}", asked.n * params.max_new_tokens
        self._admit(id, new_tokens)
        try:
            preparing = self._prepare(asked, format, structured, turns, system, deadline)
            grammar, prompt, used = await self._unless_failed(preparing)
            self._admit(id, len(prompt) + new_tokens)
            running = RunningRequest(
                id=id,
                api=api,
                adapter=adapter,
                prompt=prompt,
                params=params,
                seed=prompt_seed(asked.seed),
                stream=ReasoningStream(
                    self.tokenizer,
                    format,
                    self.engine.sampler.stop_ids,
                    n=asked.n,
                    max_new_tokens=params.max_new_tokens,
                    budget=asked.thinking_budget,
                    stop=asked.stop,
                    tool_tokens=ToolTokens(adapter.tool, self.tokenizer) if adapter.tool else None,
                    grammar=grammar,
                ),
                started=started,
                deadline=deadline,
                experiences=used,
            )
        except BaseException as error:
            del self._reserved[id]
            self.metrics.count_unprepared(api, error)
            raise
        self.engine.add_request(running)
        self._running[id] = running
        return running

    def release(self, running: RunningRequest) -> None:
        """Count a request whose response has ended; abort the request if it is unfinished."""
        del self._running[running.id], self._reserved[running.id]
        if running.unfinished:
            self.engine.abort(running)
        self.metrics.count(running)

    def answer_now(self, id: str) -> None:
        """End the reasoning of a running request at its next token, so that the answer follows."""
        running = self._running.get(id)
        if running is None:
            raise HTTPProblem(404, "not_found", "no request with this id is running")
        running.stream.answer_now = True

    def fail_all(self, problem: HTTPProblem) -> None:
        """End every accepted request with `problem`, including requests in preparation.

        This is used when the engine hangs or is dead, and when the time limit for draining has
        passed.
        """
        for failed in self._preparing:
            if not failed.done():
                failed.set_result(problem)
        for running in self._running.values():
            running.put(problem)

    async def drain(self, seconds: float) -> None:
        """Reject new requests, wait for the accepted requests, and fail those that are too slow.

        Args:
            seconds: time limit for the accepted requests.
        """
        self.draining = True
        deadline = time.monotonic() + seconds
        while self._reserved and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.fail_all(HTTPProblem(503, "draining", "the server is shutting down", retry_after=10))

    @property
    def requests(self) -> int:
        """The number of accepted, unfinished requests."""
        return len(self._reserved)

    @property
    def tokens(self) -> int:
        """The maximum number of tokens that all accepted, unfinished requests can occupy."""
        return sum(self._reserved.values())

    @property
    def has_threads(self) -> bool:
        """Whether a thread still loads the model, runs a step or prepares an abandoned request."""
        abandoned = self._compiling.abandoned(), self._rendering.abandoned()
        return self.engine.has_thread or any(abandoned)

    def _admit(self, id: str, tokens: int) -> None:
        """Reserve a queue place and tokens for a request, or change the number of its tokens.

        A request that already has a place continues while the server drains.
        """
        accepted = id in self._reserved
        if problem := self.engine_problem() if accepted else self.not_ready():
            raise problem
        if tokens > self.limits.tokens:
            raise _too_much("max_new_tokens", tokens, self.limits.tokens, "tokens in total")
        others = [reserved for other, reserved in self._reserved.items() if other != id]
        full = len(others) >= self.limits.requests
        if full or sum(others) + tokens > self.limits.tokens:
            self.metrics.rejected.labels("queue_full").inc()
            raise HTTPProblem(503, "queue_full", "the queue is full", retry_after=5)
        self._reserved[id] = tokens

    def _adapter(self, name: str | None) -> ServedAdapter:
        adapter = self.models.adapters.get(name or self.models.default)
        if adapter is None:
            detail = "no adapter has this name; see /phase1/info"
            raise HTTPProblem(404, "adapter_not_found", detail, param="adapter")
        return adapter

    def _params(self, asked: ReasoningRequest, adapter: ServedAdapter) -> SamplingParams:
        new_tokens = asked.max_new_tokens or self.limits.new_tokens
        if any(tag in stop for stop in asked.stop for tag in adapter.info.format.answer_tags):
            raise _invalid("stop", "stop: an answer tag cannot be a stop string; leave it out")
        if new_tokens > self.limits.new_tokens:
            raise _too_much("max_new_tokens", new_tokens, self.limits.new_tokens)
        if (most := self.limits.request_tokens) and asked.n * new_tokens > most:
            fits = f"at most {most // asked.n} with n = {asked.n}"
            detail = f"max_new_tokens: a request may generate {most} tokens in total, so {fits}"
            raise _invalid("max_new_tokens", detail)
        default = TEMPERATURE_OF_SEVERAL if asked.n > 1 else 0.0
        temperature = default if asked.temperature is None else asked.temperature
        if asked.n > 1 and temperature == 0:
            raise _invalid("n", "n above 1 requires a temperature above 0")
        return SamplingParams(new_tokens, temperature, asked.top_p)

    async def _unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the preparation of a request, unless `fail_all` ends the request first."""
        failed = asyncio.get_running_loop().create_future()
        self._preparing.add(failed)
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, failed), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise failed.result()
            return task.result()
        finally:
            task.cancel()
            self._preparing.remove(failed)

    async def _prepare(
        self,
        asked: ReasoningRequest,
        format: Format,
        structured: StructuredOutputs | None,
        turns: Sequence[tuple[str, str, str]],
        system: str,
        deadline: float,
    ) -> tuple[GrammarMatcher | None, list[int], tuple[str, ...]]:
        """Compile the constraint on the answer, if any, and render the prompt.

        The most similar lessons are added to the prompt, as many as fit.

        Args:
            deadline: the request's deadline, on the clock of `time.monotonic`.

        Returns:
            the grammar, the token ids of the prompt, and the ids of the lessons in the prompt.
        """
        grammar = None
        if structured:
            field = "structured_outputs" if asked.structured_outputs else "response_format"
            compile = partial(self._grammars.compile, structured, format)
            grammar = await self._compiling.run(compile, field, deadline)
        is_new = system.strip() not in ("", format.system_prompt.strip())
        system_prompt = f"{format.system_prompt}\n{system}" if is_new else None

        def render(question: str, examples: Sequence[tuple[str, str]]) -> list[int]:
            # Add missing tags to earlier replies: without them, the model often does not reason.
            tag, _ = format.answer_tags
            earlier = [
                (user, answer if tag in answer else format.completion(reasoning, answer))
                for user, reasoning, answer in turns
            ]
            options = {"examples": [*examples, *earlier], "system_prompt": system_prompt}
            return render_prompt(self.tokenizer, question, format, **options)

        for most in range(self._nearest if self.experiences else 0, -1, -1):
            informed = apply_experiences(asked.prompt, self.experiences, most)
            call = partial(render, informed.question, informed.examples)
            prompt = await self._rendering.run(call, "prompt", deadline)
            if len(prompt) <= self.limits.prompt_tokens:
                return grammar, prompt, informed.used
        raise _too_much("prompt", len(prompt), self.limits.prompt_tokens, "tokens")


class _Preparation:
    """Runs calls that prepare requests, one at a time, each in a thread.

    A call that takes longer than PREPARE_SECONDS is abandoned, so that it does not block the calls
    of other requests. Python cannot stop its thread, so the number of such threads is limited.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._abandoned: list[Future[Any]] = []

    async def run(self, call: Callable[[], T], field: str, deadline: float) -> T:
        """Run a call and return its result.

        Args:
            field: the field of the request that the call reads.
            deadline: the request's deadline, on the clock of `time.monotonic`.

        Raises:
            HTTPProblem: 422 if the call raises a UsageError, 500 if the server's chat template is
                the cause, 503 if too many abandoned calls still run, 504 if its time has passed.
        """
        try:
            async with asyncio.timeout(deadline - time.monotonic()), self._turn:
                if len(self.abandoned()) >= MAX_ABANDONED:
                    detail = f"{field}: the server still works on earlier requests; try again later"
                    raise HTTPProblem(503, "busy", detail, param=field, retry_after=10)
                done = _in_thread(call)
                waiting = asyncio.wrap_future(done)
                try:
                    async with asyncio.timeout(PREPARE_SECONDS):
                        await asyncio.wait((waiting,))  # does not raise the errors of the call
                finally:
                    if waiting.cancel():  # False if the call has ended
                        self._abandoned.append(done)
        except TimeoutError:
            late = f"{field}: the server could not prepare the request in time"
            raise HTTPProblem(504, "deadline", late, param=field) from None
        try:
            return waiting.result()
        except ChatTemplateError as error:
            log_error("chat_template_failed", error)
            detail = "the chat template of the server's model cannot represent these messages"
            raise HTTPProblem(500, "internal", detail) from None
        except UsageError as error:
            raise _invalid(field, str(error)) from None

    def abandoned(self) -> list[Future[Any]]:
        """Return the abandoned calls that still run."""
        self._abandoned = [call for call in self._abandoned if not call.done()]
        return self._abandoned


def _in_thread(call: Callable[[], T]) -> Future[T]:
    """Run a call in a daemon thread, which does not keep the process alive."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # prevents cancellation: an abandoned call sets its result

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # raised again where the result is awaited
            done.set_exception(error)

    threading.Thread(target=run, name="prepare", daemon=True).start()
    return done


def structured_outputs(asked: ReasoningRequest) -> StructuredOutputs | None:
    """Return the constraint on the answer, or None if the answer is free text.

    The constraint is given by `response_format` or by `structured_outputs`.
    """
    by_format, by_name = asked.response_format, asked.structured_outputs
    if isinstance(by_format, TextFormat):
        by_format = None
    if by_format is None and by_name is None:
        return None
    if by_format and by_name:
        raise _invalid("response_format", "send response_format or structured_outputs, not both")
    if asked.stop:
        raise _invalid("stop", "stop: a structured answer ends by itself, so leave stop out")
    try:
        if isinstance(by_format, JSONSchemaFormat):
            return StructuredOutputs(json=by_format.json_schema.json_schema)
        if by_name is None:
            return StructuredOutputs(json_object=True)
        return StructuredOutputs(**by_name.model_dump(by_alias=True))
    except UsageError as error:
        field = "response_format" if by_format else "structured_outputs"
        raise _invalid(field, str(error)) from None


def _too_much(name: str, got: int, limit: int, unit: str = "") -> HTTPProblem:
    unit = f" {unit}" if unit else ""
    return _invalid(name, f"{name}: {got}{unit}, the limit is {limit}")


def _invalid(field: str, detail: str) -> HTTPProblem:
    return HTTPProblem(422, "validation", detail, param=field)
