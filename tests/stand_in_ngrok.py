#!/usr/bin/env python3
"""Replaces the ngrok agent with its command line, log and API, and ngrok's edge.

The edge has a port of its own (the "public" URL). It forwards every request to the upstream of the
endpoint as ngrok does (Host is unchanged, X-Forwarded-For is added, and the response is streamed),
and applies the rate limit of the traffic policy. The requests are recorded in $STAND_IN_RECORD, one
JSON object per line. $STAND_IN_MODE selects the behaviour:

ok          everything works
bad-token   ngrok.com rejects the token with a message of several lines that quotes the token
crash       the agent exits at once without a message
silent      the agent starts and prints nothing
no-network  the agent repeats that ngrok.com cannot be reached
deaf        the agent starts, but never answers a request for an endpoint
refuse      the agent starts, but rejects the endpoint
dies        the agent works, but exits half a second after it has created the endpoint
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

MODE = os.environ.get("STAND_IN_MODE", "ok")
FIELDS = {"name", "url", "upstream", "bindings", "pooling_enabled", "traffic_policy"}
endpoints: dict[str, dict] = {}


def record(**facts: object) -> None:
    if path := os.environ.get("STAND_IN_RECORD"):
        with open(path, "a") as file:
            file.write(json.dumps(facts) + "\n")


def say(level: str, message: str, **fields: str) -> None:
    rest = "".join(f' {name}="{value}"' for name, value in fields.items())
    sys.stdout.write(f't=2026-01-01T00:00:00+0000 lvl={level} msg="{message}"{rest}\n')
    sys.stdout.flush()


class Edge(BaseHTTPRequestHandler):
    upstream = ""
    capacity = 0
    seen: list[float]

    def log_message(self, *_: object) -> None:
        pass

    def handle_any(self) -> None:
        now = time.monotonic()
        self.seen[:] = [then for then in self.seen if now - then < 60]
        if len(self.seen) >= self.capacity:
            self.send_error(429)
            return
        self.seen.append(now)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        upstream = http.client.HTTPConnection(urlsplit(self.upstream).netloc, timeout=30)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("connection", "x-forwarded-for"):
                upstream.putheader(name, value)
        before = [self.headers["X-Forwarded-For"]] if "X-Forwarded-For" in self.headers else []
        upstream.putheader("X-Forwarded-For", ", ".join([*before, "203.0.113.9"]))
        upstream.putheader("X-Forwarded-Proto", "https")
        upstream.endheaders(body)
        answer = upstream.getresponse()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()
        while chunk := answer.read1(65536):
            self.wfile.write(chunk)

    do_GET = do_HEAD = do_POST = do_OPTIONS = handle_any


class Api(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/api/endpoints":
            self.reply(200, {"endpoints": list(endpoints.values())})
        else:
            self.reply(404, {"status_code": 404, "msg": "not found"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        record(endpoint=asked)
        if MODE == "deaf":
            time.sleep(3600)
        if MODE == "refuse" or set(asked) - FIELDS:
            details = {"err": "the traffic policy is not\r\nvalid ERR_NGROK_2201"}
            self.reply(400, {"status_code": 400, "msg": "invalid", "details": details})
            return
        limit = asked["traffic_policy"]["on_http_request"][0]["actions"][0]["config"]
        shared = {"upstream": asked["upstream"]["url"], "capacity": limit["capacity"], "seen": []}
        url = serve(type("ThisEdge", (Edge,), shared))
        endpoints[asked["name"]] = {"name": asked["name"], "url": url, "uri": "/api/endpoints/x"}
        self.reply(201, endpoints[asked["name"]])
        if MODE == "dies":
            threading.Timer(0.5, os._exit, [3]).start()


def serve(handler: type[BaseHTTPRequestHandler]) -> str:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def main() -> None:
    token = os.environ.get("NGROK_AUTHTOKEN", "")
    with open(sys.argv[sys.argv.index("--config") + 1]) as file:
        record(argv=sys.argv[1:], token=token, pid=os.getpid(), config=file.read())
    if MODE == "crash":
        sys.exit(2)
    if MODE == "bad-token":
        lines = ["The authtoken is not valid.", f"Your authtoken: {token}", "", "ERR_NGROK_105", ""]
        say("eror", "failed to auth", obj="csess", err="\\r\\n".join(lines))
        sys.exit(1)
    while MODE == "no-network":
        say("eror", "failed to reconnect session", err="failed to dial: no such host")
        time.sleep(0.2)
    if MODE != "silent":
        say("info", "starting web service", obj="web", addr=urlsplit(serve(Api)).netloc)
        say("info", "client session established", obj="csess")
        say("info", "tunnel session started", obj="tunnels.session")
    time.sleep(3600)


if __name__ == "__main__":
    main()
