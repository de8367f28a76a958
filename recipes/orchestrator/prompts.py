"""What the orchestrator and its agents are told."""

from __future__ import annotations

from collections.abc import Mapping

from recipes.orchestrator.graph import AGENTS, Graph, agent_id
from rlm.data.prompts import FORMATS

PLAIN = FORMATS["deepseek"]  # the solver's own prompt: what an agent is without an orchestrator

SINGLE = Graph.chain(PLAIN.system_prompt)
ASKED_TWICE = Graph.chain(
    PLAIN.system_prompt, f"Look for mistakes in your draft. {PLAIN.system_prompt}"
)
# Two agents as a person would write them.
HAND_WRITTEN = Graph.chain(
    "Solve the problem step by step. Write every calculation with its result.",
    "Check the calculations of the draft and correct mistakes. "
    "End with the final number in square brackets, as in [7].",
)


def orchestrator_prompt(max_agents: int = AGENTS) -> str:
    """The orchestrator's system prompt; the problem follows as the user's text."""
    shape = Graph.chain("...", "...").text()
    if max_agents == AGENTS:
        return (
            "Design two agents for the user's math problem. agentA sees the problem and writes a "
            "draft. agentB sees the problem and the draft; its last line must be the answer, one "
            f"number, as [number]. Write a system prompt for each, only as this JSON: {shape}"
        )
    last = agent_id(max_agents - 1)
    return (
        f"Design {AGENTS} to {max_agents} agents (agentA to {last}) for the user's math problem. "
        "Each sees the problem and the drafts of the agents before it: of the previous one, or "
        'as "edges": [["agentA", "agentB"]] says. One agent ends the graph; its last line must be '
        "the answer, one number, as [number]. Write a system prompt for each, only as this JSON: "
        f"{shape}"
    )


def agent_input(question: str, drafts: Mapping[str, str]) -> str:
    """The user's text of an agent's conversation: the bare problem where there is no draft.

    >>> agent_input("1 + 1?", {"agentA": "two"})
    'PROBLEM: 1 + 1?\\n\\nDRAFT of agentA: two'
    """
    if not drafts:
        return question
    rows = [f"PROBLEM: {question}", *(f"DRAFT of {name}: {text}" for name, text in drafts.items())]
    return "\n\n".join(rows)
