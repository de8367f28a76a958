"""Prompts of the base model, of which a cell takes the best; trained models have their own."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.evidence.plan import EvidenceConfig
from benchmarks.evidence.pools import pools
from benchmarks.trainers import FORMAT

PROMPT_SEED = 0


@dataclass(frozen=True)
class Prompt:
    """How a base model is asked. Trained models are asked as they were trained."""

    name: str
    system_prompt: str | None = None  # None: the format's own
    examples: tuple[tuple[str, str], ...] = ()


AS_TRAINED = Prompt("as trained")


def candidate_prompts(config: EvidenceConfig, *, few: bool) -> list[Prompt]:
    """With and without our tags; few-shot with 2, 4 and 8 worked examples that SFT learns, too."""
    steps = "Solve the problem step by step. End with: The answer is NUMBER."
    if not few:
        return [Prompt("our tags"), Prompt("no system prompt", ""), Prompt("step by step", steps)]
    solved = pools(config, PROMPT_SEED).solved
    found = []
    for shots in (2, 4, 8):
        shown = solved[:shots]
        tagged = tuple((p.question, FORMAT.completion(p.solution, p.answer)) for p in shown)
        plain = tuple((p.question, f"{p.solution}\nThe answer is {p.answer}.") for p in shown)
        found.append(Prompt(f"our tags, {shots} examples", None, tagged))
        found.append(Prompt(f"step by step, {shots} examples", steps, plain))
    return found
