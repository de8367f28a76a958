"""Names that seed 002, TRL and transformers have are taken where they mean the same."""

import dataclasses
import importlib
from pathlib import Path

import pytest

from rlm.cli.flags import flags_of, read_table
from rlm.cli.options import UsageError, parse, resolve_config
from rlm.data import FORMATS
from rlm.grading import grade
from rlm.reasoner.stream import ReasoningParser
from rlm.rewards import CorrectnessReward, FormatReward, GSM8KReward, ReasoningQualityReward
from rlm.training import PRESETS, GRPOConfig, SFTConfig

GRPO_SYNONYMS = {
    "save_steps": "save_every", "eval_steps": "eval_every", "max_steps": "steps",
    "epochs_per_step": "updates_per_batch", "num_iterations": "updates_per_batch",
    "num_generations": "group_size", "max_completion_length": "max_new_tokens",
}  # fmt: skip


def refusal(cls, *argv):
    with pytest.raises(UsageError) as caught:
        parse(cls, argv, presets=PRESETS)
    return str(caught.value)


@pytest.mark.parametrize(("name", "field"), GRPO_SYNONYMS.items())
def test_a_synonym_is_taken_on_the_command_line_in_yaml_and_in_python(name, field, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(f"{name}: 7\n")
    for config in (
        parse(GRPOConfig, [f"--{name}", "7"]),
        parse(GRPOConfig, [f"--{name.replace('_', '-')}=7"]),
        parse(GRPOConfig, ["--config", str(file)]),
        parse(GRPOConfig, ["--config_json", str(file)]),
        GRPOConfig(**{name: 7}),
        GRPOConfig.from_preset("grpo", **{name: 7}),
    ):
        assert getattr(config, field) == 7


# What the README of seed 002 types, and all other options of its script; its Russian tags are gone.
SEED_002 = (
    "--model Qwen/Qwen2.5-1.5B-Instruct --algorithm drgrpo --use_wandb --max_samples 5000",
    "--model Qwen/Qwen2.5-3B-Instruct --use_4bit --batch_size 2 --group_size 4",
    "--dataset_file a.jsonl --train_batch_size 2 --max_new_tokens 512 --temperature 0.7 "
    "--learning_rate 5e-6 --clip_eps 0.2 --kl_weight 0.0 --use_lora --lora_r 16 "
    "--output_dir output/grpo --save_steps 100 --use_wandb "
    "--reasoning_format simple --seed 42",
)


def test_the_lines_of_seed_002_are_taken_as_they_stand():
    for line in SEED_002[:2]:
        assert parse(GRPOConfig, line.split(), presets=PRESETS).model == line.split()[1]
    config = parse(GRPOConfig, SEED_002[2].split())
    assert (config.dataset, config.output, config.save_every) == (
        "a.jsonl", Path("output/grpo"), 100,
    )  # fmt: skip
    assert (config.clip_eps_low, config.clip_eps_high) == (0.2, 0.2)
    assert config.tracker == "wandb"
    assert (config.reasoning_format, config.kl_weight) == ("simple", 0)


@pytest.mark.parametrize(
    ("cls", "typed", "values"),
    [
        (GRPOConfig, "--report_to wandb", {"tracker": "wandb"}),
        (GRPOConfig, "--load_in_4bit", {"quantize": "4bit"}),
        (GRPOConfig, "--lr_scheduler_type cosine", {"lr_schedule": "cosine"}),
        (GRPOConfig, "--mask_truncated_completions", {"mask_truncated": True}),
        (GRPOConfig, "--resume-from-checkpoint", {"resume": True}),
        (GRPOConfig, "--model_name_or_path m --dataset_name d", {"model": "m", "dataset": "d"}),
        (GRPOConfig, "--lr 0.5", {"learning_rate": 0.5}),
        (GRPOConfig, "--dry-run", {"plan": True}),
        (GRPOConfig, "--dataset_train_split train[:5]", {"split": "train[:5]"}),
        (SFTConfig, "--num_epochs 3", {"epochs": 3}),
        (SFTConfig, "--num_train_epochs 3 --warmup_ratio 0.1", {"epochs": 3, "warmup_share": 0.1}),
        (SFTConfig, "--per_device_train_batch_size 4", {"micro_batch": 4}),
        (SFTConfig, "--max_seq_length 99", {"max_length": 99}),
        (SFTConfig, "--use_4bit --use_wandb", {"quantize": "4bit", "tracker": "wandb"}),
        (SFTConfig, "--model_name m --output_dir o", {"model": "m", "output": Path("o")}),
        (SFTConfig, "--dataset_file f --resume_from_checkpoint", {"dataset": "f", "resume": True}),
    ],
)
def test_other_synonyms(cls, typed, values):
    config = parse(cls, typed.split())
    assert {name: getattr(config, name) for name in values} == values


def test_an_unknown_name_is_refused_everywhere_with_the_same_sentence(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("grop_size: 1\n")
    sentence = "; did you mean {}?"
    assert refusal(GRPOConfig, "--grop_size").endswith(sentence.format("--group-size"))
    assert refusal(GRPOConfig, "--config", str(file)) == (
        f"{file}:1: unknown key 'grop_size'{sentence.format('group_size')}"
    )
    for make in (GRPOConfig, lambda **values: GRPOConfig.from_preset("dapo", **values)):
        with pytest.raises(TypeError) as caught:
            make(grop_size=1)
        said = f"GRPOConfig: unknown option 'grop_size'{sentence.format('group_size')}"
        assert str(caught.value) == said


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--num_generation", "; did you mean --group-size?"),  # by another name of it
        ("--spilt", "; did you mean --split?"),
        (
            "--steepness",
            "; --help lists the options, and docs/how-to/coming-from.md explains which names of "
            "other trainers work",
        ),
    ],
)
def test_a_misspelt_name_is_guessed_and_a_strange_one_is_not(typed, hint):
    assert refusal(GRPOConfig, typed) == f"unknown option {typed}{hint}"


@pytest.mark.parametrize(
    ("cls", "name", "said"),
    [
        (GRPOConfig, "warmup_ratio", "warmup_steps, a number of updates"),
        (GRPOConfig, "use_vllm", "sampler, with the value vllm"),
        (GRPOConfig, "no_lora", "use_lora, which is always on: the base model is never trained"),
        (GRPOConfig, "per_device_train_batch_size", "train_batch_size, a number of completions"),
        (SFTConfig, "bf16", "dtype, with the value bfloat16"),
        (GRPOConfig, "num_train_epochs", "steps, problems times passes, divided by the batch size"),
        (SFTConfig, "warmup_steps", "warmup_share, a share of the steps"),
        (
            SFTConfig,
            "gradient_accumulation_steps",
            "batch_size, a number of problems or examples per step",
        ),
        (SFTConfig, "val_size", "eval_samples, a number of problems"),
    ],
)
def test_an_option_that_has_another_unit_here_is_named(cls, name, said, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(f"{name}: 0.1\n")
    in_file = f"{file}:1: unknown key '{name}'; here it is {said}"
    assert refusal(cls, "--config", str(file)) == in_file
    option, _, unit = said.partition(",")
    typed = f"; here it is --{option.replace('_', '-')},{unit}"
    assert refusal(cls, f"--{name}", "0.1") == f"unknown option --{name}{typed}"


def test_a_value_of_a_switch_says_so():
    said = refusal(GRPOConfig, "--resume_from_checkpoint", "runs/x")
    assert said == "unknown option runs/x: --resume takes no value"
    with pytest.raises(ValueError, match="--resume: expected bool, got 'runs/x'"):
        GRPOConfig(resume_from_checkpoint="runs/x")
    said = refusal(GRPOConfig, "gsm8k", "--plan")  # what comes before the first word is no switch
    assert said == "unknown option gsm8k: type the name of its option before it"


# --- all of TRL's --------------------------------------------------------------------------------

# Fields of the same name: taken as they are. A new one has to mean the same to stand here.
SAME_NAME = {
    "GRPOConfig": "learning_rate warmup_steps max_grad_norm seed temperature",
    "SFTConfig": "learning_rate seed max_length",
}
STAGES = [("GRPOConfig", GRPOConfig), ("SFTConfig", SFTConfig)]


def trl_fields(name):
    """Return the fields of a config of the installed TRL, including those of transformers."""
    return [
        field.name for field in dataclasses.fields(getattr(importlib.import_module("trl"), name))
    ]


@pytest.mark.parametrize(("theirs", "ours"), STAGES)
def test_a_field_of_trls_config_has_the_same_name_or_a_synonym(theirs, ours):
    known = {key: flag.name for flag in flags_of(ours) for key in flag.keys}
    own = {flag.name for flag in flags_of(ours)}
    assert own & {*trl_fields(theirs)} == {*SAME_NAME[theirs].split()}
    for name in trl_fields(theirs):
        if name in known:
            assert name in own or name in read_table("synonyms")


@pytest.mark.parametrize(("theirs", "ours"), STAGES)
def test_every_synonym_of_trls_is_on_the_page(theirs, ours):
    page = (Path(__file__).parents[2] / "docs/how-to/coming-from.md").read_text()
    known = {key: flag.name for flag in flags_of(ours) for key in flag.keys}
    taken = {name: known[name] for name in trl_fields(theirs) if name in known}
    for name, option in taken.items():
        assert name == option or f"| `{name}` | `{option}` |" in page, (name, option)


# --- clip_eps, steps ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "low", "high"),
    [
        ({"clip_eps": 0.1}, 0.1, 0.1),
        ({"epsilon": 0.1}, 0.1, 0.1),  # TRL: epsilon_high is epsilon where it is not given
        ({"epsilon": 0.1, "epsilon_high": 0.3}, 0.1, 0.3),
        ({"clip_eps": 0.1, "clip_eps_low": 0.3}, 0.3, 0.1),
        ({"algorithm": "dapo"}, 0.2, 0.28),
        ({"algorithm": "dapo", "clip_eps": 0.2}, 0.2, 0.2),
        ({"algorithm": "dapo", "clip_eps_low": 0.1}, 0.1, 0.28),
    ],
)
def test_one_bound_sets_both(options, low, high):
    typed = [f"--{name}={value}" for name, value in options.items()]
    for config in (GRPOConfig(**options), parse(GRPOConfig, typed)):
        assert (config.clip_eps_low, config.clip_eps_high) == (low, high)
        assert dataclasses.replace(config, seed=1).clip_eps_high == high
        with pytest.raises(ValueError, match="--clip-eps"):  # it would be ignored
            dataclasses.replace(config, clip_eps=0.5)


def test_without_steps_python_makes_one_pass():
    assert GRPOConfig(batch_size=20).steps_for(41) == 3
    assert GRPOConfig(max_steps=7).steps_for(50) == 7


def test_the_command_line_makes_20_steps_where_nothing_is_said():
    given = ["--model", "m", "--dataset", "d", "--sft-adapter", "none"]
    assert resolve_config(GRPOConfig, given).steps == 20


# --- tags --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_every_pair_of_tags_is_read_wherever_tags_are(name):
    format = FORMATS[name]
    text = format.completion("2 + 3 is 5, so the answer is 5", "5")
    for strict in (True, False):
        assert grade(text, "5", strict=strict, **format.tags).correct
        assert not grade(text, "6", strict=strict, **format.tags).correct
    columns = {"reasoning_format": name}
    for reward in (CorrectnessReward(), GSM8KReward(), FormatReward(), ReasoningQualityReward()):
        assert reward(text, "5", **columns) > 0
    others = {"deepseek": "simple", "simple": "deepseek"}
    assert FormatReward()(text, "5", reasoning_format=others[name]) < 0.2  # not all of it
    parser = ReasoningParser(format)
    parts = [parser.feed(letter) for letter in text] + [parser.finish()]
    assert "".join(thought for thought, _ in parts) == "2 + 3 is 5, so the answer is 5"
    assert "".join(answer for _, answer in parts) == "5"


def test_tags_that_there_are_not_are_one_line():
    message = "--reasoning-format: unknown value 'xml'; choose from deepseek, simple"
    with pytest.raises(UsageError, match=message):
        FormatReward()("", "5", reasoning_format="xml")
    with pytest.raises(ValueError, match=message):
        GRPOConfig(reasoning_format="xml")
    assert FORMATS["Simple"] == FORMATS["simple"]


# --- in Python ----------------------------------------------------------------------------------


def test_python_takes_each_name_once():
    assert dataclasses.replace(GRPOConfig(steps=5), group_size=4).steps == 5
    for options in ({"epochs": 1, "num_epochs": 2}, {"num_epochs": 2, "epochs": 1}):
        with pytest.raises(TypeError, match="SFTConfig: epochs is given twice, once as num_epochs"):
            SFTConfig(**options)


@pytest.mark.parametrize("typed", ["Dr.GRPO", "DR_GRPO", "drgrpo", "dr-grpo"])
def test_the_name_of_an_algorithm_in_any_spelling(typed, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(f"algorithm: {typed}\nreasoning_format: Simple\n")
    for config in (
        GRPOConfig(algorithm=typed, reasoning_format="SIMPLE"),
        parse(GRPOConfig, ["--algorithm", typed, "--reasoning_format", "SIMPLE"]),
        parse(GRPOConfig, ["--config", str(file)]),
        GRPOConfig.from_preset(typed, reasoning_format="simple"),
        parse(GRPOConfig, ["--preset", typed, "--reasoning_format=Simple"], presets=PRESETS),
    ):
        assert (config.algorithm, config.reasoning_format) == ("drgrpo", "simple")
        assert config.aggregation == "constant"
