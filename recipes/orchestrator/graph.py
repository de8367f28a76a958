"""Defines the graph of two agents that the orchestrator writes, parses it, and finds leaks in it.

    {"agents": [{"id": "agentA", "type": "llm", "system_prompt": "…"},
                {"id": "agentB", "type": "llm", "system_prompt": "…"}]}

The first agent writes a draft; the second reads problem and draft, and its text is the final one.
An agent with a "question" gets only that, in place of problem and draft. It needs no system prompt,
because it has the one that it was trained on. In a question, {problem} stands for the problem, and
{agentA} for the first agent's answer.
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
from rlm.grading import numbers_in, parse_number

AGENT_IDS = ["agentA", "agentB"]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
REASONS = (
    "no_json",  # no { anywhere
    "bad_json",  # it is not valid JSON: cut off, a raw line break, a key given twice
    "trailing_text",  # text after the JSON, other than a closing fence
    "schema",  # JSON of another shape
)


@dataclass(frozen=True)
class InvalidGraph:
    """The reason why a completion has no valid graph. It stands in for a graph without agents."""

    reason: str  # one of REASONS
    detail: str
    agents: tuple[()] = ()
    texts: tuple[()] = ()


class Agent(BaseModel, extra="forbid", strict=True, frozen=True):
    """A node of a graph: an LLM with a system prompt, a question of its own, or both."""

    id: str
    type: Literal["llm"]
    system_prompt: Text | None = None
    question: Text | None = None

    @property
    def texts(self) -> list[str]:
        return [text for text in (self.system_prompt, self.question) if text]


class Graph(BaseModel, extra="forbid", strict=True, frozen=True):
    """The agents of a graph; each reads the draft of the one before it."""

    agents: list[Agent]

    @field_validator("agents")
    @classmethod
    def _check_agents(cls, agents: list[Agent]) -> list[Agent]:
        ids = [agent.id for agent in agents]
        if not ids or ids != AGENT_IDS[: len(ids)]:
            raise ValueError("the agents are not agentA, agentB")
        if not all(agent.texts for agent in agents):
            raise ValueError("an agent has neither a system_prompt nor a question")
        return agents

    @classmethod
    def chain(cls, *texts: str, field: str = "system_prompt") -> Graph:
        """Make a graph whose agents have these prompts; a single agent is a graph of one."""
        pairs = zip(AGENT_IDS, texts, strict=False)
        return cls(agents=[Agent(id=name, type="llm", **{field: text}) for name, text in pairs])

    @classmethod
    def plan(cls, *questions: str) -> Graph:
        """Make a graph whose agents are asked these questions."""
        return cls.chain(*questions, field="question")

    @property
    def texts(self) -> list[str]:
        """All that the orchestrator wrote to the agents, in order."""
        return [text for agent in self.agents for text in agent.texts]

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)

    def to_json(self) -> str:
        """Serialize as the orchestrator is asked to write it; equal graphs give equal texts."""
        return json.dumps(self.to_dict(), ensure_ascii=False)


def parse_graph(text: str) -> Graph | InvalidGraph:
    """Read the graph of two agents in a completion; never raises.

    Text and a ```json fence may precede the graph; only the closing fence may follow it. A model
    that is rewarded in spite of text after its answer never learns to stop.
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
        return InvalidGraph("schema", detail.encode(errors="replace").decode())  # no surrogates
    except (ValueError, RecursionError) as error:
        return InvalidGraph("bad_json", str(error)[:80])
    if len(graph.agents) < len(AGENT_IDS):
        return InvalidGraph("schema", "one agent, not two")
    return graph


def _first_object(text: str) -> tuple[dict[str, Any], int]:
    """Decode the first JSON object and find its end; one right after a fence takes precedence.

    The JSON parser itself finds the end, so braces and fences inside a string are text.
    """
    first, fence = text.index("{"), re.search(r"```(?:json)?\s*(?=\{)", text)
    content, end = {}, first
    with suppress(ValueError, RecursionError):  # braces in prose; after a fence, errors are raised
        content, end = _DECODER.raw_decode(text, first)
    if end == first or (fence and fence.end() > end):
        return _DECODER.raw_decode(text, fence.end() if fence else first)
    return content, end


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_refuse_repeated_keys)


# --- leaks ----------------------------------------------------------------------------------------

# A text leaks if it contains the gold as a number of its own that the problem does not give. A gold
# below 10 also occurs in texts that reveal no quantity of the problem: "Think in 2 steps",
# "Step 2", "2. Check it". Two kinds of digits are therefore ignored: those that number an item, and
# those that count something that the problem does not mention.
SMALL = 10  # a gold below this also occurs as a digit in instructions
_IN_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
# Words after a number that are not a noun which it counts: "7 plus 5", "7 is right".
_NO_NOUN = "is|as|was|plus|minus|times|divided|equals"
_ITEM = re.compile(
    r"(?i:\b(?:step|part|line|rule|number|agent|point) )\d(?![\d.]*\d)"  # step 2, but not step 2.5
    r"|(?:^|[.;\n])\s*\d[.)](?=\s[A-Z])"  # Read it. 2. Check it.
)
_COUNT = re.compile(rf"(?<![\w.,/])\d (?!(?:{_NO_NOUN})\b)([a-z]+s|step|line|sentence|word)\b")


def is_leaked(problem: Problem, texts: Sequence[str]) -> bool:
    """Return whether one of the texts contains the gold and the problem does not."""
    gold = parse_number(problem.answer)
    if gold is None or abs(gold) in numbers_in(problem.question):
        return False
    if abs(gold) < SMALL and gold.denominator == 1:
        return _is_small_leaked(problem.question, abs(gold), texts)
    return any(abs(gold) in numbers_in(text) for text in texts)


def _is_small_leaked(question: str, gold: Fraction, texts: Sequence[str]) -> bool:
    words = set(re.findall(r"[a-z]+", question.lower()))
    if _IN_WORDS[int(gold)] in words:
        return False

    def keep_quantity(match: re.Match[str]) -> str:
        return match[0] if match[1] in words else match[1]

    kept = (_COUNT.sub(keep_quantity, _ITEM.sub(" ", text)) for text in texts)
    return any(gold in numbers_in(text) for text in kept)
