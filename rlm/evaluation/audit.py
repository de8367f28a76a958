"""Audit the grader (`eval.py --audit-reward`): find the samples on which graders disagree.

A grader that rejects right answers hides what a model has learned. The audit grades every
completion in a run's samples.jsonl strictly, leniently, and with math-verify if it is installed.
math-verify runs in a separate process with a time limit, because some texts take minutes to parse.
"""

from __future__ import annotations

import importlib.util
import json
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import islice, permutations
from pathlib import Path

from rlm.cli import UsageError, terminal
from rlm.data import FORMATS, Format
from rlm.evaluation.statistics import wilson_interval
from rlm.grading import split_completion
from rlm.runs import check_writable, read_json, read_log, replace_json

TIME_LIMIT = 5.0  # time limit of math-verify for one answer, in seconds
START_LIMIT = 60.0  # time limit for starting the worker, which imports sympy, in seconds
EXAMPLES = 5  # number of stored examples of each kind of disagreement
LONGEST = 20_000  # maximum length of a text passed to math-verify, in characters

# The worker process reads one JSON list [gold, text] per line and writes true, false or null.
# math-verify's own time limits use a signal and are disabled; the parent process limits the time.
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
    """Runs math-verify in a separate process.

    A call returns whether the text matches the reference answer, or None if math-verify failed or
    exceeded the time limit.
    """

    def __init__(self) -> None:
        self.timeouts = 0
        self._process: subprocess.Popen[str] | None = None

    @staticmethod
    def installed() -> bool:
        return importlib.util.find_spec("math_verify") is not None

    def __call__(self, gold: str, text: str) -> bool | None:
        ready, process = True, self._process
        if process is None:
            command, pipe = [sys.executable, "-c", WORKER], subprocess.PIPE
            process = self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
            )
            ready = bool(_line(process, START_LIMIT))
        assert process.stdin  # a pipe
        with suppress(BrokenPipeError):  # the worker died
            process.stdin.write(json.dumps([gold, text[-LONGEST:]]) + "\n")
            process.stdin.flush()
        line = _line(process, TIME_LIMIT) if ready else ""
        if not line:
            self.timeouts += 1
            self.close()
            return None
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _line(process: subprocess.Popen[str], seconds: float) -> str:
    """Return the next output line of the process; "" after a timeout or if the process died."""
    assert process.stdout  # a pipe
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        return process.stdout.readline() if ready.select(seconds) else ""


@dataclass
class Audit:
    """The content of audit.json: how often each grader accepts and each pair of graders disagrees.

    "strict", "lenient" and "math-verify" are the names of the graders.
    """

    completions: int = 0
    correct: Counter[str] = field(default_factory=Counter)  # accepted completions, by grader
    differ: Counter[str] = field(default_factory=Counter)  # "lenient right, strict wrong", …
    # Reasons of strict verdicts for the completions that lenient accepts and strict rejects.
    reasons: Counter[str] = field(default_factory=Counter)
    # Completions with a positive reward that the strict grader rejects, or the reverse.
    reward_differs_from_strict: int = 0
    math_verify_timeouts: int = 0  # including crashes of the worker
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)  # by key of `differ`

    def false_negatives(self) -> dict[str, dict[str, float]]:
        """Return, for each other grader, the share of its right answers that strict rejects.

        Each share has a 95 % interval.
        """
        found = {}
        for name, total in self.correct.items():
            if name != "strict" and total:
                missed = self.differ[f"{name} right, strict wrong"]
                low, high = wilson_interval(missed, total)
                found[name] = {"share": missed / total, "low": low, "high": high, "of": total}
        return found


def audit_samples(
    groups: Iterable[Mapping], format: Format, second: MathVerify | None, limit: int | None
) -> Audit:
    """Grade completions with the strict and the lenient grader, and with math-verify if available.

    Answers to open questions are left out, because no grader judges them.

    Args:
        groups: the rows of samples.jsonl.
        second: math-verify, or None if it is not installed.
        limit: the maximum number of completions; None grades all completions.
    """
    result = Audit()
    rollouts = (
        (group, *pair)
        for group in groups
        if group.get("answer_type") != "open"
        for pair in zip(group["completions"], group["rewards"], strict=True)
    )
    for group, text, reward in islice(rollouts, limit):
        gold, asked = group["answer"], format.with_answer_type(group.get("answer_type", "number"))
        strict, lenient = (asked.grade(text, gold, strict=flag) for flag in (True, False))
        verdicts: dict[str, bool | None] = {"strict": strict.correct, "lenient": lenient.correct}
        if second:
            verdicts["math-verify"] = second(gold, split_completion(text, format.reasoning_tag)[1])
        result.completions += 1
        result.correct.update({name: int(bool(right)) for name, right in verdicts.items()})
        sample = {"id": group["problem"], "gold": gold, "completion": text}
        sample |= {"strict": strict.reason, "lenient": lenient.reason}
        for a, b in permutations(verdicts, 2):
            if verdicts[a] and verdicts[b] is False:
                pair = f"{a} right, {b} wrong"
                result.differ[pair] += 1
                if result.differ[pair] <= EXAMPLES:
                    result.examples.setdefault(pair, []).append(sample)
        if lenient.correct and not strict.correct:
            result.reasons[strict.reason] += 1
        result.reward_differs_from_strict += reward is not None and (reward > 0) != strict.correct
    result.math_verify_timeouts = second.timeouts if second else 0
    return result


def audit_run(run_dir: Path, output: Path, limit: int | None = None) -> int:
    """Audit the samples of a run and return the exit code.

    The results and some examples are printed, and audit.json is written to `output`.

    Raises:
        UsageError: the run has no samples, its config cannot be read, or `output` is not writable.
    """
    file, options = run_dir / "samples.jsonl", run_dir / "config.json"
    for needed in (file, options):
        if not needed.is_file():
            raise UsageError(f"{needed} does not exist; pass the folder of a run with --run-dir")
    check_writable("--output", output)  # grading may take hours
    format = FORMATS[read_json(options).get("reasoning_format", "deepseek")]
    if not (has_math_verify := MathVerify.installed()):
        terminal.line(
            "math-verify is not installed (pip install -e '.[verify]'): only two graders are "
            "compared"
        )
    with closing(MathVerify()) as second:
        groups = read_log(file)
        result = audit_samples(groups, format, second if has_math_verify else None, limit)
    if not result.completions:
        raise UsageError(f"{run_dir}/samples.jsonl contains no completions with a reference answer")
    _show(run_dir, result)
    missed = {"false_negatives_of_strict": result.false_negatives()}
    replace_json(output / "audit.json", vars(result) | missed)
    terminal.line(f"written: {output}/audit.json")
    return 0


def _show(run_dir: Path, result: Audit) -> None:
    n = result.completions
    rows = {f"accepted by {name}": f"{right / n:.1%}" for name, right in result.correct.items()}
    for name, found in result.false_negatives().items():
        share = f"{found['share']:.1%} ({found['low']:.1%} to {found['high']:.1%})"
        rows[f"rejected by strict, of those that {name} accepts"] = share
    if result.reasons:
        most = result.reasons.most_common(5)
        reasons = ", ".join(f"{name} {count}" for name, count in most)
        rows["reasons why strict rejects what lenient accepts"] = reasons
    rows["reward differs from strict"] = f"{result.reward_differs_from_strict} completions"
    if result.math_verify_timeouts:
        rows["math-verify timed out or crashed"] = f"{result.math_verify_timeouts} completions"
    terminal.table(f"Audit of {n} completions of {run_dir}", rows)
    for pair, examples in result.examples.items():
        right, wrong = (name.rpartition(" ")[0] for name in pair.split(", "))
        count = result.differ[pair]
        terminal.line(f"{right} accepts {count} completions that {wrong} rejects, such as:")
        for example in examples[:2]:
            tail = " ".join(example["completion"][-160:].split())
            terminal.line(f"  reference answer {example['gold']} ({example['strict']}): …{tail}")
