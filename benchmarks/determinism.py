"""Whether `--deterministic` trains to the same bits in every setting, and how much time it takes.

One short GRPO run in several settings: threads, batch limits, processes, and a resume in the
middle. Each is a process of its own; the report has the hash of each adapter. The reward is the
parity of a completion's length, so that nearly every group has a difference to learn from.

    python -m benchmarks.determinism --json docs/results/determinism.json
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import harness
from rlm.cli import flag, run_main
from rlm.evaluation import show_table
from rlm.runs import read_lines

SMALL = ("--max-num-seqs=7", "--train-batch-size=1")
THREADS = 2  # of the runs that have more than one


@dataclass
class DeterminismConfig(harness.BenchmarkConfig):
    steps: int = flag(10, "steps of each run", min=2)
    batch_size: int = flag(8, "problems in a step", min=2)
    group_size: int = flag(8, "completions of each", min=2)
    max_new_tokens: int = flag(96, "longest completion", min=1)
    repeats: int = flag(1, "runs with and without --deterministic that are timed, in turns", min=1)


def odd_length(completions: Sequence[str], **columns: Any) -> list[float]:
    """1 for a completion of an odd number of characters: a reward that needs no right answer."""
    return [float(len(text) % 2) for text in completions]


def train(
    config: DeterminismConfig,
    folder: Path,
    *flags: str,
    deterministic: bool = True,
    threads: int = 1,
    processes: int = 1,
) -> dict[str, Any]:
    """Train in a process of its own; returns the adapter's hash and the seconds of its steps.

    Raises:
        UsageError: it failed.
    """
    options = {
        "model": config.model, "dataset": config.dataset, "sft-adapter": "none",
        "reward": f"{__file__}:odd_length", "dtype": "float32", "sampler-dtype": "float32",
        "sampler": "merged", "steps": config.steps, "batch-size": config.batch_size,
        "group-size": config.group_size, "max-new-tokens": config.max_new_tokens,
        "eval-samples": 0, "sample-every": 0, "save-every": 1, "keep-checkpoints": config.steps + 1,
        "seed": config.seed, "run-dir": folder / "run", "output": folder / "adapter",
    }  # fmt: skip
    distributed = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    harness.run_script(
        "train_grpo.py",
        *(f"--{name}={value}" for name, value in options.items()),
        *flags,
        *["--deterministic"] * deterministic,
        launch=distributed if processes > 1 else (),
        OMP_NUM_THREADS=str(threads),
    )
    rows = read_lines(folder / "run" / "metrics.jsonl", repair=False)
    weights = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    seconds = [row["time/sample"] + row["time/learn"] for row in rows]
    return {"sha256": hashlib.sha256(weights).hexdigest(), "step_seconds": seconds}


def measure(config: DeterminismConfig, folder: Path) -> dict[str, Any]:
    """Train in every setting; returns the report."""
    half, found = config.steps // 2, {}
    for repeat in range(config.repeats):
        for name, deterministic in (("without the option", False), ("deterministic", True)):
            options = {"deterministic": deterministic, "threads": THREADS}
            run = f"{name}, {THREADS} threads" + f", run {repeat + 1}" * (config.repeats > 1)
            found[run] = train(config, folder / run, **options)
    other, small = "without the option, small batches", "deterministic, 1 thread, small batches"
    found[other] = train(config, folder / other, *SMALL, deterministic=False)
    found[small] = train(config, folder / small, *SMALL)
    resumed = f"deterministic, resumed at step {half}"
    shutil.copytree(folder / small / "run", folder / resumed / "run")
    for step in range(half + 1, config.steps + 1):
        shutil.rmtree(folder / resumed / "run" / "checkpoints" / f"step_{step:06d}")
    found[resumed] = train(config, folder / resumed, "--resume", threads=THREADS)
    two = "deterministic, 2 processes"
    return found | {two: train(config, folder / two, processes=2)}


def main(config: DeterminismConfig) -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = measure(config, Path(folder))
    rows = {
        name: {"sha256": run["sha256"][:16], "s/step": f"{median(run['step_seconds'][1:]):.1f}"}
        for name, run in found.items()
    }
    show_table("", rows, "setting")
    hashes = {run["sha256"] for name, run in found.items() if name.startswith("deterministic")}
    content = {"equal": len(hashes) == 1, "runs": found, **harness.provenance("determinism")}
    harness.write_report(config.json, content)
    return 0 if len(hashes) == 1 else 1


if __name__ == "__main__":
    run_main(main, DeterminismConfig, description=__doc__)
