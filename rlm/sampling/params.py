"""Sampling parameters, requests, and the tokens and completions that come back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """Decides how tokens are drawn, alone: no model default (top_k = 50) leaks in.

    temperature: 0 takes the most likely token. top_p = 1 and top_k = 0 leave the distribution
    whole. max_new_tokens counts the end token. stop: texts that end a completion, the tokens they
    are made of included.
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
            raise ValueError("stop must not hold an empty text: it would end everything at once")


# Called after each drawn token with (row, tokens before it, the token): token ids that take its
# place, one after the other without being drawn, or None to keep it.
ForceTokens = Callable[[int, Sequence[int], int], Sequence[int] | None]


@dataclass(frozen=True)
class Request:
    """n completions of one prompt; completion i draws from the stream seed + i."""

    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    n: int = 1
    force_tokens: ForceTokens | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt is empty")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, not {self.n}")


@dataclass(frozen=True)
class Token:
    """One token of completion `row` of a request. The logprob of a token not drawn is NaN."""

    request: int
    row: int
    id: int
    logprob: float
    finish_reason: str | None  # "stop" (an end token or stop text), "length", or None: goes on


@dataclass
class Completion:
    """A completion of a prompt.

    token_ids: the end token included where there is one. logprobs: one per token, under the
    distribution that was drawn from (under the plain softmax where temperature is 0).
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None

    @property
    def truncated(self) -> bool:
        """It did not end by itself; the length alone does not tell."""
        return self.finish_reason == "length"


def prompt_seed(*parts: object) -> int:
    """A 63-bit seed from (run seed, step, problem id, …), the same in every process.

    >>> prompt_seed(0, 1, "a") == prompt_seed(0, 1, "a") != prompt_seed(0, 11, "")
    True
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
