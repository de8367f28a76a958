"""Adds the time limits that uvicorn lacks: for sending a request, and for taking the answer.

uvicorn 0.54 waits without end for the rest of a header or a body, and for a client that stops
reading. A few hundred such connections are enough to keep everybody else out, so each gets a
deadline here. This leans on H11Protocol, which is not a public class: uvicorn is pinned, and the
tests with slow clients say when it moves.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlm.serving import logging as logs


class SlowGuard(H11Protocol):
    """One connection. The deadlines are for the whole header or body, not for each byte."""

    header_seconds = 10.0
    body_seconds = 15.0  # longer than middleware.py's, which can still answer with a 408
    write_seconds = 30.0  # until the client has taken what was written
    max_connections = 500

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waits_for: str | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # pause_writing would wait for 64 KiB, and close() for ever for a client that leaves less.
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self.max_connections:
            self._cut("too many connections")
        else:
            self._wait_for("headers")

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is h11.SEND_BODY:
            self._wait_for("body")
        elif self.conn.their_state is h11.IDLE:
            # uvicorn's keep-alive limit is shorter, but it forgets it where a body comes after the
            # answer that refused it.
            self._wait_for("headers" if self.conn.trailing_data[0] else "next request")
        else:
            self._wait_for(None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_seconds, self._cut, "slow reader")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer:
            self._write_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for(None)
        if self._write_timer:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def _wait_for(self, what: str | None) -> None:
        """The deadline starts when the wait does; more of the same does not move it."""
        if what == self._waits_for:
            return
        self._waits_for = what
        if self._read_timer:
            self._read_timer.cancel()
            self._read_timer = None
        if what:
            seconds = self.body_seconds if what == "body" else self.header_seconds
            self._read_timer = self.loop.call_later(seconds, self._cut, f"slow {what}")

    def _cut(self, reason: str) -> None:
        logs.log("connection_cut", reason=reason)
        self.transport.abort()


# What uvicorn has to be told. X-Forwarded-For counts for nothing: a client writes what it likes.
UVICORN: dict[str, Any] = {
    "http": SlowGuard,
    "ws": "none",
    "access_log": False,
    "log_config": None,
    "server_header": False,
    "proxy_headers": False,
}
