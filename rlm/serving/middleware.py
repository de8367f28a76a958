"""Check headers, Host, API key, rate limit and body before the application gets a request.

If the server has a key, all paths except PUBLIC require it, so new routes are protected by default.
The check uses the same path as the router: servers that authorise by a prefix of the path or by a
rebuilt URL have had security holes.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlm.serving import logging as logs
from rlm.serving.access import (
    AllowedHosts,
    Keys,
    SlidingWindow,
    asked_host,
    client_address,
    is_form_of_ours,
    sent_key,
)
from rlm.serving.errors import HTTPProblem, as_problem

PUBLIC = frozenset({"/", "/page.css", "/page.js", "/health", "/ready"})  # for GET and HEAD
MAX_CLIENTS = 4096  # maximum number of keys or addresses whose rate is tracked
MAX_BODY = 65536  # bytes
MAX_HEADER_BYTES = 16384  # the request line and all headers together
MAX_HEADERS = 64
BODY_SECONDS = 10.0  # time limit for receiving the whole body
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEADERS = {  # each header is added unless the application sets it
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class SecuritySettings:
    keys: Keys
    allowed_hosts: AllowedHosts
    # The limit applies per API key, or per client address if the server is public. A server without
    # keys that is not public has no limit, because by default only its own machine can reach it.
    requests_per_minute: int = 120
    public: bool = False  # reachable through a tunnel without a key
    allowed_origins: Sequence[str] = ()  # origins of web pages that may use this server
    failures_per_minute: int = 20  # maximum number of wrong keys, from all addresses together


class SecurityMiddleware:
    """ASGI middleware that checks requests. It sets scope["state"]: `request_id` and `key_id`."""

    def __init__(
        self,
        app: ASGIApp,
        settings: SecuritySettings,
        count: Callable[[int], None] = lambda status: None,
    ) -> None:
        """
        Args:
            count: is called with the status of each response.
        """
        self._app, self._settings, self._count = app, settings, count
        # Returns the rate limit of a key or an address. If there are too many, the least recently
        # used one is dropped.
        per_minute = settings.requests_per_minute
        self._rate = lru_cache(MAX_CLIENTS)(lambda name: SlidingWindow(per_minute))
        self._failures = SlidingWindow(settings.failures_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:  # WebSockets are not supported, and must not bypass the checks
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request with our response headers; convert its errors to responses.

        The request is logged, and the status of its response is counted.
        """
        started, status = time.monotonic(), 499  # 499 (client disconnected) until a response starts
        sent = Headers(scope=scope).getlist("x-request-id")
        is_harmless = len(sent) == 1 and _REQUEST_ID.fullmatch(sent[0])
        request_id = sent[0] if is_harmless else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        logs.request_id.set(request_id)

        async def respond(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._serve(scope, receive, respond)
        except ClientDisconnect:
            pass
        except Exception as error:
            if not isinstance(error, HTTPProblem):
                logs.log_error("failure", error)
            if status == 499:  # if a response has started, uvicorn closes the connection
                await as_problem(error).response(request_id)(scope, receive, respond)
        finally:
            self._count(status)
            route = getattr(scope.get("route"), "path", None)
            logs.log(
                "request",
                method=scope["method"][:16],
                path=route or logs.safe_path(scope["path"]),
                status=status,
                ms=round((time.monotonic() - started) * 1000, 1),
                key_id=scope["state"].get("key_id"),
            )

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        check_headers(scope, headers)
        if not self._settings.allowed_hosts.allows(headers):
            raise _unknown_host(headers)
        scope["state"]["key_id"] = self._authorize(scope, headers)
        if re.search(r"[^/]/$", scope["path"]):  # ignore a trailing slash
            scope["path"] = scope["path"][:-1]
        origins = self._settings.allowed_origins
        await self._app(scope, await read_body(scope, receive, headers, origins), send)

    def _authorize(self, scope: Scope, headers: Headers) -> str:
        """Return the id of the API key, "public" or "open".

        Raises:
            HTTPProblem: 401 for a missing or wrong key, 429 if the rate limit is exceeded.
        """
        if scope["method"] in ("GET", "HEAD") and scope["path"] in PUBLIC:
            return "public"
        keys = self._settings.keys
        key_id = keys.allows(headers)
        if key_id is None:
            # Only wrong keys count as failures: the page sends requests before it has a key.
            if sent_key(headers) and (wait := self._failures.take()):
                raise HTTPProblem(429, "rate_limited", "too many wrong keys", retry_after=wait)
            raise HTTPProblem(401, "unauthorized", "a valid API key is required")
        limited = key_id if keys.required else None
        if self._settings.public:
            limited = client_address((scope["client"] or ("",))[0], headers)
        if limited is not None and (wait := self._rate(limited).take()):
            raise HTTPProblem(429, "rate_limited", "too many requests", retry_after=wait)
        return key_id


def add_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Wrap an application so that web pages from `origins` may use it, with a key but no cookies.

    `app` is the SecurityMiddleware, because preflight requests have no key. Any header is allowed,
    because OpenAI's client sends a dozen of its own (x-stainless-os, …).
    """
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["Retry-After", "X-Request-ID"],
    )


def _unknown_host(headers: Headers) -> HTTPProblem:
    """Return the 400 for an unknown Host. The message repeats the name only if it is harmless."""
    name = asked_host(headers)
    detail = "the host name in the Host header is not allowed"
    if name:
        detail += f"; if this name is yours, start the server with --allow-host {name}"
    return HTTPProblem(400, "bad_host", detail)


def check_headers(scope: Scope, headers: Headers) -> None:
    """Check the size of the headers, and that only one of them gives the length of the body.

    Raises:
        HTTPProblem: 431 for large headers, 400 for a body with two lengths (request smuggling).
    """
    size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in headers.raw)
    if size > MAX_HEADER_BYTES or len(headers.raw) > MAX_HEADERS:
        detail = f"the headers exceed {MAX_HEADER_BYTES} bytes or {MAX_HEADERS} lines"
        raise HTTPProblem(431, "headers_too_large", detail)
    if "transfer-encoding" in headers and "content-length" in headers:
        raise HTTPProblem(
            400, "bad_request", "send either Content-Length or Transfer-Encoding, not both"
        )


async def read_body(
    scope: Scope, receive: Receive, headers: Headers, allowed_origins: Sequence[str]
) -> Receive:
    """Read the whole body within the limits of size and time.

    A body that an allowed client sends as a form is treated as JSON if it begins with a brace. A
    form never begins with a brace.

    Returns:
        a `receive` callable that passes the whole body to the application at once.

    Raises:
        HTTPProblem: the body is encoded, too large or too slow.
    """
    if "content-encoding" in headers:
        raise HTTPProblem(415, "unsupported_media_type", "send the body without Content-Encoding")
    too_large = HTTPProblem(413, "body_too_large", f"the body exceeds {MAX_BODY} bytes")
    if int(headers.get("content-length", "0")) > MAX_BODY:  # h11 accepts only digits
        raise too_large
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > MAX_BODY:
                    raise too_large
    except TimeoutError:
        detail = f"the body did not arrive within {BODY_SECONDS:g} s"
        raise HTTPProblem(408, "request_timeout", detail) from None
    if body.lstrip()[:1] == b"{" and is_form_of_ours(headers, allowed_origins):
        MutableHeaders(scope=scope)["content-type"] = "application/json"
    messages = deque([{"type": "http.request", "body": bytes(body), "more_body": False}])

    async def replay() -> Message:
        return messages.popleft() if messages else await receive()  # then wait for a disconnect

    return replay
