"""Runs many graphs at once: all first agents in one batch, then all second ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from recipes.orchestrator.agents import Call, LocalLLM, RemoteLLM, Reply
from recipes.orchestrator.graph import AGENT_IDS, Graph, InvalidGraph
from recipes.orchestrator.leaks import is_leaked
from rlm.data import FORMATS, Format, Problem
from rlm.grading import Verdict, grade
from rlm.sampling import SamplingParams, prompt_seed

_PLACEHOLDER = re.compile(r"\{(?:problem|agentA)\}")


@dataclass
class Trajectory:
    """Records a graph on a problem: what agents read and wrote, and whether the answer is right."""

    problem: Problem
    graph: Graph | InvalidGraph
    calls: list[Call] = field(default_factory=list)  # of the agents, in their order
    replies: list[Reply] = field(default_factory=list)
    written: Reply | None = None  # the orchestrator's reply, where it wrote the graph
    format: Format = FORMATS["deepseek"]  # of the agents' replies

    @property
    def error(self) -> str | None:
        """Say why there is no verdict: an agent's API failed."""
        return next((reply.error for reply in self.replies if reply.error), None)

    @property
    def prompt_tokens(self) -> int:
        return sum(reply.prompt_tokens for reply in self.replies)

    @property
    def completion_tokens(self) -> int:
        return sum(reply.completion_tokens for reply in self.replies)

    @cached_property
    def verdict(self) -> Verdict:
        """Grade the last agent's text leniently; where there is none, the reason says why."""
        if isinstance(self.graph, InvalidGraph):
            return Verdict(False, self.graph.reason, None)
        if self.error:
            return Verdict(False, "agent_failed", None)
        return self._grade_last()

    def _grade_last(self) -> Verdict:
        tags = self.format.tags
        return grade(self.replies[-1].text, self.problem.answer, strict=False, **tags)

    @property
    def leak(self) -> bool:
        """Tell whether a prompt holds the gold, and the problem itself does not."""
        return is_leaked(self.problem, self.graph.texts)

    def solved(self, zero_leaks: bool = False) -> bool:
        """Tell whether the answer is right, and with `zero_leaks` not given away by a prompt."""
        return self.verdict.correct and not (zero_leaks and self.leak)

    def next_call(self, seed: int | None) -> Call | None:
        """Return what the next agent is asked; None if all were, or the graph can not go on.

        Args:
            seed: of this graph, for agents that draw; None for greedy ones.
        """
        asked, text = len(self.replies), self.problem.question
        if self.error or asked == len(self.graph.agents):
            return None
        agent = self.graph.agents[asked]
        if agent.question:
            draft = self._grade_last() if asked else None
            known = {
                "{problem}": text,
                "{agentA}": draft.answer if draft and draft.is_answer else "?",
            }
            text = _PLACEHOLDER.sub(lambda match: known[match[0]], agent.question)
        elif asked:
            text = f"PROBLEM: {text}\n\nDRAFT of {AGENT_IDS[asked - 1]}: {self.replies[-1].text}"
        prompt = agent.system_prompt or self.format.system_prompt
        return Call(prompt, text, 0 if seed is None else prompt_seed(seed, agent.id))

    def to_dict(self) -> dict[str, Any]:
        """Return the record that rollouts.jsonl holds."""
        row = {"verdict": self.verdict.reason, "correct": self.verdict.correct, "leak": self.leak}
        if isinstance(self.graph, InvalidGraph):
            return row | {"graph": None, "detail": self.graph.detail}
        agents = {
            name: {
                "system_prompt": call.system_prompt,
                "input_payload": call.text,
                "output_text": reply.text,
            }
            for name, call, reply in zip(AGENT_IDS, self.calls, self.replies, strict=False)
        }
        return row | {
            "graph": self.graph.to_dict(),
            "trace": {"agents": agents, "final_text": self.replies[-1].text},
            "tokens_read": self.prompt_tokens,
            "tokens_written": self.completion_tokens,
        }


class Runner:
    """Runs graphs on problems. Greedy calls are cached by content: the agents never change."""

    def __init__(
        self,
        agents: LocalLLM | RemoteLLM,
        max_new_tokens: int,
        temperature: float = 0.0,
        format: Format = FORMATS["deepseek"],
    ) -> None:
        self.agents, self.format = agents, format
        self.params = SamplingParams(max_new_tokens, temperature)
        self._cache: dict[Call, Reply] = {}

    def run(
        self,
        problems: Sequence[Problem],
        graphs: Sequence[Graph | InvalidGraph],
        seed: int = 0,
        numbers: Sequence[int] | None = None,
    ) -> list[Trajectory]:
        """Run each graph on the problem beside it: as many batches as a graph has agents.

        Args:
            seed: of agents that sample at a temperature.
            numbers: tells the graphs of a problem apart, for that seed; by default their places.
        """
        pairs = zip(problems, graphs, strict=True)
        runs = [Trajectory(*pair, format=self.format) for pair in pairs]
        seeds: list[int | None] = [None] * len(runs)
        if self.params.temperature:
            numbers = range(len(runs)) if numbers is None else numbers
            seeds = [prompt_seed(seed, p.id, n) for p, n in zip(problems, numbers, strict=True)]
        seeded = list(zip(runs, seeds, strict=True))
        while asking := [(run, call) for run, own in seeded if (call := run.next_call(own))]:
            replies = self._chat([call for _, call in asking])
            for (run, call), reply in zip(asking, replies, strict=True):
                run.calls.append(call)
                run.replies.append(reply)
        self.agents.release()
        return runs

    def _chat(self, calls: Sequence[Call]) -> list[Reply]:
        """Ask equal calls once; a failed one is asked again next time."""
        new = [call for call in dict.fromkeys(calls) if call not in self._cache]
        replies = dict(zip(new, self.agents.chat(new, self.params), strict=True)) if new else {}
        if self.params.temperature == 0:
            self._cache |= {call: reply for call, reply in replies.items() if not reply.error}
        return [replies.get(call) or self._cache[call] for call in calls]
