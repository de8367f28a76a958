"""Run uvicorn on our own socket, and let running requests finish before the server stops.

uvicorn has no timeout for incomplete headers or for clients that stop reading. A reverse proxy or
ngrok disconnects such clients. This module limits the number of connections, lets streams abort
their connection, and aborts a connection that is being closed if its client reads nothing.
"""

from __future__ import annotations

import asyncio
import socket
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlm.cli import UsageError
from rlm.serving.service import Service

CLOSE_SECONDS = 30.0  # a closing connection is aborted if its client reads nothing for so long


class Connection(H11Protocol):
    """A connection that does not wait for ever for a client that has stopped reading.

    uvicorn itself closes a connection only after the client has received everything that was
    written. A response can abort the connection with the function in `scope["state"]["abort"]`.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limit_closing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._limit_closing()

    def _limit_closing(self) -> None:
        """Abort a connection that is being closed when its client reads nothing any more."""
        if self.transport.is_closing() and (unsent := self.transport.get_write_buffer_size()):
            self.loop.call_later(CLOSE_SECONDS, self._check_closing, unsent)

    def _check_closing(self, unsent: int) -> None:
        if self.transport.get_write_buffer_size() < unsent:
            self._limit_closing()
        else:
            self.transport.abort()


# Options of uvicorn. X-Forwarded-For is ignored, because clients can forge the header.
UVICORN: dict[str, Any] = {
    "http": Connection,
    "limit_concurrency": 500,  # connections; further connections get a 503
    "ws": "none",
    "access_log": False,
    "log_config": None,
    "server_header": False,
    "proxy_headers": False,
}


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    The socket is opened before slow work, so that a port in use is reported at once. The protocol
    is passed explicitly, because asyncio sets TCP_NODELAY only for such sockets. Without
    TCP_NODELAY, each chunk of a response can wait 40 ms for the client's acknowledgement.

    Raises:
        UsageError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()  # of two servers on a port, the second fails only here
    except OSError as error:
        reason = f"cannot listen on {host} port {port}: {error.strerror}"
        raise UsageError(f"{reason}; choose another --port or --host") from error
    return listening


def local_url(listening: socket.socket) -> str:
    """Return the local URL of the socket.

    The URL contains the bound address, because another program may use the same port on another
    address.
    """
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host) or str(host).partition("%")[0]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class GracefulServer(uvicorn.Server):
    """A uvicorn server that drains the service at the first signal and exits at the second."""

    def __init__(self, config: uvicorn.Config, service: Service, seconds: float) -> None:
        super().__init__(config)
        self._service, self._seconds = service, seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's handler would raise the signal again at exit, so the exit code would not be 0.
        self.should_exit, self.force_exit = True, self.should_exit

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._service.engine.state != "dead":
            draining = asyncio.create_task(self._service.drain(self._seconds))
            while not (draining.done() or self.force_exit):
                await asyncio.sleep(0.05)
            draining.cancel()
        await super().shutdown(sockets)
