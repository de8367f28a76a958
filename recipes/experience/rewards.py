"""Computes the rewards of a rollout: r_ans, r_logic, r_graph, for a fusion r_fusion; their mean.

Each is in [0, 1], or None where nobody could tell. A judge that fails is never a number: its reward
is None, the weights of the others are renormalised, and `judge_failed` stands in the record.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import networkx

from recipes.experience.agent import Agent
from recipes.experience.formulas import Value, is_formula
from recipes.experience.plan import Plan, ReplyError, execute_plan, find_object
from rlm.api_client import APIError
from rlm.cli import UsageError
from rlm.data import Problem
from rlm.grading import grade, parse_number, split_completion

GENERATOR_WEIGHTS = (0.5, 0.25, 0.25)  # of r_ans, r_logic, r_graph
CRITIC_WEIGHTS = (0.3, 0.2, 0.2, 0.3)  # and of r_fusion
LOGIC_SCORES = ("coherence", "completeness", "verification", "no_errors", "tool_consistency")
NOT_GRADED = ("not_a_number", "gold_unreadable")  # reasons of the exact grader
NO_CONFLICT = 0.7  # the share of conflicts settled, where the proposals have none

_POWER_OF_TEN = re.compile(r" ?(?:×|x|\*|\\times|\\cdot) ?10 ?(?:\^|\*\*) ?\{?([-−+]?\d{1,3})\}?")


def weighted_mean(rewards: Mapping[str, float | None], weights: Sequence[float]) -> float | None:
    """Average the rewards that are there, in the order of the weights; None without any.

    >>> weighted_mean({"r_ans": 0.0, "r_logic": 0.75, "r_graph": 0.80}, GENERATOR_WEIGHTS)
    0.3875
    """
    pairs = [(r, w) for r, w in zip(rewards.values(), weights, strict=True) if r is not None]
    total = math.fsum(weight for _, weight in pairs)
    if not total:
        return None
    return round(math.fsum(reward * weight for reward, weight in pairs) / total, 12)


def relative_tolerance(problem: Problem) -> float:
    """Read how far from its gold an answer may be, as a share of it."""
    given = problem.columns.get("rel_tol", 0)
    try:
        share = float(given)
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise UsageError(f"problem {problem.id}: rel_tol is a share such as 0.01, not {given!r}")
    return share


def grade_answer(text: str, problem: Problem) -> tuple[bool, str, str]:
    """Grade an answer exactly, or within the problem's rel_tol: (correct, the answer, the reason).

    >>> grade_answer("Final answer: 4.9 m", Problem("p", "?", "4.905", columns={"rel_tol": 0.01}))
    (True, '4.9 m', 'correct')
    """
    tolerance = relative_tolerance(problem)
    if tolerance:
        text = _POWER_OF_TEN.sub(lambda match: "e" + match[1].replace("−", "-"), text)
        unit = re.escape(str(problem.columns.get("unit", "")))  # 5 K is no 5000 then
        text = re.sub(rf"(?<=\d) ?{unit}(?!\w)", "", text) if unit else text
    verdict = grade(text, problem.answer, strict=False)
    answer = verdict.answer or ""
    if verdict.reason == "wrong" and tolerance:
        value, gold = parse_number(answer), parse_number(problem.answer)
        if abs(value - gold) <= Fraction(tolerance) * abs(gold):
            return True, answer, "correct"
    return verdict.correct, answer, verdict.reason


def check_logic(plan: Plan, answer: str, tolerance: float = 0.0) -> dict[str, float]:
    """Check a plan without a judge; each check is in [0, 1], and r_logic is their mean.

    Every input of a step is known or was computed before; the steps reach the target; the rules
    are arithmetic; the steps' values can be computed; the target's value is the stated answer.
    """
    run, steps = execute_plan(plan), plan.computation_plan
    rules = [link.rule for link in plan.causal_graph]
    value, stated = run.values.get(plan.target_variable), parse_number(answer)
    reached = plan.target_variable in run.targets
    close = reached and stated is not None and _is_close(value, stated, max(tolerance, 1e-6))
    return {
        "inputs_there": run.with_inputs / len(steps),
        "target_reached": float(reached),
        "rules_parse": sum(map(is_formula, rules)) / len(rules),
        "steps_computed": len(run.targets) / len({step.target for step in steps}),
        "value_is_answer": float(close),
    }


def _is_close(a: Value, b: Value, tolerance: float) -> bool:
    """Compare as math.isclose, but an exact number may be too large for a float."""
    a, b = Fraction(a), Fraction(b)
    return abs(a - b) <= max(Fraction(tolerance) * max(abs(a), abs(b)), Fraction(1, 10**9))


def graph_reward(plan: Plan | None) -> float:
    """Compute 0.3 acyclic + 0.2 coverage of knowns and target + 0.4 links with a rule + 0.1 whole.

    Coverage: the share that the graph has. Whole: the share of its largest component.
    """
    if plan is None:
        return 0.0
    graph, links = plan.graph(), plan.causal_graph
    needed = {*plan.knowns, plan.target_variable}
    largest = max(map(len, networkx.weakly_connected_components(graph)))
    return math.fsum(
        [
            0.3 * networkx.is_directed_acyclic_graph(graph),
            0.2 * sum(name in graph for name in needed) / len(needed),
            0.4 * sum(bool(link.rule.strip()) for link in links) / len(links),
            0.1 * largest / len(graph),
        ]
    )


def fusion_reward(fused: Plan, proposals: Sequence[Plan]) -> float:
    """Compute 0.3 consistency + 0.3 conflict resolution + 0.2 preservation + 0.2 improvement.

    Consistency: how much of the fusion some proposal has. Resolution: of the quantities whose rule
    the proposals disagree on, those for which the fusion has exactly one of these rules.
    Preservation: how much survives of what at least half of the proposals have. Both count nodes
    0.4 and edges 0.6. Improvement: 0.5 where r_graph equals that of the best proposal.
    """
    consistency = preservation = 0.0
    for kind, weight in (("nodes", 0.4), ("edges", 0.6)):
        mine, *theirs = (set(getattr(plan.graph(), kind)) for plan in (fused, *proposals))
        union = set().union(*theirs)
        common = {x for x in union if 2 * sum(x in other for other in theirs) >= len(theirs)}
        consistency += weight * (1 - _share(mine - union, mine))
        preservation += weight * (1 - _share(common - mine, common))
    mine, *theirs = map(_rules, (fused, *proposals))
    effects = set().union(*theirs)
    rules = {e: set().union(*(other.get(e, set()) for other in theirs)) for e in effects}
    conflicts = {e for e in effects if len(rules[e]) > 1}
    settled = {e for e in conflicts if len(mine.get(e, ())) == 1 and mine[e] <= rules[e]}
    gain = graph_reward(fused) - max(map(graph_reward, proposals))
    return math.fsum(
        [
            0.3 * consistency,
            0.3 * (_share(settled, conflicts) if conflicts else NO_CONFLICT),
            0.2 * preservation,
            0.2 * (0.5 + gain / 2),
        ]
    )


def _share(part: set, whole: set) -> float:
    return len(part) / len(whole) if whole else 0.0


def _rules(plan: Plan) -> dict[str, set[str]]:
    """Collect the rules by effect, without spaces and left-hand sides."""
    rules = dict[str, set[str]]()
    for link in plan.causal_graph:
        if text := "".join(link.rule.split()).rpartition("=")[2]:
            rules.setdefault(link.effect, set()).add(text)
    return rules


def compute_rewards(
    problem: Problem,
    plan: Plan | None,
    solution: str,
    weights: Sequence[float],
    *,
    judge: Agent | None = None,
    seed: str = "",
    **r_fusion: float | None,
) -> dict[str, Any]:
    """Compute a rollout's rewards as its record holds them, with who gave them.

    Args:
        judge: asked for r_logic, and for r_ans where the exact grader cannot tell.
    """
    correct, answer, reason = grade_answer(solution, problem)
    r_ans, r_logic, by = float(correct), 0.0, {"answer": "exact", "logic": "checks"}
    errors: list[str] = []  # of the judge

    def ask(question: Callable[..., float], *about: Any) -> float | None:
        try:
            return question(judge, problem, *about, seed)
        except (APIError, ReplyError) as error:
            errors.append(str(error))
            return None

    if reason in NOT_GRADED and judge:
        by["answer"], r_ans = "judge", ask(_judge_answer, answer)
    if plan and judge:
        by["logic"], r_logic = "judge", ask(_judge_logic, plan, solution)
    elif plan:
        checks = check_logic(plan, answer, relative_tolerance(problem))
        r_logic = math.fsum(checks.values()) / len(checks)
    rewards = {"r_ans": r_ans, "r_logic": r_logic, "r_graph": graph_reward(plan)} | r_fusion
    return {
        "answer": answer,
        "is_correct": r_ans == 1,
        "rewards": rewards | {"r_total": weighted_mean(rewards, weights)},
        "r_total_of": [name for name, reward in rewards.items() if reward is not None],
        "answer_reason": reason,
        "scored_by": by,
        "judge_failed": bool(errors),
        "judge_error": "; ".join(errors) or None,
    }


def _judge_answer(judge: Agent, problem: Problem, answer: str, seed: str) -> float:
    values = {"problem": problem.question, "gold": problem.answer, "answer": answer}
    reply = split_completion(judge.ask("judge_answer", seed, **values).text)[1]
    verdict = re.match(r"\W*(yes|no)\b", reply, re.I)
    if not verdict:
        raise ReplyError("neither YES nor NO")
    return float(verdict[1].lower() == "yes")


def _judge_logic(judge: Agent, problem: Problem, plan: Plan, solution: str, seed: str) -> float:
    """Average the judge's five scores, all of which must be there and be scores."""
    values = {"problem": problem.question, "scaffold": plan.text(), "solution": solution}
    found = find_object(judge.ask("judge_logic", seed, **values).text, LOGIC_SCORES[0])
    scores = [found.get(name) for name in LOGIC_SCORES]
    if not all(type(score) in (int, float) and 0 <= score <= 1 for score in scores):
        raise ReplyError(f"not five scores from 0 to 1: {str(scores)[:200]}")
    return math.fsum(scores) / len(scores)
