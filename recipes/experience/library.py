"""Manages an experience library, which stores the short lessons of a role.

A model changes the lessons by small operations, and code checks every operation. A library file
looks like this:

[{"id": "G1-001", "content": "…", "category": "causal_graph", "source_problem": "aime2024_003",
  "created_at": "…", "usage_count": 9, "success_count": 4}, …]

A second file beside the library, NAME.problems.json, lists the questions of all problems that were
used to make or to test the lessons. `evaluate` leaves these problems out.
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
from recipes.experience.answers import tokens_of
from recipes.experience.plan import ReplyError, find_object, object_schema
from recipes.experience.rewards import relative_tolerance
from rlm.api_client import APIError
from rlm.cli import UsageError, terminal
from rlm.data import Problem, load_experiences
from rlm.grading import parse_number, states_number
from rlm.runs import replace_file, replace_json

LIBRARIES = Path("data/grpo_experiences")
PREFIXES = {"generator_1": "G1", "generator_2": "G2", "generator_3": "G3", "critic": "C"}
GENERATOR_CATEGORIES = ("causal_graph", "validation", "problem_solving")
CRITIC_CATEGORIES = ("fusion_strategy", "validation", "conflict_resolution")
MAX_ITEMS = 20  # maximum number of lessons in a library
MAX_TOKENS = 1200  # maximum length of a library in estimated tokens
MAX_WORDS = 32  # maximum length of a lesson in words
MAX_OPERATIONS = 4  # maximum number per group of rollouts; only one of them may add a lesson
SIMILAR = 0.8  # minimum share of common words of two lessons that are duplicates

Lesson = dict[str, Any]
Outcome = dict[str, Any]


def problems_file(library: Path) -> Path:
    """Return the path of the file with the questions that a library was made and tested with."""
    return library.with_suffix(".problems.json")


def read_questions(library: Path) -> list[str] | None:
    """Return the questions that a library was made and tested with; None: not recorded."""
    path = problems_file(library)
    try:
        questions = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}; restore or delete this file") from error
    if questions is not None and not (
        isinstance(questions, list) and all(isinstance(text, str) for text in questions)
    ):
        raise UsageError(f"{path} is not a JSON list of questions")
    return questions


def replace_library(library: Path, items: Sequence[Lesson], questions: Sequence[str]) -> None:
    """Write a library, and the questions that it was made and tested with.

    An earlier library with other lessons is kept as NAME.prev.json, and its questions beside it. An
    earlier library without lessons is not kept.
    """
    text = json.dumps(items, indent=2, ensure_ascii=False) + "\n"
    before = library.read_text(encoding="utf-8", errors="replace") if library.exists() else ""
    if before.strip() not in ("", "[]", text.strip()):
        kept = library.with_suffix(".prev.json")
        problems_file(kept).unlink(missing_ok=True)
        # The questions are copied, not moved: a kill must not leave the library without them.
        if problems_file(library).exists():
            replace_file(problems_file(kept), problems_file(library).read_bytes())
        library.replace(kept)
        terminal.line(f"the earlier library {library} was moved to {kept}")
    replace_json(problems_file(library), questions)
    replace_file(library, text)


class Library:
    """Manages the lessons of one role."""

    def __init__(self, role: str, directory: Path) -> None:
        """Read the library file of the role, or create an empty library if there is none."""
        self.role, self.path = role, directory / f"{role}_experiences.json"
        self.categories = CRITIC_CATEGORIES if role == "critic" else GENERATOR_CATEGORIES
        self.items: list[Lesson] = []
        if self.path.exists():
            load_experiences(self.path)  # raises if the file is not a library
            self.items = json.loads(self.path.read_text(encoding="utf-8"))
        for name in ("id", "category"):
            if not all(isinstance(item.get(name), str) for item in self.items):
                raise UsageError(f"{self.path}: the {name} of a lesson is missing or not a string")
        self._questions = (self.items and read_questions(self.path)) or []
        self._last_number = 0  # the last number used in an id; ids are never reused
        self._note_numbers(item["id"] for item in self.items)

    def _note_numbers(self, ids: Iterable[str]) -> None:
        found = [re.fullmatch(rf"{PREFIXES[self.role]}-(\d+)", name) for name in ids]
        self._last_number = max([self._last_number, *(int(m[1]) for m in found if m)])

    @property
    def lessons(self) -> list[str]:
        return [item["content"] for item in self.items]

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of a reply with operations, for endpoints that can enforce schemas."""
        operation = object_schema(
            action={"enum": ["add", "modify", "delete"]},
            id={"type": "string", "maxLength": 8},
            content={"type": "string", "maxLength": 240},
            category={"enum": list(self.categories)},
        )
        operation["required"] = ["action"]
        return object_schema(
            operations={"type": "array", "items": operation, "maxItems": MAX_OPERATIONS}
        )

    @property
    def digest(self) -> str:
        """A hash of the lessons and their counters, without timestamps."""
        kept = [{k: v for k, v in item.items() if not k.endswith("_at")} for item in self.items]
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the records of an interrupted run.

        If the process was killed after it had written the last record and before it saved the
        library, or if the library's file is missing, the library is restored from this record.
        """
        self.note_problems(record["problem_text"] for record in records if "problem_text" in record)
        for record in records:
            operations = (record.get("extraction") or {}).get("operations", [])
            self._note_numbers(done["id"] for done in operations if done["kept"])
        if records and (not self.path.exists() or self.digest == records[-1]["library_before"]):
            self.items = copy.deepcopy(records[-1]["library_after"])
            self.save()

    def save(self) -> None:
        replace_json(self.path, self.items)

    def note_problems(self, questions: Iterable[str]) -> None:
        """Record beside the library that problems with these questions were practised on."""
        known = list(dict.fromkeys([*self._questions, *questions]))
        if known != self._questions:
            replace_json(problems_file(self.path), known)
        self._questions = known

    def count_use(self, uses: int, successes: int) -> None:
        """Count the rollouts whose prompts contained the lessons, and the correct ones of these."""
        for item in self.items:
            item["usage_count"] = item.get("usage_count", 0) + uses
            item["success_count"] = item.get("success_count", 0) + successes

    def learn(self, agent: Agent, problem: Problem, rollouts: str, now: str) -> dict[str, Any]:
        """Request lessons from a comparison of rollouts, and apply the allowed operations."""
        listed = [f"{i['id']} ({i['category']}): {i['content']}" for i in self.items]
        values = {"problem": problem.question, "gold": problem.answer, "rollouts": rollouts}
        values |= {"library": "\n".join(listed) or "–"}
        values |= {"room": f"{len(self.items)} of {MAX_ITEMS} places are taken"}
        kind = "critic" if self.role == "critic" else "generator"
        stage = f"{kind}_experience_extraction"
        try:
            reply = agent.ask(stage, problem.id, values, schema=self.schema)
            operations = find_object(reply.text, "operations")["operations"]
            if not isinstance(operations, list):
                raise ReplyError("schema: operations is not a list")
        except (APIError, ReplyError) as error:
            return {"error": str(error), "operations": []}
        template = agent.prompts[stage].template
        return {"error": None, "operations": self.apply(operations, problem, now, template)}

    def apply(
        self, operations: Sequence[Any], problem: Problem, now: str, template: str
    ) -> list[Outcome]:
        """Apply the allowed operations, and drop lessons that exceed the limits of the library.

        Returns:
            A row per operation with the keys action, id, content, kept and reason. The reason of a
            rejected operation is schema, unknown_id, category, too_long, gold_leak, copied,
            duplicate or too_many. Each dropped lesson has a row with the action `evict`.
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
                reason = self._refusal(action, old, content, category, problem, template)
            if reason is None and action == "delete":
                self.items = [item for item in self.items if item is not old]
            elif reason is None:
                name = self._write(old, content, category, problem, now)
            outcome = {"action": action, "id": name, "content": content}
            outcomes.append(outcome | {"kept": reason is None, "reason": reason})
        return outcomes + self._evict()

    def _refusal(
        self,
        action: Any,
        old: Lesson | None,
        content: Any,
        category: Any,
        problem: Problem,
        template: str,
    ) -> str | None:
        if action in ("modify", "delete") and old is None:
            return "unknown_id"
        if action == "delete":
            return None
        if action not in ("add", "modify") or not isinstance(content, str) or not _words(content):
            return "schema"
        if category not in self.categories:
            return "category"
        if len(content.split()) > MAX_WORDS:
            return "too_long"
        if reveals_gold(content, problem):
            return "gold_leak"
        if f" {_words(content)} " in f" {_words(template)} ":
            return "copied"  # small models repeat the example in the prompt ("the lesson")
        others = [item["content"] for item in self.items if item is not old]
        return "duplicate" if any(_similar(content, other) for other in others) else None

    def _write(
        self, old: Lesson | None, content: Any, category: Any, problem: Problem, now: str
    ) -> str:
        """Change the lesson `old`, or add a new lesson if `old` is None, and return its id."""
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
        """Drop lessons until the library is within its limits.

        The lesson with the lowest success rate is dropped first, but never the newest lesson.
        """
        dropped = []
        while len(self.items) > 1 and (
            len(self.items) > MAX_ITEMS or tokens_of(self.lessons, 4) > MAX_TOKENS
        ):
            worst = min(self.items[:-1], key=_success_rate)
            self.items.remove(worst)
            row = {"action": "evict", "id": worst["id"], "content": worst["content"]}
            dropped.append(row | {"kept": True, "reason": "no room"})
        return dropped


def shorten(text: str) -> str | None:
    """Truncate a text to the sentences that fit in MAX_WORDS; return None if no sentence fits."""
    sentences = re.split(r"(?<=[.!?;]) ", " ".join(text.split()))
    while sentences and len(" ".join(sentences).split()) > MAX_WORDS:
        sentences.pop()
    return " ".join(sentences) or None


def reveals_gold(lesson: str, problem: Problem) -> bool:
    """Return whether a lesson contains a right answer to the problem, within its rel_tol.

    A later run on the same problem could copy the answer from the lesson. Integer answers below 10
    are ignored, because such numbers are too common. Numbers that occur in the problem itself are
    also ignored.
    """
    gold = parse_number(problem.answer)
    if gold is None or (gold % 1 == 0 and abs(gold) < 10):
        return False
    return states_number(lesson, gold, problem.question, relative_tolerance(problem))


def _words(text: str) -> str:
    """Return the words of a text in lower case, separated by single spaces."""
    return " ".join(re.findall(r"\w+", text.lower()))


def _similar(a: str, b: str) -> bool:
    words = [set(_words(text).split()) for text in (a, b)]
    return len(words[0] & words[1]) >= SIMILAR * len(words[0] | words[1])


def _success_rate(item: Lesson) -> float:
    """Estimate the success rate of a lesson by Laplace's rule of succession.

    The estimate of a lesson with few uses is close to 1/2.
    """
    return (item.get("success_count", 0) + 1) / (item.get("usage_count", 0) + 2)
