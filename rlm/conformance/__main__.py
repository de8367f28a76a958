"""Compare the formulas of GRPO trainers with values computed by hand.

    python -m rlm.conformance                                # print a table
    python -m rlm.conformance --trainer my_trainer.py:adapter --json conformance.json

The table covers this trainer, TRL and verl (if installed), and optionally your own trainer.
The exit code is 1 if a formula of this trainer or of your trainer differs.
docs/reference/conformance.md lists the formulas, and describes how to write an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlm.cli import UsageError, flag, load_from_file, run_main, terminal


@dataclass
class ConformanceConfig:
    trainer: str | None = flag(
        None, "also test your own trainer, through the adapter function FILE.py:NAME"
    )
    json: Path | None = flag(None, "JSON file to which the table is written, with all values")


def main(config: ConformanceConfig) -> int:
    """Print the table. Return 1 if a formula of this trainer or the user's trainer differs."""
    from rlm.conformance.cases import load_cases, table
    from rlm.runs import check_writable, replace_json

    if config.json:
        check_writable("--json", config.json.parent)
        if config.json.is_dir():
            raise UsageError(f"--json {config.json} is a directory: name a file")
    user = load_from_file("--trainer", config.trainer) if config.trainer else None
    result = table(load_cases(), user)
    for line in markdown(result):
        terminal.line(line)
    if config.json:
        replace_json(config.json, result)
    judged = ("rlm", "yours") if user else ("rlm",)
    failed = [
        (name, row["formula"])
        for row in result["formulas"]
        for name in judged
        if row[name]["status"] == "differs"
    ]
    for name, formula in failed:
        terminal.line(f"failed: {name}: {formula}")
    return 1 if failed else 0


def markdown(result: dict[str, Any]) -> list[str]:
    """Format the table as Markdown lines, followed by notes on the known differences."""
    names, notes = result["trainers"], []
    lines = [f"| formula | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for row in result["formulas"]:
        cells = []
        for name in names:
            found = row[name]
            cell = found["status"]
            if cell == "differs":
                cell = f"**differs by {found['by']:.2g}**"
            if note := _note(name, found):
                notes += [note] if note not in notes else []
                by = f"documented as different, by {found['by']:.2g}" if "by" in found else cell
                cell = f"{by} ({1 + notes.index(note)})"
            cells.append(cell)
        lines.append(f"| {row['formula']} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, start=1))]
    return lines + [f"not compared: {n}: {why}" for n, why in result["not installed"].items()]


def _note(name: str, found: Mapping[str, Any]) -> str:
    """Return why a trainer differs or cannot be called, or "" if there is nothing to explain."""
    if found["status"] == "documented":
        return f"{name}: {found['why']} (`{found['place']}`)"
    return f"{name}: {found['why']}" if found["status"] == "cannot be called" else ""


if __name__ == "__main__":
    run_main(main, ConformanceConfig, description=__doc__)
