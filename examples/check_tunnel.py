"""What only the real ngrok can show, in about a minute: does the tunnel keep what we rely on?

    NGROK_AUTHTOKEN=… python examples/check_tunnel.py

Opens a tunnel as `server.py --ngrok` does, to a small server behind the same middleware, and asks
through the public URL. One line a check; exit code 1 if one fails, 2 if there is no tunnel.
It needs the agent (https://ngrok.com/download) and no model.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # when it is not installed

from rlm.cli import UsageError, flag, run_main, terminal
from rlm.serving import (
    UVICORN,
    AllowedHosts,
    Keys,
    SecurityMiddleware,
    SecuritySettings,
    Tunnel,
    TunnelError,
    new_key,
)

RATE = 40  # requests a minute that the edge shall let through; more than the other checks need
PAUSE, EVENTS = 0.3, 5  # seconds between the events of the stream, and their number


@dataclass(frozen=True)
class CheckConfig:
    url: str | None = flag(None, "a domain reserved at ngrok, such as https://mine.ngrok.app")


def small_app() -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, object]:
        return {
            "bytes": len(await request.body()),
            "forwarded_for": request.headers.get("x-forwarded-for"),
            "client": request.client.host,
        }

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            for number in range(EVENTS):
                yield f"data: {number}\n\n"
                await asyncio.sleep(PAUSE)

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


class Failed(Exception):
    """What was found instead."""


def expect(condition: bool, found: object) -> None:
    if not condition:
        raise Failed(found)


class Checks:
    """Each gives the text behind its line, or raises Failed."""

    def __init__(self, tunnel: Tunnel, key: str, client: httpx2.AsyncClient) -> None:
        self.tunnel = tunnel
        self.key = {"Authorization": f"Bearer {key}"}
        self.client = client

    async def https(self) -> str:
        expect(self.tunnel.public_url.startswith("https://"), self.tunnel.public_url)
        return self.tunnel.public_url

    async def reaches_us(self) -> str:
        answer = await self.client.get("/health", headers={"X-Request-ID": "check-tunnel"})
        expect(answer.status_code == 200, answer.status_code)
        expect(answer.headers.get("x-request-id") == "check-tunnel", "the answer is not ours")
        return "200, with our request id"

    async def key_needed(self) -> str:
        answer = await self.client.post("/echo", content=b"{}")
        expect(answer.status_code == 401, answer.status_code)
        return "401"

    async def key_accepted(self) -> str:
        own = {"X-API-Key": self.key["Authorization"].removeprefix("Bearer ")}
        for headers in (self.key, own):
            answer = await self.client.post("/echo", content=b"{}", headers=headers)
            expect(answer.status_code == 200, answer.status_code)
        return "200, by either header"

    async def whole_body(self) -> str:
        answer = await self.client.post("/echo", content=b"a" * 60_000, headers=self.key)
        expect(answer.json()["bytes"] == 60_000, answer.text)
        return "60,000 bytes"

    async def address(self) -> str:
        made_up = {"X-Forwarded-For": "192.0.2.1"}
        answer = (await self.client.post("/echo", content=b"", headers=self.key | made_up)).json()
        expect(answer["client"] == "127.0.0.1", answer)
        return f"X-Forwarded-For arrives as {answer['forwarded_for']}, and counts for nothing"

    async def streams(self) -> str:
        arrivals = []
        async with self.client.stream("GET", "/stream", headers=self.key) as answer:
            async for _ in answer.aiter_bytes():
                arrivals.append(time.monotonic())
        spread = arrivals[-1] - arrivals[0]
        expect(spread > PAUSE * (EVENTS - 1) / 2, f"all within {spread:.2f} s: it is buffered")
        return f"{EVENTS} events over {spread:.1f} s"

    async def token_hidden(self) -> str:
        for process in psutil.Process().children(recursive=True):
            expect(os.environ["NGROK_AUTHTOKEN"] not in " ".join(process.cmdline()), "it is there")
        return "not on the agent's command line"

    async def nothing_kept(self) -> str:
        async with httpx2.AsyncClient() as local:
            answer = (await local.get(f"{self.tunnel.agent_url}/api/requests/http")).json()
        kept = answer["requests"] or []
        expect(not kept, f"{len(kept)} requests, with their keys")
        return "the agent keeps no requests"

    async def edge_limit(self) -> str:
        for number in range(1, RATE + 21):
            answer = await self.client.get("/health")
            if answer.status_code == 429 and "x-request-id" not in answer.headers:
                return f"429 from the edge after {number} more requests"
        raise Failed(f"{RATE + 20} requests went through, {RATE} a minute are allowed")

    async def closed(self) -> str:
        await self.tunnel.close()
        try:
            answer = await self.client.get("/health")
        except httpx2.TransportError as error:
            return type(error).__name__
        expect("x-request-id" not in answer.headers, "the URL still leads here")
        return f"{answer.status_code}, not from us"


async def check(config: CheckConfig) -> int:
    key, hosts = new_key(), AllowedHosts()
    listener = socket.create_server(("127.0.0.1", 0))
    app = SecurityMiddleware(small_app(), SecuritySettings(Keys([key]), hosts))
    server = uvicorn.Server(uvicorn.Config(app, **UVICORN, lifespan="off"))
    serving = asyncio.create_task(server.serve([listener]))
    port = listener.getsockname()[1]
    try:
        tunnel = await Tunnel.open(
            f"http://127.0.0.1:{port}", hosts, url=config.url, requests_per_minute=RATE
        )
        try:
            async with httpx2.AsyncClient(base_url=tunnel.public_url, timeout=30) as client:
                return await run_all(Checks(tunnel, key, client))
        finally:
            await tunnel.close()
    except TunnelError as error:
        raise UsageError(str(error)) from error
    finally:
        server.should_exit = True
        await serving


async def run_all(checks: Checks) -> int:
    names: dict[str, Callable[[], Awaitable[str]]] = {
        "the URL is https": checks.https,
        "a request reaches this server": checks.reaches_us,
        "without a key": checks.key_needed,
        "with the key": checks.key_accepted,
        "a large body": checks.whole_body,
        "a made-up address": checks.address,
        "a stream is not held back": checks.streams,
        "the token": checks.token_hidden,
        "the agent's inspector": checks.nothing_kept,
        "the rate limit at the edge": checks.edge_limit,
        "after closing": checks.closed,
    }
    failures = 0
    for name, run in names.items():
        try:
            verdict, text = "ok", await run()
        except (Failed, httpx2.HTTPError, ValueError, KeyError) as error:
            verdict, text = "FAILED", str(error) or type(error).__name__
            failures += 1
        terminal.line(f"{verdict:<7} {name}: {text}")
    return 1 if failures else 0


if __name__ == "__main__":
    run_main(lambda config: asyncio.run(check(config)), CheckConfig, description=__doc__)
