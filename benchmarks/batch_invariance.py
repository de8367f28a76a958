"""Check whether a completion depends on its batch on this machine, and time the matmuls.

All matmuls of a decode step run with our kernels and with oneDNN in turns, for several numbers of
rows and threads. The table shows milliseconds and the share of values that differ from those with
64 rows. Then the same completions are sampled with other batches and threads. The exit status is 1
if any bit of ours differs.

    python -m benchmarks.batch_invariance --adapter weights/final_rlm_lora
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks import harness
from rlm.cli import flag, run_main, terminal
from rlm.data import FORMATS, load_problems, render_prompt
from rlm.evaluation import show_table
from rlm.model import (
    Device,
    decoder_and_head,
    load_adapter,
    load_base,
    load_tokenizer,
    prepare_process,
)
from rlm.ops import Ops, ops_for
from rlm.sampling import (
    Completion,
    FusedLayer,
    Sampler,
    SamplingParams,
    decoder_layers,
    fused_linear,
    prompt_seed,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GROUP = 8  # completions of a prompt
COMPARED_ROWS = 64  # rows of the reference matmul, with which other row counts are compared
MAX_NUM_SEQS = (64, 16, 1)
DTYPES = ("float32", "bfloat16")
ONEDNN = "oneDNN"
ON_CPU = Device("cpu", torch.float32, "compared in both dtypes")

# (matmul, its number of input features)
Products = Sequence[tuple[Callable[[Tensor], Tensor], int]]


@dataclass
class BatchInvarianceConfig(harness.BenchmarkConfig):
    adapter: Path | None = flag(None, "adapter to sample with")
    rows: tuple[int, ...] = flag(
        (1, 4, 16, 32, 64, 128, 512), "numbers of rows of the matmuls", min=1
    )
    threads: tuple[int, ...] = flag((1, 2), "numbers of threads", min=1)
    repeats: int = flag(5, "timed repetitions of each matmul, after a warmup", min=1)
    completions: int = flag(64, "number of completions to sample in each setting; 0: none", min=0)
    max_new_tokens: int = flag(96, "maximum completion length in tokens", min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.completions % GROUP:
            raise ValueError(f"--completions must be a multiple of {GROUP}, those of a prompt")


def decoding_products(model: PreTrainedModel, ops: Ops, dtype: torch.dtype) -> Products:
    """Return the matmuls of a decode step as the sampler runs them, with their input widths."""
    decoder, head = decoder_and_head(model)
    made = []
    for layer in decoder_layers(decoder):
        fused, attention, mlp = FusedLayer(layer, ops, dtype), layer.self_attn, layer.mlp
        made += [
            (fused.qkv, attention.q_proj.in_features),
            (fused.out, attention.o_proj.in_features),
            (fused.gated, mlp.gate_proj.in_features),
            (fused.down, mlp.down_proj.in_features),
        ]
    return [*made, (fused_linear(head, ops=ops, dtype=dtype), head.in_features)]


def by_onednn(ops: Ops) -> Ops:
    """Return ops with the same compiled passes, but with oneDNN's matmuls between them."""
    others = copy.copy(ops)
    others.has_linear = False
    return others


@contextmanager
def on_threads(threads: int) -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def share_that_differs(products: Products, inputs: Mapping[int, Tensor], rows: int) -> float:
    """Return the share of output values that differ from the outputs with `COMPARED_ROWS` rows."""
    differ, total, both = 0, 0, min(rows, COMPARED_ROWS)
    for product, width in products:
        x = inputs[width]
        found, wanted = product(x[:rows])[:both], product(x[:COMPARED_ROWS])[:both]
        differ, total = differ + int((found != wanted).sum()), total + found.numel()
    return differ / total


@torch.inference_mode()
def product_cells(
    config: BatchInvarianceConfig, model: PreTrainedModel, name: str
) -> list[dict[str, Any]]:
    """Time and compare the matmuls in one dtype; return a cell for each thread and row count."""
    dtype = getattr(torch, name)
    ops = ops_for(model, dtype)
    arms = {ONEDNN: decoding_products(model, by_onednn(ops), dtype)}
    if ops.has_linear:
        arms = {harness.OURS: decoding_products(model, ops, dtype)} | arms
        terminal.line(f"{name}: ours and oneDNN")
    else:
        terminal.line(f"{name}: oneDNN only, {ops.batch_note}")
    generator, most = torch.Generator().manual_seed(config.seed), max(*config.rows, COMPARED_ROWS)
    inputs = {
        width: torch.randn(most, width, generator=generator).to(dtype)
        for width in sorted({width for _, width in arms[ONEDNN]})
    }

    def milliseconds(products: Products, rows: int, repetition: int) -> float:
        def step() -> None:
            for product, width in products:
                product(inputs[width][:rows])

        return 1000 * harness.timed(step)[0]

    cells = []
    for threads, rows in itertools.product(config.threads, config.rows):
        with on_threads(threads):
            timed = {arm: partial(milliseconds, made, rows) for arm, made in arms.items()}
            runs = harness.alternate(timed, config.repeats)
            differ = {arm: share_that_differs(made, inputs, rows) for arm, made in arms.items()}
        named = f"{name}, {rows} rows, {threads} threads"
        if harness.OURS in runs:
            found = harness.cell(named, "ms", runs, more_is_better=False)
        else:  # oneDNN alone, without a ratio
            found = {"name": named, "unit": "ms", "ratio_range": {}}
            found["arms"] = {ONEDNN: harness.summary(runs[ONEDNN])}
        note = "differ: " + ", ".join(f"{arm} {100 * share:.2g} %" for arm, share in differ.items())
        cells.append(found | {"differ": differ, "note": note})
    return cells


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
    tokenizer, base = load_tokenizer(config.model), load_base(config.model, ON_CPU)
    cells, completions = [], {}
    for name in DTYPES:
        cells += product_cells(config, base, name)
    harness.show("matmuls of a decode step", cells)
    if config.completions:
        policy = load_adapter(base, config.adapter, trainable=False) if config.adapter else base
        completions = {name: sampled(config, policy, tokenizer, name) for name in DTYPES}
        for found in completions.values():
            show_table("", found["settings"], "sampled")
            terminal.line(found["note"] or "every bit must be equal in all batches")
    broken = any(cell["differ"].get(harness.OURS) for cell in cells) or any(
        row["other tokens"] or row["other logprobs"]
        for found in completions.values()
        if not found["note"]
        for row in found["settings"].values()
    )
    content = {"equal": not broken, "cells": cells, "completions": completions}
    harness.write_report(config.json, content | harness.provenance("batch_invariance"))
    terminal.line("our code's bits DIFFER between batches" if broken else "all equal")
    return 1 if broken else 0


if __name__ == "__main__":
    run_main(main, BatchInvarianceConfig, description=__doc__)
