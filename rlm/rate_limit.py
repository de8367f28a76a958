"""Requests and tokens a minute: what a provider allows, kept to before it has to refuse."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass


@dataclass
class Turn:
    """One request; `tokens` is set to what it really took once that is known."""

    started: float
    tokens: int


class Pace:
    """Lets requests through so that no window of time holds more of them than allowed."""

    def __init__(
        self, requests: int | None = None, tokens: int | None = None, window: float = 60.0
    ) -> None:
        """
        Args:
            requests: at most so many in a window; None is no limit.
            tokens: read and written, likewise.
            window: seconds.
        """
        self._requests = requests or math.inf
        self._tokens = tokens or math.inf
        self._window = window
        self._turns: deque[Turn] = deque()
        self._lock = threading.Lock()

    def wait(self, tokens: int) -> Turn:
        """Wait for a turn that takes about so many tokens.

        One that takes more than a whole window allows waits for an empty window.
        """
        while True:
            with self._lock:
                now = time.monotonic()
                while self._turns and now - self._turns[0].started >= self._window:
                    self._turns.popleft()
                taken = sum(turn.tokens for turn in self._turns)
                fits = len(self._turns) < self._requests and taken + tokens <= self._tokens
                if fits or not self._turns:
                    self._turns.append(Turn(now, tokens))
                    return self._turns[-1]
                pause = self._turns[0].started + self._window - now
            time.sleep(max(pause, 0.001))
