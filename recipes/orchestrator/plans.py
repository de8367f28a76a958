"""Creates plans: graphs in which each agent answers a sub-question of the problem.

A plan is derived from the worked solution, or composed at random for the cold start.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from fractions import Fraction

from recipes.orchestrator.graph import Graph
from rlm.data import Problem
from rlm.grading import Equation, find_equations

WHOLE_PROBLEM = Graph.plan("{problem}", "{problem}")  # only the second answer counts
# Relative frequencies of the kinds of random plans. WHOLE_PROBLEM is not among them: it scores best
# among the bad plans, so GRPO would converge to it before learning to divide a problem.
KINDS = {"solution": 2, "operations": 1}
_NUMBER = re.compile(r"\d*\.?\d+")


def steps_of(problem: Problem) -> list[Equation]:
    """Return the distinct equations of the worked solution, line by line.

    Duplicates are removed, because a calculator annotation repeats the equation beside it.
    """
    found = [each for line in problem.solution.splitlines() for each in find_equations(line)]
    return list({"".join(each.left.split()): each for each in found}.values())


def oracle_plan(problem: Problem) -> Graph | None:
    """Return the plan that follows from the worked solution.

    The second agent computes the last step of the solution. The first agent computes the latest
    earlier step whose result is an operand of the last step. All other intermediate results are
    written out as expressions. If no result of an earlier step is an operand, return None.
    """
    steps = steps_of(problem)
    for number in reversed(range(len(steps) - 1)):
        second = _write_out(steps[-1].left, steps[:-1], number)
        if "{agentA}" in second:
            first = _write_out(steps[number].left, steps[:number])
            return Graph.plan(f"What is {first}?", f"What is {second}?")
    return None


def _write_out(expression: str, steps: Sequence[Equation], known: int | None = None) -> str:
    """Replace each result of an earlier step in an expression by the expression of that step.

    The result of step `known` is replaced by {agentA}. If several steps have the same result, the
    latest of these steps is used.
    """

    def earlier(match: re.Match[str]) -> str:
        for number in reversed(range(len(steps))):
            if Fraction(match[0]) == steps[number].value:
                if number == known:
                    return "{agentA}"
                return f"({_write_out(steps[number].left, steps[:number], known)})"
        return match[0]

    return _NUMBER.sub(earlier, expression)


def random_plan(rng: random.Random, problem: Problem) -> Graph | None:
    """Compose a plan for the cold start.

    The plan is either the plan of the worked solution, or random operations on the numbers of the
    problem. If the problem has fewer than two numbers, there may be no plan.
    """
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    if kind == "solution" and (plan := oracle_plan(problem)):
        return plan
    numbers = _NUMBER.findall(problem.question.replace(",", ""))
    if len(numbers) < 2:
        return None
    first, second, third = [*rng.sample(numbers, 2), rng.choice(numbers)]
    sides = rng.sample(["{agentA}", third], 2)
    one, two = rng.choices("+-*/", k=2)
    return Graph.plan(f"What is {first} {one} {second}?", f"What is {sides[0]} {two} {sides[1]}?")
