"""The process of the server: failed starts, and how it ends."""

import signal

import pytest

from rlm.cli import UsageError
from rlm.serving import process, server_process

DEAF = """
import http.server, signal, sys

class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

signal.signal(signal.SIGTERM, signal.SIG_IGN)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Ready).serve_forever()
"""


def test_a_server_that_ends_is_said_in_one_line(tmp_path):
    log = tmp_path / "server.log"
    with (
        pytest.raises(UsageError, match=r"the server did not start; see .*server\.log"),
        server_process(["-c", "print('no')"], log=log),
    ):
        pass
    assert log.read_text() == "no\n"


def test_a_server_that_ignores_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr(process, "END_SECONDS", 0.1)
    with server_process(["-c", DEAF]) as (_, running):
        assert running.poll() is None
    assert running.returncode == -signal.SIGKILL
