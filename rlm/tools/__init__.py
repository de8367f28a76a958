"""Tools: what writes into a completion while the model generates it."""

from rlm.tools.calculator import Calculator
from rlm.tools.tool import Tool, as_tool, load_tool

__all__ = ["Calculator", "Tool", "as_tool", "load_tool"]
