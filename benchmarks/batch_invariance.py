"""Checks whether a completion depends on its batch on this machine.

The same completions are sampled in fp32 and in bf16, with several batch sizes and numbers of
threads. The exit status is 1 if tokens or log-probabilities differ in any bit, except in a dtype
for which the sampler reports that completions may depend on their batch.

    python -m benchmarks.batch_invariance --adapter weights/final_rlm_lora
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import harness
from rlm.cli import flag, run_main, terminal
from rlm.data import FORMATS, load_problems, render_prompt
from rlm.evaluation import show_table
from rlm.model import Device, load_adapter, load_base, load_tokenizer, prepare_process
from rlm.sampling import Completion, Sampler, SamplingParams, prompt_seed

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GROUP = 8  # completions per prompt
MAX_NUM_SEQS = (64, 16, 1)
DTYPES = ("float32", "bfloat16")
ON_CPU = Device("cpu", torch.float32, "compared in both dtypes")


@dataclass
class BatchInvarianceConfig(harness.BenchmarkConfig):
    adapter: Path | None = flag(None, "adapter to sample with")
    threads: tuple[int, ...] = flag((1, 2), "numbers of threads", min=1)
    completions: int = flag(64, "number of completions to sample in each setting", min=GROUP)
    max_new_tokens: int = flag(96, "maximum completion length in tokens", min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.completions % GROUP:
            raise ValueError(
                f"--completions must be a multiple of {GROUP} (completions per prompt)"
            )


@contextmanager
def on_threads(threads: int) -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def sampled(
    config: BatchInvarianceConfig,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
) -> dict[str, Any]:
    """Sample the same completions in each setting; count differences from the first setting."""
    prompts = config.completions // GROUP
    problems = load_problems(config.dataset, "test", max_samples=prompts, seed=config.seed)
    texts = [render_prompt(tokenizer, p.question, FORMATS["deepseek"]) for p in problems]
    seeds = [prompt_seed(config.seed, 0, p.id) for p in problems]
    params = SamplingParams(config.max_new_tokens, temperature=1.0)
    first: list[Completion] = []
    settings = {}
    for threads, rows in itertools.product(config.threads, MAX_NUM_SEQS):
        sampler = Sampler(model, tokenizer, max_num_seqs=rows, dtype=getattr(torch, name))
        with on_threads(threads):
            seconds, groups = harness.timed(partial(sampler.sample, texts, GROUP, params, seeds))
        found = [completion for group in groups for completion in group]
        first = first or found
        pairs = [*zip(first, found, strict=True)]
        setting = f"{name}, max_num_seqs {rows}, {threads} threads"
        settings[setting] = {
            "completions": len(found),
            "tokens": sum(len(completion.token_ids) for completion in found),
            "other tokens": sum(one.token_ids != two.token_ids for one, two in pairs),
            "other logprobs": sum(one.logprobs != two.logprobs for one, two in pairs),
            "seconds": round(seconds, 1),
        }
        differ = settings[setting]["other logprobs"]
        terminal.line(f"{setting}: {differ} of {len(found)} completions differ")
    return {"note": sampler.batch_note, "settings": settings}


def main(config: BatchInvarianceConfig) -> int:
    prepare_process()
    tokenizer, model = load_tokenizer(config.model), load_base(config.model, ON_CPU)
    if config.adapter:
        model = load_adapter(model, config.adapter, trainable=False)
    completions = {name: sampled(config, model, tokenizer, name) for name in DTYPES}
    for found in completions.values():
        show_table("", found["settings"], "setting")
        terminal.line(found["note"] or "all settings must give bitwise identical completions")
    broken = any(
        row["other tokens"] or row["other logprobs"]
        for found in completions.values()
        if not found["note"]
        for row in found["settings"].values()
    )
    content = {"equal": not broken, "completions": completions}
    harness.write_report(config.json, content | harness.provenance("batch_invariance"))
    terminal.line("completions DIFFER between batches" if broken else "all as expected")
    return 1 if broken else 0


if __name__ == "__main__":
    run_main(main, BatchInvarianceConfig, description=__doc__)
