"""Measures the throughput of our sampler, of transformers' `generate` and of vLLM.

All programs get the same prompts. In the cases of fixed length, every completion (row) has
--new-tokens tokens, and end tokens are ignored. In the case of real lengths, completions end where
those of a training run ended (benchmarks/lengths.json), and only their tokens count. The headline
case has 64 completions of fixed length.

    python -m benchmarks.rollout --json docs/results/rollout.json
    python -m benchmarks.rollout --adapter weights/sft_lora
    python -m benchmarks.rollout --vllm-url http://127.0.0.1:8000
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, samplers
from rlm.cli import flag, run_main, terminal
from rlm.data import FORMATS, load_problems, render_prompt
from rlm.model import load_adapter, load_base, load_tokenizer, pick_device, prepare_process
from rlm.sampling import Sampler, prompt_seed

LENGTHS = Path(__file__).with_name("lengths.json")  # completion lengths of a training run
GROUP = 8  # completions per prompt
HEADLINE_ROWS = 64  # if --rows does not contain it, the largest number of rows is the headline
# With the lengths of LENGTHS: max_num_seqs of our sampler, and the batch size of `generate`.
MAX_NUM_SEQS = 64
# Seconds to wait before each measurement, because vLLM keeps the cores busy for a second or two
# after its last token.
SERVER_REST = 4.0


@dataclass
class RolloutConfig(harness.BenchmarkConfig):
    adapter: Path | None = flag(None, "adapter for our sampler and transformers' `generate`")
    rows: tuple[int, ...] = flag(
        (8, 32, 64, 128), "completions per batch; each number is a case", min=1
    )
    new_tokens: int = flag(128, "completion length in the cases of fixed length, in tokens", min=1)
    lengths: bool = flag(True, "also measure the case of real lengths")
    repeats: int = flag(3, "measured repetitions of each case, after a warmup", min=1)
    vllm_url: str | None = flag(None, "URL of a running `vllm serve` with the same model")

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(rows % GROUP for rows in self.rows) or not self.rows:
            raise ValueError(f"--rows must be multiples of {GROUP} (completions per prompt)")


Arms = Mapping[str, samplers.Draw]


class Bench:
    """Contains the loaded model, and chooses the prompts of each repetition."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self.problems = load_problems(config.dataset, "train", max_samples=512, seed=config.seed)
        self.tokenizer = load_tokenizer(config.model)
        base, adapter = load_base(config.model, pick_device()), config.adapter
        self.policy = load_adapter(base, adapter, trainable=False) if adapter else base

    def work(self, prompts: int, repetition: int) -> tuple[list[list[int]], list[int]]:
        """Return the prompts and seeds of a repetition, which are the same for every program."""
        start = repetition * prompts
        chosen = [self.problems[(start + i) % len(self.problems)] for i in range(prompts)]
        texts = [render_prompt(self.tokenizer, p.question, FORMATS["deepseek"]) for p in chosen]
        return texts, [prompt_seed(self.config.seed, repetition, p.id) for p in chosen]

    def time(
        self, arms: Arms, name: str, lengths: samplers.Lengths, rows_at_once: int
    ) -> dict[str, list[float]]:
        """Measure the tokens per second of the programs in turns, and print each result."""
        rest = SERVER_REST if self.config.vllm_url else 0
        tokens = sum(map(sum, lengths))

        def run(draw: samplers.Draw, repetition: int) -> float:
            prompts, seeds = self.work(len(lengths), repetition)
            return rate(partial(draw, prompts, lengths, seeds, rows_at_once), tokens, rest)

        def say(arm: str, repetition: int, found: float) -> str:
            kept = f"repetition {repetition}" if repetition else "warmup"
            return f"{name}, {arm}, {kept}: {found:.0f} tokens/s"

        timed = {arm: partial(run, draw) for arm, draw in arms.items()}
        return harness.alternate(timed, self.config.repeats, say=say)


def rate(work: Callable[[], int], expected: int, rest: float = 0) -> float:
    """Wait `rest` seconds, run `work`, and return its tokens per second."""
    time.sleep(rest)
    seconds, drawn = harness.timed(work)
    if drawn != expected:
        raise RuntimeError(f"the program generated {drawn} tokens instead of {expected}")
    return expected / seconds


# --- cells --------------------------------------------------------------------------------------


def fixed_cell(bench: Bench, arms: Arms, rows: int) -> dict[str, Any]:
    new_tokens = bench.config.new_tokens
    name = f"{rows} rows x {new_tokens}"
    runs = bench.time(arms, name, [[new_tokens] * GROUP] * (rows // GROUP), rows)
    return harness.cell(name, "tokens/s", runs, more_is_better=True)


def lengths_cell(
    bench: Bench, arms: Arms, recorded: Sequence[Sequence[int]], limit: int
) -> dict[str, Any]:
    rows = sum(map(len, recorded))
    average = sum(map(sum, recorded)) / rows
    name = f"{rows} rows, real lengths"
    runs = bench.time(arms, name, recorded, MAX_NUM_SEQS)
    cell = harness.cell(name, "useful tokens/s", runs, more_is_better=True)
    cell |= {"max_num_seqs": MAX_NUM_SEQS, "length_mean": average, "length_limit": limit}
    cell["note"] = f"mean length {average:.1f}, limit {limit}, {MAX_NUM_SEQS} at a time"
    return cell


# --- all ----------------------------------------------------------------------------------------


def main(config: RolloutConfig) -> int:
    """Load the model, choose the options of `generate`, and run all cases."""
    prepare_process()
    bench = Bench(config)
    # Our sampler comes before `generate`, which changes the model's config.
    arms = {harness.OURS: samplers.Ours(Sampler(bench.policy, bench.tokenizer)).draw}
    generate = samplers.Generate(bench.policy)
    arms["generate"] = generate.draw
    if config.vllm_url:
        arms["vllm"] = samplers.VLLM(config.vllm_url).draw
    # The options are chosen with 32 rows, or with fewer if no case has so many.
    texts, seeds = bench.work(min(32, max(config.rows)) // GROUP, 0)
    tried = generate.choose_options(texts, GROUP, seeds)
    terminal.line(f"generate: {', '.join(f'{k} {s:.1f} s' for k, s in tried.items())}")
    cells = [fixed_cell(bench, arms, rows) for rows in config.rows]
    headline = HEADLINE_ROWS if HEADLINE_ROWS in config.rows else max(config.rows)
    if config.lengths:
        recorded = json.loads(LENGTHS.read_text(encoding="utf-8"))
        cells.append(lengths_cell(bench, arms, recorded["lengths"], recorded["limit"]))
    harness.show("rollouts", cells)
    chosen = {"generate_tried_seconds": tried, "generate_options": generate.options}
    found = harness.report("rollout", cells[config.rows.index(headline)], cells, **chosen)
    harness.write_report(config.json, found)
    return 0


if __name__ == "__main__":
    run_main(main, RolloutConfig, description=__doc__)
