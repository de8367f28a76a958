"""The protocol of a tool, and how `--tool` and `tool=` name one."""

from __future__ import annotations

from typing import Protocol

from rlm.cli import UsageError, load_from_file
from rlm.tools.calculator import Calculator


class Tool(Protocol):
    """Decides from a completion's text so far what is inserted next.

    name: how the run's records call it. trigger: the tool is asked only where the text ends in it
    ("": after every token).
    """

    name: str
    trigger: str

    def __call__(self, text: str) -> str | None:
        """Return what is inserted after `text`, the end of a completion so far, or None.

        It must depend on the text alone: a completion is a function of prompt, seed and weights.
        """
        ...


def as_tool(tool: object) -> Tool:
    """Return the tool that is meant: a `Tool`, or an object of a class of it.

    Raises:
        TypeError: it is something else; the message says what is missing.
    """
    tool = tool() if isinstance(tool, type) else tool
    for attribute in ("name", "trigger"):
        if not isinstance(getattr(tool, attribute, None), str):
            raise TypeError(f"a tool has a {attribute}, as text; {tool!r:.60} has none")
    if not callable(tool):
        raise TypeError(f"a tool is called with a text; {tool!r:.60} can not be called")
    return tool


def load_tool(spec: str) -> Tool | None:
    """Load what `--tool` names: none, calculator, or FILE.py:NAME.

    Raises:
        UsageError: there is no such tool, file or name, or it is no tool.
    """
    if spec == "none":
        return None
    if spec == Calculator.name:
        return Calculator()
    if ":" not in spec:
        raise UsageError(f"--tool {spec}: use none, {Calculator.name} or FILE.py:NAME")
    found = load_from_file("--tool", spec)
    try:
        return as_tool(found)
    except TypeError as error:
        raise UsageError(f"--tool {spec}: {error}") from error
