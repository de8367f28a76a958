"""Trains one role: samples a group of rollouts per problem, and learns from their differences.

The records of a run are the source of truth. The record of a problem is written before the library
file and contains the updated library, so nothing is lost if the process is killed between the two
writes. If the process is killed during a problem, the journal preserves every paid reply.
"""

from __future__ import annotations

import copy
import hashlib
import json
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes.experience.agent import GENERATORS, ROLES, Agent
from recipes.experience.library import Library
from recipes.experience.plan import PLAN_SCHEMA, Plan, ReplyError, parse_plan
from recipes.experience.rewards import compute_rewards, fusion_reward, graph_reward
from rlm.api_client import APIError
from rlm.cli import UsageError
from rlm.data import Problem, experience_block
from rlm.runs import (
    append_lines,
    json_lines,
    read_json,
    read_lines,
    replace_file,
    replace_json,
)

REWARDS = ("r_ans", "r_logic", "r_graph", "r_total")
FUSION_REWARDS = ("r_ans", "r_logic", "r_graph", "r_fusion", "r_total")
ROUNDING = 1e-9  # tolerance for rounding errors in the comparison σ > τ
MAX_REJECTED = 3  # problems in a row whose requests were all rejected; then the run ends
MAX_SHOWN = 1500  # maximum characters of each solution in a prompt that compares rollouts

Row = dict[str, Any]
# A problem and the arguments of each of its rollouts: (rollout number,) for a generator, and
# (generator, rollouts of this generator) for the critic.
Task = tuple[Problem, Sequence[tuple[Any, ...]]]
# A plan, its text, and {"r_fusion": …} or {}.
Proposed = tuple[Plan | None, str, dict[str, float | None]]


def records_path(run_dir: Path, name: str) -> Path:
    return run_dir / ("critic_results.jsonl" if name == "critic" else f"{name}_rollouts.jsonl")


@dataclass
class Trainer:
    """Trains one of the three generators, or the critic, whose rollouts are merged plans."""

    agent: Agent
    judge: Agent | None
    library: Library
    run_dir: Path
    tau: float

    def __post_init__(self) -> None:
        """Read the records of the run, and note them in the library.

        If the last process was killed, this also repairs the records and the library. No request
        is sent to a model.
        """
        self.name, self.is_critic = self.agent.name, self.agent.name == "critic"
        self._path = records_path(self.run_dir, self.name)
        self.records = read_lines(self._path)
        if self.is_critic and (part := len(self.records) % len(GENERATORS)):
            del self.records[-part:]  # lines of a problem whose other lines are missing
            replace_file(self._path, json_lines(self.records))
        self.library.resume(self.records)

    def check_options(self, options: Row) -> None:
        """Save the options of the run; raise UsageError if it was started with other options.

        Its existing records would not be comparable with new ones.
        """
        agent, judge = self.agent, self.judge
        prompts = "\0".join(prompt.template for prompt in agent.prompts.values())
        options = options | {
            "temperature": agent.temperature,
            "prompt files": hashlib.sha256(prompts.encode()).hexdigest()[:12],
            f"{self.name} model": agent.model,
            "judge model": judge and judge.model,
        }
        if weights := agent.origin["weights"]:
            hashes = ", ".join(f"{what} {value}" for what, value in weights.items())
            options[f"{self.name} weights"] = hashes
        path = self.run_dir / f"{self.name}_config.json"
        if self.records:
            before = read_json(path)
            was = [
                f"{name} {before[name]} (now {value})"
                for name, value in options.items()
                if before.get(name, value) != value
            ]
            if was:
                raise UsageError(
                    f"{self.run_dir} contains a run of {self.name} with {', '.join(was)}: use "
                    "the same options, or pass another --run-dir (and --library-dir)"
                )
        replace_json(path, options)

    def train(self, tasks: Sequence[Task], stop: threading.Event) -> None:
        """Train on each problem that has no record yet, until `stop` is set.

        A problem whose requests are all rejected, for example because it is too long, teaches
        nothing, and is not tried again. It is recorded only when a later problem has had a reply or
        no problem is left, because a wrong configuration rejects every problem.
        """
        done = {row["problem_id"]: row["problem_text"] for row in self.records}
        for problem, _ in tasks:
            if done.get(problem.id, problem.question) != problem.question:
                raise UsageError(
                    f"the problem {problem.id} has changed since {self.run_dir} was started: pass "
                    "another --run-dir"
                )
        rest = [task for task in tasks if task[0].id not in done]
        position = ROLES.index(self.name) % len(GENERATORS)
        held: list[tuple[Problem, list[Row]]] = []  # problems that are not recorded yet
        bar = {"desc": self.name, "total": len(tasks), "initial": len(tasks) - len(rest)}
        with tqdm(**bar, position=position, file=sys.stderr) as progress:
            for problem, group in rest:
                if stop.is_set():
                    return
                lessons = experience_block(self.library.lessons)
                with ThreadPoolExecutor(len(group)) as pool:  # the client bounds the requests
                    drawn = [pool.submit(self._sample, problem, lessons, *each) for each in group]
                    rollouts = [future.result() for future in drawn]
                held.append((problem, rollouts))
                if all(row["error"] for row in rollouts):
                    error = f"all requests for {problem.id} failed: {rollouts[0]['error']}"
                    is_last = len(held) in (MAX_REJECTED, len(tasks))
                    if is_last or not all(row["rejected"] for row in rollouts):
                        raise UsageError(f"{self.name}: {error}")
                    _say(f"  {self.name}: {error}")
                    continue
                for each in held:
                    self._learn(*each)
                progress.update(len(held))
                held.clear()
            for each in held:  # the last problems of the run
                self._learn(*each)

    def _sample(self, problem: Problem, lessons: str, number: Any, *proposals: Any) -> Row:
        """Sample a rollout of a problem.

        `number` is the number of the rollout, or for the critic the name of the generator, whose
        rollouts are the proposals. If a call still fails after all retries, the rollout has an
        error and no rewards.
        """
        seed, values = f"{problem.id} {number}", {"problem": problem.question}
        row = {"generator_id" if self.is_critic else "rollout_id": number, "scaffold_error": None}
        propose = self._fuse_plans if self.is_critic else self._write_plan
        try:
            plan, text, r_fusion = propose(row, seed, values | {"experiences": lessons}, *proposals)
            reply = self.agent.ask("answer", seed, values | {"scaffold": text})
            about = (problem, plan, reply.text)
            solved = compute_rewards(*about, judge=self.judge, seed=seed, **r_fusion)
            thought = f"<think>{reply.reasoning}</think>" if reply.reasoning else ""
            solved |= {"solution": thought + reply.text, "error": None, "rejected": False}
        except APIError as error:
            solved = {"answer": "", "is_correct": False, "r_total_of": [], "scored_by": {}}
            solved |= {"answer_reason": "no_reply", "judge_failed": False, "judge_error": None}
            solved |= {"rewards": dict.fromkeys(FUSION_REWARDS if self.is_critic else REWARDS)}
            solved |= {"solution": "", "error": str(error), "rejected": error.is_final}
        rewards, answer = solved.pop("rewards"), solved.pop("answer")
        if self.is_critic:
            return row | {"final_answer": answer, "rewards": rewards} | solved
        return row | {"answer": answer} | rewards | solved

    def _write_plan(self, row: Row, seed: str, values: dict[str, str]) -> Proposed:
        """Request a plan. Return it and its text, or None and the reply if the plan is invalid."""
        row["scaffold"] = _plan_text(None, "")
        reply = self.agent.ask("scaffold", seed, values, schema=PLAN_SCHEMA)
        truncated = reply.finish_reason == "length"
        plan, row["scaffold_error"] = _read_plan(reply.text, truncated=truncated)
        row["scaffold"] = _plan_text(plan, reply.text)
        return plan, plan.text() if plan else reply.text, {}

    def _fuse_plans(
        self, row: Row, seed: str, values: dict[str, str], rollouts: Sequence[Row]
    ) -> Proposed:
        """Request one plan that merges the valid plans of a generator.

        The field `fusion` of the row is `fused` if the merged plan is valid. It is `best_of` if the
        merged plan is invalid (then r_fusion is 0) or if there is only one plan to merge, and
        `none` if there is no valid plan. If fewer than two plans are valid, r_fusion is None.
        """
        read = [(_read_plan(each["scaffold"])[0], each["answer"]) for each in rollouts]
        proposals = [(plan, answer or "–") for plan, answer in read if plan]
        plans = [plan for plan, _ in proposals]
        best, r_fusion = max(plans, key=graph_reward, default=None), None
        row |= {"fused_scaffold": _plan_text(best, ""), "fusion": "best_of" if plans else "none"}
        if len(plans) > 1:
            shown = [
                f"Proposal {number}: {plan.text()}\nIts answer: {answer}"
                for number, (plan, answer) in enumerate(proposals, 1)
            ]
            values |= {"proposals": "\n\n".join(shown)}
            reply = self.agent.ask("fusion", seed, values, schema=PLAN_SCHEMA)
            truncated = reply.finish_reason == "length"
            fused, row["scaffold_error"] = _read_plan(reply.text, truncated=truncated, acyclic=True)
            r_fusion = fusion_reward(fused, plans) if fused else 0.0
            if fused:
                best = fused
                row |= {"fusion": "fused", "fused_scaffold": fused.text()}
        return best, best.text() if best else "–", {"r_fusion": r_fusion}

    def _learn(self, problem: Problem, group: list[Row]) -> None:
        """Learn lessons from a group of rollouts, and save the record of the problem.

        Lessons are extracted only if the standard deviation of the rewards exceeds `tau`.
        """
        now, before = datetime.now(UTC).isoformat(timespec="seconds"), self.library.digest
        # With fewer than two proposals, no fusion prompt was sent. Only this prompt contains the
        # lessons, so such a rollout did not use the lessons.
        used = [
            row
            for row in group
            if not row["error"] and _rewards(row).get("r_fusion", 0) is not None
        ]
        self.library.count_use(len(used), sum(row["is_correct"] for row in used))
        mean, std = group_statistics(group)
        teaches = std > self.tau + ROUNDING
        verdict = "Extract (σ>τ)" if teaches else "Skip (σ≤τ)"
        _say(f"  {self.name}: μ={'–' if mean is None else f'{mean:.3f}'}, σ={std:.3f} → {verdict}")
        extraction = None
        if teaches:
            extraction = self.library.learn(self.agent, problem, show_group(group), now)
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
        self.library.note_problems([problem.question])
        self.library.save()

    def summary(self) -> Row:
        """Count the outcomes of rollouts, groups, operations and calls since the run was started.

        The values are numbers and dicts of numbers, except for `learned`, which is a sentence.
        """
        groups = [row for row in self.records if "library_after" in row]
        rollouts = [r for row in self.records for r in row.get("rollouts", [row])]
        planned = [
            r["scaffold_error"] or "parsed"
            for r in rollouts
            if r["scaffold_error"] or (not r["error"] and r.get("fusion", "fused") == "fused")
        ]
        judged = [r["judge_failed"] for r in rollouts if "judge" in r["scored_by"].values()]
        extractions = [row["extraction"] for row in groups if row["extraction"]]
        operations = [done for extraction in extractions for done in extraction["operations"]]
        agents = filter(None, (self.agent, self.judge))
        summary: dict[str, Any] = {
            "problems": len(groups),
            "rollouts": len(rollouts),
            "right": sum(r["is_correct"] for r in rollouts),
            "failed calls": sum(r["error"] is not None for r in rollouts),
            "plans": _counts(plan.partition(":")[0] for plan in planned),
            "answers": _counts(r["answer_reason"] for r in rollouts),
            "judge": _counts("failed" if failed else "scored" for failed in judged),
            "fusions": _counts(r["fusion"] for r in rollouts if "fusion" in r),
            "groups with σ > τ": len(extractions),
            "extractions": _counts("failed" if e["error"] else "parsed" for e in extractions),
            "operations": _counts(o["reason"] or "kept" for o in operations),
            "lessons": len(self.library.items),
            "retries of this process": sum(agent.client.retries for agent in agents),
        }
        summary = {name: value for name, value in summary.items() if value != {}}
        calls: dict[str, list[Row]] = {}
        for call in self.agent.journal.rows.values():
            for name in (f"{call['role']}: {call['stage']}", "in all"):
                calls.setdefault(name, []).append(call["reply"])
        for name, replies in sorted(calls.items()):
            parts = ("prompt_tokens", "completion_tokens", "cost")
            spent = {part: sum(reply[part] for reply in replies) for part in parts}
            summary[name] = {"calls": len(replies)} | spent
        return {"learned": self.conclusion(summary)} | summary

    def conclusion(self, summary: Row) -> str:
        """Say how to use the learned lessons, or why there are none and what to do about it."""
        if count := len(self.library.items):
            stored = f"{count} {'lesson is' if count == 1 else 'lessons are'} stored in"
            use = f'; to use the library: python inference.py --experiences {self.library.path} "…"'
            return f"{stored} {self.library.path}" + use * (not self.is_critic)
        if not summary["rollouts"]:
            return "nothing: the run contains no problems"
        plans = summary.get("plans", {})
        counts = plans or summary.get("fusions", {})
        if plans.get("parsed"):
            counts = {**summary.get("extractions", {}), **summary.get("operations", {})}
        listed = ", ".join(f"{count} {name}" for name, count in counts.items())
        if self.is_critic and not plans:
            why = "no generator has two valid plans for the same problem, which could be merged"
            remedy = "in --api-config, set generator models that can write plans"
        elif not plans.get("parsed"):
            why = f"no reply was a valid plan ({listed or 'no replies'})"
            remedy = f"raise {self.agent.limited_by}, " * ("truncated" in plans)
            remedy += "set a model in --api-config that can write plans"
        elif not summary["groups with σ > τ"]:
            right = f"{summary['right']} of {summary['rollouts']} attempts were right"
            why = f"the attempts at each problem have similar scores, σ ≤ {self.tau:g} ({right})"
            remedy = "use more or other problems (--max-problems, --dataset), raise --temperature"
        else:
            why = f"{summary['groups with σ > τ']} comparisons gave no valid lesson ({listed})"
            remedy = "set a model in --api-config that can write lessons"
        return (
            f"nothing was learned: {why}; {remedy}, or run: "
            "python -m recipes.experience.select (worked examples, for small models)"
        )


def shown_summary(summary: Row) -> dict[str, str]:
    """Format the values of a summary as text for printing."""
    return {
        name: ", ".join(f"{count:.4g} {what}" for what, count in value.items())
        if isinstance(value, dict)
        else str(value)
        for name, value in summary.items()
    }


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _plan_text(plan: Plan | None, text: str) -> str:
    """Return the plan as JSON. Without a plan, return JSON with `text` under the key `invalid`."""
    return plan.text() if plan else json.dumps({"invalid": text}, ensure_ascii=False)


def _read_plan(
    text: str, *, truncated: bool = False, acyclic: bool = False
) -> tuple[Plan | None, str | None]:
    """Parse a plan. Return (plan, None) if it is valid, and (None, error) otherwise."""
    try:
        return parse_plan(text, acyclic=acyclic), None
    except ReplyError as error:
        return None, "truncated: the token limit cut the plan off" if truncated else str(error)


def _rewards(row: Row) -> dict[str, float | None]:
    """Return the rewards of a generator's or the critic's rollout.

    A generator's rollout has the rewards as top-level keys; the critic's has a key `rewards`.
    """
    return row.get("rewards") or {name: row[name] for name in REWARDS}


def group_statistics(group: Sequence[Row]) -> tuple[float | None, float]:
    """Return the mean μ and the population standard deviation σ of r_total over a group.

    Rollouts that lack a reward are left out: a call or the judge failed, or the critic had fewer
    than two plans to merge. If no rollout remains, μ is None. If fewer than two rollouts remain, σ
    is 0.
    """
    whole = [each for row in group if None not in (each := _rewards(row)).values()]
    totals = [total for each in whole if (total := each["r_total"]) is not None]
    return (statistics.fmean(totals), statistics.pstdev(totals)) if totals else (None, 0.0)


def show_group(group: Sequence[Row]) -> str:
    """Format a group of rollouts for the prompt that compares these rollouts."""
    texts = []
    for number, row in enumerate(group, 1):
        solution = row["solution"]
        if len(solution) > MAX_SHOWN:
            solution = f"{solution[: MAX_SHOWN // 2]} … {solution[-MAX_SHOWN // 2 :]}"
        listed = [f"{k} {'–' if v is None else f'{v:.3g}'}" for k, v in _rewards(row).items()]
        verdict = f"({'right' if row['is_correct'] else 'wrong'}; {', '.join(listed)})"
        if "fusion" in row:
            name, plan = f"Fusion of {row['generator_id']}", row["fused_scaffold"]
        else:
            name, plan = f"Attempt {number}", row["scaffold"]
        answer = row.get("final_answer", row.get("answer")) or "none found"
        texts.append(f"{name} {verdict}\nPlan: {plan}\nSolution: {solution}\nAnswer: {answer}")
    return "\n\n".join(texts)


def _say_extraction(extraction: Row) -> None:
    if extraction["error"]:
        _say(f"    ✗ No lesson: {extraction['error']}")
    for done in extraction["operations"]:
        kept = "✅ Saved" if done["action"] in ("add", "modify") else "✅ Dropped"
        mark = kept if done["kept"] else f"✗ Refused ({done['reason']})"
        _say(f"    {mark}: {done['action']} {done['id'] or ''} {done['content'] or ''}".rstrip())


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
