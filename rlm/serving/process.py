"""Run a server in a child process for the duration of a context."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

from rlm.cli import UsageError

START_SECONDS = 180  # maximum time until the server is ready
END_SECONDS = 30  # time between SIGTERM and SIGKILL


@contextmanager
def server_process(
    command: Sequence[str],
    *,
    ready: str = "/ready",
    log: Path | None = None,
    environment: Mapping[str, str] = {},
) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run `python COMMAND --port N` on a free port; yield the URL and the process.

    RLM_API_KEY is removed from the environment of the process, because the server serves only this
    machine.

    Args:
        ready: a path that returns status 200 when the server is ready.
        log: file for the output of the process (None: the output is discarded).
        environment: additional environment variables.

    Raises:
        UsageError: the process exited, or it was not ready in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    inherited = {name: value for name, value in os.environ.items() if name != "RLM_API_KEY"}
    with (log or Path(os.devnull)).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command, "--port", str(port)],
            env={**inherited, **environment},
            stdout=output,
            stderr=output,
        )
    try:
        _wait_until_ready(process, url + ready, log)
        yield url, process
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen, url: str, log: Path | None) -> None:
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            if httpx2.get(url, timeout=2, trust_env=False).status_code == 200:
                return
        except httpx2.TransportError:
            pass  # not listening yet
        time.sleep(0.3)
    raise UsageError(f"the server did not start{f'; see {log}' if log else ''}")
