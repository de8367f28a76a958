"""Runs the unfinished cells, each in its own processes.

The directory of a cell contains `train/` (checkpoints), `adapter/`, `train.json` (written after
training), `scores/` (a file for each test set and for each point of the curve), `result.json`
(written when the cell is done) and `log.txt`. JSON files are written atomically, so the same
command continues after a kill: our trainers from their last checkpoint, the evaluation from the
current test set, and TRL's trainer from the beginning. If a cell fails, its name and the path of
its log are printed, and the other cells still run.
"""

from __future__ import annotations

import time

from benchmarks import harness
from benchmarks.evidence.plan import ARMS, Cell, EvidenceConfig
from rlm.cli import UsageError, terminal, to_dict
from rlm.evaluation import show_table
from rlm.runs import lock_file


def is_done(config: EvidenceConfig, cell: Cell) -> bool:
    return (config.folder(cell) / "result.json").exists()


def is_trained(config: EvidenceConfig, cell: Cell) -> bool:
    return ARMS[cell.arm].kind == "base" or (config.folder(cell) / "train.json").exists()


def run(config: EvidenceConfig) -> tuple[list[Cell], list[Cell]]:
    """Run the chosen cells in order; return the unfinished cells, and those that failed."""
    config.fix()
    chosen, failed = config.chosen_cells(), []
    for cell in chosen:
        for needed in cell.needs:
            if needed not in chosen and not is_trained(config, needed):
                raise UsageError(f"{cell.name} needs {needed.name}: add it to --cells")
    for cell in chosen:
        if is_done(config, cell):
            continue
        if not all(is_trained(config, needed) for needed in cell.needs):
            terminal.line(
                f"{cell.name}: skipped for now, because a cell that it needs is not trained"
            )
            continue
        config.folder(cell).mkdir(parents=True, exist_ok=True)
        try:
            lock = lock_file(config.folder(cell) / "lock", cell.name, "is running it")
        except UsageError as held:
            terminal.line(str(held))
            continue
        with lock:
            if not is_done(config, cell) and not run_cell(config, cell, lock.fileno()):
                failed.append(cell)
    return [cell for cell in chosen if not is_done(config, cell)], failed


def run_cell(config: EvidenceConfig, cell: Cell, lock: int) -> bool:
    """Train and evaluate a cell, each in a child process; return False if a process failed.

    The child keeps the cell's lock open. If the grid is killed, the lock keeps other processes out
    of the cell until the child has ended.
    """
    begun = time.monotonic()
    log = config.folder(cell).resolve() / "log.txt"
    settings = to_dict(config) | {"grid": str(config.grid.resolve())}
    payload = {"config": settings, "arm": cell.arm, "seed": cell.seed}
    for module, function in (("training", "train"), ("judging", "judge")):
        try:
            harness.run_child(
                f"benchmarks.evidence.{module}", function, payload, log=log, inherited=(lock,)
            )
        except harness.ChildFailed:
            terminal.line(f"{cell.name}: failed; see the end of {log}")
            return False
    terminal.line(f"{cell.name}: done in {terminal.duration(time.monotonic() - begun)}")
    return True


def state(config: EvidenceConfig, cell: Cell) -> str:
    folder = config.folder(cell)
    if is_done(config, cell):
        return "done"
    if (folder / "train.json").exists():
        return "trained"
    return "begun" if folder.exists() else "left"


def show(config: EvidenceConfig) -> None:
    """Print a table of the chosen cells."""
    states = {cell.name: {"state": state(config, cell)} for cell in config.chosen_cells()}
    show_table("", states, "cell")
    done = sum(row["state"] == "done" for row in states.values())
    terminal.line(f"{done} of {len(states)} done")
