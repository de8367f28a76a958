"""Runs uvicorn on a socket of ours, adds the time limits that it lacks, lets what runs finish.

uvicorn 0.54 waits without end for the rest of a header or a body, and for a client that stops
reading. A few hundred such connections are enough to keep everybody else out, so each gets a
deadline here. This leans on H11Protocol, which is not a public class: uvicorn is pinned, and the
tests with slow clients say when it moves.
"""

from __future__ import annotations

import asyncio
import socket
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlm.cli import UsageError
from rlm.serving import logging as logs
from rlm.serving.service import Service


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

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # an answer is out already
            self._cut("bad request")

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


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket, before anything slow happens: a port in use should be said at once.

    Its protocol is named, as asyncio sets TCP_NODELAY on connections of such a socket alone: else
    the pieces of an answer wait up to 40 ms for the client's acknowledgement of the last one.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()  # only now would another server be told that the port is taken
    except OSError as error:
        reason = f"cannot listen on {host} port {port}: {error.strerror}"
        raise UsageError(f"{reason}; type another --port or --host") from error
    return listening


def local_url(listening: socket.socket) -> str:
    """Where programs of this machine reach the socket: another one may have the same port on
    another of its addresses, and a tunnel must not lead there."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host.partition("%")[0])
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class GracefulServer(uvicorn.Server):
    """uvicorn whose first signal drains the service, and whose second one leaves at once."""

    def __init__(self, config: uvicorn.Config, service: Service, seconds: float) -> None:
        super().__init__(config)
        self._service, self._seconds = service, seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would raise the signal again at the end: the exit code would not be 0.
        self.should_exit, self.force_exit = True, self.should_exit

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._service.engine.state != "dead":
            draining = asyncio.create_task(self._service.drain(self._seconds))
            while not (draining.done() or self.force_exit):
                await asyncio.sleep(0.05)
            draining.cancel()
        await super().shutdown(sockets)
