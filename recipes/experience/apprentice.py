"""A role that learns: its library, its cache of records, its journal of paid replies.

The cache is the truth. A record is written before the library, and holds the library that follows
from it, so that a kill between the two loses nothing; a kill inside a problem loses no paid reply.
"""

from __future__ import annotations

import fcntl
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes.experience.attempts import Actor, Row, differs, group_statistics, show_attempts
from recipes.experience.library import Library
from recipes.experience.roles import GENERATORS
from rlm.cli import UsageError
from rlm.data import Problem
from rlm.runs import Journal, append_lines, read_lines, replace_file, replace_json


def cache_path(run_dir: Path, name: str) -> Path:
    """Where the records of a role are."""
    return run_dir / ("critic_results.jsonl" if name == "critic" else f"{name}_rollouts.jsonl")


@contextmanager
def sole_writer(name: str, *directories: Path) -> Iterator[None]:
    """Lock the role's files in its run's directory, and in that of the libraries.

    Raises:
        UsageError: another process writes some of them.
    """
    with ExitStack() as streams:
        for directory in {path.resolve(): path for path in directories}.values():
            directory.mkdir(parents=True, exist_ok=True)
            stream = streams.enter_context((directory / f".{name}.lock").open("w"))
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(f"another process runs {name} in {directory}") from error
        yield


class Apprentice:
    """One of the three generators, or the critic."""

    def __init__(self, name: str, run_dir: Path, library: Library, tau: float) -> None:
        """Open the files, repaired if a kill left them torn; nothing is sent.

        Raises:
            UsageError: they are damaged in another way.
        """
        self.name, self.library, self._tau = name, library, tau
        self.is_critic = name == "critic"
        self.cache, self._options = cache_path(run_dir, name), run_dir / f"{name}_config.json"
        self.journal = Journal(run_dir / f"{name}_calls.jsonl")
        self.rows = read_lines(self.cache)
        if self.is_critic and (part := len(self.rows) % len(GENERATORS)):
            del self.rows[-part:]  # of a problem whose other lines are missing
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows)
            replace_file(self.cache, "".join(lines))
        if self.rows:
            library.recover(self.rows[-1])

    def check_options(self, options: Row) -> None:
        """
        Raises:
            UsageError: the cache was made with others; records of both would not compare.
        """
        if self.rows and self._options.exists():
            before = json.loads(self._options.read_text(encoding="utf-8"))
            names = dict.fromkeys([*before, *options])
            changed = [name for name in names if before.get(name) != options.get(name)]
            if changed:
                was = ", ".join(f"{n} {before.get(n)} (now {options.get(n)})" for n in changed)
                raise UsageError(
                    f"{self._options.parent} holds a run of {self.name} with {was}; go on with "
                    "that, or name another --run-dir (and --library-dir)"
                )
        replace_json(self._options, options)

    def practise(
        self,
        actor: Actor,
        problems: Sequence[Problem],
        material: Mapping[str, Sequence[Any]],
        stop: threading.Event,
    ) -> None:
        """Attempt each problem that has no record yet; learn from the difference; record it.

        Args:
            material: by problem what each attempt takes: a number for a generator's rollout,
                (generator, its rollouts) for a fusion.
            stop: set by others to end this after the problem in hand.
        """
        done = {row["problem_id"] for row in self.rows}
        rest = [problem for problem in problems if problem.id not in done]
        position = (*GENERATORS, "critic").index(self.name) % len(GENERATORS)
        bar = {"desc": self.name, "total": len(problems), "initial": len(problems) - len(rest)}
        with tqdm(**bar, position=position, file=sys.stderr) as progress:
            for problem in rest:
                if stop.is_set():
                    return
                attempt = partial(actor.fusion if self.is_critic else actor.rollout, problem)
                lessons = self.library.lessons
                tasks = [partial(attempt, lessons, *each) for each in material[problem.id]]
                self._record(actor, problem, _at_once(tasks))
                progress.update()

    def _record(self, actor: Actor, problem: Problem, attempts: list[Row]) -> None:
        """Compare the attempts, learn, write the record, then the library."""
        if all(row["error"] for row in attempts):
            raise UsageError(f"{self.name}: no reply for {problem.id}: {attempts[0]['error']}")
        now, before = datetime.now(UTC).isoformat(timespec="seconds"), self.library.digest
        # With fewer than two proposals there was nothing to fuse: no prompt had a lesson.
        used = [row for row in attempts if row["rewards"].get("r_fusion", 0) is not None]
        self.library.count_use(len(used), sum(row["is_correct"] for row in used))
        mean, std = group_statistics([row["rewards"] for row in attempts])
        teaches, said = differs(std, self._tau), "–" if mean is None else f"{mean:.3f}"
        verdict = "Extract (σ>τ)" if teaches else "Skip (σ≤τ)"
        _say(f"  {self.name}: μ={said}, σ={std:.3f} → {verdict}")
        extraction = self._learn(actor, problem, attempts, now) if teaches else None
        head = {"problem_id": problem.id, "problem_text": problem.question}
        head |= {"ground_truth": problem.answer}
        tail = {"mean": mean, "std": std, "extraction": extraction, "library_before": before}
        tail |= {"library_after": self.library.snapshot(), "columns": dict(problem.columns)}
        tail |= {"timestamp": now}
        if self.is_critic:
            rows = [head | row | {"timestamp": now} for row in attempts]
            rows[-1] |= tail
        else:
            rollouts = [unnested(row) for row in attempts]
            rows = [head | {"generator_id": self.name, "rollouts": rollouts} | tail]
        append_lines(self.cache, rows)
        self.rows += rows
        self.library.commit(rows[-1])

    def _learn(self, actor: Actor, problem: Problem, attempts: list[Row], now: str) -> Row:
        kind = "critic" if self.is_critic else "generator"
        shown = show_attempts(attempts)
        stage = f"{kind}_experience_extraction"
        found = actor.extract(stage, problem, shown, self.library, problem.answer, now)
        if found["error"]:
            _say(f"    ✗ No lesson: {found['error']}")
        for done in found["operations"]:
            mark = "✅ Saved" if done["kept"] else f"✗ Refused ({done['reason']})"
            _say(
                f"    {mark}: {done['action']} {done['id'] or ''} {done['content'] or ''}".rstrip()
            )
        return found


def unnested(attempt: Row) -> Row:
    """With its rewards beside the other fields, as a generator's record has them."""
    pairs = ((v.items() if k == "rewards" else [(k, v)]) for k, v in attempt.items())
    return dict(pair for group in pairs for pair in group)


def _at_once(tasks: Iterable[Callable[[], Row]]) -> list[Row]:
    """Their results in order; the roles bound how many requests are in flight."""
    tasks = list(tasks)
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result() for future in [pool.submit(task) for task in tasks]]


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
