"""Schedules continuous batching: which requests are prefilled next and which sequences run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlm.sampling.params import Request, Token

if TYPE_CHECKING:
    import torch

# Prompts per prefill. More would save little: a few hundred tokens already saturate a CPU.
PREFILL_PROMPTS = 8


@dataclass
class RequestState:
    """A request that waits for its prefill (slot -1) or has a prompt slot of the cache."""

    id: int
    request: Request
    prefix_length: int  # tokens of the shared prefix, which is cached once; 0 if it differs
    slot: int = -1
    unfinished: int = 0  # sequences

    @property
    def cached_tokens(self) -> Sequence[int]:
        """The prompt after the prefix, except its last token, which each sequence reads first."""
        return self.request.prompt[self.prefix_length : -1]


@dataclass
class SequenceState:
    """One of a request's n completions while it is generated."""

    parent: RequestState
    index: int  # among the n
    ids: list[int] = field(default_factory=list)
    forced: deque[int] = field(default_factory=deque)  # tokens to take instead of drawn ones
    finished: bool = False

    @property
    def request(self) -> Request:
        return self.parent.request

    @property
    def last_token(self) -> int:
        """The next input of the model."""
        return (self.ids or self.request.prompt)[-1]

    def forced_instead_of(self, token: int) -> Sequence[int]:
        """The tokens that the request inserts instead of a drawn one, if any."""
        force_tokens = self.request.force_tokens
        if self.forced or not force_tokens:
            return ()
        return force_tokens(self.index, self.ids, token) or ()

    def allowed_tokens(self) -> torch.Tensor | None:
        """The tokens that may be drawn next, (V,) bool; None for all."""
        allowed = self.request.allowed_tokens
        return allowed(self.index, self.ids) if allowed and not self.forced else None

    def append(
        self, token: int, logprob: float, is_stopped: Callable[[SequenceState], bool]
    ) -> Token:
        """Append the next token, forced or drawn, and check whether it is the last."""
        forced = bool(self.forced)
        if forced:
            token, logprob = self.forced.popleft(), math.nan
        self.ids.append(token)
        stopped = is_stopped(self)
        self.finished = stopped or len(self.ids) == self.request.params.max_new_tokens
        reason = ("stop" if stopped else "length") if self.finished else None
        return Token(self.parent.id, self.index, token, logprob, reason, forced)


class Scheduler:
    """Moves requests from waiting (not prefilled) to ready (prefilled) to running.

    `running` is the batch: sequence i has row i of the cache.
    """

    def __init__(self, max_num_seqs: int, prompt_slots: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[RequestState] = deque()
        self.ready: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.free_slots = list(reversed(range(prompt_slots)))

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.ready or self.running)

    def abort(self, request_id: int) -> None:
        """Take a request out of waiting and ready, and mark its running sequences as finished."""
        self.waiting = deque(state for state in self.waiting if state.id != request_id)
        gone = [sequence for sequence in self.ready if sequence.parent.id == request_id]
        self.ready = deque(s for s in self.ready if s.parent.id != request_id)
        for sequence in gone:
            self._finish(sequence)
        for sequence in self.running:
            sequence.finished |= sequence.parent.id == request_id

    def fill_batch(self, prefill: Callable[[list[RequestState]], None]) -> None:
        """Let ready sequences run while rows are free; prefill more requests if none are ready."""
        while len(self.running) < self.max_num_seqs:
            if not self.ready:
                requests = self._next_to_prefill()
                if not requests:
                    return
                prefill(requests)
            self.running.append(self.ready.popleft())

    def _next_to_prefill(self) -> list[RequestState]:
        """Assign free slots to waiting requests of one prefix length, for one prefill."""
        chosen: list[RequestState] = []
        while (
            self.waiting
            and self.free_slots
            and len(chosen) < PREFILL_PROMPTS
            and (not chosen or self.waiting[0].prefix_length == chosen[0].prefix_length)
        ):
            state = self.waiting.popleft()
            state.slot, state.unfinished = self.free_slots.pop(), state.request.n
            chosen.append(state)
            self.ready.extend(SequenceState(state, i) for i in range(state.request.n))
        return chosen

    def free_finished(self, copy_row: Callable[[int, int, int], None]) -> None:
        """Remove finished sequences, and move the last sequences of the batch to their rows.

        Args:
            copy_row: called with the cache's (source row, target row, tokens) to copy.
        """
        row = 0
        while row < len(self.running):
            sequence = self.running[row]
            if not sequence.finished:
                row += 1
                continue
            self._finish(sequence)
            last = self.running.pop()
            if last is not sequence:
                self.running[row] = last
                if not last.finished:
                    copy_row(len(self.running), row, len(last.ids))

    def _finish(self, sequence: SequenceState) -> None:
        state = sequence.parent
        state.unfinished -= 1
        if state.unfinished == 0:
            self.free_slots.append(state.slot)
            self.free_slots.sort(reverse=True)  # low slots first, so matmuls read few


def common_prefix_length(prompts: Sequence[Sequence[int]]) -> int:
    """Count the tokens that all prompts begin with, at most all but the last of the shortest.

    >>> common_prefix_length([[1, 2, 3, 4], [1, 2, 5]]), common_prefix_length([[1, 2], [1, 2]])
    (2, 1)
    """
    if len(prompts) < 2:
        return 0  # nothing to share
    limit = min(len(prompt) for prompt in prompts) - 1
    first, last = min(prompts, key=list), max(prompts, key=list)  # the two that differ most
    return next((i for i in range(limit) if first[i] != last[i]), limit)
