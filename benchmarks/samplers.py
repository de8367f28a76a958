"""Contains the programs that `rollout.py` compares: our sampler, `generate`, and a vLLM server.

The method `draw` of each class samples completions (rows) of given lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from benchmarks.harness import timed
from rlm.api_client import APIClient
from rlm.model import base_of
from rlm.sampling import Completion, Request, Sampler, SamplingParams

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

Prompts = Sequence[Sequence[int]]
Lengths = Sequence[Sequence[int]]  # by prompt and completion
Seeds = Sequence[int]  # one per prompt
Draw = Callable[[Prompts, Lengths, Seeds, int], int]  # (…, rows_at_once) → useful tokens
TIMEOUT = 3600.0  # seconds; a CPU server may work for minutes on a batch
AT_ONCE = 1024  # maximum number of simultaneous requests to vLLM; a batch has fewer
PAD = 0  # the pad token, which can be any token because padding is masked
PROBE_TOKENS = 32  # completion length in tokens when the options of `generate` are compared


@dataclass
class Ours:
    """Samples with this project's sampler, which starts a new completion when another ends."""

    sampler: Sampler

    def draw(self, prompts: Prompts, lengths: Lengths, seeds: Seeds, rows_at_once: int) -> int:
        """Sample completions of the given lengths, and return their number of tokens.

        If all lengths are equal, end tokens are ignored. Otherwise, the last token of each
        completion is forced to be an end token, and an earlier end token is replaced.
        """
        sampler, stop_ids = self.sampler, self.sampler.stop_ids
        sampler.max_num_seqs = rows_at_once
        if length := only_length(lengths):
            sampler.stop_ids = frozenset()
            try:
                params = SamplingParams(length)
                return count_tokens(sampler.sample(prompts, len(lengths[0]), params, seeds))
            finally:
                sampler.stop_ids = stop_ids
        end = min(stop_ids)

        def force(
            ends: Sequence[int], other: int, row: int, ids: Sequence[int], token: int
        ) -> list[int] | None:
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
        return count_tokens(sampler.complete(requests))


def only_length(lengths: Lengths) -> int | None:
    """Return the common length of all rows, or None."""
    found = {length for group in lengths for length in group}
    return found.pop() if len(found) == 1 else None


def count_tokens(groups: Sequence[Sequence[Completion]]) -> int:
    return sum(len(completion.token_ids) for group in groups for completion in group)


class EndAt(StoppingCriteria):
    """Stops row i after lengths[i] tokens; `generate` continues until all rows are done."""

    def __init__(self, lengths: torch.Tensor, prompt_tokens: int) -> None:
        self.last = lengths + prompt_tokens

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        return input_ids.shape[1] >= self.last


@dataclass
class Generate:
    """Samples with `model.generate` on left-padded prompts, with an attention mask.

    No end token is set, so that no completion ends early. Unlike `min_new_tokens`, this does not
    require a logits processor in every step.
    """

    model: PreTrainedModel | PeftModel
    options: dict[str, Any] = field(default_factory=dict)  # for GenerationConfig

    def __post_init__(self) -> None:
        # `generate` reads unset options from the model's generation config, so replace this config.
        base_of(self.model).generation_config = GenerationConfig(pad_token_id=PAD)

    def draw(self, prompts: Prompts, lengths: Lengths, seeds: Seeds, rows_at_once: int) -> int:
        torch.manual_seed(seeds[0])
        rows = [
            (prompt, length)
            for prompt, group in zip(prompts, lengths, strict=True)
            for length in group
        ]
        useful = 0
        for start in range(0, len(rows), rows_at_once):
            batch = rows[start : start + rows_at_once]
            ends = torch.tensor([length for _, length in batch], device=self.model.device)
            drawn = self._generate([prompt for prompt, _ in batch], int(ends.max()), ends)
            if drawn.shape[1] != ends.max():
                raise RuntimeError(f"generated {drawn.shape[1]} tokens instead of {ends.max()}")
            useful += int(ends.sum())
        return useful

    @torch.inference_mode()
    def _generate(self, rows: Prompts, new_tokens: int, ends: torch.Tensor) -> torch.Tensor:
        """Return the generated tokens, (rows, new_tokens)."""
        longest = max(map(len, rows))
        ids = torch.tensor([[*[PAD] * (longest - len(row)), *row] for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        # `model.generate` has no annotated return type.
        generate = cast("Callable[..., torch.Tensor]", self.model.generate)
        output = generate(
            input_ids=ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            generation_config=GenerationConfig(
                max_new_tokens=new_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=PAD,
                **self.options,
            ),
            stopping_criteria=StoppingCriteriaList([EndAt(ends, longest)]),
        )
        return output[:, longest:]

    def choose_options(self, prompts: Prompts, n: int, seeds: Seeds) -> dict[str, float]:
        """Time each kind of cache after a warmup, keep the fastest, and return the seconds."""
        work = (prompts, [[PROBE_TOKENS] * n] * len(prompts), seeds, len(prompts) * n)
        kinds: dict[str, dict[str, Any]] = {
            "dynamic cache": {},
            "static cache": {"cache_implementation": "static", "disable_compile": True},
        }
        if self.model.device.type == "cuda":  # elsewhere transformers does not compile
            kinds["static cache, compiled"] = {"cache_implementation": "static"}
        seconds = {}
        for name, self.options in kinds.items():
            for _ in range(2):  # the first run warms up (and compiles)
                seconds[name], _ = timed(partial(self.draw, *work))
        self.options = kinds[min(seconds, key=seconds.__getitem__)]
        return seconds


class VLLM:
    """Samples with a running `vllm serve` of the same model, which gets prompts as token ids.

    All requests are sent at once; the server batches them itself.
    """

    def __init__(self, url: str) -> None:
        self.client = APIClient(url, concurrency=AT_ONCE, timeout=TIMEOUT, attempts=1)
        self.model = self.client.models()[0]["id"]

    def draw(self, prompts: Prompts, lengths: Lengths, seeds: Seeds, rows_at_once: int) -> int:
        """Sample completions. If all lengths are equal, each prompt is a single request."""
        jobs = [
            (prompt, 1, length, seed + row)
            for prompt, group, seed in zip(prompts, lengths, seeds, strict=True)
            for row, length in enumerate(group)
        ]
        if length := only_length(lengths):
            pairs = zip(prompts, seeds, strict=True)
            jobs = [(prompt, len(lengths[0]), length, seed) for prompt, seed in pairs]

        def ask(job: tuple[Sequence[int], int, int, int]) -> int:
            prompt, n, max_tokens, seed = job
            body = {
                "model": self.model,
                "prompt": list(prompt),
                "n": n,
                "max_tokens": max_tokens,
                "seed": seed % 2**31,  # the range that vLLM accepts
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,  # off in every version of vLLM; 0 is off only in newer ones
                "ignore_eos": True,
            }
            return self.client.post("completions", body)["usage"]["completion_tokens"]

        with ThreadPoolExecutor(len(jobs)) as pool:
            return sum(pool.map(ask, jobs))
