"""Send a response, complete or as server-sent events, and detect disconnects."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rlm.serving.engine import RunningRequest
from rlm.serving.service import Service

SEND_SECONDS = 5.0  # time after the deadline in which a client can receive the end of its stream
COMMENT = b": still here\n\n"  # sent on a silent stream, so that proxies keep it open


def event_stream(*names: str) -> dict[str, Any]:
    """Return the OpenAPI description of a stream of server-sent events with these names."""
    data = {"type": "string", "description": "JSON"}
    event = {"event": {"type": "string", "enum": list(names)}} if names else {}
    item = {"type": "object", "properties": event | {"data": data}, "required": [*event, "data"]}
    return {"text/event-stream": {"itemSchema": item}}


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Format a server-sent event. One data line suffices: `json.dumps` writes no line breaks."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


async def until_done(service: Service, running: RunningRequest, request: Request) -> None:
    """Wait until a request finishes or its client disconnects; then release the request.

    Raises:
        HTTPProblem: the request failed or its deadline passed.
        ClientDisconnect: the client disconnected.
    """
    done = asyncio.create_task(running.wait())
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        await done
    finally:
        done.cancel()
        gone.cancel()
        service.release(running)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """The server-sent events of a running request, which is released when the stream ends.

    SEND_SECONDS after the deadline, the stream of a client that has stopped reading ends too.
    uvicorn then closes its connection as soon as the client has read what was already written.
    """

    media_type = "text/event-stream"

    def __init__(
        self, service: Service, running: RunningRequest, events: AsyncIterator[bytes]
    ) -> None:
        super().__init__(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._service, self._running = service, running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seconds = self._running.deadline + SEND_SECONDS - time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                await super().__call__(scope, receive, send)
        except TimeoutError:  # sending waits for a client that does not read
            self._running.outcome = "deadline"
        finally:
            self._service.release(self._running)
