"""The whole pipeline on this machine: SFT, GRPO, evaluation on held-out problems, one answer.

Run by `make demo`. Everything goes under runs/demo/, adapters too; weights/ is left alone. The
stage scripts do the work, with the options of configs/demo_sft.yaml and configs/demo_grpo.yaml;
what is here is their order and the summary.

The three rows of the table share prompt, problems, grader and token limit. "gain" is GRPO's lead
over the SFT adapter in sampled accuracy (mean over k completions a problem, at the training
temperature), paired by problem, with a bootstrap interval.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlm.cli import check_values, flag, parse, resolve_config, run_main, terminal

if TYPE_CHECKING:
    from rlm.evaluation import Evaluation
    from rlm.training import GRPOConfig

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class DemoConfig:
    output: Path = flag(Path("runs/demo"), "where everything goes")
    problems: int = flag(200, "held-out test problems", min=1)
    samples: int = flag(2, "sampled completions a problem", min=1)
    sft_config: Path = flag(ROOT / "configs/demo_sft.yaml", "options of stage 1")
    grpo_config: Path = flag(ROOT / "configs/demo_grpo.yaml", "options of stage 2")

    def __post_init__(self) -> None:
        check_values(self)


def main(config: DemoConfig) -> int:
    import train_grpo
    import train_sft
    from rlm.model import peak_memory_gb, pick_device, prepare_process

    prepare_process()
    began, clock = time.monotonic(), Clock()
    adapters = {"sft": config.output / "sft_lora", "grpo": config.output / "final_rlm_lora"}
    sft = _argv(config.sft_config, output=adapters["sft"], run_dir=config.output / "sft")
    grpo_argv = _argv(
        config.grpo_config,
        output=adapters["grpo"],
        sft_adapter=adapters["sft"],
        run_dir=config.output / "grpo",
    )
    parse(train_grpo.GRPOConfig, grpo_argv)  # a mistake in it is said before stage 1
    with clock("sft"):
        train_sft.main(resolve_config(train_sft.SFTConfig, sft))
    with clock("grpo"):
        grpo = resolve_config(train_grpo.GRPOConfig, grpo_argv)
        train_grpo.main(grpo)
    results = _evaluate(config, grpo, adapters, clock)

    clock.seconds["total"] = round(time.monotonic() - began, 1)
    summary = _summary(results) | {
        "command": shlex.join(["python", "examples/demo.py", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {pick_device()}",
        "seconds": clock.seconds,
        "peak_memory_gb": round(peak_memory_gb(), 2),
    }
    (config.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    gain = summary["gain"]
    terminal.line(
        f"GRPO over SFT, sampled: {gain['points']:+.1f} points ({gain['low']:+.1f} to "
        f"{gain['high']:+.1f}); {terminal.duration(clock.seconds['total'])} in all, "
        f"{config.output}/summary.json"
    )
    _show_one_answer(grpo, adapters["grpo"])
    terminal.line(
        f'\nNext:\n  python inference.py --adapter {adapters["grpo"]} "your question"\n'
        f"  python evaluate.py --sft-adapter {adapters['sft']} --adapter {adapters['grpo']} "
        "--samples 8\n"
        "  python train_sft.py && python train_grpo.py    # longer, into weights/"
    )
    return 0


class Clock:
    """What each stage took: `with clock("sft"): …`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[stage] = round(time.monotonic() - started, 1)


def _argv(file: Path, **paths: Path) -> list[str]:
    typed = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
    return ["--config", str(file), *typed]


def _evaluate(
    config: DemoConfig, grpo: GRPOConfig, adapters: Mapping[str, Path], clock: Clock
) -> dict[str, dict[str, Evaluation]]:
    """Base and adapters on the same test problems, one after the other on one copy of the base."""
    import evaluate
    from rlm.data import load_problems
    from rlm.evaluation import write_report
    from rlm.model import AdapterInfo, load_adapter, load_base, load_tokenizer, pick_device

    problems = load_problems(grpo.dataset, "test", max_samples=config.problems)
    settings = evaluate.EvaluateConfig(
        model=grpo.model,
        dataset=grpo.dataset,
        reasoning_format=AdapterInfo.load(adapters["grpo"]).reasoning_format,
        samples=config.samples,
        temperature=grpo.temperature,
        max_new_tokens=grpo.max_new_tokens,
        sft_adapter=adapters["sft"],
        adapter=adapters["grpo"],
        output=config.output / "evaluation",
    )
    tokenizer = load_tokenizer(grpo.model)
    results = {}
    base = load_base(grpo.model, pick_device())
    for row, adapter in {"base": None, **adapters}.items():
        model = load_adapter(base, adapter, trainable=False) if adapter else base
        kinds = ("greedy", "sampled") if adapter else ("greedy",)  # sampling the base says little
        with clock(f"evaluate {row}"):
            arguments = (row, model, tokenizer, problems, (), settings, kinds)
            results[row] = evaluate.evaluate_row(*arguments)
        base = model.unload() if adapter else base
    write_report(results, f"{grpo.dataset}, test, n = {len(problems)}", {}, settings.output)
    return results


def _summary(results: Mapping[str, Mapping[str, Evaluation]]) -> dict[str, Any]:
    from rlm.evaluation import GRADINGS, paired_bootstrap

    counts = ("correct", "total", "low", "high")
    before, after = (results[row]["sampled"].per_problem(strict=True) for row in ("sft", "grpo"))
    gain = paired_bootstrap(before, after)
    return {
        "accuracy": {
            row: {
                name: {key: kinds["greedy"].accuracy(strict)[key] for key in counts}
                for name, strict in GRADINGS.items()
            }
            for row, kinds in results.items()
        },
        "sampled_accuracy": {
            row: {
                name: results[row]["sampled"].accuracy(strict) for name, strict in GRADINGS.items()
            }
            for row in ("sft", "grpo")
        },
        "gain": {"points": gain.points, "low": gain.low, "high": gain.high},
    }


def _show_one_answer(grpo: GRPOConfig, adapter: Path) -> None:
    from inference import generate_reasoning, load_rlm_model
    from rlm.data import load_problems

    unseen = load_problems(grpo.dataset, "test_families", max_samples=1)[0].question
    terminal.line(f"\nA kind of problem it never saw: {unseen}")
    terminal.line(generate_reasoning(unseen, *load_rlm_model(adapter)))


if __name__ == "__main__":
    run_main(main, DemoConfig, description=__doc__)
