"""Makes plans: graphs whose agents answer sub-questions, from a worked solution or at random."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from fractions import Fraction

from recipes.orchestrator.graph import Graph
from rlm.data import Problem
from rlm.grading import Equation, find_equations

WHOLE_PROBLEM = Graph.plan("{problem}", "{problem}")  # the second agent is a single agent
# How often a random plan is of each kind. The whole problem for both agents is none of them: it is
# a single agent, the safest of bad plans, and GRPO settles on it before it finds a division.
KINDS = {"solution": 2, "operations": 1}
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def steps_of(problem: Problem) -> list[Equation]:
    """Return the equations of the worked solution, each once: a calculator mark repeats one."""
    return list(dict.fromkeys(find_equations(problem.solution)))


def oracle_plan(problem: Problem) -> Graph | None:
    """Return the plan that the worked solution gives; None where one step does not use another.

    The second agent takes the last step, and the first one the last of the steps before it whose
    result that needs. What else is needed is written out.
    """
    steps = steps_of(problem)
    for number in reversed(range(len(steps) - 1)):
        second = _write_out(steps[-1].left, steps[:-1], number)
        if "{agentA}" in second:
            first = _write_out(steps[number].left, steps[:number])
            return Graph.plan(f"What is {first}?", f"What is {second}?")
    return None


def _write_out(expression: str, steps: Sequence[Equation], known: int | None = None) -> str:
    """Replace the results of earlier steps by their expressions, that of step `known` by {agentA}.

    Of steps with equal results the latest one is meant: the value is the same.
    """

    def earlier(match: re.Match[str]) -> str:
        for number in reversed(range(len(steps))):
            if Fraction(match[0]) == steps[number].value:
                if number == known:
                    return "{agentA}"
                return f"({_write_out(steps[number].left, steps[:number], known)})"
        return match[0]

    return _NUMBER.sub(earlier, expression)


def random_plan(rng: random.Random, problem: Problem) -> Graph:
    """Compose a plan for the cold start: the right one, or random operations on its numbers."""
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    if kind == "solution" and (plan := oracle_plan(problem)):
        return plan
    numbers = _NUMBER.findall(problem.question.replace(",", ""))
    if len(numbers) < 2:
        return WHOLE_PROBLEM
    first, second, third = [*rng.sample(numbers, 2), rng.choice(numbers)]
    sides = rng.sample(["{agentA}", third], 2)
    one, two = rng.choices("+-*/", k=2)
    return Graph.plan(f"What is {first} {one} {second}?", f"What is {sides[0]} {two} {sides[1]}?")
