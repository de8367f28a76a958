"""Serve the page of a running run to this machine only: `rlm view RUN --follow`.

The page polls every few seconds for new lines of the run's logs. The server is stateless, so page,
server and run may be restarted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socket
from socketserver import BaseServer
from urllib.parse import parse_qs, urlsplit

from rlm.cli import UsageError, terminal
from rlm.runs.run_page import MARK, read_run, render_page

ADDRESS = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


def serve_runs(paths: Sequence[Path], port: int) -> int:
    """Serve the page of these runs until Ctrl-C.

    Raises:
        UsageError: the port is taken.
    """
    with open_server(paths, port) as server:
        url = f"http://{ADDRESS}:{server.server_port}"
        terminal.line(f"{', '.join(map(str, paths))}: open {url} in a browser; Ctrl-C ends it")
        for path in paths:
            if not path.exists():
                terminal.line(f"{path} does not exist yet: the page waits for it")
        server.serve_forever()
    return 0


def open_server(paths: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Bind the server; `serve_forever` runs it."""
    try:
        server = ThreadingHTTPServer((ADDRESS, port), partial(_Handler, paths))
    except OSError as error:
        reason = f"cannot listen on {ADDRESS} port {port}: {error.strerror}"
        raise UsageError(f"{reason}; type another --port (0 takes a free one)") from error
    server.daemon_threads = True  # an open browser does not keep the server alive
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60.0

    def __init__(
        self, paths: Sequence[Path], request: socket, address: tuple[str, int], server: BaseServer
    ) -> None:
        self._paths = paths
        super().__init__(request, address, server)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        port = self.connection.getsockname()[1]
        # Against DNS rebinding: under another host name, any web page could read the run.
        if self.headers.get("Host") not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
            return self._send(403, "text/plain", f"open http://{ADDRESS}:{port}\n")
        if url.path == "/":
            page = render_page([read_run(path) for path in self._paths], follow=True)
            return self._send(200, "text/html", page)
        marks = parse_qs(url.query, keep_blank_values=True).get("mark", [])
        is_known = len(marks) == len(self._paths) and all(map(MARK.fullmatch, marks))
        if url.path == "/news" and is_known:
            news = [read_run(path, mark) for path, mark in zip(self._paths, marks, strict=True)]
            return self._send(200, "application/json", json.dumps(news, allow_nan=False))
        return self._send(404, "text/plain", "nothing here\n")

    def _send(self, status: int, content_type: str, text: str) -> None:
        body = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Log nothing: a line per request would hide the terminal's messages."""
