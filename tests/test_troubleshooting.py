"""docs/how-to/troubleshooting.md: the messages that it quotes are those of the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/how-to/troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^> (.+)$", PAGE, re.M)
SYSTEM = ": Address already in use"  # the end of a line that the system words


def texts_of(tree: ast.AST):
    """The strings of a module, with … for what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"\{[^{}]*\}", "…", node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
            yield "".join(parts)


@cache
def all_texts() -> str:
    files = [*ROOT.glob("*.py"), *(ROOT / "rlm").rglob("*.py")]
    texts = (text for file in files for text in texts_of(ast.parse(file.read_text("utf-8"))))
    return "\n".join(" ".join(text.split()) for text in texts)


def test_it_has_the_symptoms_that_people_ask_about():
    assert len(QUOTED) > 35
    for symptom in ("The loss is 0", "Out of memory", "The port is in use", "No GPU is found"):
        assert f"### {symptom}\n" in PAGE


@pytest.mark.parametrize("message", QUOTED)
def test_a_message_is_one_of_the_code(message):
    parts = [part.strip() for part in message.removesuffix(SYSTEM).split("…")]
    pattern = ".{0,60}?".join(re.escape(part) for part in parts if len(part) > 2)
    assert re.search(pattern, all_texts()), message
