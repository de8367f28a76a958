"""An OpenAI-compatible server with scripted replies, in a thread, on a free port of this machine.

    with ScriptedServer() as server:
        server.script(refuse(429, retry_after="0.1"), chat_reply("4"))
        APIClient(server.url).chat(…)           # sees a 429, then the reply
        server.requests[-1].body["temperature"]    # the request

Requests without a scripted reply are answered, too: `/models`, the loading and unloading of
adapters (as in vLLM), `/chat/completions` with the text or `Reply` of `answer(body)`, and
`/completions` with tokens that are a function of (prompt, seed) and end with the first of the
request's `stop_token_ids`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

END = 2  # an end token for tests in which any end token will do
BASE = "base"  # the name of the base model


@dataclass(frozen=True)
class Reply:
    """A reply. `body` is an object sent as JSON, a text, or None to close the connection."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0  # seconds
    content_type: str = "application/json"


HANG_UP = Reply(None)
GARBAGE = Reply('{"choices": [')


def refuse(status: int, message: str = "no", *, retry_after: str | None = None) -> Reply:
    """Return an error in OpenAI's format."""
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return Reply({"error": {"message": message, "code": status}}, status, headers)


def chat_reply(
    text: Any,
    *,
    reasoning: str | None = None,
    read: int = 10,
    written: int | None = 5,
    finish: str = "stop",
    delay: float = 0.0,
) -> Reply:
    """Return a chat completion, with the numbers of prompt and completion tokens."""
    message = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    choice = {"index": 0, "message": message}
    usage = {"prompt_tokens": read, "completion_tokens": written}
    return Reply({"choices": [choice | {"finish_reason": finish}], "usage": usage}, delay=delay)


def completion_choice(
    token_ids: list[int], logprobs: list[float], finish: str = "stop", index: int = 0
) -> dict[str, Any]:
    """Return a choice of /completions as vLLM sends it if token ids are requested."""
    return {
        "index": index,
        "text": "",
        "finish_reason": finish,
        "token_ids": token_ids,
        "logprobs": {"token_logprobs": logprobs, "tokens": [str(i) for i in token_ids]},
    }


def completions_reply(*choices: dict[str, Any]) -> Reply:
    usage = {"prompt_tokens": 1, "completion_tokens": sum(len(c["token_ids"]) for c in choices)}
    return Reply({"choices": list(choices), "usage": usage})


@dataclass(frozen=True)
class Seen:
    """A request that has arrived. `path` has no prefix /v1/."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]  # with names in lower case
    at: float  # time.monotonic()


class ScriptedServer:
    """A server that records its requests; see the docstring of the module."""

    def __init__(self, answer: Callable[[dict[str, Any]], str | Reply] = lambda body: "ok") -> None:
        self.answer = answer
        self.requests: list[Seen] = []
        self.most_in_flight = 0
        self.adapters: dict[str, str] = {}  # name → path
        self.runtime_lora = True  # whether VLLM_ALLOW_RUNTIME_LORA_UPDATING is set
        self.processed_logprobs = True  # whether the option is --logprobs-mode processed_logprobs
        self.delay = 0.0  # seconds before each answer that is not scripted
        self.port = 0  # 0 selects a free port
        self.key = ""  # the API key that requests must contain; "" accepts all requests
        self.max_model_len = 1024
        self.info: dict[str, Any] = {}  # the reply of /phase1/info; {} imitates another server
        self._script: deque[Reply] = deque()
        self._in_flight = 0
        self._lock = threading.Lock()

    def script(self, *replies: Reply) -> None:
        """Set the replies to the next POST requests, in order of arrival."""
        self._script.extend(replies)

    def asked(self, path: str) -> list[dict[str, Any]]:
        """Return the bodies of the requests to this path."""
        return [seen.body for seen in self.requests if seen.path == path]

    def __enter__(self) -> ScriptedServer:
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        serve = self._http.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def reply_to(self, seen: Seen, method: str) -> Reply:
        with self._lock:
            self.requests.append(seen)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            scripted = self._script.popleft() if method == "POST" and self._script else None
        try:
            reply = scripted or self._own(seen)
            time.sleep(reply.delay if scripted else self.delay)
        finally:
            with self._lock:
                self._in_flight -= 1
        return reply

    def _own(self, seen: Seen) -> Reply:
        body = seen.body
        if seen.path == "/health":  # needs no key, as in vLLM
            return Reply("", content_type="text/plain")
        if self.key and seen.headers.get("authorization") != f"Bearer {self.key}":
            return refuse(401, "Unauthorized")
        if seen.path == "models":
            cards = [{"id": name, "parent": BASE} for name in self.adapters]
            cards += [{"id": BASE, "parent": None, "max_model_len": self.max_model_len}]
            cards = [card | {"owned_by": "rlm"} for card in cards] if self.info else cards
            return Reply({"object": "list", "data": cards})
        if seen.path == "/phase1/info" and self.info:
            return Reply(self.info)
        if seen.path.endswith("load_lora_adapter") and self.runtime_lora:
            return self._adapter(seen.path.startswith("un"), body)
        if seen.path not in ("completions", "chat/completions"):
            return Reply({"detail": "Not Found"}, 404)
        if seen.path == "chat/completions":
            answer = self.answer(body)
            return answer if isinstance(answer, Reply) else chat_reply(answer)
        if body["model"] != BASE and body["model"] not in self.adapters:
            return refuse(404, f"The model `{body['model']}` does not exist.")
        return completions_reply(*(self._choice(body, i) for i in range(body["n"])))

    def _adapter(self, unload: bool, body: dict[str, Any]) -> Reply:
        name = body["lora_name"]
        if unload and name not in self.adapters:
            return refuse(404, f"The lora adapter '{name}' cannot be found.")
        if not unload and name in self.adapters:
            return refuse(400, f"The lora adapter '{name}' has already been loaded.")
        if unload:
            del self.adapters[name]
        else:
            self.adapters[name] = body["lora_path"]
        return Reply(f"Success: LoRA adapter '{name}'.", content_type="text/plain")

    def _choice(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        """Return tokens that count up from a function of (prompt, seed + index).

        Every third completion is truncated.
        """
        end = body["stop_token_ids"][0]
        if body["top_p"] < 0.5:  # two tokens are equally likely, so top_p keeps one
            logprob = 0.0 if self.processed_logprobs else -0.7
            return completion_choice([5, 6, end], [0.0, logprob, 0.0], "stop", index)
        start = 3 + (sum(body["prompt"]) + body["seed"] + index) % 100
        cut = (body["seed"] + index) % 3 == 2
        length = body["max_tokens"] - (not cut)
        ids = [start + i for i in range(length)] + ([] if cut else [end])
        return completion_choice(ids, [-0.5] * len(ids), "length" if cut else "stop", index)


def _handler(server: ScriptedServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps connections open, as real servers do

        def do_GET(self) -> None:
            self._serve({})

        def do_POST(self) -> None:
            self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _serve(self, body: dict[str, Any]) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            seen = Seen(self.path.removeprefix("/v1/"), body, headers, time.monotonic())
            reply = server.reply_to(seen, self.command)
            if reply.body is None:
                self.close_connection = True
                return
            text = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            self.send_header("Content-Length", str(len(text.encode())))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass  # otherwise each request prints a line

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:  # the client has disconnected after a timeout
                self.close_connection = True

    return Handler
