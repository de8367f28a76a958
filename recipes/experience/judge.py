"""How good is an attempt: r_ans, r_logic, r_graph, for fusions r_fusion, and their weighted mean.

Each is in [0, 1], or None where nobody could tell. A judge that fails is never a number: its part
is None, the weights of the others are renormalised, and `judge_failed` stands in the record.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import networkx

from recipes.experience.prompting import Prompts
from recipes.experience.roles import Role
from recipes.experience.rules import Value, is_rule
from recipes.experience.scaffold import Scaffold, ScaffoldError, execute, find_object
from rlm.api_client import APIError
from rlm.cli import UsageError
from rlm.data import Problem
from rlm.grading import grade, parse_number, split_completion

PARTS = ("r_ans", "r_logic", "r_graph", "r_fusion")
GENERATOR_WEIGHTS = (0.5, 0.25, 0.25)
CRITIC_WEIGHTS = (0.3, 0.2, 0.2, 0.3)
LOGIC_PARTS = ("coherence", "completeness", "verification", "no_errors", "tool_consistency")
CANNOT_TELL = ("not_a_number", "gold_unreadable")  # reasons of the exact grader
NO_CONFLICT = 0.7  # the share of conflicts solved, where the proposals have none

_POWER_OF_TEN = re.compile(r" ?(?:×|x|\*|\\times|\\cdot) ?10 ?(?:\^|\*\*) ?\{?([-−+]?\d{1,3})\}?")


def weighted(scores: Mapping[str, float | None], weights: Sequence[float]) -> float | None:
    """The weighted mean of the scores that are there, in the order of PARTS; None without any.

    >>> weighted({"r_ans": 0.0, "r_logic": 0.75, "r_graph": 0.80}, GENERATOR_WEIGHTS)
    0.3875
    """
    pairs = [(s, w) for s, w in zip(scores.values(), weights, strict=True) if s is not None]
    mass = math.fsum(weight for _, weight in pairs)
    if not mass:
        return None
    return round(math.fsum(score * weight for score, weight in pairs) / mass, 12)


# --- r_ans ----------------------------------------------------------------------------------------


def tolerance_of(problem: Problem) -> float:
    """How far from its gold an answer may be, as a share of it.

    Raises:
        UsageError: the problem's rel_tol is no such share.
    """
    told = problem.columns.get("rel_tol", 0)
    try:
        share = float(told)
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise UsageError(f"problem {problem.id}: rel_tol is a share such as 0.01, not {told!r}")
    return share


def grade_answer(text: str, problem: Problem) -> tuple[bool, str, str]:
    """(correct, the answer as found, the grader's reason); exact, or within the problem's rel_tol.

    >>> grade_answer("Final answer: 4.9 m", Problem("p", "?", "4.905", columns={"rel_tol": 0.01}))
    (True, '4.9 m', 'correct')
    """
    tolerance = tolerance_of(problem)
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


# --- r_logic and r_graph --------------------------------------------------------------------------


def logic_checks(scaffold: Scaffold, answer: str, tolerance: float = 0.0) -> dict[str, float]:
    """What can be checked without a judge, each in [0, 1]; r_logic is their mean.

    Every input of a step is known or was computed before; the plan reaches the target; the rules
    are arithmetic; the steps' values can be computed; the target's value is the stated answer.
    """
    run, steps = execute(scaffold), scaffold.computation_plan
    rules = [link.rule for link in scaffold.causal_graph]
    stated = parse_number(answer)
    value = run.values.get(scaffold.target_variable)
    reached = scaffold.target_variable in run.targets
    close = reached and stated is not None and _close(value, stated, max(tolerance, 1e-6))
    wanted = {step.target for step in steps}
    return {
        "inputs_there": run.with_inputs / len(steps),
        "target_reached": float(reached),
        "rules_parse": sum(map(is_rule, rules)) / len(rules),
        "steps_computed": len(run.targets) / len(wanted),
        "value_is_answer": float(close),
    }


def _close(a: Value, b: Value, tolerance: float) -> bool:
    """As math.isclose, but an exact number may be too large for a float."""
    a, b = Fraction(a), Fraction(b)
    return abs(a - b) <= max(Fraction(tolerance) * max(abs(a), abs(b)), Fraction(1, 10**9))


def graph_score(scaffold: Scaffold | None) -> float:
    """0.3 acyclic + 0.2 coverage of knowns and target + 0.4 links with a rule + 0.1 connected.

    Coverage: the share that the graph has. Connected: the share of its largest component.
    """
    if scaffold is None:
        return 0.0
    graph, links = scaffold.graph(), scaffold.causal_graph
    needed = {*scaffold.knowns, scaffold.target_variable}
    largest = max(map(len, networkx.weakly_connected_components(graph)))
    return math.fsum(
        [
            0.3 * networkx.is_directed_acyclic_graph(graph),
            0.2 * sum(name in graph for name in needed) / len(needed),
            0.4 * sum(bool(link.rule.strip()) for link in links) / len(links),
            0.1 * largest / len(graph),
        ]
    )


# --- r_fusion -------------------------------------------------------------------------------------


def fusion_score(fused: Scaffold, proposals: Sequence[Scaffold]) -> float:
    """0.3 consistency + 0.3 conflict resolution + 0.2 preservation + 0.2 improvement.

    Consistency: how much of the fusion some proposal has. Resolution: of the quantities whose rule
    the proposals disagree on, those for which the fusion has exactly one of these rules.
    Preservation: how much survives of what at least half of the proposals have. Both count nodes
    0.4 and edges 0.6. Improvement: 0.5 where r_graph equals that of the best proposal.
    """
    graph, others = fused.graph(), [proposal.graph() for proposal in proposals]

    def shares(kind: str, weight: float) -> tuple[float, float]:
        mine = set(getattr(graph, kind))
        theirs = [set(getattr(other, kind)) for other in others]
        common = {x for x in set().union(*theirs) if 2 * sum(x in t for t in theirs) >= len(theirs)}
        invented = mine - set().union(*theirs)
        return weight * (1 - _share(invented, mine)), weight * (1 - _share(common - mine, common))

    nodes, edges = shares("nodes", 0.4), shares("edges", 0.6)
    mine, theirs = _rules(fused), [_rules(proposal) for proposal in proposals]
    conflicts = dict[str, set[str]]()
    for effect in set().union(*theirs):
        conflicts[effect] = set().union(*(rules.get(effect, set()) for rules in theirs))
    conflicts = {effect: rules for effect, rules in conflicts.items() if len(rules) > 1}
    settled = [e for e, r in conflicts.items() if len(mine.get(e, ())) == 1 and mine[e] <= r]
    gain = graph_score(fused) - max(map(graph_score, proposals))
    return math.fsum(
        [
            0.3 * (nodes[0] + edges[0]),
            0.3 * (len(settled) / len(conflicts) if conflicts else NO_CONFLICT),
            0.2 * (nodes[1] + edges[1]),
            0.2 * (0.5 + gain / 2),
        ]
    )


def _share(part: set, whole: set) -> float:
    return len(part) / len(whole) if whole else 0.0


def _rules(scaffold: Scaffold) -> dict[str, set[str]]:
    """The rules by effect, without spaces and left-hand sides."""
    rules = dict[str, set[str]]()
    for link in scaffold.causal_graph:
        if text := "".join(link.rule.split()).rpartition("=")[2]:
            rules.setdefault(link.effect, set()).add(text)
    return rules


# --- all of them ----------------------------------------------------------------------------------


class _NoScoreError(Exception):
    """The judge's reply holds none."""


class Judge:
    """Scores attempts; asks the judge's role, if there is one, where rules cannot tell."""

    def __init__(self, role: Role | None, prompts: Prompts, max_tokens: int) -> None:
        self.role, self._prompts, self._max_tokens = role, prompts, max_tokens

    def score(
        self,
        problem: Problem,
        scaffold: Scaffold | None,
        solution: str,
        weights: Sequence[float],
        seed: str,
        **r_fusion: float | None,
    ) -> dict[str, Any]:
        """The scores of one attempt, and who gave them, as the records hold them."""
        correct, answer, reason = grade_answer(solution, problem)
        r_ans, by = float(correct), {"answer": "exact", "logic": "checks"}
        errors: list[str] = []  # of the judge

        def judged(ask: Callable[..., float], *about: Any) -> float | None:
            try:
                return ask(problem, *about, seed)
            except (APIError, ScaffoldError, _NoScoreError) as error:
                errors.append(str(error))
                return None

        if reason in CANNOT_TELL and self.role:
            by["answer"], r_ans = "judge", judged(self._same_answer, answer)
        if scaffold is None:
            r_logic = 0.0
        elif self.role:
            by["logic"], r_logic = "judge", judged(self._logic, scaffold, solution)
        else:
            checks = logic_checks(scaffold, answer, tolerance_of(problem))
            r_logic = math.fsum(checks.values()) / len(checks)
        scores = {"r_ans": r_ans, "r_logic": r_logic, "r_graph": graph_score(scaffold)} | r_fusion
        return {
            "answer": answer,
            "is_correct": r_ans is not None and r_ans >= 0.99,
            "rewards": scores | {"r_total": weighted(scores, weights)},
            "r_total_of": [name for name, score in scores.items() if score is not None],
            "answer_reason": reason,
            "scored_by": by,
            "judge_failed": bool(errors),
            "judge_error": "; ".join(errors) or None,
        }

    def _ask(self, name: str, seed: str, **values: str) -> str:
        prompt, limit = self._prompts.fill(name, **values), self._max_tokens
        reply = self.role.ask(name, prompt, temperature=0.0, max_tokens=limit, seed=seed)
        return split_completion(reply.text)[1]

    def _same_answer(self, problem: Problem, answer: str, seed: str) -> float:
        values = {"problem": problem.question, "gold": problem.answer, "answer": answer}
        said = re.match(r"\W*(yes|no)\b", self._ask("judge_answer", seed, **values), re.I)
        if not said:
            raise _NoScoreError("neither YES nor NO")
        return float(said[1].lower() == "yes")

    def _logic(self, problem: Problem, scaffold: Scaffold, solution: str, seed: str) -> float:
        """The mean of the judge's five scores, all of which must be there and be scores."""
        values = {"problem": problem.question, "scaffold": scaffold.text(), "solution": solution}
        parts = find_object(self._ask("judge_logic", seed, **values), LOGIC_PARTS[0])
        scores = [parts.get(name) for name in LOGIC_PARTS]
        if not all(type(score) in (int, float) and 0 <= score <= 1 for score in scores):
            raise _NoScoreError(f"not five scores from 0 to 1: {str(scores)[:200]}")
        return math.fsum(scores) / len(scores)
