"""Samples completions with continuous batching of at most `max_num_seqs` sequences.

Each prompt is prefilled once for all its completions. A completion is a pure function of its
request and the weights: it is bit-identical whichever other sequences share the batch. The matmuls
of oneDNN and torch are an exception, because their order of summation may depend on the number of
rows; `batch_note` reports when these matmuls are used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlm.cli import UsageError
from rlm.data import stop_token_ids
from rlm.model import available_memory, local_window, release_memory
from rlm.ops import AttentionFunction, ops_for, round_up
from rlm.sampling.draw import exclude_tokens, sample_rows, uniforms
from rlm.sampling.kv_cache import CacheConfig, KVCache, token_bytes
from rlm.sampling.requests import (
    PREFILL_PROMPTS,
    Completion,
    Request,
    RequestState,
    SamplingParams,
    Scheduler,
    SequenceState,
    Token,
    ToolTokens,
    common_prefix_length,
)
from rlm.sampling.weights import UnmergedWeights, choose_weights
from rlm.tools import Tool

if TYPE_CHECKING:  # at run time, rlm.model must import bitsandbytes before peft
    from peft import PeftModel


class Sampler:
    """Generates completions with a model and its active adapter.

    `sample` and `stream` process whole batches. Both are loops over the core methods:
    `allocate_cache`, `add_request`, and `step` while `has_unfinished_requests` returns True.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_num_seqs: int = 128,
        merged: bool | None = None,
        dtype: torch.dtype | None = None,
        share: float = 1.0,
        tool: Tool | None = None,
    ) -> None:
        """
        Args:
            max_num_seqs: the maximum number of sequences that are decoded at the same time.
            merged: whether to sample from a merged copy of the weights (the fast path). With None,
                the sampler decides from the architecture and the free memory.
            dtype: the dtype of the merged copy (None: the model's dtype); see `sampling_dtype`.
            share: the fraction of the free memory that this sampler may use; below 1 if several
                samplers share the machine.
            tool: the tool that may insert text into the completions of `sample`.

        Raises:
            UsageError: the sampler does not support this architecture, a requested merged copy is
                not supported for it, or the tokenizer belongs to another model.
        """
        rows = cast("nn.Embedding", model.get_input_embeddings()).num_embeddings
        if len(tokenizer) - len(_unused_tokens(tokenizer, rows)) > rows:
            raise UsageError(
                f"the tokenizer has {len(tokenizer)} tokens, but the model has only {rows}: use "
                "the model's own tokenizer"
            )
        self.model, self.tokenizer, self.max_num_seqs = model, tokenizer, max_num_seqs
        self._share = share
        self.tool_tokens = ToolTokens(tool, tokenizer) if tool else None
        self.stop_ids = stop_token_ids(tokenizer, model.generation_config)
        self._config = model.config.get_text_config()
        wanted: torch.dtype = dtype or model.dtype
        self._ops = ops_for(model, wanted)
        self._weights, weights = choose_weights(model, merged, self._ops, wanted, share)
        self.dtype = self._weights.dtype
        if self.dtype != wanted:
            self._ops = ops_for(model)
        reason = self._ops.batch_note
        if isinstance(self._weights, UnmergedWeights) and model.device.type == "cpu":
            reason = "unmerged weights use torch's matmuls"
        # Why a completion may depend on the rest of its batch; None if it does not.
        self.batch_note = reason and f"a completion may depend on its batch: {reason}"
        parts = f"{weights}, {self._ops.description}", self.batch_note
        self.description = "; ".join(filter(None, parts))
        self._cache: KVCache | None = None
        self._scheduler = Scheduler(0, 0)
        self._prefix: tuple[int, ...] = ()
        self._next_id = 0

    @property
    def vocab_size(self) -> int:
        """The number of logits per token, which may exceed the tokenizer's vocabulary size."""
        return self._config.vocab_size

    @property
    def matches_trainer(self) -> bool:
        """Whether sampling and training compute the same log-probabilities.

        This is the case if both use the same weights in fp32, where a different order of summation
        makes no relevant difference.
        """
        return isinstance(self._weights, UnmergedWeights) and self.model.dtype == torch.float32

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        seeds: Sequence[int],
        on_finish: Callable[[], None] = lambda: None,
    ) -> list[list[Completion]]:
        """Generate a group of n completions per prompt.

        Args:
            seeds: one seed per prompt. Completion i of a prompt is sampled from the random stream
                seed + i.
            on_finish: a callback that is called after each finished completion, for example to
                update a progress bar.
        """
        pairs, force = zip(prompts, seeds, strict=True), self.tool_tokens
        return self.complete([Request(p, params, s, n, force) for p, s in pairs], on_finish)

    def complete(
        self, requests: Sequence[Request], on_finish: Callable[[], None] = lambda: None
    ) -> list[list[Completion]]:
        """Generate the group of completions of each request."""
        groups = [[Completion([], []) for _ in range(request.n)] for request in requests]
        with closing(self.stream(requests)) as tokens:
            for token in tokens:
                completion = groups[token.request][token.row]
                completion.token_ids.append(token.id)
                completion.logprobs.append(token.logprob)
                if requests[token.request].force_tokens:
                    completion.tool_mask.append(not token.forced)
                completion.finish_reason = token.finish_reason
                if token.finish_reason:
                    on_finish()
        return groups

    def stream(self, requests: Sequence[Request]) -> Generator[Token, None, None]:
        """Generate completions as `complete` does, but yield each token as soon as it is sampled.

        The field `request` of each token is an index into `requests`. When the generator ends or
        is closed, the requests that are still running are dropped and the cache is freed.
        """
        if not requests:
            return
        prompts = [request.prompt for request in requests]
        prefix = prompts[0][: common_prefix_length(prompts)]
        config = self._cache_config(
            [request.n for request in requests],
            prompt_tokens=max(map(len, prompts)) - len(prefix) - 1,
            new_tokens=max(request.params.max_new_tokens for request in requests),
        )
        self.allocate_cache(config, prefix)
        for request in requests:
            self.add_request(request)  # the ids are 0, 1, …
        # Long prompts go first, because their rows are slow. At the end of the batch, no waiting
        # request refills a free row, so a slow row would run nearly alone.
        by_length = sorted(self._scheduler.waiting, key=lambda state: -len(state.request.prompt))
        self._scheduler.waiting = deque(by_length)
        try:
            while self.has_unfinished_requests():
                yield from self.step()
        finally:
            self.reset()  # the trainer needs the memory until the next batch

    def _cache_config(self, n: Sequence[int], prompt_tokens: int, new_tokens: int) -> CacheConfig:
        """Compute the cache size for a batch in which prompt i has n[i] completions."""
        return CacheConfig(
            max_num_seqs=min(self.max_num_seqs, sum(n)),
            prompt_slots=min(len(n), self.max_num_seqs // min(n) + PREFILL_PROMPTS),
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
        )

    def bytes_for(self, n: Sequence[int], prompt_tokens: int, new_tokens: int) -> int:
        """Estimate the bytes of the merged copy, the cache and the logits of a batch.

        Args:
            n: the number of completions of each prompt.
            prompt_tokens: the length of the longest prompt, without the shared prefix.
            new_tokens: the maximum length of a completion.
        """
        config = self._fit_memory(self._cache_config(n, prompt_tokens, new_tokens))
        cache = config.tokens * token_bytes(self._config, self.dtype)
        logits = config.max_num_seqs * self.vocab_size * self._ops.logit_bytes
        return cache + logits + self._weights.copied_bytes

    def start(self) -> None:
        """Do nothing, because only `VLLMSampler` has servers to start."""

    def invalidate_weights(self) -> None:
        """Do nothing: `MergedWeights.refresh` detects a changed adapter before each batch."""

    def release(self) -> None:
        """Free the memory of the merged copy until the next batch."""
        self._weights.release()
        release_memory()

    close = release  # called after the last batch; `VLLMSampler.close` stops servers

    @torch.inference_mode()
    def allocate_cache(self, config: CacheConfig, prefix: Sequence[int] = ()) -> None:
        """Allocate the cache for requests up to the given size.

        The cache gets fewer rows than requested if there is not enough memory. This method also
        updates the merged copy of the weights, and prefills `prefix`, the tokens that the prompts
        share. A prompt without this prefix is cached as a whole, if it fits.

        Raises:
            UsageError: not even one row fits, or the lengths exceed the model's attention window.
        """
        if self.has_unfinished_requests():
            raise RuntimeError(
                "allocate_cache was called while requests are running: call add_request instead"
            )
        if self.model.training:
            raise RuntimeError("the model is in training mode: call model.eval() before sampling")
        config = replace(config, prefix_tokens=len(prefix))
        window = local_window(self.model)
        if window and len(prefix) + config.prompt_tokens + 1 + config.new_tokens > window:
            raise UsageError(
                f"local attention layers of this model attend to only {window} tokens, and longer "
                "sequences are not supported: use shorter prompts or a lower --max-new-tokens"
            )
        self._weights.refresh()
        self._cache = None  # free the old cache before the new one is allocated
        config = self._fit_memory(config)
        model = self.model
        self._cache = KVCache(self._config, config, self.dtype, model.device, self._ops)
        self._scheduler, self._next_id = Scheduler(config.max_num_seqs, config.prompt_slots), 0
        self._prefix = tuple(prefix)
        if prefix:
            self._forward_prompts([prefix], 0, self._cache.prefill_prefix(), len(prefix))

    def _fit_memory(self, config: CacheConfig) -> CacheConfig:
        """Reduce the rows and slots until the cache fits in half of the free memory."""
        memory = int(self._share * available_memory(self.model.device.type)) // 2
        return config.fit(token_bytes(self._config, self.dtype), memory)

    def has_unfinished_requests(self) -> bool:
        return self._scheduler.has_unfinished

    def add_request(self, request: Request) -> int:
        """Add a request to the queue, and return its id; `allocate_cache` restarts the ids at 0.

        Raises:
            ValueError: the request is longer than the cache allows.
        """
        config = self._allocated_cache().config
        shares = tuple(request.prompt[:-1][: len(self._prefix)]) == self._prefix
        state = RequestState(self._next_id, request, len(self._prefix) if shares else 0)
        prompt, new = len(state.cached_tokens), request.params.max_new_tokens
        if prompt > config.prompt_tokens or new > config.new_tokens:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and a completion of {new} tokens do not "
                "fit into the cache: allocate a larger one"
            )
        self._next_id += 1
        self._scheduler.waiting.append(state)
        return state.id

    @torch.inference_mode()
    def abort_request(self, request_id: int) -> None:
        """Drop a request and its generated tokens. Finished requests are ignored."""
        self._scheduler.abort(request_id)
        if self._cache:
            self._scheduler.free_finished(self._cache.copy_row)

    def reset(self) -> None:
        """Drop all requests and free the cache, for example after `step` has raised an error."""
        self._scheduler, self._cache = Scheduler(0, 0), None

    @torch.inference_mode()
    def step(self) -> list[Token]:
        """Start waiting sequences in free rows, then generate one token per running sequence."""
        self._scheduler.fill_batch(self._prefill)
        batch = self._scheduler.running
        if not batch:
            return []
        hidden = self._weights.forward(*self._decoding_inputs(batch))  # (N, 1, hidden)
        logits = self._weights.head(hidden[:, 0])  # (N, V)
        seeds = [sequence.request.seed + sequence.index for sequence in batch]
        drawn = sample_rows(
            exclude_tokens(logits, [sequence.allowed_tokens() for sequence in batch]),
            uniforms(seeds, [len(sequence.ids) for sequence in batch]),
            [sequence.request.params for sequence in batch],
            self._ops,
        )
        pairs = list(zip(batch, drawn, strict=True))
        # Collect the forced tokens of all sequences before any token is appended, so that nothing
        # has changed if a request's `force_tokens` function raises.
        forced = [(sequence, sequence.forced_instead_of(token)) for sequence, (token, _) in pairs]
        for sequence, tokens in forced:
            sequence.forced.extend(tokens)
        tokens = [sequence.append(*token, self.stop_ids) for sequence, token in pairs]
        self._scheduler.free_finished(self._allocated_cache().copy_row)
        return tokens

    def _allocated_cache(self) -> KVCache:
        if self._cache is None:
            raise RuntimeError("no cache: call allocate_cache first")
        return self._cache

    def _prefill(self, requests: Sequence[RequestState]) -> None:
        """Compute the keys and values of new prompts, and store them in the prompts' slots."""
        prompts = [state.cached_tokens for state in requests]
        if any(prompts):
            cache = self._allocated_cache()
            tokens = round_up(max(map(len, prompts)), 8, cache.config.prompt_tokens)
            prefix = requests[0].prefix_length
            slots = [state.slot for state in requests]
            attention = cache.prefill_prompts(slots, tokens, prefix)
            self._forward_prompts(prompts, prefix, attention, tokens)

    def _forward_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        start: int,
        attention: AttentionFunction,
        tokens: int,
    ) -> None:
        """Run the model on right-padded prompts, whose tokens never attend to the padding."""
        device = self.model.device
        ids = torch.tensor([[*prompt, *[0] * (tokens - len(prompt))] for prompt in prompts])
        positions = torch.arange(start, start + tokens).expand(len(prompts), -1)
        self._weights.forward(ids.to(device), positions.to(device), attention)

    def _decoding_inputs(
        self, batch: Sequence[SequenceState]
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionFunction]:
        """Return the model inputs that decode one token of each sequence.

        Returns:
            The last token of each sequence (N, 1), its position (N, 1), and the attention function.
        """
        lengths = [(s.parent.prefix_length, len(s.parent.cached_tokens), len(s.ids)) for s in batch]
        slots = [sequence.parent.slot for sequence in batch]
        attention = self._allocated_cache().decode(slots, *zip(*lengths, strict=True))
        device = self.model.device
        ids = torch.tensor([[sequence.last_token] for sequence in batch], device=device)
        return ids, torch.tensor([[sum(parts)] for parts in lengths], device=device), attention


def _unused_tokens(tokenizer: PreTrainedTokenizerBase, rows: int) -> list[str]:
    """Return the special tokens that have no embedding and that no prompt contains.

    Gemma 3's tokenizer has such a token for images, even in the models without images.
    """
    added = tokenizer.added_tokens_decoder.items()
    roles = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    beyond = [token.content for i, token in added if i >= rows and token.special]
    return [text for text in beyond if text not in template and text not in roles]
