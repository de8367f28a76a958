"""Continuous batching: a bounded number of seats, refilled the moment a row ends.

A prompt is read once for all its completions. A completion is a pure function of its prompt, its
seed and the weights: who shares the batch does not matter (up to the rounding of matrix products,
whose order of summation changes with the batch size).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlm.models import decoder_and_head
from rlm.prompts import stop_token_ids
from rlm.sampling.cache import KeysAndValues, SeatCache
from rlm.sampling.draw import draw, uniforms
from rlm.sampling.params import Completion, SamplingParams, Token

# Prompts read in one forward pass. More saves little: a few hundred tokens already fill a CPU.
PREFILL_PROMPTS = 8


@dataclass
class _Prefilled:
    """A prompt that has been read: keys and values (layers, heads, tokens, width), next logits."""

    keys: torch.Tensor
    values: torch.Tensor
    logits: torch.Tensor


@dataclass
class _Row:
    """A completion in a seat."""

    prompt: int
    row: int
    seed: int
    length: int  # tokens in the cache
    drawn: int  # tokens drawn
    last: int  # the token to feed next


def shared_beginning(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with, short of the last token of the shortest.

    >>> shared_beginning([[1, 2, 3, 4], [1, 2, 5]]), shared_beginning([[1, 2], [1, 2]])
    (2, 1)
    """
    if len(prompts) == 1:
        return 0  # nothing to share
    limit = min(len(prompt) for prompt in prompts) - 1
    first, last = min(prompts), max(prompts)  # the two that differ most
    return next((i for i in range(limit) if first[i] != last[i]), limit)


class Sampler:
    """Draws completions from a model, with its adapter unmerged if it has one."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, seats: int = 128
    ) -> None:
        self._decoder, self._head = decoder_and_head(model)
        self._config = model.config
        self.model = model
        self.seats = seats
        self.stop_ids = stop_token_ids(tokenizer, model.generation_config)

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
        groups = [[Completion([], []) for _ in range(n)] for _ in prompts]
        for token in self.stream(prompts, n, params, seeds):
            completion = groups[token.prompt][token.row]
            completion.token_ids.append(token.id)
            completion.logprobs.append(token.logprob)
            completion.finish_reason = token.finish_reason
            if token.finish_reason:
                on_finish()
        return groups

    @torch.inference_mode()
    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        seeds: Sequence[int],
    ) -> Iterator[Token]:
        """The tokens of `sample`, each as soon as it is drawn."""
        if len(prompts) != len(seeds):
            raise ValueError(f"{len(prompts)} prompts but {len(seeds)} seeds")
        if any(not prompt for prompt in prompts):
            raise ValueError("a prompt is empty")
        if not prompts:
            return
        self._require_eval_mode()
        # Long prompts first: the last rows to run, which nothing refills, are then short ones.
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        seats = min(self.seats, len(prompts) * n)
        cache = SeatCache(
            self._config,
            seats,
            len(prompts[order[0]]) + params.max_new_tokens,
            self.model.dtype,
            self.model.device.type,
        )
        # The system prompt stands before every question: it is read once for all of them.
        prefix = shared_beginning(prompts)
        prefix_kv = self._read([prompts[0][:prefix]], [], cache)[0] if prefix else []
        unread = deque(order)
        waiting: deque[tuple[_Row, _Prefilled]] = deque()
        seated: list[_Row] = []
        while unread or waiting or seated:
            newcomers = []
            while len(seated) + len(newcomers) < seats and (waiting or unread):
                if not waiting:
                    read = [unread.popleft() for _ in range(min(PREFILL_PROMPTS, len(unread)))]
                    for index, prefilled in zip(
                        read,
                        self._prefill([prompts[i][prefix:] for i in read], prefix_kv, cache),
                        strict=True,
                    ):
                        for row in range(n):
                            start = _Row(index, row, seeds[index] + row, len(prompts[index]), 0, -1)
                            waiting.append((start, prefilled))
                newcomers.append(waiting.popleft())
            if newcomers:
                for seat, (_, prefilled) in enumerate(newcomers, start=len(seated)):
                    cache.fill(seat, prefilled.keys, prefilled.values)
                logits = torch.stack([prefilled.logits for _, prefilled in newcomers])
                first = len(seated)
                seated += [row for row, _ in newcomers]
                yield from self._advance(seated, first, logits, params, cache)
            else:
                yield from self._advance(seated, 0, self._decode(seated, cache), params, cache)

    def _prefill(
        self, prompts: list[Sequence[int]], prefix: KeysAndValues, cache: SeatCache
    ) -> list[_Prefilled]:
        """Read what follows the shared beginning; keys and values come with it in front."""
        collected, hidden = self._read(prompts, prefix, cache)
        before = prefix[0][0].shape[2] if prefix else 0
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=hidden.device)
        logits = self._head(hidden[torch.arange(len(prompts)), last])  # (P, V)
        return [
            _Prefilled(
                torch.stack([keys[i, :, : before + len(prompt)] for keys, _ in collected]),
                torch.stack([values[i, :, : before + len(prompt)] for _, values in collected]),
                logits[i],
            )
            for i, prompt in enumerate(prompts)
        ]

    def _read(
        self, prompts: list[Sequence[int]], prefix: KeysAndValues, cache: SeatCache
    ) -> tuple[KeysAndValues, torch.Tensor]:
        """One pass over prompts, padded on the right, where causal attention never looks.

        Keys and values by layer, and the last hidden states (P, T, hidden).
        """
        longest = max(len(prompt) for prompt in prompts)
        before = prefix[0][0].shape[2] if prefix else 0
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = torch.tensor(prompt)
        positions = torch.arange(before, before + longest).expand(len(prompts), -1)
        later = torch.ones(longest, before + longest, dtype=torch.bool).triu(before + 1)
        cache.collect(prefix)
        mask = self._mask(later).expand(len(prompts), 1, -1, -1)
        hidden = self._hidden(ids, positions, cache, mask)
        return cache.collected(), hidden

    def _decode(self, seated: list[_Row], cache: SeatCache) -> torch.Tensor:
        """Feed each row its last token; logits (N, V) of the next."""
        device = self.model.device
        positions = torch.tensor([row.length for row in seated], device=device)
        cache.place(positions)
        for row in seated:
            row.length += 1
        beyond = torch.arange(int(positions.max()) + 1, device=device) > positions[:, None]
        ids = torch.tensor([[row.last] for row in seated])
        mask = self._mask(beyond[:, None, None])
        hidden = self._hidden(ids, positions[:, None], cache, mask)  # (N, 1, hidden)
        return self._head(hidden[:, 0])

    def _mask(self, hidden_from: torch.Tensor) -> torch.Tensor:
        """An additive mask: the lowest number where `hidden_from` is true, else 0."""
        mask = torch.zeros(hidden_from.shape, dtype=self.model.dtype, device=self.model.device)
        return mask.masked_fill_(hidden_from.to(mask.device), torch.finfo(mask.dtype).min)

    def _hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: SeatCache,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        device = self.model.device
        return self._decoder(
            input_ids=ids.to(device),
            position_ids=positions.to(device),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    def _advance(
        self,
        seated: list[_Row],
        first: int,
        logits: torch.Tensor,
        params: SamplingParams,
        cache: SeatCache,
    ) -> Iterator[Token]:
        """Draw the next token of rows `first`…; finished rows leave, the last takes their seat."""
        rows = seated[first:]
        uniform = uniforms([row.seed for row in rows], [row.drawn for row in rows])
        tokens, logprobs = draw(logits, uniform.to(logits.device), params)
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.last = token
            row.drawn += 1
            stopped = token in self.stop_ids
            finished = stopped or row.drawn == params.max_new_tokens
            reason = ("stop" if stopped else "length") if finished else None
            if finished:
                row.last = -1
            yield Token(row.prompt, row.row, token, logprob, reason)
        seat = first
        while seat < len(seated):
            if seated[seat].last != -1:
                seat += 1
                continue
            mover = seated.pop()
            if seat < len(seated):  # else the finished row itself was the last
                seated[seat] = mover
                if mover.last != -1:
                    cache.move(len(seated), seat, mover.length)

    def _require_eval_mode(self) -> None:
        if self.model.training:
            raise RuntimeError("sampling with dropout on: call model.eval() first")
