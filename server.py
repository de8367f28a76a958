"""Serves the trained model over HTTP, with `POST /phase1/reasoning`, OpenAI's API and a web page.

    python server.py                        # http://127.0.0.1:8000, for this machine only
    python server.py --ngrok                # with a public URL (needs NGROK_AUTHTOKEN) and a key
    python server.py --ngrok --public       # with a public URL and no key
    RLM_API_KEY=… python server.py --host 0.0.0.0 --allow-host my.machine
    python server.py --adapters weights     # all adapters in the folder; each request names one

    curl -s http://127.0.0.1:8000/phase1/reasoning -H 'Content-Type: application/json' \\
         -d '{"prompt": "Each box holds 6 eggs. How many eggs do 4 boxes hold?"}'

Ctrl-C (or SIGTERM) stops the server after running requests have finished, or after 25 s; a second
Ctrl-C stops it at once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlm.cli import UsageError, check_values, flag, run_main, terminal
from rlm.data import NEAREST, load_experiences
from rlm.model import ADAPTER, QUANTIZATIONS, check_adapter
from rlm.reasoner import TRAIN_OR_BASE

if TYPE_CHECKING:
    from rlm.data import Experience
    from rlm.serving import AllowedHosts, Keys, Service

DRAIN_SECONDS = 25.0  # maximum time to wait for running requests at shutdown
# Limits with --public: requests per minute for each address, and tokens for each request (or
# --max-new-tokens, if that is larger).
PUBLIC_REQUESTS, PUBLIC_TOKENS = 20, 1024
REQUESTS = 120  # requests per minute for each key


@dataclass(frozen=True)
class ServerConfig:
    CHANGED_FIRST = (
        *("adapter", "adapters", "base", "host", "port", "key_file"),
        *("ngrok", "public", "max_new_tokens", "max_num_seqs"),
    )

    adapter: Path = flag(ADAPTER, "adapter for requests that do not name an adapter")
    adapters: Path | None = flag(None, "folder of further adapters that requests can name")
    base: bool = flag(False, "use the base model without an adapter")
    model: str | None = flag(
        None,
        "base model: hub id, folder, or smollm2-135m",
        default_text="base model of the adapter",
    )
    quantize: str = flag(
        "auto",
        "load the base model quantized with bitsandbytes; auto: as in training",
        choices=("auto", *QUANTIZATIONS),
    )
    tool: str = flag(
        "auto",
        "tool that writes into completions: calculator, FILE.py:NAME or none; auto: as in training",
    )
    experiences: Path | None = flag(
        None, "library of lessons; the most similar lessons are added to each prompt"
    )
    nearest: int = flag(NEAREST, "maximum number of lessons from --experiences in a prompt", min=1)
    host: str = flag(
        "127.0.0.1", "address to listen on; addresses that other machines can reach require a key"
    )
    port: int = flag(8000, "port to listen on; 0 selects a free port", min=0, max=65535)
    allow_host: tuple[str, ...] = flag(
        (), "additional host names of this server, e.g. that of a proxy"
    )
    key_file: Path | None = flag(
        None, "file with API keys, one per line", default_text="RLM_API_KEY, else no key"
    )
    allow_origin: tuple[str, ...] = flag(
        (), "origins of other web pages that may use the server (CORS), e.g. https://my.app"
    )
    requests_per_minute: int | None = flag(
        None,
        "rate limit: requests per minute for each key, or for each address with --public",
        min=1,
        default_text=f"{REQUESTS}, or {PUBLIC_REQUESTS} with --public",
    )
    max_num_seqs: int = flag(
        16, "maximum number of completions that each adapter generates at the same time", min=1
    )
    max_new_tokens: int = flag(
        512, "maximum completion length in tokens that a request may set", min=1
    )
    max_prompt_tokens: int = flag(
        512, "maximum prompt length in tokens, including the system prompt", min=1
    )
    queue: int = flag(
        64, "maximum number of unfinished requests; further requests are rejected", min=1
    )
    deadline: float = flag(120.0, "time limit of a request in seconds", above=0)
    log_json: bool = flag(False, "write the log as JSON even on a terminal")
    ngrok: bool = flag(False, "open a public URL through ngrok")
    ngrok_url: str | None = flag(
        None, "your reserved domain at ngrok", default_text="a random domain"
    )
    public: bool = flag(False, "allow requests without a key at the public URL, within limits")

    def __post_init__(self) -> None:
        check_values(self)
        if self.public and not (self.ngrok or self.allow_host):
            raise ValueError(
                "--public needs a tunnel: add --ngrok, or --allow-host NAME for your own tunnel"
            )
        if self.ngrok_url and not self.ngrok:
            raise ValueError("--ngrok-url needs --ngrok, which opens the public URL")

    @property
    def rate(self) -> int:
        return self.requests_per_minute or (PUBLIC_REQUESTS if self.public else REQUESTS)


def main(config: ServerConfig) -> int:
    if not config.base:
        check_adapter(config.adapter, TRAIN_OR_BASE)
    if config.adapters and not config.adapters.is_dir():
        raise UsageError(f"--adapters {config.adapters}: no such directory")
    keys = read_keys(config)
    library = load_experiences(config.experiences) if config.experiences else ()
    what, shown = "the base model" if config.base else config.adapter, _address(config.host)
    where = f" for http://{shown}:{config.port}" if config.port else ""
    terminal.line(f"loading {what}{where} …")  # importing the libraries takes seconds
    from rlm.model import prepare_process
    from rlm.serving import listen
    from rlm.serving import logging as logs

    listening = listen(config.host, config.port)
    prepare_process()
    logs.configure(sys.stderr, as_json=config.log_json)
    service = _service(config, library)
    code = asyncio.run(_serve(config, service, keys, listening))
    if service.has_threads:  # they may return from C code during a normal exit, which aborts Python
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def read_keys(config: ServerConfig) -> Keys:
    """Return the API keys, and print a notice if the server may be used without a key.

    Raises:
        UsageError: the options contradict each other, or would allow requests from other machines
            without a key.
    """
    from rlm.serving import Keys, is_loopback, load_keys

    keys = load_keys(os.environ, config.key_file)
    if config.public and (keys.required or not is_loopback(config.host)):
        why = "RLM_API_KEY and --key-file" if keys.required else f"--host {config.host}"
        raise UsageError(
            f"--public serves requests without a key, through a tunnel: leave out {why}"
        )
    if not is_loopback(config.host) and not keys.required:
        raise UsageError(
            f"--host {config.host} opens the server to others: set RLM_API_KEY or --key-file first"
        )
    if config.ngrok and not config.public and not keys.required:
        key = secrets.token_urlsafe(32)
        keys = Keys([key])
        terminal.line(f"API key for this run, shown once: {key}")
    if config.public or (config.allow_host and not keys.required):
        limits = f"with {config.rate} requests a minute for each address"
        limits += f" and {_request_tokens(config)} tokens for each request"
        without = (
            "and without limits (set RLM_API_KEY to require a key, or add --public for limits)"
        )
        terminal.line(
            "open: anyone who knows this server's public name may use it, without a key, "
            f"{limits if config.public else without}"
        )
    return keys


def _address(host: str) -> str:
    """Format a host for a URL."""
    return f"[{host}]" if ":" in host else host


def _service(config: ServerConfig, library: Sequence[Experience]) -> Service:
    """Make the service and its engine; the engine loads the model in its own thread."""
    from rlm.model import load_tokenizer
    from rlm.serving import Engine, Limits, Service, find_models, load_samplers

    choice = (config.adapter, config.adapters, config.model, config.quantize)
    models = find_models(*choice, base=config.base, tool=config.tool)
    tokenizer = load_tokenizer(models.base_model)
    limits = Limits(
        prompt_tokens=config.max_prompt_tokens,
        new_tokens=config.max_new_tokens,
        requests=config.queue,
        tokens=config.queue * (config.max_prompt_tokens + config.max_new_tokens),
        seconds=config.deadline,
        request_tokens=_request_tokens(config),
    )
    engine = Engine(partial(load_samplers, models, tokenizer, config.max_num_seqs), limits)
    return Service(engine, tokenizer, models, limits, library, config.nearest)


def _request_tokens(config: ServerConfig) -> int | None:
    return max(PUBLIC_TOKENS, config.max_new_tokens) if config.public else None


async def _serve(
    config: ServerConfig, service: Service, keys: Keys, listening: socket.socket
) -> int:
    """Serve until a signal is received or the engine stops, and return the exit code."""
    from rlm.serving import (
        AllowedHosts,
        GracefulServer,
        SecuritySettings,
        create_app,
        read_origins,
    )

    everywhere = config.host in ("0.0.0.0", "::")
    names = {"localhost", "127.0.0.1", "::1", *config.allow_host}
    hosts = AllowedHosts(names if everywhere else names | {config.host}, numeric=everywhere)
    settings = SecuritySettings(
        keys=keys,
        allowed_hosts=hosts,
        requests_per_minute=config.rate,
        public=config.public,
        allowed_origins=read_origins(config.allow_origin),
    )
    server = GracefulServer(create_app(service, settings), service, DRAIN_SECONDS)
    watching = asyncio.create_task(_watch(config, service, hosts, listening))
    # The server has to stop when this task ends, because nothing else monitors the engine.
    watching.add_done_callback(lambda _: setattr(server, "should_exit", True))
    await server.serve(sockets=[listening])
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    if service.engine.state != "dead":
        return 0
    if isinstance(service.engine.load_error, UsageError):
        raise service.engine.load_error
    terminal.line("the engine stopped with an error; see the log")
    return 1


async def _watch(
    config: ServerConfig, service: Service, hosts: AllowedHosts, listening: socket.socket
) -> None:
    """Print a line when the model is ready, and keep the tunnel open until the engine stops."""
    from rlm.serving import Tunnel, TunnelError, local_url

    tunnel = None
    try:
        while service.engine.state == "loading":
            await asyncio.sleep(0.1)
        if service.engine.state == "dead":
            return
        # The loaded objects are never freed, so the garbage collector need not visit them. A full
        # collection starts when the new objects are a quarter of all tracked objects. Without the
        # loaded objects this threshold is lower, so the objects of requests are freed earlier.
        gc.collect()
        gc.freeze()
        port = listening.getsockname()[1]
        terminal.line(f"ready: http://{_address(config.host)}:{port}  ({service.models.default})")
        if note := service.engine.sampler.batch_note:
            terminal.line(note)
        if config.ngrok:
            try:
                tunnel = await Tunnel.open(
                    local_url(listening),
                    hosts,
                    url=config.ngrok_url,
                    requests_per_minute=max(60, config.rate if config.public else 0),
                )
                service.public_url = tunnel.public_url
                terminal.line(f"public: {tunnel.public_url}")
            except TunnelError as error:
                terminal.line(f"{error}\nno public URL; the local server continues")
        while service.engine.state != "dead":
            if tunnel and not tunnel.is_up:
                dead, tunnel, service.public_url = tunnel, None, None
                await dead.close()
                terminal.line("public: the tunnel is closed")
            await asyncio.sleep(0.2)
    finally:
        if tunnel is not None:
            await tunnel.close()


if __name__ == "__main__":
    run_main(main, ServerConfig, description=__doc__)
