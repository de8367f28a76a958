"""Cost budget and rate limits for API requests."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlm.cli import UsageError


class BudgetExceeded(UsageError):
    """The next request could exceed the budget, so it was not sent."""


@dataclass(frozen=True)
class Price:
    """The price of a million prompt tokens and of a million completion tokens."""

    prompt: float = 0.0
    completion: float = 0.0

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


FREE = Price()


@dataclass
class Usage:
    """Tokens and cost of a request: first the maximum, then the actual values."""

    cost: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    started: float = 0.0


class Budget:
    """Counts tokens and cost of all requests, and keeps the cost below a limit; thread-safe."""

    def __init__(self, max_cost: float | None = None) -> None:
        self.max_cost = math.inf if max_cost is None else max_cost
        self.cost, self.prompt_tokens, self.completion_tokens = 0.0, 0, 0
        self._reserved: list[float] = []  # reserved for requests in flight
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, usage: Usage) -> Iterator[None]:
        """Reserve a request's maximum cost while it runs; then count its actual `usage`.

        Wait if it does not fit beside those in flight: most end cheaper than their maximum.

        Raises:
            BudgetExceeded: it does not fit alone.
        """
        max_cost = usage.cost
        with self._changed:
            self._changed.wait_for(lambda: self._fits(max_cost) or not self._reserved)
            if not self._fits(max_cost):
                raise BudgetExceeded(
                    f"stopped at a cost of {self.cost:.4g}: the next call could cost "
                    f"{max_cost:.2g}, and the budget is {self.max_cost:g}"
                )
            self._reserved.append(max_cost)
        try:
            yield
        finally:
            with self._changed:
                self._changed.notify_all()
                self._reserved.remove(max_cost)
                self.cost += usage.cost
                self.prompt_tokens += usage.prompt_tokens
                self.completion_tokens += usage.completion_tokens

    def _fits(self, cost: float) -> bool:
        return self.cost + math.fsum(self._reserved) + cost <= self.max_cost


class RateLimit:
    """Limits requests and tokens per minute."""

    def __init__(
        self, requests: int | None = None, tokens: int | None = None, window: float = 60.0
    ) -> None:
        self._requests, self._tokens = requests or math.inf, tokens or math.inf
        self._window = window  # seconds
        self._recent: deque[Usage] = deque()
        self._lock = threading.Lock()

    def wait(self, usage: Usage) -> None:
        """Wait until a request fits; one larger than the limit waits for an empty window."""
        while True:
            with self._lock:
                now = time.monotonic()
                while self._recent and now - self._recent[0].started >= self._window:
                    self._recent.popleft()
                tokens = sum(other.tokens for other in self._recent) + usage.tokens
                fits = len(self._recent) < self._requests and tokens <= self._tokens
                if fits or not self._recent:
                    usage.started = now
                    self._recent.append(usage)
                    return
                pause = self._recent[0].started + self._window - now
            time.sleep(max(pause, 0.001))
