"""Defines the graph of two agents that the orchestrator writes, parses it, and finds leaks in it.

    {"agents": [{"id": "agentA", "type": "llm", "system_prompt": "…"},
                {"id": "agentB", "type": "llm", "system_prompt": "…"}]}

The first agent writes a draft. The second agent reads the problem and the draft, and its reply is
the final one. With --graph-form questions, each agent has a "question" instead of a system prompt.
It reads only this question instead of the problem and the draft, with the system prompt that the
agents were trained with. In a question, {problem} stands for the problem, and {agentA} for the
first agent's answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BaseModel, StringConstraints, ValidationError, field_validator

from rlm.data import Problem
from rlm.grading import parse_number, states_number

AGENT_IDS = ["agentA", "agentB"]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
REASONS = (
    "no_json",  # the text contains no {
    "bad_json",  # the JSON is invalid: truncated, with a raw line break, or with a repeated key
    "trailing_text",  # the JSON is followed by text other than a closing fence
    "schema",  # the JSON is valid, but is no graph of two agents with the field of --graph-form
)
FIELDS = {"prompts": "system_prompt", "questions": "question"}  # --graph-form → field of an agent


@dataclass(frozen=True)
class InvalidGraph:
    """Contains the reason why a completion has no valid graph.

    It can be used in place of a `Graph`, and then behaves like a graph without agents.
    """

    reason: str  # one of REASONS
    detail: str
    agents: tuple[()] = ()
    texts: tuple[()] = ()


class Agent(BaseModel, extra="forbid", strict=True, frozen=True):
    """A node of a graph: an LLM with a system prompt or a question of its own.

    If `system_prompt` is None, the agent gets the system prompt that the agents were trained with.
    """

    id: str
    type: Literal["llm"]
    system_prompt: Text | None = None
    question: Text | None = None

    @property
    def texts(self) -> list[str]:
        return [text for text in (self.system_prompt, self.question) if text]


class Graph(BaseModel, extra="forbid", strict=True, frozen=True):
    """Contains the agents of a graph. Each agent reads the draft of the previous agent."""

    agents: list[Agent]

    @field_validator("agents")
    @classmethod
    def _check_agents(cls, agents: list[Agent]) -> list[Agent]:
        ids = [agent.id for agent in agents]
        if not ids or ids != AGENT_IDS[: len(ids)]:
            raise ValueError("the ids of the agents are not agentA, agentB")
        return agents

    @classmethod
    def chain(cls, *texts: str, field: str = "system_prompt") -> Graph:
        """Create a graph with one agent per text. An empty text leaves the field out."""
        pairs = zip(AGENT_IDS, texts, strict=False)
        made = [Agent(id=name, type="llm", **{field: text or None}) for name, text in pairs]
        return cls(agents=made)

    @classmethod
    def plan(cls, *questions: str) -> Graph:
        """Create a graph with one agent per question."""
        return cls.chain(*questions, field="question")

    @property
    def texts(self) -> list[str]:
        """All texts that the orchestrator wrote for the agents, in order."""
        return [text for agent in self.agents for text in agent.texts]

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)

    def to_json(self) -> str:
        """Serialize the graph in the format that the orchestrator's prompt requests.

        Equal graphs give equal texts.
        """
        return json.dumps(self.to_dict(), ensure_ascii=False)


def parse_graph(text: str, form: str) -> Graph | InvalidGraph:
    """Parse the graph of two agents in a completion, each with the field of --graph-form `form`.

    Text and a ```json fence may precede the graph, but only the closing fence may follow it. A
    model that is rewarded despite text after the graph would never learn to stop. This function
    never raises.
    """
    if "{" not in text:
        return InvalidGraph("no_json", "the text contains no {")
    try:
        content, end = _first_object(text)
        rest = text[end:].strip()
        if rest.removeprefix("```").strip():
            return InvalidGraph("trailing_text", f"the graph is followed by {rest[:40]!r}")
        graph = Graph.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        detail = ": ".join([".".join(map(str, first["loc"])), first["msg"]])
        # The detail may quote a lone surrogate, which the run's files cannot contain.
        return InvalidGraph("schema", detail.encode(errors="replace").decode())
    except (ValueError, RecursionError) as error:
        return InvalidGraph("bad_json", str(error)[:80])
    if len(graph.agents) < len(AGENT_IDS):
        return InvalidGraph("schema", "the graph has one agent instead of two")
    field = FIELDS[form]
    if any(agent.texts != [getattr(agent, field)] for agent in graph.agents):
        return InvalidGraph("schema", f"not every agent has a {field} and no other text")
    return graph


def _first_object(text: str) -> tuple[dict[str, Any], int]:
    """Decode the first JSON object, and return it with the position of its end.

    An object directly after an opening fence takes precedence over an earlier object. The end is
    found by the JSON parser itself, so braces and fences inside a string are treated as text.
    """
    first, fence = text.index("{"), re.search(r"```(?:json)?\s*(?=\{)", text)
    content, end = {}, first
    with suppress(ValueError, RecursionError):  # The first brace may be part of prose.
        content, end = _DECODER.raw_decode(text, first)
    if end == first or (fence and fence.end() > end):
        return _DECODER.raw_decode(text, fence.end() if fence else first)
    return content, end


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_refuse_repeated_keys)


# --- leaks ----------------------------------------------------------------------------------------

# A text leaks the reference answer if it contains the answer as a separate number and the problem
# does not contain this number. An answer below 10 also occurs in texts that reveal no quantity of
# the problem: "Think in 2 steps", "Step 2", "2. Check it". Two kinds of digits are therefore
# ignored: those that number an item, and those that count something that the problem does not
# mention.
SMALL = 10  # answers below this limit may also occur as digits of the instructions
_IN_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
# Words that may follow a number but are not nouns counted by the number: "7 plus 5", "7 is right".
_NO_NOUN = "is|as|was|plus|minus|times|divided|equals"
_ITEM = re.compile(
    r"(?i:\b(?:step|part|line|rule|number|agent|point) )\d(?![\d.]*\d)"  # "step 2", not "step 2.5"
    r"|(?:^|[.;\n])\s*\d[.)](?=\s[A-Z])"  # matches the 2 in "Read it. 2. Check it."
)
_COUNT = re.compile(rf"(?<![\w.,/])\d (?!(?:{_NO_NOUN})\b)([a-z]+s|step|line|sentence|word)\b")


def is_leaked(problem: Problem, texts: Sequence[str]) -> bool:
    """Return whether one of the texts contains the reference answer while the problem does not."""
    gold = parse_number(problem.answer)
    if gold is None:
        return False
    if abs(gold) < SMALL and gold.denominator == 1:
        return _is_small_leaked(problem.question, abs(gold), texts)
    return any(states_number(text, gold, problem.question) for text in texts)


def _is_small_leaked(question: str, gold: Fraction, texts: Sequence[str]) -> bool:
    words = set(re.findall(r"[a-z]+", question.lower()))
    if _IN_WORDS[int(gold)] in words:
        return False

    def keep_quantity(match: re.Match[str]) -> str:
        return match[0] if match[1] in words else match[1]

    kept = (_COUNT.sub(keep_quantity, _ITEM.sub(" ", text)) for text in texts)
    return any(states_number(text, gold, question) for text in kept)
