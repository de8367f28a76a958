"""The examples a reader tries first, run as they are written: Python blocks and command lines.

The model is a tiny one that ends early, and the hub is played by our own word problems. Where the
document that the examples come from lies beside the checkout, its own blocks are run too, changed
in import lines, script path and model name only.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer, tiny_model

import train_grpo
from rlm import data, word_problems
from rlm.algorithms import ALGORITHMS
from rlm.config import run_main
from rlm.grpo_config import PRESETS, GRPOConfig, algorithms_help

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = next(iter((ROOT.parent / "shared" / "seeds").glob("002_*.txt")), None)

BLOCKS = [
    """
from rlm import GRPOConfig, load_gsm8k
from train_grpo import GRPOTrainer

dataset = load_gsm8k(split="train", max_samples=1000)
config = GRPOConfig.from_preset("reasoning_small")
trainer = GRPOTrainer(model_name="MODEL", config=config)
trainer.train(dataset)
""",
    """
from rlm.rewards import CombinedReward, FormatReward, GSM8KReward, ReasoningQualityReward

reward_fn = CombinedReward([
    FormatReward(weight=1.0), ReasoningQualityReward(weight=0.5), GSM8KReward(weight=2.0),
])
trainer = GRPOTrainer(model_name="MODEL", config=GRPOConfig(steps=1), reward_fn=reward_fn)
trainer.train(dataset)
""",
    """
from rlm.rewards import RewardFunction

class MyReward(RewardFunction):
    def __call__(self, completion, reference_answer, **kwargs):
        return 1.0 if "correct" in completion.lower() else 0.0

trainer = GRPOTrainer(model_name="MODEL", reward_fn=MyReward())
""",
]
COMMANDS = [
    "train_grpo.py --model MODEL --algorithm drgrpo --max_samples 5000 --preset reasoning_small",
    "train_grpo.py --model MODEL --batch_size 2 --group_size 4 --reasoning_format simple",
]


@pytest.fixture(scope="module")
def early_model(tmp_path_factory):
    """Half of the tokens end a completion: examples with 512 new tokens take seconds."""
    path = tmp_path_factory.mktemp("early")
    model = tiny_model()
    model.generation_config.eos_token_id = [*range(128), 257]
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, and a hub that has GSM8K's fields with our problems in them."""
    monkeypatch.chdir(tmp_path)
    rows = list(word_problems.generate("train", 1300, 0, [1]))
    monkeypatch.setattr(data, "_hub_rows", lambda name, split: enumerate(rows, 1))
    torch.manual_seed(0)
    return tmp_path


def run_command(command, model):
    script, *argv = shlex.split(command.replace("MODEL", str(model)))
    assert script == "train_grpo.py"
    with pytest.raises(SystemExit) as exit:
        run_main(train_grpo.main, GRPOConfig, argv=argv, presets=PRESETS, epilog=algorithms_help())
    return exit.value.code or 0


def left_behind(folder):
    files = [
        "weights/final_rlm_lora/adapter_model.safetensors",
        "weights/final_rlm_lora/run.json",
        "runs/grpo/metrics.jsonl",
        "runs/grpo/config.json",
    ]
    return all((folder / file).is_file() for file in files)


def test_python_blocks(early_model, here, capsys):
    names = {}
    for block in BLOCKS:
        exec(block.replace("MODEL", str(early_model)), names)
    assert len(names["dataset"]) == 1000
    assert left_behind(here)
    out = capsys.readouterr().out
    assert "starts from a new adapter" in out
    assert "4-bit base is for CUDA GPUs" in out
    row = json.loads((here / "runs/grpo/metrics.jsonl").read_text().splitlines()[0])
    assert {"reward/FormatReward", "reward/GSM8KReward"} <= set(row)


@pytest.mark.skipif(DOCUMENT is not None, reason="the document's own are run")
@pytest.mark.parametrize("command", COMMANDS)
def test_command_lines(command, early_model, here):
    assert run_command(command, early_model) == 0
    assert left_behind(here)
    config = json.loads((here / "runs/grpo/config.json").read_text())
    assert config["sft_adapter"] is None
    if "preset" in command:
        assert (config["batch_size"], config["fixed_length_normalizer"]) == (4, 512)


def test_help_tells_every_algorithm_and_preset(capsys):
    with pytest.raises(SystemExit):
        run_main(
            train_grpo.main, GRPOConfig, argv=["--help"], presets=PRESETS, epilog=algorithms_help()
        )
    text = capsys.readouterr().out
    for name, algorithm in ALGORITHMS.items():
        assert f"{name}: {algorithm.formula()}" in text
    assert all(f"  {name}: " in text for name in PRESETS)


IMPORTS = {
    "from homellm.training.rl import GRPOConfig, GRPOTrainer": (
        "from rlm import GRPOConfig\nfrom train_grpo import GRPOTrainer"
    ),
    "from homellm.training.rl.data import": "from rlm.data import",
    "from homellm.training.rl.rewards.base import": "from rlm.rewards import",
    "from homellm.training.rl.rewards import": "from rlm.rewards import",
}
needs_document = pytest.mark.skipif(DOCUMENT is None, reason="the document is not here")


def documents(language):
    """The document's blocks of a language, in order."""
    if DOCUMENT is None:
        return []
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


def documented_commands():
    lines = "".join(documents("bash")).replace("\\\n", " ").splitlines()
    lines = [line for line in lines if line.startswith("python -m homellm.training.rl.train_rl")]
    model = r"--model\s+\S+"
    return [
        re.sub(model, "--model MODEL", line.replace("python -m homellm.training.rl.train_rl", ""))
        for line in lines
    ]


@needs_document
def test_the_documents_python_blocks(early_model, here):
    names = {}
    for block in documents("python"):
        for theirs, ours in IMPORTS.items():
            block = block.replace(theirs, ours)
        block = re.sub(r'model_name="[^"]*"', f'model_name="{early_model}"', block)
        exec(block, names)
    assert len(names["dataset"]) == 1000
    assert left_behind(here)
    assert names["trainer"].scorer is not None


@needs_document
@pytest.mark.parametrize("command", documented_commands())
def test_the_documents_command_lines(command, early_model, here, monkeypatch):
    if "--use_wandb" in command:
        pytest.importorskip("wandb", reason="an extra: pip install 'rlm[track]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    code = run_command("train_grpo.py " + command, early_model)
    assert code == 0
    assert left_behind(here)
