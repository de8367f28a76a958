"""docs/how-to/coming-from.md: its commands are parsed, its Python runs up to the model, its options
exist."""

import ast
import dataclasses
import re
import shlex
from pathlib import Path

import eval as evaluate
from rlm.cli.flags import flags_of
from rlm.cli.options import parse, read_options
from rlm.training import PRESETS, GRPOConfig, SFTConfig

PAGE = Path(__file__).parent.parent / "docs/how-to/coming-from.md"
TEXT = PAGE.read_text(encoding="utf-8")
CLASSES = {
    "train_sft.py": SFTConfig, "train_grpo.py": GRPOConfig, "eval.py": evaluate.EvaluateConfig
}  # fmt: skip


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.S)


def test_the_commands_are_parsed():
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) == 3
    for line in lines:
        _, script, *argv = shlex.split(line)
        assert read_options(CLASSES[script], argv, presets=PRESETS if "grpo" in script else None)


def test_the_command_and_the_python_block_say_the_same():
    (block,) = blocks("python")
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if getattr(call.func, "id", "") == "GRPOConfig"]
    in_python = GRPOConfig(**{key.arg: ast.literal_eval(key.value) for key in call.keywords})
    line = next(x for x in blocks("bash")[0].splitlines() if "train_grpo" in x)
    typed = parse(GRPOConfig, shlex.split(line)[2:], presets=PRESETS)
    differ = {
        f.name
        for f in dataclasses.fields(GRPOConfig)
        if getattr(in_python, f.name) != getattr(typed, f.name)
    }
    assert differ == {"model", "dataset", "output"}


def test_the_defaults_of_the_table_are_ours():
    grpo, sft = GRPOConfig(), SFTConfig()
    assert (grpo.learning_rate, sft.learning_rate) == (3e-4, 1e-3)
    assert (grpo.batch_size, grpo.group_size, grpo.max_new_tokens) == (20, 8, 96)
    assert (grpo.save_every, grpo.eval_samples, grpo.kl_weight) == (10, 100, 0)
    assert (grpo.lora_r, grpo.lora_alpha, grpo.algorithm) == (16, 32, "topr")


def test_the_defaults_of_the_table_are_trls():
    import trl

    theirs = {f.name: f.default for f in dataclasses.fields(trl.GRPOConfig)}
    assert (theirs["learning_rate"], theirs["loss_type"], theirs["beta"]) == (1e-6, "dapo", 0)
    assert (theirs["num_generations"], theirs["per_device_train_batch_size"]) == (8, 8)
    assert (theirs["max_completion_length"], theirs["save_steps"]) == (512, 500)
    sft = {f.name: f.default for f in dataclasses.fields(trl.SFTConfig)}
    assert sft["learning_rate"] == 2e-5


def test_every_option_of_the_tables_exists():
    known = {key for cls in CLASSES.values() for flag in flags_of(cls) for key in flag.keys}
    own = re.findall(r"^\| [^|]+ \| ([^|]+)", TEXT, re.M)
    named = {name for cell in own for name in re.findall(r"`--([a-z-]+)", cell)}
    named -= {"nproc-per-node", "merge", "gguf"}  # of torchrun and inference.py
    assert len(named) > 25
    for name in named:
        assert name.replace("-", "_").removeprefix("no_") in known | {
            "load_in_4bit",
            "use_std_normalization",
        }, name
