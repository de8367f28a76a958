"""A real server on loopback with a scripted sampler; uvicorn runs in a thread of the test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from conftest import tiny_model
from scripted_sampler import Script, ScriptedSampler

from rlm.data.prompts import FORMATS
from rlm.model import AdapterInfo
from rlm.serving.access import AllowedHosts, Keys
from rlm.serving.app import create_app
from rlm.serving.engine import Engine, Limits
from rlm.serving.http_server import GracefulServer, listen, local_url
from rlm.serving.middleware import SecuritySettings
from rlm.serving.models import AdapterSampler, ServedAdapter, ServedModels, prompt_prefix
from rlm.serving.service import Service
from rlm.tools import Tool

FORMAT = FORMATS["deepseek"]
ADD = "<think>\n2 + 3 = 5\n</think>\n<answer>5</answer>"
LIMITS = Limits(prompt_tokens=500, new_tokens=300, requests=16, tokens=20_000, seconds=30)


def make_service(
    tokenizer,
    script: Script,
    *,
    limits: Limits = LIMITS,
    max_num_seqs: int = 4,
    pause: float = 0.0,
    tool: Tool | None = None,
) -> tuple[Service, ScriptedSampler]:
    """Make a service with the adapters `tuned` (scripted) and `base` (which always answers 0)."""
    prefix = prompt_prefix(tokenizer, FORMAT)
    samplers = {
        "tuned": ScriptedSampler(
            tiny_model(), tokenizer, script, max_num_seqs=max_num_seqs, pause=pause
        ),
        "base": ScriptedSampler(
            tiny_model(), tokenizer, {"": "0"}, max_num_seqs=max_num_seqs, pause=pause
        ),
    }
    served = {name: AdapterSampler(one, lambda: None, prefix) for name, one in samplers.items()}
    engine = Engine(lambda: served, limits)
    adapters = {
        "base": ServedAdapter("base", AdapterInfo(Path("base"), stage="base")),
        "tuned": ServedAdapter("tuned", AdapterInfo(Path("tuned"), stage="grpo"), "ab" * 32, tool),
    }
    models = ServedModels("tiny", "sha256:0", "none", adapters, "tuned")
    return Service(engine, tokenizer, models, limits), samplers["tuned"]


@dataclass
class Live:
    url: str
    service: Service
    server: GracefulServer
    thread: threading.Thread

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, **options) -> httpx2.Client:
        # There is no TLS, because loading certificates takes a tenth of a second.
        return httpx2.Client(base_url=self.url, timeout=30, verify=False, **options)

    def post(self, body: dict, path: str = "/phase1/reasoning", **options) -> httpx2.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def get(self, path: str) -> httpx2.Response:
        with self.client() as client:
            return client.get(path)


@contextmanager
def live(
    service: Service, keys: Keys | None = None, drain_seconds: float = 5.0, **security: object
):
    """Run the service with its middleware on a free port."""
    keys = keys or Keys([])
    hosts = AllowedHosts({"127.0.0.1"})
    settings = SecuritySettings(keys=keys, allowed_hosts=hosts, **security)
    server = GracefulServer(create_app(service, settings), service, drain_seconds)
    listening = listen("127.0.0.1", 0)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True
    )
    thread.start()
    wait_until(lambda: server.started and service.engine.state != "loading")
    try:
        yield Live(local_url(listening), service, server, thread)
    finally:
        server.should_exit = True
        thread.join(15)
        assert not thread.is_alive()


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def events(text: str) -> list[tuple[str, str]]:
    """Return the (event, data) pairs of a stream, without its comments."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(
            line.split(": ", 1) for line in block.splitlines() if line[:1] not in ("", ":")
        )
        if lines:
            found.append((lines.get("event", ""), lines["data"]))
    return found
