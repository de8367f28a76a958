"""A vLLM server that a run starts itself; `stand_in_vllm.py` replaces `vllm serve`."""

import gc
import json
import os
import shlex
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import faults
import psutil
import pytest
import torch

from rlm.api_client import APIClient
from rlm.cli import UsageError
from rlm.training import run_servers
from rlm.training.run_servers import ManagedVLLM, server_command, server_options, split_command

PROGRAM = [sys.executable, str(Path(__file__).parent.parent / "stand_in_vllm.py"), "serve", "MODEL"]


@pytest.fixture
def record(tmp_path, monkeypatch) -> Path:
    """The file in which the program records its start and its requests."""
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "record.jsonl"))
    return tmp_path / "record.jsonl"


def started(record: Path) -> list[dict]:
    """Return argv, pid and env of each program that was started."""
    return [entry for entry in map(json.loads, record.open()) if entry["path"] == ""]


def has_ended(pid: int, within: float = 10.0) -> bool:
    """Return whether a process ends within some seconds; a zombie has ended."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_it_is_started_answers_with_its_key_and_is_ended(record, tmp_path, monkeypatch, capsys):
    for name in ("WORLD_SIZE", "RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_API_KEY", "the user's own")
    server = ManagedVLLM(PROGRAM, tmp_path / "run" / "vllm.log", {"CUDA_VISIBLE_DEVICES": "3"})
    server.wait_until_healthy()
    said = capsys.readouterr().out
    assert "starting vLLM (its log: " in said
    assert "vLLM is ready after" in said
    assert APIClient(server.url, api_key=server.key).models()
    with pytest.raises(UsageError, match="wrong or missing API key"):
        APIClient(server.url).models()
    (program,) = started(record)
    assert program["argv"][-4:-1] == ["--host", "127.0.0.1", "--port"]
    env = program["env"]
    assert env["VLLM_API_KEY"] == server.key != "the user's own"
    assert len(server.key) >= 32
    assert (env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"], env["CUDA_VISIBLE_DEVICES"]) == ("True", "3")
    assert not env.keys() & {"WORLD_SIZE", "RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    assert os.getsid(program["pid"]) == program["pid"]  # so Ctrl-C does not reach it
    assert "loading MODEL" in server.log.read_text()
    server.check()
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 5
    assert not psutil.pid_exists(program["pid"])
    with pytest.raises(UsageError, match=r"exited with code -15: see .*vllm.log"):
        server.check()


def test_it_ends_with_its_object(record, tmp_path):
    server = ManagedVLLM(PROGRAM, tmp_path / "vllm.log")
    server.wait_until_healthy()
    del server
    gc.collect()
    assert has_ended(started(record)[0]["pid"], within=0.1)


DEAF = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = os.fork()\n"
    "child and print(child, flush=True)\n"
    "time.sleep(60)\n"
)


def test_one_that_does_not_end_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(run_servers, "WATCHDOG", run_servers.WATCHDOG.replace("100", "3"))
    server = ManagedVLLM([sys.executable, "-c", DEAF], tmp_path / "vllm.log")
    while not (text := server.log.read_text()).endswith("\n"):
        time.sleep(0.02)
    server.stop()
    assert has_ended(int(text), within=2)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT", "error", "end"])
def test_it_ends_however_the_trainer_ends(how, record, tmp_path):
    def trainer() -> int:
        server = ManagedVLLM(PROGRAM, tmp_path / "vllm.log")
        server.wait_until_healthy()
        (tmp_path / "ready").touch()
        if how == "error":
            raise RuntimeError("a bug")
        if how != "end":
            time.sleep(60)
        return 0

    pid = faults.start(trainer, tmp_path / "said")
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    if how.startswith("SIG"):
        os.kill(pid, getattr(signal, how))
    ended = faults.wait(pid, tmp_path / "said")
    assert (ended.code == 0) == (how == "end"), ended
    assert has_ended(started(record)[0]["pid"])


def test_a_port_that_was_taken_meanwhile_is_changed(record, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        free, ports = run_servers._free_port, [other.getsockname()[1]]
        monkeypatch.setattr(run_servers, "_free_port", lambda: ports.pop() if ports else free())
        server = ManagedVLLM(PROGRAM, tmp_path / "vllm.log")
        server.wait_until_healthy()
    assert "Address already in use" in server.log.read_text()
    assert len(started(record)) == 2
    assert APIClient(server.url, api_key=server.key).models()
    server.stop()


def test_one_that_dies_at_the_start_says_why(record, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STAND_IN", "dies")
    log = tmp_path / "vllm.log"
    log.write_text("of an earlier run\n")
    with pytest.raises(UsageError, match=f"vLLM has exited with code 1: see {log}"):
        ManagedVLLM(PROGRAM, log).wait_until_healthy()
    said = capsys.readouterr().out
    assert "  | ValueError: Free memory on device is less than desired\n" in said
    assert "earlier run" not in said
    assert "earlier run" in log.read_text()
    assert len(started(record)) == 1  # it does not retry with another port


def test_one_that_never_answers_is_given_up_and_ended(record, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STAND_IN", "mute")
    monkeypatch.setattr(run_servers, "START_TIMEOUT", 2.0)
    monkeypatch.setattr(run_servers, "PROGRESS_INTERVAL", 0.5)
    log = tmp_path / "vllm.log"
    server = ManagedVLLM(PROGRAM, log)
    until = time.monotonic() + 60
    while "loading" not in log.read_text() and time.monotonic() < until:  # slow on a busy machine
        time.sleep(0.05)
    with pytest.raises(UsageError, match=r"vLLM was not ready after 2 s: see .*vllm.log"):
        server.wait_until_healthy()
    assert "so far: loading MODEL" in capsys.readouterr().out
    assert has_ended(started(record)[0]["pid"], within=0.1)


def test_a_program_that_is_missing_is_one_line_that_says_how_to_install_it():
    with pytest.raises(UsageError, match=r"of its own .*pip install vllm") as caught:
        split_command("no-such-vllm serve")
    assert "\n" not in str(caught.value)
    for wrong in ("", "vllm 'serve"):
        with pytest.raises(UsageError, match="--server"):
            split_command(wrong)


def test_the_command_line_has_model_and_options_and_the_users_own_win(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    quoted = shlex.quote(str(program))
    options = {"max-model-len": 600, "enable-lora": None, "dtype": "float32"}
    made = shlex.join(server_command("vllm serve", "M", options))
    assert made == f"{quoted} serve M --max-model-len 600 --enable-lora --dtype float32"
    own = "~/bin/vllm serve --max_model_len=9 --dtype half"
    made = shlex.join(server_command(own, "M", options))
    assert made == f"{quoted} serve M --max_model_len=9 --dtype half --enable-lora"
    module = f"{shlex.quote(sys.executable)} -m some.api_server"
    assert server_command(module, "M", {})[1:] == ["-m", "some.api_server", "--model", "M"]


def test_what_the_server_of_a_run_needs(monkeypatch):
    """The server gets memory for its weights, and 0.4 of what the weights of both leave free."""
    gib = 2**30
    policy = SimpleNamespace(
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        num_parameters=lambda: int(15.25 * gib / 2),
    )
    free = 78 * gib - 15.25 * gib
    monkeypatch.setattr(run_servers, "available_memory", lambda device_type: free)
    monkeypatch.setattr(run_servers, "release_memory", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * gib))
    options = partial(server_options, policy, 2560, 128)
    assert options(rank=12) == {
        "dtype": "bfloat16",
        "max-model-len": 2560,
        "max-num-seqs": 128,
        "enable-lora": None,
        "max-lora-rank": 16,
        "max-loras": 1,
        "max-cpu-loras": 2,
        "logprobs-mode": "processed_logprobs",
        "gpu-memory-utilization": 0.42,  # (15.25 + 0.4 x 47.5) / 80 = 0.428
    }
    assert options(rank=64)["max-lora-rank"] == 64
    with pytest.raises(UsageError, match="rank 512 at most, not 513"):
        options(rank=513)
    free = 16 * gib
    with pytest.raises(UsageError, match=r"vLLM would need 18.3 GB .* 16.0 GB are free"):
        options(rank=8)
