"""Measures how much training helped: evaluates the base model, the SFT adapter and the GRPO adapter
on the same problems.

Each row of the report shows the greedy accuracy of one model with a 95 % confidence interval, and
is compared with the row above it. If GRPO did not start from the SFT adapter, its row is compared
with the base model. --samples adds mean@k, maj@k and pass@k. By default, the model, the dataset,
the tags and the quantization are those of the GRPO adapter, or else of the SFT adapter.

    python eval.py                                   # weights/sft_lora, weights/final_rlm_lora
    python eval.py --dataset gsm8k --max-samples 500 --samples 8
    python eval.py --base-only --model smollm2-135m  # how good is it before any training?
    python eval.py --samples 8 --resume              # keep the rows that are still valid
    python eval.py --audit-reward                    # does the grader reject right answers?
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from rlm.cli import Interrupted, UsageError, required, run_main, terminal, to_dict
from rlm.data import (
    Problem,
    describe_other_forms,
    drop_long_prompts,
    load_problems,
    render_problem,
)
from rlm.evaluation import (
    EvaluateConfig,
    Evaluation,
    RowRecord,
    audit_run,
    check_journal,
    evaluate,
    open_journal,
    pairs_to_compare,
    write_report,
)
from rlm.rewards import Scorer, check_columns, load_reward
from rlm.runs import lock_file
from rlm.tools import Calculator, Tool, load_tool

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED_NOTE = "smollm2-135m is dequantized from Q4_1: published SmolLM2 figures do not apply"


def worked_examples(config: EvaluateConfig, problems: Sequence[Problem]) -> list[tuple[str, str]]:
    """Return (question, right completion) pairs of training problems that are not evaluated."""
    if not config.few_shot:
        return []
    evaluated = {problem.question for problem in problems}
    usable: list[Problem] = []
    try:
        # Some problems may be evaluated, or lack a solution. If too few are left, load all.
        for count in (config.few_shot + len(problems), None):
            train = load_problems(
                required(config.dataset, "--dataset"),
                max_samples=count,
                seed=config.seed,
                columns=config.columns,
                rows=config.rows,
                calculator_annotations=config.tool == Calculator.name,
            )
            usable = [p for p in train if p.has_steps and p.question not in evaluated]
            if len(usable) >= config.few_shot:
                break
        else:
            too_few = f"--dataset {config.dataset} has too few worked examples"
            raise UsageError(f"{too_few}; lower --few-shot")
    except UsageError as error:
        terminal.line(f"no few-shot row: {error}")
        return []
    write = config.format.completion
    return [(p.question, write(p.solution, p.answer)) for p in usable[: config.few_shot]]


def fit_window(
    config: EvaluateConfig,
    tokenizer: PreTrainedTokenizerBase,
    window: int | None,
    problems: Sequence[Problem],
) -> tuple[list[Problem], list[tuple[str, str]]]:
    """Select what fits into the model's context window, and print what is left out.

    Returns:
        The problems whose prompts fit, and the few-shot examples. The list of examples is empty if
        any few-shot prompt does not fit.
    """
    render = partial(render_problem, tokenizer, format=config.format)
    problems = drop_long_prompts(problems, render, window, config.max_new_tokens)
    examples = worked_examples(config, problems)
    limit = (window or sys.maxsize) - config.max_new_tokens
    if max(len(render(problem, examples=examples)) for problem in problems) <= limit:
        return problems, examples
    terminal.line(
        f"the few-shot row is left out: its prompts exceed the {limit} tokens that the model's "
        "context window leaves for a prompt; lower --few-shot"
    )
    return problems, []


def evaluate_row(
    name: str,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    examples: Sequence[tuple[str, str]],
    config: EvaluateConfig,
    record: RowRecord | None = None,
    tool: Tool | None = None,
    scorer: Scorer | None = None,
) -> dict[str, Evaluation]:
    """Evaluate one model with greedy decoding, and with sampling if --samples is above 0.

    Args:
        examples: the (question, completion) pairs of a few-shot prompt.
        record: stores the completions; stored completions are not sampled again.
        scorer: computes the rewards; None without --reward.

    Returns:
        The results under the keys "greedy" and "sampled".
    """
    from rlm.sampling import Sampler, sampling_dtype

    started, results = time.monotonic(), {}
    sampler = Sampler(model, tokenizer, dtype=sampling_dtype(model)[0], tool=tool)
    if sampler.batch_note:
        terminal.line(f"{name}: {sampler.batch_note}")
    format = config.format
    plan = {"greedy": (1, 0.0), "sampled": (config.samples, config.temperature)}
    for kind, (k, temperature) in plan.items():
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
        if scorer:
            found = replace(found, rewards=found.score(scorer))
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
    """Return what a row's completions depend on, except the decoding options and the code.

    Stored completions are reused only if these values are unchanged.
    """
    from rlm.model import adapter_hash
    from rlm.runs import data_id

    options = ("model", "quantize", "reasoning_format", "system_prompt", "seed", "max_new_tokens")
    asked = [[p.id, p.question, p.answer, p.answer_type] for p in problems]
    return {
        "base": base_hash,
        "adapter": adapter_hash(adapter) if adapter else None,
        **{f"--{name.replace('_', '-')}": getattr(config, name) for name in options},
        **({} if config.tool == "none" else {"--tool": config.tool}),
        "data": data_id("problems", asked),
        "shown": data_id("examples", examples),
        "device": device,
    }


def make_scorer(config: EvaluateConfig, problems: Sequence[Problem]) -> Scorer | None:
    """Make the scorer for the reward function given by --reward, or return None without --reward.

    Raises:
        UsageError: the reward function does not exist, the data lacks a column that the reward
            function needs, or the answers are open and no reward function is given.
    """
    if config.reward:
        tags = required(config.reasoning_format, "--reasoning-format")
        scorer = Scorer(load_reward(config.reward), tags)
        check_columns(scorer.reward, problems)
        return scorer
    if all(problem.answer_type == "open" for problem in problems):
        raise UsageError(
            f"the answers of {config.dataset} are open (answer_type): use --reward FILE.py:NAME "
            "with a reward that judges them"
        )
    return None


def equal_adapters(adapters: Mapping[str, Path]) -> list[list[str]]:
    """Return and print the pairs of rows whose adapters have the same weights."""
    from rlm.model import same_weights

    pairs = combinations(adapters.items(), 2)
    same = [[a, b] for (a, one), (b, other) in pairs if same_weights(one, other)]
    for pair in same:
        terminal.line(f"{' and '.join(pair)} have the same weights: their rows will be the same")
    return same


def load_models(
    config: EvaluateConfig, model_name: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str, str]:
    """Load the base model and the tokenizer.

    An adapter that cannot be evaluated is reported here, rather than after the rows above it.

    Returns:
        The base model, the tokenizer, the hash of the base weights, and the name of the device.
    """
    from rlm.model import (  # imports torch, so the checks of the data come first
        base_model_hash,
        check_base,
        load_adapter,
        load_base,
        load_tokenizer,
        pick_device,
        prepare_process,
        take_adapters_off,
    )

    prepare_process()
    device, weights = pick_device(), base_model_hash(model_name)
    for path in config.adapters.values():
        check_base(path, model_name, weights)
    check_journal(config.output, config.resume)
    tokenizer = load_tokenizer(model_name)
    base = load_base(model_name, device, quantize=config.quantize)
    for path in config.adapters.values():
        base = take_adapters_off(load_adapter(base, path, trainable=False))
    return base, tokenizer, weights, str(device)


def main(config: EvaluateConfig) -> int:
    if config.audit_reward:
        return audit_run(config.run_dir, config.output, config.max_samples)
    model_name, dataset = required(config.model, "--model"), required(config.dataset, "--dataset")
    split = required(config.split, "--split")
    choice = {"max_samples": config.max_samples, "seed": config.seed, "columns": config.columns}
    problems = load_problems(dataset, split, rows=config.rows, **choice)
    if other_forms := describe_other_forms(problems, config.format):
        terminal.line(f"warning: {other_forms}")
    tool, scorer = load_tool(config.tool), make_scorer(config, problems)
    base, tokenizer, weights, device = load_models(config, model_name)
    from rlm.model import EMBEDDED_MODEL, context_window, load_adapter, take_adapters_off

    same = equal_adapters(config.adapters)
    asked = len(problems)
    problems, examples = fit_window(config, tokenizer, context_window(base), problems)
    data = f"{dataset}, {split}, n = {len(problems)}"
    terminal.line(f"{data}; {model_name} on {device}")
    rows: list[tuple[str, Sequence[tuple[str, str]], Path | None]] = [("base", (), None)]
    rows += [(f"base, {len(examples)}-shot", examples, None)] if examples else []
    rows += [(name, (), adapter) for name, adapter in config.adapters.items()]
    results: dict[str, dict[str, Evaluation]] = {}
    with lock_file(config.output / ".eval.lock", f"--output {config.output}", "runs eval.py"):
        journal = open_journal(config.output, config.resume)
        try:
            for name, shown, adapter in rows:
                model = load_adapter(base, adapter, trainable=False) if adapter else base
                origin = made_of(config, weights, adapter, device, problems, shown)
                row = (name, model, tokenizer, problems, shown, config)
                record = RowRecord(journal, name, origin)
                results[name] = evaluate_row(*row, record=record, tool=tool, scorer=scorer)
                base = take_adapters_off(model)  # restores the base model: nothing was merged
        except KeyboardInterrupt:
            if not journal.rows:
                raise
            drawn = "; ".join(journal.rows)
            raise Interrupted(signal.SIGINT, f"{journal.path} contains: {drawn}") from None

    pairs = pairs_to_compare(list(results), config.adapters)
    about = {
        "config": to_dict(config),
        "base_hash": weights,
        "device": device,
        "note": EMBEDDED_NOTE if model_name == EMBEDDED_MODEL else "",
        "rows": config.rows,  # validation is held out of these rows, unless it is published
        "left_out": asked - len(problems),  # problems that exceed the context window
        "same_weights": same,
    }
    write_report(results, pairs, data, about, config.output)
    return 0


if __name__ == "__main__":
    run_main(main, EvaluateConfig, description=__doc__)
