"""Sampling parameters, requests, and the tokens and completions that answer them.

`ToolTokens` lets a tool write into completions; it is passed as a request's `force_tokens`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rlm.data import encode_text
from rlm.tools import Tool

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled. Defaults of the model (such as top_k = 50) have no effect.

    temperature: 0 takes the most likely token. top_p = 1 and top_k = 0 leave the distribution
    unchanged. max_new_tokens counts the end token. stop: strings that end a completion; their
    tokens stay in it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if "" in self.stop:
            raise ValueError("stop must not contain an empty string: it would end any completion")


# Called after each sampled token with (row, tokens before it, the token). It returns token ids that
# replace the token, one per step and without sampling, or None to keep it.
ForceTokens = Callable[[int, Sequence[int], int], Sequence[int] | None]
# Called before each token is sampled with (row, tokens before it). It returns which tokens may be
# sampled, (V,) bool with at least one True, or None for all.
AllowedTokens = Callable[[int, Sequence[int]], "torch.Tensor | None"]


@dataclass(frozen=True)
class Request:
    """n completions of one prompt; completion i samples from the random stream seed + i."""

    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    n: int = 1
    force_tokens: ForceTokens | None = None
    allowed_tokens: AllowedTokens | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt is empty")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, not {self.n}")


FinishReason = Literal["stop", "length"]  # stop: an end token or stop string


@dataclass(frozen=True)
class Token:
    """One token of completion `row` of a request. The logprob of a forced token is NaN."""

    request: int
    row: int
    id: int
    logprob: float
    finish_reason: FinishReason | None  # None while running
    forced: bool = False  # inserted by the request's `force_tokens`, not sampled


@dataclass
class Completion:
    """A completion of a prompt.

    token_ids: the ids, with the end token if there is one. logprobs: one per token, under the
    distribution that it was sampled from, over the `allowed_tokens` alone (at temperature 0, under
    their plain softmax); NaN for a token that was not sampled. tool_mask: one per token, as in TRL:
    False if a tool wrote it, True if the model did; empty without a tool.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None = None
    tool_mask: list[bool] = field(default_factory=list)

    @property
    def truncated(self) -> bool:
        """Whether it was cut off at its maximum length; the length alone does not show that."""
        return self.finish_reason == "length"

    @property
    def own_tokens(self) -> int:
        """The number of tokens that the model itself wrote."""
        return sum(self.tool_mask) if self.tool_mask else len(self.token_ids)

    @property
    def tool_calls(self) -> list[tuple[int, int]]:
        """The spans of tokens that a tool wrote, as (first, end).

        >>> Completion([5] * 6, [], tool_mask=[True, False, False, True, True, False]).tool_calls
        [(1, 3), (5, 6)]
        """
        mask = [True, *self.tool_mask, True]
        firsts = [i for i in range(len(mask) - 1) if mask[i] and not mask[i + 1]]
        ends = [i for i in range(len(mask) - 1) if not mask[i] and mask[i + 1]]
        return list(zip(firsts, ends, strict=True))


def prompt_seed(*parts: object) -> int:
    """Hash (run seed, step, problem id, …) to a 63-bit seed, the same in every process.

    >>> prompt_seed(0, 1, "a") == prompt_seed(0, 1, "a") != prompt_seed(0, 11, "")
    True
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# The tool sees the text of this many last tokens, so its cost per token does not grow.
TOOL_WINDOW = 256


class ToolTokens:
    """Asks a tool after each token what to insert. It is used as a request's `force_tokens`.

    The engine takes the tool's text as forced tokens, one per step. Each replaces a token that is
    sampled and discarded; the tokens of the trigger stay the model's. A token with more text after
    the trigger (`=5`) triggers nothing: the model continues by itself.
    """

    def __init__(self, tool: Tool, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tool, self._tokenizer = tool, tokenizer
        self._ends: dict[int, str] = {}  # token id → its text

    def __call__(self, row: int, ids: Sequence[int], token: int) -> list[int] | None:
        """Return the token ids that the tool inserts after `ids`, or None (see `ForceTokens`)."""
        trigger = self.tool.trigger
        # This cheap test nearly always suffices. A partial character (U+FFFD) may end the trigger.
        if not ids or not self._text_of(ids[-1]).endswith((trigger[-1:], "\ufffd")):
            return None
        text = str(self._tokenizer.decode(list(ids[-TOOL_WINDOW:]), skip_special_tokens=True))
        inserted = self.tool(text) if text.endswith(trigger) else None
        return encode_text(self._tokenizer, inserted) if inserted else None

    def _text_of(self, token: int) -> str:
        if token not in self._ends:
            self._ends[token] = str(self._tokenizer.decode([token]))
        return self._ends[token]


def tool_spans(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> list[tuple[int, int]]:
    """Return the (start, end) characters of each tool call in a completion's text."""

    def characters(tokens: int) -> int:
        return len(tokenizer.decode(completion.token_ids[:tokens], skip_special_tokens=True))

    return [(characters(first), characters(end)) for first, end in completion.tool_calls]
