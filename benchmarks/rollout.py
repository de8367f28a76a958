"""Measure rollouts: tokens per second of our sampler and its peers on the same prompts.

In cells of fixed length, every row draws --new-tokens tokens and end tokens are off. In the cell of
real lengths, rows end where those of a real run ended (benchmarks/lengths.json), and only their
tokens count. The headline is 64 rows of fixed length. Ours is also compared with the floor of this
machine.

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
from statistics import mean
from typing import Any

from benchmarks import floor, harness, samplers
from rlm.cli import flag, run_main, terminal, to_dict
from rlm.data import FORMATS, load_problems, render_prompt
from rlm.model import load_adapter, load_base, load_tokenizer, pick_device, prepare_process
from rlm.sampling import Sampler, prompt_seed

LENGTHS = Path(__file__).with_name("lengths.json")  # lengths of a real run's completions
GROUP = 8  # completions per prompt
HEADLINE_ROWS = 64
# With real lengths: our sampler's max_num_seqs, and the batch size of `generate`.
MAX_NUM_SEQS = 64
# Seconds to wait before each measurement: vLLM's threads go on spinning for a second or two after
# its last token, on the cores that the next arm needs.
SERVER_REST = 4.0


@dataclass
class RolloutConfig(harness.BenchmarkConfig):
    adapter: Path | None = flag(None, "adapter for rlm and generate")
    rows: tuple[int, ...] = flag((8, 32, 64, 128), "completions per batch, one cell each", min=1)
    new_tokens: int = flag(128, "tokens per row in the cells of fixed length", min=1)
    lengths: bool = flag(True, "also replay the recorded lengths")
    repeats: int = flag(3, "measured repetitions of each cell, after a warmup", min=1)
    vllm_url: str | None = flag(None, "URL of a running `vllm serve` with the same model")

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(rows % GROUP for rows in self.rows) or not self.rows:
            raise ValueError(f"--rows must be multiples of {GROUP}, the completions of a prompt")

    @property
    def headline_rows(self) -> int:
        """The rows of the headline cell: HEADLINE_ROWS, or the most rows if --rows lacks them."""
        return HEADLINE_ROWS if HEADLINE_ROWS in self.rows else max(self.rows)


Arms = Mapping[str, samplers.Draw]


class Bench:
    """The loaded model, and the work that each repetition gives to all arms."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self.problems = load_problems(config.dataset, "train", max_samples=512, seed=config.seed)
        self.tokenizer = load_tokenizer(config.model)
        base = load_base(config.model, pick_device())
        self.cost = floor.ModelCost.of(base)
        adapter = config.adapter
        self.policy = load_adapter(base, adapter, trainable=False) if adapter else base

    def ours(self) -> samplers.Ours:
        return samplers.Ours(Sampler(self.policy, self.tokenizer))

    def generate(self) -> samplers.Generate:
        return samplers.Generate(self.policy)

    def work(self, prompts: int, repetition: int) -> tuple[list[list[int]], list[int]]:
        """Return the prompts and seeds of a repetition: new in each, equal for every arm."""
        start = repetition * prompts
        chosen = [self.problems[(start + i) % len(self.problems)] for i in range(prompts)]
        texts = [render_prompt(self.tokenizer, p.question, FORMATS["deepseek"]) for p in chosen]
        return texts, [prompt_seed(self.config.seed, repetition, p.id) for p in chosen]

    def time(
        self, arms: Arms, name: str, lengths: samplers.Lengths, rows_at_once: int
    ) -> dict[str, list[float]]:
        """Measure the tokens per second of the arms in turns, and print a line for each result.

        Args:
            name: the name of the cell, for the printed lines.
            lengths: for each prompt, the lengths of its completions.
        """
        rest = SERVER_REST if self.config.vllm_url else 0
        tokens = sum(map(sum, lengths))

        def run(draw: samplers.Draw, repetition: int) -> float:
            prompts, seeds = self.work(len(lengths), repetition)
            return rate(partial(draw, prompts, lengths, seeds, rows_at_once), tokens, rest)

        def say(arm: str, repetition: int, found: float) -> str:
            kept = f"repetition {repetition}" if repetition else "warm-up"
            return f"{name}, {arm}, {kept}: {found:.0f} tokens/s"

        timed = {arm: partial(run, draw) for arm, draw in arms.items()}
        return harness.alternate(timed, self.config.repeats, say=say)


def rate(work: Callable[[], int], expected: int, rest: float = 0) -> float:
    """Wait `rest` seconds, run `work`, return its tokens per second.

    Raises:
        RuntimeError: not exactly `expected` tokens were drawn.
    """
    time.sleep(rest)
    seconds, drawn = harness.timed(work)
    if drawn != expected:
        raise RuntimeError(f"the arm drew {drawn} tokens instead of {expected}")
    return expected / seconds


# --- cells --------------------------------------------------------------------------------------


def fixed_cell(bench: Bench, arms: Arms, rows: int, rates: Mapping[str, float]) -> dict[str, Any]:
    prompts, new_tokens = rows // GROUP, bench.config.new_tokens
    name = f"{rows} rows x {new_tokens}"
    runs = bench.time(arms, name, [[new_tokens] * GROUP] * prompts, rows)
    length = mean(len(text) for text in bench.work(prompts, 1)[0])
    sizes = {"prompts": prompts, "rows": rows, "prompt_tokens": length, "new": new_tokens / 2}
    step = floor.decode_floor(rates, bench.cost, **sizes)
    least = rows / step["seconds"]
    cell = harness.cell(name, "tokens/s", runs, more_is_better=True)
    share = cell["arms"][harness.OURS]["median"] / least
    cell["floor"] = step | {"tokens_per_second": least, "share": share}
    cell["note"] = f"ours at {share:.0%} of the floor ({step['bound']})"
    return cell


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


def memory_of(arm: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Run one repetition of the headline cell; `run_child` adds the peak memory."""
    prepare_process()
    bench = Bench(RolloutConfig(**config))
    rows = bench.config.headline_rows
    sampler = bench.ours() if arm == harness.OURS else bench.generate()
    prompts, seeds = bench.work(rows // GROUP, 1)
    sampler.draw(prompts, [[bench.config.new_tokens] * GROUP] * len(prompts), seeds, rows)
    return {}


# --- all ----------------------------------------------------------------------------------------


def main(config: RolloutConfig) -> int:
    """Measure peak memory, load the model, choose the options of `generate`, run all cells."""
    prepare_process()
    memory = {}
    # This comes first, because these processes need the memory that the models below will take.
    for arm in (harness.OURS, "generate"):
        arguments = {"arm": arm, "config": to_dict(config)}
        child = harness.run_child("benchmarks.rollout", "memory_of", arguments)
        memory[arm] = child["peak_memory_gb"]
        terminal.line(f"peak memory, {arm}: {memory[arm]:.2f} GB")
    bench, device = Bench(config), pick_device()
    arms = {harness.OURS: bench.ours().draw}  # before `generate`, which changes the model's config
    generate = bench.generate()
    arms["generate"] = generate.draw
    if config.vllm_url:
        arms["vllm"] = samplers.VLLM(config.vllm_url).draw
    rates = floor.measure(device.type, device.dtype)
    terminal.line(
        f"{device}: reads {rates['bytes_per_second'] / 1e9:.1f} GB/s, "
        f"multiplies {rates['flops_per_second'] / 1e9:.0f} GFLOP/s"
    )
    # 32 rows, or fewer if no cell has more.
    texts, seeds = bench.work(min(32, max(config.rows)) // GROUP, 0)
    tried = generate.choose_options(texts, GROUP, seeds)
    terminal.line(f"generate: {', '.join(f'{k} {s:.1f} s' for k, s in tried.items())}")
    cells = []
    for rows in config.rows:
        cells.append(fixed_cell(bench, arms, rows, rates))
        terminal.line(f"{cells[-1]['name']}: {cells[-1]['note']}")
    headline = cells[config.rows.index(config.headline_rows)]
    if config.lengths:
        recorded = json.loads(LENGTHS.read_text(encoding="utf-8"))
        cells.append(lengths_cell(bench, arms, recorded["lengths"], recorded["limit"]))
    harness.show("rollouts", cells)
    found = harness.report(
        "rollout",
        headline,
        cells,
        memory,
        generate_tried_seconds=tried,
        generate_options=generate.options,
        measured_rates=rates,
    )
    harness.write_report(config.json, found)
    return 0


if __name__ == "__main__":
    run_main(main, RolloutConfig, description=__doc__)
