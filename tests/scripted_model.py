"""A scripted model for the experience recipe, which recognizes the kind of each prompt.

`Model()` is the `answer` of a ScriptedServer. The problems ask how many pens are in some boxes.
Whether an answer is right depends only on the seed of the request, so concurrent runs agree.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from recipes.experience.agent import ROLES
from recipes.experience.rewards import LOGIC_SCORES

STAGES = {
    "Plan how to solve the problem": "scaffold",
    "Solve the problem by following the plan": "answer",
    "Fuse them into one plan": "fusion",
    "lessons for planning and solving": "generator_extraction",
    "lessons for fusing several plans": "critic_extraction",
    "Judge the reasoning": "judge_logic",
    "Reason step by step. End with": "solve",
}
WORDS = ["units", "target", "graph", "check", "order", "sign", "ratio", "total", "limit", "shape"]


def stage_of(body: dict[str, Any]) -> str:
    prompt = body["messages"][-1]["content"]
    (stage,) = [stage for phrase, stage in STAGES.items() if phrase in prompt]
    return stage


def problems(count: int, start: int = 0) -> list[dict[str, str]]:
    return [
        {
            "id": f"pens_{i:03d}",
            "question": f"A box holds {31 + i} pens. How many pens are in {72 + i} boxes?",
            "answer": str((31 + i) * (72 + i)),
        }
        for i in range(start, start + count)
    ]


def write_problems(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_endpoints(path: Path, url: str, **fields: Any) -> None:
    """Write an --api-config with the same endpoint for every role."""
    entry = {"base_url": url, "model": "m", "backoff": 0.001} | fields
    path.write_text(json.dumps(dict.fromkeys(ROLES, entry)))


def numbers(prompt: str) -> tuple[int, int]:
    held, boxes = re.search(r"holds (\d+) pens\. How many pens are in (\d+) boxes", prompt).groups()
    return int(held), int(boxes)


def plan(held: int, boxes: int, rule: str = "held * boxes") -> dict[str, Any]:
    return {
        "target_variable": "pens",
        "knowns": {"held": held, "boxes": boxes},
        "causal_graph": [{"cause": ["held", "boxes"], "effect": "pens", "rule": rule}],
        "computation_plan": [{"id": "step1", "target": "pens", "inputs": ["held", "boxes"]}],
        "constraints": [],
    }


def operations(*listed: dict[str, Any]) -> str:
    return json.dumps({"operations": listed, "analysis": "compared"})


class Model:
    """Answers each kind of prompt by a method of its own, which a test may replace."""

    def __call__(self, body: dict[str, Any]) -> str:
        return getattr(self, stage_of(body))(body["messages"][-1]["content"], body["seed"])

    def scaffold(self, prompt: str, seed: int) -> str:
        return f"Here is my plan:\n```json\n{json.dumps(plan(*numbers(prompt)))}\n```"

    def answer(self, prompt: str, seed: int) -> str:
        held, boxes = numbers(prompt)
        return f"I multiply.\nFinal answer: {held * boxes + seed % 2}"

    def fusion(self, prompt: str, seed: int) -> str:
        return json.dumps(plan(*numbers(prompt)))

    def lesson(self, seed: int) -> str:
        return " ".join(WORDS[int(digit, 16) % len(WORDS)] + digit for digit in f"{seed:07x}")

    def generator_extraction(self, prompt: str, seed: int) -> str:
        return operations({"action": "add", "content": self.lesson(seed), "category": "validation"})

    critic_extraction = generator_extraction

    def judge_logic(self, prompt: str, seed: int) -> str:
        scores = dict.fromkeys(LOGIC_SCORES, 0.75)
        return json.dumps({"score": 1, "breakdown": scores, "errors": []})

    solve = answer
