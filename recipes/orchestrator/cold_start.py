"""Teaches the orchestrator to write graphs, by supervised training on generated graphs.

A small model cannot write the JSON of a graph without training, so GRPO would have nothing to
reward. A seeded generator therefore composes graphs from random parts, some of which are harmful.
With `--graph-form questions`, it makes the graphs from plans. Training on these graphs teaches the
format and a variety of prompts. GRPO then finds the prompts that help.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from recipes.orchestrator.config import OrchestratorConfig
from recipes.orchestrator.graph import Graph
from recipes.orchestrator.orchestrator import PROMPTS, render
from recipes.orchestrator.plans import random_plan
from rlm.cli import Interrupted, UsageError, required, terminal, to_dict
from rlm.data import FORMATS, Format, Problem, encode_text, end_of_turn_id
from rlm.model import AdapterInfo, check_adapter, load_tokenizer
from rlm.training import Example, SFTConfig, mask_prompt
from train_sft import learn

GRAPHS_PER_PROBLEM = 2
LEARNING_RATE = 1e-3  # peak


def random_graph(rng: random.Random, format: Format) -> Graph:
    """Compose a graph from random parts: the first agent solves, and the second one checks."""
    parts = [rng.choice(texts) for texts in PROMPTS["random_graphs"].values()]
    roles, methods, checks, endings = (part.format(**format.tags) for part in parts)
    return Graph.chain(f"{roles} {methods}", f"{checks} {endings}")


def make_examples(
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    config: OrchestratorConfig,
    format: Format,
) -> list[Example]:
    """Create training examples whose completions are generated graphs.

    Each problem gets GRAPHS_PER_PROBLEM examples with the same prompt. Examples for which
    `random_plan` finds no plan are left out.
    """
    rng, end = random.Random(f"cold start {config.seed}"), end_of_turn_id(tokenizer)
    examples = []
    for problem in problems:
        prompt = render(tokenizer, problem.question, config.graph_form)
        for _ in range(GRAPHS_PER_PROBLEM):
            is_plan = config.graph_form == "questions"
            graph = random_plan(rng, problem) if is_plan else random_graph(rng, format)
            if graph:
                written = encode_text(tokenizer, graph.to_json())
                examples.append(mask_prompt(prompt, [*written, end]))
    return examples


def cold_start_dir(run_dir: Path) -> Path:
    """Return the folder in which the initial adapter of a run is trained."""
    return run_dir.with_name(f"{run_dir.name}_cold_start")


def train_start_adapter(
    config: OrchestratorConfig, problems: Sequence[Problem], format: Format = FORMATS["deepseek"]
) -> None:
    """Train an adapter on graphs for these problems, and save it as `config.sft_adapter`."""
    if config.start_from:
        check_adapter(config.start_from, "pass --start-from none to start with a new adapter")
        given = {"lora_r": config.lora_r} if config.lora_r != OrchestratorConfig.lora_r else {}
        config = replace(config, **AdapterInfo.load(config.start_from).resolve_rank(given))
    tokenizer = load_tokenizer(required(config.model, "--model"))
    examples = make_examples(tokenizer, problems, config, format)
    if not examples:
        raise UsageError(
            f"no plan can be made from --dataset {config.dataset}: give its problems a solution "
            "with equations, or pass --sft-adapter DIR with an adapter that writes plans"
        )
    sft = SFTConfig(
        model=config.model,
        dataset=config.dataset,
        adapter=config.start_from,
        lora_r=config.lora_r,
        lora_alpha=config.lora_alpha,
        quantize=config.quantize,
        dtype=config.dtype,
        epochs=1,
        learning_rate=LEARNING_RATE,
        seed=config.seed,
        output=required(config.sft_adapter, "--sft-adapter"),
        run_dir=cold_start_dir(config.run_dir),
    )
    terminal.line(
        f"cold start: {config.sft_adapter} does not exist, so an adapter is trained on "
        f"{len(examples)} generated graphs to learn the format"
    )
    about = {"stage": "orchestrator_start", "dataset": config.dataset, "config": to_dict(config)}
    try:
        history = learn(sft, tokenizer, examples, about, is_last=False)
    except Interrupted as stopped:
        terminal.line("stopped during the cold start: run the same command again")
        raise Interrupted(stopped.number, "") from None
    terminal.line(
        f"cold start done in {terminal.duration(history['seconds'])}: {config.sft_adapter}"
    )
