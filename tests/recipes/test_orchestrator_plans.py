"""Graphs of sub-questions: what agents are asked, the oracle's plans, and the simulated solver."""

import json
import random

import pytest
from scripted_llm import ScriptedLLM

from recipes.orchestrator import evaluate, simulate
from recipes.orchestrator.graph import Graph
from recipes.orchestrator.plans import WHOLE_PROBLEM, oracle_plan, random_plan
from recipes.orchestrator.runner import Call, Runner
from rlm.cli import UsageError
from rlm.data import load_problems
from rlm.data.problem import Problem
from rlm.data.prompts import FORMATS
from rlm.sampling import SamplingParams

PENS = Problem("p", "6 pens at $13 and {agentA}?", "80", "cost: 6 * 13 = 78\ntotal: 78 + 2 = 80")
SIMPLE = FORMATS["simple"]


@pytest.mark.parametrize(
    ("draft", "asked"),
    [
        ("<reasoning>6 * 13</reasoning><answer>78</answer>", "What is 78 + 2? Of 6 pens at $13"),
        ("[78]", "What is 78 + 2? Of 6 pens at $13"),
        ("no idea", "What is ? + 2? Of 6 pens at $13"),
        ("[1] or [2]", "What is ? + 2? Of 6 pens at $13"),
    ],
)
def test_an_agent_with_a_question_is_asked_that_alone(draft, asked):
    """As it was trained: with its own prompt. A problem that holds a placeholder is plain text."""
    agents = ScriptedLLM(lambda call: draft)
    plan = Graph.plan("What is 6 * 13?", "What is {agentA} + 2? Of {problem}")
    Runner(agents, 9, format=SIMPLE).run([PENS], [plan])
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
        ("a: 10 * 6 = 60\nb: 60 + 9 = 69\nc: 100 - 69 = 31",
         ["What is (10 * 6) + 9?", "What is 100 - {agentA}?"]),
        ("a: 6 * 13 = 78\nb: 4 * 6 = 24\nc: 78 + 24 = 102",
         ["What is 4 * 6?", "What is (6 * 13) + {agentA}?"]),
        ("a: 1 + 1 = 2\nb: 10 * 6 = 60\nc: 2 + 5 = 7", ["What is 1 + 1?", "What is {agentA} + 5?"]),
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
    assert random_plan(rng, Problem("p", "how many?", "1")) == WHOLE_PROBLEM


# --- the simulated solver ------------------------------------------------------------------------


def test_the_oracle_wins_by_what_choosing_steps_costs():
    problems = [p for p in load_problems("elementary:2", "test", max_samples=300) if oracle_plan(p)]
    known = {problem.question: problem for problem in problems}

    def accuracy(p, r):
        solver = simulate.SimulatedSolver(known, p, r)
        scores = simulate.simulate(problems, solver, seed=0)
        return [sum(row) / len(row) for row in scores.values()]

    assert accuracy(1, 1) == [1, 1, 1]
    assert accuracy(0, 1)[:2] == [0, 0]
    one, vote, two = accuracy(1, 0.5)
    assert two == 1
    assert abs(one - 0.5) < 0.1
    one, vote, two = accuracy(0.9, 1)
    assert abs(one - 0.81) < 0.08
    assert abs(two - 0.81) < 0.08
    assert vote > 0.85


def test_the_simulation_is_a_function_of_its_seed_and_says_what_it_can_not_do(tmp_path, capsys):
    call = Call("solve", "What is 3 + 4 * 2?", seed=5)
    (reply,) = simulate.SimulatedSolver({}, 1, 1).chat([call], SamplingParams(1))
    assert reply.text == "[11]"
    records = []
    for name in "ab":
        simulate.main(simulate.SimulateConfig(max_samples=20, output=tmp_path / name))
        records.append(json.loads((tmp_path / name / "simulation.json").read_text())["rows"])
    assert records[0] == records[1]
    assert "r 0.8, p 0.9" in capsys.readouterr().out
    with pytest.raises(UsageError, match="no solution has a step"):
        simulate.main(simulate.SimulateConfig(dataset="word-problems:1", output=tmp_path))


# --- the paired figures --------------------------------------------------------------------------


def test_trained_is_paired_with_the_cold_start_and_the_best_rival(capsys):
    def row(*answers, graph=WHOLE_PROBLEM):
        problems = [Problem(f"p{i}", f"{i}?", "1") for i in range(len(answers))]
        runner = Runner(ScriptedLLM(lambda call: answers[int(call.text[0])]), 9)
        return [[run] for run in runner.run(problems, [graph] * len(answers))]

    start = row("[1]", "[0]", "[0]", "[0]")
    rows = {
        "single agent": row("[0]", "[1]", "[1]", "[0]", graph=Graph.chain("solve")),
        evaluate.ORACLE: row(*["[1]"] * 4),
        evaluate.UNTRAINED: start,
        evaluate.TRAINED: row(
            "[1]", "[1]", "[1]", "[0]", graph=Graph.plan("{problem} ", "{problem}!")
        ),
    }
    compared = evaluate.compare_trained(rows)
    assert {name: found["points"] for name, found in compared.items()} == {
        "orchestrator, trained − orchestrator, untrained": 50,
        "orchestrator, trained − single agent": 25,
    }
    evaluate.show_changed_graphs(rows)
    shown = capsys.readouterr().out.splitlines()
    assert shown[1:4] == [
        "0? [1]", "  before, right: {problem} | {problem}", "  after, right: {problem} | {problem}!"
    ]  # fmt: skip
    assert sum("before" in line for line in shown) == 3
    del rows[evaluate.UNTRAINED]
    rows[evaluate.BARE] = start
    assert next(iter(evaluate.compare_trained(rows))).endswith(evaluate.BARE)
