"""Reading an adapter's run.json, and choosing its base model."""

import json

import pytest

from rlm.cli.options import UsageError
from rlm.model.adapter_info import AdapterInfo


def info(tmp_path, run):
    (tmp_path / "run.json").write_text(json.dumps(run))
    return AdapterInfo.load(tmp_path)


def test_what_run_json_says(tmp_path):
    run = {"stage": "grpo", "base_model": "b", "base_hash": "h", "quantize": "8bit"}
    run |= {"dataset": "gsm8k", "config": {"reasoning_format": "simple"}}
    said = {name: value for name, value in run.items() if name != "config"}
    wanted = AdapterInfo(tmp_path, **said, reasoning_format="simple", run=run)
    assert info(tmp_path, run) == wanted


def test_an_older_run_and_one_of_another_tool(tmp_path):
    nothing = AdapterInfo.load(tmp_path)
    assert nothing == AdapterInfo(tmp_path)
    assert (nothing.quantize, nothing.reasoning_format) == ("none", "deepseek")
    assert info(tmp_path, {"dataset": None}).quantize == "none"


def test_flags_win_over_run_json(tmp_path):
    found = info(tmp_path, {"base_model": "b", "quantize": "4bit"})
    assert found.resolve_base() == ("b", "4bit")
    assert found.resolve_base("a/copy", "none") == ("a/copy", "none")
    with pytest.raises(UsageError, match="does not record its base model"):
        AdapterInfo(tmp_path).resolve_base()


def test_an_adapter_of_another_tool_says_its_base_itself(tmp_path):
    def of(base):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        return AdapterInfo.load(tmp_path)

    assert of("org/base").resolve_base() == ("org/base", "none")
    assert of(str(tmp_path)).resolve_base("mine") == ("mine", "none")
    with pytest.raises(UsageError, match="trained on /of/another/machine, which does not exist"):
        of("/of/another/machine").resolve_base()
    assert info(tmp_path, {"base_model": "b"}).base_model == "b"
    assert info(tmp_path, {"note": "of another tool"}).base_model == "/of/another/machine"
    assert of(5).base_model is None


@pytest.mark.parametrize("text", ["{", "3"])
def test_a_broken_run_json_is_one_line(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UsageError, match=r"run\.json is not valid JSON"):
        AdapterInfo.load(tmp_path)
    (tmp_path / "run.json").unlink()
    (tmp_path / "run.json").mkdir()
    with pytest.raises(UsageError, match=r"run\.json cannot be read: Is a directory"):
        AdapterInfo.load(tmp_path)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"base_model": 5}, "base_model is 5, not"),
        ({"dataset": ["gsm8k"]}, r"dataset is \['gsm8k'\], not a string"),
        ({"config": {"system_prompt": 7}}, "system_prompt is 7, not a string"),
        ({"config": {"reasoning_format": "qwen"}}, "reasoning_format is 'qwen'; valid values are"),
        ({"quantize": "nf4"}, "quantize is 'nf4'; valid values are none, 4bit, 8bit"),
        ({"answer_types": [{}]}, r"answer_types are \[{}"),
    ],
)
def test_a_wrong_value_in_run_json_is_one_line(tmp_path, run, said):
    with pytest.raises(UsageError, match=rf"run\.json: {said}"):
        info(tmp_path, run)


@pytest.mark.parametrize("config", [None, "mine.yaml"])
def test_a_config_of_another_tool_is_one_line(tmp_path, config):
    with pytest.raises(UsageError, match=r"run\.json: config is .*, not a JSON object"):
        info(tmp_path, {"config": config})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, None),
        ({"lora_r": 16, "lora_alpha": 32}, None),  # the values of the adapter
        ({"lora_r": 64}, "--lora-r 64: the adapter .* has 16"),
        ({"lora_r": 16, "lora_alpha": 7}, "--lora-alpha 7: the adapter .* has 32"),
    ],
)
def test_an_adapter_to_start_from_keeps_its_rank(given, said, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 16, "lora_alpha": 32}')
    start = AdapterInfo.load(tmp_path)
    if said:
        with pytest.raises(UsageError, match=said):
            start.resolve_rank(given)
    else:
        assert start.resolve_rank(given) == {"lora_r": 16, "lora_alpha": 32}
