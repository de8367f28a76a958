"""What a script starts with where no flag says it."""

import json
from contextlib import nullcontext

import pytest

from rlm.cli.options import parse
from rlm.model import hardware as machine
from rlm.model.adapters import ADAPTER_FILES
from rlm.model.base import base_hash
from rlm.training import setup as start
from rlm.training.config import DEFAULT_SFT_ADAPTER, GPU_DEFAULTS, GRPOConfig
from train_sft import SFTConfig


@pytest.fixture
def having(monkeypatch):
    """Pretend that a GPU is here, and the hub in reach."""

    def pretend(gpu, hub):
        monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
        monkeypatch.setattr(machine, "hub_reachable", lambda: hub)

    return pretend


@pytest.mark.parametrize("cls", [GRPOConfig, SFTConfig])
@pytest.mark.parametrize(
    ("gpu", "hub", "expected"),
    [
        (True, True, ("Qwen/Qwen2.5-7B-Instruct", "gsm8k", "4bit")),
        (True, False, ("smollm2-135m", "word-problems:1", "none")),
        (False, True, ("smollm2-135m", "word-problems:1", "none")),
    ],
)
def test_model_and_data_are_chosen_by_the_machine(having, capsys, cls, gpu, hub, expected):
    having(gpu, hub)
    config = machine.fill_in(parse(cls, []), {"learning_rate": 0.5})
    assert (config.model, config.dataset, config.quantize) == expected
    assert (config.learning_rate == 0.5) == (gpu and hub)
    out = capsys.readouterr().out
    assert f"chosen: model {expected[0]}, dataset {expected[1]} (" in out


def test_what_was_typed_is_left_alone(having):
    having(gpu=True, hub=True)
    typed = ["--model=mine", "--max-new-tokens=96", "--steps=7"]
    config = machine.fill_in(parse(GRPOConfig, typed), GPU_DEFAULTS)
    assert (config.model, config.dataset, config.steps) == ("mine", "gsm8k", 7)
    assert config.max_new_tokens == 96  # the default, but typed
    assert config.quantize == "none"  # only our own choice of model is packed
    config = machine.fill_in(parse(GRPOConfig, ["--no-use-4bit"]), GPU_DEFAULTS)
    assert (config.model, config.quantize) == (machine.GPU_MODEL, "none")
    both = parse(GRPOConfig, ["--model=mine", "--dataset=word-problems"])
    assert machine.fill_in(both, GPU_DEFAULTS) == both


def test_a_start_adapter_decides_how_its_base_is_packed(having):
    having(gpu=False, hub=False)
    run = {"base_model": "theirs", "dataset": "gsm8k", "quantize": "8bit"}
    for typed, model in (([], "theirs"), (["--model=a/copy"], "a/copy")):
        config = machine.fill_in(parse(GRPOConfig, typed), GPU_DEFAULTS, run)
        assert (config.model, config.dataset, config.quantize) == (model, "gsm8k", "8bit")


def test_what_is_good_for_the_7b_model_is_for_no_other(having, capsys):
    """A small one may be packed, too."""
    having(gpu=False, hub=False)
    run = {"base_model": "smollm2-135m", "dataset": "word-problems:1", "quantize": "4bit"}
    config = machine.fill_in(GRPOConfig(), GPU_DEFAULTS, run)
    assert (config.quantize, config.steps) == ("4bit", GRPOConfig().steps)
    having(gpu=True, hub=True)
    config = machine.fill_in(parse(GRPOConfig, ["--model=a/small-one"]), GPU_DEFAULTS)
    assert (config.dataset, config.steps) == ("gsm8k", GRPOConfig().steps)
    run = {"base_model": machine.GPU_MODEL, "dataset": "gsm8k", "quantize": "4bit"}
    assert machine.fill_in(GRPOConfig(), GPU_DEFAULTS, run).steps == GPU_DEFAULTS["steps"]


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


def test_a_start_adapter_that_does_not_say_its_data(having):
    """As `GRPOTrainer` leaves one that was given problems of the caller's own."""
    having(gpu=False, hub=False)
    config = machine.fill_in(GRPOConfig(), {}, {"base_model": "theirs", "dataset": None})
    assert (config.model, config.dataset) == ("theirs", "word-problems:1")
    assert machine.fill_in(GRPOConfig(), {}, {"stage": "sft"}).model == "smollm2-135m"


@pytest.mark.parametrize("same_weights", [True, False])
def test_nothing_is_taken_from_an_adapter_of_another_base(
    having, model_dir, tmp_path, monkeypatch, same_weights
):
    """The default one is used where it fits; a copy of its base under another name fits."""
    having(gpu=False, hub=False)
    monkeypatch.chdir(tmp_path)
    run = {"base_model": "theirs", "dataset": "gsm8k:here", "quantize": "8bit"}
    run["base_hash"] = base_hash(str(model_dir)) if same_weights else "sha256:0"
    DEFAULT_SFT_ADAPTER.mkdir(parents=True)
    for name in ADAPTER_FILES:
        (DEFAULT_SFT_ADAPTER / name).write_text("{}")
    (DEFAULT_SFT_ADAPTER / "run.json").write_text(json.dumps(run))
    config = start.settle(parse(GRPOConfig, ["--model", str(model_dir)]))
    expected = ("gsm8k:here", "8bit") if same_weights else ("word-problems:1", "none")
    assert (config.dataset, config.quantize) == expected


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, ("huggingface.co", 443)),
        ({"HF_ENDPOINT": "https://mirror.example"}, ("mirror.example", 443)),
        ({"HF_ENDPOINT": "http://mirror.example:8080"}, ("mirror.example", 8080)),
        ({"HTTPS_PROXY": "http://proxy.example:3128"}, None),  # only the libraries could tell
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


@pytest.mark.parametrize(
    ("held_down", "dtype"),
    [(None, "bfloat16"), ("DEFAULT", "bfloat16"), ("AVX512_CORE_BF16", "bfloat16"),
     ("avx2", "float32"), ("AVX512_CORE_VNNI", "float32")],
)  # fmt: skip
def test_bf16_where_the_cpu_computes_it_and_is_let(monkeypatch, held_down, dtype):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if held_down:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", held_down)
    assert str(machine.pick_device().dtype) == f"torch.{dtype}"


def test_what_torch_holds_and_does_not_use_is_free(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (100, 1000))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 70)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: 30)
    assert machine.available_memory("cuda") == 140
