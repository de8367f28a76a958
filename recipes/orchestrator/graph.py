"""Defines the graph of agents that the orchestrator writes, and parses it.

    {"agents": [{"id": "agentA", "type": "llm", "system_prompt": "…"},
                {"id": "agentB", "type": "llm", "system_prompt": "…"}]}

Without edges each agent hands its draft to the next; `"edges": [["agentA", "agentB"], …]` says
who reads whom. One agent ends the graph: its text is the final one.
"""

from __future__ import annotations

import json
import re
import string
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, StringConstraints, ValidationError, model_validator
from pydantic_core import PydanticCustomError

MIN_AGENTS = 2  # also the most, unless --max-agents says otherwise
AGENT_IDS = [f"agent{letter}" for letter in string.ascii_uppercase]

REASONS = (
    "no_json",  # no { anywhere
    "bad_json",  # it begins and is no JSON: cut off, a raw line break, a key given twice
    "trailing_text",  # something after it, other than a closing fence
    "schema",  # JSON of another shape
    "unknown_node",  # an edge from or to an agent that is not there
    "cycle",  # agents that wait for each other
)


@dataclass(frozen=True)
class InvalidGraph:
    """Says why a completion holds no graph."""

    reason: str  # one of REASONS
    detail: str


class Agent(BaseModel, extra="forbid", strict=True, frozen=True):
    """Describes a node of a graph: an LLM with a system prompt."""

    id: str
    type: Literal["llm"]
    system_prompt: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class Graph(BaseModel, extra="forbid", strict=True, frozen=True):
    """Holds agents and edges (from, to); without edges the agents are a chain, in their order."""

    agents: list[Agent]
    edges: list[list[str]] | None = None

    @model_validator(mode="after")
    def _check_edges(self) -> Graph:
        ids = [agent.id for agent in self.agents]
        if not ids or ids != AGENT_IDS[: len(ids)]:
            raise PydanticCustomError("schema", "the agents are not agentA, agentB, …")
        for edge in self.edges or ():
            if len(edge) != 2:
                raise PydanticCustomError("schema", "an edge is not a pair")
            if not set(edge) <= set(ids):
                raise PydanticCustomError("unknown_node", "an edge names no agent")
        try:
            TopologicalSorter(self.inputs()).prepare()
        except CycleError as error:
            raise PydanticCustomError("cycle", "agents wait for each other") from error
        if len(self._ends()) != 1:
            raise PydanticCustomError("schema", "not one agent ends the graph")
        return self

    @classmethod
    def chain(cls, *prompts: str) -> Graph:
        """Make a graph whose agents have these prompts and run one after the other."""
        pairs = zip(AGENT_IDS, prompts, strict=False)
        return cls(agents=[Agent(id=name, type="llm", system_prompt=text) for name, text in pairs])

    def inputs(self) -> dict[str, list[str]]:
        """Map each agent to those whose drafts it reads, in the order in which they are listed."""
        ids = [agent.id for agent in self.agents]
        if self.edges is None:
            return {name: ids[max(0, i - 1) : i] for i, name in enumerate(ids)}
        return {name: [i for i in ids if [i, name] in self.edges] for name in ids}

    def _ends(self) -> list[str]:
        read = {name for names in self.inputs().values() for name in names}
        return [agent.id for agent in self.agents if agent.id not in read]

    @property
    def last(self) -> str:
        """Return the id of the agent whose text is the final one."""
        return self._ends()[0]

    @property
    def prompts(self) -> list[str]:
        return [agent.system_prompt for agent in self.agents]

    def to_json(self) -> str:
        """Serialize as the orchestrator is asked to write it; equal graphs give equal texts."""
        return json.dumps(self.model_dump(exclude_none=True), ensure_ascii=False)


def parse_graph(text: str, max_agents: int = MIN_AGENTS) -> Graph | InvalidGraph:
    """Read the graph in a completion; never raises.

    Words and a ```json fence may stand before it, nothing but the closing fence after it: a
    model that is paid for text behind its answer never learns to stop.
    """
    found = _find_object(text)
    if isinstance(found, InvalidGraph):
        return found
    content, end = found
    rest = text[end:].strip()
    if rest.removeprefix("```").strip():
        return InvalidGraph("trailing_text", f"after the graph comes {rest[:40]!r}")
    try:
        graph = Graph.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        reason = first["type"] if first["type"] in REASONS else "schema"
        detail = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        return InvalidGraph(reason, detail.encode(errors="replace").decode())  # of a key's bytes
    if not MIN_AGENTS <= len(graph.agents) <= max_agents:
        return InvalidGraph("schema", f"{len(graph.agents)} agents")
    return graph


def _find_object(text: str) -> tuple[dict[str, Any], int] | InvalidGraph:
    """Find the first JSON object and its end; one right behind a fence goes before others.

    The JSON parser itself finds the end, so braces and fences inside a string are text.
    """
    first = text.find("{")
    if first < 0:
        return InvalidGraph("no_json", "no { anywhere")
    found = _decode(text, first)
    end = first if isinstance(found, InvalidGraph) else found[1]
    fenced = re.compile(r"```(?:json)?\s*(?=\{)").search(text)
    if fenced and fenced.end() > end:  # the first { was prose
        return _decode(text, fenced.end())
    return found


def _decode(text: str, start: int) -> tuple[dict[str, Any], int] | InvalidGraph:
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return InvalidGraph("bad_json", str(error)[:80])


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_refuse_repeated_keys, parse_constant=_refuse_constant
)
