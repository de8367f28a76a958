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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from recipes.orchestrator.config import OrchestratorConfig
from recipes.orchestrator.graph import MIN_AGENTS, Graph
from recipes.orchestrator.orchestrator import PROMPTS, render
from rlm.cli import terminal, to_dict
from rlm.data import Problem, encode_text, end_of_turn_id
from rlm.model import base_model_hash, load_tokenizer, save_adapter, set_gradient_checkpointing
from rlm.training import (
    MixedPrecisionAdapter,
    Rollout,
    load_policy,
    make_micro_batches,
    micro_batch_tokens,
    token_logprobs,
    use_fused_layers,
)

if TYPE_CHECKING:  # rlm.model imports bitsandbytes first
    from peft import PeftModel

GRAPHS_PER_PROBLEM = 4
BATCH_SIZE = 4  # problems
LEARNING_RATE = 1e-3  # peak
WARMUP_STEPS = 3


def random_graph(rng: random.Random, max_agents: int = MIN_AGENTS) -> Graph:
    """Compose a graph of parts: a solver, then one who ends, and between them others who check."""
    count = rng.randint(MIN_AGENTS, max_agents)
    roles, methods, checks, endings = PROMPTS["random_graphs"].values()
    prompts = [f"{rng.choice(roles)} {rng.choice(methods)}"]
    prompts += [rng.choice(checks) for _ in range(count - MIN_AGENTS)]
    prompts.append(f"{rng.choice(checks)} {rng.choice(endings)}")
    graph = Graph.chain(*prompts)
    if count > MIN_AGENTS and rng.random() < 0.5:  # side by side instead of one after the other
        ids = [agent.id for agent in graph.agents]
        return Graph(agents=graph.agents, edges=[[name, ids[-1]] for name in ids[:-1]])
    return graph


def make_examples(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], max_agents: int, seed: int
) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Yield the prompt of each problem, and the completions to learn for it, as token ids."""
    rng, end = random.Random(f"cold start {seed}"), end_of_turn_id(tokenizer)
    for problem in problems:
        texts = [random_graph(rng, max_agents).to_json() for _ in range(GRAPHS_PER_PROBLEM)]
        prompt = render(tokenizer, problem.question, max_agents)
        yield prompt, [[*encode_text(tokenizer, text), end] for text in texts]


def train_start_adapter(config: OrchestratorConfig, problems: Sequence[Problem]) -> None:
    """Train an adapter on random graphs for these problems, and save it as `config.sft_adapter`."""
    started = time.monotonic()
    tokenizer = load_tokenizer(config.model)
    policy = load_policy(replace(config, sft_adapter=None), config.model, None)
    use_fused_layers(policy)
    set_gradient_checkpointing(policy, config.checkpointing)
    trained = MixedPrecisionAdapter(policy)
    weights = list(trained.master_weights.values())
    optimizer = torch.optim.AdamW(weights, weight_decay=0.0)
    examples = list(make_examples(tokenizer, problems, config.max_agents, config.seed))
    count, steps = len(examples) * GRAPHS_PER_PROBLEM, math.ceil(len(examples) / BATCH_SIZE)
    terminal.line(
        f"cold start: {config.sft_adapter} is not there; learning the format from {count} random "
        f"graphs in {steps} steps"
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
        "examples": count,
        "loss": loss,
        "seconds": seconds,
        "config": to_dict(config),
    }
    save_adapter(policy, tokenizer, config.sft_adapter, run)
    terminal.line(f"cold start done in {terminal.duration(seconds)}: {config.sft_adapter}")


def backward(
    policy: PeftModel,
    trained: MixedPrecisionAdapter,
    batch: Sequence[tuple[list[int], list[list[int]]]],
) -> float:
    """Accumulate the gradient of the mean negative log-likelihood per token; return the loss."""
    tokens = sum(len(ids) for _, completions in batch for ids in completions)
    rollouts = [
        Rollout(problem, prompt, ids, 1.0, 1 / tokens, [0.0] * len(ids))
        for problem, (prompt, completions) in enumerate(batch)
        for ids in completions
    ]
    total, limit, device = 0.0, micro_batch_tokens(policy), policy.device.type
    for micro in make_micro_batches(
        rollouts, max_rows=len(rollouts), max_tokens=limit, device=device
    ):
        logprobs, _ = token_logprobs(policy, micro, temperature=1.0)  # (n, T), 0 beyond the end
        loss = -(logprobs * micro.weights[:, None]).sum()
        (loss * trained.loss_scale).backward()
        trained.accumulate()
        total += loss.item()
    return total
