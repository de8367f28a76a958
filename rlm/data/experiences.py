"""Read experience libraries, which contain lessons, and add the most similar ones to a question.

recipes/experience writes a library as a JSON list of objects with the key `content`. A library can
be used with any model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlm.cli import UsageError

NEAREST = 3  # default for the maximum number of lessons that are added to a question
WORKED_EXAMPLE = "worked_example"  # the category of lessons that become earlier turns


@dataclass(frozen=True)
class Experience:
    """A lesson in words, or a worked example if `question` is not empty."""

    content: str
    id: str = ""
    question: str = ""
    about: str = ""  # the text with which questions are compared
    # The lesson is used only for questions with at least this similarity. It is the smallest
    # similarity among the problems with which the lesson was tested.
    reach: float = 0.0


@dataclass(frozen=True)
class InformedQuestion:
    """A question with its lessons."""

    question: str  # the question, preceded by the lessons in words
    examples: tuple[tuple[str, str], ...]  # worked examples, to be shown as earlier turns
    used: tuple[str, ...]  # the ids of the lessons


def load_experiences(path: str | Path) -> tuple[Experience, ...]:
    """Load the lessons of a library file in the order of the file.

    Raises:
        UsageError: the file cannot be read or is not a library.
    """
    try:
        items = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(items, list):
            raise TypeError
        lessons = tuple(_experience(item, number) for number, item in enumerate(items, 1))
    except OSError as error:
        raise UsageError(f"cannot read the library {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not an experience library: expected a JSON list of objects with `content`"
        ) from error
    if not all(lesson.content for lesson in lessons):
        raise UsageError(f"{path} contains an empty lesson: remove it")
    return lessons


def _experience(item: dict, number: int) -> Experience:
    content, source = item["content"].strip(), item.get("source_question", "").strip()
    question = source if item.get("category") == WORKED_EXAMPLE else ""
    reach = float(item.get("reach", 0.0))
    return Experience(content, str(item.get("id", number)), question, source or content, reach)


def similarity(a: str, b: str) -> float:
    """Return the similarity of two texts: |A ∩ B| / √(|A| |B|) for their sets of words A and B.

    Numbers are ignored.

    >>> round(similarity("Ann has 3 pens.", "Bo has 4 red pens"), 3)  # 2 common words of 3 and 4
    0.577
    """
    one, other = (set(re.findall(r"[^\W\d_]+", text.lower())) for text in (a, b))
    return len(one & other) / math.sqrt(len(one) * len(other)) if one and other else 0.0


def experience_block(lessons: Sequence[str]) -> str:
    """Format lessons for a prompt with one line per lesson; return "" if there are no lessons.

    >>> experience_block(["Convert units first."])
    'Lessons from earlier problems:\\n1. Convert units first.'
    """
    lines = [f"{number}. {' '.join(text.split())}" for number, text in enumerate(lessons, 1)]
    return "\n".join(["Lessons from earlier problems:", *lines]) if lines else ""


def apply_experiences(
    question: str, library: Sequence[Experience], limit: int = NEAREST
) -> InformedQuestion:
    """Add the most similar lessons of a library to a question.

    Text lessons are placed before the question. Worked examples become earlier turns, with the
    most similar example last.

    Args:
        limit: the maximum number of lessons. A lesson whose similarity is below its `reach` is not
            used.
    """
    found = [(similarity(question, lesson.about), lesson) for lesson in library]
    found = [pair for pair in found if pair[0] >= pair[1].reach]
    nearest = [lesson for _, lesson in sorted(found, key=lambda pair: -pair[0])[:limit]]
    examples = [(each.question, each.content) for each in reversed(nearest) if each.question]
    if block := experience_block([each.content for each in nearest if not each.question]):
        question = f"{block}\n\nProblem:\n{question.strip()}"
    return InformedQuestion(question, tuple(examples), tuple(each.id for each in nearest))
