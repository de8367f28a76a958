"""Cold start: a small model can not write the JSON, and what never happens is never rewarded.

A seeded generator writes graphs out of parts, good and bad ones alike; supervised training on them
teaches the format and a wide choice of prompts. Which of these help is left to GRPO.

The update is the policy gradient of GRPO with advantage 1 for every example: maximum likelihood.
So it uses the same batches and log-probabilities, and the graphs of a problem share its prompt.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence

import torch

from recipes.orchestrator.config import Config
from recipes.orchestrator.graph import AGENTS, Graph
from recipes.orchestrator.orchestrator import render
from rlm.cli import terminal
from rlm.cli.options import to_dict
from rlm.data.problem import Problem
from rlm.data.prompts import encode_text, end_of_turn_id
from rlm.model import adapters
from rlm.model import base as models
from rlm.model import hardware as machine
from rlm.model.export import save_adapter
from rlm.training.batches import Rollout, make_micro_batches
from rlm.training.fused_layers import use_fused_layers
from rlm.training.logprobs import token_logprobs
from rlm.training.memory_plan import micro_batch_tokens
from rlm.training.mixed_precision import MixedPrecisionAdapter

GRAPHS_EACH = 4  # for a problem
QUESTIONS_A_STEP = 4
PEAK_RATE = 1e-3

ROLES = (
    "You are a careful math solver.", "You solve word problems.", "You are a teacher.",
    "You are quick with numbers.", "Solve the problem.",
)  # fmt: skip
METHODS = (
    "Think step by step.", "Reason inside <think></think>.", "Write one short calculation.",
    "Write down the numbers, then calculate.", "Say first what is asked.",
    "Explain your plan in words.", "Write only the result.", "Guess the result.",
)  # fmt: skip
CHECKS = (
    "Check the draft and correct it.", "Solve the problem again by yourself.",
    "Trust the draft and repeat its result.", "Compare the draft with the problem.",
    "Say whether the draft is right.",
)  # fmt: skip
ENDINGS = (
    "End with the number as [number].", "Give the final number inside <answer></answer>.",
    "Write only [number].", "Write the answer in one sentence.",
    "Reason inside <think></think>, then give the final number inside <answer></answer>.",
)  # fmt: skip


def written_graph(rng: random.Random, max_agents: int = AGENTS) -> Graph:
    """A graph out of parts: a solver, then one who ends, and between them others who check."""
    count = rng.randint(AGENTS, max_agents)
    prompts = [f"{rng.choice(ROLES)} {rng.choice(METHODS)}"]
    prompts += [rng.choice(CHECKS) for _ in range(count - AGENTS)]
    prompts.append(f"{rng.choice(CHECKS)} {rng.choice(ENDINGS)}")
    graph = Graph.chain(*prompts)
    if count > AGENTS and rng.random() < 0.5:  # side by side instead of one after the other
        ids = [agent.id for agent in graph.agents]
        return Graph(agents=graph.agents, edges=[[name, ids[-1]] for name in ids[:-1]])
    return graph


def examples(
    tokenizer, problems: Sequence[Problem], max_agents: int, seed: int
) -> Iterator[tuple[list[int], list[list[int]]]]:
    """The prompt of each problem, and the completions to learn for it, as token ids."""
    rng, end = random.Random(f"cold start {seed}"), end_of_turn_id(tokenizer)
    for problem in problems:
        texts = [written_graph(rng, max_agents).text() for _ in range(GRAPHS_EACH)]
        prompt = render(tokenizer, problem.question, max_agents)
        yield prompt, [[*encode_text(tokenizer, text), end] for text in texts]


def make_start_adapter(config: Config, problems: Sequence[Problem]) -> float:
    """Train an adapter on written graphs into `config.sft_adapter`; the last step's loss in nats.

    Args:
        problems: one group of graphs is written for each.
    """
    started, device = time.monotonic(), machine.pick_device()
    tokenizer = models.load_tokenizer(config.model)
    base = models.load_base(config.model, device, quantize=config.quantize, attn="auto")
    torch.manual_seed(config.seed)  # of the new adapter's matrices
    policy = adapters.new_adapter(base, r=config.lora_r, alpha=config.lora_alpha).eval()
    use_fused_layers(policy)
    adapters.set_gradient_checkpointing(policy, config.checkpointing)
    trained = MixedPrecisionAdapter(policy)
    master_weights = list(trained.master_weights.values())
    optimizer = torch.optim.AdamW(master_weights, lr=PEAK_RATE, weight_decay=0.0)
    rows = list(examples(tokenizer, problems, config.max_agents, config.seed))
    steps = math.ceil(len(rows) / QUESTIONS_A_STEP)
    terminal.line(
        f"cold start: {config.sft_adapter} is not there; learning the format from "
        f"{len(rows) * GRAPHS_EACH} written graphs in {steps} steps"
    )
    loss = math.nan
    for step in range(steps):
        batch = rows[step * QUESTIONS_A_STEP : (step + 1) * QUESTIONS_A_STEP]
        warmed = min(1.0, (step + 1) / 3)
        optimizer.param_groups[0]["lr"] = (
            PEAK_RATE * warmed * (1 + math.cos(math.pi * step / steps)) / 2
        )
        loss = _learn(policy, trained, batch, device.type)
        torch.nn.utils.clip_grad_norm_(master_weights, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        trained.copy_to_model()
        if step % max(1, steps // 8) == 0 or step == steps - 1:
            terminal.line(f"  step {step + 1}/{steps}  loss {loss:.3f}")
    seconds = time.monotonic() - started
    run = {
        "stage": "orchestrator_start",
        "base_model": config.model,
        "base_hash": models.base_hash(config.model),
        "quantize": config.quantize,
        "dataset": config.dataset,
        "examples": len(rows) * GRAPHS_EACH,
        "loss": loss,
        "seconds": seconds,
        "config": to_dict(config),
    }
    save_adapter(policy, tokenizer, config.sft_adapter, run)
    terminal.line(f"cold start done in {terminal.duration(seconds)}: {config.sft_adapter}")
    return loss


def _learn(policy, trained: MixedPrecisionAdapter, batch, device: str) -> float:
    """Gradients of the mean negative log-likelihood of a batch's tokens; its value."""
    tokens = sum(len(ids) for _, completions in batch for ids in completions)
    rollouts = [
        Rollout(problem, prompt, ids, 1.0, 1 / tokens, [0.0] * len(ids))
        for problem, (prompt, completions) in enumerate(batch)
        for ids in completions
    ]
    total, limit = 0.0, micro_batch_tokens(policy)
    for micro in make_micro_batches(
        rollouts, max_rows=len(rollouts), max_tokens=limit, device=device
    ):
        logprobs, _ = token_logprobs(policy, micro, temperature=1.0)  # (n, T), 0 beyond the end
        loss = -(logprobs * micro.weights[:, None]).sum()
        (loss * trained.loss_scale).backward()
        trained.accumulate()
        total += loss.item()
    return total
