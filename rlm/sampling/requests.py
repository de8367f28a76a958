"""Requests, sampling parameters, completions, and the scheduler of continuous batching.

`ToolTokens` inserts the output of a tool into completions; it is passed as `Request.force_tokens`.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal

from rlm.data import encode_inserted_text
from rlm.tools import Tool

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

# Maximum number of prompts per prefill. More prompts would save little time, because a few hundred
# tokens already saturate a CPU.
PREFILL_PROMPTS = 8


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. The model's own defaults (such as top_k = 50) have no effect.

    max_new_tokens: the maximum number of new tokens, including the end token.
    temperature: with 0, the most likely token is always chosen.
    top_p: keeps the most likely tokens up to this total probability; 1 keeps all tokens.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")


# A function that is called after each sampled token with (row, tokens before it, the token). It
# returns None to keep the token, or token ids that replace it. The sequence then takes one of these
# ids per step instead of a sampled token.
ForceTokens = Callable[[int, Sequence[int], int], Sequence[int] | None]
# A function that is called before each token is sampled with (row, tokens before it). It returns a
# mask of the tokens that may be sampled, (V,) bool with at least one True, or None if all may be.
AllowedTokens = Callable[[int, Sequence[int]], "torch.Tensor | None"]


@dataclass(frozen=True)
class Request:
    """A request for n completions of one prompt.

    Completion i is sampled from the random stream seed + i.
    """

    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    n: int = 1
    force_tokens: ForceTokens | None = None
    allowed_tokens: AllowedTokens | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("the prompt is empty")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, not {self.n}")


FinishReason = Literal["stop", "length"]  # "stop": an end token was sampled


@dataclass(frozen=True)
class Token:
    """One token of completion number `row` of a request. A forced token has the logprob NaN."""

    request: int
    row: int
    id: int
    logprob: float
    finish_reason: FinishReason | None  # None while the completion is running
    forced: bool = False  # inserted by the request's `force_tokens`, not sampled


@dataclass
class Completion:
    """A completion of a prompt.

    token_ids: the token ids, including the end token if the completion has one.
    logprobs: the log-probability of each token under the distribution that the token was sampled
        from, in which only the `allowed_tokens` have a probability above 0. At temperature 0, it is
        the log-probability at temperature 1. A token that was not sampled has the value NaN.
    tool_mask: for each token, True if the model wrote it and False if a tool wrote it, as in TRL.
        The list is empty if there is no tool.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None = None
    tool_mask: list[bool] = field(default_factory=list)

    @property
    def truncated(self) -> bool:
        """Whether the completion was cut off at its maximum length.

        A completion of the maximum length is not truncated if its last token is an end token.
        """
        return self.finish_reason == "length"

    def text(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Decode the completion without special tokens and without its end token.

        Some tokenizers, such as that of Yi-6B-Chat, do not mark the end token as special.
        """
        ids = self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    @property
    def own_tokens(self) -> int:
        """The number of tokens that the model itself wrote."""
        return sum(self.tool_mask) if self.tool_mask else len(self.token_ids)

    @property
    def tool_calls(self) -> list[tuple[int, int]]:
        """The spans of tokens that a tool wrote, as (start, end) pairs.

        >>> Completion([5] * 5, [], tool_mask=[False, True, True, False, False]).tool_calls
        [(0, 1), (3, 5)]
        """
        mask = [True, *self.tool_mask, True]
        firsts = [i for i in range(len(mask) - 1) if mask[i] and not mask[i + 1]]
        ends = [i for i in range(len(mask) - 1) if not mask[i] and mask[i + 1]]
        return list(zip(firsts, ends, strict=True))


def prompt_seed(*parts: object) -> int:
    """Hash parts such as (run seed, step, problem id) to a 63-bit seed, equal in every process.

    >>> prompt_seed(0, 1, "a") == prompt_seed(0, 1, "a") != prompt_seed(0, 11, "")
    True
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# The tool reads only the last TOOL_WINDOW tokens, so that its cost per token does not grow with the
# length of the completion.
TOOL_WINDOW = 256


class ToolTokens:
    """Calls a tool when a completion ends with the tool's trigger, and inserts the tool's output.

    An object of this class is passed as `Request.force_tokens`. The engine inserts the tool's text
    as forced tokens, one per step; each of them replaces a sampled token, which is discarded. The
    tokens of the trigger itself count as written by the model. If a token contains more text after
    the trigger (such as `=5`), the tool is not called and the model continues.
    """

    def __init__(self, tool: Tool, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tool, self._tokenizer = tool, tokenizer
        self._text_of = cache(lambda token: str(tokenizer.decode([token])))

    def __call__(self, row: int, ids: Sequence[int], token: int) -> list[int] | None:
        """Return the token ids that the tool inserts after `ids`, or None (see `ForceTokens`)."""
        trigger = self.tool.trigger
        # This cheap test rules out nearly all tokens. A token that ends in a partial character
        # (U+FFFD) passes, because it may be part of the trigger.
        if not ids or not self._text_of(ids[-1]).endswith((trigger[-1:], "\ufffd")):
            return None
        text = str(self._tokenizer.decode(list(ids[-TOOL_WINDOW:]), skip_special_tokens=True))
        inserted = self.tool(text) if text.endswith(trigger) else None
        return encode_inserted_text(self._tokenizer, inserted) if inserted else None


def tool_spans(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> list[tuple[int, int]]:
    """Return the (start, end) character offsets of each tool call in the completion's text."""

    def characters(tokens: int) -> int:
        return len(tokenizer.decode(completion.token_ids[:tokens], skip_special_tokens=True))

    return [(characters(first), characters(end)) for first, end in completion.tool_calls]


@dataclass
class RequestState:
    """A request in the scheduler. Its `slot` is -1 until its prompt has a slot of the cache."""

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
    # Tokens to append next, instead of sampled tokens.
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
        """Return the tokens that the request inserts instead of the sampled token; () for none."""
        force_tokens = self.request.force_tokens
        if self.forced or not force_tokens:
            return ()
        return force_tokens(self.index, self.ids, token) or ()

    def allowed_tokens(self) -> torch.Tensor | None:
        """Return a mask of the tokens that may be sampled next, (V,) bool; None if all may be."""
        allowed = self.request.allowed_tokens
        return allowed(self.index, self.ids) if allowed and not self.forced else None

    def append(self, token: int, logprob: float, stop_ids: Collection[int]) -> Token:
        """Append the next token, forced or sampled, and check whether the completion has ended."""
        forced = bool(self.forced)
        if forced:
            token, logprob = self.forced.popleft(), math.nan
        self.ids.append(token)
        stopped = token in stop_ids
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
        """Start ready sequences while rows are free; prefill more requests when none are ready.

        While sequences are running, at most one batch of prompts is prefilled, because the running
        sequences get no token before this function returns.
        """
        was_running, prefilled = bool(self.running), False
        while len(self.running) < self.max_num_seqs:
            if not self.ready:
                requests = [] if was_running and prefilled else self._next_to_prefill()
                if not requests:
                    return
                prefill(requests)
                prefilled = True
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
            # Use low slots first, because `TorchOps` reads all slots up to the highest one in use.
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
    # The lowest and the highest prompt share exactly the common prefix of all prompts.
    first, last = min(prompts, key=list), max(prompts, key=list)
    return next((i for i in range(limit) if first[i] != last[i]), limit)
