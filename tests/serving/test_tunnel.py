"""The tunnel with a replacement of ngrok's agent, in a real process with real requests."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from live_server import wait_until
from pyngrok import ngrok
from secured_server import KEY, SecuredServer, request

from rlm.serving.access import AllowedHosts
from rlm.serving.tunnel import Tunnel, TunnelError, find_agent, policy

TOKEN = "the-token-of-the-tests"
ROOT = Path(__file__).resolve().parents[2]
UNUSED = "http://127.0.0.1:9"  # a server that gets no requests


@dataclass
class Agent:
    path: Path
    record: Path

    def facts(self) -> dict:
        """Return everything that the agent has recorded, as one dict."""
        lines = self.record.read_text().splitlines()
        return {name: value for line in lines for name, value in json.loads(line).items()}

    def is_gone(self) -> bool:
        """Return whether no process of the agent is running."""
        running = (process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))
        return not any(str(self.path) in (words or []) for words in running)


@pytest.fixture
def agent(tmp_path, monkeypatch) -> Agent:
    script = (ROOT / "tests/stand_in_ngrok.py").read_text().split("\n", 1)[1]
    path = tmp_path / "ngrok"
    code = tmp_path / "ngrok.py"
    code.write_text(script)
    words = map(shlex.quote, (sys.executable, "-IS", str(code)))
    path.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
    path.chmod(0o755)
    record = tmp_path / "record"
    record.touch()
    monkeypatch.setenv("PYNGROK_NGROK_PATH", str(path))
    monkeypatch.setenv("NGROK_AUTHTOKEN", TOKEN)
    monkeypatch.setenv("STAND_IN_RECORD", str(record))
    return Agent(code, record)


def ask(url: str, method: str, path: str, body: bytes | None = None, **headers: str):
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
    response = connection.getresponse()
    return response.status, dict(response.getheaders()), response.read()


def test_the_public_url_leads_to_the_server_and_nowhere_when_closed(agent, server_log):
    hosts = AllowedHosts(["localhost"])
    to_public_host = request("GET", "/health", host="127.0.0.1")

    async def scenario(wall: SecuredServer) -> None:
        tunnel = await Tunnel.open(f"http://127.0.0.1:{wall.port}", hosts)
        url = tunnel.public_url
        for process in psutil.Process().children(recursive=True):
            assert TOKEN not in " ".join(process.cmdline())

        def call(*args, **headers):
            return asyncio.to_thread(ask, url, *args, **headers)

        status, headers, _ = await call("GET", "/health", X_Request_ID="through-the-tunnel")
        assert (status, headers["x-request-id"]) == (200, "through-the-tunnel")
        assert (await call("GET", "/metrics"))[0] == 401
        assert (await call("GET", "/metrics", Host="evil.com"))[0] == 400
        typed = {"Content_Type": "application/json", "X_Forwarded_For": "1.2.3.4"}
        status, _, body = await call(
            "POST", "/phase1/reasoning", b'{"prompt": "2+2"}', X_API_Key=KEY, **typed
        )
        assert status == 200
        assert json.loads(body) == {"got": {"prompt": "2+2"}, "client": "127.0.0.1"}

        assert (await asyncio.to_thread(wall.send, to_public_host)).status == 200
        await tunnel.close()
        assert (await asyncio.to_thread(wall.send, to_public_host)).status == 400
        with pytest.raises(ConnectionRefusedError):
            await call("GET", "/health")

    with SecuredServer(allowed_hosts=hosts) as wall:
        assert wall.send(to_public_host).status == 400
        asyncio.run(scenario(wall))
        facts = agent.facts()
    assert hosts == {"localhost"}
    assert agent.is_gone()
    assert facts["token"] == TOKEN  # passed in the environment
    assert TOKEN not in json.dumps(facts["argv"])
    assert facts["argv"][:5] == ["start", "--none", "--log", "stdout", "--config"]
    assert not Path(facts["argv"][5]).exists()
    assert "inspect_db_size: -1" in facts["config"]
    assert facts["endpoint"].pop("name")
    assert facts["endpoint"] == {
        "upstream": {"url": f"http://127.0.0.1:{wall.port}"},
        "traffic_policy": policy(60),
    }
    events = [json.loads(line)["event"] for line in server_log.getvalue().splitlines()]
    assert [e for e in events if "tunnel" in e] == ["tunnel_opened", "tunnel_closed"]
    assert TOKEN not in server_log.getvalue()
    assert KEY not in server_log.getvalue()


def test_the_edge_keeps_strangers_to_the_rate_and_a_domain_is_asked_for(agent):
    async def scenario(wall: SecuredServer) -> list[int]:
        tunnel = await Tunnel.open(
            f"http://127.0.0.1:{wall.port}",
            wall.settings.allowed_hosts,
            url="https://mine.example",
            requests_per_minute=3,
        )
        urls = [tunnel.public_url] * 5
        statuses = [(await asyncio.to_thread(ask, url, "GET", "/health"))[0] for url in urls]
        await tunnel.close()
        return statuses

    with SecuredServer() as wall:
        assert asyncio.run(scenario(wall)) == [200] * 3 + [429] * 2
        assert "127.0.0.1" in wall.settings.allowed_hosts  # it was there before the tunnel
    assert agent.facts()["endpoint"]["url"] == "https://mine.example"


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("bad-token", "The authtoken is not valid. Your authtoken: <token> ERR_NGROK_105"),
        ("crash", "unable to start"),
        ("refuse", "the traffic policy is not valid ERR_NGROK_2201"),
        ("no-network", "failed to dial: no such host"),
        ("silent", "not ready after 2 s"),
        ("deaf", "not ready after 2 s"),
    ],
)
def test_what_fails_is_one_line_and_leaves_nothing(
    agent, server_log, monkeypatch, capsys, mode, message
):
    hosts = AllowedHosts(["localhost"])

    async def open_and_close() -> None:
        tunnel = await Tunnel.open(UNUSED, hosts)
        await tunnel.close()

    monkeypatch.setenv("STAND_IN_MODE", mode)
    if mode in ("no-network", "silent", "deaf"):
        monkeypatch.setattr("rlm.serving.tunnel.OPEN_SECONDS", 2.0)
    with pytest.raises(TunnelError) as info:
        asyncio.run(open_and_close())
    text = str(info.value)
    assert text.startswith("ngrok: ")
    assert message in text
    assert "\n" not in text
    assert len(text) < 320
    assert TOKEN not in text + server_log.getvalue()
    assert capsys.readouterr().err == ""  # pyngrok would print the agent's output
    assert hosts == {"localhost"}
    assert agent.is_gone()
    monkeypatch.setenv("STAND_IN_MODE", "ok")
    monkeypatch.setattr("rlm.serving.tunnel.OPEN_SECONDS", 20.0)
    asyncio.run(open_and_close())  # the next attempt succeeds


def test_an_agent_that_dies_is_noticed(agent, server_log, monkeypatch):
    monkeypatch.setenv("STAND_IN_MODE", "dies")
    hosts = AllowedHosts(["localhost"])

    async def scenario() -> None:
        tunnel = await Tunnel.open(UNUSED, hosts)
        assert tunnel.public_url
        assert hosts == {"localhost", "127.0.0.1"}
        await asyncio.to_thread(wait_until, lambda: not tunnel.is_up)
        await tunnel.close()
        assert hosts == {"localhost"}

    asyncio.run(scenario())
    opened, died = [json.loads(line) for line in server_log.getvalue().splitlines()]
    assert (opened["event"], died["event"], died["exit_code"]) == (
        "tunnel_opened",
        "tunnel_died",
        3,
    )


def test_giving_up_while_it_opens_ends_the_agent(agent, monkeypatch):
    monkeypatch.setenv("STAND_IN_MODE", "silent")

    async def scenario() -> None:
        opening = asyncio.create_task(Tunnel.open(UNUSED, AllowedHosts()))
        while not agent.facts() and not opening.done():
            await asyncio.sleep(0.02)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(scenario())
    assert agent.is_gone()


def test_an_agent_that_starts_when_the_time_is_up_is_ended_too(agent, monkeypatch):
    monkeypatch.setenv("STAND_IN_MODE", "silent")
    start = ngrok.get_ngrok_process

    def late(config):
        time.sleep(0.5)
        return start(config)

    monkeypatch.setattr("rlm.serving.tunnel.ngrok.get_ngrok_process", late)
    monkeypatch.setattr("rlm.serving.tunnel.OPEN_SECONDS", 0.1)
    with pytest.raises(TunnelError, match="not ready"):
        asyncio.run(Tunnel.open(UNUSED, AllowedHosts()))
    assert agent.is_gone()


@pytest.mark.parametrize("token", ["", "  ", None])
def test_without_a_token_the_line_says_where_to_get_one(agent, monkeypatch, token):
    monkeypatch.delenv("NGROK_AUTHTOKEN")
    if token is not None:
        monkeypatch.setenv("NGROK_AUTHTOKEN", token)
    with pytest.raises(TunnelError, match=r"NGROK_AUTHTOKEN.*https://dashboard\.ngrok\.com"):
        asyncio.run(Tunnel.open(UNUSED, AllowedHosts()))
    assert not agent.facts()  # it did not run


def test_the_agent_is_looked_for_and_never_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr("pyngrok.conf.DEFAULT_NGROK_PATH", str(tmp_path / "nowhere"))
    wrapper, binary = tmp_path / "venv", tmp_path / "bin"
    for folder, content in ((wrapper, b"#!/usr/bin/python"), (binary, b"\x7fELF")):
        folder.mkdir()
        (folder / "ngrok").write_bytes(content)
        (folder / "ngrok").chmod(0o755)
    path = os.pathsep.join(map(str, [tmp_path, wrapper, binary]))
    assert find_agent({"PATH": path}) == binary / "ngrok"
    assert (
        find_agent({"PATH": path, "PYNGROK_NGROK_PATH": str(wrapper / "ngrok")}).parent == wrapper
    )
    (binary / "ngrok").chmod(0o644)
    for env in ({"PATH": path}, {}, {"PATH": path, "PYNGROK_NGROK_PATH": str(tmp_path / "no")}):
        with pytest.raises(TunnelError, match=r"https://ngrok\.com/download"):
            find_agent(env)
