"""The tool protocol, and loading for `--tool` and `tool=`."""

from __future__ import annotations

from typing import Protocol

from rlm.cli import UsageError, load_from_file
from rlm.tools.calculator import Calculator


class Tool(Protocol):
    """Returns a text to insert after a completion's text so far.

    name: its name in the run's records. trigger: the tool is called only if the text ends with it
    ("": after every token).
    """

    name: str
    trigger: str

    def __call__(self, text: str) -> str | None:
        """Return the text to insert after `text`, the end of the completion so far, or None.

        It must depend on the text alone: a completion is a function of prompt, seed and weights.
        """
        ...


def as_tool(tool: object) -> Tool:
    """Return a `Tool`; a class is instantiated.

    Raises:
        TypeError: it is not a Tool; the message says what is missing.
    """
    tool = tool() if isinstance(tool, type) else tool
    for attribute in ("name", "trigger"):
        if not isinstance(getattr(tool, attribute, None), str):
            raise TypeError(f"tool.{attribute} must be a str; {tool!r:.60} has none")
    if not callable(tool):
        raise TypeError(f"a tool must be callable with a str; {tool!r:.60} is not")
    return tool


def load_tool(spec: str) -> Tool | None:
    """Load the tool of `--tool`: none, calculator, or FILE.py:NAME.

    Raises:
        UsageError: the tool, file or name does not exist, or it is not a tool.
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
