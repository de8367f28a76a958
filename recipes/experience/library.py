"""Keeps an experience library: short lessons, changed by small operations that code checks.

[{"id": "G1-001", "content": "…", "category": "causal_graph", "source_problem": "aime2024_003",
  "created_at": "…", "usage_count": 9, "success_count": 4}, …]
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.experience.agent import Agent
from recipes.experience.plan import ReplyError, find_object
from rlm.api_client import APIError
from rlm.cli import UsageError
from rlm.data import Problem, load_experiences
from rlm.grading import numbers_in, parse_number
from rlm.runs import replace_json

LIBRARIES = Path("data/grpo_experiences")
PREFIXES = {"generator_1": "G1", "generator_2": "G2", "generator_3": "G3", "critic": "C"}
GENERATOR_CATEGORIES = ("causal_graph", "validation", "problem_solving")
CRITIC_CATEGORIES = ("fusion_strategy", "validation", "conflict_resolution")
MAX_WORDS = 32
MAX_OPERATIONS = 4  # per group; one of them may add
SIMILAR = 0.8  # from this share of common words, two lessons count as one

Lesson = dict[str, Any]
Outcome = dict[str, Any]


class Library:
    """The lessons of one role."""

    def __init__(
        self, role: str, directory: Path, max_items: int = 20, max_tokens: int = 1200
    ) -> None:
        """Read the file, or begin an empty library."""
        self.role, self.path = role, directory / f"{role}_experiences.json"
        self._max_items, self._max_tokens = max_items, max_tokens
        self.categories = CRITIC_CATEGORIES if role == "critic" else GENERATOR_CATEGORIES
        self.items: list[Lesson] = []
        if self.path.exists():
            load_experiences(self.path)  # raises if it is not a library
            self.items = json.loads(self.path.read_text(encoding="utf-8"))
        for name in ("id", "category"):
            if not all(isinstance(item.get(name), str) for item in self.items):
                raise UsageError(f"{self.path}: the {name} of a lesson is missing or not a text")
        self._last_number = 0  # in ids, which are never reused
        self._note_numbers(item["id"] for item in self.items)

    def _note_numbers(self, ids: Iterable[str]) -> None:
        found = [re.fullmatch(rf"{PREFIXES[self.role]}-(\d+)", name) for name in ids]
        self._last_number = max([self._last_number, *(int(m[1]) for m in found if m)])

    @property
    def lessons(self) -> list[str]:
        return [item["content"] for item in self.items]

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of a reply that extracts lessons, for endpoints that enforce one."""
        fields = {
            "action": {"enum": ["add", "modify", "delete"]},
            "id": {"type": "string", "maxLength": 8},
            "content": {"type": "string", "maxLength": 240},
            "category": {"enum": list(self.categories)},
        }
        operation = {"type": "object", "properties": fields, "required": ["action"]}
        operation["additionalProperties"] = False
        operations = {"type": "array", "items": operation, "maxItems": MAX_OPERATIONS}
        shape = {"properties": {"operations": operations}, "required": ["operations"]}
        return {"type": "object", "additionalProperties": False} | shape

    @property
    def digest(self) -> str:
        """A hash of lessons and counters, without timestamps."""
        kept = [{k: v for k, v in item.items() if not k.endswith("_at")} for item in self.items]
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Finish the save that a kill between a run's last record and its library prevented."""
        for record in records:
            operations = (record.get("extraction") or {}).get("operations", [])
            self._note_numbers(done["id"] for done in operations if done["kept"])
        if records and self.digest == records[-1]["library_before"]:
            self.items = copy.deepcopy(records[-1]["library_after"])
            self.save()

    def save(self) -> None:
        replace_json(self.path, self.items)

    def count_use(self, uses: int, successes: int) -> None:
        """Credit every lesson with the rollouts whose prompts contained it."""
        for item in self.items:
            item["usage_count"] = item.get("usage_count", 0) + uses
            item["success_count"] = item.get("success_count", 0) + successes

    def learn(self, agent: Agent, problem: Problem, rollouts: str, now: str) -> dict[str, Any]:
        """Ask the agent for lessons from a comparison of rollouts; apply the allowed operations."""
        listed = [f"{i['id']} ({i['category']}): {i['content']}" for i in self.items]
        values = {"problem": problem.question, "gold": problem.answer, "rollouts": rollouts}
        values |= {"library": "\n".join(listed) or "–"}
        values |= {"room": f"{len(self.items)} of {self._max_items} places are taken"}
        kind = "critic" if self.role == "critic" else "generator"
        try:
            reply = agent.ask(
                f"{kind}_experience_extraction", problem.id, values, schema=self.schema
            )
            operations = find_object(reply.text, "operations")["operations"]
            if not isinstance(operations, list):
                raise ReplyError("schema: operations is no list")
        except (APIError, ReplyError) as error:
            return {"error": str(error), "operations": []}
        return {"error": None, "operations": self.apply(operations, problem, now)}

    def apply(self, operations: Sequence[Any], problem: Problem, now: str) -> list[Outcome]:
        """Apply the allowed operations; return action, id, content, kept and reason of each.

        Reasons: schema, unknown_id, category, too_long, gold_leak, duplicate, too_many. Lessons
        that had to make room follow as operations of their own (`evict`).
        """
        outcomes: list[Outcome] = []
        for number, operation in enumerate(operations):
            fields = operation if isinstance(operation, Mapping) else {}
            action, name, content = (fields.get(key) for key in ("action", "id", "content"))
            old = next((i for i in self.items if action != "add" and i["id"] == name), None)
            category = fields.get("category", old["category"] if old else None)
            if isinstance(content, str):
                content = shorten(content) or content
            added = any(other["action"] == "add" and other["kept"] for other in outcomes)
            if number >= MAX_OPERATIONS or (action == "add" and added):
                reason = "too_many"
            else:
                reason = self._refusal(action, old, content, category, problem)
            if reason is None and action == "delete":
                self.items = [item for item in self.items if item is not old]
            elif reason is None:
                name = self._write(old, content, category, problem, now)
            outcome = {"action": action, "id": name, "content": content}
            outcomes.append(outcome | {"kept": reason is None, "reason": reason})
        return outcomes + self._evict()

    def _refusal(
        self, action: Any, old: Lesson | None, content: Any, category: Any, problem: Problem
    ) -> str | None:
        if action in ("modify", "delete") and old is None:
            return "unknown_id"
        if action == "delete":
            return None
        if action not in ("add", "modify") or not isinstance(content, str) or not content.strip():
            return "schema"
        if category not in self.categories:
            return "category"
        if len(content.split()) > MAX_WORDS:
            return "too_long"
        if reveals_gold(content, problem):
            return "gold_leak"
        others = [item["content"] for item in self.items if item is not old]
        return "duplicate" if any(_similar(content, other) for other in others) else None

    def _write(
        self, old: Lesson | None, content: Any, category: Any, problem: Problem, now: str
    ) -> str:
        """Change a lesson or add one; return its id."""
        if old:
            old |= {"content": content, "category": category}
            old |= {"updated_at": now, "last_modified_by": self.role}
            return old["id"]
        self._last_number += 1
        name = f"{PREFIXES[self.role]}-{self._last_number:03d}"
        new = {"id": name, "content": content, "category": category}
        new |= {"source_problem": problem.id, "created_at": now}
        self.items.append(new | {"usage_count": 0, "success_count": 0})
        return name

    def _evict(self) -> list[Outcome]:
        """Drop the lessons with the lowest success rate, never the newest, until the rest fits."""
        dropped = []
        while len(self.items) > 1 and (
            len(self.items) > self._max_items or count_tokens(self.items) > self._max_tokens
        ):
            worst = min(self.items[:-1], key=_success_rate)
            self.items.remove(worst)
            row = {"action": "evict", "id": worst["id"], "content": worst["content"]}
            dropped.append(row | {"kept": True, "reason": "no room"})
        return dropped


def shorten(text: str) -> str | None:
    """Keep as many sentences as fit in 32 words; None if not even one does."""
    sentences = re.split(r"(?<=[.!?;]) ", " ".join(text.split()))
    while sentences and len(" ".join(sentences).split()) > MAX_WORDS:
        sentences.pop()
    return " ".join(sentences) or None


def reveals_gold(lesson: str, problem: Problem) -> bool:
    """Return whether a lesson contains the gold, which a later run on the problem could repeat.

    Integers below 10 are ignored as too common, and so are numbers that the problem itself names.
    """
    gold = parse_number(problem.answer)
    if gold is None or (gold % 1 == 0 and abs(gold) < 10):
        return False
    return abs(gold) in numbers_in(lesson) - numbers_in(problem.question)


def count_tokens(items: Sequence[Lesson]) -> int:
    """Estimate how many tokens lessons take in a prompt: one per four bytes."""
    return sum(len(item["content"].encode()) // 4 + 4 for item in items)


def _similar(a: str, b: str) -> bool:
    words = [set(re.findall(r"\w+", text.lower())) for text in (a, b)]
    return len(words[0] & words[1]) >= SIMILAR * len(words[0] | words[1])


def _success_rate(item: Lesson) -> float:
    """Estimate the rate by Laplace's rule of succession, so that few uses mean little."""
    return (item.get("success_count", 0) + 1) / (item.get("usage_count", 0) + 2)
