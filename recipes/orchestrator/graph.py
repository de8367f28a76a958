"""Defines the graph of two agents that the orchestrator writes, and parses it.

    {"agents": [{"id": "agentA", "type": "llm", "system_prompt": "…"},
                {"id": "agentB", "type": "llm", "system_prompt": "…"}]}

The first agent writes a draft; the second reads problem and draft, and its text is the final one.
An agent with a "question" is asked that alone, in place of problem and draft, and needs no system
prompt: it has the one that it was trained on. In a question, {problem} stands for the problem, and
{agentA} for the first agent's answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

AGENT_IDS = ["agentA", "agentB"]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
REASONS = (
    "no_json",  # no { anywhere
    "bad_json",  # it begins and is no JSON: cut off, a raw line break, a key given twice
    "trailing_text",  # something after it, other than a closing fence
    "schema",  # JSON of another shape
)


@dataclass(frozen=True)
class InvalidGraph:
    """Says why a completion holds no graph: one without agents."""

    reason: str  # one of REASONS
    detail: str
    agents: tuple[()] = ()
    texts: tuple[()] = ()


class Agent(BaseModel, extra="forbid", strict=True, frozen=True):
    """Describes a node of a graph: an LLM with a system prompt, a question of its own, or both."""

    id: str
    type: Literal["llm"]
    system_prompt: Text | None = None
    question: Text | None = None

    @model_validator(mode="after")
    def _check_texts(self) -> Agent:
        if not self.texts:
            raise ValueError(f"{self.id} has neither a system_prompt nor a question")
        return self

    @property
    def texts(self) -> list[str]:
        return [text for text in (self.system_prompt, self.question) if text]


class Graph(BaseModel, extra="forbid", strict=True, frozen=True):
    """Holds the agents, each of which reads the draft of the one before it."""

    agents: list[Agent]

    @field_validator("agents")
    @classmethod
    def _check_ids(cls, agents: list[Agent]) -> list[Agent]:
        ids = [agent.id for agent in agents]
        if not ids or ids != AGENT_IDS[: len(ids)]:
            raise ValueError("the agents are not agentA, agentB")
        return agents

    @classmethod
    def chain(cls, *prompts: str) -> Graph:
        """Make a graph whose agents have these prompts; the single agent is a graph of one."""
        return cls._of("system_prompt", prompts)

    @classmethod
    def plan(cls, *questions: str) -> Graph:
        """Make a graph whose agents are asked these questions."""
        return cls._of("question", questions)

    @classmethod
    def _of(cls, field: str, texts: Sequence[str]) -> Graph:
        pairs = zip(AGENT_IDS, texts, strict=False)
        return cls(agents=[Agent(id=name, type="llm", **{field: text}) for name, text in pairs])

    @property
    def texts(self) -> list[str]:
        """All that the orchestrator wrote to the agents, in its order."""
        return [text for agent in self.agents for text in agent.texts]

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)

    def to_json(self) -> str:
        """Serialize as the orchestrator is asked to write it; equal graphs give equal texts."""
        return json.dumps(self.to_dict(), ensure_ascii=False)


def parse_graph(text: str) -> Graph | InvalidGraph:
    """Read the graph of two agents in a completion; never raises.

    Words and a ```json fence may stand before it, nothing but the closing fence after it: a
    model that is paid for text behind its answer never learns to stop.
    """
    if "{" not in text:
        return InvalidGraph("no_json", "no { anywhere")
    try:
        content, end = _first_object(text)
        rest = text[end:].strip()
        if rest.removeprefix("```").strip():
            return InvalidGraph("trailing_text", f"after the graph comes {rest[:40]!r}")
        graph = Graph.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        detail = ": ".join([".".join(map(str, first["loc"])), first["msg"]])
        return InvalidGraph("schema", detail.encode(errors="replace").decode())  # of a key's bytes
    except (ValueError, RecursionError) as error:
        return InvalidGraph("bad_json", str(error)[:80])
    if len(graph.agents) < len(AGENT_IDS):
        return InvalidGraph("schema", "one agent, not two")
    return graph


def _first_object(text: str) -> tuple[dict[str, Any], int]:
    """Decode the first JSON object, and find its end; one right behind a fence goes before others.

    The JSON parser itself finds the end, so braces and fences inside a string are text.
    """
    first, fence = text.index("{"), re.search(r"```(?:json)?\s*(?=\{)", text)
    behind_fence = fence.end() if fence else first
    try:
        content, end = _DECODER.raw_decode(text, first)
    except (ValueError, RecursionError):
        if behind_fence <= first:
            raise
        end = first
    if behind_fence > end:  # the first { was prose
        return _DECODER.raw_decode(text, behind_fence)
    return content, end


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_refuse_repeated_keys, parse_constant=_refuse_constant
)
