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
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rlm import terminal
from rlm.config import flag, parse, run_main

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the stage scripts, when the package is not installed


@dataclass
class DemoConfig:
    output: Path = flag(Path("runs/demo"), "where everything goes")
    problems: int = flag(200, "held-out test problems")
    samples: int = flag(2, "sampled completions a problem")
    sft_config: Path = flag(ROOT / "configs/demo_sft.yaml", "options of stage 1")
    grpo_config: Path = flag(ROOT / "configs/demo_grpo.yaml", "options of stage 2")


def main(config: DemoConfig) -> int:
    import evaluate
    import train_grpo
    import train_sft
    from inference import generate_reasoning, load_rlm_model
    from rlm.data import load_problems
    from rlm.evaluation import paired_bootstrap
    from rlm.machine import peak_memory_gb, pick_device, prepare_process
    from rlm.models import load_adapter, load_base, load_tokenizer

    prepare_process()
    began, seconds = time.monotonic(), {}
    sft_adapter, grpo_adapter = config.output / "sft_lora", config.output / "final_rlm_lora"

    def options(cls, file: Path, **paths: Path):
        typed = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
        return parse(cls, ["--config", str(file), *typed])

    sft = options(
        train_sft.SFTConfig, config.sft_config, output=sft_adapter, run_dir=config.output / "sft"
    )
    grpo = options(
        train_grpo.GRPOConfig,
        config.grpo_config,
        output=grpo_adapter,
        sft_adapter=sft_adapter,
        run_dir=config.output / "grpo",
    )

    def timed(stage: str, work, *args):
        started = time.monotonic()
        result = work(*args)
        seconds[stage] = round(time.monotonic() - started, 1)
        return result

    timed("sft", train_sft.main, sft)
    timed("grpo", train_grpo.main, grpo)

    problems = load_problems(grpo.dataset, "test", max_samples=config.problems)
    settings = evaluate.EvaluateConfig(
        model=grpo.model,
        dataset=grpo.dataset,
        reasoning_format=grpo.reasoning_format,
        samples=config.samples,
        temperature=grpo.temperature,
        max_new_tokens=grpo.max_new_tokens,
        sft_adapter=sft_adapter,
        adapter=grpo_adapter,
        output=config.output / "evaluation",
    )
    tokenizer = load_tokenizer(grpo.model)
    results = {}
    base = load_base(grpo.model, pick_device())
    for row, adapter in {"base": None, "sft": sft_adapter, "grpo": grpo_adapter}.items():
        model = load_adapter(base, adapter, trainable=False) if adapter else base
        kinds = ("greedy", "sampled") if adapter else ("greedy",)  # sampling the base says little
        arguments = (row, model, tokenizer, problems, (), settings, kinds)
        results[row] = timed(f"evaluate {row}", evaluate.evaluate_row, *arguments)
        base = model.unload() if adapter else base
    evaluate.report(results, f"{grpo.dataset}, test, n = {len(problems)}", {}, settings.output)

    before, after = (results[row]["sampled"].per_problem(strict=True) for row in ("sft", "grpo"))
    gain = paired_bootstrap(before, after)
    seconds["total"] = round(time.monotonic() - began, 1)
    summary = {
        "accuracy": {
            row: {
                name: {
                    key: kinds["greedy"].accuracy(strict)[key]
                    for key in ("correct", "total", "low", "high")
                }
                for name, strict in evaluate.GRADINGS.items()
            }
            for row, kinds in results.items()
        },
        "sampled_accuracy": {
            row: {
                name: results[row]["sampled"].mean_accuracy(strict)
                for name, strict in evaluate.GRADINGS.items()
            }
            for row in ("sft", "grpo")
        },
        "gain": {"points": gain.points, "low": gain.low, "high": gain.high},
        "seconds": seconds,
        "peak_memory_gb": round(peak_memory_gb(), 2),
    }
    (config.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    terminal.line(
        f"GRPO over SFT, sampled: {gain.points:+.1f} points ({gain.low:+.1f} to {gain.high:+.1f}); "
        f"{terminal.duration(seconds['total'])} in all, {config.output}/summary.json"
    )

    unseen = load_problems(grpo.dataset, "test_families", max_samples=1)[0].question
    terminal.line(f"\nA kind of problem it never saw: {unseen}")
    terminal.line(generate_reasoning(unseen, *load_rlm_model(grpo_adapter)))
    terminal.line(
        f'\nNext:\n  python inference.py --adapter {grpo_adapter} "your question"\n'
        f"  python evaluate.py --sft-adapter {sft_adapter} --adapter {grpo_adapter} --samples 8\n"
        "  python train_sft.py && python train_grpo.py    # longer, into weights/"
    )
    return 0


if __name__ == "__main__":
    run_main(main, DemoConfig, description=__doc__)
