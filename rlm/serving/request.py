"""A request from its admission to its end: what the engine draws for, and a client listens to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from rlm.reasoner import ReasoningStream
from rlm.sampling import SamplingParams
from rlm.serving.errors import HTTPProblem
from rlm.serving.models import ServedAdapter

PING_SECONDS = 15.0  # of silence; then a stream says that it is still there

# (completion, reasoning, answer) that a step added, and whether a tool wrote it
Text = tuple[int, str, str, bool]


@dataclass(frozen=True)
class Limits:
    """What one request and all together may ask for."""

    prompt_tokens: int
    new_tokens: int
    requests: int  # accepted and not finished
    tokens: int  # which these may take up at most
    seconds: float  # from acceptance to the last token
    request_tokens: int | None = None  # that one request may draw; None: n times new_tokens


@dataclass(eq=False)
class RunningRequest:
    """An accepted request. Iterate it for its text as it comes; at the end it is finished."""

    id: str
    api: str  # phase1 | openai
    adapter: ServedAdapter
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    stream: ReasoningStream
    timeout: float  # seconds until its deadline
    experiences: Sequence[str] = ()  # ids of the lessons in its prompt
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    error: Exception | None = None  # of its own text handling
    outcome: str = "cancelled"  # until it is finished, or has failed with a problem's code

    def __post_init__(self) -> None:
        self._loop, self._outputs = asyncio.get_running_loop(), asyncio.Queue()

    @property
    def n(self) -> int:
        return len(self.stream.completions)

    @property
    def unfinished(self) -> int:
        """Completions that have not ended."""
        return sum(c.finish_reason is None for c in self.stream.completions)

    @property
    def tokens(self) -> int:
        """The most that it can take up."""
        return len(self.prompt) + self.n * self.params.max_new_tokens

    def force_tokens(self, row: int, ids: Sequence[int], token: int) -> Sequence[int] | None:
        """Ask thinking budget and tool, for the sampler. An error in it is this request's alone."""
        try:
            return self.stream(row, ids, token)
        except Exception as error:  # kept: the engine ends the request with it
            self.error = error
            return None

    def put(self, output: list[Text] | HTTPProblem | None) -> None:
        """Hand over new text, a failure, or the end (None). Safe in any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)

    async def __aiter__(self) -> AsyncIterator[list[Text]]:
        """The text of each step; an empty list after PING_SECONDS without any.

        Raises:
            HTTPProblem: the request failed, or its time is over.
        """
        deadline = self.started + self.timeout
        while True:
            wait = min(PING_SECONDS, deadline - time.monotonic())
            try:
                async with asyncio.timeout(wait):
                    output = await self._outputs.get()
            except TimeoutError:
                output = []
                if time.monotonic() >= deadline:
                    late = f"not finished within {self.timeout:g} seconds"
                    output = HTTPProblem(504, "deadline", late)
            if output is None:
                self.outcome = "finished"
                return
            if isinstance(output, HTTPProblem):
                self.outcome = output.code
                raise output
            yield output

    async def wait(self) -> None:
        """Wait for the end."""
        async for _ in self:
            pass
