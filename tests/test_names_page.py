"""docs/reference/names.md: what it calls taken is taken, what it calls refused is refused."""

import re
from pathlib import Path

import pytest

from rlm.cli.options import UsageError, read_options
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


@pytest.mark.parametrize("line", re.findall(r"`(from rlm[^`…]*)`", TEXT))
def test_its_imports_work(line):
    exec(line, {})


def test_its_links_are_files():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (PAGE.parent / target).exists(), target
