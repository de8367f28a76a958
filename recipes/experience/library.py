"""Keeps an experience library: short lessons, changed by small operations that code checks.

    [{"id": "G1-001", "content": "…", "category": "causal_graph", "source_problem": "aime2024_003",
      "created_at": "…", "usage_count": 9, "success_count": 4}, …]

Beside it lies an audit log with every operation that was proposed and what became of it.
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
from rlm.runs import append_lines, read_lines, replace_json

LIBRARIES = Path("data/grpo_experiences")
PREFIXES = {"generator_1": "G1", "generator_2": "G2", "generator_3": "G3", "critic": "C"}
GENERATOR_CATEGORIES = ("causal_graph", "validation", "problem_solving")
CRITIC_CATEGORIES = ("fusion_strategy", "validation", "conflict_resolution")
MAX_WORDS = 32
MAX_OPERATIONS = 4  # of one group, of which one may add
SIMILAR = 0.8  # share of common words from which two lessons are one

Lesson = dict[str, Any]
Outcome = dict[str, Any]


class Library:
    """Holds the lessons of one role."""

    def __init__(
        self, role: str, directory: Path, max_items: int = 20, max_tokens: int = 1200
    ) -> None:
        """Read the file, or begin an empty library."""
        self.role, self.path = role, directory / f"{role}_experiences.json"
        self._audit = directory / f"{role}_audit.jsonl"
        self._max_items, self._max_tokens = max_items, max_tokens
        self.categories = CRITIC_CATEGORIES if role == "critic" else GENERATOR_CATEGORIES
        self.items: list[Lesson] = []
        if self.path.exists():
            load_experiences(self.path)  # refuses what is none
            self.items = json.loads(self.path.read_text(encoding="utf-8"))
        for name in ("id", "category"):
            if not all(isinstance(item.get(name), str) for item in self.items):
                raise UsageError(f"{self.path}: a lesson without a text as its {name}")
        self._last_number = 0  # of an id: none is given twice
        for line in read_lines(self._audit):
            self._note_numbers(line["operations"])
        self._note_numbers(self.items)

    def _note_numbers(self, rows: Iterable[Mapping[str, Any]]) -> None:
        kept = [str(row["id"]) for row in rows if row.get("kept", True)]
        found = [re.fullmatch(rf"{PREFIXES[self.role]}-(\d+)", name) for name in kept]
        self._last_number = max([self._last_number, *(int(m[1]) for m in found if m)])

    @property
    def lessons(self) -> list[str]:
        return [item["content"] for item in self.items]

    @property
    def digest(self) -> str:
        """Hash lessons and counters, not the clock."""
        kept = [{k: v for k, v in item.items() if not k.endswith("_at")} for item in self.items]
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]

    def learn(
        self, agent: Agent, problem: Problem, rollouts: str, gold: str, now: str
    ) -> dict[str, Any]:
        """Ask what a comparison of rollouts teaches, and apply the operations that are allowed."""
        listed = [f"{i['id']} ({i['category']}): {i['content']}" for i in self.items]
        values = {"problem": problem.question, "gold": gold, "rollouts": rollouts}
        values |= {"library": "\n".join(listed) or "–"}
        values |= {"room": f"{len(self.items)} of {self._max_items} places are taken"}
        kind = "critic" if self.role == "critic" else "generator"
        try:
            reply = agent.ask(f"{kind}_experience_extraction", problem.id, **values)
            operations = parse_operations(reply.text)
        except (APIError, ReplyError) as error:
            return {"error": str(error), "operations": []}
        return {"error": None, "operations": self.apply(operations, problem, now)}

    def count_use(self, uses: int, successes: int) -> None:
        """Credit every lesson with the rollouts in whose prompts it stood."""
        for item in self.items:
            item["usage_count"] = item.get("usage_count", 0) + uses
            item["success_count"] = item.get("success_count", 0) + successes

    def apply(self, operations: Sequence[Any], problem: Problem, now: str) -> list[Outcome]:
        """Apply the operations that are allowed; tell of each action, id, content, kept, reason.

        Reasons: schema, unknown_id, category, too_long, gold_leak, duplicate, too_many. Lessons
        that had to make room follow as operations of their own (`evict`).
        """
        outcomes: list[Outcome] = []
        for number, operation in enumerate(operations):
            fields = operation if isinstance(operation, Mapping) else {}
            action, content = fields.get("action"), fields.get("content")
            item = next((item for item in self.items if item["id"] == fields.get("id")), None)
            added = any(other["action"] == "add" and other["kept"] for other in outcomes)
            if number >= MAX_OPERATIONS or (action == "add" and added):
                reason = "too_many"
            elif action in ("modify", "delete") and item is None:
                reason = "unknown_id"
            elif action == "delete":
                reason, content = None, None
                self.items.remove(item)
            elif action not in ("add", "modify") or not isinstance(content, str):
                reason = "schema"
            else:
                old = item if action == "modify" else None
                category = fields.get("category", old["category"] if old else None)
                content = shorten(content) or content
                reason = self._refusal(content, category, problem, old)
                if reason is None:
                    item = self._write(old, content, category, problem, now)
            known = item["id"] if item and reason is None else fields.get("id")
            outcome = {"action": action, "id": known, "content": content}
            outcomes.append(outcome | {"kept": reason is None, "reason": reason})
        return outcomes + self._evict()

    def _refusal(
        self, content: str, category: Any, problem: Problem, old: Lesson | None
    ) -> str | None:
        if category not in self.categories:
            return "category"
        if not content.strip() or len(content.split()) > MAX_WORDS:
            return "too_long" if content.strip() else "schema"
        if reveals_gold(content, problem):
            return "gold_leak"
        others = [item["content"] for item in self.items if item is not old]
        return "duplicate" if any(_similar(content, other) for other in others) else None

    def _write(
        self, item: Lesson | None, content: str, category: str, problem: Problem, now: str
    ) -> Lesson:
        if item:
            item |= {"content": content, "category": category, "updated_at": now}
            item["last_modified_by"] = self.role
            return item
        self._last_number += 1
        new = {"id": f"{PREFIXES[self.role]}-{self._last_number:03d}", "content": content}
        new |= {"category": category, "source_problem": problem.id, "created_at": now}
        self.items.append(new | {"usage_count": 0, "success_count": 0})
        return self.items[-1]

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

    def commit(self, record: Mapping[str, Any]) -> None:
        """Write audit line and library after a record. Doing it twice changes nothing."""
        line = {"problem": record["problem_id"], "before": record["library_before"]}
        line["operations"] = (record["extraction"] or {}).get("operations", [])
        logged = [{key: row[key] for key in line} for row in read_lines(self._audit)[-1:]]
        if line["operations"] and logged != [line]:
            append_lines(self._audit, [line | {"timestamp": record["timestamp"]}])
        replace_json(self.path, self.items)
        self._note_numbers([*self.items, *line["operations"]])

    def recover(self, record: Mapping[str, Any]) -> None:
        """Finish what a kill between a run's last record and its library left undone."""
        if self.digest == record["library_before"]:
            self.items = copy.deepcopy(record["library_after"])
            self.commit(record)


def parse_operations(reply: str) -> list[Any]:
    """Parse what a reply proposes to do with a library."""
    operations = find_object(reply, "operations")["operations"]
    if not isinstance(operations, list):
        raise ReplyError("schema: operations is no list")
    return operations


def shorten(text: str) -> str | None:
    """Keep as many sentences as fit in 32 words; None if not even one does."""
    sentences = re.split(r"(?<=[.!?;]) ", " ".join(text.split()))
    while sentences and len(" ".join(sentences).split()) > MAX_WORDS:
        sentences.pop()
    return " ".join(sentences) or None


def reveals_gold(lesson: str, problem: Problem) -> bool:
    """Tell whether it holds the gold, which a later run on the same problem could just repeat.

    Integers below 10 are too common to tell, and so are numbers that the problem itself names.
    """
    gold = parse_number(problem.answer)
    if gold is None or (gold % 1 == 0 and abs(gold) < 10):
        return False
    return abs(gold) in numbers_in(lesson) - numbers_in(problem.question)


def count_tokens(items: Sequence[Lesson]) -> int:
    """Estimate what a prompt spends on them: a token for four bytes."""
    return sum(len(item["content"].encode()) // 4 + 4 for item in items)


def _similar(a: str, b: str) -> bool:
    words = [set(re.findall(r"\w+", text.lower())) for text in (a, b)]
    return len(words[0] & words[1]) >= SIMILAR * len(words[0] | words[1])


def _success_rate(item: Lesson) -> float:
    """Estimate it as Laplace, so that few uses mean little."""
    return (item.get("success_count", 0) + 1) / (item.get("usage_count", 0) + 2)
