"""server.py: the adapters it offers, rejected options, and a real process from start to end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import torch
from conftest import exit_code
from live_server import LIMITS, live, make_service, wait_until
from safetensors.torch import load_file, save_file
from starlette.middleware.cors import CORSMiddleware

import server
from rlm.cli.options import UsageError, parse
from rlm.data.prompts import FORMATS, render_prompt
from rlm.model.adapters import adapter_tensors, load_adapter, new_adapter
from rlm.model.base import base_model_hash, load_base
from rlm.model.export import save_adapter
from rlm.sampling import Sampler, prompt_seed
from rlm.sampling.requests import Request, SamplingParams
from rlm.serving.access import Keys
from rlm.serving.engine import Engine, Limits
from rlm.serving.http_server import GracefulServer, listen, local_url
from rlm.serving.middleware import SecuritySettings
from rlm.serving.models import find_models, load_samplers
from rlm.serving.service import Service
from tests.serving.test_tunnel import agent  # noqa: F401 (a fixture)
from tests.test_train_grpo import CPU

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def weights(model_dir, tokenizer, tmp_path_factory) -> Path:
    """Return a folder with two adapters of the tiny base model, both far from zero."""
    folder = tmp_path_factory.mktemp("weights")
    for seed, name in enumerate(("final_rlm_lora", "sft.v2")):
        torch.manual_seed(seed)
        policy = new_adapter(load_base(str(model_dir), CPU), r=4, alpha=8)
        for tensor in adapter_tensors(policy).values():
            torch.nn.init.normal_(tensor, std=0.3)
        run = {
            "stage": "grpo",
            "base_model": str(model_dir),
            "base_hash": base_model_hash(str(model_dir)),
        }
        save_adapter(policy, tokenizer, folder / name, run)
    return folder


def test_the_models_holds_the_default_and_its_neighbours(weights, model_dir):
    models = find_models(weights / "final_rlm_lora", weights, None)
    assert (models.base_model, models.default) == (str(model_dir), "final_rlm_lora")
    assert list(models.adapters) == ["base", "final_rlm_lora", "sft.v2"]
    assert len(models.adapters["sft.v2"].sha256) == 64


def test_the_base_alone_is_that_of_the_adapter_left_out(weights, model_dir, tmp_path):
    shutil.copytree(weights / "final_rlm_lora", tmp_path / "a")
    run = json.loads((tmp_path / "a" / "run.json").read_text())
    run |= {"quantize": "8bit", "config": {"reasoning_format": "simple"}}
    (tmp_path / "a" / "run.json").write_text(json.dumps(run))
    for base, offered in ((True, ["base"]), (False, ["base", "a"])):
        models = find_models(tmp_path / "a", None, None, base=base)
        assert (models.base_model, models.quantize) == (str(model_dir), "8bit")
        assert (list(models.adapters), models.default) == (offered, offered[-1])
        alone = models.adapters["base"].info  # with the prompts of the adapter
        assert (alone.format, alone.stage) == (FORMATS["simple"], "base")
    nowhere = tmp_path / "none"
    assert find_models(nowhere, None, str(model_dir), base=True).default == "base"
    assert find_models(nowhere, weights, None, base=True).base_model == str(model_dir)
    run |= {"base_model": "b", "base_hash": "b"}  # not the base model of the folder's adapters
    (tmp_path / "a" / "run.json").write_text(json.dumps(run))
    models = find_models(tmp_path / "a", weights, None, base=True)
    assert (models.base_model, models.quantize) == (str(model_dir), "none")


def test_the_base_is_served_without_a_missing_or_damaged_adapter(
    weights, model_dir, tmp_path, capsys
):
    adapter, base = tmp_path / "a", str(model_dir)
    shutil.copytree(weights / "final_rlm_lora", adapter)
    assert find_models(adapter, None, None, base=True).default == "base"
    assert capsys.readouterr().out == ""
    (adapter / "adapter_model.safetensors").unlink()
    assert find_models(adapter, None, None, base=True).base_model == base
    said = f"warning: adapter {adapter} has no adapter_model.safetensors; the base model {base} is"
    assert capsys.readouterr().out == f"{said} served\n"
    (adapter / "run.json").write_text("{")
    with pytest.raises(
        UsageError, match=r"run\.json is not valid JSON.*; give the base model with --model"
    ):
        find_models(adapter, None, None, base=True)
    assert find_models(adapter, None, base, base=True).base_model == base
    assert "run.json is not valid JSON" in capsys.readouterr().out
    nowhere = tmp_path / "nowhere"
    assert find_models(nowhere, None, base, base=True).base_model == base
    said = capsys.readouterr().out
    assert f"{nowhere} does not exist" in said
    assert f"; the base model {base} is served" in said


def test_a_refused_adapter_says_what_to_type(weights, model_dir, tokenizer, tmp_path):
    for name, how in (("good", ""), ("of_other", "other base"), ("cut", "truncated")):
        shutil.copytree(weights / "final_rlm_lora", tmp_path / name)
        damage(tmp_path / name, how)
    run = json.loads((tmp_path / "of_other" / "run.json").read_text())
    (tmp_path / "of_other" / "run.json").write_text(json.dumps(run | {"base_model": "b"}))

    def refusal(name: str, model: Path | None = None, folder: Path | None = None) -> str:
        def load() -> None:
            found = find_models(tmp_path / name, folder, str(model) if model else None)
            load_samplers(found, tokenizer, max_num_seqs=1)

        with pytest.raises(UsageError) as refused:
            load()
        return str(refused.value)

    said = refusal("of_other", model_dir)
    assert f"those of --model {model_dir}: pass --model b, or train a new adapter: " in said
    away = f"move it out of {tmp_path} to serve the other adapters"
    said = refusal("good", folder=tmp_path)
    assert ": pass --model b, or train a new adapter: " in said
    assert said.endswith(f"; or {away}")
    shutil.rmtree(tmp_path / "of_other")
    assert refusal("good", folder=tmp_path).endswith(away)
    assert refusal("cut").endswith("or add --base for the untrained base model")


def test_what_saving_leaves_behind_is_not_offered(weights, tmp_path):
    for name in ("tuned", "tuned.prev", ".tuned.new"):
        shutil.copytree(weights / "sft.v2", tmp_path / name)
    assert list(find_models(tmp_path / "no", tmp_path, None, base=True).adapters) == [
        "base",
        "tuned",
    ]
    with pytest.raises(
        UsageError, match=f"{tmp_path}/tuned: .*it is itself an adapter: .* {tmp_path}$"
    ):
        find_models(tmp_path / "no", tmp_path / "tuned", None, base=True)


@pytest.mark.parametrize("merged", [True, False])
def test_each_adapter_answers_as_if_it_were_alone(
    merged, weights, model_dir, tokenizer, in_fp32, monkeypatch
):
    """All adapters share a model and are used at once, each with its own prefix and cache."""
    monkeypatch.setattr("rlm.serving.models.Sampler", partial(Sampler, merged=merged))
    models = find_models(weights / "final_rlm_lora", weights, None)
    engine = Engine(lambda: load_samplers(models, tokenizer, max_num_seqs=2), LIMITS)
    body = {"prompt": "hello", "temperature": 1.0, "seed": 5, "max_new_tokens": 20}
    with live(Service(engine, tokenizer, models, LIMITS)) as served, ThreadPoolExecutor(3) as pool:
        replies = list(
            pool.map(served.post, [body | {"adapter": name} for name in models.adapters])
        )
    prompt = render_prompt(tokenizer, "hello", FORMATS["deepseek"])
    request = Request(prompt, SamplingParams(20, 1.0), prompt_seed(5))
    said = [reply.json()["response"] for reply in replies]
    for name, text in zip(models.adapters, said, strict=True):
        alone = load_base(str(model_dir), CPU)
        if name != "base":
            alone = load_adapter(alone, weights / name, trainable=False)
        [[completion]] = Sampler(alone, tokenizer).complete([request])
        assert text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert len(set(said)) == 3


def damage(folder: Path, how: str) -> None:
    file = folder / "adapter_model.safetensors"
    if how == "pickle":
        (folder / "evil.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    elif how == "lying header":
        raw = bytearray(file.read_bytes())
        raw[:8] = (2**40).to_bytes(8, "little")
        file.write_bytes(bytes(raw))
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "nan":
        tensors = load_file(file)
        save_file({name: tensor * float("nan") for name, tensor in tensors.items()}, file)
    elif how == "other base":
        run = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(run | {"base_hash": "sha256:0"}))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("pickle", "could execute"),
        ("lying header", "broken or cut off"),
        ("nan", "not finite"),
        ("other base", "other weights"),
    ],
)
def test_a_hostile_or_broken_adapter_is_refused_at_the_start(
    weights, tokenizer, tmp_path, how, said
):
    shutil.copytree(weights / "final_rlm_lora", tmp_path / "a")
    damage(tmp_path / "a", how)
    with pytest.raises(UsageError, match=said):
        load_samplers(find_models(tmp_path / "a", None, None), tokenizer, max_num_seqs=1)


def test_an_adapter_config_cannot_name_another_base(weights, model_dir, tmp_path, tokenizer):
    """PEFT's base_model_name_or_path may be a hub id, from which nothing is loaded."""
    shutil.copytree(weights / "final_rlm_lora", tmp_path / "a")
    config = tmp_path / "a" / "adapter_config.json"
    changed = json.loads(config.read_text()) | {"base_model_name_or_path": "evil/model"}
    config.write_text(json.dumps(changed))
    samplers = load_samplers(find_models(tmp_path / "a", None, None), tokenizer, max_num_seqs=1)
    assert set(samplers) == {"base", "a"}


def test_a_link_out_of_the_folder_is_refused(weights, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").symlink_to(weights / "final_rlm_lora")
    with pytest.raises(UsageError, match="is a link to a folder outside"):
        find_models(tmp_path / "folder" / "a", tmp_path / "folder", None)


# --- refusing to start ----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def logging_is_restored(server_log):
    """Restore the logging, which server.main redirects to a stream that the test closes."""


def start(capsys, *arguments) -> tuple[int, str]:
    return exit_code(server, server.ServerConfig, *arguments), capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--adapter", "nowhere"], "python train_sft.py"),
        (["--adapter", "nowhere"], "add --base"),
        (["--public"], "add --ngrok, or --allow-host NAME"),
        (["--ngrok-url", "my.ngrok.app"], "--ngrok-url needs --ngrok"),
        (["--public", "--ngrok", "--host", "0.0.0.0"], "leave out --host 0.0.0.0"),
        (["--public", "--ngrok", "--key-file", __file__], "API key"),
        (["--host", "0.0.0.0"], "RLM_API_KEY"),
        (["--host", "192.0.2.1"], "RLM_API_KEY"),
        (["--port", "70000"], "--port"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--deadline", "0"], "--deadline"),
        (["--key-file", "/dev/null"], "contains no API key"),
        (["--key-file", "nowhere"], "cannot read"),
        (["--adapters", "nowhere"], "no such directory"),
    ],
)
def test_it_refuses_in_one_line(capsys, monkeypatch, arguments, said):
    monkeypatch.delenv("RLM_API_KEY", raising=False)
    code, error = start(capsys, "--port", 0, *arguments)
    assert code == 2
    assert said in error
    assert len(error.strip().splitlines()) == 1


def test_who_may_ask_without_a_key_is_said(capsys, monkeypatch):
    seen = []

    async def serve(config, service, keys, listening):
        listening.close()
        seen.append(keys.required)
        return 0

    monkeypatch.delenv("RLM_API_KEY", raising=False)
    monkeypatch.setattr(server, "_serve", serve)
    monkeypatch.setattr(server, "_service", lambda *_: SimpleNamespace(has_threads=False))

    def said(**options: object) -> str:
        server.main(server.ServerConfig(port=0, **options))
        return capsys.readouterr().out.partition("loading")[0]  # the output before "loading …"

    limits = "with 20 requests a minute for each address and 1024 tokens for each request"
    for tunnel in ({"ngrok": True}, {"allow_host": ("my.ngrok.app",)}):
        line = said(public=True, **tunnel)
        assert line.startswith(
            "open: anyone who knows this server's public name may use it, without"
        )
        assert limits in line
    assert "7 requests" in said(public=True, ngrok=True, requests_per_minute=7)
    assert "without limits" in said(allow_host=("my.ngrok.app",))
    assert said() == ""
    assert seen == [False] * 5
    assert "API key for this run" in said(ngrok=True)
    assert seen[-1]
    monkeypatch.setenv("RLM_API_KEY", "a-key-of-some-length")
    assert said(allow_host=("my.ngrok.app",)) == ""
    with pytest.raises(UsageError, match="leave out RLM_API_KEY and --key-file"):
        server.main(server.ServerConfig(port=0, ngrok=True, public=True))


def test_a_port_in_use(capsys, monkeypatch):
    """The message is the same if another server takes the port at the last moment."""
    monkeypatch.delenv("RLM_API_KEY", raising=False)
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match="cannot listen"):
            listen("127.0.0.1", port)
        with pytest.raises(UsageError, match="port 0: this is not a host name; choose another"):
            listen("127.0.0..1", 0)
        code, error = start(capsys, "--port", port)
    assert (code, f"cannot listen on 127.0.0.1 port {port}" in error) == (2, True)


# --- what the options set -------------------------------------------------------------------------


def config_of(*arguments: object) -> server.ServerConfig:
    return parse(server.ServerConfig, argv=[str(a) for a in arguments])


def test_what_may_be_asked_for_is_what_the_options_say(weights, monkeypatch):
    loaded = []
    monkeypatch.setattr("rlm.serving.load_samplers", lambda *given: loaded.append(given))
    options = {"--max-prompt-tokens": 22, "--max-new-tokens": 11, "--queue": 3, "--max-num-seqs": 2}
    options |= {"--adapter": weights / "sft.v2", "--deadline": 4.5, "--tool": "calculator"}
    options |= {"--nearest": 1}
    service = server._service(config_of(*(word for pair in options.items() for word in pair)), ())
    assert service.limits == Limits(
        prompt_tokens=22, new_tokens=11, requests=3, tokens=3 * (22 + 11), seconds=4.5
    )
    assert service.engine._limits is service.limits
    service.engine._load()
    assert loaded == [(service.models, service.tokenizer, 2)]
    usual = server._service(config_of("--adapter", weights / "sft.v2"), ())
    assert [s.models.adapters["sft.v2"].tool is None for s in (service, usual)] == [False, True]
    assert (service._nearest, usual._nearest) == (1, 3)
    assert usual.limits == Limits(512, 512, 64, 64 * 1024, 120.0)  # docs/reference/serving.md
    public = ["--adapter", weights / "sft.v2", "--ngrok", "--public"]
    assert server._service(config_of(*public), ()).limits.request_tokens == 1024
    larger = server._service(config_of(*public, "--max-new-tokens", 2000), ()).limits
    assert larger.request_tokens == larger.new_tokens == 2000


def served_by(monkeypatch, tokenizer, *arguments) -> tuple[GracefulServer, SecuritySettings]:
    """Start the server with these options, and return it with its settings instead of running."""
    made = []

    class Watched(GracefulServer):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    async def leave(*_):
        pass

    monkeypatch.setattr("rlm.serving.GracefulServer", Watched)
    monkeypatch.setattr(server, "_watch", leave)
    config, (service, _) = config_of(*arguments), make_service(tokenizer, {})
    with listen(config.host, 0) as listening:
        keys = Keys(["a-key-of-some-length"])
        assert asyncio.run(server._serve(config, service, keys, listening)) == 0
    app = made[0].config.app
    inner = getattr(app, "app", app)  # --allow-origin wraps the app in the CORS middleware
    assert inner._count == service.metrics.count_response
    settings = inner._settings
    assert settings.keys is keys
    return made[0], settings


def test_who_may_ask_and_how_often_is_what_the_options_say(tokenizer, monkeypatch):
    here = {"localhost", "127.0.0.1", "::1"}
    usual, settings = served_by(monkeypatch, tokenizer)
    assert (settings.allowed_hosts, settings.requests_per_minute) == (here, 120)
    assert not settings.allowed_hosts.numeric
    assert usual._drain_seconds == 25  # the time limit for draining in docs/reference/serving.md
    named = ["--allow-host", "My.machine", "--allow-host", "other", "--requests-per-minute", 7]
    _, settings = served_by(monkeypatch, tokenizer, *named)
    assert settings.allowed_hosts == here | {"my.machine", "other"}
    assert (settings.allowed_hosts.numeric, settings.requests_per_minute) == (False, 7)
    _, settings = served_by(monkeypatch, tokenizer, "--host", "127.0.0.2")
    assert settings.allowed_hosts == here | {"127.0.0.2"}
    _, settings = served_by(monkeypatch, tokenizer, "--host", "0.0.0.0", "--allow-host", "a")
    assert settings.allowed_hosts == here | {"a"}
    assert settings.allowed_hosts.numeric
    _, settings = served_by(monkeypatch, tokenizer, "--ngrok", "--public")
    assert (settings.public, settings.requests_per_minute) == (True, 20)
    origins = ["--allow-origin", "https://my.app/,http://localhost:3000"]
    running, settings = served_by(monkeypatch, tokenizer, *origins)
    assert isinstance(running.config.app, CORSMiddleware)
    assert settings.allowed_origins == ["https://my.app", "http://localhost:3000"]
    assert running.config.app.allow_origins == settings.allowed_origins
    assert not running.config.app.allow_all_origins
    with pytest.raises(UsageError, match=r"--allow-origin \*: every web page"):
        served_by(monkeypatch, tokenizer, "--allow-origin", "*")


# --- to the end -----------------------------------------------------------------------------------


def test_a_dead_engine_ends_the_server_with_code_1(tokenizer, monkeypatch, capsys):
    def die(self, name):
        raise UsageError  # code 2 is only for an error at the start

    monkeypatch.setattr(Engine, "_step", die)
    service, _ = make_service(tokenizer, {})
    listening = listen("127.0.0.1", 0)

    def ask() -> str:
        wait_until(lambda: service.engine.state == "ready")
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/phase1/reasoning"
        return httpx2.post(url, json={"prompt": "x"}, timeout=30).json()["code"]

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        serving = server._serve(server.ServerConfig(), service, Keys([]), listening)
        assert asyncio.run(serving) == 1
    assert asked.result() == "engine_down"
    assert "the engine stopped with an error" in capsys.readouterr().out


def test_the_public_url_is_told_until_the_agent_dies(tokenizer, agent):  # noqa: F811
    service, _ = make_service(tokenizer, {})
    listening = listen("127.0.0.1", 0)
    key = {"X-API-Key": "a-key-of-some-length"}

    def use_it() -> None:
        wait_until(lambda: service.public_url)
        public = service.public_url
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with httpx2.Client(headers=key, timeout=30) as client:
            info = client.get(public + "/phase1/info").json()  # through the tunnel
            assert (info["public_url"], info["needs_key"]) == (public, True)
            os.kill(agent.facts()["pid"], signal.SIGKILL)
            wait_until(lambda: service.public_url is None)
            assert client.get(url + "/phase1/info").json()["public_url"] is None
            assert client.get(url + "/ready").status_code == 200

    def use_it_and_end() -> None:
        try:
            use_it()
        finally:
            service.engine.state = "dead"  # ends the server

    with ThreadPoolExecutor(1) as pool:
        used = pool.submit(use_it_and_end)
        config, keys = server.ServerConfig(ngrok=True), Keys(key.values())
        asyncio.run(server._serve(config, service, keys, listening))
    used.result()


def test_the_tunnel_leads_to_the_address_that_is_bound():
    """Another program may have the same port on another address of this machine."""
    for host, url in {
        "127.0.0.1": "http://127.0.0.1:",
        "127.0.0.2": "http://127.0.0.2:",
        "0.0.0.0": "http://127.0.0.1:",
        "::1": "http://[::1]:",
        "::": "http://[::1]:",
    }.items():
        try:
            listening = listen(host, 0)
        except UsageError:
            assert ":" in host  # a machine without IPv6
            continue
        with listening:
            assert local_url(listening) == url + str(listening.getsockname()[1])


def test_an_error_in_the_watch_ends_the_server(tokenizer, monkeypatch):
    """`_watch` monitors the engine, so the server must not continue without it."""

    async def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(server, "_watch", broken)
    service, _ = make_service(tokenizer, {})
    with listen("127.0.0.1", 0) as listening, pytest.raises(ZeroDivisionError):
        asyncio.run(server._serve(server.ServerConfig(), service, Keys([]), listening))


@contextmanager
def server_process(folder: Path, *options: object):
    """Start server.py in a folder; yield the process, its URL and its output until it is ready."""
    env = {k: v for k, v in os.environ.items() if k not in ("RLM_API_KEY", "NGROK_AUTHTOKEN")}
    command = [sys.executable, str(ROOT / "server.py"), "--port", "0", *map(str, options)]
    with (folder / "log").open("w") as log:  # a pipe that is not read would fill up and block
        process = subprocess.Popen(
            command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=log
        )
    said = ""
    try:
        while not (ready := re.search(r"ready: (\S+)", said)):
            line = process.stdout.readline()
            assert line, (folder / "log").read_text()
            said += line
        yield process, ready[1], said
    finally:
        process.kill()
        process.communicate()


def test_a_process_from_start_to_signal(weights, tmp_path):
    options = ["--adapter", weights / "final_rlm_lora", "--adapters", weights, "--ngrok"]
    options += ["--max-new-tokens", "100", "--max-num-seqs", "1", "--requests-per-minute", "1000"]
    with server_process(tmp_path, *options) as (process, url, said):
        said_first, _, rest = said.partition(f"loading {weights / 'final_rlm_lora'} …\n")
        assert said_first.startswith("API key for this run")
        assert "ready: " in rest
        key = re.search(r"shown once: (\S+)", said)[1]
        lines = iter(process.stdout.readline, "")  # a line may be about the batch
        assert any("NGROK_AUTHTOKEN" in line for line in lines)  # it continues without a tunnel
        with httpx2.Client(base_url=url, timeout=60) as client:
            body = {"prompt": "What is 2 + 3?"}
            assert client.post("/phase1/reasoning", json=body).status_code == 401
            client.headers["X-API-Key"] = key
            answer = client.post("/phase1/reasoning", json=body).json()
            assert answer["usage"]["completion_tokens"] > 0
            assert answer["model"]["adapter"] == "final_rlm_lora"
            other = client.post("/phase1/reasoning", json=body | {"adapter": "sft.v2"}).json()
            assert other["response"] != answer["response"]
            with ThreadPoolExecutor(5) as pool:  # all five requests end after a signal
                post = partial(pool.submit, client.post, "/phase1/reasoning")
                # The first request occupies the only row for long: near temperature 0, the tiny
                # base model continues to the limit. The next four cannot end before the fifth.
                first = {"prompt": "x", "n": 16, "temperature": 0.01, "adapter": "base"}
                asked = [post(json=first)]
                wait_until(lambda: client.get("/phase1/info").json()["running"]["requests"] == 1)
                behind = {"prompt": "x", "adapter": "base"}  # each adapter has its own rows
                asked += [post(json=behind | {"seed": i, "stream": i > 2}) for i in range(1, 5)]
                wait_until(lambda: client.get("/phase1/info").json()["running"]["requests"] == 5)
                signalled = time.monotonic()
                process.send_signal(signal.SIGTERM)
                ends = [one.result() for one in asked]
            # A slow machine may not finish all requests in the 25 s for draining. Only then may the
            # server report this.
            whole = [end.status_code == 200 for end in ends[:3]]
            whole += ["event: done" in end.text for end in ends[3:]]
            late = [end.text for end, finished in zip(ends, whole, strict=True) if not finished]
            assert all("the server is shutting down" in text for text in late)
            assert not late or time.monotonic() - signalled >= server.DRAIN_SECONDS
        assert process.wait(30) == 0
        log = (tmp_path / "log").read_text()
        assert key not in log + said.replace(f"shown once: {key}", "")
        assert "What is" not in log
        assert all(json.loads(line) for line in log.splitlines())


BUSY = """
import os, signal, sys, threading, torch, server
from conftest import byte_tokenizer
from live_server import make_service

def load():
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    while True:
        torch.ones(500, 500) @ torch.ones(500, 500)

service, _ = make_service(byte_tokenizer(), {})
service.engine._load, service.engine.stop = load, lambda: None  # a loader that takes longer
server._service = lambda *_: service
sys.exit(server.main(server.ServerConfig(base=True, port=0)))
"""


def test_a_signal_while_the_model_is_loaded_ends_the_server_without_an_abort():
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, "-c", BUSY], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_image_has_what_the_server_imports(tmp_path):
    """The Dockerfile leaves out packages and files, which the remaining code must not import."""
    recipe = (ROOT / "Dockerfile").read_text()
    (left_out,) = re.findall(r"grep -vE '\^\(torch\|([\w|]+)\)=='", recipe)
    for name in re.findall(r"^COPY (\w+) \1$", recipe, re.M):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in re.search(r"^COPY ([\w. ]+\.py) \./$", recipe, re.M)[1].split():
        shutil.copy(ROOT / name, tmp_path)
    code = (
        f"import importlib, pkgutil, sys\n"
        f"sys.modules |= dict.fromkeys({left_out.split('|')}, None)\n"
        f"import inference, rlm.model.base, rlm.sampling, rlm.serving, server\n"
        f"for module in pkgutil.iter_modules(rlm.serving.__path__):\n"
        f"    importlib.import_module('rlm.serving.' + module.name)\n"
        f"print(server.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "server.py")), done.stderr
