"""Lengths of a real run's completions (lengths.json), for `rollout.py` to replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import harness
from benchmarks.samplers import count_tokens
from rlm.cli import UsageError, terminal
from rlm.data import FORMATS, load_problems, render_prompt
from rlm.model import load_adapter, load_base, load_tokenizer, pick_device
from rlm.sampling import Sampler, SamplingParams, prompt_seed

if TYPE_CHECKING:
    from benchmarks.rollout import RolloutConfig

LENGTHS = Path(__file__).with_name("lengths.json")
GROUP = 8  # completions of a prompt
ROWS, LIMIT = 256, 128


def record(config: RolloutConfig, model: str) -> None:
    """Sample with an adapter as training does, and keep how long the completions were."""
    base = load_base(model, pick_device())
    tokenizer = load_tokenizer(model)
    policy = load_adapter(base, config.record_lengths, trainable=False)
    problems = load_problems(config.dataset, "train", max_samples=ROWS // GROUP, seed=config.seed)
    groups = Sampler(policy, tokenizer).sample(
        [render_prompt(tokenizer, p.question, FORMATS["deepseek"]) for p in problems],
        GROUP,
        SamplingParams(LIMIT, 1.0),
        [prompt_seed(config.seed, p.id) for p in problems],
    )
    content = {
        "model": config.model,
        "dataset": config.dataset,
        "temperature": 1.0,
        "limit": LIMIT,
        "mean": count_tokens(groups) / ROWS,
        **harness.provenance("rollout"),
        "lengths": [[len(completion.token_ids) for completion in group] for group in groups],
    }
    terminal.line(f"{ROWS} completions, mean length {content['mean']:.1f}")
    harness.write_json(LENGTHS, content)


def read() -> tuple[list[list[int]], int]:
    """The recorded lengths, a group a prompt, and the limit they were drawn under.

    Raises:
        UsageError: none were recorded.
    """
    if not LENGTHS.exists():
        raise UsageError(
            f"no {LENGTHS.name} beside this script: make it with --record-lengths ADAPTER, "
            "or leave its cell out with --no-lengths"
        )
    content = json.loads(LENGTHS.read_text(encoding="utf-8"))
    return content["lengths"], content["limit"]
