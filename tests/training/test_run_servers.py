"""GRPO runs that start their vLLM server themselves; `stand_in_vllm.py` replaces `vllm serve`."""

import json
import shlex
import sys
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
from rlm.training.run_servers import LONGEST_PROMPT, RunServers, make_vllm_sampler
from tests import test_train_grpo
from train_grpo import GRPOTrainer

PROGRAM = shlex.join([sys.executable, str(Path(__file__).parent.parent / "stand_in_vllm.py")])
PROBLEMS = [Problem(f"p{i}", f"{i} + {i}?", str(2 * i)) for i in range(8)]


@pytest.fixture
def record(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "record.jsonl"))
    fast = partial(APIClient, backoff=0.001)
    monkeypatch.setattr(run_servers, "APIClient", fast)
    return tmp_path / "record.jsonl"


def asked(record: Path, path: str) -> list[dict]:
    """Return the requests to this path; with "", return the starts of the programs."""
    return [entry for entry in map(json.loads, record.open()) if entry["path"] == path]


a_config = partial(
    test_train_grpo.a_config, sampler="vllm", server=f"{PROGRAM} serve --max-loras 3"
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
        train(model_dir, a_config(tmp_path, server=f"{PROGRAM} serve --max-model-len 30"))
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
