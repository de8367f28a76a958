"""The HTTP layer and clients that are slow, large or malformed. Raw sockets, bounded in time."""

from __future__ import annotations

import gc
import re
import socket
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from weakref import WeakSet

import pytest
from live_server import wait_until
from secured_server import KEY, SecuredServer, read, request, rest

from rlm.serving.http_server import UVICORN, SlowGuard
from rlm.serving.middleware import SecuritySettings

QUICK = {"header_seconds": 0.4, "body_seconds": 1.2, "write_seconds": 0.4}
AUTH = f"Authorization: Bearer {KEY}".encode()
JSON = b"Content-Type: application/json"
GET = request("GET", "/health")
HALF = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "
HALF_A_BODY = request("POST", "/phase1/reasoning", AUTH, JSON, b"Content-Length: 5000") + b'{"'


@pytest.fixture(scope="module")
def wall():
    with SecuredServer() as wall:
        yield wall


@pytest.fixture(scope="module")
def quick():
    """For slow clients; a good one, too, is cut when its machine pauses for so long."""
    with SecuredServer(guard=QUICK, body_seconds=0.4) as wall:
        yield wall


def drip(sock: socket.socket, start: bytes, byte: bytes = b"a") -> int:
    """Send `start`, then a byte every 50 ms until the server has had enough; how many it took."""
    sock.sendall(start)
    for sent in count():
        assert sent < 200, "the server would wait for ever"
        try:
            sock.send(byte)
            sock.settimeout(0.05)
            if sock.recv(1, socket.MSG_PEEK) == b"":
                return sent
            time.sleep(0.05)  # an answer is there; the connection is still open
        except TimeoutError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            return sent


def test_the_limits_are_the_documented_ones():
    """The other tests set them shorter."""
    documented = (Path(__file__).parents[2] / "docs" / "reference" / "serving.md").read_text(
        encoding="utf-8"
    )
    assert UVICORN["http"] is SlowGuard
    guard = (SlowGuard.header_seconds, SlowGuard.body_seconds, SlowGuard.write_seconds)
    assert (*guard, SlowGuard.max_connections) == (10, 15, 30, 500)
    for said in (
        "gives the headers 10 seconds and the body 15",
        "cut off after 30 seconds",
        "at most 500 connections",
    ):
        assert said in documented
    wall = SecuritySettings(None, None)
    limits = (wall.max_body, wall.max_header_bytes, wall.max_headers, wall.body_seconds)
    assert limits == (64 * 1024, 16 * 1024, 64, 10)
    assert (wall.requests_per_minute, wall.failures_per_minute) == (120, 20)


@pytest.mark.parametrize(
    "start",
    [b"", b"GET /", HALF, GET + b"GET / HTTP/1.1\r\n"],
)
def test_a_silent_connection_is_closed(quick, start):
    with quick.connect() as sock:
        sock.sendall(start)
        assert rest(sock).count(b"HTTP/1.1 200") == start.count(GET)


@pytest.mark.parametrize("before", [b"", GET])
@pytest.mark.parametrize("start", [HALF, b"GET /", HALF_A_BODY])
def test_what_drips_is_cut_off_as_a_whole(quick, before, start):
    """Also the second request on a connection that is kept."""
    with quick.connect() as sock:
        sock.sendall(before)
        assert not before or read(sock).status == 200
        drip(sock, start)


def test_a_body_that_drips_gets_a_408_and_then_the_end(quick):
    for _ in range(5):
        with quick.connect() as sock:
            sock.sendall(HALF_A_BODY)
            if answer := read(sock):  # none: the machine paused beyond the guard's own limit, too
                break
    assert (answer.status, answer.json["code"]) == (408, "request_timeout")


@pytest.mark.parametrize("length", [5, 5000])
def test_a_body_after_the_answer_that_refused_it_is_not_awaited_for_ever(quick, length):
    with quick.connect() as sock:
        sock.sendall(request("POST", "/phase1/reasoning", b"Content-Length: %d" % length))
        assert read(sock).status == 401
        if length == 5:  # the whole body, and then silence
            sock.sendall(b"12345")
            assert rest(sock) == b""
        else:
            drip(sock, b"")


def test_a_long_answer_outlives_the_deadlines(quick):
    path = "/stream?chunks=6&size=10&pause=0.25"
    assert quick.ask("GET", path, AUTH).body == b"x" * 60


def test_a_client_that_does_not_read_is_cut_and_the_app_hears_of_it(quick):
    quick.app.state.hung_up.clear()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", quick.port))
        sock.sendall(request("GET", "/stream?chunks=100000&size=65536&pause=0", AUTH))
        assert quick.app.state.hung_up.wait(60)


def test_a_client_that_leaves_a_little_unread_is_cut_too():
    """Less than asyncio's 64 KiB, for which close() waits without end."""
    left = []

    def connection_made(self, transport):
        SlowGuard.connection_made(self, transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    def cut(self, reason):
        left.append((reason, self.transport.get_write_buffer_size()))
        SlowGuard._cut(self, reason)

    guard = {**QUICK, "connection_made": connection_made, "_cut": cut}
    with SecuredServer(guard=guard) as wall, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", wall.port))
        sock.sendall(request("GET", "/stream?chunks=1&size=50000&pause=0", AUTH))
        wait_until(lambda: left and wall.connections == 0)
        [(reason, size)] = left
        assert (reason, 0 < size < 65536) == ("slow reader", True)


def test_closing_the_sending_half_counts_as_leaving(wall):
    wall.app.state.hung_up.clear()
    with wall.connect() as sock:
        sock.sendall(request("GET", "/stream?chunks=1000&size=1&pause=0.1", AUTH))
        assert sock.recv(10) == b"HTTP/1.1 2"
        sock.shutdown(socket.SHUT_WR)
        assert wall.app.state.hung_up.wait(60)


def test_no_piece_of_a_stream_waits_for_the_last_one_to_be_acknowledged():
    options = []

    def connection_made(self, transport):
        SlowGuard.connection_made(self, transport)
        sock = transport.get_extra_info("socket")
        options.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    with SecuredServer(guard={"connection_made": connection_made}) as wall:
        wall.send(GET)
    assert options == [1]


def test_200_slow_clients_do_not_keep_a_good_one_out():
    with SecuredServer(guard={"header_seconds": 2.0}) as wall, ExitStack() as stack:
        slow = [stack.enter_context(wall.connect()) for _ in range(200)]
        for sock in slow:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert [wall.ask("GET", "/health").status for _ in range(20)] == [200] * 20
        for sock in slow:  # none of them was answered, all of them end
            assert rest(sock) == b""


def test_connections_beyond_the_limit_are_closed_at_once():
    with SecuredServer(guard={"max_connections": 3}) as wall:
        with ExitStack() as stack:
            for _ in range(3):
                sock = stack.enter_context(wall.connect())
                sock.sendall(GET)
                assert read(sock).status == 200
            with wall.connect() as sock:
                assert rest(sock) == b""
        wait_until(lambda: wall.send(GET) is not None)


def test_limits_of_headers(wall):
    fits = [b"X-%d: 1" % i for i in range(63)]  # and Host
    assert wall.send(request("GET", "/health", *fits)).status == 200
    answer = wall.send(request("GET", "/health", *fits, b"X: 1"))
    assert (answer.status, answer.json["code"]) == (431, "headers_too_large")
    assert wall.send(request("GET", "/health", b"X: " + b"a" * 16000)).status == 200
    assert wall.send(request("GET", "/health", b"X: " + b"a" * 17 * 1024)).status == 431
    assert wall.send(request("GET", "/health?" + "a" * 17 * 1024)).status == 431
    assert wall.send(request("GET", "/" + "a" * 17 * 1024)).status == 431


def test_a_header_of_a_megabyte_is_neither_read_nor_kept():
    taken, connections = [], WeakSet()

    def data_received(self, data):
        taken.append(len(data))
        connections.add(self)
        SlowGuard.data_received(self, data)

    huge = request("GET", "/health", b"X: " + b"a" * 1_000_000)
    with SecuredServer(guard={"data_received": data_received}) as wall:
        for _ in range(5):
            answer = wall.send(huge)
            assert answer is None or answer.status in (400, 431)
        assert 0 < sum(taken) < 2_500_000  # asyncio takes 256 KiB at once
        wait_until(lambda: gc.collect() >= 0 and not connections)


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
