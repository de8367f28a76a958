"""Runs uvicorn on a socket of ours and lets running requests finish before it stops.

uvicorn waits without end for the rest of a header, and for a client that stops reading. A proxy
or ngrok in front of the server cuts such clients off; here only their number is limited.
"""

from __future__ import annotations

import asyncio
import socket
from types import FrameType
from typing import Any

import uvicorn

from rlm.cli import UsageError
from rlm.serving.service import Service

# What uvicorn has to be told. X-Forwarded-For counts for nothing: a client writes what it likes.
UVICORN: dict[str, Any] = {
    "http": "h11",
    "limit_concurrency": 500,  # connections; one more gets a 503
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
