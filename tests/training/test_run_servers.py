"""The vLLM servers that a run starts; `stand_in_vllm.py` replaces `vllm serve`."""

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
from conftest import tiny_model
from scripted_server import END, ScriptedServer

from rlm.api_client import APIClient
from rlm.cli import UsageError
from rlm.data import Problem
from rlm.model.adapters import new_adapter
from rlm.training import Distributed, run_servers
from rlm.training.run_servers import (
    LONGEST_PROMPT,
    ManagedVLLM,
    RunServers,
    make_vllm_sampler,
    server_command,
    server_options,
    split_command,
)
from tests import test_train_grpo
from train_grpo import GRPOTrainer

VLLM = [sys.executable, str(Path(__file__).parent.parent / "stand_in_vllm.py"), "serve"]
SERVE = [*VLLM, "MODEL"]
PROBLEMS = [Problem(f"p{i}", f"{i} + {i}?", str(2 * i)) for i in range(8)]


@pytest.fixture
def record(tmp_path, monkeypatch) -> Path:
    """The file in which the program records its start and its requests."""
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "record.jsonl"))
    fast = partial(APIClient, backoff=0.001)
    monkeypatch.setattr(run_servers, "APIClient", fast)
    return tmp_path / "record.jsonl"


def asked(record: Path, path: str) -> list[dict]:
    """Return the requests to this path; with "", return the starts of the programs."""
    return [entry for entry in map(json.loads, record.open()) if entry["path"] == path]


# --- one server ----------------------------------------------------------------------------------


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
    server = ManagedVLLM(SERVE, tmp_path / "run" / "vllm.log", {"CUDA_VISIBLE_DEVICES": "3"})
    server.wait_until_healthy()
    said = capsys.readouterr().out
    assert "starting vLLM (its log: " in said
    assert "vLLM is ready after" in said
    assert APIClient(server.url, api_key=server.key).models()
    with pytest.raises(UsageError, match="wrong or missing API key"):
        APIClient(server.url).models()
    (program,) = asked(record, "")
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
    server = ManagedVLLM(SERVE, tmp_path / "vllm.log")
    server.wait_until_healthy()
    del server
    gc.collect()
    assert has_ended(asked(record, "")[0]["pid"], within=0.1)


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
        server = ManagedVLLM(SERVE, tmp_path / "vllm.log")
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
    assert has_ended(asked(record, "")[0]["pid"])


def test_a_port_that_was_taken_meanwhile_is_changed(record, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        free, ports = run_servers._free_port, [other.getsockname()[1]]
        monkeypatch.setattr(run_servers, "_free_port", lambda: ports.pop() if ports else free())
        server = ManagedVLLM(SERVE, tmp_path / "vllm.log")
        server.wait_until_healthy()
    assert "Address already in use" in server.log.read_text()
    assert len(asked(record, "")) == 2
    assert APIClient(server.url, api_key=server.key).models()
    server.stop()


def test_one_that_dies_at_the_start_says_why(record, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STAND_IN", "dies")
    log = tmp_path / "vllm.log"
    log.write_text("of an earlier run\n")
    with pytest.raises(UsageError, match=f"vLLM has exited with code 1: see {log}"):
        ManagedVLLM(SERVE, log).wait_until_healthy()
    said = capsys.readouterr().out
    assert "  | ValueError: Free memory on device is less than desired\n" in said
    assert "earlier run" not in said
    assert "earlier run" in log.read_text()
    assert len(asked(record, "")) == 1  # it does not retry with another port


def test_one_that_never_answers_is_given_up_and_ended(record, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STAND_IN", "mute")
    monkeypatch.setattr(run_servers, "START_TIMEOUT", 2.0)
    monkeypatch.setattr(run_servers, "PROGRESS_INTERVAL", 0.5)
    log = tmp_path / "vllm.log"
    server = ManagedVLLM(SERVE, log)
    until = time.monotonic() + 60
    while "loading" not in log.read_text() and time.monotonic() < until:  # slow on a busy machine
        time.sleep(0.05)
    with pytest.raises(UsageError, match=r"vLLM was not ready after 2 s: see .*vllm.log"):
        server.wait_until_healthy()
    assert "so far: loading MODEL" in capsys.readouterr().out
    assert has_ended(asked(record, "")[0]["pid"], within=0.1)


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


# --- the servers of a run -------------------------------------------------------------------------


a_config = partial(
    test_train_grpo.a_config, sampler="vllm", server=f"{shlex.join(VLLM)} --max-loras 3"
)


def train(model_dir, config, problems=PROBLEMS, evaluate_on=()) -> GRPOTrainer:
    def odd(completions, **_):
        return [float(len(text) % 2) for text in completions]

    trainer = GRPOTrainer(str(model_dir), config, reward_fn=odd, device=test_train_grpo.CPU)
    trainer.train(problems, evaluate_on)
    return trainer


def test_a_run_starts_its_server_swaps_the_adapter_and_ends_it(model_dir, tmp_path, record):
    config = a_config(tmp_path)
    (config.run_dir / "sampler_adapter").mkdir(parents=True)  # --doctor leaves these files
    (config.run_dir / "vllm.log").write_text("of the doctor\n")
    trainer = train(model_dir, config)  # keeps the sampler alive: `train` must stop the server
    assert trainer.sampler.description == "vLLM, started for this run"
    (program,) = asked(record, "")
    assert not psutil.pid_exists(program["pid"])
    argv = program["argv"]
    assert argv[:4] == ["serve", str(model_dir), "--max-loras", "3"]
    given = dict(zip(argv[4::2], argv[5::2], strict=False))
    assert given["--dtype"] == "float32"
    assert argv[argv.index("--max-model-len") + 1] == "1024"  # the context window of the model
    assert argv[argv.index("--max-lora-rank") + 1] == "8"
    assert 0 < float(argv[argv.index("--gpu-memory-utilization") + 1]) < 0.7
    loaded = [entry["body"] for entry in asked(record, "load_lora_adapter")]
    dropped = [entry["body"]["lora_name"] for entry in asked(record, "unload_lora_adapter")]
    assert len({body["lora_name"] for body in loaded}) == 3
    assert dropped == [body["lora_name"] for body in loaded][:-1]
    assert (Path(loaded[0]["lora_path"]) / "adapter_model.safetensors").exists()
    drawn = [entry["body"]["model"] for entry in asked(record, "completions")][1:]
    assert drawn == [body["lora_name"] for body in loaded for _ in range(4)]
    assert "loading " in (config.run_dir / "vllm.log").read_text()
    with pytest.raises(UsageError, match="no server answers"):  # the server has ended
        APIClient(f"http://127.0.0.1:{argv[-1]}").models()


def test_a_server_that_dies_in_the_middle_ends_the_run_with_its_last_lines(
    model_dir, tmp_path, record, monkeypatch, capsys
):
    monkeypatch.setenv("STAND_IN", "stops")
    with pytest.raises(UsageError, match=r"vLLM has exited with code 7: see .*run/vllm.log"):
        train(model_dir, a_config(tmp_path, steps=5))
    assert "  | ValueError: the card is on fire\n" in capsys.readouterr().out


def test_an_error_in_the_run_ends_the_server(model_dir, tmp_path, record):
    with pytest.raises(UsageError, match="exceed the server's limit of 30 tokens; leave out this"):
        train(model_dir, a_config(tmp_path, server=f"{shlex.join(VLLM)} --max-model-len 30"))
    assert not psutil.pid_exists(asked(record, "")[0]["pid"])


def test_nothing_is_started_before_the_run_directory_is_ours(model_dir, tmp_path, record):
    config = a_config(tmp_path)
    config.run_dir.mkdir()
    (config.run_dir / "thesis.tex").touch()
    with pytest.raises(UsageError, match="contains files that are not a run"):
        train(model_dir, config)
    assert not record.exists()
    with pytest.raises(UsageError, match="an environment of its own"):
        train(model_dir, a_config(tmp_path, server="no-such-vllm serve"))


def test_two_processes_share_one_server_and_one_adapter(model_dir, tmp_path, record):
    """The second process has no validation problem, and must not wait for the final adapter."""

    def run(rank: int) -> None:
        train(model_dir, a_config(tmp_path, eval_every=1), evaluate_on=PROBLEMS[:1])

    ends = faults.run_two(run, tmp_path)
    assert [end.code for end in ends] == [0, 0], ends
    (program,) = asked(record, "")
    assert not psutil.pid_exists(program["pid"])
    loaded = [entry["body"]["lora_name"] for entry in asked(record, "load_lora_adapter")]
    assert len(loaded) == len(set(loaded)) == 4  # before training and after each of three steps
    assert len(asked(record, "unload_lora_adapter")) == 3
    drawn = [entry["body"]["model"] for entry in asked(record, "completions")]
    # Each adapter but the last samples one validation problem and the four problems of a step.
    assert [drawn.count(name) for name in loaded] == [5, 5, 5, 1]


def test_each_card_that_trains_has_a_server(model_dir, tmp_path, monkeypatch):
    def environments(size: int, device: str = "cuda") -> list[dict]:
        policy = SimpleNamespace(device=torch.device(device))
        return RunServers(policy, a_config(tmp_path), Distributed(0, size))._environments()

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environments(1) == [{}]
    assert environments(2, "cpu") == [{}]
    assert environments(2) == [{"CUDA_VISIBLE_DEVICES": card} for card in "01"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,2,7")
    assert environments(2) == [{"CUDA_VISIBLE_DEVICES": card} for card in "42"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"only this machine can reach.*--server A,B"):
        RunServers(None, a_config(tmp_path), Distributed(0, 4)).start()


def test_a_server_has_room_for_a_prompt_and_its_completion(tmp_path):
    policy = new_adapter(tiny_model(max_position_embeddings=8192), r=4, alpha=8)
    command = RunServers(policy, a_config(tmp_path), Distributed())._command()
    assert command[command.index("--max-model-len") + 1] == str(LONGEST_PROMPT + 6)


def test_two_urls_and_a_packed_base(model_dir, tmp_path, tokenizer, capsys):
    """With --quantize, a warning says that the server may serve the model unquantized."""
    policy = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=END))
    with ScriptedServer() as one, ScriptedServer() as two:
        options = {"server": f"{one.url}, {two.url}"}
        config = a_config(tmp_path, **options)
        sampler = make_vllm_sampler(policy, tokenizer, config, Distributed())
        assert sampler.description == f"vLLM at {one.url} and {two.url}"
        assert "warning" not in capsys.readouterr().out
        packed = a_config(tmp_path, quantize="4bit", **options)
        make_vllm_sampler(policy, tokenizer, packed, Distributed())
        assert (
            "warning: --quantize 4bit changes the model that is trained" in capsys.readouterr().out
        )
    packed = a_config(tmp_path, quantize="4bit", server="vllm serve --quantization x")
    make_vllm_sampler(policy, tokenizer, packed, Distributed())
    assert "warning" not in capsys.readouterr().out
