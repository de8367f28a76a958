"""Evaluates the base, the SFT and the GRPO adapter on the same problems: how much training helped.

Greedy accuracy under both gradings with 95 % intervals, each row compared with the one above it;
with --samples also mean@k, maj@k and pass@k. What no flag names (model, data set, tags, 4-bit) is
taken from the run.json of the last adapter.

    python evaluate.py                                   # weights/sft_lora, weights/final_rlm_lora
    python evaluate.py --dataset gsm8k --max-samples 500 --samples 8
    python evaluate.py --base-only --model smollm2-135m  # how good is it before any training?
    python evaluate.py --samples 8 --resume              # of an earlier one, rows still valid
    python evaluate.py --audit-reward                    # does the verifier miss right answers?
"""

from __future__ import annotations

if __name__ == "evaluate":  # a library means Hugging Face's package; ours is rlm.scripts.evaluate
    from rlm.scripts import give_way

    give_way(__name__)

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlm.cli import Interrupted, UsageError, check_values, flag, run_main, terminal, to_dict
from rlm.data import (
    FORMATS,
    Format,
    Problem,
    drop_long_prompts,
    load_problems,
    own_files,
    render_problem,
)
from rlm.evaluation import Evaluation, RowRecord, audit_run, evaluate, open_journal, write_report
from rlm.model import QUANTIZATIONS, AdapterInfo
from rlm.tools import Calculator, Tool, load_tool

ADAPTERS = {"SFT": ("sft_adapter", "train_sft.py"), "GRPO": ("adapter", "train_grpo.py")}
EMBEDDED_NOTE = "smollm2-135m is dequantised Q4_1: published SmolLM2 figures do not apply"


@dataclass(frozen=True)
class EvaluateConfig:
    model: str | None = flag(None, "hub id, directory, or smollm2-135m (none: the adapter's base)")
    dataset: str | None = flag(None, "as for training (none: the adapter's, else word-problems)")
    split: str | None = flag(
        None,
        "which part of the data set, as in test[:200] (none: test; of a file that was trained on: "
        "validation)",
    )
    columns: str | None = flag(None, "as for training (none: of the adapter's data set its own)")
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
    system_prompt: str | None = flag(None, "text or file (none: the adapter's)")
    tool: str = flag(
        "none",
        "writes into completions: calculator, FILE.py:NAME, none (not given: as in training)",
    )
    quantize: str = flag(
        "auto",
        "quantize the base (bitsandbytes) (auto: as in training)",
        choices=("auto", *QUANTIZATIONS),
    )
    audit_reward: bool = flag(False, "instead: how graders differ on a run's samples")
    run_dir: Path = flag(Path("runs/grpo"), "the run, for --audit-reward")
    seed: int = flag(0, "of problems, examples and sampling")
    output: Path = flag(Path("runs/evaluation"), "where figures, picture and completions go")
    resume: bool = flag(False, "draw only the rows that --output lacks, or has of something else")

    def __post_init__(self) -> None:
        check_values(self)

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the config from the adapters' run.json: `resolve_config` calls it.

        The last adapter counts; a default one that is not there makes no row.

        Raises:
            UsageError: a named adapter is not there, nothing says which model, or the tags differ.
        """
        if given.get("audit_reward"):
            return {"max_samples": None, **given}  # all that the run has
        from rlm.model import check_adapter

        values, base_only = dict(given), given.get("base_only")
        infos: list[AdapterInfo] = []
        for name, (option, script) in ({} if base_only else ADAPTERS).items():
            path = values.setdefault(option, getattr(cls, option))
            if option not in given and not path.exists():
                terminal.line(f"no {name} row: {path} does not exist; python {script} makes it")
                values[option] = None
            elif path:
                infos.append(AdapterInfo.load(check_adapter(path, f"run: python {script}")))
        if not infos and not (base_only and given.get("model")):
            raise UsageError("no adapter to evaluate; train one, or --base-only --model NAME")
        last = infos[-1] if infos else AdapterInfo(Path())
        asked = given.get("model"), given.get("quantize", "auto")
        values["model"], values["quantize"] = last.resolve_base(*asked)
        values |= last.resolve_data(given.get("dataset"), given.get("columns"))
        values["dataset"] = values["dataset"] or "word-problems"
        values["split"] = given.get("split") or default_split(values["dataset"], infos)
        names = [info.resolve_format(given.get("reasoning_format")) for info in infos]
        differ = f"different tags ({', '.join(names)})" if len({*names}) > 1 else ""
        if len({info.resolve_system_prompt(given.get("system_prompt")) for info in infos}) > 1:
            differ = differ or "different system prompts"
        if differ:
            raise UsageError(
                f"the adapters were trained with {differ}: evaluate them one by one, with "
                "--sft-adapter none or --adapter none"
            )
        values["reasoning_format"] = last.resolve_format(given.get("reasoning_format"))
        values["system_prompt"] = last.resolve_system_prompt(given.get("system_prompt"))
        values["tool"] = last.resolve_tool(given.get("tool", "auto"))
        return values

    @property
    def format(self) -> Format:
        """The tags and the system prompt."""
        return FORMATS[self.reasoning_format].with_prompt(self.system_prompt)

    @property
    def adapters(self) -> dict[str, Path]:
        """The adapters to evaluate, by row name."""
        options = {} if self.base_only else ADAPTERS
        paths = {name: getattr(self, option) for name, (option, _) in options.items()}
        return {name: path for name, path in paths.items() if path}


def default_split(dataset: str, adapters: Sequence[AdapterInfo]) -> str:
    """Return the split that no adapter practised on."""
    trained = {file for info in adapters for file in own_files(info.dataset or "")}
    if not own_files(dataset) & trained:
        return "test"
    terminal.line(f"{dataset} was trained on: of it, what was held out for validation")
    _, bracket, cut = (adapters[-1].run.get("config", {}).get("split") or "").partition("[")
    return f"validation{bracket}{cut}"


def worked_examples(config: EvaluateConfig, problems: Sequence[Problem]) -> list[tuple[str, str]]:
    """(question, perfect completion) pairs from the train split, none of an evaluated problem."""
    if not config.few_shot:
        return []
    evaluated = {problem.question for problem in problems}
    try:
        count = config.few_shot + len(problems)  # as many more as could have to be left out
        choice = {"seed": config.seed, "calculator_marks": config.tool == Calculator.name}
        choice["columns"] = config.columns
        train = load_problems(config.dataset, "train", max_samples=count, **choice)
        usable = [p for p in train if p.solution and p.question not in evaluated]
        if len(usable) < config.few_shot:
            raise UsageError(f"--dataset {config.dataset} has too few worked examples")
    except UsageError as error:
        terminal.line(f"no few-shot row: {error}")
        return []
    write = config.format.completion
    return [(p.question, write(p.solution, p.answer)) for p in usable[: config.few_shot]]


def fit_window(
    config: EvaluateConfig, tokenizer, window: int | None, problems: Sequence[Problem]
) -> tuple[list[Problem], list[tuple[str, str]]]:
    """Return the problems whose prompts leave room for an answer in the model's window, and the
    examples of the few-shot row if they do with these, too; say what is left out."""
    render = partial(render_problem, tokenizer, format=config.format)
    limit = (window or sys.maxsize) - config.max_new_tokens
    why = f"the model's window of {window} less --max-new-tokens {config.max_new_tokens}"
    problems = drop_long_prompts(problems, render, limit, why)
    examples = worked_examples(config, problems)
    if max(len(render(problem, examples=examples)) for problem in problems) <= limit:
        return problems, examples
    terminal.line(f"no few-shot row: prompts over {limit} tokens ({why}); lower --few-shot")
    return problems, []


def evaluate_row(
    name: str,
    model,
    tokenizer,
    problems: list[Problem],
    examples,
    config: EvaluateConfig,
    kinds: Sequence[str] = ("greedy", "sampled"),
    record: RowRecord | None = None,
    tool: Tool | None = None,
) -> dict[str, Evaluation]:
    """Evaluate one model: "greedy" results, and "sampled" ones if --samples asks for them.

    Args:
        tool: what --tool names.
        record: where they are kept; what is there already is not drawn again.
    """
    from rlm.sampling import Sampler, sampling_dtype

    started, results = time.monotonic(), {}
    sampler = Sampler(model, tokenizer, dtype=sampling_dtype(model), tool=tool)
    format = config.format
    plan = {"greedy": (1, 0.0), "sampled": (config.samples, config.temperature)}
    for kind in kinds:
        k, temperature = plan[kind]
        if k == 0:
            continue
        decoding = {"completions": k, "temperature": temperature}
        found = record.find(kind, decoding, problems, format) if record else None
        if found is None:
            with terminal.progress(f"{name}, {kind}", len(problems) * k) as advance:
                found = evaluate(
                    sampler,
                    tokenizer,
                    problems,
                    format,
                    max_new_tokens=config.max_new_tokens,
                    temperature=temperature,
                    k=k,
                    seed=config.seed,
                    examples=examples,
                    on_finish=advance,
                )
            if record:
                record.add(kind, decoding, found)
        results[kind] = found
    terminal.line(f"{name}: done in {terminal.duration(time.monotonic() - started)}")
    return results


def made_of(
    config: EvaluateConfig,
    base_hash: str,
    adapter: Path | None,
    device: str,
    problems: Sequence[Problem],
    examples: Sequence[tuple[str, str]],
) -> dict[str, object]:
    """What a row's completions depend on, beside decoding and the code."""
    from rlm.model import adapter_hash
    from rlm.runs import data_id

    options = ("model", "quantize", "reasoning_format", "seed", "max_new_tokens")
    asked = [[p.id, p.question, p.answer, p.answer_type] for p in problems]
    return {
        "base": base_hash,
        "adapter": adapter_hash(adapter) if adapter else None,
        **{f"--{name.replace('_', '-')}": getattr(config, name) for name in options},
        **({} if config.tool == "none" else {"--tool": config.tool}),
        **({} if config.system_prompt is None else {"--system-prompt": config.system_prompt}),
        "data": data_id("problems", asked),
        "shown": data_id("examples", examples),
        "device": device,
    }


def main(config: EvaluateConfig) -> int:
    if config.audit_reward:
        return audit_run(config.run_dir, config.output, config.max_samples)
    from rlm.model import (
        EMBEDDED_MODEL,
        base_model_hash,
        check_base,
        context_window,
        load_adapter,
        load_base,
        load_tokenizer,
        pick_device,
        prepare_process,
    )

    prepare_process()
    tool = load_tool(config.tool)
    device, weights = pick_device(), base_model_hash(config.model)
    for path in config.adapters.values():
        check_base(path, config.model, weights)
    choice = {"max_samples": config.max_samples, "seed": config.seed, "columns": config.columns}
    problems = load_problems(config.dataset, config.split, **choice)
    tokenizer, journal = load_tokenizer(config.model), open_journal(config.output, config.resume)
    base = load_base(config.model, device, quantize=config.quantize)
    asked = len(problems)
    problems, examples = fit_window(config, tokenizer, context_window(base), problems)
    data = f"{config.dataset}, {config.split}, n = {len(problems)}"
    terminal.line(f"{data}; {config.model} on {device}")
    rows = [("base", (), None)]
    rows += [(f"base, {len(examples)}-shot", examples, None)] if examples else []
    rows += [(name, (), adapter) for name, adapter in config.adapters.items()]
    results: dict[str, dict[str, Evaluation]] = {}
    try:
        for name, shown, adapter in rows:
            model = load_adapter(base, adapter, trainable=False) if adapter else base
            origin = made_of(config, weights, adapter, str(device), problems, shown)
            row = (name, model, tokenizer, problems, shown, config)
            record = RowRecord(journal, name, origin)
            results[name] = evaluate_row(*row, record=record, tool=tool)
            base = model.unload() if adapter else base  # nothing was merged
    except KeyboardInterrupt:
        if not journal.rows:
            raise
        drawn = "; ".join(journal.rows)
        raise Interrupted(signal.SIGINT, f"{journal.path} has: {drawn}") from None

    note = EMBEDDED_NOTE if config.model == EMBEDDED_MODEL else ""
    made_with = {"base_hash": weights, "device": str(device), "note": note}
    made_with |= {"left_out": asked - len(problems)}  # too long for the model
    write_report(results, data, {"config": to_dict(config), **made_with}, config.output)
    return 0


if __name__ == "__main__":
    run_main(main, EvaluateConfig, description=__doc__)
