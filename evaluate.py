"""How much did training help? The base, the SFT and the GRPO adapter on the same problems.

Greedy accuracy under both gradings with 95 % intervals, each row compared with the one above it;
with --samples also mean@k, maj@k and pass@k. What no flag names (model, data set, tags, 4-bit) is
taken from the run.json of the last adapter.

    python evaluate.py                                   # weights/sft_lora, weights/final_rlm_lora
    python evaluate.py --dataset gsm8k --max-samples 500 --samples 8
    python evaluate.py --base-only --model smollm2-135m  # how good is it before any training?
    python evaluate.py --audit-reward                    # does the verifier miss right answers?
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from rlm import terminal
from rlm.audit import audit_run
from rlm.config import UsageError, check_values, explicit, flag, to_dict
from rlm.data import is_file, load_problems
from rlm.evaluation import Evaluation, evaluate, mcnemar, paired_bootstrap
from rlm.plots import accuracy_bars
from rlm.problems import Problem
from rlm.prompts import FORMATS
from rlm.quantize import QUANTIZATIONS, trained_on
from rlm.records import replace_json
from rlm.script import run_main

GRADINGS = {"strict": True, "lenient": False}
ADAPTERS = {"SFT": ("sft_adapter", "train_sft.py"), "GRPO": ("adapter", "train_grpo.py")}
EMBEDDED_NOTE = "smollm2-135m is dequantised Q4_1: published SmolLM2 figures do not apply"


@dataclass
class EvaluateConfig:
    model: str | None = flag(None, "hub id, directory, or smollm2-135m (none: the adapter's base)")
    dataset: str | None = flag(None, "as for training (none: the adapter's, else word-problems)")
    split: str | None = flag(
        None, "which part of the data set (none: test; of a file that was trained on: validation)"
    )
    max_samples: int | None = flag(200, "problems (none: the whole split)", min=1)
    sft_adapter: Path | None = flag(Path("weights/sft_lora"), "SFT row; none leaves it out")
    adapter: Path | None = flag(Path("weights/final_rlm_lora"), "GRPO row; none leaves it out")
    base_only: bool = flag(False, "no adapters")
    few_shot: int = flag(4, "worked examples in a second row of the base (0: no such row)", min=0)
    samples: int = flag(0, "completions to sample of each problem, besides the greedy one", min=0)
    temperature: float = flag(
        1.0, "of these samples; a greedy completion is always reported", above=0
    )
    max_new_tokens: int = flag(256, "longest completion", min=1)
    reasoning_format: str | None = flag(
        None, "tags (none: the adapter's, else deepseek)", choices=tuple(FORMATS)
    )
    quantize: str = flag(
        "auto",
        "quantize the base (bitsandbytes) (auto: as in training)",
        choices=("auto", *QUANTIZATIONS),
    )
    audit_reward: bool = flag(False, "instead: how graders differ on a run's samples")
    run_dir: Path = flag(Path("runs/grpo"), "the run, for --audit-reward")
    seed: int = flag(0, "of problems, examples and sampling")
    output: Path = flag(Path("runs/evaluation"), "where figures, picture and failures go")

    def __post_init__(self) -> None:
        check_values(self)


def find_adapters(config: EvaluateConfig) -> dict[str, Path]:
    """The adapters that are there, by row name. A path that was typed must exist.

    Raises:
        UsageError: it does not, files are missing, or there is no adapter at all.
    """
    from rlm.adapters import check_adapter

    found: dict[str, Path] = {}
    for name, (option, script) in ({} if config.base_only else ADAPTERS).items():
        path = getattr(config, option)
        if path is not None and (path.exists() or option in explicit(config)):
            found[name] = check_adapter(path, f"run: python {script}")
        elif path is not None:
            terminal.line(f"no {name} row: {path} does not exist; python {script} makes it")
    if not found and not config.base_only:
        raise UsageError("no adapter to evaluate; train one, or ask for the base with --base-only")
    return found


def fill_in(config: EvaluateConfig, runs: Sequence[dict]) -> EvaluateConfig:
    """What no flag named, from the runs that made the adapters, of which the last one counts.

    Raises:
        UsageError: nothing says which model.
    """
    run = runs[-1] if runs else {}
    model = config.model or run.get("base_model")
    if model is None:
        raise UsageError("which base model? No adapter's run.json says so: give --model")
    tags = run.get("config", {}).get("reasoning_format", "deepseek")
    dataset, split = config.dataset or run.get("dataset") or "word-problems", config.split
    if split is None:
        split = "test"
        practised = {Path(other["dataset"]).resolve() for other in runs if other.get("dataset")}
        if is_file(dataset) and Path(dataset).resolve() in practised:
            split = "validation"
            terminal.line(f"{dataset} was trained on: of it, what was held out for validation")
    return replace(
        config,
        model=model,
        dataset=dataset,
        split=split,
        reasoning_format=config.reasoning_format or tags,
        quantize=trained_on(run) if config.quantize == "auto" else config.quantize,
    )


def worked_examples(config: EvaluateConfig, problems: Sequence[Problem]) -> list[tuple[str, str]]:
    """(question, perfect completion) pairs from the train split, none of an evaluated problem."""
    if not config.few_shot:
        return []
    format = FORMATS[config.reasoning_format]
    evaluated = {problem.question for problem in problems}
    try:
        count = config.few_shot + len(problems)  # as many more as could have to be left out
        train = load_problems(config.dataset, "train", max_samples=count, seed=config.seed)
    except UsageError as error:
        terminal.line(f"no few-shot row: {error}")
        return []
    usable = [p for p in train if p.solution and p.question not in evaluated]
    if len(usable) < config.few_shot:
        terminal.line(f"no few-shot row: --dataset {config.dataset} has too few worked examples")
        return []
    return [
        (p.question, format.completion(p.solution, p.answer)) for p in usable[: config.few_shot]
    ]


def evaluate_row(
    name: str,
    model,
    tokenizer,
    problems: list[Problem],
    examples,
    config: EvaluateConfig,
    kinds: Sequence[str] = ("greedy", "sampled"),
) -> dict[str, Evaluation]:
    """What came out of each kind of decoding: "greedy", and "sampled" if --samples asks for it."""
    from rlm.sampling import Sampler

    started, sampler, results = time.monotonic(), Sampler(model, tokenizer), {}
    plan = {"greedy": (1, 0.0), "sampled": (config.samples, config.temperature)}
    for kind, (k, temperature) in plan.items():
        if k == 0 or kind not in kinds:
            continue
        with terminal.progress(f"{name}, {kind}", len(problems) * k) as advance:
            results[kind] = evaluate(
                sampler,
                tokenizer,
                problems,
                FORMATS[config.reasoning_format],
                max_new_tokens=config.max_new_tokens,
                temperature=temperature,
                k=k,
                seed=config.seed,
                examples=examples,
                on_finish=advance,
            )
    terminal.line(f"{name}: done in {terminal.duration(time.monotonic() - started)}")
    return results


def figures(result: Evaluation) -> dict[str, object]:
    """What evaluation.json says of a row; pass@k for k = 1, 2, 4, … and all samples."""
    by_grading = {}
    for name, strict in GRADINGS.items():
        accuracy = result.accuracy if result.k == 1 else result.mean_accuracy
        by_grading[name] = {
            "accuracy": accuracy(strict),
            "reasons": result.reasons(strict),
            "by_family": result.by_column("family", strict),
            "by_level": result.by_column("level", strict),
        }
        if result.k > 1:
            ks = sorted({2**i for i in range(result.k.bit_length())} | {result.k})
            by_grading[name]["majority"] = result.majority_accuracy(strict)
            by_grading[name]["pass_at"] = {str(k): result.pass_at(k, strict) for k in ks}
    return by_grading | {
        "format_rate": result.format_rate,
        "truncated_rate": result.truncated_rate,
        "length_mean": result.length_mean,
    }


def compare(a: Evaluation, b: Evaluation) -> dict[str, dict[str, float]]:
    """b minus a, paired by problem, under both gradings."""
    compared = {}
    for name, strict in GRADINGS.items():
        before, after = a.per_problem(strict), b.per_problem(strict)
        compared[name] = asdict(paired_bootstrap(before, after))
        if a.k == b.k == 1:
            compared[name]["mcnemar_p"] = mcnemar(list(map(bool, before)), list(map(bool, after)))
    return compared


def show(title: str, rows: Mapping[str, Mapping], compared: Mapping[str, Mapping]) -> None:
    """A table of one kind of decoding, and how each row differs from the one above it."""
    table = Table(
        "per cent", title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for row, found in rows.items():
        intervals = {name: found[name]["accuracy"] for name in GRADINGS}
        cells = {
            name: f"{100 * i['mean']:.1f} ({100 * i['low']:.0f}–{100 * i['high']:.0f})"
            for name, i in intervals.items()
        }
        if "majority" in found["strict"]:
            k, passed = list(found["strict"]["pass_at"].items())[-1]
            cells[f"maj@{k}"] = f"{100 * found['strict']['majority']['mean']:.1f}"
            cells[f"pass@{k}"] = f"{100 * passed['mean']:.1f}"
        cells["format"] = f"{100 * found['format_rate']:.0f}"
        cells["cut off"] = f"{100 * found['truncated_rate']:.0f}"
        cells["tokens"] = f"{found['length_mean']:.0f}"
        if not table.row_count:
            for name in cells:
                table.add_column(name, justify="right", no_wrap=True)
        table.add_row(row, *cells.values())
    terminal.console.print(table)
    for pair, by_grading in compared.items():
        strict = by_grading["strict"]
        p = f", McNemar p = {strict['mcnemar_p']:.2g}" if "mcnemar_p" in strict else ""
        terminal.line(
            f"  {pair}: {strict['points']:+.1f} points strict "
            f"({strict['low']:+.1f} to {strict['high']:+.1f}{p})"
        )


def failures(results: Mapping[str, Mapping[str, Evaluation]]) -> list[dict[str, object]]:
    """Every greedy completion that is not right under strict grading, to read."""
    return [
        {
            "row": row,
            "id": problem.id,
            "question": problem.question,
            "answer": problem.answer,
            "completion": graded.text,
            "strict": graded.strict.reason,
            "lenient": graded.lenient.reason,
        }
        for row, kinds in results.items()
        for problem, (graded,) in zip(kinds["greedy"].problems, kinds["greedy"].groups, strict=True)
        if not graded.strict.correct
    ]


def report(
    results: Mapping[str, Mapping[str, Evaluation]], data: str, about: dict, output: Path
) -> None:
    """Tables in the terminal; evaluation.json, accuracy.png and failures.jsonl in `output`."""
    content = dict(about)
    for kind in ("greedy", "sampled"):
        found = {name: row[kind] for name, row in results.items() if kind in row}
        if not found:
            continue
        rows = {name: figures(result) for name, result in found.items()}
        compared = {f"{b} − {a}": compare(found[a], found[b]) for a, b in pairwise(found)}
        k = next(iter(found.values())).k
        content[kind] = {"completions": k, "rows": rows, "compared": compared}
        show(f"{data}, {kind}, {k} each", rows, compared)
    if about.get("note"):
        terminal.line(f"  {about['note']}")

    replace_json(output / "evaluation.json", content)
    with (output / "failures.jsonl").open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(f, ensure_ascii=False) + "\n" for f in failures(results))
    bars = {
        name: {grading: row[grading]["accuracy"] for grading in GRADINGS}
        for name, row in content["greedy"]["rows"].items()
    }
    accuracy_bars(bars, output / "accuracy.png", f"Greedy accuracy: {data}", about.get("note", ""))
    terminal.line(f"written: {output}/evaluation.json, accuracy.png, failures.jsonl")


def main(config: EvaluateConfig) -> int:
    if config.audit_reward:
        every = "max_samples" not in explicit(config)
        return audit_run(config.run_dir, config.output, None if every else config.max_samples)
    from rlm.adapters import check_base, load_adapter, read_run
    from rlm.machine import EMBEDDED_MODEL, pick_device, prepare_process
    from rlm.models import base_hash, load_base, load_tokenizer
    from rlm.runs import check_writable

    prepare_process()
    adapters = find_adapters(config)
    config = fill_in(config, [read_run(path) for path in adapters.values()])
    device = pick_device()
    weights = base_hash(config.model)
    for path in adapters.values():
        check_base(path, config.model, weights)
    problems = load_problems(
        config.dataset, config.split, max_samples=config.max_samples, seed=config.seed
    )
    examples = worked_examples(config, problems)
    tokenizer = load_tokenizer(config.model)
    data = f"{config.dataset}, {config.split}, n = {len(problems)}"
    note = EMBEDDED_NOTE if config.model == EMBEDDED_MODEL else ""
    check_writable("--output", config.output)  # before the hours, not after them
    terminal.line(f"{data}; {config.model} on {device}")

    base = load_base(config.model, device, quantize=config.quantize)
    results = {"base": evaluate_row("base", base, tokenizer, problems, (), config)}
    if examples:
        name = f"base, {len(examples)}-shot"
        results[name] = evaluate_row(name, base, tokenizer, problems, examples, config)
    for name, path in adapters.items():
        policy = load_adapter(base, path, trainable=False)
        results[name] = evaluate_row(name, policy, tokenizer, problems, (), config)
        base = policy.unload()  # takes the LoRA layers off; nothing was merged

    made_with = {"base_hash": weights, "device": str(device), "note": note}
    report(results, data, {"config": to_dict(config), **made_with}, config.output)
    return 0


if __name__ == "__main__":
    run_main(main, EvaluateConfig, description=__doc__)
