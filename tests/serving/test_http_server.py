"""The HTTP layer with slow, large and malformed requests over raw sockets, with time limits."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from secured_server import KEY, SecuredServer, read, request, rest

from rlm.serving.http_server import UVICORN
from rlm.serving.middleware import (
    BODY_SECONDS,
    MAX_BODY,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    SecuritySettings,
)
from rlm.serving.service import PREPARE_SECONDS
from rlm.serving.streaming import SEND_SECONDS

AUTH = f"Authorization: Bearer {KEY}".encode()
JSON = b"Content-Type: application/json"
GET = request("GET", "/health")
HALF_A_BODY = request("POST", "/phase1/reasoning", AUTH, JSON, b"Content-Length: 5000") + b'{"'


@pytest.fixture(scope="module")
def wall():
    with SecuredServer() as wall:
        yield wall


def test_the_limits_are_the_documented_ones():
    """The other tests set shorter limits."""
    page = (Path(__file__).parents[2] / "docs/reference/serving.md").read_text(encoding="utf-8")
    assert UVICORN["limit_concurrency"] == 500
    assert "at most 500 connections" in page
    assert "10 seconds for the whole body" in page
    wall = SecuritySettings(None, None)
    limits = (MAX_BODY, MAX_HEADER_BYTES, MAX_HEADERS, BODY_SECONDS)
    assert limits == (64 * 1024, 16 * 1024, 64, 10)
    assert (wall.requests_per_minute, wall.failures_per_minute) == (120, 20)
    assert f"each may take up to {PREPARE_SECONDS:g} seconds" in page
    assert f"the end of a stream {SEND_SECONDS:g} seconds after the deadline" in page


def test_a_body_that_is_late_gets_a_408(monkeypatch):
    monkeypatch.setattr("rlm.serving.middleware.BODY_SECONDS", 0.4)
    with SecuredServer() as wall, wall.connect() as sock:
        sock.sendall(HALF_A_BODY)
        answer = read(sock)
    assert (answer.status, answer.json["code"]) == (408, "request_timeout")


def test_no_piece_of_a_stream_waits_for_the_last_one_to_be_acknowledged():
    with SecuredServer() as wall, wall.connect() as sock:
        sock.sendall(GET)
        assert read(sock).status == 200
        assert wall.options_of_connections(socket.IPPROTO_TCP, socket.TCP_NODELAY) == [1]


def test_limits_of_headers(wall):
    fits = [b"X-%d: 1" % i for i in range(63)]  # Host is one more header
    assert wall.send(request("GET", "/health", *fits)).status == 200
    answer = wall.send(request("GET", "/health", *fits, b"X: 1"))
    assert (answer.status, answer.json["code"]) == (431, "headers_too_large")
    assert wall.send(request("GET", "/health", b"X: " + b"a" * 16000)).status == 200
    assert wall.send(request("GET", "/health", b"X: " + b"a" * 17 * 1024)).status == 431
    assert wall.send(request("GET", "/health?" + "a" * 17 * 1024)).status == 431
    assert wall.send(request("GET", "/" + "a" * 17 * 1024)).status == 431


SMUGGLED = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_a_body_with_two_lengths_is_refused_with_all_that_follows(wall):
    lines = (AUTH, JSON, b"Transfer-Encoding: chunked", b"Content-Length: 5")
    for headers in (lines, lines[::-1]):
        with wall.connect() as sock:
            sock.sendall(request("POST", "/phase1/reasoning", *headers) + SMUGGLED)
            data = rest(sock)
        assert data.startswith(b"HTTP/1.1 400 ")
        assert data.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "header",
    [b"Content-Length: 5\r\nContent-Length: 6", b"Host: localhost", b"X: a\x00b"],
    ids=["two lengths", "a second Host", "NUL"],
)
def test_ambiguous_requests_are_400_and_the_end(wall, header):
    answer = wall.send(request("POST", "/phase1/reasoning", AUTH, JSON, header) + b"{}")
    assert (answer.status, answer.headers["connection"]) == (400, "close")


def chunked(body: bytes, size: int = 1000) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_a_body_over_the_limit_is_413_however_it_is_sent(wall):
    exact, over = b'"' + b"a" * 65534 + b'"', b'"' + b"a" * 65535 + b'"'
    assert wall.post(exact).status == 200
    answers = [wall.post(over), wall.post(b" " * 1_000_000)]
    head = request("POST", "/phase1/reasoning", AUTH, JSON, b"Transfer-Encoding: chunked")
    assert wall.send(head + chunked(exact)).status == 200
    answers += [wall.send(head + chunked(over)), wall.send(head + chunked(over * 10))]
    declared = request("POST", "/phase1/reasoning", AUTH, JSON, b"Content-Length: 9999999999")
    answers.append(wall.send(declared))
    for answer in answers:
        assert (answer.status, answer.json["code"]) == (413, "body_too_large")
        assert answer.headers["content-type"] == "application/problem+json"


def test_bodies_that_are_not_read(wall):
    for encoding in ("gzip", "br", "identity, gzip", "identity"):
        assert wall.post(b"{}", f"Content-Encoding: {encoding}").status == 415
    headers = (AUTH, JSON, b"Expect: 100-continue", b"Content-Length: 99999")
    assert wall.send(request("POST", "/phase1/reasoning", *headers)).status == 413


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "get", "post", "PROPFIND", "X" * 40])
def test_odd_methods_reach_no_handler(wall, method):
    for path in ("/", "/phase1/reasoning", "localhost:80", "*"):
        assert wall.ask(method, path).status == 401
        assert wall.ask(method, path, AUTH).status in (404, 405)


def test_an_upgrade_to_a_websocket_is_an_ordinary_request(wall):
    headers = (b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Version: 13")
    assert wall.send(request("GET", "/metrics", *headers)).status == 401
    assert wall.send(request("GET", "/phase1/reasoning", *headers, AUTH)).status == 405
