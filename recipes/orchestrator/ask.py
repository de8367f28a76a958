"""Solves a problem with a trained orchestrator, and prints the graph, the replies and the answer.

python -m recipes.orchestrator.ask "Each box holds 6 eggs. How many eggs do 4 boxes hold?"
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipes.orchestrator.graph import Graph
from recipes.orchestrator.orchestrator import Orchestrator
from rlm.cli import UsageError, check_values, flag, required, run_main, terminal
from rlm.data import Problem
from rlm.model import prepare_process


@dataclass
class AskConfig:
    question: str | None = flag(
        None, "the problem to solve", positional=True, default_text="required"
    )
    run: Path = flag(Path("runs/orchestrator"), "folder of the training run")
    tries: int = flag(
        3, "maximum number of graphs to sample until one is valid; the first is greedy", min=1
    )

    def __post_init__(self) -> None:
        check_values(self)
        if not (self.question or "").strip():
            raise ValueError('type a question: python -m recipes.orchestrator.ask "…"')


def main(config: AskConfig) -> int:
    prepare_process()
    orchestrator = Orchestrator.load(config.run)
    # The reference answer "0" is a placeholder, which is not used to find the agents' answer.
    problem = Problem("asked", required(config.question, "question"), "0")
    for attempt in range(config.tries):
        (run,) = orchestrator.solve([problem], temperature=min(attempt, 1), seed=attempt)
        written = run.written
        assert written is not None  # set by `solve`
        if isinstance(run.graph, Graph):
            break
        terminal.line(f"no valid graph ({run.graph.reason}: {run.graph.detail})")
    else:
        last = written.text[:200]
        raise UsageError(f"no valid graph in {config.tries} tries; the last reply was: {last}")
    if run.error:
        raise UsageError(run.error)
    for agent, reply in zip(run.graph.agents, run.replies, strict=True):
        terminal.line(f"{agent.id} received: {' / '.join(agent.texts)}\n{reply.text}\n")
    terminal.line(
        f"answer: {run.last_answer() or 'none found'}  (tokens: {written.completion_tokens} for "
        f"the graph, {run.completion_tokens} for the agents)"
    )
    return 0


if __name__ == "__main__":
    run_main(main, AskConfig, description=__doc__)
