"""Rewards a graph: 1 if the last agent's final number is the gold, else 0.

An invalid graph stays in its group with 0: a retry would hide the failure from the learner. An
orchestrator could also solve the problem itself and write the answer into a prompt, which no
verifier sees; such leaks are counted, and earn nothing unless asked otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from recipes.orchestrator.config import OrchestratorConfig
from recipes.orchestrator.graph import REASONS, Graph, InvalidGraph, parse_graph
from recipes.orchestrator.runner import Runner, Trajectory
from rlm.data import Problem
from rlm.rewards import Scores


class GraphReward:
    """Scores the graphs of a whole step; `GRPOTrainer` calls it as its scorer."""

    def __init__(self, runner: Runner, config: OrchestratorConfig) -> None:
        self.runner, self.config = runner, config
        self.records: list[list[list[dict[str, Any]]]] = []  # of each call, by group

    def __call__(
        self,
        problems: Sequence[Problem],
        groups: Sequence[Sequence[str]],
        truncated: Sequence[Sequence[bool]] = (),
    ) -> Scores:
        """Score each graph. `truncated` changes nothing: a graph that was cut off is no JSON."""
        asked = [p for p, group in zip(problems, groups, strict=True) for _ in group]
        graphs = [parse_graph(text) for group in groups for text in group]
        # Not their places: these change with the other problems, and the processes.
        numbers = [number for group in groups for number in range(len(group))]
        runs = self.runner.run(asked, graphs, self.config.seed, numbers)
        rows = iter([run.to_dict() | {"reward": self._reward(run)} for run in runs])
        records = [[next(rows) for _ in group] for group in groups]
        self.records.append(records)
        rewards = [[record["reward"] for record in group] for group in records]
        return Scores(rewards, graph_metrics(runs))

    def _reward(self, run: Trajectory) -> float | None:
        if run.error:
            return None
        form = self.config.format_reward * isinstance(run.graph, Graph)
        return float(run.solved(self.config.zero_leaks)) + form


def graph_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Count shares of all graphs; `graph/distinct` is of the valid ones."""
    if not trajectories:  # the share of a process that has no problem to replace
        return {}
    count = len(trajectories)
    graphs = [t.graph for t in trajectories if isinstance(t.graph, Graph)]
    invalid = Counter(t.graph.reason for t in trajectories if isinstance(t.graph, InvalidGraph))
    return {
        "graph/valid_rate": len(graphs) / count,
        **{f"graph/{reason}": invalid[reason] / count for reason in REASONS},
        "graph/distinct": len({g.to_json() for g in graphs}) / len(graphs) if graphs else 0.0,
        "graph/leak_rate": sum(t.leak for t in trajectories) / count,
        "agents/correct": sum(t.solved() for t in trajectories) / count,
        "agents/failed": sum(t.error is not None for t in trajectories),
        "agents/tokens_read": sum(t.prompt_tokens for t in trajectories) / count,
        "agents/tokens_written": sum(t.completion_tokens for t in trajectories) / count,
    }
