"""The graph of agents that the orchestrator writes, and how it is read from a completion.

    {"agents": [{"id": "agentA", "type": "llm", "system_prompt": "…"},
                {"id": "agentB", "type": "llm", "system_prompt": "…"}]}

Without edges each agent hands its draft to the next; `"edges": [["agentA", "agentB"], …]` says
who reads whom. One agent ends the graph: its text is the final one.

Reading never raises: what a model writes is a `Graph`, or an `Invalid` with a reason.
"""

from __future__ import annotations

import json
import re
import string
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError, model_validator
from pydantic_core import PydanticCustomError

AGENTS = 2  # the least, and the most unless --max-agents says otherwise
MOST_AGENTS = len(string.ascii_uppercase)

REASONS = (
    "no_json",  # no { anywhere
    "bad_json",  # it begins and is no JSON: cut off, a raw line break, a key given twice
    "trailing_text",  # something after it, other than a closing fence
    "schema",  # JSON of another shape
    "unknown_node",  # an edge from or to an agent that is not there
    "cycle",  # agents that wait for each other
)


@dataclass(frozen=True)
class Invalid:
    """Why a completion holds no graph."""

    reason: str  # one of REASONS
    detail: str


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Agent(_Strict):
    id: str
    type: Literal["llm"]
    system_prompt: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class Graph(_Strict):
    """`edges` are (from, to); None is a chain in the order of `agents`."""

    agents: list[Agent]
    edges: list[list[str]] | None = None

    @model_validator(mode="after")
    def _hangs_together(self) -> Graph:
        ids = [agent.id for agent in self.agents]
        if not ids or ids != [agent_id(i) for i in range(min(len(ids), MOST_AGENTS))]:
            raise PydanticCustomError("schema", "the agents are not agentA, agentB, …")
        for edge in self.edges or ():
            if len(edge) != 2:
                raise PydanticCustomError("schema", "an edge is not a pair")
            if not set(edge) <= set(ids):
                raise PydanticCustomError("unknown_node", "an edge names no agent")
        try:
            self.levels()
        except CycleError as error:
            raise PydanticCustomError("cycle", "agents wait for each other") from error
        read = {name for names in self.inputs().values() for name in names}
        if len(set(ids) - read) != 1:
            raise PydanticCustomError("schema", "not one agent ends the graph")
        return self

    @classmethod
    def chain(cls, *system_prompts: str) -> Graph:
        """Agents with these prompts, one after the other."""
        rows = enumerate(system_prompts)
        return cls(agents=[Agent(id=agent_id(i), type="llm", system_prompt=p) for i, p in rows])

    def inputs(self) -> dict[str, list[str]]:
        """Agent → the agents whose drafts it reads, in the order in which they are listed."""
        ids = [agent.id for agent in self.agents]
        if self.edges is None:
            return {name: ids[max(0, i - 1) : i] for i, name in enumerate(ids)}
        return {name: [i for i in ids if [i, name] in self.edges] for name in ids}

    def levels(self) -> list[list[Agent]]:
        """Agents by when they can run: those of a level read only drafts of earlier ones."""
        sorter = TopologicalSorter(self.inputs())
        sorter.prepare()
        levels = []
        while sorter.is_active():
            ready = sorter.get_ready()
            levels.append([agent for agent in self.agents if agent.id in ready])
            sorter.done(*ready)
        return levels

    @property
    def last(self) -> str:
        """The agent whose text is the final one."""
        return self.levels()[-1][0].id

    @property
    def prompts(self) -> list[str]:
        return [agent.system_prompt for agent in self.agents]

    def text(self) -> str:
        """JSON as the orchestrator is asked to write it; equal graphs have equal texts."""
        return json.dumps(self.model_dump(exclude_none=True), ensure_ascii=False)


def agent_id(index: int) -> str:
    """
    >>> agent_id(0), agent_id(1)
    ('agentA', 'agentB')
    """
    return f"agent{string.ascii_uppercase[index]}"


def read_graph(text: str, max_agents: int = AGENTS) -> Graph | Invalid:
    """The graph in a completion.

    Words and a ```json fence may stand before it, nothing but the closing fence after it: a
    model that is paid for text behind its answer never learns to stop.
    """
    found = _find_object(text)
    if isinstance(found, Invalid):
        return found
    content, end = found
    rest = text[end:].strip()
    if rest.removeprefix("```").strip():
        return Invalid("trailing_text", f"after the graph comes {rest[:40]!r}")
    try:
        graph = Graph.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = first["type"] if first["type"] in REASONS else "schema"
        detail = f"{where}: {first['msg']}" if where else first["msg"]
        return Invalid(reason, detail.encode(errors="replace").decode())  # a key may be no text
    if not AGENTS <= len(graph.agents) <= max_agents:
        return Invalid("schema", f"{len(graph.agents)} agents")
    return graph


def _find_object(text: str) -> tuple[dict[str, Any], int] | Invalid:
    """The first JSON object and where it ends; one right behind a fence goes before others.

    The JSON parser itself finds the end, so braces and fences inside a string are text.
    """
    first = text.find("{")
    if first < 0:
        return Invalid("no_json", "no { anywhere")
    found = _decode(text, first)
    end = first if isinstance(found, Invalid) else found[1]
    fenced = re.compile(r"```(?:json)?\s*(?=\{)").search(text)
    if fenced and fenced.end() > end:  # the first { was prose
        return _decode(text, fenced.end())
    return found


def _decode(text: str, start: int) -> tuple[dict[str, Any], int] | Invalid:
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return Invalid("bad_json", str(error)[:80])


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_no_repeats, parse_constant=_no_constant)
