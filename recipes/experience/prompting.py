"""The prompts are files: prompts/NAME.txt with $placeholders, checked before a run starts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from string import Template

from rlm.cli import UsageError

DIRECTORY = Path(__file__).parent / "prompts"
PLACEHOLDERS = {
    "scaffold": {"experiences", "problem"},
    "answer": {"problem", "scaffold"},
    "fusion": {"experiences", "problem", "proposals"},
    "generator_experience_extraction": {"problem", "gold", "rollouts", "library", "room"},
    "critic_experience_extraction": {"problem", "gold", "rollouts", "library", "room"},
    "judge_logic": {"problem", "scaffold", "solution"},
    "judge_answer": {"problem", "gold", "answer"},
    "direct_lessons": {"problems", "count"},
    "solve": {"problem"},
}


class Prompts:
    """The prompt files of a run."""

    def __init__(self, directory: Path = DIRECTORY) -> None:
        """Read them all.

        Raises:
            UsageError: a file is missing, or its placeholders are not those that are filled.
        """
        self._templates = {}
        for name, expected in PLACEHOLDERS.items():
            path = directory / f"{name}.txt"
            try:
                template = Template(path.read_text(encoding="utf-8").strip())
                found = set(template.get_identifiers()) if template.is_valid() else None
            except OSError as error:
                raise UsageError(f"cannot read the prompt {path}: {error.strerror}") from error
            if found is None:
                raise UsageError(f"{path}: a $ that begins no placeholder (write $$ for the sign)")
            if found != expected:
                wrong = ", ".join(f"${name}" for name in sorted(found ^ expected))
                raise UsageError(f"{path}: these placeholders are missing or unknown: {wrong}")
            self._templates[name] = template

    @property
    def digest(self) -> str:
        """Changes with any of them."""
        texts = [template.template for template in self._templates.values()]
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]

    def fill(self, name: str, **values: str) -> str:
        """The prompt with its placeholders filled; a $ inside a value stays what it is."""
        return self._templates[name].substitute(values).strip()
