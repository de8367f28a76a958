"""Signals: the first one is handled between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTICE = b"\nstopping after this step (once more: at once)\n"


class Interrupts:
    """Records the first SIGINT, SIGTERM or SIGHUP in `received` instead of ending the process.

    A second one ends the process at once through the system's default handler, even inside a matrix
    product. Nothing is lost, because files are written completely or not at all. With several
    processes later signals are ignored, because the launcher repeats the terminal's signal and
    kills processes that take too long.
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
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, NOTICE)  # not print(): the signal may have interrupted one
