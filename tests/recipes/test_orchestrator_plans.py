"""Graphs of sub-questions: the agents' prompts, the plans of the oracle, and paired results."""

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from scripted_llm import ScriptedLLM

from recipes.orchestrator import evaluate
from recipes.orchestrator.graph import Graph
from recipes.orchestrator.plans import WHOLE_PROBLEM, oracle_plan, random_plan
from recipes.orchestrator.runner import Runner
from rlm.data import load_problems
from rlm.data.problem import Problem
from rlm.data.prompts import FORMATS

PENS = Problem("p", "6 pens at $13 and {agentA}?", "80", "cost: 6 * 13 = 78\ntotal: 78 + 2 = 80")
SIMPLE = FORMATS["simple"]


@pytest.mark.parametrize(
    ("draft", "asked"),
    [
        ("<reasoning>6 * 13</reasoning><answer>78</answer>", "What is 78 + 2? Of 6 pens at $13"),
        ("[78]", "What is 78 + 2? Of 6 pens at $13"),
        ("no idea", "What is ? + 2? Of 6 pens at $13"),
        ("[1] or [2]", "What is ? + 2? Of 6 pens at $13"),
        ("<answer>2/3 ≈ 0.67</answer>", "What is 2/3 + 2? Of 6 pens at $13"),  # the gold is 0.67
    ],
)
def test_an_agent_with_a_question_is_asked_that_alone(draft, asked):
    """The agent gets the prompt of its training. A placeholder in a problem is plain text."""
    agents = ScriptedLLM(lambda call: draft)
    plan = Graph.plan("What is 6 * 13?", "What is {agentA} + 2? Of {problem}")
    Runner(agents, 9, format=SIMPLE).run([replace(PENS, answer="0.67")], [plan], [0])
    told = [(call.system_prompt, call.text) for (call,) in agents.batches]
    rest = PENS.question.removeprefix("6 pens at $13")
    assert told == [
        (SIMPLE.system_prompt, "What is 6 * 13?"),
        (SIMPLE.system_prompt, asked + rest),
    ]


@pytest.mark.parametrize(
    ("solution", "questions"),
    [
        (PENS.solution, ["What is 6 * 13?", "What is {agentA} + 2?"]),
        ("cost: 6 * 13 = <<6*13=78>>78\ntotal: 78 + 2 = <<78+2=80>>80",
         ["What is 6*13?", "What is {agentA}+2?"]),
        # Marks keep their place, even if the equation beside them has other spaces or is missing.
        ("6 pens x $13 = $<<6*13=78>>78\nIn all 78 + 2 = 80",
         ["What is 6*13?", "What is {agentA} + 2?"]),
        ("a: 6 * 13 = <<6*13=78>>78. b: 78 + 2 = 80", ["What is 6*13?", "What is {agentA} + 2?"]),
        ("a: 10 * 6 = 60\nb: 60 + 9 = 69\nc: 100 - 69 = 31",
         ["What is (10 * 6) + 9?", "What is 100 - {agentA}?"]),
        ("a: 6 * 13 = 78\nb: 4 * 6 = 24\nc: 78 + 24 = 102",
         ["What is 4 * 6?", "What is (6 * 13) + {agentA}?"]),
        ("a: 1 + 1 = 2\nb: 10 * 6 = 60\nc: 2 + 5 = 7", ["What is 1 + 1?", "What is {agentA} + 5?"]),
        ("a: .25 * 20 = 5\nb: 40 * .05 = 2\nc: 5 + 2 = 7",  # .05 is not 5
         ["What is 40 * .05?", "What is (.25 * 20) + {agentA}?"]),
        ("only: 6 * 13 = 78", None),
        ("a: 16 * 12 = 192\nb: 198 - 192 = 6\nc: 16 + 1 = 17", None),  # the last uses no other
        ("no equation", None),
    ],
)  # fmt: skip
def test_the_oracle_divides_the_worked_solution(solution, questions):
    plan = oracle_plan(Problem("p", "?", "1", solution))
    assert (plan and plan.texts) == questions


def test_random_plans_are_right_sometimes_and_always_can_be_read():
    rng = random.Random(0)
    problem = Problem("p", "6 pens at $13 and 1,002 more?", "80", PENS.solution)
    drawn = [random_plan(rng, problem) for _ in range(200)]
    assert 0.55 < drawn.count(oracle_plan(problem)) / 200 < 0.78  # two in three
    assert WHOLE_PROBLEM not in drawn
    assert all("{agentA}" in plan.texts[1] for plan in drawn)
    assert {"1002"} <= {word for plan in drawn for word in plan.texts[0].strip("?").split()}
    assert random_plan(rng, Problem("p", "how many?", "1")) is None


# --- the paired figures --------------------------------------------------------------------------


def test_trained_is_paired_with_the_cold_start_and_the_best_rival():
    def row(*answers, graph=WHOLE_PROBLEM):
        problems = [Problem(f"p{i}", f"{i}?", "1") for i in range(len(answers))]
        runner = Runner(ScriptedLLM(lambda call: answers[int(call.text[0])]), 9)
        return [[run] for run in runner.run(problems, [graph] * len(answers), range(len(answers)))]

    start = row("[1]", "[0]", "[0]", "[0]")
    rows = {
        "single agent": row("[0]", "[1]", "[1]", "[0]", graph=Graph.chain("solve")),
        evaluate.ORACLE: row(*["[1]"] * 4),
        evaluate.UNTRAINED: start,
        evaluate.TRAINED: row("[1]", "[1]", "[1]", "[0]"),
    }
    compared = evaluate.compare_trained(rows)
    assert {name: found["points"] for name, found in compared.items()} == {
        "orchestrator, trained − orchestrator, untrained": 50,
        "orchestrator, trained − single agent": 25,
    }
    del rows[evaluate.UNTRAINED]
    rows[evaluate.BARE] = start
    assert next(iter(evaluate.compare_trained(rows))).endswith(evaluate.BARE)


def test_the_readme_s_formulas_match_the_published_simulation():
    """Each of the 72 accuracies on 473 problems has a standard error of at most 2.3 points."""
    root = Path(__file__).parents[2]
    problems = load_problems("elementary:2-3", "test", max_samples=480, seed=0)
    steps = [problem.solution.count("=") for problem in problems]
    for row in json.loads((root / "docs/results/orchestrator/simulation.json").read_text())["rows"]:
        one = [row["p"] ** s * row["r"] ** (s - 1) for s in steps]
        vote = [q**3 + 3 * q**2 * (1 - q) + q * (1 - q) ** 2 for q in one]
        plan = [row["p"] ** s for s in steps]
        expected = {"one agent": one, "vote of 3": vote, "oracle's plan": plan}
        means = {name: fmean(chances) for name, chances in expected.items()}
        assert row["accuracy"] == pytest.approx(means, abs=0.04)
