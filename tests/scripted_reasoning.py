"""Replaces server.py by a server in a thread, which serves the page and scripted replies.

    with ReasoningServer() as server:
        server.script(stream(start(), reasoning("2 + 2"), Gate("half"), *ending("4")))
        …                        # a client asks, and sees "2 + 2"
        server.open("half")      # and now the rest

The script divides a reply into pieces, which are sent one by one, so a test determines what the
client has seen. A request without a scripted reply is answered with `server.answer`.
"""

from __future__ import annotations

import json
import select
import socket
import threading
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlm.serving.app import PAGE, PAGE_POLICY

FILES = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}
ID = "rsn_1"
EGGS = "Each box holds 6 eggs. How many eggs do 4 boxes hold?"
QUESTION = "Tom has 12 apples and buys 7 more. How many apples does Tom have now?"


@dataclass(frozen=True)
class Gate:
    """Stops the reply until `server.open(name)` is called."""

    name: str


@dataclass(frozen=True)
class HangUp:
    """Breaks the connection."""


@dataclass(frozen=True)
class Reply:
    """A reply whose pieces are sent one by one; a reply of several pieces is sent in chunks."""

    pieces: tuple[bytes | Gate | HangUp, ...]
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def as_json(body: Any, status: int = 200) -> Reply:
    return Reply((json.dumps(body).encode(),), status)


def problem_body(status: int, code: str, detail: str, **more: Any) -> dict[str, Any]:
    title = HTTPStatus(status).phrase
    error = {"message": detail, "type": "server_error", "param": None, "code": code}
    known = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    return known | {"code": code, "request_id": "req-1", "error": error} | more


def problem(
    status: int, code: str, detail: str = "", *, retry_after: int | None = None, **more: Any
) -> Reply:
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    body = json.dumps(problem_body(status, code, detail, **more)).encode()
    return Reply((body,), status, "application/problem+json", headers)


def event(name: str, data: Any, end: str = "\n") -> bytes:
    return f"event: {name}{end}data: {json.dumps(data, ensure_ascii=False)}{end}{end}".encode()


def start(n: int = 1, budget: int | None = None) -> bytes:
    known = {"id": ID, "request_id": "req-1", "seed": 42, "n": n, "model": model()}
    return event("start", known | {"thinking": {"budget": budget}})


def reasoning(delta: str, **more: Any) -> bytes:
    return event("reasoning", {"sample": 0, "delta": delta, **more})


def answer(delta: str) -> bytes:
    return event("answer", {"sample": 0, "delta": delta})


def sample(index: int, final: str | None, format: str = "strict", **thinking: Any) -> bytes:
    state = {"status": "closed", "tokens": 121, "budget": None} | thinking
    known = {"sample": index, "final_answer": final, "format": format, "finish_reason": "stop"}
    return event("sample", known | {"thinking": state})


def done(*args: Any, **kwargs: Any) -> bytes:
    return event("done", result(*args, **kwargs))


def ending(final: str, **more: Any) -> tuple[bytes, ...]:
    """Return the events that end a stream with one sample: the answer and the full response."""
    return (answer(final), done(final=final, **more))


def stream(*pieces: bytes | Gate | HangUp) -> Reply:
    return Reply(pieces, content_type="text/event-stream; charset=utf-8")


def model() -> dict[str, Any]:
    return {
        "base": "SmolLM2-135M-Instruct",
        "adapter": "final_rlm_lora",
        "adapter_sha256": "ab12" * 16,
    }


def result(
    reasoning: str = "12 + 7 = 19",
    *,
    final: str | None = "19",
    answer: str | None = None,
    status: str = "closed",
    tokens: int = 121,
    budget: int | None = None,
    votes: Iterable[str | None] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return a full response in the format that docs/reference/serving.md describes."""
    answer = str(final) if answer is None else answer  # the server sends it without its tag
    cast = list(votes)
    counts = Counter(vote for vote in cast if vote is not None)
    winner = counts.most_common(1)[0][0] if counts else None
    vote = {
        "n": len(cast),
        "valid": sum(counts.values()),
        "winner": winner,
        "agreement": counts[winner] / len(cast) if cast else 0,
        "counts": dict(counts),
    }
    value = vote["agreement"] if cast else 0.93
    usage = {"prompt_tokens": 48, "completion_tokens": tokens + 9, "reasoning_tokens": tokens}
    return {
        "id": ID,
        "created": 1_700_000_000,
        "request_id": "req-1",
        "response": f"<think>\n{reasoning}\n</think>\n<answer>{answer}</answer>",
        "reasoning": reasoning,
        "answer": answer,
        "final_answer": final,
        "answer_type": "number",
        "trace": [{"step": 1, "content": reasoning}, {"step": 2, "content": answer}],
        "details": {"stage": "grpo", "format": "strict" if final else "none", "reason": "ok"},
        "finish_reason": "stop",
        "thinking": {"status": status, "tokens": tokens, "budget": budget},
        "vote": vote if cast else None,
        "confidence": {
            "value": value,
            "method": "vote_share" if cast else "mean_token_probability",
            "calibrated": False,
        },
        "verifier": None,
        "samples": None,
        "usage": usage | {"total_tokens": tokens + 57},
        "timings": {
            "first_token_ms": 190.0,
            "total_ms": 5200.0,
            "tokens_per_second": 61.2,
        },
        "seed": 42,
        "model": model(),
        "warnings": [],
        "experiences": [],
    } | more


def described(**more: Any) -> dict[str, Any]:
    """Return the reply of /phase1/info."""
    return {
        "model": model(),
        "adapters": ["base", "final_rlm_lora", "sft_lora"],
        "default_adapter": "final_rlm_lora",
        "about": {
            "base": {"stage": "base", "dataset": None, "questions": [QUESTION]},
            "final_rlm_lora": {"stage": "grpo", "dataset": "sums", "questions": [QUESTION, EGGS]},
        },
        "limits": {
            "max_new_tokens": 1024,
            "n": 16,
        },
        "experiences": 0,
        "defaults": {"max_new_tokens": 512, "temperature_one": 0.0, "temperature_many": 0.7},
        "public_url": None,
        "needs_key": False,
    } | more


@dataclass(frozen=True)
class Seen:
    """A request that has arrived. `body` is None if the request has no body."""

    path: str
    body: Any
    headers: dict[str, str]  # with names in lower case


class ReasoningServer:
    """A server that replies as scripted; see the docstring of the module. `url` ends with "/"."""

    def __init__(self) -> None:
        self.answer = result()
        self.info = described()
        self.keys: frozenset[str] = frozenset()  # if empty, requests need no key
        self.not_ready: str | None = None  # the code of the problem
        self.requests: list[Seen] = []
        self.left: list[str] = []  # paths of the requests whose client disconnected early
        self._script: deque[Reply] = deque()
        self._gates: dict[str, threading.Event] = {}

    def script(self, *replies: Reply) -> None:
        """Set the replies to the next questions, in order of arrival."""
        self._script.extend(replies)

    def open(self, gate: str) -> None:
        self._gates.setdefault(gate, threading.Event()).set()

    def asked(self) -> list[Any]:
        """Return the bodies of the questions."""
        return [seen.body for seen in self.requests if seen.path == "/phase1/reasoning"]

    def __enter__(self) -> ReasoningServer:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/"
        serve = self._http.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for gate in self._gates.values():
            gate.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def reply_to(self, method: str, seen: Seen) -> Reply:
        self.requests.append(seen)
        if method == "GET" and seen.path in FILES:
            content = PAGE.joinpath(seen.path[1:] or "index.html").read_bytes()
            headers = {"Content-Security-Policy": PAGE_POLICY}
            return Reply((content,), 200, f"{FILES[seen.path]}; charset=utf-8", headers)
        if seen.path == "/ready":
            code = self.not_ready
            return problem(503, code, f"it is {code}") if code else as_json({"status": "ready"})
        given = seen.headers.get("authorization", "").removeprefix("Bearer ")
        if self.keys and given not in self.keys:
            return problem(401, "unauthorized", "A key is needed.")
        if seen.path == "/phase1/info":
            return as_json(self.info | {"needs_key": bool(self.keys)})
        if seen.path == f"/phase1/reasoning/{ID}/answer":
            self.open("answer now")
            return as_json({"id": ID, "status": "closing"}, 202)
        if (method, seen.path) != ("POST", "/phase1/reasoning"):
            return problem(404, "not_found", "There is nothing here.")
        if self._script:
            return self._script.popleft()
        if not seen.body.get("stream"):
            return as_json(self.answer)
        text = self.answer["reasoning"]
        return stream(start(), reasoning(text), answer("…"), event("done", self.answer))

    def pass_gate(self, gate: Gate, connection: socket.socket) -> bool:
        """Wait until a gate opens; return False if the client disconnects first."""
        opened = self._gates.setdefault(gate.name, threading.Event())
        while not opened.wait(0.005):
            readable, _, _ = select.select([connection], [], [], 0)
            if readable and not connection.recv(1, socket.MSG_PEEK):
                return False
        return True


def _handler(server: ReasoningServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # sends each piece at once

        def do_GET(self) -> None:
            self._serve(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._serve(json.loads(body) if body else None)

        def _serve(self, body: Any) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = server.reply_to(self.command, Seen(self.path, body, headers))
            chunked = len(reply.pieces) > 1
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if chunked:
                self.send_header("Transfer-Encoding", "chunked")
            else:
                self.send_header("Content-Length", str(len(reply.pieces[0])))
            self.end_headers()
            for piece in reply.pieces:
                if isinstance(piece, HangUp):
                    self.close_connection = True
                    return
                if isinstance(piece, Gate):
                    if not server.pass_gate(piece, self.connection):
                        server.left.append(self.path)
                        self.close_connection = True
                        return
                    continue
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
            if chunked:
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None:
            pass

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:
                self.close_connection = True

    return Handler


def crumbs(data: bytes, size: int = 1) -> tuple[bytes, ...]:
    """Cut data into pieces of equal size, regardless of characters, lines and events."""
    return tuple(data[i : i + size] for i in range(0, len(data), size))
