"""Continuous batching: at most `max_num_seqs` rows, refilled the moment a row ends.

A prompt is read once for all its completions. A completion is a pure function of its prompt, its
seed and the weights: who shares the batch does not matter (up to the rounding of matrix products,
whose order of summation changes with the batch size).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlm.cli.options import UsageError
from rlm.data.prompts import stop_token_ids
from rlm.model import hardware as machine
from rlm.model.base import kernels_for
from rlm.sampling.draw import draw, uniforms
from rlm.sampling.kv_cache import (
    Attend,
    Cache,
    CacheConfig,
    coarse,
    token_bytes,
)
from rlm.sampling.params import Completion, Request, SamplingParams, Token
from rlm.sampling.weights import ModelWeights, choose_weights

# Prompts read in one forward pass. More saves little: a few hundred tokens already fill a CPU.
PREFILL_PROMPTS = 8
# A stop text is looked for among this many last tokens (and at least as many as it has bytes).
STOP_WINDOW = 16


@dataclass
class _Prompt:
    """A request on its way: waiting to be read (slot None), then holding a slot of the cache."""

    handle: int
    request: Request
    prefix: int  # tokens it shares with all: kept in the cache once
    slot: int | None = None
    left: int = 0  # completions not finished yet

    @property
    def rest(self) -> Sequence[int]:
        """What its slot holds. The last token is the first that each completion reads itself."""
        return self.request.prompt[self.prefix : -1]


@dataclass
class _Row:
    """A completion in a seat."""

    prompt: _Prompt
    row: int
    last: int  # the token to read next
    ids: list[int] = field(default_factory=list)
    forced: deque[int] = field(default_factory=deque)
    finished: bool = False


def shared_beginning(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with, short of the last token of the shortest.

    >>> shared_beginning([[1, 2, 3, 4], [1, 2, 5]]), shared_beginning([[1, 2], [1, 2]])
    (2, 1)
    """
    if len(prompts) < 2:
        return 0  # nothing to share
    limit = min(len(prompt) for prompt in prompts) - 1
    first, last = min(prompts), max(prompts)  # the two that differ most
    return next((i for i in range(limit) if first[i] != last[i]), limit)


class Sampler:
    """Draws completions from a model with the adapter it wears.

    `sample` and `stream` are loops over the core: `reserve` room, `submit` requests, call `step`
    until `idle`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_num_seqs: int = 128,
        merged: bool | None = None,
    ) -> None:
        """
        Args:
            merged: whether to keep a merged copy of the weights (the fast path); None decides by
                the architecture and by the memory that is free.

        Raises:
            UsageError: a merged copy was asked for and this architecture has no fast path; or the
                tokenizer is another model's.
        """
        rows = model.get_input_embeddings().num_embeddings
        if len(tokenizer) > rows:
            raise UsageError(
                f"the tokenizer has {len(tokenizer)} tokens, the model {rows}: they do not belong "
                "together"
            )
        self.model, self.tokenizer, self.max_num_seqs = model, tokenizer, max_num_seqs
        self.stop_ids = stop_token_ids(tokenizer, model.generation_config)
        self._config = model.config.get_text_config()
        self._kernels, passes = kernels_for(model)
        self._weights, weights = choose_weights(model, merged, self._kernels)
        self.path = f"{weights}, {passes}"
        self._cache: Cache | None = None
        self._prefix: tuple[int, ...] = ()
        self._handles = 0
        self._unread: deque[_Prompt] = deque()
        self._waiting: deque[_Row] = deque()
        self._seated: list[_Row] = []
        self._free_slots: list[int] = []

    @property
    def exact(self) -> bool:
        """Whether tokens are drawn as training scores them: the same weights, and in fp32, where
        another order of the same sums makes no difference that counts."""
        return isinstance(self._weights, ModelWeights) and self.model.dtype == torch.float32

    # --- a whole batch ----------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        seeds: Sequence[int],
        on_finish: Callable[[], None] = lambda: None,
    ) -> list[list[Completion]]:
        """A group of n completions per prompt.

        Args:
            seeds: one per prompt; completion i of a prompt draws from the stream seed + i.
            on_finish: called after each finished completion (progress bars).
        """
        if len(prompts) != len(seeds):
            raise ValueError(f"{len(prompts)} prompts but {len(seeds)} seeds")
        requests = [Request(p, params, s, n) for p, s in zip(prompts, seeds, strict=True)]
        return self.complete(requests, on_finish)

    def complete(
        self, requests: Sequence[Request], on_finish: Callable[[], None] = lambda: None
    ) -> list[list[Completion]]:
        """The group of completions of each request."""
        groups = [[Completion([], []) for _ in range(request.n)] for request in requests]
        for token in self.stream(requests):
            completion = groups[token.request][token.row]
            completion.token_ids.append(token.id)
            completion.logprobs.append(token.logprob)
            completion.finish_reason = token.finish_reason
            if token.finish_reason:
                on_finish()
        return groups

    def stream(self, requests: Sequence[Request]) -> Iterator[Token]:
        """The tokens of `complete`, each as soon as it is drawn; `request` counts from 0."""
        if not self.idle:
            raise RuntimeError("a batch while other requests are running: submit them instead")
        if not requests:
            return
        prompts = [request.prompt for request in requests]
        prefix = prompts[0][: shared_beginning(prompts)]
        room = self._room_for(
            [request.n for request in requests],
            prompt_tokens=max(map(len, prompts)) - len(prefix) - 1,
            new_tokens=max(request.params.max_new_tokens for request in requests),
        )
        self.reserve(room, prefix)
        # Long prompts first: the last rows to run, which nothing refills, are then short ones.
        order = sorted(range(len(requests)), key=lambda i: -len(prompts[i]))
        numbers = {self.submit(requests[i]): i for i in order}
        try:
            while not self.idle:
                for token in self.step():
                    yield replace(token, request=numbers[token.request])
        finally:  # the caller may stop listening half way
            for handle in numbers:
                self.cancel(handle)
            self._cache = None  # the memory is somebody else's until the next batch

    def _room_for(self, n: Sequence[int], prompt_tokens: int, new_tokens: int) -> CacheConfig:
        """What a batch wants whose prompts have n[0], n[1], … completions."""
        return CacheConfig(
            max_num_seqs=min(self.max_num_seqs, sum(n)),
            slots=min(len(n), self.max_num_seqs // min(n) + PREFILL_PROMPTS),
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
        )

    def bytes_for(self, n: Sequence[int], prompt_tokens: int, new_tokens: int) -> int:
        """What a batch takes while it is drawn, beside the model: weight copy, cache, logits.

        Args:
            n: completions of each prompt.
            prompt_tokens: of the longest prompt, without what all share.
        """
        room = self._fitting(self._room_for(n, prompt_tokens, new_tokens))
        cache = room.tokens * token_bytes(self._config, self.model.dtype)
        # Compiled code reads logits as they are; torch holds them in fp32, with exponentials.
        each = self.model.dtype.itemsize if self._kernels else 3 * 4
        logits = room.max_num_seqs * self._config.vocab_size * each
        return cache + logits + self._weights.copied_bytes

    def release(self) -> None:
        """Give back a merged copy's memory until the next batch; after training it is stale."""
        self._weights.release()
        machine.give_back_memory()

    # --- the core ---------------------------------------------------------------------------

    @torch.inference_mode()
    def reserve(self, room: CacheConfig, prefix: Sequence[int] = ()) -> None:
        """Make room, once, for requests up to this size; fewer rows where memory is short.

        Also brings a merged copy of the weights up to date, and reads `prefix`, the beginning
        that prompts share (those that begin otherwise are read whole, if they fit).

        Raises:
            UsageError: not even one seat fits, or the model's attention window is shorter.
        """
        if not self.idle:
            raise RuntimeError("reserve while requests are running")
        if self.model.training:
            raise RuntimeError("sampling with dropout on: call model.eval() first")
        room = replace(room, prefix_tokens=len(prefix))
        window = getattr(self._config, "sliding_window", None)
        if window and len(prefix) + room.prompt_tokens + 1 + room.new_tokens > window:
            raise UsageError(f"this model attends to {window} tokens only: use shorter lengths")
        self._weights.refresh()
        self._cache = None  # the old one goes first
        room = self._fitting(room)
        self._cache = Cache(self._config, room, self.model.dtype, self.model.device, self._kernels)
        self._free_slots = list(reversed(range(self._cache.room.slots)))
        self._prefix = tuple(prefix)
        if prefix:
            self._read([prefix], 0, self._cache.read_prefix(), len(prefix))

    def _fitting(self, room: CacheConfig) -> CacheConfig:
        """The config, with as many rows and slots as fit in half of the memory that is free."""
        budget = machine.available_memory(self.model.device.type) // 2
        each = token_bytes(self._config, self.model.dtype)
        while room.tokens * each > budget:
            if room.max_num_seqs == 1 and room.slots == 1:
                raise UsageError(
                    f"keys and values of one completion need {room.tokens * each / 2**30:.1f} GB, "
                    f"and {budget / 2**30:.1f} GB are free: lower --max-new-tokens"
                )
            halved = (max(1, room.max_num_seqs // 2), max(1, room.slots // 2))
            room = replace(room, max_num_seqs=halved[0], slots=halved[1])
        return room

    @property
    def idle(self) -> bool:
        return not (self._unread or self._waiting or self._seated)

    def submit(self, request: Request) -> int:
        """Queue a request; its handle.

        Raises:
            ValueError: it is larger than what was reserved.
        """
        room = self._cache.room if self._cache else CacheConfig(0, 0, 0, 0)
        shares = tuple(request.prompt[:-1][: len(self._prefix)]) == self._prefix
        prompt = _Prompt(self._handles, request, len(self._prefix) if shares else 0)
        if len(prompt.rest) > room.prompt_tokens:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens: more than was reserved")
        if request.params.max_new_tokens > room.new_tokens:
            raise ValueError(f"max_new_tokens {request.params.max_new_tokens}: more than reserved")
        self._handles += 1
        self._unread.append(prompt)
        return prompt.handle

    @torch.inference_mode()
    def cancel(self, handle: int) -> None:
        """Forget a request and what it has drawn; nothing happens if it has ended."""
        self._unread = deque(p for p in self._unread if p.handle != handle)
        gone = [row for row in self._waiting if row.prompt.handle == handle]
        self._waiting = deque(row for row in self._waiting if row.prompt.handle != handle)
        for row in gone:
            self._release(row)
        for row in self._seated:
            row.finished = row.prompt.handle == handle
        self._leave()

    def clear(self) -> None:
        """Forget every request and the room: after a step that failed, say."""
        self._unread, self._waiting, self._seated = deque(), deque(), []
        self._cache = None

    @torch.inference_mode()
    def step(self) -> list[Token]:
        """One token for every row that runs, after free places have been given away."""
        while len(self._seated) < self._cache.room.max_num_seqs:
            if not self._waiting and not self._read_more():
                break
            self._seated.append(self._waiting.popleft())
        if not self._seated:
            return []
        rows = self._seated
        logits = self._decode(rows)  # (N, V)
        uniform = uniforms(
            [r.prompt.request.seed + r.row for r in rows], [len(r.ids) for r in rows]
        )
        drawn: list[tuple[int, float]] = [(0, 0.0)] * len(rows)
        by_params: dict[tuple, list[int]] = {}
        for i, row in enumerate(rows):
            params = row.prompt.request.params
            by_params.setdefault((params.temperature, params.top_p, params.top_k), []).append(i)
        for members in by_params.values():
            every = len(members) == len(rows)
            tokens, logprobs = draw(
                logits if every else logits[members],
                (uniform if every else uniform[members]).to(logits.device),
                rows[members[0]].prompt.request.params,
                self._kernels,
            )
            for i, *pair in zip(members, tokens.tolist(), logprobs.tolist(), strict=True):
                drawn[i] = tuple(pair)
        # All of them first: if a request's own function raises, nothing has been taken yet.
        steered = [self._steer(row, token) for row, (token, _) in zip(rows, drawn, strict=True)]
        for row, tokens in zip(rows, steered, strict=True):
            row.forced.extend(tokens)
        events = [self._take(row, *pair) for row, pair in zip(rows, drawn, strict=True)]
        self._leave()
        return events

    def _read_more(self) -> bool:
        """Read the next prompts of the queue into free slots; False if there are none."""
        prompts: list[_Prompt] = []
        while (
            self._unread
            and self._free_slots
            and len(prompts) < PREFILL_PROMPTS
            and (not prompts or self._unread[0].prefix == prompts[0].prefix)
        ):
            prompt = self._unread.popleft()
            prompt.slot, prompt.left = self._free_slots.pop(), prompt.request.n
            prompts.append(prompt)
            last = prompt.request.prompt[-1]
            self._waiting.extend(_Row(prompt, row, last) for row in range(prompt.request.n))
        texts = [prompt.rest for prompt in prompts]
        if any(texts):
            tokens = coarse(max(map(len, texts)), 8, self._cache.room.prompt_tokens)
            slots = [prompt.slot for prompt in prompts]
            attend = self._cache.read_prompts(slots, tokens, prompts[0].prefix)
            self._read(texts, prompts[0].prefix, attend, tokens)
        return bool(prompts)

    def _read(
        self, texts: Sequence[Sequence[int]], start: int, attend: Attend, tokens: int
    ) -> None:
        """One pass over texts, padded on the right, where causal attention never looks."""
        device = self.model.device
        ids = torch.tensor([[*text, *[0] * (tokens - len(text))] for text in texts])
        positions = torch.arange(start, start + tokens).expand(len(texts), -1)
        self._weights.hidden(ids.to(device), positions.to(device), attend)

    def _decode(self, rows: Sequence[_Row]) -> torch.Tensor:
        """Each row reads its last token; logits (N, V) of the next."""
        lengths = [(r.prompt.prefix, len(r.prompt.rest), len(r.ids)) for r in rows]
        attend = self._cache.decode([r.prompt.slot for r in rows], *zip(*lengths, strict=True))
        device = self.model.device
        ids = torch.tensor([[row.last] for row in rows], device=device)
        positions = torch.tensor([[sum(parts)] for parts in lengths], device=device)
        hidden = self._weights.hidden(ids, positions, attend)  # (N, 1, hidden)
        return self._weights.head(hidden[:, 0])

    def _steer(self, row: _Row, token: int) -> Sequence[int]:
        """What the request puts in the place of a drawn token, if anything."""
        steer = row.prompt.request.steer
        return () if row.forced or not steer else steer(row.row, row.ids, token) or ()

    def _take(self, row: _Row, token: int, logprob: float) -> Token:
        """Append the next token: what was forced, else what was drawn. See if it ends."""
        if row.forced:
            token, logprob = row.forced.popleft(), math.nan
        row.ids.append(token)
        row.last = token
        stopped = token in self.stop_ids or self._hits_stop_text(row)
        row.finished = stopped or len(row.ids) == row.prompt.request.params.max_new_tokens
        reason = ("stop" if stopped else "length") if row.finished else None
        return Token(row.prompt.handle, row.row, token, logprob, reason)

    def _hits_stop_text(self, row: _Row) -> bool:
        stops = row.prompt.request.params.stop
        if not stops:
            return False
        longest = max(len(stop.encode()) for stop in stops)
        tail = self.tokenizer.decode(row.ids[-max(STOP_WINDOW, longest) :])
        return any(stop in tail for stop in stops)

    def _leave(self) -> None:
        """Finished rows leave; the last rows take their places."""
        seat = 0
        while seat < len(self._seated):
            row = self._seated[seat]
            if not row.finished:
                seat += 1
                continue
            self._release(row)
            mover = self._seated.pop()
            if mover is not row:
                self._seated[seat] = mover
                if not mover.finished:
                    self._cache.move(len(self._seated), seat, len(mover.ids))

    def _release(self, row: _Row) -> None:
        row.prompt.left -= 1
        if row.prompt.left == 0:
            self._free_slots.append(row.prompt.slot)
            self._free_slots.sort(reverse=True)  # low slots first: few are then looked at
