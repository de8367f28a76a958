"""Prepares a trained adapter for shipping: averages, rounds and evaluates it, and writes its card.

GRPO improves a model on the problems that it trains on, and may cost accuracy on others. A weighted
average of the weights before and after GRPO often keeps most of both (WiSE-FT, arXiv 2109.01903).
The weight is chosen on the validation splits of the training data. The average is rounded to bf16.

The shipped adapter and the SFT adapter from which GRPO started answer each test set greedily, once
without a tool and once with the tool of training. The model card contains the accuracies, and the
file --results also contains the verdict on each answer.

    python -m benchmarks.ship runs/shipped/final_rlm_lora --sets elementary,data/everyday.jsonl
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import harness
from benchmarks.evidence.plan import read_json
from rlm.cli import UsageError, check_values, flag, run_main, terminal
from rlm.data import Problem, load_problems
from rlm.evaluation import GRADINGS, Evaluation, evaluate, paired_bootstrap
from rlm.model import (
    EMBEDDED_MODEL,
    AdapterInfo,
    hub_base,
    load_adapter,
    load_base,
    load_tokenizer,
    pick_device,
    prepare_process,
    public_dataset,
    take_adapters_off,
)
from rlm.runs import replace_json, writing_beside
from rlm.sampling import Sampler
from rlm.tools import load_tool

LARGEST_MB = 20
NAMES = ("start", "shipped")  # the SFT adapter, and the shipped one
# Candidate weights of the adapter after GRPO in the average. In a tie, the first is chosen.
WEIGHTS = (1.0, 0.75, 0.5, 0.25, 0.0)
NAMELESS = "a dataset without a name"  # the problems were passed to a trainer in Python

# Fields of run.json that loading needs or that were measured. Other fields may contain local paths.
PUBLISHED = (
    "stage", "base_model", "base_hash", "quantize", "dataset", "answer_types", "step", "examples",
    "commit", "loss", "validation_loss", "start_accuracy", "accuracy", "validated_on",
    "validation", "exported", "seconds",
)  # fmt: skip
PUBLISHED_CONFIG = (
    "reasoning_format", "system_prompt", "tool", "algorithm", "steps", "batch_size", "group_size",
    "max_new_tokens", "learning_rate", "epochs", "lora_r", "lora_alpha", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class ShipConfig:
    adapter: Path = flag(None, "adapter from train_grpo.py", positional=True)
    sets: tuple[str, ...] = flag(
        ("elementary", "data/everyday.jsonl"), "datasets whose test splits are used"
    )
    max_samples: int | None = flag(
        None, "maximum number of problems per dataset (none: all)", min=1
    )
    validation: int = flag(
        200,
        "number of validation problems of each training dataset, with which the weights of the "
        "adapters before and after GRPO are chosen; 0: no average",
        min=0,
    )
    max_new_tokens: int = flag(160, "maximum completion length in tokens", min=1)
    weights: Path = flag(Path("weights/final_rlm_lora"), "folder for the adapter")
    results: Path = flag(Path("docs/results/shipped/evaluation.json"), "file for the results")

    def __post_init__(self) -> None:
        check_values(self)
        if self.adapter is None:
            raise ValueError("pass an adapter: python -m benchmarks.ship FOLDER")


def main(config: ShipConfig) -> int:
    prepare_process()
    info = AdapterInfo.load(config.adapter)
    if info.stage != "grpo" or not info.run.get("start_adapter"):
        raise UsageError(f"{config.adapter} was not made by train_grpo.py from an SFT adapter")
    start = Path(info.run["start_adapter"])
    public = {name: public_dataset(name) for name in config.sets}
    sets = {
        Path(public[name]).stem: load_problems(name, "test", max_samples=config.max_samples)
        for name in config.sets
    }
    with replacing(config.weights) as folder:
        chosen = choose_weight(config, info, start)
        weights = average(load_weights(start), load_weights(config.adapter), chosen["weight"])
        write_rounded(weights, config.adapter, folder, info.resolve_base()[0])
        adapters = {"start": start, "shipped": folder}
        if not info.run["step"]:  # GRPO exported its initial adapter, so both adapters are equal
            del adapters["start"]
        judged = judge(config, info, adapters, sets)
        for found in (found for tools in judged.values() for found in tools.values()):
            found.setdefault("start", found["shipped"])
        figures = {
            name: {tool: figures_of(found) for tool, found in tools.items()}
            for name, tools in judged.items()
        }
        measured = {"shipped": True, "numbers": "bfloat16", "greedy_after_rounding": figures}
        measured |= {"average": chosen}
        replace_json(folder / "run.json", published_run(info.run) | measured)
        card = model_card(info, AdapterInfo.load(start), figures, judged, chosen)
        (folder / "README.md").write_text(card, encoding="utf-8")
    origin = harness.provenance("ship")
    for name in config.sets:
        origin["command"] = origin["command"].replace(name, public[name])
    verdicts = {
        name: {tool: verdicts_of(found) for tool, found in tools.items()}
        for name, tools in judged.items()
    }
    found = {"average": chosen, "sets": figures, "verdicts": verdicts}
    replace_json(config.results, origin | found)
    terminal.line(f"written: {config.weights}, {config.results}")
    return 0


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield an empty directory, which replaces `target` at the end of the block."""
    with writing_beside(target) as written:
        yield written
        size = sum(file.stat().st_size for file in written.iterdir()) / 1e6
        if size > LARGEST_MB:
            raise UsageError(
                f"{target}: {size:.1f} MB is too large to commit (at most {LARGEST_MB} MB)"
            )
        previous = target.with_name(target.name + ".prev")
        if target.exists():
            shutil.rmtree(previous, ignore_errors=True)
            target.rename(previous)
        written.rename(target)


def load_weights(adapter: Path) -> dict[str, Tensor]:
    weights = load_file(adapter / "adapter_model.safetensors")
    return {name: tensor.float() for name, tensor in weights.items()}


def average(
    start: Mapping[str, Tensor], trained: Mapping[str, Tensor], weight: float
) -> dict[str, Tensor]:
    """Return (1 - weight) · start + weight · trained for each LoRA matrix."""
    return {name: start[name].lerp(trained[name], weight) for name in trained}


def choose_weight(config: ShipConfig, info: AdapterInfo, start: Path) -> dict[str, Any]:
    """Choose the weight of the trained adapter in the average with its initial adapter.

    The weight with the highest accuracy is chosen, where the accuracies without and with the tool
    are averaged. It is 1 if nothing was compared.
    """
    if not (config.validation and info.dataset and info.run["step"]):
        return {"weight": 1.0, "problems": 0, "accuracy": {}}
    trained = info.run.get("config", {})
    problems = load_problems(
        info.dataset,
        "validation",
        max_samples=config.validation,
        columns=trained.get("columns"),
        rows=trained.get("split"),
    )
    first, last = load_weights(start), load_weights(config.adapter)
    with TemporaryDirectory() as scratch:
        folders = {f"{weight:g}": Path(scratch) / f"{weight:g}" for weight in WEIGHTS}
        for weight, folder in zip(WEIGHTS, folders.values(), strict=True):
            folder.mkdir()
            mixed = average(first, last, weight)
            write_rounded(mixed, config.adapter, folder, info.resolve_base()[0])
        tools = judge(config, info, folders, {"validation": problems})["validation"]
    found = {
        name: {tool: by_name[name].accuracy(True)["mean"] for tool, by_name in tools.items()}
        for name in folders
    }
    best = max(WEIGHTS, key=lambda weight: sum(found[f"{weight:g}"].values()))
    return {"weight": best, "problems": len(problems), "accuracy": found}


def write_rounded(weights: Mapping[str, Tensor], adapter: Path, folder: Path, model: str) -> None:
    """Write the weights in bf16, and the config of `adapter` with `model` as its base model."""
    peft_config = read_json(adapter / "adapter_config.json")
    peft_config["base_model_name_or_path"] = model  # may be a local path
    replace_json(folder / "adapter_config.json", peft_config)
    rounded = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(rounded, folder / "adapter_model.safetensors", metadata={"format": "pt"})


Found = dict[str, Evaluation]  # name of an adapter → evaluation
Judged = dict[str, dict[str, Found]]  # test set → tool → evaluations


def published_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of run.json without local paths."""
    kept = {name: run[name] for name in PUBLISHED if name in run}
    if kept.get("dataset"):
        kept["dataset"] = public_dataset(kept["dataset"])
    config = run.get("config", {})
    return kept | {"config": {name: config[name] for name in PUBLISHED_CONFIG if name in config}}


def judge(
    config: ShipConfig,
    info: AdapterInfo,
    adapters: dict[str, Path],
    sets: Mapping[str, Sequence[Problem]],
) -> Judged:
    """Evaluate each adapter greedily on each set, without a tool and with `info.tool`."""
    model, _ = info.resolve_base()
    tokenizer, base = load_tokenizer(model), load_base(model, pick_device())
    tools = dict.fromkeys(("none", info.tool))
    judged: Judged = {name: {tool: {} for tool in tools} for name in sets}
    for who, path in adapters.items():
        policy = load_adapter(base, path, trainable=False)
        for tool in tools:
            sampler = Sampler(policy, tokenizer, tool=load_tool(tool))
            for name, problems in sets.items():
                with terminal.progress(f"{name}, {who}, tool {tool}", len(problems)) as advance:
                    judged[name][tool][who] = evaluate(
                        sampler,
                        tokenizer,
                        problems,
                        info.format,
                        max_new_tokens=config.max_new_tokens,
                        on_finish=advance,
                    )
        base = take_adapters_off(policy)
    return judged


def figures_of(found: Found) -> dict[str, Any]:
    """Return the accuracies with intervals, and the lead of the shipped adapter over SFT."""
    before, after = (found[who].per_problem(strict=True) for who in NAMES)
    return {
        who: {grading: found[who].accuracy(strict) for grading, strict in GRADINGS.items()}
        | {"right_with_wrong_equation": found[who].right_with_wrong_equation(True)}
        for who in NAMES
    } | {"lead": paired_bootstrap(before, after)}


def verdicts_of(found: Found) -> dict[str, str]:
    """Return which adapters are right on each problem: "01" means only the shipped one."""
    scores = zip(*(found[who].per_problem(strict=True) for who in NAMES), strict=True)
    return {
        problem.id: "".join(str(int(score)) for score in pair)
        for (problem, _), pair in zip(found["start"].comparable, scores, strict=True)
    }


def model_card(
    info: AdapterInfo,
    start: AdapterInfo,
    figures: Mapping[str, Any],
    judged: Judged,
    averaged: Mapping[str, Any],
) -> str:
    """Render model_card.md.jinja with one right and one wrong answer."""
    examples: dict[str, tuple[Problem, str]] = {}
    last = [*judged.values()][-1][info.tool]["shipped"]
    for problem, (graded,) in zip(last.problems, last.groups, strict=True):
        kind = "Right" if graded.strict.correct else "Wrong"
        examples.setdefault(kind, (problem, graded.text))
    return harness.template(Path(__file__).with_name("model_card.md.jinja")).render(
        history=info.run,
        sft=start.run,
        sft_data=public_dataset(start.dataset or NAMELESS),
        grpo_data=public_dataset(info.dataset or NAMELESS),
        embedded=info.base_model == EMBEDDED_MODEL,
        hub_id=hub_base(info),
        figures=figures,
        averaged=averaged,
        examples=examples,
    )


if __name__ == "__main__":
    run_main(main, ShipConfig, description=__doc__)
