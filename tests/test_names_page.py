"""docs/reference/names.md: what it calls taken is taken, what it calls refused is refused."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlm.cli.options import UsageError, parse, read_options
from rlm.training import PRESETS, GRPOConfig

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "names.md"
TEXT = PAGE.read_text(encoding="utf-8")
(TAKEN,) = re.findall(r"Taken as they are: `([^`]*)`", TEXT)
VALUES = {
    "--algorithm": "Dr.GRPO", "--preset": "dapo", "--dataset_file": "my.jsonl", "--model": "m",
    "--output_dir": "out", "--wandb_project": "p", "--reasoning_format": "simple",
    "--clip_eps": "0.1", "--kl_weight": "0.1", "--learning_rate": "1e-5", "--temperature": "0.7",
}  # fmt: skip
SWITCHES = ("--use_lora", "--use_4bit", "--use_8bit", "--use_wandb")


@pytest.mark.parametrize("flag", TAKEN.split())
def test_a_flag_that_is_taken_is_read(flag):
    argv = [flag] if flag in SWITCHES else [flag, VALUES.get(flag, "8")]
    assert read_options(GRPOConfig, argv, presets=PRESETS) or flag == "--use_lora"  # always on


@pytest.mark.parametrize(
    "flag", ["--gradient_accumulation", "--log_steps", "--use_flash_attention"]
)
def test_a_flag_that_is_left_out_is_refused(flag):
    with pytest.raises(UsageError, match=f"unknown option {flag}"):
        read_options(GRPOConfig, [flag, "4"], presets=PRESETS)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"top_p": 0.95}, "--top-p must be 1"),
        ({"lora_dropout": 0.1}, "--lora-dropout must be 0"),
        ({"use_lora": False}, "only LoRA adapters are trained"),
    ],
)
def test_a_value_that_is_refused_says_why(values, says):
    with pytest.raises(ValueError, match=says):
        GRPOConfig(**values)


CONFIGS = {
    "recipes.orchestrator.train": "OrchestratorConfig",
    "recipes.orchestrator.evaluate": "EvaluateConfig",
    "recipes.experience.train": "TrainConfig",
}
COMMANDS = re.findall(r"\| `python (-m recipes[^`]*)`", TEXT)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_a_recipe_is_taken(command):
    module, *options = command.removeprefix("-m ").split()
    config = getattr(importlib.import_module(module), CONFIGS[module])
    assert parse(config, options)


@pytest.mark.parametrize(
    ("typed", "here"),
    [
        (["-m", "grpo_training.generator2", "--max-problems", "10"], "train generator 2 "),
        (["-m", "grpo_training.critic"], "python -m recipes.experience.train critic "),
        (["train_rl.py"], "python -m recipes.orchestrator.train"),
    ],
)
def test_a_command_of_another_readme_says_what_to_type(typed, here):
    done = subprocess.run(
        [sys.executable, *typed], cwd=PAGE.parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert here in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("line", re.findall(r"`(from (?:rlm|recipes)[^`…]*)`", TEXT))
def test_its_imports_work(line):
    exec(line, {})


def test_its_links_are_files():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (PAGE.parent / target).exists(), target
