"""Record the completions of an evaluation, so that a stopped one can be resumed.

runs/evaluation/completions.jsonl gets a line for each row and kind of decoding once it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlm.cli import UsageError, terminal
from rlm.data import Format, Problem
from rlm.evaluation.evaluator import Evaluation, grade_completion
from rlm.runs import Journal


def open_journal(output: Path, resume: bool) -> Journal:
    """Open the journal of completions; it is emptied unless --resume.

    Raises:
        UsageError: nothing to resume, or the directory cannot be written.
    """
    from rlm.runs import check_writable

    check_writable("--output", output)  # before hours of work, not after
    file = output / "completions.jsonl"
    if not resume:
        file.unlink(missing_ok=True)
    elif not file.exists():
        raise UsageError(f"--resume: {file} does not exist; start without it")
    return Journal(file)


@dataclass(frozen=True)
class RowRecord:
    """The completions of one row. Stored completions are graded again.

    A stored line is used only if adapter, problems and options are the same; otherwise the row is
    sampled again.
    """

    journal: Journal
    name: str
    made_of: Mapping[str, Any]  # model, adapter, problems, decoding: as JSON

    def find(
        self, kind: str, decoding: Mapping[str, Any], problems: Sequence[Problem], format: Format
    ) -> Evaluation | None:
        """Return the stored completions; None if there are none or their inputs differ.

        Args:
            kind: "greedy" or "sampled".
            decoding: the parameters of this kind.
        """
        key = f"{self.name}, {kind}"
        line = self.journal.rows.get(key)
        if line is None:
            return None
        was, now = line["made_of"], {**self.made_of, **decoding}
        changed = [
            f"{name}: {was.get(name)} → {now[name]}" for name in now if was.get(name) != now[name]
        ]
        if changed:
            terminal.line(f"{key}: evaluated again ({'; '.join(changed)})")
            return None
        terminal.line(f"{key}: kept from the earlier evaluation ({self.journal.path})")
        groups = [
            [grade_completion(**completion, problem=problem, format=format) for completion in group]
            for problem, group in zip(problems, line["groups"], strict=True)
        ]
        return Evaluation(problems, groups)

    def add(self, kind: str, decoding: Mapping[str, Any], evaluation: Evaluation) -> None:
        """Store completions; they are on the disk when this returns.

        Raises:
            UsageError: the file cannot be written.
        """
        from rlm.runs import writing  # imports torch, which --help does not need

        groups = [
            [{"text": g.text, "tokens": g.tokens, "truncated": g.truncated} for g in group]
            for group in evaluation.groups
        ]
        line = {"made_of": {**self.made_of, **decoding}, "groups": groups}
        with writing(self.journal.path):
            self.journal.add(f"{self.name}, {kind}", line)
