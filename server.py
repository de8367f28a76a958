"""Serve the trained model: `POST /phase1/reasoning`, OpenAI's protocol on /v1, and a page.

    python server.py                        # http://127.0.0.1:8000, for this machine only
    python server.py --ngrok                # and a public URL (NGROK_AUTHTOKEN); a key is made
    RLM_API_KEY=… python server.py --host 0.0.0.0 --allow-host my.machine
    python server.py --adapters weights     # every adapter in the folder, chosen per request

    curl -s http://127.0.0.1:8000/phase1/reasoning -H 'Content-Type: application/json' \\
         -d '{"prompt": "Each box holds 6 eggs. How many eggs do 4 boxes hold?"}'

Ctrl-C (or SIGTERM) lets what is running finish; a second one does not wait.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import json
import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlm.cli import terminal
from rlm.cli.main import run_main
from rlm.cli.options import UsageError, check_values, flag
from rlm.model.quantize import QUANTIZATIONS
from rlm.runs.atomic_files import replace_file

if TYPE_CHECKING:
    from rlm.serving.access import AllowedHosts, Keys
    from rlm.serving.service import Service
    from rlm.serving.shutdown import GracefulServer
    from rlm.serving.tunnel import Tunnel

ADAPTER = Path("weights/final_rlm_lora")
ENDPOINT = Path("runs/server/endpoint.json")
DRAIN_SECONDS = 25.0  # what runs may finish in


@dataclass(frozen=True)
class ServerConfig:
    adapter: Path = flag(ADAPTER, "adapter that answers by default")
    adapters: Path | None = flag(None, "folder of more adapters, chosen per request by name")
    base: bool = flag(False, "answer with the base model, without an adapter")
    model: str | None = flag(None, "base model (none: the one the adapter was trained on)")
    quantize: str = flag(
        "auto",
        "quantize the base (bitsandbytes) (auto: as in training)",
        choices=("auto", *QUANTIZATIONS),
    )
    host: str = flag("127.0.0.1", "address to listen on; any but this machine's needs a key")
    port: int = flag(8000, "port to listen on; 0 takes a free one", min=0, max=65535)
    allow_host: tuple[str, ...] = flag((), "names of this server that clients may ask for")
    key_file: Path | None = flag(None, "file of API keys, one a line (or RLM_API_KEY is set)")
    requests_per_minute: int = flag(120, "for each key", min=1)
    max_num_seqs: int = flag(16, "completions drawn at the same time", old=["seats"], min=1)
    max_new_tokens: int = flag(512, "longest completion that may be asked for", min=1)
    max_prompt_tokens: int = flag(512, "longest prompt, system prompt included", min=1)
    queue: int = flag(64, "requests accepted and not yet answered", min=1)
    deadline: float = flag(120.0, "seconds a request may take", above=0)
    ngrok: bool = flag(False, "open a public URL through ngrok")
    ngrok_url: str | None = flag(None, "a domain reserved at ngrok")

    def __post_init__(self) -> None:
        check_values(self)


def main(config: ServerConfig) -> int:
    from rlm.model.hardware import prepare_process
    from rlm.serving import logging as logs
    from rlm.serving.access import Keys as KeySet
    from rlm.serving.access import is_loopback, load_keys, new_key

    keys = load_keys(os.environ, config.key_file)
    if not is_loopback(config.host) and not keys.required:
        raise UsageError(
            f"--host {config.host} opens the server to others: set RLM_API_KEY or --key-file first"
        )
    if config.ngrok and not keys.required:
        key = new_key()
        keys = KeySet([key])
        terminal.line(f"API key for this run, shown once: {key}")
    listening = _listen(config.host, config.port)
    prepare_process()
    logs.configure(sys.stderr)
    service = _service(config)
    return asyncio.run(_serve(config, service, keys, listening))


def _listen(host: str, port: int) -> socket.socket:
    """The socket, before anything slow happens: a port in use should be said at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()  # only now would another server be told that the port is taken
    except OSError as error:
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listening


def _service(config: ServerConfig) -> Service:
    """The engine that will load the model, and what stands before it."""
    from functools import partial

    from rlm.model.base import load_tokenizer
    from rlm.serving.catalog import find_adapters
    from rlm.serving.engine import Engine
    from rlm.serving.metrics import Metrics
    from rlm.serving.replicas import load_replicas
    from rlm.serving.service import Limits, Service

    catalog = find_adapters(
        config.adapter, config.adapters, config.model, config.quantize, base=config.base
    )
    tokenizer = load_tokenizer(catalog.model)
    engine = Engine(
        partial(load_replicas, catalog, tokenizer, config.max_num_seqs),
        prompt_tokens=config.max_prompt_tokens,
        new_tokens=config.max_new_tokens,
    )
    limits = Limits(
        prompt_tokens=config.max_prompt_tokens,
        new_tokens=config.max_new_tokens,
        requests=config.queue,
        tokens=config.queue * (config.max_prompt_tokens + config.max_new_tokens),
        seconds=config.deadline,
    )
    return Service(engine, tokenizer, catalog, limits, Metrics(engine))


async def _serve(
    config: ServerConfig, service: Service, keys: Keys, listening: socket.socket
) -> int:
    """Run until a signal or the engine's death; the exit code."""
    import uvicorn

    from rlm.serving.access import AllowedHosts
    from rlm.serving.app import create_app
    from rlm.serving.http_guard import UVICORN
    from rlm.serving.middleware import SecuritySettings, secure
    from rlm.serving.shutdown import GracefulServer

    everywhere = config.host in ("0.0.0.0", "::")
    names = {"localhost", "127.0.0.1", "::1", *config.allow_host}
    hosts = AllowedHosts(names if everywhere else names | {config.host}, numeric=everywhere)
    settings = SecuritySettings(
        keys=keys, allowed_hosts=hosts, requests_per_minute=config.requests_per_minute
    )
    app = secure(create_app(service, needs_key=keys.required), settings)
    options = uvicorn.Config(app, lifespan="on", timeout_graceful_shutdown=5, **UVICORN)
    server = GracefulServer(options, service, DRAIN_SECONDS)
    attendant = asyncio.create_task(_attend(config, service, server, hosts, listening))

    def end(_: asyncio.Task[None]) -> None:  # with the attendant: nobody would watch the engine
        server.should_exit = True

    attendant.add_done_callback(end)
    await server.serve(sockets=[listening])
    attendant.cancel()
    with suppress(asyncio.CancelledError):
        await attendant
    if service.engine.state != "dead":
        return 0
    if isinstance(service.engine.error, UsageError):
        raise service.engine.error
    return 1


async def _attend(
    config: ServerConfig,
    service: Service,
    server: GracefulServer,
    hosts: AllowedHosts,
    listening: socket.socket,
) -> None:
    """Say when it is ready, keep the tunnel, and end the server when the engine is dead."""
    while service.engine.state == "loading":
        await asyncio.sleep(0.1)
    if service.engine.state == "dead":
        server.should_exit = True
        return
    # What is loaded stays: the collector need not look through it, and then looks more often
    # through what requests leave behind (it waits until that is a quarter of what there is).
    gc.collect()
    gc.freeze()
    port = listening.getsockname()[1]
    shown = f"[{config.host}]" if ":" in config.host else config.host
    terminal.line(f"ready: http://{shown}:{port}  ({service.catalog.default})")
    tunnel = None
    if config.ngrok:
        _write_endpoint(None)  # that of a server which was killed
        tunnel = await _open_tunnel(config, hosts, _url_here(listening))
    try:
        while True:
            if tunnel is not None and tunnel.public_url != service.public_url:
                service.public_url = tunnel.public_url
                terminal.line(f"public: {tunnel.public_url or 'the tunnel is closed'}")
                _write_endpoint(tunnel.public_url)
            if service.engine.state == "dead":
                terminal.line("the engine has died twice; the log says of what")
                server.should_exit = True
            await asyncio.sleep(0.2)
    finally:
        if tunnel is not None:
            await tunnel.close()
            _write_endpoint(None)


def _url_here(listening: socket.socket) -> str:
    """Where programs of this machine reach the socket: another one may have the same port on
    another of its addresses, and a tunnel must not lead there."""
    host, port = listening.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://{address if address.version == 4 else f'[{address}]'}:{port}"


async def _open_tunnel(config: ServerConfig, hosts: AllowedHosts, upstream: str) -> Tunnel | None:
    """The tunnel, or a line that says why there is none: the local server goes on."""
    from rlm.serving.tunnel import Tunnel, TunnelError

    try:
        return await Tunnel.open(upstream, hosts, url=config.ngrok_url)
    except TunnelError as error:
        terminal.line(f"{error}\nno public URL; the local server goes on")
        return None


def _write_endpoint(url: str | None) -> None:
    """For programs: where the server can be reached from outside, while it can."""
    try:
        if url is None:
            ENDPOINT.unlink(missing_ok=True)
            return
        replace_file(ENDPOINT, json.dumps({"url": url, "path": "/phase1/reasoning"}) + "\n")
    except OSError as error:  # a read-only disk, another's folder: the URL works all the same
        terminal.line(f"cannot write {ENDPOINT}: {error.strerror}")


if __name__ == "__main__":
    run_main(main, ServerConfig, description=__doc__)
