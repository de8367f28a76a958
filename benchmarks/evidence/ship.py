"""Ships the adapter of a demo run: rounded to bf16, judged again, with a model card.

    python -m benchmarks.evidence ship runs/demo     # -> weights/final_rlm_lora

The card's first table is of these very weights, judged greedily after rounding; the second is what
the run itself wrote.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.evidence.intervals import crossed_bootstrap
from benchmarks.evidence.judging import Judge
from benchmarks.evidence.plan import EvidenceConfig, read_json
from benchmarks.evidence.pools import OTHER, TITLES, gym_installed, gym_problems, made
from benchmarks.evidence.report import template
from rlm.cli import UsageError, terminal
from rlm.data import load_problems
from rlm.evaluation import GRADINGS, Evaluation
from rlm.model import (
    EMBEDDED_MODEL,
    AdapterInfo,
    load_adapter,
    load_base,
    load_tokenizer,
    pick_device,
    prepare_process,
)
from rlm.runs import replace_json
from rlm.sampling import Sampler

LARGEST_MB = 12
EMBEDDED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
KEPT = (
    *("stage", "base_model", "base_hash", "dataset", "step", "commit"),
    *("start_accuracy", "accuracy", "validated_on"),
)
LEARNED, UNSEEN = "families it learned, other numbers", "families nobody saw"


def ship(config: EvidenceConfig) -> None:
    """Write the adapter, its run.json and its card under `config.weights`.

    Raises:
        UsageError: the directory does not hold a finished run, or the adapter is too large.
    """
    prepare_process()
    run = config.demo
    adapter, summary_file = run / "final_rlm_lora", run / "summary.json"
    if not (adapter / "run.json").exists() or not summary_file.exists():
        raise UsageError(f"{run} holds no finished run: make demo")
    history, summary = AdapterInfo.load(adapter).run, read_json(summary_file)
    if history["base_model"] != config.model:
        raise UsageError(f"{run} trained {history['base_model']}, not --model {config.model}")
    if "command" not in summary:
        raise UsageError(f"{run} was made by an earlier version of the demo: run it again")
    with replacing(config.weights) as folder:
        write_rounded(adapter, folder, config.model)
        total = summary["accuracy"]["grpo"]["strict"]["total"]
        judged = judge(config, folder, history, total)
        replace_json(folder / "run.json", run_json(history, summary, judged))
        card = model_card(history, AdapterInfo.load(run / "sft_lora").run, summary, judged)
        (folder / "README.md").write_text(card, encoding="utf-8")
    terminal.line(f"{config.weights}: the adapter of {run} in bf16")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """An empty directory that takes the target's place when all is written in it.

    Raises:
        UsageError: more was written than should be committed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        written = Path(scratch) / "adapter"
        written.mkdir()
        yield written
        size = sum(file.stat().st_size for file in written.iterdir()) / 1e6
        if size > LARGEST_MB:
            raise UsageError(f"{target}: {size:.1f} MB are too many to commit ({LARGEST_MB})")
        previous = target.with_name(target.name + ".prev")
        if target.exists():
            shutil.rmtree(previous, ignore_errors=True)
            target.rename(previous)
        written.chmod(0o755)
        written.rename(target)


def write_rounded(adapter: Path, folder: Path, model: str) -> None:
    """The adapter's weights in bf16, and its config with the model's name instead of a place."""
    peft_config = read_json(adapter / "adapter_config.json")
    peft_config["base_model_name_or_path"] = model
    replace_json(folder / "adapter_config.json", peft_config)
    weights = load_file(adapter / "adapter_model.safetensors")
    rounded = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(rounded, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def judge(
    config: EvidenceConfig, adapter: Path, history: Mapping[str, Any], total: int
) -> dict[str, Evaluation]:
    """One greedy completion of each test problem, from the rounded weights.

    Args:
        total: how many problems of its own test split the run was judged on.
    """
    sets = {
        LEARNED: load_problems(history["dataset"], "test", max_samples=total),
        UNSEEN: made("test_families", config.greedy_problems, 0, None),
    }
    if gym_installed():
        sets[OTHER] = gym_problems(config.other_problems)
    tokenizer = load_tokenizer(config.model)
    base = load_base(config.model, pick_device())
    policy = load_adapter(base, adapter, trainable=False)
    examiner = Judge(Sampler(policy, tokenizer), tokenizer, config.max_new_tokens, seed=0)
    return {name: examiner(problems, 1) for name, problems in sets.items()}


def run_json(
    history: Mapping[str, Any], summary: Mapping[str, Any], judged: Mapping[str, Evaluation]
) -> dict[str, Any]:
    """The run's own run.json, without this machine's paths."""
    kept = {key: history[key] for key in KEPT if key in history}
    names = ("reasoning_format", "steps", "batch_size", "group_size")
    right = {
        name: {grading: int(sum(found.per_problem(strict))) for grading, strict in GRADINGS.items()}
        | {"total": len(found.problems)}
        for name, found in judged.items()
    }
    return kept | {
        "command": summary["command"],
        "numbers": "bfloat16",
        "greedy_after_rounding": right,
        "config": {name: history["config"][name] for name in names},
    }


def model_card(
    history: Mapping[str, Any],
    sft: Mapping[str, Any],
    summary: Mapping[str, Any],
    judged: Mapping[str, Evaluation],
) -> str:
    """The card of model_card.md.jinja.

    Args:
        history, sft: run.json of the adapter, and of the one it started from.
        summary: of the demo run; `judged` is of the rounded weights.
    """
    embedded = history["base_model"] == EMBEDDED_MODEL
    scores = {
        TITLES.get(name, name): {
            "problems": len(found.problems),
            **{n: crossed_bootstrap([found.per_problem(s)]).percent for n, s in GRADINGS.items()},
        }
        for name, found in judged.items()
    }
    first, examples = next(iter(judged.values())), {}  # the first right and the first wrong answer
    for problem, (graded,) in zip(first.problems, first.groups, strict=True):
        title = "Right" if graded.strict.correct else "Wrong"
        examples.setdefault(title, (problem, graded.text))
    return template("model_card.md.jinja").render(
        history=history,
        sft=sft,
        summary=summary,
        embedded=embedded,
        hub_id=EMBEDDED_HUB_ID if embedded else history["base_model"],
        scores=scores,
        examples=examples,
    )
