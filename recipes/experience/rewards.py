"""Computes the rewards of a rollout: r_ans, r_logic, r_graph, and for merged plans r_fusion.

The total reward r_total is their weighted mean. Each reward is from 0 to 1, or None if it could not
be determined. If the judge fails, r_logic is None, the weights of the other rewards are
renormalized, and `judge_failed` is set in the record.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from statistics import fmean
from typing import Any

import networkx

from recipes.experience.agent import Agent
from recipes.experience.plan import (
    Plan,
    ReplyError,
    check_plan,
    find_object,
    object_schema,
    plan_value,
)
from rlm.api_client import APIError
from rlm.cli import UsageError
from rlm.data import Problem
from rlm.grading import grade, numbers_in, parse_number

GENERATOR_WEIGHTS = (0.5, 0.25, 0.25)  # of r_ans, r_logic, r_graph
CRITIC_WEIGHTS = (0.3, 0.2, 0.2, 0.3)  # of r_ans, r_logic, r_graph, r_fusion
LOGIC_SCORES = ("coherence", "completeness", "verification", "no_errors", "tool_consistency")
LOGIC_SCHEMA = object_schema(
    **{name: {"type": "number", "minimum": 0, "maximum": 1} for name in LOGIC_SCORES}
)
# The tolerance for non-integer answers, which may be rounded to two decimals, and its maximum as a
# share of the value.
ROUNDED, ROUNDED_SHARE = Fraction(1, 200), Fraction(1, 20)
NO_CONFLICT = 0.7  # score of conflict resolution if the proposals have no conflicts

_POWER_OF_TEN = re.compile(
    r" ?(?:[×x*·⋅]|\\times|\\cdot) ?10"
    r"(?: ?(?:\^|\*\*) ?\{?([-−+]?\d{1,3})\}?|([⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,3}))"
)
_EXPONENTS = str.maketrans("−⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹", "--+0123456789")
_LATEX_UNIT = re.compile(r"\\(?=(?:Omega|mu)(?![A-Za-z]))")


def weighted_mean(rewards: Mapping[str, float | None], weights: Sequence[float]) -> float | None:
    """Return the weighted mean of the rewards that are not None, or None if all are None.

    The rewards must be in the order of the weights.

    >>> weighted_mean({"r_ans": 0.0, "r_logic": 0.75, "r_graph": 0.80}, GENERATOR_WEIGHTS)
    0.3875
    """
    pairs = [(r, w) for r, w in zip(rewards.values(), weights, strict=True) if r is not None]
    total = math.fsum(weight for _, weight in pairs)
    if not total:
        return None
    return round(math.fsum(reward * weight for reward, weight in pairs) / total, 12)


def relative_tolerance(problem: Problem) -> Fraction:
    """Return the maximum relative error of an answer to the problem, from its column rel_tol."""
    given = problem.columns.get("rel_tol") or 0  # None: an empty cell
    try:
        share = float(given)
    except (ValueError, TypeError):
        share = math.nan
    if not 0 <= share < 1:
        raise UsageError(
            f"problem {problem.id}: rel_tol must be a fraction such as 0.01, not {given!r}"
        )
    return Fraction(str(share))  # Fraction(0.03) is less than 3/100


def grade_answer(text: str, problem: Problem) -> tuple[bool, str, str]:
    """Grade an answer exactly or within the problem's rel_tol; return (correct, answer, reason).

    >>> grade_answer("Final answer: 4.9 m", Problem("p", "?", "4.905", columns={"rel_tol": 0.01}))
    (True, '4.9 m', 'correct')
    """
    tolerance = relative_tolerance(problem)
    if tolerance:
        text = _POWER_OF_TEN.sub(lambda m: "e" + (m[1] or m[2]).translate(_EXPONENTS), text)
        text = _LATEX_UNIT.sub("", text)  # 59 \Omega is 59 Omega
        # The unit is removed, because "5 K" would be read as 5000.
        unit = re.escape(str(problem.columns.get("unit") or ""))
        text = re.sub(rf"(?<=\d) ?{unit}(?!\w)", "", text) if unit else text
    verdict = grade(text, problem.answer, strict=False)
    answer = verdict.answer or ""
    if verdict.reason == "wrong" and tolerance:
        value, gold = verdict.value, parse_number(problem.answer)
        if isinstance(value, Fraction) and gold is not None:
            near = abs(value - gold) <= tolerance * abs(gold)
            return near, answer, "correct" if near else "wrong"
    return verdict.correct, answer, verdict.reason


def graph_reward(plan: Plan | None) -> float:
    """Compute r_graph, which scores the causal graph of a plan.

    r_graph = 0.3 acyclic + 0.2 coverage + 0.4 rules + 0.1 connected, where `acyclic` is 1 or 0,
    `coverage` is the share of the known quantities and the target that are nodes of the graph,
    `rules` is the share of links with a rule, and `connected` is the share of nodes in the largest
    component. Without a plan, r_graph is 0.
    """
    if plan is None:
        return 0.0
    graph, links = plan.graph(), plan.causal_graph
    needed = {*plan.knowns, plan.target_variable}
    largest = max(map(len, networkx.weakly_connected_components(graph)))
    return (
        0.3 * networkx.is_directed_acyclic_graph(graph)
        + 0.2 * sum(name in graph for name in needed) / len(needed)
        + 0.4 * sum(bool(link.rule.strip()) for link in links) / len(links)
        + 0.1 * largest / len(graph)
    )


def fusion_reward(fused: Plan, proposals: Sequence[Plan]) -> float:
    """Compute r_fusion, which scores a merged plan against the plans that it was merged from.

    r_fusion = 0.3 consistency + 0.3 conflict resolution + 0.2 preservation + 0.2 improvement.

    - Consistency is the share of the merged graph that also occurs in a proposal.
    - Preservation considers the nodes and edges that at least half of the proposals contain. It is
      the share of them that the merged graph keeps.
    - In both shares, nodes have a weight of 0.4, and edges a weight of 0.6.
    - Conflict resolution considers the quantities for which the proposals have different rules. It
      is the share of them for which the merged plan has exactly one rule, taken from a proposal.
      Without such quantities, it is NO_CONFLICT.
    - Improvement is 0.5 plus half of the gain in r_graph over the best proposal.
    """
    consistency = preservation = 0.0
    for kind, weight in (("nodes", 0.4), ("edges", 0.6)):
        mine, *theirs = (set(getattr(plan.graph(), kind)) for plan in (fused, *proposals))
        union = set().union(*theirs)
        common = {x for x in union if 2 * sum(x in other for other in theirs) >= len(theirs)}
        consistency += weight * (1 - _share(mine - union, mine))
        preservation += weight * (1 - _share(common - mine, common))
    mine, *theirs = map(_rules, (fused, *proposals))
    proposed = set().union(*theirs)
    counts = Counter(effect for effect, _ in proposed)
    conflicts = {effect for effect, count in counts.items() if count > 1}
    chosen = {effect: {rule for rule in mine if rule[0] == effect} for effect in conflicts}
    settled = {effect for effect, rules in chosen.items() if len(rules) == 1 and rules <= proposed}
    gain = graph_reward(fused) - max(map(graph_reward, proposals))
    return (
        0.3 * consistency
        + 0.3 * (_share(settled, conflicts) if conflicts else NO_CONFLICT)
        + 0.2 * preservation
        + 0.2 * (0.5 + gain / 2)
    )


def _share(part: set, whole: set) -> float:
    return len(part) / len(whole) if whole else 0.0


def _rules(plan: Plan) -> set[tuple[str, str]]:
    """Return the pairs (effect, right side of the rule, without spaces) of a plan."""
    rules = {(link.effect, "".join(link.rule.split())) for link in plan.causal_graph}
    return {(effect, text) for effect, rule in rules if (text := rule.rpartition("=")[2])}


def compute_rewards(
    problem: Problem,
    plan: Plan | None,
    solution: str,
    *,
    judge: Agent | None = None,
    seed: str = "",
    **r_fusion: float | None,
) -> dict[str, Any]:
    """Compute the rewards of a rollout, as fields of its record.

    The judge scores r_logic; without one, `logic_checks` computes it. Only merged plans have an
    `r_fusion`.
    """
    correct, answer, reason = grade_answer(solution, problem)
    r_logic, judge_error = 0.0, None
    if judge and plan:
        try:
            r_logic = _judge_logic(judge, problem, plan, solution, seed)
        except (APIError, ReplyError) as error:
            r_logic, judge_error = None, str(error)
    elif plan:
        r_logic = logic_checks(plan, problem, answer)
    rewards = {"r_ans": float(correct), "r_logic": r_logic, "r_graph": graph_reward(plan)}
    rewards |= r_fusion
    weights = CRITIC_WEIGHTS if r_fusion else GENERATOR_WEIGHTS
    return {
        "answer": answer,
        "is_correct": correct,
        "rewards": rewards | {"r_total": weighted_mean(rewards, weights)},
        "r_total_of": [name for name, reward in rewards.items() if reward is not None],
        "answer_reason": reason,
        "scored_by": {"answer": "exact", "logic": "judge" if judge and plan else "checks"},
        "judge_failed": judge_error is not None,
        "judge_error": judge_error,
    }


def logic_checks(plan: Plan, problem: Problem, answer: str) -> float:
    """Compute r_logic without a judge, from the form of the plan and its agreement with the answer.

    r_logic is the mean of the values of `check_plan` and of the share of the plan's numbers that
    occur in the problem. r_logic is 0 if the plan's formulas give another value than the answer.
    """
    numbers = [parse_number(str(value)) for value in plan.knowns.values() if value is not None]
    named = numbers_in(problem.question)
    given = [number for number in numbers if number is not None]
    grounded = sum(abs(number) in named for number in given) / len(given) if given else 1.0
    value, written = plan_value(plan), parse_number(answer)
    if value is not None and written is not None:
        rounded = 0 if value.denominator == 1 else min(ROUNDED, ROUNDED_SHARE * abs(value))
        tolerance = max(rounded, relative_tolerance(problem) * abs(value))
        if abs(value - written) > tolerance:
            return 0.0
    return fmean([*check_plan(plan).values(), grounded])


def _judge_logic(judge: Agent, problem: Problem, plan: Plan, solution: str, seed: str) -> float:
    """Request five scores from the judge, and return their mean."""
    values = {"problem": problem.question, "scaffold": plan.text(), "solution": solution}
    reply = judge.ask("judge_logic", seed, values, schema=LOGIC_SCHEMA)
    found = find_object(reply.text, LOGIC_SCORES[0])
    scores: list[Any] = [found.get(name) for name in LOGIC_SCORES]
    if not all(type(score) in (int, float) and 0 <= score <= 1 for score in scores):
        raise ReplyError(f"the reply does not contain five scores from 0 to 1: {str(scores)[:200]}")
    return fmean(scores)
