"""Trains the adapter of a cell.

The functions run in the cell's process, write to the cell's directory and return the contents of
`train.json`. The adapter after the last update is evaluated. With early stopping, the trainer may
select an earlier adapter by its validation.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.evidence.judging import Judge
from benchmarks.evidence.plan import (
    ARMS,
    OURS,
    START,
    VALIDATION_PROBLEMS,
    Cell,
    EvidenceConfig,
    made_once,
    read_json,
)
from benchmarks.evidence.pools import pools, validation_problems, without_golds
from rlm.data import Problem
from rlm.grading import grade, split_completion
from rlm.model import peak_memory_gb, prepare_process
from rlm.runs import read_lines
from rlm.training import GRPOConfig, SFTConfig, problems_for_step

Record = dict[str, Any]


def train(config: Mapping[str, Any], arm: str, seed: int) -> Record:
    """Train the cell's adapter into `adapter/`, or resume its training."""
    settings, cell = EvidenceConfig(**config), Cell(arm, seed)
    if ARMS[arm].kind == "base":
        return {}
    return made_once(settings.folder(cell) / "train.json", partial(_train, settings, cell))


def _train(config: EvidenceConfig, cell: Cell) -> Record:
    prepare_process()
    kinds: dict[str, Callable[[EvidenceConfig, Cell], Record]] = {
        "sft": _sft,
        "supervised": _supervised,
        "rejection": _rejection,
        "harvest": _harvest,
        "grpo": _grpo,
        "trl": _trl,
    }
    started, commit = time.monotonic(), harness.code_commit()  # files may change during training
    record = kinds[ARMS[cell.arm].kind](config, cell)
    # If training was killed and resumed, `wall` is the time of the last process alone, including
    # loading, and `seconds` is the training time of all processes.
    wall, peak = time.monotonic() - started, peak_memory_gb()
    return record | {"wall": wall, "peak_memory_gb": peak, "commit": commit}


# --- supervised ---------------------------------------------------------------------------------


def _sft(config: EvidenceConfig, cell: Cell) -> Record:
    solved = pools(config, cell.seed).solved
    record = _fine_tune(config, cell, solved, config.sft_passes * len(solved), config.adapter)
    # If an initial adapter is given, all arms start from it. SFT then ran only to measure its
    # speed, from which `_examples_for` computes the number of examples of the baselines.
    if config.adapter:
        adapter = config.folder(cell) / "adapter"
        shutil.rmtree(adapter)
        shutil.copytree(config.adapter, adapter)
    return record


def _supervised(config: EvidenceConfig, cell: Cell) -> Record:
    """Continue SFT for about as long as this seed's GRPO took, in several passes if needed."""
    learned = pools(config, cell.seed)
    more = learned.practice_solved if cell.arm == "sft_all_solved" else []
    count = _examples_for(config, cell, _budget(config, cell))
    return _fine_tune(config, cell, learned.solved + more, count, _start(config, cell))


def _rejection(config: EvidenceConfig, cell: Cell) -> Record:
    """Run rejection sampling with as many completions as GRPO, for about as long.

    Each round samples its part of the problems with the previous round's adapter. It then trains
    this adapter on all right completions so far. The number of examples is at least that of the
    round's new right completions.
    """
    rounds, practice = ARMS[cell.arm].rounds, pools(config, cell.seed).practice
    adapter, budget = _start(config, cell), _budget(config, cell) / rounds
    kept: dict[tuple[str, str], Problem] = {}
    records = []
    for number in range(1, rounds + 1):
        part = practice[len(practice) * (number - 1) // rounds : len(practice) * number // rounds]
        folder = config.folder(cell) / (f"round_{number}" if number < rounds else "")
        draw = partial(_draw, config, cell, part, adapter)
        drawn = made_once(folder / "drawn.json", draw)
        right = _right(part, drawn["texts"])
        kept |= (new := _distinct(right))
        count = max(len(new), _examples_for(config, cell, budget - drawn["seconds"]))
        examples = list(kept.values())
        learn = partial(_fine_tune, config, cell, examples, count, adapter, folder)
        learned = made_once(folder / "learned.json", learn)
        records.append({"seconds": drawn["seconds"] + learned["seconds"], "right": len(right)})
        adapter = folder / "adapter"
    return {
        "seconds": sum(record["seconds"] for record in records),
        "right": sum(record["right"] for record in records),
        "samples": len(practice) * config.group_size,
        "kept": len(kept),
        "examples": learned["examples"],
        "rounds": records,
    }


def _harvest(config: EvidenceConfig, cell: Cell) -> Record:
    """Run SFT on the right completions of this seed's GRPO run, for as long as its updates took."""
    ours = config.folder(Cell(OURS, cell.seed))
    steps = read_json(ours / "train.json")["steps"]
    drawing = sum(step["sample"] + step["score"] for step in steps)
    answered = {problem.id: problem for problem in pools(config, cell.seed).practice}
    groups = read_lines(ours / "train" / "samples.jsonl", repair=False)
    problems = [answered[group["problem"]] for group in groups]
    right = _right(problems, [group["completions"] for group in groups])
    kept = list(_distinct(right).values())
    count = max(len(kept), _examples_for(config, cell, _budget(config, cell) - drawing))
    record = _fine_tune(config, cell, kept, count, _start(config, cell))
    return record | {
        "seconds": record["seconds"] + drawing,
        "samples": sum(step["samples"] for step in steps),
        "right": len(right),
        "kept": len(kept),
    }


def _draw(config: EvidenceConfig, cell: Cell, practice: Sequence[Problem], adapter: Path) -> Record:
    """Sample a group of completions of each problem."""
    examiner = Judge(config, cell, config.max_new_tokens, adapter)
    started = time.monotonic()
    drawn = examiner(practice, config.group_size)
    texts = [[graded.text for graded in group] for group in drawn.groups]
    return {"seconds": time.monotonic() - started, "texts": texts}


def _right(problems: Sequence[Problem], texts: Sequence[Sequence[str]]) -> list[Problem]:
    """Return a problem for each strictly right completion, with its reasoning as the solution."""
    worked = []
    for problem, group in zip(problems, texts, strict=True):
        for text in group:
            verdict = grade(text, problem.answer, strict=True)
            if verdict.correct and verdict.answer is not None:
                reasoning = (split_completion(text)[0] or "").strip()
                worked.append(Problem(problem.id, problem.question, verdict.answer, reasoning))
    return worked


def _distinct(right: Sequence[Problem]) -> dict[tuple[str, str], Problem]:
    """Return the worked problems without duplicates of problem and reasoning."""
    return {(problem.id, problem.solution): problem for problem in right}


def _start(config: EvidenceConfig, cell: Cell) -> Path:
    return config.folder(Cell(START, cell.seed)) / "adapter"


def _budget(config: EvidenceConfig, cell: Cell) -> float:
    return read_json(config.folder(Cell(OURS, cell.seed)) / "train.json")["seconds"]


def _examples_for(config: EvidenceConfig, cell: Cell, seconds: float) -> int:
    """Return the number of examples that SFT processes in `seconds`, at this seed's SFT speed."""
    sft = read_json(config.folder(Cell(START, cell.seed)) / "train.json")
    return max(1, round(seconds / sft["seconds"] * sft["examples"]))


def _fine_tune(
    config: EvidenceConfig,
    cell: Cell,
    examples: Sequence[Problem],
    count: int,
    start: Path | None = None,
    folder: Path | None = None,
) -> Record:
    """Run or resume SFT on `count` examples, in shuffled passes.

    It starts from the adapter `start`, or from a new adapter.
    """
    import train_sft

    if not examples:
        raise RuntimeError("no completion was right: there is nothing to learn from")
    folder = folder or config.folder(cell)
    options = SFTConfig(
        model=config.model,
        dataset=config.dataset,
        adapter=start,
        tool=config.tool,
        batch_size=config.sft_batch,
        micro_batch=min(config.sft_batch, 8),
        learning_rate=config.more_rate if start else config.sft_rate,
        lora_r=config.lora_r,
        lora_alpha=2 * config.lora_r,
        eval_samples=0,
        seed=cell.seed,
        output=folder / "adapter",
        run_dir=folder / "train",
    )
    shown = problems_for_step(examples, 0, count, cell.seed)
    run = train_sft.train(_resumed(options), shown)
    return {"seconds": run["seconds"], "samples": 0, "examples": run["examples"]}


def _resumed(options: SFTConfig | GRPOConfig) -> Any:
    """Return the options with `resume` set if the run has a checkpoint."""
    begun = any(options.run_dir.glob("checkpoints/step_*/manifest.json"))
    return replace(options, resume=begun)


# --- reinforcement ------------------------------------------------------------------------------


def _grpo(config: EvidenceConfig, cell: Cell) -> Record:
    """Run our GRPO trainer, or resume it from its newest checkpoint."""
    from rlm import GRPOTrainer

    options = _resumed(config.grpo_config(cell, _start(config, cell)))
    if not options.resume:
        shutil.rmtree(options.run_dir, ignore_errors=True)
    practice, arm = pools(config, cell.seed).practice, ARMS[cell.arm]
    if arm.shuffled:
        practice = without_golds(practice, cell.seed)
    reward = flipped_reward(cell.seed, arm.flipped) if arm.flipped else None
    validation = validation_problems(config, VALIDATION_PROBLEMS) if arm.early_stopping else None
    trainer = GRPOTrainer(config.model, options, reward_fn=reward)
    trainer.state.keep = config.steps + 1  # each checkpoint is a point of the curve
    trainer.train(practice, validation)
    rows = read_lines(options.run_dir / "metrics.jsonl", repair=False)
    drawn: Counter[int] = Counter()  # completions per step; DAPO replaces some groups
    for group in read_lines(options.run_dir / "samples.jsonl", repair=False):
        drawn[group["step"]] += len(group["completions"])
    steps = [
        {
            "samples": drawn[row["step"]],
            "sample": row["time/sample"],
            "score": row["time/score"],
            "learn": row["time/learn"],
            "reward": row["reward/mean"],
            "signal": 1 - row["reward/zero_signal_share"],
            "length": row["completion/length_mean"],
            "truncated": row["completion/truncated_rate"],
            "entropy": row.get("policy/entropy"),
        }
        for row in rows
    ]
    return {"steps": steps, "problems": len(practice)} | _timed(steps)


def flipped_reward(seed: int, share: float) -> Callable[..., list[float]]:
    """Return a reward function: the strict reward, flipped for `share` of the completions.

    The same completions are flipped after a resume. With a share of 0.5, the reward is random.
    """

    def flipped(
        prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any
    ) -> list[float]:
        rewards = []
        for place, row in enumerate(zip(prompts, completions, answer, strict=True)):
            prompt, text, gold = row
            coin = hashlib.sha256(f"{seed}\0{place}\0{prompt}\0{text}".encode()).digest()[0]
            rewards.append(float(grade(text, gold, strict=True).correct != (coin < 256 * share)))
        return rewards

    return flipped


def _trl(config: EvidenceConfig, cell: Cell) -> Record:
    from benchmarks import trl_arm  # loads TRL

    options = config.grpo_config(cell, _start(config, cell))
    steps = trl_arm.train(options, pools(config, cell.seed).practice, trl_arm.strict_reward)
    per_step = config.batch_size * config.group_size
    steps = [step | {"samples": per_step} for step in steps]
    return {"steps": steps} | _timed(steps)


def _timed(steps: Sequence[Record]) -> Record:
    """Return the seconds and samples of all steps, and their cumulative sums.

    Also set the `total` seconds of each step, without evaluations and checkpoints.
    """
    for step in steps:
        step["total"] = step["sample"] + step["score"] + step["learn"]
    seconds = list(accumulate(step["total"] for step in steps))
    samples = list(accumulate(step["samples"] for step in steps))
    return {
        "seconds": seconds[-1],
        "seconds_until": seconds,
        "samples": samples[-1],
        "samples_until": samples,
    }
