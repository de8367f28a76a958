"""Record the completions of an evaluation, so that an interrupted evaluation can be resumed.

For each row of the table and each kind of decoding (greedy or sampled), one line is appended to
completions.jsonl in --output as soon as all its completions exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlm.cli import UsageError, terminal
from rlm.data import Format, Problem
from rlm.evaluation.evaluator import Evaluation, grade_completion
from rlm.runs import Journal, check_writable

JOURNAL = "completions.jsonl"


def check_journal(output: Path, resume: bool) -> None:
    """Check early that the journal of completions can be written, and that --resume finds one.

    Raises:
        UsageError: there is no journal to resume, or the directory is not writable.
    """
    check_writable("--output", output)  # fail now rather than after hours of work
    file = output / JOURNAL
    if resume and not file.exists():
        raise UsageError(f"--resume: {file} does not exist; start without --resume")


def open_journal(output: Path, resume: bool) -> Journal:
    """Open the journal of completions; without --resume, an existing journal is deleted.

    Call this only when the models are loaded: a command that fails must not delete the completions
    of an earlier evaluation.
    """
    file = output / JOURNAL
    if not resume:
        file.unlink(missing_ok=True)
    return Journal(file)


@dataclass(frozen=True)
class RowRecord:
    """The stored completions of one row of the table.

    A stored line is used only if it was made with the same adapter, problems and options;
    otherwise the row is sampled again. Stored completions are graded again.
    """

    journal: Journal
    name: str
    made_of: Mapping[str, Any]  # the row's inputs as JSON: model, adapter, problems, options

    def find(
        self, kind: str, decoding: Mapping[str, Any], problems: Sequence[Problem], format: Format
    ) -> Evaluation | None:
        """Return the stored completions; None if none are stored or their inputs differ.

        Args:
            kind: the kind of decoding, "greedy" or "sampled".
            decoding: the parameters of this kind of decoding.
        """
        key = f"{self.name}, {kind}"
        line = self.journal.rows.get(key)
        if line is None:
            return None
        was, now = line["made_of"], {**self.made_of, **decoding}
        changed = [
            f"{name}: {was.get(name)} → {now.get(name)}"
            for name in {**now, **was}
            if was.get(name) != now.get(name)
        ]
        if changed:
            terminal.line(f"{key}: evaluated again ({'; '.join(changed)})")
            return None
        terminal.line(f"{key}: reused from the earlier evaluation ({self.journal.path})")
        groups = [
            [grade_completion(**completion, problem=problem, format=format) for completion in group]
            for problem, group in zip(problems, line["groups"], strict=True)
        ]
        return Evaluation(problems, groups)

    def add(self, kind: str, decoding: Mapping[str, Any], evaluation: Evaluation) -> None:
        """Store the completions of an evaluation; they are on disk when this method returns.

        Raises:
            UsageError: the file cannot be written.
        """
        from rlm.runs import writing  # imported here because it loads torch, which --help must not

        groups = [
            [{"text": g.text, "token_ids": [*g.token_ids], "truncated": g.truncated} for g in group]
            for group in evaluation.groups
        ]
        line = {"made_of": {**self.made_of, **decoding}, "groups": groups}
        with writing(self.journal.path):
            self.journal.add(f"{self.name}, {kind}", line)
