"""What a script starts with where no flag says it."""

import pytest

from rlm import machine
from rlm.config import parse
from rlm.grpo_config import GPU_DEFAULTS, GRPOConfig
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
