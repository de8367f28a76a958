"""Runs many graphs at once: all first agents in one batch, then all second ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from recipes.orchestrator.agents import APIAgents, Call, LocalAgents, Reply
from recipes.orchestrator.graph import Agent, Graph, InvalidGraph
from rlm.data import Problem
from rlm.grading import Verdict, grade, numbers_in, parse_number
from rlm.sampling import Completion, SamplingParams, prompt_seed


@dataclass(frozen=True)
class Generation:
    """Records what the orchestrator read and wrote for a problem."""

    prompt_tokens: int
    completion: Completion
    text: str


@dataclass
class Trajectory:
    """Records a graph on a problem: what agents read and wrote, and whether the answer is right."""

    problem: Problem
    graph: Graph | InvalidGraph
    calls: dict[str, Call] = field(default_factory=dict)  # by agent
    replies: dict[str, Reply] = field(default_factory=dict)
    generation: Generation | None = None  # where the orchestrator wrote the graph

    @property
    def error(self) -> str | None:
        """Say why there is no verdict: an agent's API failed."""
        return next((reply.error for reply in self.replies.values() if reply.error), None)

    @property
    def final_text(self) -> str:
        return "" if self.error else self.replies[self.graph.last].text

    @property
    def prompt_tokens(self) -> int:
        return sum(reply.prompt_tokens for reply in self.replies.values())

    @property
    def completion_tokens(self) -> int:
        return sum(reply.completion_tokens for reply in self.replies.values())

    @cached_property
    def verdict(self) -> Verdict:
        """Grade the final text leniently; where there is none, the reason says why."""
        if isinstance(self.graph, InvalidGraph):
            return Verdict(False, self.graph.reason, None)
        if self.error:
            return Verdict(False, "agent_failed", None)
        return grade(self.final_text, self.problem.answer, strict=False)

    @property
    def leak(self) -> bool:
        """Tell whether a prompt holds the gold, and the problem itself does not."""
        gold = parse_number(self.problem.answer)
        if isinstance(self.graph, InvalidGraph) or gold is None:
            return False
        in_prompts = any(abs(gold) in numbers_in(prompt) for prompt in self.graph.prompts)
        return in_prompts and abs(gold) not in numbers_in(self.problem.question)

    def ready(self) -> list[Agent]:
        """Return the agents that have every draft they read, and were not asked yet."""
        if self.error or isinstance(self.graph, InvalidGraph):
            return []
        inputs = self.graph.inputs()
        waiting = [agent for agent in self.graph.agents if agent.id not in self.calls]
        return [agent for agent in waiting if self.replies.keys() >= set(inputs[agent.id])]

    def solved(self, zero_leaks: bool = False) -> bool:
        """Tell whether the answer is right, and with `zero_leaks` not given away by a prompt."""
        return self.verdict.correct and not (zero_leaks and self.leak)

    def to_dict(self) -> dict[str, Any]:
        """Return the record that rollouts.jsonl holds."""
        row = {"verdict": self.verdict.reason, "correct": self.verdict.correct, "leak": self.leak}
        if isinstance(self.graph, InvalidGraph):
            return row | {"graph": None, "detail": self.graph.detail}
        agents = {
            name: {
                "system_prompt": call.system_prompt,
                "input_payload": call.text,
                "output_text": self.replies[name].text,
            }
            for name, call in self.calls.items()
        }
        return row | {
            "graph": self.graph.model_dump(exclude_none=True),
            "trace": {"agents": agents, "final_text": self.final_text},
            "tokens_read": self.prompt_tokens,
            "tokens_written": self.completion_tokens,
        }


class Runner:
    """Runs graphs on problems. Greedy calls are cached by content: the agents never change."""

    def __init__(
        self, agents: LocalAgents | APIAgents, max_new_tokens: int, temperature: float = 0.0
    ) -> None:
        self.agents = agents
        self.params = SamplingParams(max_new_tokens, temperature)
        self._cache: dict[Call, Reply] = {}

    def run(
        self,
        problems: Sequence[Problem],
        graphs: Sequence[Graph | InvalidGraph],
        seed: int = 0,
        numbers: Sequence[int] | None = None,
    ) -> list[Trajectory]:
        """Run each graph on the problem beside it: a batch for each agent of the longest chain.

        Args:
            seed: of agents that sample at a temperature.
            numbers: tells the graphs of a problem apart, for that seed; by default their places.
        """
        runs = [Trajectory(*pair) for pair in zip(problems, graphs, strict=True)]
        numbers = range(len(runs)) if numbers is None else numbers
        seeds = [prompt_seed(seed, p.id, n) for p, n in zip(problems, numbers, strict=True)]
        pairs = list(zip(runs, seeds, strict=True))
        while jobs := [(run, agent, seed) for run, seed in pairs for agent in run.ready()]:
            for run, agent, seed in jobs:
                run.calls[agent.id] = self._call(run, agent, seed)
            replies = self._chat([run.calls[agent.id] for run, agent, _ in jobs])
            for (run, agent, _), reply in zip(jobs, replies, strict=True):
                run.replies[agent.id] = reply
        self.agents.release()
        return runs

    def _call(self, run: Trajectory, agent: Agent, seed: int) -> Call:
        drafts = {name: run.replies[name].text for name in run.graph.inputs()[agent.id]}
        seed = prompt_seed(seed, agent.id) if self.params.temperature else 0
        return Call(agent.system_prompt, agent_input(run.problem.question, drafts), seed)

    def _chat(self, calls: Sequence[Call]) -> list[Reply]:
        """Ask equal calls once; a failed one is asked again next time."""
        new = [call for call in dict.fromkeys(calls) if call not in self._cache]
        replies = dict(zip(new, self.agents.chat(new, self.params), strict=True)) if new else {}
        if self.params.temperature == 0:
            self._cache |= {call: reply for call, reply in replies.items() if not reply.error}
        return [replies.get(call) or self._cache[call] for call in calls]


def agent_input(question: str, drafts: Mapping[str, str]) -> str:
    """Write the user's text of an agent's conversation: the bare problem where there is no draft.

    >>> agent_input("1 + 1?", {"agentA": "two"})
    'PROBLEM: 1 + 1?\\n\\nDRAFT of agentA: two'
    """
    if not drafts:
        return question
    rows = [f"PROBLEM: {question}", *(f"DRAFT of {name}: {text}" for name, text in drafts.items())]
    return "\n\n".join(rows)
