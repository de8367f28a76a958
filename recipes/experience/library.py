"""An experience library: short lessons, changed only by small operations that code checks.

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

from rlm.cli import UsageError
from rlm.data import Problem, load_experiences
from rlm.grading import numbers_in, parse_number
from rlm.runs import append_lines, read_lines, replace_json

DIRECTORY = Path("data/grpo_experiences")
PREFIXES = {"generator_1": "G1", "generator_2": "G2", "generator_3": "G3", "critic": "C"}
GENERATOR_CATEGORIES = ("causal_graph", "validation", "problem_solving")
CRITIC_CATEGORIES = ("fusion_strategy", "validation", "conflict_resolution")
MAX_WORDS = 32
MAX_OPERATIONS = 4  # of one group, of which one may add
SIMILAR = 0.8  # share of common words from which two lessons are one

Item = dict[str, Any]


def shorten(text: str) -> str | None:
    """The text, or as many of its sentences as fit in 32 words; None if not even one does."""
    sentences = re.split(r"(?<=[.!?;]) ", " ".join(text.split()))
    while sentences and len(" ".join(sentences).split()) > MAX_WORDS:
        sentences.pop()
    return " ".join(sentences) or None


def gives_away(lesson: str, problem: Problem) -> bool:
    """It holds the gold answer, which a later run on the same problem could just repeat.

    Integers below 10 are too common to tell, and so are numbers that the problem itself names.
    """
    gold = parse_number(problem.answer)
    if gold is None or (gold % 1 == 0 and abs(gold) < 10):
        return False
    return abs(gold) in numbers_in(lesson) - numbers_in(problem.question)


def _similar(a: str, b: str) -> bool:
    words = [set(re.findall(r"\w+", text.lower())) for text in (a, b)]
    return len(words[0] & words[1]) >= SIMILAR * len(words[0] | words[1])


def tokens(items: Sequence[Item]) -> int:
    """About as many as a prompt spends on them: one for four bytes."""
    return sum(len(item["content"].encode()) // 4 + 4 for item in items)


class Library:
    """The lessons of one role."""

    def __init__(self, role: str, directory: Path, max_items: int, max_tokens: int) -> None:
        """Read it, or begin an empty one.

        Raises:
            UsageError: the file is no library.
        """
        self.role, self.path = role, directory / f"{role}_experiences.json"
        self._audit = directory / f"{role}_audit.jsonl"
        self._max_items, self._max_tokens = max_items, max_tokens
        self.categories = CRITIC_CATEGORIES if role == "critic" else GENERATOR_CATEGORIES
        self.items: list[Item] = []
        if self.path.exists():
            load_experiences(self.path)  # refuses what is none
            self.items = json.loads(self.path.read_text(encoding="utf-8"))
        for name in ("id", "category"):
            if not all(isinstance(item.get(name), str) for item in self.items):
                raise UsageError(f"{self.path}: a lesson without a text as its {name}")
        self._last = 0  # the highest number of an id so far: none is given twice
        for line in read_lines(self._audit):
            self._notice(done for done in line["operations"] if done["kept"])
        self._notice(self.items)

    def _notice(self, rows: Iterable[Mapping[str, Any]]) -> None:
        ids = [re.fullmatch(rf"{PREFIXES[self.role]}-(\d+)", str(row["id"])) for row in rows]
        self._last = max([self._last, *(int(match[1]) for match in ids if match)])

    @property
    def lessons(self) -> list[str]:
        return [item["content"] for item in self.items]

    @property
    def digest(self) -> str:
        """Changes with lessons and counters, not with the clock."""
        kept = [{k: v for k, v in item.items() if not k.endswith("_at")} for item in self.items]
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]

    def listing(self) -> str:
        """The lessons with their ids, for the prompt that asks for operations."""
        return "\n".join(f"{i['id']} ({i['category']}): {i['content']}" for i in self.items) or "–"

    def room(self) -> str:
        return f"{len(self.items)} of {self._max_items} places are taken"

    def count_use(self, uses: int, successes: int) -> None:
        """Every lesson stood in the prompts of so many attempts, so many of them right."""
        for item in self.items:
            item["usage_count"] = item.get("usage_count", 0) + uses
            item["success_count"] = item.get("success_count", 0) + successes

    def apply(self, operations: Sequence[Any], problem: Problem, now: str) -> list[Item]:
        """Carry out what is allowed; for each operation action, id, content, kept and reason.

        Reasons: schema, unknown_id, category, too_long, gold_leak, duplicate, too_many. Lessons
        that had to make room follow as operations of their own (`evict`).
        """
        done = []
        for number, operation in enumerate(operations):
            fields = operation if isinstance(operation, Mapping) else {}
            action, content = fields.get("action"), fields.get("content")
            item = next((item for item in self.items if item["id"] == fields.get("id")), None)
            added = any(other["action"] == "add" and other["kept"] for other in done)
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
                reason = self._objection(content, category, problem, old)
                if reason is None:
                    item = self._write(old, content, category, problem, now)
            known = item["id"] if item and reason is None else fields.get("id")
            outcome = {"action": action, "id": known, "content": content, "kept": reason is None}
            done.append(outcome | {"reason": reason})
        return done + self._make_room()

    def _objection(
        self, content: str, category: Any, problem: Problem, old: Item | None
    ) -> str | None:
        if category not in self.categories:
            return "category"
        if not content.strip() or len(content.split()) > MAX_WORDS:
            return "too_long" if content.strip() else "schema"
        if gives_away(content, problem):
            return "gold_leak"
        others = [item for item in self.items if item is not old]
        return "duplicate" if any(_similar(content, i["content"]) for i in others) else None

    def _write(
        self, item: Item | None, content: str, category: str, problem: Problem, now: str
    ) -> Item:
        if item:
            item |= {"content": content, "category": category, "updated_at": now}
            item["last_modified_by"] = self.role
            return item
        self._last += 1
        new = {"id": f"{PREFIXES[self.role]}-{self._last:03d}", "content": content}
        new |= {"category": category, "source_problem": problem.id, "created_at": now}
        self.items.append(new | {"usage_count": 0, "success_count": 0})
        return self.items[-1]

    def _make_room(self) -> list[Item]:
        """Drop the lessons that helped least, never the newest, until the library fits."""
        dropped = []
        while len(self.items) > 1 and (
            len(self.items) > self._max_items or tokens(self.items) > self._max_tokens
        ):
            worst = min(self.items[:-1], key=_success)
            self.items.remove(worst)
            dropped.append({"action": "evict", "id": worst["id"], "content": worst["content"]})
        return [row | {"kept": True, "reason": "no room"} for row in dropped]

    def snapshot(self) -> list[Item]:
        return copy.deepcopy(self.items)

    def commit(self, record: Mapping[str, Any]) -> None:
        """Write audit line and library after a record. Doing it twice changes nothing."""
        line = {"problem": record["problem_id"], "before": record["library_before"]}
        line["operations"] = (record["extraction"] or {}).get("operations", [])
        logged = [{key: row[key] for key in line} for row in read_lines(self._audit)[-1:]]
        if line["operations"] and logged != [line]:
            append_lines(self._audit, [line | {"timestamp": record["timestamp"]}])
        replace_json(self.path, self.items)

    def recover(self, record: Mapping[str, Any]) -> None:
        """Finish what a kill between a run's last record and its library left undone."""
        if self.digest == record["library_before"]:
            self.items = copy.deepcopy(record["library_after"])
            self.commit(record)
            done = (record["extraction"] or {}).get("operations", [])
            self._notice([*self.items, *(operation for operation in done if operation["kept"])])


def _success(item: Item) -> float:
    """Laplace's estimate, so that few uses mean little."""
    return (item.get("success_count", 0) + 1) / (item.get("usage_count", 0) + 2)
