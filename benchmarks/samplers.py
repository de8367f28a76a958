"""The arms of `rollout.py`: our sampler, transformers' `generate`, a server of vLLM.

Each has two methods: `fixed` (every row draws the same number of tokens, ends ignored) and
`lengths` (each row ends at its own). Both return how many useful tokens were drawn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx2
import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from rlm.cli import UsageError
from rlm.sampling import Completion, Request, Sampler, SamplingParams

Prompts = Sequence[Sequence[int]]
Lengths = Sequence[Sequence[int]]  # of the completions of each prompt
Seeds = Sequence[int]  # of the prompts
TIMEOUT = 3600.0  # seconds; a CPU server may work for minutes on a batch
PROBE_TOKENS = 32  # drawn to choose among the options of `generate`


@dataclass
class Ours:
    """Our sampler. Rows of their own length refill a place in its batch at once."""

    sampler: Sampler
    max_num_seqs: int  # of `lengths`; `fixed` takes all its rows at once

    def fixed(self, prompts: Prompts, n: int, new_tokens: int, seeds: Seeds) -> int:
        sampler, ends = self.sampler, self.sampler.stop_ids
        sampler.stop_ids, sampler.max_num_seqs = frozenset(), len(prompts) * n
        try:
            return count_tokens(sampler.sample(prompts, n, SamplingParams(new_tokens), seeds))
        finally:
            sampler.stop_ids = ends

    def lengths(self, prompts: Prompts, lengths: Lengths, seeds: Seeds) -> int:
        """An end token is put where the recording had one, another where one is drawn early."""
        stop_ids, self.sampler.max_num_seqs = self.sampler.stop_ids, self.max_num_seqs
        end = min(stop_ids)

        def force(ends: Sequence[int], other: int, row: int, ids: list[int], token: int) -> Any:
            if len(ids) + 1 == ends[row]:
                return [end]
            return [other] if token in stop_ids else None

        requests = [
            Request(
                prompt,
                SamplingParams(max(group), 1.0),
                seed,
                len(group),
                partial(force, group, next(t for t in prompt if t not in stop_ids)),
            )
            for prompt, group, seed in zip(prompts, lengths, seeds, strict=True)
        ]
        return count_tokens(self.sampler.complete(requests))


def count_tokens(groups: Sequence[Sequence[Completion]]) -> int:
    return sum(len(completion.token_ids) for group in groups for completion in group)


class EndAt(StoppingCriteria):
    """Row i is done when it has drawn lengths[i] tokens; `generate` goes on until all are."""

    def __init__(self, lengths: torch.Tensor, prompt_tokens: int) -> None:
        self.last = lengths + prompt_tokens

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        return input_ids.shape[1] >= self.last


@dataclass
class Generate:
    """`model.generate` on left-padded prompts, an attention mask, and nothing that changes logits.

    Ends are ignored by having no end token, which costs it nothing (`min_new_tokens` would rewrite
    the logits of every step).
    """

    model: PreTrainedModel
    pad_id: int
    batch_rows: int  # of `lengths`; `fixed` takes all its rows at once
    options: dict[str, Any] = field(default_factory=dict)  # of GenerationConfig

    def __post_init__(self) -> None:
        # `generate` fills in from the model's own config what a call leaves open.
        self.model.generation_config = GenerationConfig(pad_token_id=self.pad_id)

    def fixed(self, prompts: Prompts, n: int, new_tokens: int, seeds: Seeds) -> int:
        torch.manual_seed(seeds[0])
        rows = [prompt for prompt in prompts for _ in range(n)]
        return self._generate(rows, new_tokens, None).numel()

    def lengths(self, prompts: Prompts, lengths: Lengths, seeds: Seeds) -> int:
        torch.manual_seed(seeds[0])
        rows = [
            (prompt, length)
            for prompt, group in zip(prompts, lengths, strict=True)
            for length in group
        ]
        useful = 0
        for start in range(0, len(rows), self.batch_rows):
            batch = rows[start : start + self.batch_rows]
            ends = torch.tensor([length for _, length in batch], device=self.model.device)
            drawn = self._generate([prompt for prompt, _ in batch], int(ends.max()), ends)
            if drawn.shape[1] != ends.max():
                raise RuntimeError(f"{drawn.shape[1]} steps where the longest row has {ends.max()}")
            useful += int(ends.sum())
        return useful

    @torch.inference_mode()
    def _generate(self, rows: Prompts, new_tokens: int, ends: torch.Tensor | None) -> torch.Tensor:
        """The tokens drawn, (rows, new_tokens)."""
        longest = max(map(len, rows))
        ids = torch.tensor([[*[self.pad_id] * (longest - len(row)), *row] for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        criteria = [] if ends is None else [EndAt(ends, longest)]
        output = self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            generation_config=GenerationConfig(
                max_new_tokens=new_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=self.pad_id,
                **self.options,
            ),
            stopping_criteria=StoppingCriteriaList(criteria),
        )
        return output[:, longest:]

    def choose_options(self, prompts: Prompts, n: int, seeds: Seeds) -> dict[str, float]:
        """Try each kind of cache once, keep the fastest; the seconds of each."""
        kinds: dict[str, dict[str, Any]] = {
            "dynamic cache": {},
            "static cache": {"cache_implementation": "static", "disable_compile": True},
        }
        if self.model.device.type == "cuda":  # elsewhere transformers does not compile
            kinds["static cache, compiled"] = {"cache_implementation": "static"}
        seconds = {}
        for name, self.options in kinds.items():
            for _ in range(2):  # the first run warms up (and compiles)
                started = time.perf_counter()
                self.fixed(prompts, n, PROBE_TOKENS, seeds)
                seconds[name] = time.perf_counter() - started
        self.options = kinds[min(seconds, key=seconds.get)]
        return seconds


@dataclass
class VLLM:
    """A running `vllm serve` that holds the same model. Prompts are token ids.

    All requests are sent at once; the server does its own batching.
    """

    url: str
    model: str = ""

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/").removesuffix("/v1")
        self.model = self._ask("GET", "/v1/models")["data"][0]["id"]

    def fixed(self, prompts: Prompts, n: int, new_tokens: int, seeds: Seeds) -> int:
        """One request a prompt, so that it is read once."""
        jobs = [(p, n, new_tokens, s) for p, s in zip(prompts, seeds, strict=True)]
        return self._complete(jobs)

    def lengths(self, prompts: Prompts, lengths: Lengths, seeds: Seeds) -> int:
        return self._complete(
            [
                (prompt, 1, length, seed + row)
                for prompt, group, seed in zip(prompts, lengths, seeds, strict=True)
                for row, length in enumerate(group)
            ]
        )

    def _complete(self, jobs: Sequence[tuple[Sequence[int], int, int, int]]) -> int:
        def ask(job: tuple[Sequence[int], int, int, int]) -> int:
            prompt, n, max_tokens, seed = job
            body = {
                "model": self.model,
                "prompt": list(prompt),
                "n": n,
                "max_tokens": max_tokens,
                "seed": seed % 2**31,  # what a server takes
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,  # "off" in every version of it; 0 only in the newer ones
                "ignore_eos": True,
            }
            answer = self._ask("POST", "/v1/completions", body)
            drawn = answer["usage"]["completion_tokens"]
            if drawn != n * max_tokens:
                raise RuntimeError(f"{self.url} drew {drawn} tokens instead of {n * max_tokens}")
            return drawn

        with ThreadPoolExecutor(len(jobs)) as pool:
            return sum(pool.map(ask, jobs))

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = httpx2.request(method, self.url + path, json=body, timeout=TIMEOUT)
            return answer.raise_for_status().json()
        except httpx2.HTTPError as error:
            raise UsageError(f"{self.url}{path}: {error}") from error
