"""The device, model, data and limits that a script selects for the machine."""

import json
import struct
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from rlm.cli.options import resolve_config
from rlm.model import AdapterInfo
from rlm.model import hardware as machine
from rlm.model.adapters import ADAPTER_FILES
from rlm.model.base import base_model_hash
from rlm.training.algorithms import PRESETS
from rlm.training.config import DEFAULT_SFT_ADAPTER, GRPOConfig
from train_sft import SFTConfig

GPU_MODEL = "Qwen/Qwen2.5-7B-Instruct"


@pytest.fixture
def having(monkeypatch):
    """Return a function that simulates a GPU of some GB, and a hub that is in or out of reach."""

    def pretend(gpu, hub):
        facts = SimpleNamespace(total_memory=int(gpu * 2**30))
        monkeypatch.setattr("torch.cuda.is_available", lambda: bool(gpu))
        monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: facts)
        monkeypatch.setattr(machine, "hub_reachable", lambda: hub)

    return pretend


def resolved(cls, *argv):
    return resolve_config(cls, argv, presets=PRESETS)


@pytest.mark.parametrize("cls", [GRPOConfig, SFTConfig])
@pytest.mark.parametrize(
    ("gpu", "hub", "expected"),
    [
        (79.2, True, ("Qwen/Qwen2.5-7B-Instruct", "gsm8k", "none", True)),
        (39.4, True, ("Qwen/Qwen2.5-7B-Instruct", "gsm8k", "none", True)),  # sold as 40 GB
        (23.6, True, ("Qwen/Qwen2.5-3B-Instruct", "gsm8k", "none", True)),
        (15.7, True, ("Qwen/Qwen2.5-3B-Instruct", "gsm8k", "none", True)),
        (14.7, True, ("Qwen/Qwen2.5-1.5B-Instruct", "gsm8k", "none", True)),  # a T4
        (7.8, True, ("Qwen/Qwen2.5-1.5B-Instruct", "gsm8k", "none", True)),
        (3.9, True, ("smollm2-135m", "word-problems:1", "none", False)),
        (79.2, False, ("smollm2-135m", "word-problems:1", "none", False)),
        (0, True, ("smollm2-135m", "word-problems:1", "none", False)),
    ],
)
def test_model_and_data_are_chosen_by_the_machine(having, capsys, cls, gpu, hub, expected):
    having(gpu, hub)
    config = resolved(cls, *(["--sft-adapter=none"] if cls is GRPOConfig else []))
    is_changed = config.learning_rate != cls().learning_rate
    assert (config.model, config.dataset, config.quantize, is_changed) == expected
    said = capsys.readouterr().out
    assert f"chosen: model {expected[0]}, dataset {expected[1]} (" in said
    assert ("licence" in said and "download" in said) == is_changed


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--model=mine", "dataset word-problems:1 (no GPU here; word problems are made on this"),
        ("--dataset=gsm8k", "model smollm2-135m (no GPU here; the 135M model came with the inst"),
    ],
)
def test_the_reason_is_that_of_what_was_chosen(having, capsys, typed, said):
    having(gpu=0, hub=True)
    resolved(GRPOConfig, "--sft-adapter=none", typed)
    line = capsys.readouterr().out
    assert f"chosen: {said}" in line
    assert line.count(";") == 1


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        # The size of the model selects the larger numbers, even if the dataset is given, too.
        (["--model=mine"], {"model": "mine", "dataset": "gsm8k", "quantize": "none", "steps": 200}),
        # An option that is set to its default counts as set.
        (["--max-new-tokens=96"], {"max_new_tokens": 96, "steps": 200, "quantize": "none"}),
        (["--no-use-4bit"], {"model": GPU_MODEL, "quantize": "none"}),
        (["--preset=drgrpo"], {"aggregation": "constant", "max_new_tokens": 512}),
        (["--preset=reasoning_small"], {"learning_rate": 2e-5, "steps": 200, "quantize": "4bit"}),
        (["--model=mine", "--dataset=word-problems"], {"steps": 200, "quantize": "none"}),
        (["--model=smollm2-135m", "--dataset=gsm8k"], {"steps": 20, "learning_rate": 3e-4}),
        (["--model=mine", "--dataset=gsm8k", "--preset=reasoning_small"], {"quantize": "4bit"}),
    ],
)
def test_what_was_set_is_left_alone(having, argv, expected):
    having(gpu=80, hub=True)
    config = resolved(GRPOConfig, "--sft-adapter=none", *argv)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("cls", [GRPOConfig, SFTConfig])
def test_typing_what_was_chosen_changes_nothing(having, cls):
    having(gpu=80, hub=True)
    chosen = resolved(cls, *(["--sft-adapter=none"] if cls is GRPOConfig else []))
    typed = [f"--model={chosen.model}", f"--dataset={chosen.dataset}"]
    assert resolved(cls, *typed, *(["--sft-adapter=none"] if cls is GRPOConfig else [])) == chosen


@pytest.mark.parametrize(
    ("parameters", "gpu", "expected"),
    [
        (300_000_000, 80, (3e-4, 20, 1e-3, 400)),
        (300_000_001, 80, (2e-5, 200, 2e-4, 2000)),
        (300_000_001, 0, (2e-5, 20, 2e-4, 400)),  # more steps only on a GPU
        (None, 0, (2e-5, 20, 2e-4, 400)),  # a Git LFS pointer, so the size is unknown
    ],
)
def test_the_size_of_the_model_decides_the_learning_rate(
    having, tmp_path, capsys, parameters, gpu, expected
):
    having(gpu, hub=True)
    header = {"w": {"dtype": "U8", "shape": [parameters], "data_offsets": [0, parameters]}}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(b"version" if parameters is None else struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + (parameters or 0))  # a sparse file
    typed = [f"--model={tmp_path}", "--dataset=gsm8k"]
    grpo = resolved(GRPOConfig, "--sft-adapter=none", *typed)
    sft = resolved(SFTConfig, *typed)
    found = (grpo.learning_rate, grpo.steps, sft.learning_rate, sft.max_samples)
    assert found == expected
    said = "chosen: learning_rate 0.0002" if not gpu else "learning_rate 0.0002, micro_batch 4 (for"
    assert (said in capsys.readouterr().out) == (expected[0] == 2e-5)


def test_all_rows_of_an_own_file_are_used_on_a_gpu(having, tmp_path):
    having(gpu=80, hub=True)
    (tmp_path / "mine.jsonl").write_text('{"question": "1+1?", "answer": "2", "solution": "2"}\n')
    assert resolved(SFTConfig, f"--dataset={tmp_path / 'mine.jsonl'}").max_samples is None


def test_a_preset_packs_the_base_only_on_a_gpu(having, capsys):
    having(gpu=0, hub=False)
    argv = ["--sft-adapter=none", "--preset=reasoning_small"]
    assert resolved(GRPOConfig, *argv).quantize == "none"
    assert "so the base model is loaded without quantization" in capsys.readouterr().out
    assert resolved(GRPOConfig, *argv, "--use-4bit").quantize == "4bit"
    assert "CUDA" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "given", "expected"),
    [
        ({"base_model": "theirs", "quantize": "8bit"}, {}, ("theirs", "word-problems:1", "8bit")),
        (
            {"base_model": "theirs", "dataset": "gsm8k", "quantize": "8bit"},
            {"model": "a/copy"},
            ("a/copy", "gsm8k", "8bit"),
        ),
        (
            {"base_model": "theirs", "quantize": "4bit"},
            {"model": "theirs", "dataset": "d"},
            ("theirs", "d", "4bit"),
        ),
        ({"base_model": "theirs", "dataset": None}, {}, ("theirs", "word-problems:1", "none")),
        ({"stage": "sft"}, {}, ("smollm2-135m", "word-problems:1", "none")),
        ({"base_model": GPU_MODEL, "dataset": "d"}, {}, (GPU_MODEL, "d", "none")),
    ],
)
def test_a_start_adapter_decides_model_data_and_packing(having, tmp_path, run, given, expected):
    """run.json may name no dataset, for example if the problems were passed from Python."""
    having(gpu=0, hub=False)
    (tmp_path / "run.json").write_text(json.dumps(run))
    values = machine.default_values(given, AdapterInfo.load(tmp_path))
    assert tuple(values[name] for name in ("model", "dataset", "quantize")) == expected


def test_a_container_has_what_its_limit_leaves_and_its_cache_of_files(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    whole = machine.available_memory("cpu")
    assert whole > 2**22
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory("cpu") > 2**22
    (tmp_path / "memory.max").write_text(f"{4 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{3 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {2**21}\nactive_file 9\n")
    assert machine.available_memory("cpu") == 3 * 2**20
    # An inner group, such as Slurm and systemd create, may allow less than the outer one.
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("4:memory:/old\n0::/job/step\n")
    for name, content in (("max", 2**20), ("current", 2**18), ("stat", "inactive_file 0")):
        (tmp_path / "job").mkdir(exist_ok=True)
        (tmp_path / "job" / f"memory.{name}").write_text(f"{content}\n")
    assert machine.available_memory("cpu") == 3 * 2**18


@pytest.mark.parametrize(
    ("own", "outer", "used"),
    [
        ("max 100000", "max 100000", 9),
        ("150000 100000", "max 100000", 2),
        ("max 1", "50 100", 1),
        ("", "max", 9),
    ],
)
def test_a_container_uses_as_many_threads_as_it_may_use_cpus(
    tmp_path, monkeypatch, own, outer, used
):
    """Fractions are rounded up. If the user sets OMP_NUM_THREADS, it takes precedence."""
    usual = torch.get_num_threads()
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "cpu.max").write_text(f"{own}\n")
    (tmp_path / "cpu.max").write_text(f"{outer}\n")
    try:
        torch.set_num_threads(9)
        monkeypatch.setenv("OMP_NUM_THREADS", "9")
        machine.prepare_process()
        assert torch.get_num_threads() == 9
        monkeypatch.delenv("OMP_NUM_THREADS")
        machine.prepare_process()
        assert torch.get_num_threads() == used
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize("same_weights", [True, False])
def test_nothing_is_taken_from_an_adapter_of_another_base(
    having, model_dir, tmp_path, monkeypatch, same_weights
):
    """The default adapter is used only if it fits, for example a copy of its base model."""
    having(gpu=0, hub=False)
    monkeypatch.chdir(tmp_path)
    run = {"base_model": "theirs", "dataset": "gsm8k:here", "quantize": "8bit"}
    run["base_hash"] = base_model_hash(str(model_dir)) if same_weights else "sha256:0"
    DEFAULT_SFT_ADAPTER.mkdir(parents=True)
    for name in ADAPTER_FILES:
        (DEFAULT_SFT_ADAPTER / name).write_text("{}")
    (DEFAULT_SFT_ADAPTER / "run.json").write_text(json.dumps(run))
    config = resolved(GRPOConfig, "--model", str(model_dir))
    expected = ("gsm8k:here", "8bit") if same_weights else ("word-problems:1", "none")
    assert (config.dataset, config.quantize) == expected


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, ("huggingface.co", 443)),
        ({"HF_ENDPOINT": "https://mirror.example"}, ("mirror.example", 443)),
        ({"HF_ENDPOINT": "http://mirror.example:8080"}, ("mirror.example", 8080)),
        # Only the hub's libraries can use a proxy.
        ({"HTTPS_PROXY": "http://proxy.example:3128"}, None),
    ],
)
def test_the_hub_is_looked_for_where_its_libraries_look(monkeypatch, environment, asked):
    for name in ("HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tried = []

    def connect(address, timeout):
        tried.append(address)
        return nullcontext()

    monkeypatch.setattr("socket.create_connection", connect)
    assert machine.hub_reachable()
    assert tried == ([asked] if asked else [])


def test_the_peak_memory_of_a_child_does_not_include_its_parent(monkeypatch):
    of_a_large_parent = SimpleNamespace(ru_maxrss=99 * 2**20)  # which a child inherits
    monkeypatch.setattr(machine.resource, "getrusage", lambda _: of_a_large_parent)
    assert machine.peak_memory_gb() < 50 or sys.platform != "linux"


def test_what_torch_holds_and_does_not_use_is_free(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (100, 1000))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 70)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: 30)
    assert machine.available_memory("cuda") == 140


@pytest.mark.parametrize(
    ("driver", "cuda", "visible", "expected"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue", "12.8", None,
         "driver 470.57.02 does not work with PyTorch"),
        ("NVRM version: 550.54.14", None, None, "built without CUDA"),
        ("NVRM version: 550.54.14", None, "", ""),  # hidden by the user
        (None, None, None, ""),
    ],
)  # fmt: skip
def test_a_gpu_that_is_not_used_is_explained(
    having, tmp_path, monkeypatch, driver, cuda, visible, expected
):
    having(gpu=0, hub=True)
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if driver:
        machine.DRIVER.write_text(driver)
    assert machine.why_no_gpu() == "" if not expected else expected in machine.why_no_gpu()
    assert expected in machine.pick_device().reason
    assert (expected or "no GPU here") in machine.default_setup().reason


@pytest.mark.parametrize(("answer", "expected"), [("535.1\n", "535.1"), (None, None)])
def test_where_only_nvidia_smi_knows_the_driver(tmp_path, monkeypatch, answer, expected):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{'echo ' + answer if answer else 'exit 9'}\n")
    program.chmod(0o755)
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "none")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert machine._nvidia_driver() == expected
