"""Trains one role: samples a group of rollouts a problem, and learns lessons where they differ.

The records are the truth. One is written before the library, and holds the library that follows
from it, so that a kill between the two loses nothing; a kill inside a problem loses no paid reply.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes.experience.agent import GENERATORS, Agent
from recipes.experience.library import Library
from recipes.experience.rewards import compute_rewards
from recipes.experience.rollouts import (
    Row,
    differs,
    group_statistics,
    sample_fusion,
    sample_rollout,
    show_group,
)
from rlm.cli.options import UsageError
from rlm.data.problem import Problem
from rlm.runs.atomic_files import append_lines, read_lines, replace_file, replace_json


def records_path(run_dir: Path, name: str) -> Path:
    return run_dir / ("critic_results.jsonl" if name == "critic" else f"{name}_rollouts.jsonl")


class Trainer:
    """Trains one of the three generators, or the critic."""

    def __init__(
        self,
        run_dir: Path,
        agent: Agent,
        judge: Agent | None,
        library: Library,
        *,
        tau: float,
        weights: Sequence[float],
    ) -> None:
        """Open the records, repaired if a kill left them torn; nothing is sent.

        Raises:
            UsageError: they are damaged in another way.
        """
        self.name, self.agent, self.judge, self.library = agent.name, agent, judge, library
        self._tau, self._weights, self.is_critic = tau, weights, agent.name == "critic"
        self._records = records_path(run_dir, self.name)
        self._options = run_dir / f"{self.name}_config.json"
        self.rows = read_lines(self._records)
        if self.is_critic and (part := len(self.rows) % len(GENERATORS)):
            del self.rows[-part:]  # of a problem whose other lines are missing
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows)
            replace_file(self._records, "".join(lines))
        if self.rows:
            library.recover(self.rows[-1])

    def check_options(self, options: Row) -> None:
        """Refuse to go on with other options: records of both would not compare."""
        agents = [self.agent] + [self.judge] * (self.judge is not None)
        options = options | {"weights": list(self._weights)}
        options |= {f"{agent.name} model": agent.model for agent in agents}
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

    def train(
        self,
        problems: Sequence[Problem],
        groups: Mapping[str, Sequence[Any]],
        stop: threading.Event,
    ) -> None:
        """Practise on each problem that has no record yet.

        Args:
            groups: by problem what each rollout takes: its number, or for a fusion (generator, its
                rollouts).
            stop: set by others to end this after the problem in hand.
        """
        done = {row["problem_id"] for row in self.rows}
        rest = [problem for problem in problems if problem.id not in done]
        position = (*GENERATORS, "critic").index(self.name) % len(GENERATORS)
        bar = {"desc": self.name, "total": len(problems), "initial": len(problems) - len(rest)}
        sample = sample_fusion if self.is_critic else sample_rollout
        reward = partial(compute_rewards, self.judge, self._weights)
        with tqdm(**bar, position=position, file=sys.stderr) as progress:
            for problem in rest:
                if stop.is_set():
                    return
                one = partial(sample, self.agent, reward, problem, self.library.lessons)
                given = groups[problem.id]
                with ThreadPoolExecutor(len(given)) as pool:  # the client bounds the requests
                    tasks = [pool.submit(one, *each) for each in given]
                    group = [task.result() for task in tasks]
                self._learn(problem, group)
                progress.update()

    def _learn(self, problem: Problem, group: list[Row]) -> None:
        """Compare a group, learn a lesson if it differs, write the record, then the library."""
        if all(row["error"] for row in group):
            raise UsageError(f"{self.name}: no reply for {problem.id}: {group[0]['error']}")
        now, before = datetime.now(UTC).isoformat(timespec="seconds"), self.library.digest
        # With fewer than two proposals there was nothing to fuse: no prompt had a lesson.
        used = [row for row in group if row.get("rewards", {}).get("r_fusion", 0) is not None]
        self.library.count_use(len(used), sum(row["is_correct"] for row in used))
        mean, std = group_statistics(group)
        teaches, shown = differs(std, self._tau), "–" if mean is None else f"{mean:.3f}"
        verdict = "Extract (σ>τ)" if teaches else "Skip (σ≤τ)"
        _say(f"  {self.name}: μ={shown}, σ={std:.3f} → {verdict}")
        extraction = None
        if teaches:
            shown = show_group(group)
            extraction = self.library.learn(self.agent, problem, shown, problem.answer, now)
            _say_extraction(extraction)
        head = {"problem_id": problem.id, "problem_text": problem.question}
        head |= {"ground_truth": problem.answer}
        tail = {"mean": mean, "std": std, "extraction": extraction, "library_before": before}
        tail |= {"library_after": copy.deepcopy(self.library.items)}
        tail |= {"columns": dict(problem.columns), "timestamp": now}
        if self.is_critic:
            rows = [head | row | {"timestamp": now} for row in group]
            rows[-1] |= tail
        else:
            rows = [head | {"generator_id": self.name, "rollouts": group} | tail]
        append_lines(self._records, rows)
        self.rows += rows
        self.library.commit(rows[-1])


def _say_extraction(extraction: Row) -> None:
    if extraction["error"]:
        _say(f"    ✗ No lesson: {extraction['error']}")
    for done in extraction["operations"]:
        mark = "✅ Saved" if done["kept"] else f"✗ Refused ({done['reason']})"
        _say(f"    {mark}: {done['action']} {done['id'] or ''} {done['content'] or ''}".rstrip())


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
