"""Open a public URL through ngrok (pyngrok) within a time limit, and close it again.

The server also works without a tunnel, so every failure raises a TunnelError with a one-line
message, and the server continues.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from pyngrok import conf, ngrok
from pyngrok.exception import PyngrokError, PyngrokNgrokError
from pyngrok.process import NgrokProcess

from rlm.serving import logging as logs
from rlm.serving.access import AllowedHosts

OPEN_SECONDS = 20.0  # time limit for opening a tunnel
# The agent's own web page would show requests, with keys and prompts, to every local user.
_AGENT_CONFIG = "version: 3\nagent:\n  inspect_db_size: -1\n  update_check: false\n"


class TunnelError(Exception):
    """The public URL cannot be opened. The message is one line with the cause and a remedy."""


class Tunnel:
    """An open tunnel."""

    def __init__(self, agent: NgrokProcess, public_url: str, hosts: AllowedHosts) -> None:
        self._agent, self.public_url = agent, public_url
        host = urlsplit(public_url).hostname or ""
        self._hosts, self._added = hosts, {host} - hosts  # close() removes only an added host
        hosts.add(host)

    @classmethod
    async def open(
        cls,
        upstream: str,
        hosts: AllowedHosts,
        *,
        url: str | None = None,
        requests_per_minute: int = 60,
    ) -> Tunnel:
        """Open a tunnel to a local URL. The public host is in `hosts` while the tunnel is open.

        The agent reads the token from the environment variable NGROK_AUTHTOKEN, because every local
        user can read the command line.

        Args:
            upstream: the local URL.
            url: a domain reserved at ngrok; None: ngrok selects a domain.
            requests_per_minute: rate limit per client address, enforced by ngrok.

        Raises:
            TunnelError: the tunnel cannot be opened.
        """
        agent_log = logging.getLogger("pyngrok")  # repeats the output of the agent
        agent_log.propagate = False
        agent_log.addHandler(logging.NullHandler())  # without a handler, Python prints warnings
        if not os.environ.get("NGROK_AUTHTOKEN", "").strip():
            where = "https://dashboard.ngrok.com/get-started/your-authtoken"
            raise TunnelError(f"ngrok: NGROK_AUTHTOKEN is not set; get your token at {where}")
        options = {"upstream": {"url": upstream}, "traffic_policy": policy(requests_per_minute)}
        if url:
            options["url"] = url
        with tempfile.TemporaryDirectory() as folder:  # the agent reads the file only at its start
            path = Path(folder, "ngrok.yml")
            path.write_text(_AGENT_CONFIG)
            config = conf.PyngrokConfig(
                ngrok_path=str(find_agent(os.environ)),
                config_path=str(path),
                start_new_session=True,  # Ctrl-C must not end the agent before the server
                # Shorter than our own limit, so that pyngrok times out first: its error contains
                # the agent's message.
                startup_timeout=int(0.75 * OPEN_SECONDS),
            )
            config.auth_token = None  # pyngrok would put it on the command line
            tunnel = cls(*await _connect(config, options), hosts)
        logs.log("tunnel_opened", url=tunnel.public_url)
        return tunnel

    @property
    def is_up(self) -> bool:
        return self._agent.proc.poll() is None

    async def close(self) -> None:
        """Stop the agent, which closes the public URL."""
        self._hosts -= self._added
        exit_code = self._agent.proc.poll()
        await asyncio.to_thread(ngrok.kill, self._agent.pyngrok_config)
        if exit_code is None:
            logs.log("tunnel_closed")
        else:
            logs.log("tunnel_died", exit_code=exit_code)


def policy(requests_per_minute: int) -> dict[str, Any]:
    """Return an ngrok traffic policy that rejects requests above the rate limit at ngrok."""
    limit = {
        "name": "requests per client",
        "algorithm": "sliding_window",
        "capacity": requests_per_minute,
        "rate": "60s",
        "bucket_key": ["conn.client_ip"],
    }
    return {"on_http_request": [{"actions": [{"type": "rate-limit", "config": limit}]}]}


def find_agent(env: Mapping[str, str]) -> Path:
    """Find the ngrok binary at PYNGROK_NGROK_PATH, in pyngrok's folder or in PATH.

    The binary is not downloaded, because no checksum is available to verify it.

    Raises:
        TunnelError: the binary was not found.
    """
    named = env.get("PYNGROK_NGROK_PATH")
    folders = [] if named else env.get("PATH", "").split(os.pathsep)
    for place in [named or conf.DEFAULT_NGROK_PATH, *(f"{folder}/ngrok" for folder in folders)]:
        program = shutil.which(place)
        # Skip pyngrok's script of the same name, which would download the agent.
        if program and (named or not Path(program).read_bytes().startswith(b"#!")):
            return Path(program)
    raise TunnelError(
        f"ngrok: no agent at {named or 'any of the usual places'}; install it "
        "(https://ngrok.com/download), or set PYNGROK_NGROK_PATH"
    )


async def _connect(config: conf.PyngrokConfig, options: dict[str, Any]) -> tuple[NgrokProcess, str]:
    """Start the agent and return it with the public URL, within a time limit.

    pyngrok checks its own time limit only when the agent writes a line.
    """

    def connect() -> tuple[NgrokProcess, str]:
        agent = ngrok.get_ngrok_process(config)
        # pyngrok raises an error if there is no URL
        return agent, str(ngrok.connect(pyngrok_config=config, **options).public_url)

    opening = asyncio.create_task(asyncio.to_thread(connect))
    try:
        await asyncio.wait({opening}, timeout=OPEN_SECONDS)
        if not opening.done():
            why = f"the agent was not ready after {OPEN_SECONDS:g} s; is ngrok.com reachable?"
            raise TunnelError(f"ngrok: {why}")
        return opening.result()
    except (PyngrokError, OSError, ValueError, HTTPException) as error:
        raise TunnelError(f"ngrok: {_one_line(error)}") from None
    finally:
        if not opening.done() or opening.exception():
            await _abandon(opening, config)


async def _abandon(opening: asyncio.Task[Any], config: conf.PyngrokConfig) -> None:
    """Stop the agent of a failed or hanging connect(), so that the thread of connect() ends.

    While the agent starts, ngrok.kill() would wait for it.
    """
    for _ in range(100):  # connect() may be about to start the agent
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # it has just ended
                if config.config_path in child.cmdline():
                    child.kill()
        await asyncio.wait({opening}, timeout=0.1)
        if opening.done():
            opening.exception()  # retrieved, so that asyncio does not log it
            ngrok.kill(config)
            return


def _one_line(error: Exception) -> str:
    """Return an error message as one line without the token. ngrok writes line breaks as \\r\\n."""
    said = error.ngrok_error if isinstance(error, PyngrokNgrokError) else None
    text = re.sub(r"(?:\\[rn]|\s)+", " ", said or str(error)).strip()
    return text.replace(os.environ["NGROK_AUTHTOKEN"].strip(), "<token>")[:300]
