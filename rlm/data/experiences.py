"""Reads experience libraries and puts their lessons in front of a question.

recipes/experience writes them: a JSON list of objects with a `content`. Any model can use one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlm.cli import UsageError


def load_experiences(path: str | Path) -> tuple[str, ...]:
    """The lessons of a library file, in its order.

    Raises:
        UsageError: unreadable, or no library.
    """
    try:
        items = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(items, list):
            raise TypeError
        lessons = tuple(item["content"].strip() for item in items)
    except OSError as error:
        raise UsageError(f"cannot read the library {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is no experience library: a JSON list of objects with a content is needed"
        ) from error
    if not all(lessons):
        raise UsageError(f"{path} holds a lesson without words")
    return lessons


def experience_block(lessons: Sequence[str]) -> str:
    """The lessons as prompts carry them, one a line; "" without any.

    >>> experience_block(["Convert units first."])
    'Lessons from earlier problems:\\n1. Convert units first.'
    """
    lines = [f"{number}. {' '.join(text.split())}" for number, text in enumerate(lessons, 1)]
    return "\n".join(["Lessons from earlier problems:", *lines]) if lines else ""


def with_experiences(question: str, library: Sequence[str]) -> str:
    """The question after the lessons, as a prompt for any model; without lessons, as it is."""
    block = experience_block(library)
    return f"{block}\n\nProblem:\n{question.strip()}" if block else question
