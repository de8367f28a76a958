"""A cell on the test sets: every completion in `judged/`, what the report needs in `result.json`.

Each test set is written when it is complete, so a kill costs one set at most.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.arms import FORMAT
from benchmarks.evidence.plan import (
    ARMS,
    Cell,
    EvidenceConfig,
    read_json,
    write_atomically,
)
from benchmarks.evidence.pools import judged_sets, pools
from benchmarks.evidence.reading import watch
from benchmarks.evidence.training import points
from rlm.data.problem import Problem
from rlm.evaluation.evaluate import Evaluation, Graded, evaluate
from rlm.grading.voting import majority_score
from rlm.model import adapters
from rlm.model import base as models
from rlm.model import hardware as machine
from rlm.sampling import Sampler

VOTERS = 8  # of maj@8
GRADINGS = {"strict": True, "lenient": False}
PROMPT_SEED = 0


@dataclass(frozen=True)
class Prompt:
    """How a base model is asked. Trained models are asked as they were trained."""

    name: str
    system_prompt: str | None = None  # None: the format's own
    examples: tuple[tuple[str, str], ...] = ()


@dataclass
class Judge:
    """A model on problems, under one prompt."""

    sampler: Sampler
    tokenizer: Any
    max_new_tokens: int
    seed: int
    prompt: Prompt = Prompt("as trained")

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
    machine.prepare_process()
    started = time.monotonic()
    folder, is_base = config.folder(cell), ARMS[cell.arm].kind == "base"
    tokenizer = models.load_tokenizer(config.model)
    model = models.load_base(config.model, machine.pick_device())
    training: dict[str, Any] = {}
    if not is_base:
        model = adapters.load_adapter(model, folder / "adapter", trainable=False)
        training = read_json(folder / "train.json")
    limit = config.base_new_tokens if is_base else config.max_new_tokens
    examiner = Judge(Sampler(model, tokenizer), tokenizer, limit, cell.seed)
    if is_base:
        training = _best_prompt(config, cell, examiner)
    tests = {}
    for test in judged_sets(config, base=is_base):
        file = folder / "judged" / f"{test.name}.json"
        if not file.exists():
            greedy = examiner(test.problems, 1)
            sampled = examiner(test.problems[: test.sampled], config.samples)
            write_atomically(file, {"greedy": as_rows(greedy), "sampled": as_rows(sampled)})
        tests[test.name] = summed_up(read_json(file))
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
    count = len(drawn)
    return {
        "format": sum(c["strict"] in ("correct", "wrong") for _, c in drawn) / count,
        "truncated": sum(c["truncated"] for _, c in drawn) / count,
        "tokens": sum(c["tokens"] for _, c in drawn) / count,
        "watch": watch([(c["text"], r["answer"], c["lenient"] == "correct") for r, c in drawn]),
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
    rows = []
    final = {name: tensor.clone() for name, tensor in _lora(model).items()}
    on_the_way = {}  # SFT's checkpoints are by the clock, and of no curve
    if not ARMS[cell.arm].role and "seconds_until" in training:
        on_the_way = points(config, cell)
    for step, folder in on_the_way.items():
        file = config.folder(cell) / "judged" / f"step_{step}.json"
        if not file.exists():
            _take(model, folder)
            write_atomically(file, _validate(config, examiner, validation))
        cost = {name: training[f"{name}_until"][step - 1] for name in ("seconds", "samples")}
        rows.append(cost | read_json(file))
    if rows:
        model.load_state_dict(final, strict=False)
    file = config.folder(cell) / "judged" / "end.json"
    if not file.exists():
        write_atomically(file, _validate(config, examiner, validation))
    end = {"seconds": training["seconds"], "samples": training.get("samples", 0)}
    return [*rows, end | read_json(file)]


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


def _take(model: Any, folder: Path) -> None:
    """Put an adapter of a point on the model: a checkpoint of ours, or one that PEFT wrote.

    Raises:
        RuntimeError: its tensors are not those of the model's adapter.
    """
    from safetensors.torch import load_file

    if (folder / "state.safetensors").exists():
        saved = load_file(folder / "state.safetensors")
        tensors = {
            name.removeprefix("adapter/"): tensor
            for name, tensor in saved.items()
            if name.startswith("adapter/")
        }
    else:
        saved = load_file(folder / "adapter_model.safetensors")
        tensors = {name.replace(".weight", ".default.weight"): t for name, t in saved.items()}
    if set(tensors) != set(_lora(model)):
        raise RuntimeError(f"{folder} holds another adapter's tensors")
    model.load_state_dict(tensors, strict=False)


# --- the base at its best -----------------------------------------------------------------------


def _best_prompt(config: EvidenceConfig, cell: Cell, examiner: Judge) -> dict[str, Any]:
    """Choose the prompt under which the base is right most often on validation problems, leniently.

    The base did not learn our tags: it is asked in several ways and takes the best of them.
    """
    file = config.folder(cell) / "prompts.json"
    candidates = {p.name: p for p in candidate_prompts(config, few=cell.arm == "base_few")}
    if not file.exists():
        validation = pools(config, cell.seed).validation[: config.prompt_problems]
        tried = {}
        for name, prompt in candidates.items():
            examiner.prompt = prompt
            scores = examiner(validation, 1).per_problem(strict=False)
            tried[name] = sum(scores) / len(scores)
        best = max(tried, key=tried.__getitem__)
        write_atomically(file, {"prompts": tried, "prompt": best, "tried_on": len(validation)})
    found = read_json(file)
    examiner.prompt = candidates[found["prompt"]]
    return found


def candidate_prompts(config: EvidenceConfig, *, few: bool) -> list[Prompt]:
    """With and without our tags; few-shot with 2, 4 and 8 worked examples that SFT learns, too."""
    steps = "Solve the problem step by step. End with: The answer is NUMBER."
    if not few:
        return [Prompt("our tags"), Prompt("no system prompt", ""), Prompt("step by step", steps)]
    solved = pools(config, PROMPT_SEED).solved
    found = []
    for shots in (2, 4, 8):
        shown = solved[:shots]
        tagged = tuple((p.question, FORMAT.completion(p.solution, p.answer)) for p in shown)
        plain = tuple((p.question, f"{p.solution}\nThe answer is {p.answer}.") for p in shown)
        found.append(Prompt(f"our tags, {shots} examples", None, tagged))
        found.append(Prompt(f"step by step, {shots} examples", steps, plain))
    return found
