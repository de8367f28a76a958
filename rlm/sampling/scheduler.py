"""The scheduler of continuous batching: it selects which requests are prefilled and which run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlm.sampling.params import Request, Token

if TYPE_CHECKING:
    import torch

# Maximum number of prompts per prefill. More prompts would save little time, because a few hundred
# tokens already saturate a CPU.
PREFILL_PROMPTS = 8


@dataclass
class RequestState:
    """A request. Its slot is -1 until the scheduler assigns a prompt slot of the cache to it."""

    id: int
    request: Request
    prefix_length: int  # length of the shared prefix; 0 if the prompt lacks this prefix
    slot: int = -1
    unfinished: int = 0  # number of sequences that have not finished

    @property
    def cached_tokens(self) -> Sequence[int]:
        """The prompt without the prefix and without the last token.

        Each sequence of the request reads the last token as its first input.
        """
        return self.request.prompt[self.prefix_length : -1]


@dataclass
class SequenceState:
    """A completion that is being generated: one of the n completions of a request."""

    parent: RequestState
    index: int  # position among the n completions
    ids: list[int] = field(default_factory=list)
    # Tokens to append next, instead of drawn tokens.
    forced: deque[int] = field(default_factory=deque)
    finished: bool = False

    @property
    def request(self) -> Request:
        return self.parent.request

    @property
    def last_token(self) -> int:
        """The last token so far, which is the next input of the model."""
        return (self.ids or self.request.prompt)[-1]

    def forced_instead_of(self, token: int) -> Sequence[int]:
        """Return the tokens that the request inserts instead of the drawn token; empty for none."""
        force_tokens = self.request.force_tokens
        if self.forced or not force_tokens:
            return ()
        return force_tokens(self.index, self.ids, token) or ()

    def allowed_tokens(self) -> torch.Tensor | None:
        """Return a mask of the tokens that may be drawn next, (V,) bool; None if all may be."""
        allowed = self.request.allowed_tokens
        return allowed(self.index, self.ids) if allowed and not self.forced else None

    def append(
        self, token: int, logprob: float, is_stopped: Callable[[SequenceState], bool]
    ) -> Token:
        """Append the next token, forced or drawn, and check whether the completion has ended."""
        forced = bool(self.forced)
        if forced:
            token, logprob = self.forced.popleft(), math.nan
        self.ids.append(token)
        stopped = is_stopped(self)
        self.finished = stopped or len(self.ids) == self.request.params.max_new_tokens
        reason = ("stop" if stopped else "length") if self.finished else None
        return Token(self.parent.id, self.index, token, logprob, reason, forced)


class Scheduler:
    """Moves requests from `waiting` (not prefilled) to `ready` (prefilled) to `running`.

    `running` is the current batch: sequence i of this list uses row i of the cache.
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
        """Remove a request from `waiting` and `ready`, and mark its running sequences finished."""
        self.waiting = deque(state for state in self.waiting if state.id != request_id)
        gone = [sequence for sequence in self.ready if sequence.parent.id == request_id]
        self.ready = deque(s for s in self.ready if s.parent.id != request_id)
        for sequence in gone:
            self._finish(sequence)
        for sequence in self.running:
            sequence.finished |= sequence.parent.id == request_id

    def fill_batch(self, prefill: Callable[[list[RequestState]], None]) -> None:
        """Start ready sequences while rows are free; prefill more requests when none are ready."""
        while len(self.running) < self.max_num_seqs:
            if not self.ready:
                requests = self._next_to_prefill()
                if not requests:
                    return
                prefill(requests)
            self.running.append(self.ready.popleft())

    def _next_to_prefill(self) -> list[RequestState]:
        """Select waiting requests of equal prefix length for a prefill, and assign their slots."""
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
        """Remove finished sequences, and move the last sequences of the batch to the freed rows.

        Args:
            copy_row: a function that copies a cache row, called with (source row, target row,
                number of tokens).
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
            # Use low slots first, so that matmuls read few slots.
            self.free_slots.sort(reverse=True)


def common_prefix_length(prompts: Sequence[Sequence[int]]) -> int:
    """Return the length of the common prefix of all prompts.

    The prefix never contains the last token of a prompt.

    >>> common_prefix_length([[1, 2, 3, 4], [1, 2, 5]]), common_prefix_length([[1, 2], [1, 2]])
    (2, 1)
    """
    if len(prompts) < 2:
        return 0  # a single prompt shares no prefix
    limit = min(len(prompt) for prompt in prompts) - 1
    first, last = min(prompts, key=list), max(prompts, key=list)  # the two that differ the most
    return next((i for i in range(limit) if first[i] != last[i]), limit)
