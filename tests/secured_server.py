"""A small app with the security middleware on a real uvicorn server, which tests reach by sockets.

with SecuredServer() as server:
    server.ask("GET", "/health")                    # a well-formed request, without a key
    server.send(b"GET / HTTP/1.1\\r\\nHost: a\\r\\n…")  # any bytes
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from rlm.serving.access import AllowedHosts, Keys
from rlm.serving.errors import HTTPProblem, as_problem
from rlm.serving.http_server import UVICORN, listen
from rlm.serving.middleware import SecurityMiddleware, SecuritySettings
from rlm.serving.strict_json import parse, require_json

KEY = "a-key-for-the-tests-1"
OTHER_KEY = "a-key-for-the-tests-2"
TIMEOUT = 30.0  # seconds until a test gives up on a socket


def small_app() -> FastAPI:
    """Make an app with the routes that the middleware knows, and some routes that misbehave."""
    app = FastAPI()

    @app.get("/")
    @app.get("/page.css")
    @app.get("/page.js")
    async def page() -> PlainTextResponse:
        return PlainTextResponse("page", headers={"Content-Security-Policy": "the-page's-own"})

    @app.get("/health")
    @app.get("/ready")
    @app.get("/metrics")
    async def ok() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/phase1/reasoning")
    async def reasoning(request: Request) -> dict[str, Any]:
        require_json(request.headers)
        return {"got": parse(await request.body()), "client": request.client.host}

    @app.post("/phase1/reasoning/{name}/answer")
    async def answer(name: str) -> dict[str, str]:
        return {"id": name}

    @app.get("/fails")
    async def fails() -> None:
        raise ValueError("a message with the prompt in it")

    @app.exception_handler(HTTPProblem)
    @app.exception_handler(Exception)
    async def refuse(request: Request, error: Exception) -> Response:
        return as_problem(error).response(request.state.request_id)

    return app


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]  # with names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class SecuredServer:
    """A running server; `settings` are fields of SecuritySettings."""

    def __init__(self, app: Any = None, **settings: Any):
        self.app = app or small_app()
        defaults = {
            "keys": Keys([KEY, OTHER_KEY]),
            "allowed_hosts": AllowedHosts(["localhost", "127.0.0.1"]),
            "requests_per_minute": 100_000,
            "failures_per_minute": 100_000,
        }
        self.settings = SecuritySettings(**{**defaults, **settings})
        wall = SecurityMiddleware(self.app, self.settings)
        config = uvicorn.Config(wall, **UVICORN | {"lifespan": "off"})
        self._server = uvicorn.Server(config)
        self._socket = listen("127.0.0.1", 0)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def __enter__(self) -> SecuredServer:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._socket.close()

    def options_of_connections(self, level: int, option: int) -> list[int]:
        sockets = [
            connection.transport.get_extra_info("socket")
            for connection in self._server.server_state.connections
        ]
        return [sock.getsockopt(level, option) for sock in sockets]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), TIMEOUT)

    def send(self, data: bytes) -> Answer | None:
        """Send bytes, and return the first response; None if the server closes without one."""
        with self.connect() as sock:
            with suppress(BrokenPipeError, ConnectionResetError):  # the server has closed early
                sock.sendall(data)
            return read(sock)

    def ask(self, method: str, path: str, *headers: str | bytes, body: bytes = b"") -> Answer:
        """Send a well-formed request with these header lines, and return the response."""
        lines = [line if isinstance(line, bytes) else line.encode("latin-1") for line in headers]
        answer = self.send(request(method, path, *lines, body=body))
        assert answer is not None, "the server hung up"
        return answer

    def post(self, body: bytes, *headers: str | bytes, key: str = KEY) -> Answer:
        fixed = (f"Authorization: Bearer {key}", "Content-Type: application/json")
        return self.ask("POST", "/phase1/reasoning", *fixed, *headers, body=body)


def request(
    method: str, path: str, *headers: bytes, body: bytes = b"", host: str = "localhost"
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode("latin-1"), f"Host: {host}".encode("latin-1")]
    if body:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, *headers, b"", body])


def read(sock: socket.socket, method: str = "") -> Answer | None:
    """Return the next response on a socket, or None if there is none."""
    response = http.client.HTTPResponse(sock, method=method)
    try:
        response.begin()
        body = response.read()
    except (http.client.HTTPException, ConnectionResetError):
        return None
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, body)


def rest(sock: socket.socket) -> bytes:
    """Return all data until the server closes; the test fails if the socket stays open."""
    data = b""
    with suppress(ConnectionResetError):
        while chunk := sock.recv(65536):
            data += chunk
    return data
