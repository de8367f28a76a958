"""Signals: the first one is noted, and obeyed between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTICE = b"\nstopping after this step (once more: at once)\n"


class Interrupts:
    """Notes a first SIGINT, SIGTERM or SIGHUP in `received` instead of ending the process.

    A second one ends the process at once, even inside a matrix product: the system does it, not
    Python. Nothing is lost by it, for all that is written is written complete or not at all. Where
    several processes share a run, later signals are ignored instead: their launcher passes on the
    signal that the terminal has already sent to all, and kills who takes too long.
    A signal that was ignored (nohup, a job in the background) stays ignored.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self.received: int | None = None
        self._then = signal.SIG_DFL if alone else signal.SIG_IGN
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # Python allows no other
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for other in self._before:
            signal.signal(other, self._then)
        with contextlib.suppress(OSError):  # the terminal may be what has gone
            os.write(2, NOTICE)  # not print: the signal may have come in the middle of one
