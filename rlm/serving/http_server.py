"""Run uvicorn on our own socket, and let running requests finish before the server stops.

uvicorn has no timeout for incomplete headers or for clients that stop reading. Disconnecting such
clients is the task of a reverse proxy or ngrok. This module limits the number of connections.
"""

from __future__ import annotations

import asyncio
import socket
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from rlm.cli import UsageError
from rlm.serving.service import Service

# Options of uvicorn. It must not trust X-Forwarded-For, which clients can forge; see
# `client_address` in access.py.
UVICORN: dict[str, Any] = {
    "http": "h11",
    "lifespan": "on",
    "timeout_graceful_shutdown": 5,  # seconds after draining until open responses are cut off
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
        listening.listen()  # a port that another server uses fails only here
    except (OSError, UnicodeError) as error:  # UnicodeError: not a host name, such as "a..b"
        why = error.strerror if isinstance(error, OSError) else "this is not a host name"
        reason = f"cannot listen on {host} port {port}: {why}"
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

    def __init__(self, app: ASGIApp, service: Service, drain_seconds: float) -> None:
        super().__init__(uvicorn.Config(app, **UVICORN))
        self._service, self._drain_seconds = service, drain_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's handler would raise the signal again at exit, so the exit code would not be 0.
        self.should_exit, self.force_exit = True, self.should_exit

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._service.engine.state != "dead":
            draining = asyncio.create_task(self._service.drain(self._drain_seconds))
            while not (draining.done() or self.force_exit):
                await asyncio.sleep(0.05)
            draining.cancel()
        await super().shutdown(sockets)
