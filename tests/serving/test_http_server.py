"""The HTTP layer and clients that are slow, large or malformed. Raw sockets, bounded in time."""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from live_server import wait_until
from secured_server import KEY, SecuredServer, read, request, rest

from rlm.serving.http_server import UVICORN
from rlm.serving.middleware import SecuritySettings
from rlm.serving.service import PREPARE_SECONDS
from rlm.serving.streaming import SEND_SECONDS

AUTH = f"Authorization: Bearer {KEY}".encode()
JSON = b"Content-Type: application/json"
GET = request("GET", "/health")
HALF = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "
HALF_A_BODY = request("POST", "/phase1/reasoning", AUTH, JSON, b"Content-Length: 5000") + b'{"'


@pytest.fixture(scope="module")
def wall():
    with SecuredServer() as wall:
        yield wall


def test_the_limits_are_the_documented_ones():
    """The other tests set them shorter."""
    page = (Path(__file__).parents[2] / "docs/reference/serving.md").read_text(encoding="utf-8")
    assert UVICORN["limit_concurrency"] == 500
    assert "at most 500 connections" in page
    assert "10 seconds for the whole body" in page
    wall = SecuritySettings(None, None)
    limits = (wall.max_body, wall.max_header_bytes, wall.max_headers, wall.body_seconds)
    assert limits == (64 * 1024, 16 * 1024, 64, 10)
    assert (wall.requests_per_minute, wall.failures_per_minute) == (120, 20)
    assert f"each may take up to {PREPARE_SECONDS:g} seconds" in page
    assert f"not read to its end {SEND_SECONDS:g} seconds after the deadline is closed" in page


def test_a_body_that_is_late_gets_a_408():
    with SecuredServer(body_seconds=0.4) as wall, wall.connect() as sock:
        sock.sendall(HALF_A_BODY)
        answer = read(sock)
    assert (answer.status, answer.json["code"]) == (408, "request_timeout")


def test_no_piece_of_a_stream_waits_for_the_last_one_to_be_acknowledged():
    with SecuredServer() as wall, wall.connect() as sock:
        sock.sendall(GET)
        assert read(sock).status == 200
        assert wall.options_of_connections(socket.IPPROTO_TCP, socket.TCP_NODELAY) == [1]


def test_100_slow_clients_do_not_keep_a_good_one_out():
    with SecuredServer() as wall, ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(wall.connect()).sendall(HALF)
        assert [wall.ask("GET", "/health").status for _ in range(20)] == [200] * 20


def test_connections_beyond_the_limit_get_a_503():
    with SecuredServer(options={"limit_concurrency": 4}) as wall:
        with ExitStack() as stack:
            for _ in range(3):
                sock = stack.enter_context(wall.connect())
                sock.sendall(GET)
                assert read(sock).status == 200
            assert wall.ask("GET", "/health").status == 503
        wait_until(lambda: wall.ask("GET", "/health").status == 200)


def test_closing_the_sending_half_counts_as_leaving(wall):
    wall.app.state.hung_up.clear()
    with wall.connect() as sock:
        sock.sendall(request("GET", "/stream?chunks=1000&size=1&pause=0.1", AUTH))
        assert sock.recv(10) == b"HTTP/1.1 2"
        sock.shutdown(socket.SHUT_WR)
        assert wall.app.state.hung_up.wait(60)


def test_limits_of_headers(wall):
    fits = [b"X-%d: 1" % i for i in range(63)]  # and Host
    assert wall.send(request("GET", "/health", *fits)).status == 200
    answer = wall.send(request("GET", "/health", *fits, b"X: 1"))
    assert (answer.status, answer.json["code"]) == (431, "headers_too_large")
    assert wall.send(request("GET", "/health", b"X: " + b"a" * 16000)).status == 200
    assert wall.send(request("GET", "/health", b"X: " + b"a" * 17 * 1024)).status == 431
    assert wall.send(request("GET", "/health?" + "a" * 17 * 1024)).status == 431
    assert wall.send(request("GET", "/" + "a" * 17 * 1024)).status == 431


def test_a_header_of_a_megabyte_is_refused(wall):
    answer = wall.send(request("GET", "/health", b"X: " + b"a" * 1_000_000))
    assert answer is None or answer.status in (400, 431)


SMUGGLED = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_a_body_with_two_lengths_is_refused_with_all_that_follows(wall):
    lines = (AUTH, JSON, b"Transfer-Encoding: chunked", b"Content-Length: 5")
    for headers in (lines, lines[::-1]):
        with wall.connect() as sock:
            sock.sendall(request("POST", "/phase1/reasoning", *headers) + SMUGGLED)
            data = rest(sock)
        assert data.startswith(b"HTTP/1.1 400 ")
        assert data.count(b"HTTP/1.1") == 1


LENGTHS = [b"-1", b"+5", b"5, 6", b"0x10", b"9" * 23, b"5\r\nContent-Length: 6"]
AMBIGUOUS = [b"Content-Length: " + length for length in LENGTHS]
AMBIGUOUS += [
    b"Transfer-Encoding: gzip, chunked",
    b"\r\n".join([b"Transfer-Encoding: chunked"] * 2),
]
AMBIGUOUS += [b"Host: localhost", b"X: a\x00b", b"X : a"]  # the second Host


@pytest.mark.parametrize("header", AMBIGUOUS)
def test_ambiguous_requests_are_400_and_the_end(wall, header):
    answer = wall.send(request("POST", "/phase1/reasoning", AUTH, JSON, header) + b"{}")
    assert (answer.status, answer.headers["connection"]) == (400, "close")


def test_what_is_no_http_at_all(wall):
    chunk = request("POST", "/phase1/reasoning", AUTH, JSON, b"Transfer-Encoding: chunked")
    no_http = (b"\x16\x03\x01\x02\x00\x01", b"hello\r\n\r\n", b"GET / HTTP/9\r\n\r\n")
    for data in (*no_http, b"\r\n" * 50, chunk + b"zz\r\n"):
        assert wall.send(data).status == 400
        assert wall.send(GET).status == 200
    with wall.connect() as sock:  # after an answer
        sock.sendall(request("POST", "/phase1/reasoning", b"Transfer-Encoding: chunked"))
        assert read(sock).status == 401
        sock.sendall(b"zz\r\n")
        assert rest(sock) == b""


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


def test_http_1_0_and_pipelining(wall):
    assert wall.send(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n").status == 200
    assert wall.send(b"GET /health HTTP/1.0\r\n\r\n").json["code"] == "bad_host"
    with wall.connect() as sock:
        sock.sendall(
            GET + request("GET", "/metrics") + request("GET", "/ready", b"Connection: close")
        )
        data = rest(sock)
    assert re.findall(rb"HTTP/1.1 (\d+)", data) == [b"200", b"401", b"200"]


@pytest.mark.parametrize("number", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_requests_on_one_connection(wall, number):
    with wall.connect() as sock:
        for _ in range(number):
            sock.sendall(GET)
            assert read(sock).status == 200


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "get", "post", "PROPFIND", "X" * 40])
def test_odd_methods_reach_no_handler(wall, method):
    for path in ("/", "/phase1/reasoning", "localhost:80", "*"):
        assert wall.ask(method, path).status == 401
        assert wall.ask(method, path, AUTH).status in (404, 405)


def test_an_upgrade_to_a_websocket_is_an_ordinary_request(wall):
    headers = (b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Version: 13")
    assert wall.send(request("GET", "/metrics", *headers)).status == 401
    assert wall.send(request("GET", "/phase1/reasoning", *headers, AUTH)).status == 405
