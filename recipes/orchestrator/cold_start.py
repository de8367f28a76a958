"""Teaches the orchestrator the form of a graph, by supervised training on random ones.

A small model can not write the JSON, and what never happens is never rewarded. A seeded generator
writes graphs out of parts, good and bad ones alike; training on them teaches the format and a wide
choice of prompts. Which of these help is left to GRPO.

The loss is the mean negative log-likelihood, on the batches and log-probabilities of GRPO: the
graphs of a problem share its prompt.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from recipes.orchestrator.config import OrchestratorConfig
from recipes.orchestrator.graph import Graph
from recipes.orchestrator.orchestrator import PROMPTS, render
from recipes.orchestrator.plans import random_plan
from rlm.cli import terminal, to_dict
from rlm.data import FORMATS, Format, Problem, encode_text, end_of_turn_id
from rlm.model import (
    AdapterInfo,
    base_model_hash,
    check_adapter,
    check_base,
    load_tokenizer,
    save_adapter,
    set_gradient_checkpointing,
)
from rlm.ops import use_fused_layers
from rlm.training import (
    MixedPrecisionAdapter,
    Rollout,
    follow_adapter,
    load_policy,
    make_micro_batches,
    micro_batch_tokens,
    token_logprobs,
)

if TYPE_CHECKING:  # rlm.model imports bitsandbytes first
    from peft import PeftModel

GRAPHS_PER_PROBLEM = 2
BATCH_SIZE = 16  # graphs
LEARNING_RATE = 1e-3  # peak
WARMUP_STEPS = 3


def random_graph(rng: random.Random, format: Format) -> Graph:
    """Compose a graph of parts: an agent that solves, and one that checks and ends.

    Args:
        format: what the agents were trained to write.
    """
    parts = [rng.choice(texts) for texts in PROMPTS["random_graphs"].values()]
    roles, methods, checks, endings = (part.format(**format.tags) for part in parts)
    return Graph.chain(f"{roles} {methods}", f"{checks} {endings}")


def make_examples(
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    config: OrchestratorConfig,
    format: Format,
) -> list[Rollout]:
    """Write random graphs as completions to learn, GRAPHS_PER_PROBLEM for each problem's prompt."""
    rng, end = random.Random(f"cold start {config.seed}"), end_of_turn_id(tokenizer)
    examples = []
    for number, problem in enumerate(problems):
        prompt = render(tokenizer, problem.question, config.graph_form)
        for _ in range(GRAPHS_PER_PROBLEM):
            is_plan = config.graph_form == "questions"
            graph = random_plan(rng, problem) if is_plan else random_graph(rng, format)
            completion = [*encode_text(tokenizer, graph.to_json()), end]
            examples.append(Rollout(number, prompt, completion, advantage=1.0, weight=1.0))
    return examples


def train_start_adapter(
    config: OrchestratorConfig, problems: Sequence[Problem], format: Format = FORMATS["deepseek"]
) -> None:
    """Train an adapter on random graphs for these problems, and save it as `config.sft_adapter`.

    Args:
        format: what the agents were trained to write.
    """
    started = time.monotonic()
    tokenizer = load_tokenizer(config.model)
    if config.start_from:
        check_adapter(config.start_from, "--start-from none begins with a new one")
        check_base(config.start_from, config.model, base_model_hash(config.model))
        config = follow_adapter(config, AdapterInfo.load(config.start_from))
    policy = load_policy(replace(config, sft_adapter=config.start_from), config.model, None)
    use_fused_layers(policy)
    set_gradient_checkpointing(policy, bool(config.checkpointing))
    trained = MixedPrecisionAdapter(policy)
    weights = list(trained.master_weights.values())
    optimizer = torch.optim.AdamW(weights, weight_decay=0.0)
    examples = make_examples(tokenizer, problems, config, format)
    steps = math.ceil(len(examples) / BATCH_SIZE)
    terminal.line(
        f"cold start: {config.sft_adapter} is not there; learning the format from {len(examples)} "
        f"random graphs in {steps} steps"
    )
    for step in range(steps):
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        cosine = (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * warmup * cosine
        loss = backward(policy, trained, examples[step * BATCH_SIZE :][:BATCH_SIZE])
        torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        trained.copy_to_model()
        if step % max(1, steps // 8) == 0 or step == steps - 1:
            terminal.line(f"  step {step + 1}/{steps}  loss {loss:.3f}")
    seconds = time.monotonic() - started
    run = {
        "stage": "orchestrator_start",
        "base_model": config.model,
        "base_hash": base_model_hash(config.model),
        "quantize": config.quantize,
        "dataset": config.dataset,
        "examples": len(examples),
        "loss": loss,
        "seconds": seconds,
        "config": to_dict(config),
    }
    save_adapter(policy, tokenizer, config.sft_adapter, run)
    terminal.line(f"cold start done in {terminal.duration(seconds)}: {config.sft_adapter}")


def backward(
    policy: PeftModel, trained: MixedPrecisionAdapter, examples: Sequence[Rollout]
) -> float:
    """Accumulate the gradient of the mean negative log-likelihood per token; return the loss."""
    tokens, total = sum(len(example.completion) for example in examples), 0.0
    limits = (len(examples), micro_batch_tokens(policy))
    for micro in make_micro_batches(examples, *limits, policy.device.type):
        logprobs, _ = token_logprobs(policy, micro, temperature=1.0)  # (n, T), 0 beyond the end
        loss = -logprobs.sum() / tokens
        (loss * trained.loss_scale).backward()
        trained.accumulate()
        total += loss.item()
    return total
