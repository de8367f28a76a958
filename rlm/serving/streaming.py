"""An answer on its way to its client, whole or as a stream: disconnects, deadlines, silence."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rlm.serving.errors import Problem
from rlm.serving.service import Running, Service

PING_SECONDS = 15.0  # a comment on a silent stream, so that proxies keep it open


class ClientGone(Exception):
    """There is nobody to answer."""


async def until_done(service: Service, api: str, running: Running, request: Request) -> None:
    """Wait for a request to finish; leave it as soon as its client has gone.

    Raises:
        Problem: it failed, or its time is over.
        ClientGone: nobody waits for the answer.
    """
    done = asyncio.create_task(running.finish())
    gone = asyncio.create_task(_disconnect(request.receive))
    try:
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait((done, gone), timeout=service.limits.seconds, return_when=first)
        if gone.done() and not done.done():
            raise ClientGone
        if not done.done():
            running.news.put_nowait(_deadline(service))
        await done
    finally:
        done.cancel()
        gone.cancel()
        _leave(service, api, running)


class EventStream(Response):
    """Server-sent events of a running request. Its end, however it comes, frees the seat."""

    media_type = "text/event-stream"

    def __init__(
        self, service: Service, api: str, running: Running, events: AsyncIterator[bytes]
    ) -> None:
        self.background = None
        self.status_code = 200
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._service, self._api, self._running = service, api, running
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = asyncio.create_task(self._stream(send))
        gone = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait((stream, gone), return_when=asyncio.FIRST_COMPLETED)
            if stream.done():
                stream.result()
        finally:
            gone.cancel()
            stream.cancel()
            await asyncio.wait((stream, gone))
            _leave(self._service, self._api, self._running)

    async def _stream(self, send: Send) -> None:
        async def body(content: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": content, "more_body": more})

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._service.limits.seconds
        pending: asyncio.Future | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(self._events, None))
                wait = max(0.0, min(PING_SECONDS, deadline - clock()))
                await asyncio.wait((pending,), timeout=wait)
                if pending.done():
                    content, pending = pending.result(), None
                    if content is None:
                        break
                    await body(content)
                elif clock() >= deadline:
                    deadline = math.inf
                    self._running.news.put_nowait(_deadline(self._service))  # ends the events
                else:
                    await body(b": still here\n\n")
            await body(b"", more=False)
        finally:
            if pending is not None:
                pending.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _deadline(service: Service) -> Problem:
    return Problem(504, "deadline", f"not finished within {service.limits.seconds:g} seconds")


def _leave(service: Service, api: str, running: Running) -> None:
    service.release(running)
    job, metrics = running.job, service.metrics
    metrics.finished.labels(api, running.outcome).inc()
    if running.outcome == "finished":
        metrics.total.observe(time.monotonic() - job.created)
        metrics.first_token.observe(job.first_token - job.created)
        for row in job.thinking.rows:
            metrics.thinking.labels(row.status).inc()
