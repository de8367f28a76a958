"""Lets a tool write into completions while they are generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlm.data import encode_text
from rlm.sampling.params import Completion
from rlm.tools import Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The tool sees the text of so many last tokens, so a token's cost does not grow with the text.
TOOL_WINDOW = 256


class ToolTokens:
    """Asks a tool after each token what to insert. It is a request's `force_tokens`.

    The engine takes its text as forced tokens, one a step: each replaces the
    next token, which is drawn and thrown away, and the token that triggered it stays the model's.
    A token that holds the trigger and more (`=5`) triggers nothing: the model continues by itself.
    """

    def __init__(self, tool: Tool, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tool, self._tokenizer = tool, tokenizer
        self._ends: dict[int, str] = {}  # token id → the text that it is

    def __call__(self, row: int, ids: Sequence[int], token: int) -> list[int] | None:
        """Return the token ids that the tool inserts after `ids`, or None (see `ForceTokens`)."""
        trigger = self.tool.trigger
        # Nearly always so, and cheap. A part of a character (U+FFFD) may complete the trigger.
        if not ids or not self._text_of(ids[-1]).endswith((trigger[-1:], "\ufffd")):
            return None
        text = self._tokenizer.decode(ids[-TOOL_WINDOW:], skip_special_tokens=True)
        inserted = self.tool(text) if text.endswith(trigger) else None
        return encode_text(self._tokenizer, inserted) if inserted else None

    def _text_of(self, token: int) -> str:
        if token not in self._ends:
            self._ends[token] = self._tokenizer.decode([token])
        return self._ends[token]


def tool_spans(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> list[tuple[int, int]]:
    """Find what a tool wrote in a completion's text: the (start, end) characters of each call."""

    def characters(tokens: int) -> int:
        return len(tokenizer.decode(completion.token_ids[:tokens], skip_special_tokens=True))

    return [(characters(first), characters(end)) for first, end in completion.tool_calls]
