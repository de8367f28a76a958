"""`torchrun` on two machines, simulated by two agents in different directories of this machine."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer, tiny_model
from safetensors.torch import load_file

SCRIPT = Path(__file__).parent.parent / "train_grpo.py"
REWARD = """
import os, signal
calls = 0
def parity(completions, **columns):
    global calls
    calls += 1
    if os.environ.get("DIES_AT") == f"{os.environ.get('RANK')}:{calls}":  # process : step
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(text) % 2) for text in completions]
"""
LOST = "error: another process of this run has ended or does not answer"
AGENT = [sys.executable, "-m", "torch.distributed.run"]

pytestmark = pytest.mark.slow  # each start of the script and of an agent takes seconds


class Machines:
    """Runs the script as one process, or as an agent with one process on each of two machines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tiny_model().save_pretrained(folder / "model")
        byte_tokenizer().save_pretrained(folder / "model")
        problems = [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(40)]
        text = "\n".join(json.dumps(problem) for problem in problems)
        (folder / "problems.jsonl").write_text(text)
        (folder / "reward.py").write_text(REWARD)

    def start(self, place: str, *flags: str, launch=(sys.executable,), **env) -> subprocess.Popen:
        (self.folder / place).mkdir(exist_ok=True)
        options = {
            "model": "../model", "dataset": "../problems.jsonl", "sft-adapter": "none",
            "reward": "../reward.py:parity", "dtype": "float32",
            "steps": 4, "batch-size": 4, "group-size": 4, "max-new-tokens": 6, "save-every": 1,
            "run-dir": "run", "output": "out",
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in options.items()]
        usual = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(
            [*launch, str(SCRIPT), *words, *flags],
            cwd=self.folder / place,
            env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home())} | usual | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def two(self, *flags: str, **env: str) -> list[tuple[int, str]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        where = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
        launches = [[*AGENT, *where, f"--node-rank={rank}"] for rank in (0, 1)]
        started = [
            self.start(f"machine{rank}", *flags, launch=launch, **env)
            for rank, launch in enumerate(launches)
        ]
        said = [process.communicate(timeout=200)[0] for process in started]
        return [(p.returncode, text) for p, text in zip(started, said, strict=True)]

    def adapter(self, place: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / place / "out" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    return Machines(tmp_path_factory.mktemp("machines"))


@pytest.fixture(scope="module")
def alone(machines) -> dict[str, torch.Tensor]:
    """Return the adapter of a run with one process."""
    process = machines.start("alone")
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    adapter = machines.adapter("alone")
    assert max(tensor.abs().max() for name, tensor in adapter.items() if "lora_B" in name) > 1e-4
    return adapter


def assert_equal(adapter: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, tensor in adapter.items():
        assert torch.allclose(tensor, other[name], rtol=0, atol=1e-6), name


def test_two_machines_learn_what_one_process_does(machines, alone):
    (code, said), (second_code, second_said) = machines.two()
    assert (code, second_code) == (0, 0), said + second_said
    assert f"the run directory is on {socket.gethostname()}" in said
    assert list((machines.folder / "machine1").iterdir()) == []
    assert_equal(machines.adapter("machine0"), alone)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_machine_dies_and_both_go_on(machines, alone, dead):
    began = time.monotonic()
    ended = machines.two(DIES_AT=f"{dead}:3")
    assert time.monotonic() - began < 120
    code, said = ended[1 - dead]
    assert code == 1, said  # the code of the agent; its process ended with 2
    assert said.count(LOST) == 1
    assert "exitcode  : 2" in said
    assert "Traceback" not in said.split(LOST)[0]
    for code, said in machines.two("--resume"):
        assert code == 0, said
    assert_equal(machines.adapter("machine0"), alone)
