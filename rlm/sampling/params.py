"""Sampling parameters, requests, and the tokens and completions that answer them.

`ToolTokens` inserts the output of a tool into completions; it is passed as `Request.force_tokens`.
"""

from __future__ import annotations

import hashlib
import math
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
    """Sampling parameters. The model's own defaults (such as top_k = 50) have no effect.

    max_new_tokens: the maximum number of new tokens, including the end token.
    temperature: with 0, the most likely token is always chosen.
    top_p, top_k: top_p = 1 and top_k = 0 leave the distribution unchanged.
    stop: strings that end a completion. Their tokens are part of the completion.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if "" in self.stop:
            raise ValueError("stop must not contain an empty string: it would end any completion")


# A function that is called after each sampled token with (row, tokens before it, the token). It
# returns None to keep the token, or token ids that replace it. The sequence then takes one of these
# ids per step instead of a sampled token.
ForceTokens = Callable[[int, Sequence[int], int], Sequence[int] | None]
# A function that is called before each token is sampled with (row, tokens before it). It returns a
# mask of the tokens that may be sampled, (V,) bool with at least one True, or None if all may be.
AllowedTokens = Callable[[int, Sequence[int]], "torch.Tensor | None"]


@dataclass(frozen=True)
class Request:
    """A request for n completions of one prompt.

    Completion i is sampled from the random stream seed + i.
    """

    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    n: int = 1
    force_tokens: ForceTokens | None = None
    allowed_tokens: AllowedTokens | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("the prompt is empty")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, not {self.n}")


FinishReason = Literal["stop", "length"]  # "stop": an end token or a stop string was sampled


@dataclass(frozen=True)
class Token:
    """One token of completion number `row` of a request. A forced token has the logprob NaN."""

    request: int
    row: int
    id: int
    logprob: float
    finish_reason: FinishReason | None  # None while the completion is running
    forced: bool = False  # inserted by the request's `force_tokens`, not sampled


@dataclass
class Completion:
    """A completion of a prompt.

    token_ids: the token ids, including the end token if the completion has one.
    logprobs: the log-probability of each token under the distribution that the token was sampled
        from. This distribution covers only the `allowed_tokens`. At temperature 0, it is their
        softmax at temperature 1. A token that was not sampled has the value NaN.
    tool_mask: for each token, True if the model wrote it and False if a tool wrote it, as in TRL.
        The list is empty if there is no tool.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None = None
    tool_mask: list[bool] = field(default_factory=list)

    @property
    def truncated(self) -> bool:
        """Whether the completion was cut off at its maximum length.

        The length alone does not tell: the last allowed token may be an end token.
        """
        return self.finish_reason == "length"

    @property
    def own_tokens(self) -> int:
        """The number of tokens that the model itself wrote."""
        return sum(self.tool_mask) if self.tool_mask else len(self.token_ids)

    @property
    def tool_calls(self) -> list[tuple[int, int]]:
        """The spans of tokens that a tool wrote, as (start, end) pairs.

        >>> Completion([5] * 6, [], tool_mask=[True, False, False, True, True, False]).tool_calls
        [(1, 3), (5, 6)]
        """
        mask = [True, *self.tool_mask, True]
        firsts = [i for i in range(len(mask) - 1) if mask[i] and not mask[i + 1]]
        ends = [i for i in range(len(mask) - 1) if not mask[i] and mask[i + 1]]
        return list(zip(firsts, ends, strict=True))


def prompt_seed(*parts: object) -> int:
    """Hash parts such as (run seed, step, problem id) to a 63-bit seed, equal in every process.

    >>> prompt_seed(0, 1, "a") == prompt_seed(0, 1, "a") != prompt_seed(0, 11, "")
    True
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# The tool receives the text of at most this many last tokens, so that its cost per token does not
# grow with the length of the completion.
TOOL_WINDOW = 256


class ToolTokens:
    """Calls a tool when a completion ends with the tool's trigger, and inserts the tool's output.

    An object of this class is passed as `Request.force_tokens`. The engine inserts the tool's text
    as forced tokens, one per step; each of them replaces a sampled token, which is discarded. The
    tokens of the trigger itself count as written by the model. If a token contains more text after
    the trigger (such as `=5`), the tool is not called and the model continues.
    """

    def __init__(self, tool: Tool, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tool, self._tokenizer = tool, tokenizer
        self._ends: dict[int, str] = {}  # token id → its text

    def __call__(self, row: int, ids: Sequence[int], token: int) -> list[int] | None:
        """Return the token ids that the tool inserts after `ids`, or None (see `ForceTokens`)."""
        trigger = self.tool.trigger
        # This cheap test rules out nearly all tokens. A token that ends in a partial character
        # (U+FFFD) passes, because it may be part of the trigger.
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
    """Return the (start, end) character offsets of each tool call in the completion's text."""

    def characters(tokens: int) -> int:
        return len(tokenizer.decode(completion.token_ids[:tokens], skip_special_tokens=True))

    return [(characters(first), characters(end)) for first, end in completion.tool_calls]
