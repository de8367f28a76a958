"""`evaluate.py --audit-reward`: where do graders disagree on what a run has sampled?

A verifier that misses right answers looks like a model that does not learn. Every completion of a
run's samples.jsonl is graded strictly, leniently, and by math-verify where it is installed. It runs
in a process of its own with a limit by the clock: what it is given may take it minutes.
"""

from __future__ import annotations

import importlib.util
import json
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlm.cli import terminal
from rlm.cli.options import UsageError
from rlm.data.prompts import FORMATS, Format
from rlm.evaluation.evaluate import wilson_interval
from rlm.grading.answers import grade
from rlm.runs.atomic_files import read_log, replace_json

TIME_LIMIT = 5.0  # seconds for one answer
START_LIMIT = 60.0  # for importing sympy
EXAMPLES = 5  # shown of each kind of disagreement
LONGEST = 20_000  # characters handed to math-verify

# Reads one JSON [gold, text] a line, writes true, false or null. Its own time limits use a signal;
# they are off, the clock of the parent decides.
WORKER = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from math_verify import parse, verify
print("ready", flush=True)
for line in sys.stdin:
    gold, text = json.loads(line)
    try:
        expected = parse(gold, parsing_timeout=None)
        found = parse(text, parsing_timeout=None)
        result = bool(verify(expected, found, timeout_seconds=None)) if expected else None
    except Exception:
        result = None
    print(json.dumps(result), flush=True)
"""


class MathVerify:
    """A second opinion from another process: True, False, or None (it failed or took too long)."""

    def __init__(self, time_limit: float = TIME_LIMIT) -> None:
        self.time_limit, self.timeouts = time_limit, 0
        self._process: subprocess.Popen[str] | None = None

    @staticmethod
    def installed() -> bool:
        return importlib.util.find_spec("math_verify") is not None

    def __call__(self, gold: str, text: str) -> bool | None:
        ready = self._process is not None
        if not ready:
            self._process = self._start()
            ready = bool(self._line(START_LIMIT))
        with suppress(BrokenPipeError):  # it died: no line comes
            self._process.stdin.write(json.dumps([gold, text[-LONGEST:]]) + "\n")
            self._process.stdin.flush()
        line = self._line(self.time_limit) if ready else ""
        if not line:
            self.timeouts += 1
            self.close()
            return None
        return json.loads(line)

    def _line(self, seconds: float) -> str:
        """The next line of the worker; "" if none comes in time, or it has died."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            return self._process.stdout.readline() if ready.select(seconds) else ""

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )


@dataclass
class Audit:
    """How many completions each pair of graders sees differently, and some of them."""

    graders: tuple[str, ...]
    completions: int = 0
    correct: Counter[str] = field(default_factory=Counter)  # by grader
    differ: Counter[tuple[str, str]] = field(default_factory=Counter)  # (says right, says wrong)
    reasons: Counter[str] = field(default_factory=Counter)  # of strict, where lenient says right
    examples: dict[tuple[str, str], list[dict[str, str]]] = field(default_factory=dict)
    reward_differs: int = 0  # the run's reward is above 0 where strict says wrong, or the reverse
    timeouts: int = 0

    def add(self, sample: Mapping[str, str], verdicts: Mapping[str, bool | None]) -> None:
        self.completions += 1
        for name, right in verdicts.items():
            self.correct[name] += bool(right)
            for other, wrong in verdicts.items():
                if right and wrong is False:
                    self.differ[name, other] += 1
                    shown = self.examples.setdefault((name, other), [])
                    if len(shown) < EXAMPLES:
                        shown.append(dict(sample))

    def to_dict(self) -> dict[str, object]:
        """As audit.json holds it."""
        return {
            "completions": self.completions,
            "correct": dict(self.correct),
            "false_negatives_of_strict": self.false_negatives(),
            "differ": {f"{a} right, {b} wrong": n for (a, b), n in self.differ.items()},
            "reasons": dict(self.reasons.most_common()),
            "reward_differs_from_strict": self.reward_differs,
            "math_verify_timeouts": self.timeouts,
            "examples": {f"{a} right, {b} wrong": e for (a, b), e in self.examples.items()},
        }

    def false_negatives(self) -> dict[str, dict[str, float]]:
        """Of what another grader finds right, the share that strict does not, with 95 %."""
        found = {}
        for name in self.graders[1:]:
            missed, total = self.differ[name, "strict"], self.correct[name]
            if total:
                low, high = wilson_interval(missed, total)
                found[name] = {"share": missed / total, "low": low, "high": high, "of": total}
        return found


def read_samples(run_dir: Path) -> list[dict]:
    """The groups of a run's samples.jsonl.

    Raises:
        UsageError: the run left none.
    """
    file = run_dir / "samples.jsonl"
    if not file.is_file():
        raise UsageError(f"{file} does not exist; name a run with --run-dir")
    return read_log(file)


def audit(
    groups: Iterable[Mapping], format: Format, second: MathVerify | None, limit: int | None
) -> Audit:
    """Grade up to `limit` completions (none: all) three ways."""
    graders = ("strict", "lenient", *(["math-verify"] if second else []))
    result = Audit(graders)
    for group, text, reward in _completions(groups):
        if limit is not None and result.completions == limit:
            break
        gold, kind = group["answer"], group.get("answer_type", "number")
        strict, lenient = (
            grade(text, gold, strict=flag, kind=kind, **format.tags) for flag in (True, False)
        )
        verdicts: dict[str, bool | None] = {"strict": strict.correct, "lenient": lenient.correct}
        if second:
            verdicts["math-verify"] = second(gold, text.rpartition(f"</{format.reasoning_tag}>")[2])
        sample = {
            "id": group["problem"],
            "gold": gold,
            "strict": strict.reason,
            "lenient": lenient.reason,
            "completion": text,
        }
        result.add(sample, verdicts)
        if lenient.correct and not strict.correct:
            result.reasons[strict.reason] += 1
        result.reward_differs += reward is not None and (reward > 0) != strict.correct
    result.timeouts = second.timeouts if second else 0
    return result


def _completions(groups: Iterable[Mapping]) -> Iterator[tuple[Mapping, str, float | None]]:
    for group in groups:
        for text, reward in zip(group["completions"], group["rewards"], strict=True):
            yield group, text, reward


def audit_run(run_dir: Path, output: Path, limit: int | None = None) -> int:
    """Audit a run's samples: a table, examples, and audit.json under `output`; the exit code.

    Raises:
        UsageError: the run left no samples.
    """
    groups = read_samples(run_dir)
    config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    format = FORMATS[config.get("reasoning_format", "deepseek")]
    second = MathVerify() if MathVerify.installed() else None
    if second is None:
        terminal.line("math-verify is not installed (pip install -e '.[verify]'): two graders")
    try:
        result = audit(groups, format, second, limit)
    finally:
        if second:
            second.close()
    if not result.completions:
        raise UsageError(f"{run_dir}/samples.jsonl holds no completions")
    _show(run_dir, result)
    replace_json(output / "audit.json", result.to_dict())
    terminal.line(f"written: {output}/audit.json")
    return 0


def _show(run_dir: Path, result: Audit) -> None:
    n = result.completions
    rows: dict[str, object] = {
        f"right, {name}": f"{result.correct[name] / n:.1%}" for name in result.graders
    }
    for name, found in result.false_negatives().items():
        share = f"{found['share']:.1%} ({found['low']:.1%} to {found['high']:.1%})"
        rows[f"missed by strict, of {name}'s right"] = share
    if result.reasons:
        rows["why strict says no"] = _counts(result.reasons)
    rows["reward and strict differ"] = f"{result.reward_differs} completions"
    if result.timeouts:
        rows["math-verify gave up"] = f"{result.timeouts} completions"
    terminal.facts(f"Audit of {n} completions of {run_dir}", rows)
    for (right, wrong), examples in result.examples.items():
        count = result.differ[right, wrong]
        terminal.line(f"{count} completions: {right} says right, {wrong} says wrong; for example")
        for example in examples[:2]:
            tail = " ".join(example["completion"][-160:].split())
            terminal.line(f"  gold {example['gold']} ({example['strict']}): …{tail}")


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common(5))
