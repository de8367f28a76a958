"""The adapter that comes with the project: one cell's, rounded to bf16, with a model card.

The rounded adapter is judged again, greedily, before it is copied: the card says what it scores,
not what its fp32 original did. Without a cell the GRPO cell is taken that was best on the
*validation* problems; no test score decides.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.evidence.judging import GRADINGS, Judge
from benchmarks.evidence.model_card import card
from benchmarks.evidence.plan import ARMS, OURS, Cell, EvidenceConfig, read_json
from benchmarks.evidence.pools import JudgedSet, judged_sets
from benchmarks.evidence.results import collect, load_results, pooled_sets
from benchmarks.evidence.sections import summary_rows
from rlm.cli import terminal
from rlm.cli.options import UsageError
from rlm.evaluation.evaluator import Evaluation
from rlm.model import adapters
from rlm.model import base as models
from rlm.model import hardware as machine
from rlm.sampling import Sampler

LARGEST_MB = 12


def ship(config: EvidenceConfig) -> None:
    """Write the adapter, its run.json and its card under `config.weights`.

    Raises:
        UsageError: the cell is not done, or trains no adapter, or the adapter is too large.
    """
    machine.prepare_process()
    if config.cell and Path(config.cell).is_dir():
        from benchmarks.evidence.ship_demo import ship_demo

        return ship_demo(config, Path(config.cell))
    cell = config.named_cell() if config.cell else best_on_validation(config)
    if ARMS[cell.arm].kind == "base":
        raise UsageError(f"{cell.name} trains no adapter")
    source = config.folder(cell)
    if not (source / "result.json").exists():
        raise UsageError(f"{cell.name} is not done: python -m benchmarks.evidence")
    result = read_json(source / "result.json")
    with made_in(config.weights) as made:
        write_rounded(source / "adapter", made, config.model)
        judged = judge_rounded(config, made, judged_sets(config))
        write_json(made / "run.json", run_json(config, cell, result, judged))
        collect(config)
        (made / "README.md").write_text(cell_card(config, cell, result, judged), encoding="utf-8")
    terminal.line(f"{config.weights}: {cell.name} in bf16")


@contextmanager
def made_in(target: Path) -> Iterator[Path]:
    """An empty directory that takes the target's place when all is written in it.

    Raises:
        UsageError: more was written than should be committed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "adapter"
        made.mkdir()
        yield made
        size = sum(file.stat().st_size for file in made.iterdir()) / 1e6
        if size > LARGEST_MB:
            raise UsageError(f"{target}: {size:.1f} MB are too many to commit ({LARGEST_MB})")
        previous = target.with_name(target.name + ".prev")
        if target.exists():
            shutil.rmtree(previous, ignore_errors=True)
            target.rename(previous)
        made.chmod(0o755)
        made.rename(target)


def write_rounded(adapter: Path, made: Path, model: str) -> None:
    """The adapter's weights in bf16, and its config with the model's name instead of a place."""
    peft_config = read_json(adapter / "adapter_config.json")
    peft_config["base_model_name_or_path"] = model
    write_json(made / "adapter_config.json", peft_config)
    weights = load_file(adapter / "adapter_model.safetensors")
    rounded = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(rounded, made / "adapter_model.safetensors", metadata={"format": "pt"})


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def best_on_validation(config: EvidenceConfig) -> Cell:
    """The finished GRPO cell with the most right greedy answers on validation problems.

    Raises:
        UsageError: none is finished.
    """
    scores = {}
    for seed in config.seeds:
        file = config.folder(Cell(OURS, seed)) / "result.json"
        if file.exists():
            greedy = read_json(file)["curve"][-1]["greedy"]["strict"]
            scores[Cell(OURS, seed)] = sum(greedy) / len(greedy)
    if not scores:
        raise UsageError("no GRPO cell is done: python -m benchmarks.evidence")
    return max(scores, key=scores.__getitem__)


def judge_rounded(
    config: EvidenceConfig, adapter: Path, tests: Sequence[JudgedSet]
) -> dict[str, Evaluation]:
    """One greedy completion of each test problem."""
    tokenizer = models.load_tokenizer(config.model)
    base = models.load_base(config.model, machine.pick_device())
    policy = adapters.load_adapter(base, adapter, trainable=False)
    judge = Judge(Sampler(policy, tokenizer), tokenizer, config.max_new_tokens, seed=0)
    return {test.name: judge(test.problems, 1) for test in tests}


def run_json(
    config: EvidenceConfig, cell: Cell, result: dict[str, Any], judged: Mapping[str, Evaluation]
) -> dict[str, Any]:
    """The adapter's own, without this machine's paths, and where the cell came from."""
    run = adapters.read_run(config.folder(cell) / "adapter")
    kept = {k: run[k] for k in ("stage", "base_model", "base_hash", "quantize", "step") if k in run}
    word_problems = config.dataset == "word-problems"
    return kept | {
        "dataset": "word-problems:1" if word_problems else config.dataset.partition(":")[0],
        "cell": cell.name,
        "command": result["command"],
        "commit": result["commit"],
        "date": result["date"],
        "numbers": "bfloat16",
        "greedy_after_rounding": {name: counts(found) for name, found in judged.items()},
        "config": {"reasoning_format": "deepseek"},
    }


def counts(found: Evaluation) -> dict[str, int]:
    """How many of a test set's problems are right."""
    right = {name: int(sum(found.per_problem(strict))) for name, strict in GRADINGS.items()}
    return right | {"total": len(found.problems)}


def cell_card(
    config: EvidenceConfig, cell: Cell, result: dict[str, Any], judged: Mapping[str, Evaluation]
) -> str:
    """What the card says of a cell of the grid."""
    settings, results = result["settings"], load_results(config.docs / "evidence")
    chosen = "It was chosen by validation problems; the test problems decided nothing."
    return card(
        title=f"{ARMS[cell.arm].title}, seed {cell.seed}",
        base=settings["model"],
        dataset=settings["dataset"],
        origin=f"`{result['command']}`, then `python -m benchmarks.evidence ship {cell.name}`; "
        f"commit {result['commit']}, {result['date']}. SFT on {settings['solved']} worked "
        f"solutions ({settings['sft_passes']} passes), then {settings['steps']} steps of "
        f"{settings['batch_size']} × {settings['group_size']} completions "
        f"({result['training']['seconds'] / 60:.1f} minutes on {result['machine']['cpu']}, "
        f"{result['machine']['cores']} cores).",
        judged=judged,
        before_rounding=[
            "All arms of the grid it is one of, before rounding, over seeds and problems:",
            "",
            *summary_rows(results, pooled_sets(results)),
        ],
        limits=[
            "The cell was named by hand." if config.cell else chosen,
            "Its seed is one of several: the table above has their spread.",
        ],
    )
