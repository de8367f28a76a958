"""The server of `rlm view RUN --follow`, which shows a run while it is in progress.

The server accepts connections only from this machine. The page polls the server every few seconds
for new lines in the logs of the run. The server is stateless, so the page, the server and the run
may each be restarted.
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
    """Serve the page of the given runs until Ctrl-C is pressed.

    Raises:
        UsageError: the port is already in use.
    """
    with open_server(paths, port) as server:
        url = f"http://{ADDRESS}:{server.server_port}"
        terminal.line(
            f"{', '.join(map(str, paths))}: open {url} in a browser; press Ctrl-C to stop"
        )
        for path in paths:
            if not path.exists():
                terminal.line(f"{path} does not exist yet: the page waits for it")
        server.serve_forever()
    return 0


def open_server(paths: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Create a server that listens on the port. The caller runs it with `serve_forever`."""
    try:
        server = ThreadingHTTPServer((ADDRESS, port), partial(_Handler, paths))
    except OSError as error:
        reason = f"cannot listen on {ADDRESS} port {port}: {error.strerror}"
        raise UsageError(f"{reason}; choose another --port (0 selects a free port)") from error
    server.daemon_threads = True  # open connections do not keep the process alive
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
        # Prevent DNS rebinding: if every host name were accepted, a web page could read the run.
        if self.headers.get("Host") not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
            return self._send(403, "text/plain", f"open http://{ADDRESS}:{port}\n")
        marks = parse_qs(url.query, keep_blank_values=True).get("mark", [])
        is_known = len(marks) == len(self._paths) and all(map(MARK.fullmatch, marks))
        try:
            if url.path == "/":
                page = render_page([read_run(path) for path in self._paths], follow=True)
                return self._send(200, "text/html", page)
            if url.path == "/news" and is_known:
                news = [read_run(path, mark) for path, mark in zip(self._paths, marks, strict=True)]
                return self._send(200, "application/json", json.dumps(news, allow_nan=False))
        except UsageError as error:  # a damaged config.json
            return self._send(500, "text/plain", f"{error}\n")
        return self._send(404, "text/plain", "not found\n")

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
        """Log nothing, because one line per request would hide other messages on the terminal."""
