"""Checks that structured outputs match their JSON schemas, and measures the cost of token masks.

The model answers under random schemas of four kinds, at temperature 1. `jsonschema` validates each
answer that was not cut off. Then completions of equal length are sampled in turns with and without
masks. They run on one thread, and CPU time is counted, so that other processes do not matter. The
exit status is 1 if an answer does not match its schema.

    python -m benchmarks.structured_outputs --json docs/results/structured_outputs.json
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import jsonschema
import torch

from benchmarks import harness
from rlm.cli import flag, run_main, terminal
from rlm.data import FORMATS, load_problems, render_prompt
from rlm.model import load_adapter, load_base, load_tokenizer, pick_device, prepare_process
from rlm.reasoner import GrammarCompiler, ReasoningStream, StructuredOutputs
from rlm.sampling import Request, Sampler, SamplingParams, sampling_dtype

FORMAT = FORMATS["deepseek"]
KINDS = ("flat", "nested", "array", "union")
INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}
FREE = "free"


@dataclass
class StructuredOutputsConfig(harness.BenchmarkConfig):
    adapter: Path | None = flag(None, "adapter to sample with")
    schemas: int = flag(200, "number of random schemas, of four kinds in turn", min=4)
    max_new_tokens: int = flag(256, "maximum completion length in tokens", min=8)
    rows: int = flag(8, "number of timed completions, sampled at the same time", min=1)
    timed_tokens: int = flag(96, "length of a timed completion in tokens", min=1)
    repeats: int = flag(5, "timed repetitions, after a warmup", min=1)


def random_schema(kind: str, rng: random.Random) -> dict[str, Any]:
    """Return a random schema of a kind; its values are short, so that few answers are cut off."""
    leaves = [
        INTEGER,
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": rng.randint(0, 8)},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"enum": ["low", "high", rng.randint(0, 9)]},
        {"const": f"v{rng.randint(0, 9)}"},
    ]

    def an_object(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
        names = [f"{rng.choice('abc')}{i}" for i in range(len(values))]
        needed = [name for name in names if rng.random() < 0.7]
        fields = {"properties": dict(zip(names, values, strict=True)), "required": needed}
        return {"type": "object", "additionalProperties": False} | fields

    first, second = rng.choice(leaves), rng.choice(leaves)
    if kind == "flat":
        return an_object([rng.choice(leaves) for _ in range(rng.randint(1, 4))])
    if kind == "nested":
        root = an_object([{"$ref": "#/$defs/inner"}, first])
        return root | {"$defs": {"inner": an_object([first, second])}}
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": first, "minItems": least, "maxItems": least + 2}
    short = {"type": "array", "items": INTEGER, "maxItems": 2}
    return {"anyOf": [an_object([first]), short, second]}


def count_valid(
    config: StructuredOutputsConfig,
    sampler: Sampler,
    compiler: GrammarCompiler,
    prompts: Sequence[Sequence[int]],
) -> dict[str, Counter[str]]:
    """Sample an answer to each random schema at temperature 1; count the outcomes by kind."""
    valid, invalid, cut, reasoned = counters = [Counter[str]() for _ in range(4)]
    rng = random.Random(config.seed)
    schemas = [(k, random_schema(k, rng)) for k in islice(cycle(KINDS), config.schemas)]
    params = SamplingParams(config.max_new_tokens, 1.0)
    streams = [
        ReasoningStream(
            sampler.tokenizer,
            FORMAT,
            sampler.stop_ids,
            max_new_tokens=config.max_new_tokens,
            budget=48,
            grammar=compiler.compile(StructuredOutputs(schema), FORMAT),
        )
        for _, schema in schemas
    ]
    requests = [
        Request(prompts[i % len(prompts)], params, config.seed + i, 1, s, s.allowed_tokens)
        for i, s in enumerate(streams)
    ]
    for token in sampler.stream(requests):
        streams[token.request].add_token(token)
    for (kind, schema), stream in zip(schemas, streams, strict=True):
        (state,) = stream.completions
        reasoned[kind] += state.parser.opened
        if state.finish_reason == "length":
            cut[kind] += 1
            continue
        try:
            jsonschema.validate(json.loads(state.answer), schema)
            valid[kind] += 1
        except (ValueError, jsonschema.ValidationError) as error:
            invalid[kind] += 1
            terminal.line(f"invalid: {state.answer!r} for {json.dumps(schema)}: {error}")
    return dict(zip(("valid", "invalid", "cut", "reasoned"), counters, strict=True))


def tokens_per_second(
    config: StructuredOutputsConfig,
    sampler: Sampler,
    compiler: GrammarCompiler,
    prompts: Sequence[Sequence[int]],
    masked: bool,
) -> float:
    """Sample completions of equal length, and return the tokens per CPU second.

    Args:
        masked: whether a schema constrains each completion.
    """
    rng, requests = random.Random(config.seed), []
    for i in range(config.rows):
        endless = {"type": "array", "items": random_schema(KINDS[i % 4], rng), "minItems": 999}
        definitions = endless["items"].pop("$defs", None)
        schema = endless | ({"$defs": definitions} if definitions else {})
        matcher = compiler.compile(StructuredOutputs(schema), FORMAT)
        allowed = (lambda row, ids, matcher=matcher: matcher.allowed(ids)) if masked else None
        params = SamplingParams(config.timed_tokens, 1.0)
        requests.append(Request(prompts[i % len(prompts)], params, i, 1, None, allowed))
    started = time.process_time()
    groups = sampler.complete(requests)
    seconds = time.process_time() - started
    return sum(len(group[0].token_ids) for group in groups) / seconds


def main(config: StructuredOutputsConfig) -> int:
    prepare_process()
    torch.set_num_threads(1)
    model = load_base(config.model, pick_device())
    if config.adapter:
        model = load_adapter(model, config.adapter, trainable=False)
    tokenizer = load_tokenizer(config.model)
    sampler = Sampler(model, tokenizer, max_num_seqs=config.rows, dtype=sampling_dtype(model)[0])
    problems = load_problems(config.dataset, split="test", max_samples=16, seed=config.seed)
    prompts = [render_prompt(tokenizer, problem.question, FORMAT) for problem in problems]
    compiler = GrammarCompiler(tokenizer, sampler.stop_ids, sampler.vocab_size)
    parts = config, sampler, compiler, prompts
    counts = count_valid(*parts)
    sampler.stop_ids = frozenset()  # the timed completions must have equal lengths
    arms = {
        name: lambda _, masked=masked: tokens_per_second(*parts, masked)
        for name, masked in ((harness.OURS, True), (FREE, False))
    }
    runs = harness.alternate(arms, config.repeats)
    cell = harness.cell(f"{config.rows} rows", "tokens per CPU second", runs, more_is_better=True)
    harness.show("with masks (ours) and without", [cell])
    total = {name: counter.total() for name, counter in counts.items()}
    terminal.line(
        f"{total['valid']} of {total['valid'] + total['invalid']} finished answers match their "
        f"schema; {total['cut']} were cut off at {config.max_new_tokens} tokens; "
        f"{total['reasoned']} of all completions contain reasoning"
    )
    content = harness.report("structured_outputs", cell, [cell], answers=counts)
    harness.write_report(config.json, content)
    return int(total["invalid"] > 0)


if __name__ == "__main__":
    run_main(main, StructuredOutputsConfig, description=__doc__)
