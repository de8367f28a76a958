"""The reward of a graph: 1 if the last agent's final number is the gold, else 0.

An invalid graph stays in its group with 0: a retry would hide the failure from the learner. An
orchestrator could also solve the problem itself and write the answer into a prompt, which no
verifier sees; such leaks are counted, and earn nothing unless asked otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from recipes.orchestrator.graph import AGENTS, REASONS, Graph, Invalid, read_graph
from recipes.orchestrator.runner import Run, Runner
from rlm.data.problem import Problem
from rlm.grading.answers import Verdict, grade
from rlm.grading.numbers import numbers_in, parse_number
from rlm.rewards.scorer import Scores
from rlm.sampling import prompt_seed


def leaks_answer(graph: Graph, problem: Problem) -> bool:
    """Whether a prompt holds the gold, and the problem itself does not."""
    gold = parse_number(problem.answer)
    if gold is None or abs(gold) in numbers_in(problem.question):
        return False
    return any(abs(gold) in numbers_in(prompt) for prompt in graph.prompts)


def similarity(graphs: Sequence[Graph]) -> float:
    """Mean over all pairs of the share of words that two graphs' prompts have in common (Jaccard).

    1 where all are the same; 0 for fewer than two.
    """
    words = [frozenset(" ".join(graph.prompts).lower().split()) for graph in graphs]
    pairs = [len(a & b) / len(a | b) for a, b in combinations(words, 2)]
    return sum(pairs) / len(pairs) if pairs else 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of one completion of the orchestrator."""

    graph: Graph | Invalid
    run: Run | None  # None: the graph is invalid
    verdict: Verdict  # the grader's; the reason is the graph's, where it is invalid
    leak: bool

    @property
    def correct(self) -> bool:
        return self.verdict.correct

    def earns(self, zero_leaks: bool) -> bool:
        """Whether it counts as solved: not, if asked so, where a prompt gave the answer away."""
        return self.correct and not (self.leak and zero_leaks)

    @property
    def judged(self) -> bool:
        """False where an agent's server failed: then there is no verdict, and no reward."""
        return self.run is None or self.run.error is None

    def record(self) -> dict[str, Any]:
        """As rollouts.jsonl holds it."""
        row: dict[str, Any] = {"verdict": self.verdict.reason, "correct": self.correct}
        row["leak"] = self.leak
        if self.run is None:
            return row | {"graph": None, "detail": self.graph.detail}
        row |= {"graph": self.graph.model_dump(exclude_none=True), "trace": self.run.trace()}
        return row | {"tokens_read": self.run.read, "tokens_written": self.run.written}


def try_graphs(
    runner: Runner,
    problems: Sequence[Problem],
    graphs: Sequence[Graph | Invalid],
    *,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    max_new_tokens: int | None = None,
) -> list[Outcome]:
    """Run the valid graphs, each on the problem beside it, all at once, and verify.

    Args:
        seed: of agents that draw at a temperature.
        numbers: tells the graphs of a problem apart, for that seed; by default their places.
    """
    numbered = zip(problems, graphs, numbers or range(len(graphs)), strict=True)
    jobs = [
        (problem.question, graph, prompt_seed(seed, problem.id, number))
        for problem, graph, number in numbered
        if isinstance(graph, Graph)
    ]
    runs = iter(runner.run(*zip(*jobs, strict=True), max_new_tokens) if jobs else ())
    outcomes = []
    for problem, graph in zip(problems, graphs, strict=True):
        if isinstance(graph, Invalid):
            outcomes.append(Outcome(graph, None, Verdict(False, graph.reason, None), False))
            continue
        run = next(runs)
        verdict = grade(run.final_text, problem.answer, strict=False)
        if run.error:
            verdict = Verdict(False, "agent_failed", None)
        outcomes.append(Outcome(graph, run, verdict, leaks_answer(graph, problem)))
    return outcomes


class GraphReward:
    """Scores a whole step: the seam through which `GRPOTrainer` sees the agents."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_agents: int = AGENTS,
        zero_leaks: bool = True,
        format_reward: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._runner, self._max_agents, self._seed = runner, max_agents, seed
        self._zero_leaks, self._format_reward = zero_leaks, format_reward
        self._rounds: list[list[list[Outcome]]] = []  # of each call, as the rewards

    def __call__(
        self,
        problems: Sequence[Problem],
        groups: Sequence[Sequence[str]],
        truncated: Sequence[Sequence[bool]] = (),
    ) -> Scores:
        """`truncated` changes nothing: a graph that was cut off is not JSON."""
        pairs = zip(problems, groups, strict=True)
        rows = [(p, text, number) for p, group in pairs for number, text in enumerate(group)]
        graphs = [read_graph(text, self._max_agents) for _, text, _ in rows]
        # Not numbered by place: that would change with the other problems, and the processes.
        options = {"seed": self._seed, "numbers": [number for *_, number in rows]}
        flat = try_graphs(self._runner, [p for p, *_ in rows], graphs, **options)
        outcomes = iter(flat)
        grouped = [[next(outcomes) for _ in group] for group in groups]
        self._rounds.append(grouped)
        return Scores([[self._reward(o) for o in row] for row in grouped], summary(flat))

    def take_outcomes(self) -> list[list[list[Outcome]]]:
        """Those of each call since the last time; more than one where groups were replaced."""
        rounds, self._rounds = self._rounds, []
        return rounds

    def _reward(self, outcome: Outcome) -> float | None:
        if not outcome.judged:
            return None
        earned = outcome.earns(self._zero_leaks)
        return float(earned) + self._format_reward * isinstance(outcome.graph, Graph)


def summary(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Figures of some outcomes; shares are of all of them, distinct of the valid ones."""
    outcomes = list(outcomes)
    if not outcomes:  # the share of a process that has no problem to replace
        return {}
    runs = [outcome.run for outcome in outcomes if outcome.run]
    graphs = [run.graph for run in runs]
    invalid = Counter(o.graph.reason for o in outcomes if isinstance(o.graph, Invalid))
    return {
        "graph/valid_rate": len(graphs) / len(outcomes),
        **{f"graph/{reason}": invalid[reason] / len(outcomes) for reason in REASONS},
        "graph/distinct": len({g.text() for g in graphs}) / len(graphs) if graphs else 0.0,
        "graph/similarity": similarity(graphs),
        "graph/leak_rate": sum(outcome.leak for outcome in outcomes) / len(outcomes),
        "agents/correct": sum(outcome.correct for outcome in outcomes) / len(outcomes),
        "agents/failed": sum(not outcome.judged for outcome in outcomes),
        "agents/tokens_read": sum(run.read for run in runs) / len(outcomes),
        "agents/tokens_written": sum(run.written for run in runs) / len(outcomes),
    }
