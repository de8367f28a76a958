"""Evaluates a cell on the test sets.

The scores and completions are written to `scores/`, and the data for the report to `result.json`.
Each test set is written when it is complete, so a kill loses at most one test set.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks import harness
from benchmarks.evidence.plan import (
    ARMS,
    Cell,
    EvidenceConfig,
    made_once,
    read_json,
)
from benchmarks.evidence.pools import JudgedSet, judged_sets, pools
from rlm.data import FORMATS, Problem
from rlm.evaluation import GRADINGS, Evaluation, evaluate
from rlm.model import load_adapter, load_base, load_tokenizer, pick_device, prepare_process
from rlm.sampling import Sampler
from rlm.tools import load_tool

FORMAT = FORMATS["deepseek"]
SHOTS = 8  # worked examples in the prompt of `base_few`; 8 scored best of 2, 4 and 8


class Judge:
    """Samples and grades completions with a base model and an optional adapter."""

    def __init__(
        self,
        config: EvidenceConfig,
        cell: Cell,
        max_new_tokens: int,
        adapter: Path | None,
        examples: Sequence[tuple[str, str]] = (),
    ) -> None:
        tokenizer, base = load_tokenizer(config.model), load_base(config.model, pick_device())
        self.model = load_adapter(base, adapter, trainable=False) if adapter else base
        sampler = Sampler(self.model, tokenizer, tool=load_tool(config.tool))
        options = {"max_new_tokens": max_new_tokens, "seed": cell.seed, "examples": examples}
        self.evaluate = partial(evaluate, sampler, tokenizer, format=FORMAT, **options)

    def __call__(self, problems: Sequence[Problem], k: int) -> Evaluation:
        """Sample and grade k completions per problem: greedily if k is 1, else at temperature 1."""
        return self.evaluate(problems, k=k, temperature=0.0 if k == 1 else 1.0)


def judge(config: Mapping[str, Any], arm: str, seed: int) -> dict[str, Any]:
    """Evaluate a cell on all test sets, and write `result.json`, which marks the cell as done."""
    prepare_process()
    settings, cell = EvidenceConfig(**config), Cell(arm, seed)
    folder = settings.folder(cell)
    made_once(folder / "result.json", partial(_judge, settings, cell, folder))
    # Checkpoints take hundreds of megabytes, and are needed only to resume and to plot the curve.
    for leftover in (folder / "train").glob("checkpoint*"):
        shutil.rmtree(leftover)
    return {}


def _judge(config: EvidenceConfig, cell: Cell, folder: Path) -> dict[str, Any]:
    started, is_base = time.monotonic(), ARMS[cell.arm].kind == "base"
    learned = pools(config, cell.seed)
    shown = learned.solved[:SHOTS] if cell.arm == "base_few" else ()
    examples = [(p.question, FORMAT.completion(p.solution, p.answer)) for p in shown]
    limit = config.base_new_tokens if is_base else config.max_new_tokens
    examiner = Judge(config, cell, limit, None if is_base else folder / "adapter", examples)
    training = {} if is_base else read_json(folder / "train.json")
    tests = {}
    for test in judged_sets(config, base=is_base):
        file = folder / "scores" / f"{test.name}.json"
        tests[test.name] = made_once(file, partial(_judged, config, examiner, test))["scores"]
    curve = [] if is_base else _curve(config, cell, examiner, learned.validation, training)
    return {
        "cell": cell.name,
        "arm": cell.arm,
        "title": ARMS[cell.arm].title,
        "seed": cell.seed,
        "training": training,
        "curve": curve,
        "tests": tests,
        "judging_seconds": time.monotonic() - started,
        "settings": {k: _public(k, v) for k, v in config.settings().items()},
        **harness.provenance("evidence"),
        "command": command_of(config, cell),
    }


def command_of(config: EvidenceConfig, cell: Cell) -> str:
    """Return the command that repeats this cell in an empty grid, after the cells that it needs."""
    default = EvidenceConfig()
    spelled = [] if cell.seed in default.seeds else [f"--seeds {cell.seed}"]
    usual = default.settings()
    for name, value in config.settings().items():
        if value != usual[name]:
            spelled.append(f"--{name.replace('_', '-')} {_public(name, value)}")
    return " ".join(["python -m benchmarks.evidence --cells", cell.name, *spelled])


def _public(name: str, value: object) -> object:
    """Return a setting's value without local paths, which mean nothing to a reader."""
    if name == "dataset" and str(value).startswith("gsm8k:"):
        return "gsm8k:DIRECTORY"
    return Path(str(value)).name if name == "model" and Path(str(value)).is_dir() else value


# --- a test set ---------------------------------------------------------------------------------


def _judged(config: EvidenceConfig, examiner: Judge, test: JudgedSet) -> dict[str, Any]:
    """Evaluate one test set, and return its completions and the scores that the report needs."""
    greedy = examiner(test.problems, 1)
    sampled = examiner(test.problems[: test.sampled], config.samples)
    texts = {
        kind: {
            problem.id: [graded.text for graded in group]
            for problem, group in zip(found.problems, found.groups, strict=True)
        }
        for kind, found in (("greedy", greedy), ("sampled", sampled))
    }
    return {"scores": scores_of(greedy, sampled), "texts": texts}


def scores_of(greedy: Evaluation, sampled: Evaluation) -> dict[str, Any]:
    """Return the scores of a test set: 1 for each right completion, and 0 for each other one."""
    return {
        "problems": [problem.id for problem in greedy.problems],
        "greedy": {name: "".join(_bits(greedy, strict)) for name, strict in GRADINGS.items()}
        | _rates(greedy),
        "sampled": {name: _bits(sampled, strict) for name, strict in GRADINGS.items()}
        | _rates(sampled),
    }


def _bits(result: Evaluation, strict: bool) -> list[str]:
    """Return a string per problem, with 1 for each right completion and 0 for each other one."""
    return ["".join(str(int(g.verdict(strict).correct)) for g in group) for group in result.groups]


def _rates(result: Evaluation) -> dict[str, Any]:
    return {
        "format": result.format_rate,
        "truncated": result.truncated_rate,
        "tokens": result.length_mean,
    }


# --- accuracy during training -------------------------------------------------------------------


def _curve(
    config: EvidenceConfig,
    cell: Cell,
    examiner: Judge,
    validation: Sequence[Problem],
    training: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return the validation scores at some steps and at the end, with the seconds and samples."""
    rows, scores, model = [], config.folder(cell) / "scores", examiner.model
    final = {n: t.clone() for n, t in model.named_parameters() if "lora_" in n}
    validate = partial(_validate, config, examiner, validation)
    on_the_way = {}  # only the methods `grpo` and `trl` have points before the end
    if not ARMS[cell.arm].role and "seconds_until" in training:
        on_the_way = _points(config, config.folder(cell) / "train")
    for step, folder in on_the_way.items():
        model.load_state_dict(_adapter_of(folder, set(final)), strict=False)
        cost = {name: training[f"{name}_until"][step - 1] for name in ("seconds", "samples")}
        rows.append(cost | made_once(scores / f"step_{step}.json", validate))
    model.load_state_dict(final, strict=False)
    end = {"seconds": training["seconds"], "samples": training.get("samples", 0)}
    return [*rows, end | made_once(scores / "end.json", validate)]


def _points(config: EvidenceConfig, folder: Path) -> dict[int, Path]:
    """Return the checkpoints by step, without the last step, whose adapter is in `adapter/`."""
    found = {int(p.name[5:]): p for p in folder.glob("checkpoints/step_*")}  # ours
    found |= {int(p.name[11:]): p for p in folder.glob("checkpoint-*")}  # TRL's
    return {step: found[step] for step in sorted(found) if 0 < step < config.steps}


def _validate(
    config: EvidenceConfig, examiner: Judge, validation: Sequence[Problem]
) -> dict[str, Any]:
    found = {"greedy": examiner(validation, 1)}
    if config.curve_samples > 1:
        found["sampled"] = examiner(validation, config.curve_samples)
    return {
        kind: {name: result.per_problem(strict) for name, strict in GRADINGS.items()}
        for kind, result in found.items()
    }


def _adapter_of(folder: Path, names: set[str]) -> dict[str, Any]:
    """Load the adapter of a checkpoint, ours or PEFT's."""
    ours, prefix = folder / "state.safetensors", "adapter/"
    if ours.exists():
        saved = load_file(ours)
        found = {n.removeprefix(prefix): t for n, t in saved.items() if n.startswith(prefix)}
    else:
        saved = load_file(folder / "adapter_model.safetensors")
        found = {n.replace(".weight", ".default.weight"): t for n, t in saved.items()}
    if set(found) != names:
        raise RuntimeError(f"{folder} contains another adapter's tensors")
    return found
