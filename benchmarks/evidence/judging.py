"""A cell on the test sets: every completion in `judged/`, what the report needs in `result.json`.

Each test set is written when it is complete, so a kill costs one set at most.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks import harness
from benchmarks.evidence.base_prompts import AS_TRAINED, Prompt, candidate_prompts
from benchmarks.evidence.plan import (
    ARMS,
    Cell,
    EvidenceConfig,
    made_once,
    read_json,
    write_atomically,
)
from benchmarks.evidence.pools import JudgedSet, judged_sets, pools
from benchmarks.evidence.reward_hacking import reward_hacking
from benchmarks.evidence.training import points
from benchmarks.trainers import FORMAT
from rlm.data import Problem
from rlm.evaluation import Evaluation, Graded, evaluate
from rlm.grading import majority_score
from rlm.model import load_adapter, load_base, load_tokenizer, pick_device, prepare_process
from rlm.sampling import Sampler

VOTERS = 8  # of maj@8
GRADINGS = {"strict": True, "lenient": False}


@dataclass
class Judge:
    """A model on problems, under one prompt."""

    sampler: Sampler
    tokenizer: Any
    max_new_tokens: int
    seed: int
    prompt: Prompt = AS_TRAINED

    def __call__(self, problems: Sequence[Problem], k: int) -> Evaluation:
        """One greedy completion of each (k = 1), or k drawn at the training temperature."""
        return evaluate(
            self.sampler,
            self.tokenizer,
            problems,
            FORMAT,
            max_new_tokens=self.max_new_tokens,
            temperature=0.0 if k == 1 else 1.0,
            k=k,
            seed=self.seed,
            examples=self.prompt.examples,
            system_prompt=self.prompt.system_prompt,
        )


def judge(config: EvidenceConfig, cell: Cell) -> None:
    """Judge a trained cell on all test sets and write its `result.json`, the mark of being done."""
    prepare_process()
    started = time.monotonic()
    folder, is_base = config.folder(cell), ARMS[cell.arm].kind == "base"
    tokenizer = load_tokenizer(config.model)
    model = load_base(config.model, pick_device())
    training: dict[str, Any] = {}
    if not is_base:
        model = load_adapter(model, folder / "adapter", trainable=False)
        training = read_json(folder / "train.json")
    limit = config.base_new_tokens if is_base else config.max_new_tokens
    examiner = Judge(Sampler(model, tokenizer), tokenizer, limit, cell.seed)
    if is_base:
        training = _best_prompt(config, cell, examiner)
    tests = {}
    for test in judged_sets(config, base=is_base):
        file = folder / "judged" / f"{test.name}.json"
        tests[test.name] = summed_up(made_once(file, partial(_judged, config, examiner, test)))
    validation = pools(config, cell.seed).validation
    curve = [] if is_base else _curve(config, cell, examiner, model, validation, training)
    result = {
        "cell": cell.name,
        "arm": cell.arm,
        "title": ARMS[cell.arm].title,
        "seed": cell.seed,
        "training": training,
        "curve": curve,
        "tests": tests,
        "judging_seconds": time.monotonic() - started,
        "settings": {k: _public(k, v) for k, v in config.settings().items()},
    }
    made_by = harness.provenance("evidence") | {"command": command_of(config, cell)}
    write_atomically(folder / "result.json", result | made_by)


def _judged(config: EvidenceConfig, examiner: Judge, test: JudgedSet) -> dict[str, Any]:
    greedy = examiner(test.problems, 1)
    sampled = examiner(test.problems[: test.sampled], config.samples)
    return {"greedy": as_rows(greedy), "sampled": as_rows(sampled)}


def command_of(config: EvidenceConfig, cell: Cell) -> str:
    """What runs this cell again in an empty grid, after the ones it needs."""
    default = EvidenceConfig()
    usual = default.settings()
    changed = {k: v for k, v in config.settings().items() if v != usual[k]}
    spelled = [] if cell.seed in default.seeds else [f"--seeds {cell.seed}"]
    for name, value in changed.items():
        option = f"{'no-' if value is False else ''}{name.replace('_', '-')}"
        shown = "" if isinstance(value, bool) else f" {_public(name, value)}"
        spelled.append(f"--{option}{shown}")
    return " ".join(["python -m benchmarks.evidence --cells", cell.name, *spelled])


def _public(name: str, value: object) -> object:
    """A directory's place on one machine says nothing to the reader of a report."""
    if name == "dataset" and str(value).startswith("gsm8k:"):
        return "gsm8k:DIRECTORY"
    return Path(str(value)).name if name == "model" and Path(str(value)).is_dir() else value


# --- rows and sums ------------------------------------------------------------------------------


def as_rows(result: Evaluation) -> list[dict[str, Any]]:
    """Problems and completions, to read and to sum up."""
    return [
        {
            "id": problem.id,
            "family": str(problem.columns.get("family", "")),
            "question": problem.question,
            "answer": problem.answer,
            "solution": problem.solution,
            "completions": [_row(graded) for graded in group],
            "majority": {name: _majority(group, strict) for name, strict in GRADINGS.items()},
        }
        for problem, group in zip(result.problems, result.groups, strict=True)
    ]


def _row(graded: Graded) -> dict[str, Any]:
    return {
        "text": graded.text,
        "strict": graded.strict.reason,
        "lenient": graded.lenient.reason,
        "tokens": graded.tokens,
        "truncated": graded.truncated,
    }


def _majority(group: Sequence[Graded], strict: bool) -> float:
    """maj@8, mean over the disjoint groups of 8 (of all, where there are fewer)."""
    size = min(VOTERS, len(group))
    starts = range(0, len(group) - size + 1, size)
    votes = [majority_score([g.verdict(strict) for g in group[i : i + size]]) for i in starts]
    return sum(votes) / len(votes)


def summed_up(judged: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """One test set as the report keeps it: a zero or a one for each completion, no texts."""
    greedy, sampled = judged["greedy"], judged["sampled"]
    return {
        "problems": [row["id"] for row in greedy],
        "families": [row["family"] for row in greedy],
        "greedy": {name: "".join(_bits(row, name) for row in greedy) for name in GRADINGS}
        | _rates(greedy),
        "sampled": {name: [_bits(row, name) for row in sampled] for name in GRADINGS}
        | {"majority": {n: [row["majority"][n] for row in sampled] for n in GRADINGS}}
        | _rates(sampled),
    }


def _bits(row: dict[str, Any], grading: str) -> str:
    return "".join("1" if c[grading] == "correct" else "0" for c in row["completions"])


def _rates(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    drawn = [(row, c) for row in rows for c in row["completions"]]
    read = [(c["text"], row["answer"], c["lenient"] == "correct") for row, c in drawn]
    count = len(drawn)
    return {
        "format": sum(c["strict"] in ("correct", "wrong") for _, c in drawn) / count,
        "truncated": sum(c["truncated"] for _, c in drawn) / count,
        "tokens": sum(c["tokens"] for _, c in drawn) / count,
        "watch": reward_hacking(read),
    }


# --- along the way ------------------------------------------------------------------------------


def _curve(
    config: EvidenceConfig,
    cell: Cell,
    examiner: Judge,
    model: Any,
    validation: Sequence[Problem],
    training: dict[str, Any],
) -> list[dict[str, Any]]:
    """Validation after some of the steps and at the end, against seconds and samples."""
    rows, judged = [], config.folder(cell) / "judged"
    final = {name: tensor.clone() for name, tensor in _lora(model).items()}
    validate = partial(_validate, config, examiner, validation)
    on_the_way = {}  # SFT's checkpoints are by the clock, and of no curve
    if not ARMS[cell.arm].role and "seconds_until" in training:
        on_the_way = points(config, cell)
    for step, folder in on_the_way.items():
        model.load_state_dict(_adapter_of(folder, set(final)), strict=False)
        cost = {name: training[f"{name}_until"][step - 1] for name in ("seconds", "samples")}
        rows.append(cost | made_once(judged / f"step_{step}.json", validate))
    model.load_state_dict(final, strict=False)
    end = {"seconds": training["seconds"], "samples": training.get("samples", 0)}
    return [*rows, end | made_once(judged / "end.json", validate)]


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


def _lora(model: Any) -> dict[str, Any]:
    return {name: tensor for name, tensor in model.named_parameters() if "lora_" in name}


def _adapter_of(folder: Path, names: set[str]) -> dict[str, Any]:
    """The adapter of a checkpoint of ours, or of one that PEFT wrote.

    Raises:
        RuntimeError: its tensors are not those of `names`.
    """
    ours, prefix = folder / "state.safetensors", "adapter/"
    if ours.exists():
        saved = load_file(ours)
        found = {n.removeprefix(prefix): t for n, t in saved.items() if n.startswith(prefix)}
    else:
        saved = load_file(folder / "adapter_model.safetensors")
        found = {n.replace(".weight", ".default.weight"): t for n, t in saved.items()}
    if set(found) != names:
        raise RuntimeError(f"{folder} holds another adapter's tensors")
    return found


# --- the base at its best -----------------------------------------------------------------------


def _best_prompt(config: EvidenceConfig, cell: Cell, examiner: Judge) -> dict[str, Any]:
    """Choose the prompt under which the base is right most often on validation problems, leniently.

    The base did not learn our tags: it is asked in several ways and takes the best of them.
    """
    candidates = {p.name: p for p in candidate_prompts(config, few=cell.arm == "base_few")}

    def try_all() -> dict[str, Any]:
        validation = pools(config, cell.seed).validation[: config.prompt_problems]
        tried = {}
        for name, prompt in candidates.items():
            scores = replace(examiner, prompt=prompt)(validation, 1).per_problem(strict=False)
            tried[name] = sum(scores) / len(scores)
        best = max(tried, key=tried.__getitem__)
        return {"prompts": tried, "prompt": best, "tried_on": len(validation)}

    found = made_once(config.folder(cell) / "prompts.json", try_all)
    examiner.prompt = candidates[found["prompt"]]
    return found
