"""Shows how accurate a solver must be for two agents to win, with a simulated solver.

The solver gets each arithmetic step right with probability p. If it is asked a whole story, it must
also choose every step after the first, and is right with probability r. A model's p is its accuracy
on one step; its r is its accuracy on two steps divided by p². A step that a sub-question writes out
needs no choice. Problems, plans, drafts, grading and votes are real.

    python -m recipes.orchestrator.simulate --dataset elementary:2-3
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from recipes.orchestrator.graph import Graph
from recipes.orchestrator.plans import oracle_plan, steps_of
from recipes.orchestrator.runner import Call, Reply, Runner
from rlm.cli import UsageError, check_values, flag, run_main, terminal, to_dict
from rlm.data import Problem, load_problems
from rlm.evaluation import paired_bootstrap, points, show_table
from rlm.grading import majority_score, parse_number
from rlm.runs import check_writable, replace_json
from rlm.sampling import SamplingParams
from rlm.tools import evaluate_expression

STEP_ACCURACY = (0.6, 0.7, 0.8, 0.9, 0.95, 1.0)  # values of p
CHOICE_ACCURACY = (0.6, 0.8, 0.9, 1.0)  # values of r
VOTES = 3  # attempts of the single agent that vote


@dataclass
class SimulateConfig:
    dataset: str = flag("elementary:2-3", "problems with worked solutions")
    max_samples: int = flag(480, "number of problems", min=1)
    seed: int = flag(0, "random seed of the solver's errors")
    output: Path = flag(Path("runs/orchestrator_simulation"), "folder for simulation.json")

    def __post_init__(self) -> None:
        check_values(self)


@dataclass
class SimulatedSolver:
    """Answers stories that it knows, and sums, in place of a model."""

    problems: dict[str, Problem]  # by question
    step_accuracy: float
    choice_accuracy: float

    def chat(self, calls: Sequence[Call], params: SamplingParams) -> list[Reply]:
        return [self._answer(call) for call in calls]

    def _answer(self, call: Call) -> Reply:
        rng = random.Random(f"{call.seed} {call.text}")
        if problem := self.problems.get(call.text):
            steps = len(steps_of(problem))
            value, right = parse_number(problem.answer), self.choice_accuracy ** (steps - 1)
        else:
            expression = call.text.removeprefix("What is ").removesuffix("?")
            value, right = evaluate_expression(expression), 1.0
            steps = len(re.findall(r"[\d)%] ?[-+*/]", expression))
        if value is None:  # the first agent's answer was none
            return Reply("no idea")
        if rng.random() >= right * self.step_accuracy**steps:
            value += rng.choice((-1, 1)) * rng.randint(1, 20)
        return Reply(f"[{float(value):.10g}]")


def simulate(
    problems: Sequence[Problem], solver: SimulatedSolver, seed: int
) -> dict[str, list[float]]:
    """Return the scores of one agent, of its vote, and of two agents by the oracle's plan."""
    runner, single = Runner(solver, max_new_tokens=1, temperature=1.0), Graph.chain("solve")
    voters = [problem for problem in problems for _ in range(VOTES)]
    runs = runner.run(voters, [single] * len(voters), seed)
    groups = [runs[i : i + VOTES] for i in range(0, len(runs), VOTES)]
    plans = [oracle_plan(problem) for problem in problems]
    return {
        "one agent": [float(group[0].solved()) for group in groups],
        f"vote of {VOTES}": [majority_score([run.verdict for run in group]) for group in groups],
        "oracle's plan": [float(run.solved()) for run in runner.run(problems, plans, seed)],
    }


def main(config: SimulateConfig) -> int:
    check_writable("--output", config.output)
    problems = load_problems(config.dataset, "test", max_samples=config.max_samples)
    problems = [problem for problem in problems if oracle_plan(problem)]
    if not problems:
        raise UsageError(f"--dataset {config.dataset}: no solution has a step that uses another")
    by_question, rows, table = {problem.question: problem for problem in problems}, [], {}
    for r, p in itertools.product(CHOICE_ACCURACY, STEP_ACCURACY):
        scores = simulate(problems, SimulatedSolver(by_question, p, r), config.seed)
        *rivals, two = scores
        accuracy = {name: fmean(row) for name, row in scores.items()}
        gains = {name: asdict(paired_bootstrap(scores[name], scores[two])) for name in rivals}
        rows.append({"p": p, "r": r, "accuracy": accuracy, "oracle's plan minus": gains})
        cells = {name: f"{100 * mean:.1f}" for name, mean in accuracy.items()}
        cells |= {f"− {name}": points(gain) for name, gain in gains.items()}
        table[f"r {r:g}, p {p:g}"] = cells
    show_table(f"Simulated solver: {config.dataset}, test, n = {len(problems)}", table, "% right")
    record = {"config": to_dict(config), "problems": len(problems), "rows": rows}
    replace_json(config.output / "simulation.json", record)
    terminal.line(f"written: {config.output}/simulation.json")
    return 0


if __name__ == "__main__":
    run_main(main, SimulateConfig, description=__doc__)
