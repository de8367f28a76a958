"""Runs the whole pipeline on this machine: SFT, GRPO and an evaluation on held-out problems.

`make demo` runs this file. It calls the scripts of the stages with the options of
configs/demo_sft.yaml and configs/demo_grpo.yaml. It writes everything, including the adapters, to
runs/demo/, and changes nothing in weights/.

The base model, the SFT adapter and the GRPO adapter are evaluated with the same prompt, problems,
grader and token limit. In summary.json, "gain" is the gain of GRPO over SFT in sampled accuracy,
paired by problem, with a bootstrap interval. Sampled accuracy is the mean over k completions per
problem at the training temperature.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlm.cli import check_values, flag, parse, required, resolve_config, run_main, terminal

if TYPE_CHECKING:
    from rlm.data import Problem
    from rlm.evaluation import EvaluateConfig, Evaluation
    from rlm.grading import Verdict
    from rlm.training import GRPOConfig, SFTConfig

    Rows = Mapping[str, Mapping[str, Evaluation]]  # row → "greedy" or "sampled"

ROOT = Path(__file__).resolve().parent.parent
# Seconds per SFT example, per GRPO rollout, and per evaluated completion of an adapter and of the
# base model, on two cores of an EPYC (Zen 5). Only their ratios matter, because `Clock` scales them
# by the speed of the finished stages.
AN_EXAMPLE, A_ROLLOUT, A_COMPLETION, OF_THE_BASE = 0.14, 0.052, 0.023, 0.055
WIDTH, LINES = 44, 10  # maximum size of an answer; two answers are printed side by side
KINDS = {  # kind of problem → whether the answer is right after SFT and after GRPO
    "only after GRPO": (False, True),
    "only after SFT": (True, False),
    "after neither": (False, False),
}


@dataclass
class DemoConfig:
    output: Path = flag(Path("runs/demo"), "folder for all files")
    problems: int = flag(200, "number of held-out test problems", min=1)
    samples: int = flag(2, "sampled completions per problem", min=1)
    sft_config: Path = flag(ROOT / "configs/demo_sft.yaml", "options of stage 1")
    grpo_config: Path = flag(ROOT / "configs/demo_grpo.yaml", "options of stage 2")

    def __post_init__(self) -> None:
        check_values(self)


def main(config: DemoConfig) -> int:
    import train_grpo
    import train_sft
    from rlm.data import load_problems
    from rlm.evaluation import write_report
    from rlm.model import peak_memory_gb, pick_device, prepare_process

    prepare_process()
    adapters = {"sft": config.output / "sft_lora", "grpo": config.output / "final_rlm_lora"}
    sft_argv = _argv(config.sft_config, output=adapters["sft"], run_dir=config.output / "sft")
    grpo_argv = _argv(
        config.grpo_config,
        output=adapters["grpo"],
        sft_adapter=adapters["sft"],
        run_dir=config.output / "grpo",
    )
    sft = resolve_config(train_sft.SFTConfig, sft_argv)
    grpo = parse(train_grpo.GRPOConfig, grpo_argv)  # reports its mistakes before stage 1
    settings = _evaluation_settings(config, sft, grpo)
    dataset = required(settings.dataset, "dataset")
    problems = load_problems(dataset, "test", max_samples=config.problems)
    clock = Clock(*_expected_seconds(config, sft, grpo))

    results = _evaluate(settings, problems, {"base": None}, clock)
    with clock("sft"):
        train_sft.main(sft)
    with clock("grpo"):
        train_grpo.main(resolve_config(train_grpo.GRPOConfig, grpo_argv))
    results |= _evaluate(settings, problems, adapters, clock)

    data = f"{dataset}, test, n = {len(problems)}"
    write_report(results, list(pairwise(results)), data, {}, settings.output)
    seconds = clock.seconds | {"total": round(clock.passed, 1)}
    summary = _summary(results) | {
        "command": shlex.join(["python", "examples/demo.py", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {pick_device()}",
        "seconds": seconds,
        "peak_memory_gb": round(peak_memory_gb(), 2),
        "curve": _curve(results, adapters) | _validation_curve(adapters["sft"], grpo),
    }
    (config.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _draw_curve(summary, config.output / "learning.png")
    _show_three(results["sft"]["greedy"], results["grpo"]["greedy"])
    _say_what_was_found(config, summary, adapters)
    return 0


def _argv(file: Path, **paths: Path) -> list[str]:
    typed = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
    return ["--config", str(file), *typed]


# --- time -----------------------------------------------------------------------------------------


class Clock:
    """Times the stages (`with clock("sft"): …`) and prints the remaining time at the start of each.

    Args:
        expected: stage → expected seconds on the machine of the constants above.
        limits: stage → time limit in seconds.
    """

    def __init__(self, expected: Mapping[str, float], limits: Mapping[str, float]) -> None:
        self.seconds: dict[str, float] = {}
        self._expected, self._limits, self._began = expected, limits, time.monotonic()

    @property
    def passed(self) -> float:
        return time.monotonic() - self._began

    def left(self) -> float | None:
        """Estimate the seconds that the unfinished stages take; None until a stage is finished."""
        done = sum(self._expected[stage] for stage in self.seconds)
        if not done:
            return None
        speed = sum(self.seconds.values()) / done
        to_come = {s: speed * e for s, e in self._expected.items() if s not in self.seconds}
        return sum(min(seconds, self._limits.get(s, seconds)) for s, seconds in to_come.items())

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        left, number = self.left(), f"[{len(self.seconds) + 1} of {len(self._expected)}]"
        so_long = "no estimate of the time left yet"
        if left is not None:
            minutes = round(left / 60)
            so_long = f"about {minutes} min left" if minutes > 1 else f"about {left:.0f} s left"
        terminal.line(f"\n{number} {stage}: {so_long}")
        started = time.monotonic()
        yield
        self.seconds[stage] = round(time.monotonic() - started, 1)


def _expected_seconds(
    config: DemoConfig, sft: SFTConfig, grpo: GRPOConfig
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the expected seconds of each stage, in order, and the time limits of stages."""
    steps = grpo.steps_for(grpo.max_samples or 2000)
    rollouts = steps * grpo.batch_size * grpo.group_size
    validations = grpo.eval_samples * grpo.eval_group_size_for(grpo.eval_samples or 1)
    validations *= 1 + (steps // grpo.eval_every if grpo.eval_every else 0)
    answers = (1 + config.samples) * config.problems * A_COMPLETION
    expected = {
        "evaluate base": config.problems * OF_THE_BASE,
        "sft": (sft.max_samples or 2000) * (sft.epochs or 1) * AN_EXAMPLE,
        "grpo": rollouts * A_ROLLOUT + validations * A_COMPLETION,
        "evaluate sft": answers,
        "evaluate grpo": answers,
    }
    return expected, {"grpo": 60 * grpo.max_minutes} if grpo.max_minutes else {}


# --- evaluation -----------------------------------------------------------------------------------


def _evaluation_settings(config: DemoConfig, sft: SFTConfig, grpo: GRPOConfig) -> EvaluateConfig:
    from rlm.evaluation import EvaluateConfig

    return EvaluateConfig(
        model=sft.model,
        dataset=grpo.dataset or sft.dataset,
        reasoning_format=sft.reasoning_format or "deepseek",
        samples=config.samples,
        temperature=grpo.temperature,
        max_new_tokens=grpo.max_new_tokens,
        output=config.output / "evaluation",
    )


def _evaluate(
    settings: EvaluateConfig,
    problems: list[Problem],
    adapters: Mapping[str, Path | None],
    clock: Clock,
) -> dict[str, dict[str, Evaluation]]:
    """Evaluate adapters, or the base model (None), on the same problems; load the base model once.

    Adapters are evaluated with greedy decoding and with sampling, the base model only greedily.
    """
    from eval import evaluate_row
    from rlm.model import (
        load_adapter,
        load_base,
        load_tokenizer,
        pick_device,
        release_memory,
        take_adapters_off,
    )

    name, results = required(settings.model, "model"), {}
    tokenizer, base = load_tokenizer(name), load_base(name, pick_device())
    for row, adapter in adapters.items():
        with clock(f"evaluate {row}"):
            model = load_adapter(base, adapter, trainable=False) if adapter else base
            decoding = replace(settings, samples=settings.samples if adapter else 0)
            results[row] = evaluate_row(row, model, tokenizer, problems, (), decoding)
            base = take_adapters_off(model)
    del base, model
    release_memory()  # the next stage loads its own model
    return results


def _summary(results: Rows) -> dict[str, Any]:
    from rlm.evaluation import GRADINGS, paired_bootstrap

    counts = ("correct", "total", "low", "high")
    before, after = (results[row]["sampled"].per_problem(strict=True) for row in ("sft", "grpo"))
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
        "gain": paired_bootstrap(before, after),
    }


def _curve(results: Rows, adapters: Mapping[str, Path]) -> dict[str, list]:
    """Return decoding → [[seconds of training, strict accuracy], …]."""
    from rlm.model import AdapterInfo

    at = {row: AdapterInfo.load(path).run["seconds"] for row, path in adapters.items()}
    at = {"base": 0.0} | {row: s + at["sft"] * (row != "sft") for row, s in at.items()}
    rows = sorted(results, key=at.__getitem__)
    return {
        kind: [
            [at[row], results[row][kind].accuracy(strict=True)]
            for row in rows
            if kind in results[row]
        ]
        for kind in ("greedy", "sampled")
    }


def _validation_curve(sft: Path, grpo: GRPOConfig) -> dict[str, list]:
    """Return the curve of the validations during GRPO, or {} if there were none."""
    from rlm.model import AdapterInfo
    from rlm.runs import read_log

    seconds, points = AdapterInfo.load(sft).run["seconds"], []
    for row in read_log(grpo.run_dir / "metrics.jsonl"):
        took = sum(value for name, value in row.items() if name.startswith("time/"))
        for at, name in ((seconds, "start_accuracy"), (seconds + took, "accuracy")):
            if f"eval/{name}" in row:
                mean = row[f"eval/{name}"]
                ends = {end: row.get(f"eval/{name}_{end}", mean) for end in ("low", "high")}
                points.append([at, {"mean": mean} | ends])
        seconds += took
    return {"validation": points} if points else {}


# --- what is shown at the end ---------------------------------------------------------------------


def _draw_curve(summary: Mapping[str, Any], path: Path) -> None:
    from rlm.evaluation import points
    from rlm.runs import accuracy_over_time

    names = {"greedy": "greedy: the likeliest token", "sampled": "sampled"}
    names["validation"] = "GRPO's validation problems"
    in_minutes = {
        names[kind]: [(seconds / 60, accuracy) for seconds, accuracy in found]
        for kind, found in summary["curve"].items()
    }
    (_, base), (taught, sft), (end, grpo) = in_minutes[names["greedy"]]
    before, after, last = (100 * accuracy["mean"] for accuracy in (base, sft, grpo))
    title = (
        f"{before:.1f} % right before training, {after:.1f} after SFT, {last:.1f} after GRPO;\n"
        f"GRPO over SFT, sampled, paired by problem: {points(summary['gain'])} points"
    )
    stages = {"SFT": (0.0, taught), "GRPO": (taught, end)}
    ylabel = f"right, % of {base['total']} held-out problems"
    accuracy_over_time(in_minutes, stages, path, title, ylabel)


def _show_three(sft: Evaluation, grpo: Evaluation) -> None:
    """Print the number of problems of each kind, and the first of each kind with both answers."""
    pairs = [(a.strict, b.strict) for (a,), (b,) in zip(sft.groups, grpo.groups, strict=True)]
    right = [(a.correct, b.correct) for a, b in pairs]
    counts = [f"{right.count((True, True))} after both stages"]
    counts += [f"{right.count(pattern)} {kind}" for kind, pattern in KINDS.items()]
    terminal.line(
        f"\nRight answers to {len(right)} held-out problems: {', '.join(counts)}. The first of "
        "each kind:"
    )
    for kind, pattern in KINDS.items():
        if pattern not in right:
            continue
        first, problem = right.index(pattern), sft.problems[right.index(pattern)]
        terminal.line(f"\nRight {kind}:")
        terminal.line(textwrap.fill(f"{problem.question} [{problem.answer}]", 2 * WIDTH))
        columns = [
            [f"after {name}: {_verdict(verdict)}", *_wrapped(evaluation.groups[first][0].text)]
            for name, evaluation, verdict in zip(
                ("SFT", "GRPO"), (sft, grpo), pairs[first], strict=True
            )
        ]
        for left, other in zip_longest(*columns, fillvalue=""):
            terminal.line(f"  {left:<{WIDTH}}{other}".rstrip())


def _verdict(verdict: Verdict) -> str:
    return "RIGHT" if verdict.correct else verdict.reason.replace("_", " ").upper()


def _wrapped(text: str) -> list[str]:
    lines = [textwrap.wrap(line, WIDTH - 2) for line in text.splitlines()]
    wrapped = [part for line in lines for part in line]
    return [*wrapped[:LINES], *(["…"] if len(wrapped) > LINES else [])]


def _say_what_was_found(
    config: DemoConfig, summary: Mapping[str, Any], adapters: Mapping[str, Path]
) -> None:
    gain, seconds = summary["gain"], summary["seconds"]["total"]
    terminal.line(
        f"\nGain of GRPO over SFT in sampled accuracy: {gain['points']:+.1f} points (95 % interval "
        f"{gain['low']:+.1f} to {gain['high']:+.1f})\nTotal time: {terminal.duration(seconds)}\n"
        f"Plot: {config.output}/learning.png; all figures: {config.output}/summary.json\n"
        f'\nNext:\n  python inference.py --adapter {adapters["grpo"]} "your question"\n'
        f"  python eval.py --sft-adapter {adapters['sft']} --adapter {adapters['grpo']} "
        "--samples 8\n"
        "  python train_sft.py --output runs/longer/sft_lora    # longer, then\n"
        "  python train_grpo.py --sft-adapter runs/longer/sft_lora "
        "--output runs/longer/final_rlm_lora"
    )


if __name__ == "__main__":
    run_main(main, DemoConfig, description=__doc__)
