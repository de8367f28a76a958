"""Runs many graphs at once, level by level: all first agents in one batch, then all second ones.

Whoever answers for the agents is an `Agents` (agents.py has two: our sampler and a server).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from recipes.orchestrator.graph import Graph
from recipes.orchestrator.prompts import agent_input
from rlm.sampling import SamplingParams, prompt_seed


@dataclass(frozen=True)
class Call:
    """What an agent is asked, and with which limits; equal greedy calls have equal replies."""

    system_prompt: str
    text: str
    params: SamplingParams
    seed: int = 0


@dataclass(frozen=True)
class Reply:
    """What it said. error: why it could not, where a server failed; text is then empty."""

    text: str
    read: int = 0  # tokens
    written: int = 0
    error: str | None = None


class Agents(Protocol):
    """The frozen model behind all agents."""

    def reply(self, calls: Sequence[Call]) -> list[Reply]:
        """One reply per call, as one batch."""

    def release(self) -> None:
        """Give back what only a batch needs."""


@dataclass
class Run:
    """A graph at work on a problem: what each agent read and said."""

    question: str
    graph: Graph
    calls: dict[str, Call] = field(default_factory=dict)
    replies: dict[str, Reply] = field(default_factory=dict)

    @property
    def error(self) -> str | None:
        """Why there is no final text."""
        return next((reply.error for reply in self.replies.values() if reply.error), None)

    @property
    def final_text(self) -> str:
        return "" if self.error else self.replies[self.graph.last].text

    @property
    def read(self) -> int:
        return sum(reply.read for reply in self.replies.values())

    @property
    def written(self) -> int:
        return sum(reply.written for reply in self.replies.values())

    def trace(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "agents": {
                name: {
                    "system_prompt": call.system_prompt,
                    "input_payload": call.text,
                    "output_text": self.replies[name].text,
                }
                for name, call in self.calls.items()
            },
            "final_text": self.final_text,
        }


class Runner:
    """Runs graphs on problems. Greedy calls are cached by content: the agents never change."""

    def __init__(self, agents: Agents, max_new_tokens: int, temperature: float = 0.0) -> None:
        self.agents = agents
        self.params = SamplingParams(max_new_tokens, temperature)
        self._cache: dict[Call, Reply] = {}

    def run(
        self,
        questions: Sequence[str],
        graphs: Sequence[Graph],
        seeds: Sequence[int] | None = None,
        max_new_tokens: int | None = None,
    ) -> list[Run]:
        """Each graph on the question beside it; as many batches as the deepest graph has levels.

        Args:
            seeds: one per graph, where agents draw at a temperature.
            max_new_tokens: of each agent, instead of the runner's.
        """
        params = self.params
        if max_new_tokens:
            params = SamplingParams(max_new_tokens, params.temperature)
        runs = [Run(question, graph) for question, graph in zip(questions, graphs, strict=True)]
        plans = [(graph.levels(), graph.inputs()) for graph in graphs]
        for depth in range(max((len(levels) for levels, _ in plans), default=0)):
            asked: list[tuple[Run, str]] = []
            for i, (run, (levels, inputs)) in enumerate(zip(runs, plans, strict=True)):
                if run.error or depth >= len(levels):
                    continue
                for agent in levels[depth]:
                    drafts = {name: run.replies[name].text for name in inputs[agent.id]}
                    text = agent_input(run.question, drafts)
                    seed = prompt_seed(seeds[i], agent.id) if seeds and params.temperature else 0
                    run.calls[agent.id] = Call(agent.system_prompt, text, params, seed)
                    asked.append((run, agent.id))
            replies = self._reply([run.calls[name] for run, name in asked])
            for (run, name), reply in zip(asked, replies, strict=True):
                run.replies[name] = reply
        self.agents.release()
        return runs

    def _reply(self, calls: Sequence[Call]) -> list[Reply]:
        """The replies, equal calls asked once; a failed one is asked again next time."""
        known = self._cache if self.params.temperature == 0 else {}
        new = [call for call in dict.fromkeys(calls) if call not in known]
        found = dict(zip(new, self.agents.reply(new), strict=True)) if new else {}
        known |= {call: reply for call, reply in found.items() if reply.error is None}
        return [known.get(call) or found[call] for call in calls]
