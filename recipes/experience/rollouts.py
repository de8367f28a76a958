"""Rollouts of one problem: a generator's plan and answer, the critic's fusion of plans; a group."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from recipes.experience.agent import Agent
from recipes.experience.plan import Plan, ReplyError, parse_plan
from recipes.experience.rewards import fusion_reward, graph_reward
from rlm.api_client import APIError
from rlm.data.experiences import experience_block
from rlm.data.problem import Problem

REWARDS = ("r_ans", "r_logic", "r_graph", "r_total")
FUSION_REWARDS = ("r_ans", "r_logic", "r_graph", "r_fusion", "r_total")
ROUNDING = 1e-9  # σ > τ means: by more than this
MAX_SHOWN = 1500  # characters of one solution in a prompt that compares several

Row = dict[str, Any]
Reward = Callable[..., Row]  # compute_rewards with a judge and weights


def sample_rollout(
    agent: Agent, reward: Reward, problem: Problem, lessons: Sequence[str], number: int
) -> Row:
    """Sample a plan and a solution that follows it; text that is no plan is followed as it is.

    A call that failed for good makes a row with an error and without rewards.
    """
    seed, plan, text, refused = f"{problem.id} {number}", None, "", None
    block = experience_block(lessons)
    try:
        text = agent.ask("scaffold", seed, experiences=block, problem=problem.question).text
        try:
            plan = parse_plan(text)
        except ReplyError as error:
            refused = str(error)
        solved = _solve(agent, reward, problem, plan, text, seed)
    except APIError as error:
        solved = _failed(error, REWARDS)
    rewards = solved.pop("rewards")
    row = {"rollout_id": number, "scaffold": _plan_text(plan, text)}
    return row | solved | rewards | {"scaffold_error": refused}


def sample_fusion(
    agent: Agent,
    reward: Reward,
    problem: Problem,
    lessons: Sequence[str],
    generator: str,
    rollouts: Sequence[Row],
) -> Row:
    """Fuse the valid plans of one generator into one, and sample a solution that follows it.

    fusion: `fused`; `best_of` where the fusion was refused (r_fusion is 0) or only one proposal is
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
            reply = agent.ask("fusion", seed, experiences=experience_block(lessons), **values)
            try:
                candidate = parse_plan(reply.text)
                candidate.raise_if_cyclic()
                kind, fused = "fused", candidate
                r_fusion = fusion_reward(fused, plans)
            except ReplyError as error:
                refused = str(error)
        solved = _solve(agent, reward, problem, fused, "–", seed, r_fusion=r_fusion)
    except APIError as error:
        solved = _failed(error, FUSION_REWARDS)
    row = {"generator_id": generator, "fused_scaffold": _plan_text(fused, "")}
    row |= {"final_answer": solved.pop("answer")} | solved
    return row | {"fusion": kind, "scaffold_error": refused}


def _solve(
    agent: Agent,
    reward: Reward,
    problem: Problem,
    plan: Plan | None,
    text: str,
    seed: str,
    **r_fusion: float | None,
) -> Row:
    shown = plan.text() if plan else text
    reply = agent.ask("answer", seed, problem=problem.question, scaffold=shown)
    thought = f"<think>{reply.reasoning}</think>" if reply.reasoning else ""
    row = reward(problem, plan, reply.text, seed, **r_fusion)
    return row | {"solution": thought + reply.text, "error": None}


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


def rewards_of(row: Row) -> dict[str, float | None]:
    """Return the rewards of a rollout, whose record holds them flat, or of a fusion."""
    return row.get("rewards") or {name: row[name] for name in REWARDS}


def group_statistics(group: Sequence[Row]) -> tuple[float | None, float]:
    """Return (μ, population σ) of r_total over the rollouts that have all their rewards.

    What a failed call or a failed judge left open compares with nothing. Without any rollout
    μ is None; fewer than two do not differ: σ is 0.
    """
    rewards = [rewards_of(row) for row in group]
    totals = [each["r_total"] for each in rewards if None not in each.values()]
    return (statistics.fmean(totals), statistics.pstdev(totals)) if totals else (None, 0.0)


def differs(std: float, tau: float) -> bool:
    """Tell whether σ > τ, rounding noise apart."""
    return std > tau + ROUNDING


def show_group(group: Sequence[Row], *, with_rewards: bool = True) -> str:
    """Show a group for the prompt that compares it; without rewards, not who is right."""
    texts = []
    for number, row in enumerate(group, 1):
        solution = row["solution"]
        if len(solution) > MAX_SHOWN:
            solution = f"{solution[: MAX_SHOWN // 2]} … {solution[-MAX_SHOWN // 2 :]}"
        listed = [f"{k} {'–' if v is None else f'{v:.3g}'}" for k, v in rewards_of(row).items()]
        verdict = f" ({'right' if row['is_correct'] else 'wrong'}; {', '.join(listed)})"
        name = f"Fusion of {row['generator_id']}" if "fusion" in row else f"Attempt {number}"
        plan = row.get("fused_scaffold", row.get("scaffold"))
        answer = row.get("final_answer", row.get("answer")) or "none found"
        head = name + verdict if with_rewards else name
        texts.append(f"{head}\nPlan: {plan}\nSolution: {solution}\nAnswer: {answer}")
    return "\n\n".join(texts)
