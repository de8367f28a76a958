"""Ships a trained adapter: rounds it to bf16, judges these very weights, writes its model card.

Each test set is answered greedily by the adapter and by the SFT adapter that it started from, with
the tool that it was trained with and without. The figures go into the card, and with each problem's
verdict into --results.

    python -m benchmarks.ship runs/shipped/final_rlm_lora --sets elementary,data/everyday.jsonl
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch
from safetensors.torch import load_file, save_file

from benchmarks import harness
from benchmarks.evidence.plan import read_json
from rlm.cli import UsageError, check_values, flag, run_main, terminal
from rlm.data import FORMATS, Problem, load_problems
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
)
from rlm.runs import replace_json
from rlm.sampling import Sampler
from rlm.tools import load_tool

LARGEST_MB = 20
KEPT = (
    *("stage", "base_model", "base_hash", "dataset", "tool", "step", "commit"),
    *("start_accuracy", "accuracy", "validated_on"),
)
CONFIG = ("reasoning_format", "tool", "steps", "batch_size", "group_size", "learning_rate")
NAMES = ("start", "shipped")  # the SFT adapter, and the one that is shipped


@dataclass(frozen=True)
class ShipConfig:
    adapter: Path | None = flag(None, "what train_grpo.py wrote", positional=True)
    sets: tuple[str, ...] = flag(
        ("elementary", "data/everyday.jsonl"), "data sets whose test splits are answered"
    )
    max_samples: int | None = flag(None, "problems of each (none: all)", min=1)
    max_new_tokens: int = flag(160, "longest completion", min=1)
    weights: Path = flag(Path("weights/final_rlm_lora"), "where the adapter goes")
    results: Path = flag(Path("docs/results/shipped/evaluation.json"), "where the figures go")

    def __post_init__(self) -> None:
        check_values(self)
        if self.adapter is None:
            raise ValueError("name the adapter: python -m benchmarks.ship runs/grpo_lora")


def main(config: ShipConfig) -> int:
    """
    Raises:
        UsageError: the directory holds no adapter of train_grpo.py, or it is too large.
    """
    prepare_process()
    info = AdapterInfo.load(config.adapter)
    if info.run.get("stage") != "grpo" or not info.run.get("start_adapter"):
        raise UsageError(f"{config.adapter} was not made by train_grpo.py from an SFT adapter")
    start = Path(info.run["start_adapter"])
    with replacing(config.weights) as folder:
        write_rounded(config.adapter, folder, info.run["base_model"])
        sets = {
            title(name): load_problems(name, "test", max_samples=config.max_samples)
            for name in config.sets
        }
        is_start = info.run["step"] == 0  # no step of GRPO was better on validation
        adapters = {"shipped": folder} if is_start else {"start": start, "shipped": folder}
        judged = judge(config, info, adapters, sets)
        figures = summarize(judged)
        replace_json(folder / "run.json", run_json(info.run, figures))
        card = model_card(info, AdapterInfo.load(start).run, figures, judged)
        (folder / "README.md").write_text(card, encoding="utf-8")
    config.results.parent.mkdir(parents=True, exist_ok=True)
    origin = harness.provenance("ship")
    for name in config.sets:
        origin["command"] = origin["command"].replace(name, without_place(name))
    figures_of_all = {"sets": figures, "verdicts": verdicts(judged)}
    replace_json(config.results, origin | figures_of_all)
    terminal.line(f"{config.weights}: {config.adapter} in bf16")
    return 0


def title(dataset: str) -> str:
    """The name of a data set, or of its file, without this machine's directories."""
    name, colon, _ = dataset.partition(":")
    return name if colon else Path(dataset).stem


def without_place(dataset: str) -> str:
    """How a data set is named in a record: as on the command line, without directories."""
    name, colon, _ = dataset.partition(":")
    return f"{name}:DIRECTORY" if colon else Path(dataset).name


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


Judged = dict[str, dict[str, dict[str, Evaluation]]]  # test set → tool → NAMES


def judge(
    config: ShipConfig,
    info: AdapterInfo,
    adapters: Mapping[str, Path],
    sets: Mapping[str, Sequence[Problem]],
) -> Judged:
    """One greedy completion of each problem by each adapter, without a tool and with its own.

    Without a start among the adapters what is shipped is the start.
    """
    model, format = info.run["base_model"], FORMATS[info.run["config"]["reasoning_format"]]
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
                        format,
                        max_new_tokens=config.max_new_tokens,
                        on_finish=advance,
                    )
        base = policy.unload()
    if "start" not in adapters:
        for tools_of_set in judged.values():
            for found in tools_of_set.values():
                found["start"] = found["shipped"]
    return judged


def summarize(judged: Judged) -> dict[str, Any]:
    """Accuracies with their intervals, and how far the shipped adapter is ahead of its start."""
    figures: dict[str, Any] = {}
    for name, tools in judged.items():
        figures[name] = {}
        for tool, found in tools.items():
            scores = [found[who].per_problem(strict=True) for who in NAMES]
            lead = paired_bootstrap(*scores)
            figures[name][tool] = {
                who: {grading: found[who].accuracy(s) for grading, s in GRADINGS.items()}
                | {"right_with_wrong_equation": found[who].right_with_wrong_equation(True)}
                for who in NAMES
            } | {"lead": {"points": lead.points, "low": lead.low, "high": lead.high}}
    return figures


def verdicts(judged: Judged) -> dict[str, Any]:
    """Whether each adapter was right on each problem: "01" is the shipped one alone."""
    return {
        name: {
            tool: {
                problem.id: "".join(str(int(found[who].per_problem(True)[i])) for who in NAMES)
                for i, problem in enumerate(found["start"].problems)
            }
            for tool, found in tools.items()
        }
        for name, tools in judged.items()
    }


def run_json(history: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    """The run's own run.json, without this machine's paths."""
    kept = {key: history[key] for key in KEPT if key in history}
    kept["dataset"] = "+".join(map(title, history["dataset"].split("+")))
    config = {name: history["config"][name] for name in CONFIG}
    kept["shipped"] = True  # `save_adapter` keeps it when another takes its place
    return kept | {"numbers": "bfloat16", "config": config, "greedy_after_rounding": figures}


def model_card(
    info: AdapterInfo,
    sft: Mapping[str, Any],
    figures: Mapping[str, Any],
    judged: Judged,
) -> str:
    """The card of model_card.md.jinja.

    Args:
        sft: run.json of the adapter that it started from.
    """
    history = info.run
    embedded, examples = history["base_model"] == EMBEDDED_MODEL, {}
    first = next(reversed(list(judged.values())))[history["config"]["tool"]]["shipped"]
    for problem, (graded,) in zip(first.problems, first.groups, strict=True):
        kind = "Right" if graded.strict.correct else "Wrong"
        examples.setdefault(kind, (problem, graded.text))
    card = Path(__file__).with_name("model_card.md.jinja").read_text(encoding="utf-8")
    options = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return jinja2.Template(card, keep_trailing_newline=True, **options).render(
        history=history,
        sft=sft,
        sft_data="+".join(map(title, sft["dataset"].split("+"))),
        grpo_data="+".join(map(title, history["dataset"].split("+"))),
        embedded=embedded,
        hub_id=hub_base(info),
        figures=figures,
        examples=examples,
    )


if __name__ == "__main__":
    run_main(main, ShipConfig, description=__doc__)
