"""Training options: presets, defaults of the algorithms, precedence, and rejected values."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from rlm.cli.options import UsageError, parse, read_options, resolve_config, to_dict
from rlm.model import AdapterInfo
from rlm.training.algorithms import ALGORITHMS, PRESETS, algorithms_help
from rlm.training.config import GRPOConfig
from rlm.training.resolve import follow_adapter
from rlm.training.sft_config import SFTConfig

GRPO = {
    "algorithm": "grpo", "advantage": "std", "clip_eps_high": 0.2,
    "aggregation": "sequence", "dynamic_sampling": False, "overlong_buffer": 0, "kl_weight": 0.0,
}  # fmt: skip
DRGRPO = GRPO | {"algorithm": "drgrpo", "advantage": "centred", "aggregation": "constant"}
DAPO = GRPO | {
    "algorithm": "dapo", "clip_eps_high": 0.28, "aggregation": "token",
    "dynamic_sampling": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("grpo", GRPO),
        ("drgrpo", DRGRPO | {"max_new_tokens": 256}),
        ("dapo", DAPO | {"overlong_buffer": 51}),
        (
            "reasoning_small",
            DRGRPO
            | {
                "group_size": 8, "batch_size": 4, "train_batch_size": None,
                "max_new_tokens": 512, "learning_rate": 2e-5,
                "lora_r": 16, "quantize": "auto",
            },
        ),
        (
            "reasoning_large",
            DAPO
            | {
                "overlong_buffer": 409, "group_size": 16, "batch_size": 8, "train_batch_size": None,
                "max_new_tokens": 2048, "learning_rate": 1e-5, "quantize": "auto",
            },
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("by", ["python", "command line"])
def test_presets(name, values, by, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if by == "python":
        config = GRPOConfig.from_preset(name)
    else:
        config = parse(GRPOConfig, ["--preset", name], presets=PRESETS)
    assert {field: getattr(config, field) for field in values} == values


def test_options_stand_above_what_the_algorithm_sets():
    config = GRPOConfig(algorithm="drgrpo", max_new_tokens=512, clip_eps_high=0.28)
    assert (config.clip_eps_high, config.aggregation) == (0.28, "constant")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 7


@pytest.mark.parametrize(
    ("options", "quantize"),
    [({}, "auto"), ({"quantize": "8bit"}, "8bit"), ({"use_4bit": True}, "4bit"),
     ({"use_4bit": False}, "none")],
)  # fmt: skip
def test_an_option_or_its_switch_stands_above_a_preset(options, quantize):
    assert GRPOConfig.from_preset("reasoning_small", **options).quantize == quantize


def test_what_is_saved_reads_back_as_the_same_config(tmp_path):
    config = GRPOConfig.from_preset("dapo", max_new_tokens=50, sft_adapter=None)
    file = tmp_path / "config.json"  # every JSON file is a YAML file
    file.write_text(json.dumps(to_dict(config)))
    assert parse(GRPOConfig, ["--config", str(file)], presets=PRESETS) == config


def test_none_is_a_word_for_no_value_in_python_too():
    config = GRPOConfig(sft_adapter="none", max_minutes="none", tool="none")
    assert (config.sft_adapter, config.max_minutes, config.tool) == (None, None, "none")


def test_options_change_the_formula():
    config = GRPOConfig(algorithm="drgrpo", dataset="elementary:1+word-problems")
    assert config.formula.endswith("sum over tokens / (rollouts · 96)")
    config = GRPOConfig(algorithm="dapo", advantage="centred", clip_eps_high=0.5, overlong_buffer=0)
    assert config.formula == (
        "A = r − mean; l = −min(ρ A, clip(ρ, 0.8, 1.5) A); ρ of each token; "
        "mean over all tokens of the update; groups with equal rewards are replaced"
    )
    config = GRPOConfig(algorithm="dapo", aggregation="constant", max_new_tokens=64)
    assert "sum over tokens / (rollouts · 64)" in config.formula


def test_unchanged_options_leave_the_table_as_it_is():
    for name, algorithm in ALGORITHMS.items():
        config = GRPOConfig(algorithm=name, max_new_tokens=500)
        assert config.resolved_algorithm == algorithm
        assert algorithm.formula() in algorithms_help()


def test_dynamic_sampling_rounds():
    assert GRPOConfig().sampling_rounds == 1
    assert GRPOConfig(algorithm="dapo").sampling_rounds == 4
    assert GRPOConfig(algorithm="dapo", dynamic_sampling=False).sampling_rounds == 1
    assert GRPOConfig(dynamic_sampling=True).sampling_rounds == 4


def test_an_unknown_preset_names_those_that_are():
    with pytest.raises(ValueError, match="grpo, drgrpo, dapo, maxrl, topr, reasoning_small"):
        GRPOConfig.from_preset("best")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"use_lora": False}, "never the base model"),
        ({"use_flash_attention": False}, "the fastest attention is always used"),
        ({"aggregation": "mean"}, "sequence, token, constant"),
        ({"overlong_buffer": 600}, "longer than"),
        ({"algorithm": "ppo"}, "grpo, drgrpo, dapo, gspo, cispo, maxrl, topr"),
        ({"reasoning_format": "xml"}, "deepseek, simple"),
        ({"doctor": True, "resume": True}, "--resume"),
        ({"plan": True, "resume": True}, "--resume"),
        ({"plan": True, "doctor": True}, "one of them"),
        ({"plan": True, "sampler": "vllm"}, "--sampler vllm"),
        ({"clip_eps_low": 1.5}, "at most 1"),
        ({"group_size": 1}, "at least 2"),
        ({"temperature": 0.0}, "above 0"),
        ({"quantize": "8bit", "use_4bit": True}, "contradict"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(options, why):
    with pytest.raises(ValueError, match=why):
        GRPOConfig(**options)
    typed = [f"--{name}={value}" for name, value in options.items() if not isinstance(value, bool)]
    typed += [f"--{'' if v else 'no-'}{n}" for n, v in options.items() if isinstance(v, bool)]
    with pytest.raises(UsageError):
        parse(GRPOConfig, typed, presets=PRESETS)


def test_none_is_refused_where_it_does_not_mean_unset():
    for name, kind in {"output": "path", "temperature": "float", "resume": "bool"}.items():
        with pytest.raises(ValueError, match=f"--{name}: expected {kind}, got None"):
            GRPOConfig(**{name: None})
    assert GRPOConfig(learning_rate=None).learning_rate > 0  # set by the algorithm


def test_the_docs_have_every_formula_and_source():
    page = Path(__file__).parents[2] / "docs/explanation/algorithms.md"
    text = page.read_text(encoding="utf-8")
    for name, algorithm in ALGORITHMS.items():
        page = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert f"> {algorithm.formula()}\n" in page
        assert algorithm.source.rpartition(" ")[2] in page
    for name in PRESETS:
        assert f"`{name}`" in text


@pytest.mark.parametrize(
    ("dataset", "on_cpu", "on_gpu"),
    [
        ("word-problems:1", 96, 96),
        ("elementary+word-problems", 96, 96),
        ("gsm8k", 256, 512),
        ("openai/gsm8k", 256, 512),
        ("elementary+mine.jsonl", 256, 512),
    ],
)
def test_the_length_of_completions_follows_the_data(dataset, on_cpu, on_gpu, monkeypatch):
    given = ["--model", "m", "--sft-adapter", "none", "--dataset", dataset]
    for has_gpu, tokens in ((False, on_cpu), (True, on_gpu)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert resolve_config(GRPOConfig, given).max_new_tokens == tokens
        typed = resolve_config(GRPOConfig, [*given, "--max-new-tokens", "7"])
        assert typed.max_new_tokens == 7


@pytest.mark.parametrize(
    ("typed", "limit"),
    [
        (["--dataset", "gsm8k"], 400),
        (["--dataset", "mine.jsonl"], None),  # the whole file of a user
        (["--dataset", "mine.jsonl", "--max-samples", "5"], 5),
        (["--dataset", "gsm8k", "--max-samples", "none"], None),
    ],
)
def test_how_many_examples_sft_learns_from(typed, limit):
    assert resolve_config(SFTConfig, ["--model", "m", *typed]).max_samples == limit


def test_a_plan_needs_no_trained_adapter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"weights/sft_lora does not exist.*train_sft\.py"):
        GRPOConfig.resolve({})
    assert GRPOConfig.resolve({"plan": True})["dataset"] == "word-problems:1"


@pytest.mark.parametrize("look", [{"doctor": True}, {"plan": True}])
def test_what_writes_nothing_is_not_refused_for_what_it_would_write(look):
    place = Path("weights/final_rlm_lora")  # the default output, which users often inspect
    assert GRPOConfig(sft_adapter=place, output=place, **look).output == place
    assert SFTConfig(adapter=place, output=place, dry_run=3).output == place
    with pytest.raises(ValueError, match="--output would overwrite --sft-adapter"):
        GRPOConfig(sft_adapter=place, output=place)
    for kept in ("adapter_best", "adapter_last"):
        with pytest.raises(ValueError, match="is a folder that the run itself writes"):
            GRPOConfig(run_dir=Path("runs/x"), output=Path("runs/x") / kept)


@pytest.mark.parametrize("config", [GRPOConfig, SFTConfig])
def test_the_adapter_never_replaces_the_run_that_made_it(config, tmp_path, monkeypatch):
    """The folder at --output is renamed to NAME.prev, and the next run deletes NAME.prev."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    Path("link").symlink_to(run)
    for output in ("runs/x", "runs", run, run.parent, "runs/../runs/x", "link", "."):
        for run_dir in ("runs/x", run, "link"):
            with pytest.raises(ValueError, match=f"--output {output} would replace --run-dir"):
                config(output=Path(output), run_dir=Path(run_dir))
    with pytest.raises(ValueError, match="would replace --run-dir"):
        config(output=Path("mine"), run_dir=Path("mine.prev"))
    for name in ("checkpoints", "checkpoints/mine", "sampler_adapter"):
        with pytest.raises(ValueError, match="is a folder that the run itself writes"):
            config(output=Path("link", name), run_dir=run)
    for output in (run / "adapter", Path("runs/x_lora"), Path("other")):
        assert config(output=output, run_dir=Path("link")).output == output


@pytest.mark.parametrize(
    ("config", "option"), [(GRPOConfig, "sft_adapter"), (SFTConfig, "adapter")]
)
def test_a_run_never_replaces_the_adapter_that_it_starts_from(config, option, tmp_path):
    """A new run renames the folder of an earlier run to NAME.prev, and deletes an old NAME.prev."""
    run = tmp_path / "x"
    with pytest.raises(ValueError, match="--output would overwrite"):
        config(output=tmp_path / "a", run_dir=run, **{option: tmp_path / "a.prev"})
    for start in (run / "adapter_last", tmp_path / "x.prev" / "adapter_best"):
        there = {"output": tmp_path / "b", "run_dir": run, option: start}
        with pytest.raises(ValueError, match="use another --run-dir"):
            config(**there)
        config(**there, resume=True)
    config(output=tmp_path / "b", run_dir=run, **{option: tmp_path / "x_sft"})


def test_no_start_adapter_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="would replace --run-dir"):
        GRPOConfig(sft_adapter=None, output=Path())
    GRPOConfig(sft_adapter=None, output=Path(), run_dir=tmp_path.parent / "run")


def test_the_columns_of_the_default_adapter_are_used_if_a_model_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adapter = tmp_path / "weights" / "sft_lora"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "mine"}')
    (adapter / "adapter_model.safetensors").touch()
    made = {"base_model": "mine", "dataset": "d.csv", "config": {"columns": "question=q,answer=a"}}
    (adapter / "run.json").write_text(json.dumps(made))
    (tmp_path / "d.csv").write_text("q,a\nWhat is 1 + 1?,2\n")
    GRPOConfig(model="mine", dataset="d.csv").check_files()
    with pytest.raises(UsageError, match="--columns question="):
        GRPOConfig(model="mine", dataset="d.csv", sft_adapter=None).check_files()


def test_a_config_made_in_python_takes_the_tool_of_the_start_adapter_only_if_asked():
    start = AdapterInfo(Path("a"), tool="calculator", reasoning_format="simple")
    for asked, tool in (({}, "none"), ({"tool": "none"}, "none"), ({"tool": "auto"}, "calculator")):
        found = follow_adapter(GRPOConfig(**asked), start)
        assert (found.tool, found.quantize, found.reasoning_format) == (tool, "none", "simple")


def test_another_algorithm_replaces_the_defaults_in_the_config_of_a_run(tmp_path):
    """config.json contains every value, also those that the algorithm decided."""
    file = tmp_path / "config.json"
    own = {"steps": 7, "batch_size": 4, "clip_eps_high": 0.5, "max_new_tokens": 96}
    file.write_text(json.dumps(to_dict(GRPOConfig(algorithm="topr", **own))))
    stored = ["--config", str(file)]
    same, other = (
        read_options(GRPOConfig, [*stored, *more]) for more in ([], ["--algorithm=grpo"])
    )
    assert (same["algorithm"], same["advantage"]) == ("topr", "share")
    assert GRPOConfig(**other) == GRPOConfig(algorithm="grpo", **own)
    file.write_text("{algorithm: topr, learning_rate: 3e-4}")  # written by a user
    assert read_options(GRPOConfig, [*stored, "--algorithm=grpo"])["learning_rate"] == 3e-4
