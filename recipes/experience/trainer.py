"""Trains one role: samples a group of rollouts a problem, and learns a lesson where they differ.

The records are the truth. One is written before the library, and holds the library that follows
from it, so that a kill between the two loses nothing; a kill inside a problem loses no paid reply.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes.experience.agent import GENERATORS, Agent
from recipes.experience.library import Library
from recipes.experience.plan import Plan, ReplyError, parse_plan
from recipes.experience.rewards import compute_rewards, fusion_reward, graph_reward
from rlm.api_client import APIError
from rlm.cli import UsageError
from rlm.data import Problem, experience_block
from rlm.runs import append_lines, read_lines, replace_file, replace_json

REWARDS = ("r_ans", "r_logic", "r_graph", "r_total")
FUSION_REWARDS = ("r_ans", "r_logic", "r_graph", "r_fusion", "r_total")
ROUNDING = 1e-9  # σ > τ means: by more than this
MAX_SHOWN = 1500  # characters of one solution in a prompt that compares several

Row = dict[str, Any]


def records_path(run_dir: Path, name: str) -> Path:
    return run_dir / ("critic_results.jsonl" if name == "critic" else f"{name}_rollouts.jsonl")


@dataclass
class Trainer:
    """Trains one of the three generators, or the critic, whose rollouts are fusions of plans."""

    agent: Agent
    judge: Agent | None
    library: Library
    run_dir: Path
    weights: Sequence[float]  # of the rewards
    tau: float

    def __post_init__(self) -> None:
        """Open the records, repaired if a kill left them torn; nothing is sent."""
        self.name, self.is_critic = self.agent.name, self.agent.name == "critic"
        self._path = records_path(self.run_dir, self.name)
        self.records = read_lines(self._path)
        if self.is_critic and (part := len(self.records) % len(GENERATORS)):
            del self.records[-part:]  # of a problem whose other lines are missing
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in self.records)
            replace_file(self._path, "".join(lines))
        if self.records:
            self.library.recover(self.records[-1])

    def check_options(self, options: Row) -> None:
        """Refuse to go on with other options: records of both would not compare."""
        agents = filter(None, (self.agent, self.judge))
        options = options | {f"{agent.name} model": agent.model for agent in agents}
        path = self.run_dir / f"{self.name}_config.json"
        if self.records and path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            names = dict.fromkeys([*before, *options])
            changed = [name for name in names if before.get(name) != options.get(name)]
            if changed:
                was = ", ".join(f"{n} {before.get(n)} (now {options.get(n)})" for n in changed)
                raise UsageError(
                    f"{self.run_dir} holds a run of {self.name} with {was}; go on with "
                    "that, or name another --run-dir (and --library-dir)"
                )
        replace_json(path, options)

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
        done = {row["problem_id"] for row in self.records}
        rest = [problem for problem in problems if problem.id not in done]
        position = (*GENERATORS, "critic").index(self.name) % len(GENERATORS)
        bar = {"desc": self.name, "total": len(problems), "initial": len(problems) - len(rest)}
        sample = self._sample_fusion if self.is_critic else self._sample_rollout
        with tqdm(**bar, position=position, file=sys.stderr) as progress:
            for problem in rest:
                if stop.is_set():
                    return
                given, lessons = groups[problem.id], experience_block(self.library.lessons)
                with ThreadPoolExecutor(len(given)) as pool:  # the client bounds the requests
                    tasks = [pool.submit(sample, problem, lessons, *each) for each in given]
                    group = [task.result() for task in tasks]
                self._learn(problem, group)
                progress.update()

    def _sample_rollout(self, problem: Problem, lessons: str, number: int) -> Row:
        """Sample a plan and a solution that follows it; text that is no plan is followed as it is.

        A call that failed for good makes a row with an error and without rewards.
        """
        seed, plan, text, refused = f"{problem.id} {number}", None, "", None
        values = {"experiences": lessons, "problem": problem.question}
        try:
            text = self.agent.ask("scaffold", seed, **values).text
            try:
                plan = parse_plan(text)
            except ReplyError as error:
                refused = str(error)
            solved = self._solve(problem, plan, text, seed)
        except APIError as error:
            solved = _failed(error, REWARDS)
        rewards = solved.pop("rewards")
        row = {"rollout_id": number, "scaffold": _plan_text(plan, text)}
        return row | solved | rewards | {"scaffold_error": refused}

    def _sample_fusion(
        self, problem: Problem, lessons: str, generator: str, rollouts: Sequence[Row]
    ) -> Row:
        """Fuse a generator's valid plans into one, and sample a solution that follows it.

        fusion: `fused`; `best_of` where the fusion was refused (r_fusion is 0) or only one plan is
        valid; `none` where no one is (r_fusion is None: there was nothing to fuse).
        """
        proposals = [(p, row["answer"]) for row in rollouts if (p := _valid_plan(row["scaffold"]))]
        plans = [plan for plan, _ in proposals]
        fused = max(plans, key=graph_reward, default=None)
        kind, refused = "best_of" if plans else "none", None
        r_fusion = 0.0 if len(plans) > 1 else None
        seed = f"{problem.id} {generator}"
        try:
            if len(plans) > 1:
                shown = [
                    f"Proposal {number}: {plan.text()}\nIts answer: {answer or '–'}"
                    for number, (plan, answer) in enumerate(proposals, 1)
                ]
                values = {"problem": problem.question, "proposals": "\n\n".join(shown)}
                reply = self.agent.ask("fusion", seed, experiences=lessons, **values)
                try:
                    candidate = parse_plan(reply.text)
                    candidate.raise_if_cyclic()
                    kind, fused = "fused", candidate
                    r_fusion = fusion_reward(fused, plans)
                except ReplyError as error:
                    refused = str(error)
            solved = self._solve(problem, fused, "–", seed, r_fusion=r_fusion)
        except APIError as error:
            solved = _failed(error, FUSION_REWARDS)
        row = {"generator_id": generator, "fused_scaffold": _plan_text(fused, "")}
        row |= {"final_answer": solved.pop("answer")} | solved
        return row | {"fusion": kind, "scaffold_error": refused}

    def _solve(
        self, problem: Problem, plan: Plan | None, text: str, seed: str, **r_fusion: float | None
    ) -> Row:
        text = plan.text() if plan else text
        reply = self.agent.ask("answer", seed, problem=problem.question, scaffold=text)
        thought = f"<think>{reply.reasoning}</think>" if reply.reasoning else ""
        about = (problem, plan, reply.text, self.weights)
        rewards = compute_rewards(*about, judge=self.judge, seed=seed, **r_fusion)
        return rewards | {"solution": thought + reply.text, "error": None}

    def _learn(self, problem: Problem, group: list[Row]) -> None:
        """Compare a group, learn a lesson if it differs, write the record, then the library."""
        if all(row["error"] for row in group):
            raise UsageError(f"{self.name}: no reply for {problem.id}: {group[0]['error']}")
        now, before = datetime.now(UTC).isoformat(timespec="seconds"), self.library.digest
        # With fewer than two proposals there was nothing to fuse: no prompt had a lesson.
        used = [row for row in group if row.get("rewards", {}).get("r_fusion", 0) is not None]
        self.library.count_use(len(used), sum(row["is_correct"] for row in used))
        mean, std = group_statistics(group)
        teaches = std > self.tau + ROUNDING
        verdict = "Extract (σ>τ)" if teaches else "Skip (σ≤τ)"
        _say(f"  {self.name}: μ={'–' if mean is None else f'{mean:.3f}'}, σ={std:.3f} → {verdict}")
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
        append_lines(self._path, rows)
        self.records += rows
        self.library.commit(rows[-1])


def _failed(error: APIError, rewards: Sequence[str]) -> Row:
    row = {"answer": "", "is_correct": False, "rewards": dict.fromkeys(rewards)}
    row |= {"r_total_of": [], "answer_reason": "no_reply", "scored_by": {}}
    return row | {"judge_failed": False, "judge_error": None, "solution": "", "error": str(error)}


def _plan_text(plan: Plan | None, text: str) -> str:
    """Write JSON in any case; what is no plan stands under `invalid`."""
    return plan.text() if plan else json.dumps({"invalid": text}, ensure_ascii=False)


def _valid_plan(text: str) -> Plan | None:
    try:
        return parse_plan(text)
    except ReplyError:
        return None


def _rewards(row: Row) -> dict[str, float | None]:
    """Return the rewards of a rollout, whose record holds them flat, or of a fusion."""
    return row.get("rewards") or {name: row[name] for name in REWARDS}


def group_statistics(group: Sequence[Row]) -> tuple[float | None, float]:
    """Return (μ, population σ) of r_total over the rollouts that have all their rewards.

    What a failed call or a failed judge left open compares with nothing. Without any rollout
    μ is None; fewer than two do not differ: σ is 0.
    """
    rewards = [_rewards(row) for row in group]
    totals = [each["r_total"] for each in rewards if None not in each.values()]
    return (statistics.fmean(totals), statistics.pstdev(totals)) if totals else (None, 0.0)


def show_group(group: Sequence[Row], *, with_rewards: bool = True) -> str:
    """Show a group for the prompt that compares it; without rewards, not who is right."""
    texts = []
    for number, row in enumerate(group, 1):
        solution = row["solution"]
        if len(solution) > MAX_SHOWN:
            solution = f"{solution[: MAX_SHOWN // 2]} … {solution[-MAX_SHOWN // 2 :]}"
        listed = [f"{k} {'–' if v is None else f'{v:.3g}'}" for k, v in _rewards(row).items()]
        verdict = f" ({'right' if row['is_correct'] else 'wrong'}; {', '.join(listed)})"
        name = f"Fusion of {row['generator_id']}" if "fusion" in row else f"Attempt {number}"
        plan = row.get("fused_scaffold", row.get("scaffold"))
        answer = row.get("final_answer", row.get("answer")) or "none found"
        head = name + verdict if with_rewards else name
        texts.append(f"{head}\nPlan: {plan}\nSolution: {solution}\nAnswer: {answer}")
    return "\n\n".join(texts)


def _say_extraction(extraction: Row) -> None:
    if extraction["error"]:
        _say(f"    ✗ No lesson: {extraction['error']}")
    for done in extraction["operations"]:
        mark = "✅ Saved" if done["kept"] else f"✗ Refused ({done['reason']})"
        _say(f"    {mark}: {done['action']} {done['id'] or ''} {done['content'] or ''}".rstrip())


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
