"""One thread that owns the model: requests join its batch, their tokens come back as events.

Everything that touches the model happens in this thread; the event loop only hands requests over
and listens. A completion is a pure function of prompt, seed and weights, so after a failure every
request can be drawn again and goes on where it was: that is how one that breaks the batch is found
without harm to the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlm.sampling import CacheConfig, Sampler
from rlm.sampling.params import Request, SamplingParams, Token
from rlm.serving.errors import Problem
from rlm.serving.logging import log_error
from rlm.serving.thinking import Thinking

RESTARTS = 1  # of a thread that died; after that the engine stays dead
REPLAYS = 2  # of a request, because others broke the batch that it was in


@dataclass
class Replica:
    """One adapter (or the base without one), and the sampler that draws with it."""

    sampler: Sampler
    activate: Callable[[], None]  # let the shared model wear this adapter
    prefix: Sequence[int]  # the beginning that the prompts share


@dataclass
class Job:
    """A request on its way through the engine.

    notify: called in the engine's thread with the (row, reasoning, answer) text that a step
        brought; with None at the end; with a Problem if the job fails. Must not block.
    """

    replica: str
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    new_thinking: Callable[[], Thinking]
    notify: Callable[[list[tuple[int, str, str]] | Problem | None], None]
    n: int = 1
    streamed: bool = False  # what was notified cannot be taken back
    created: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    taken: int = 0  # tokens drawn, of all rows
    left: int = 0  # rows that have not finished
    replays: int = 0
    replay_until: int = 0  # tokens that had been drawn when a step failed

    def __post_init__(self) -> None:
        self.sent = [("", "")] * self.n  # the reasoning and answer that were notified
        self.begin_again()

    def begin_again(self) -> None:
        """Nothing is drawn; what was notified already is not notified again."""
        answer_now = self.replays > 0 and self.thinking.answer_now
        self.thinking = self.new_thinking()
        self.thinking.answer_now = answer_now
        self.replay_until, self.taken, self.left = self.taken, 0, self.n

    @property
    def tokens(self) -> int:
        """The most that it can take up."""
        return len(self.prompt) + self.n * self.params.max_new_tokens

    @property
    def on_probation(self) -> bool:
        """Whether it has yet to get past the token that was being drawn at a failure."""
        return self.replays > 0 and self.left > 0 and self.taken <= self.replay_until


class Engine:
    """Runs replicas in a thread of its own.

    `load` makes the replicas, in that thread. `state` is loading, ready, draining or dead.
    """

    def __init__(
        self,
        load: Callable[[], dict[str, Replica]],
        *,
        prompt_tokens: int,
        new_tokens: int,
        hang_seconds: float = 60.0,
    ) -> None:
        """
        Args:
            prompt_tokens, new_tokens: the longest prompt and completion there will be.
            hang_seconds: a step that takes longer counts as dead until it comes back.
        """
        self._load = load
        self._room = (prompt_tokens, new_tokens)
        self._hang_seconds = hang_seconds
        self._lanes: dict[str, Replica] = {}
        self._changed = threading.Condition()
        self._arrived: deque[Job] = deque()
        self._cancelled: deque[Job] = deque()
        self._running: dict[str, dict[int, Job]] = {}  # replica → handle → job
        self._suspects: dict[str, deque[Job]] = {}
        self._step_began: float | None = None
        self._draining = self._stopping = False
        self._deaths = 0
        self.state = "loading"
        self.error: Exception | None = None  # what it died of
        self.tokens_drawn = 0
        self._busy_seconds = 0.0
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)

    # --- from the event loop --------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._changed:
            if self.state not in ("ready", "draining"):
                raise Problem(503, "engine_down", "the engine is not running", retry_after=5)
            self._arrived.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Forget a job: its rows are free after the step that is running."""
        with self._changed:
            self._cancelled.append(job)
            self._changed.notify()

    def drain(self) -> None:
        """From now on not ready; what was submitted goes on."""
        with self._changed:
            self._draining = True  # also for a thread that is just starting again
            if self.state == "ready":
                self.state = "draining"

    def stop(self, seconds: float = 10.0) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether it steps, or would if there were work."""
        began = self._step_began
        hung = began is not None and time.monotonic() - began > self._hang_seconds
        return self.state in ("ready", "draining") and not hung

    @property
    def stop_ids(self) -> frozenset[int]:
        return next(iter(self._lanes.values())).sampler.stop_ids

    @property
    def tokens_per_second(self) -> float:
        """While there was work."""
        return self.tokens_drawn / self._busy_seconds if self._busy_seconds else 0.0

    @property
    def seats_taken(self) -> int:
        return sum(job.left for jobs in list(self._running.values()) for job in list(jobs.values()))

    # --- in the thread --------------------------------------------------------------------------

    def _live(self) -> None:
        """Load, then work; a death is survived once."""
        while True:
            try:
                self._open_lanes()
                self._work()
                return
            except Exception as error:
                self.error, self._deaths = error, self._deaths + 1
                loaded = bool(self._lanes)  # what could not be loaded will not load again
                again = loaded and self._deaths <= RESTARTS and not self._stopping
                log_error("engine_died", error, restart=again)
                self._step_began = None
                self.state = "loading" if again else "dead"
                self._fail_all(Problem(503, "engine_down", "the engine died", retry_after=5))
                if not again:
                    return

    def _open_lanes(self) -> None:
        if not self._lanes:
            self._lanes = self._load()
        for name in self._lanes:
            self._reset(name)
        with self._changed:
            if self.state == "loading":
                self.state = "draining" if self._draining else "ready"

    def _reset(self, name: str) -> None:
        """A replica without requests, with all the room that it will ever have."""
        replica = self._lanes[name]
        prompt_tokens, new_tokens = self._room
        replica.activate()
        replica.sampler.reset()
        max_num_seqs = replica.sampler.max_num_seqs
        replica.sampler.allocate_cache(
            CacheConfig(max_num_seqs, max_num_seqs, prompt_tokens, new_tokens), replica.prefix
        )
        self._running[name], self._suspects[name] = {}, deque()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._arrived or self._cancelled or self._busy()):
                    self._changed.wait()
                if self._stopping:
                    break
                arrived, self._arrived = self._arrived, deque()
                cancelled, self._cancelled = self._cancelled, deque()
            for job in arrived:
                # While a failure is being looked for, newcomers wait in line: nobody is to be
                # blamed for what one of them breaks.
                if self._suspects[job.replica] or self._on_probation(job.replica):
                    self._suspects[job.replica].append(job)
                else:
                    self._begin(job)
            for job in cancelled:
                self._forget(job)
            for name in self._lanes:
                if self._running[name] or self._suspects[name]:
                    self._step(name)
        self._fail_all(Problem(503, "draining", "the server is shutting down", retry_after=5))

    def _busy(self) -> bool:
        return any(self._running.values()) or any(self._suspects.values())

    def _on_probation(self, name: str) -> bool:
        return any(job.on_probation for job in self._running[name].values())

    def _begin(self, job: Job) -> None:
        request = Request(job.prompt, job.params, job.seed, job.n, job.thinking)
        try:
            handle = self._lanes[job.replica].sampler.add_request(request)
        except ValueError as error:  # larger than the room
            job.notify(Problem(422, "validation", str(error)))
        else:
            self._running[job.replica][handle] = job

    def _forget(self, job: Job) -> None:
        running, suspects = self._running[job.replica], self._suspects[job.replica]
        for handle in [handle for handle, other in running.items() if other is job]:
            self._lanes[job.replica].sampler.abort_request(handle)
            del running[handle]
        self._suspects[job.replica] = deque(other for other in suspects if other is not job)

    def _step(self, name: str) -> None:
        replica, running, suspects = self._lanes[name], self._running[name], self._suspects[name]
        if suspects and not self._on_probation(name):
            self._begin(suspects.popleft())
        self._step_began = time.monotonic()
        try:
            replica.activate()
            tokens = replica.sampler.step()
        except Exception as error:
            self._isolate(name, error)
            return
        finally:
            self._busy_seconds += time.monotonic() - self._step_began
            self._step_began = None
        self.tokens_drawn += len(tokens)
        news: dict[int, list[Token]] = {}
        for token in tokens:
            news.setdefault(token.request, []).append(token)
        for handle, new in news.items():
            job = running[handle]
            try:
                self._deliver(job, new)
            except Exception as error:  # its own text or budget: nobody else's business
                log_error("request_failed", error, replica=name)
                self._forget(job)
                job.notify(Problem(500, "internal", "this request could not be computed"))
            else:
                if job.left == 0:
                    del running[handle]
                    job.notify(None)

    def _deliver(self, job: Job, tokens: Sequence[Token]) -> None:
        job.first_token = job.first_token or time.monotonic()
        parts = []
        for token in tokens:
            job.thinking.take(token)
            job.taken += 1
            job.left -= token.finish_reason is not None
            row, sent = job.thinking.rows[token.row], job.sent[token.row]
            now = (row.reasoning, row.answer)
            if job.streamed and job.replays:  # from a smaller batch, whose roundings may differ
                ended = (bool(row.answer or token.finish_reason), bool(token.finish_reason))
                for old, text, end in zip(sent, now, ended, strict=True):
                    if not (text.startswith(old) or (old.startswith(text) and not end)):
                        raise RuntimeError("drawn again it is not the text that was sent")
            new = tuple(text[len(old) :] for text, old in zip(now, sent, strict=True))
            if any(new):
                parts.append((token.row, *new))
                job.sent[token.row] = now
        if parts:
            job.notify(parts)

    def _isolate(self, name: str, error: Exception) -> None:
        """A step failed. If one request must be to blame it fails; else each is tried alone.

        Requests drawn again join one at a time, the next when the last has got past the failure.
        Only one of them is new in a step, so only that one can have broken it.
        """
        running = self._running[name]
        jobs = list(running.values())
        blamed = jobs if len(jobs) == 1 else [job for job in jobs if job.on_probation]
        log_error("step_failed", error, replica=name, requests=len(jobs), blamed=len(blamed))
        if blamed and len(jobs) > 1:
            for job in blamed:
                self._forget(job)
        else:
            waiting = self._suspects[name]
            self._reset(name)
            again = [job for job in jobs if job not in blamed and job.replays < REPLAYS]
            blamed = [job for job in jobs if job not in again]
            for job in again:
                job.replays += 1
                job.begin_again()
            self._suspects[name] = deque([*again, *waiting])
        for job in blamed:
            job.notify(Problem(500, "internal", "this request could not be computed"))

    def _fail_all(self, problem: Problem) -> None:
        with self._changed:
            waiting, self._arrived = list(self._arrived), deque()
        for name, running in self._running.items():
            waiting += [*running.values(), *self._suspects[name]]
            running.clear()
            self._suspects[name].clear()
        for job in waiting:
            job.notify(problem)
