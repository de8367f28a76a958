"""The examples that the project was asked to run, as written: Python blocks, command lines.

The model is a tiny one that ends early, and the hub is played by our own word problems. Changed are
import lines, script path and model name. `make test-slow` runs the command lines to their end;
otherwise they run for one step, which also says what they set.
"""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer, tiny_model
from expected_skips import SHARED, needs_shared

import train_grpo
from rlm.cli.main import run_main
from rlm.data import loaders as data
from rlm.data import word_problems
from rlm.training.algorithms import ALGORITHMS, PRESETS, algorithms_help
from rlm.training.config import GRPOConfig

BLOCKS = [
    """
from rlm import GRPOConfig, GRPOTrainer
from rlm.data import load_gsm8k

dataset = load_gsm8k(split="train", max_samples=1000)

config = GRPOConfig.from_preset("reasoning_small")

trainer = GRPOTrainer(
    model_name="MODEL",
    config=config,
)

trainer.train(dataset)
""",
    """
config = GRPOConfig.from_preset("grpo")
config = GRPOConfig.from_preset("drgrpo")
config = GRPOConfig.from_preset("dapo")
config = GRPOConfig.from_preset("reasoning_small")
config = GRPOConfig.from_preset("reasoning_large")
""",
    """
config = GRPOConfig(
    algorithm="drgrpo",
    group_size=8,
    batch_size=4,
    train_batch_size=2,
    max_new_tokens=512,
    temperature=0.7,
    clip_eps_low=0.2,
    clip_eps_high=0.28,
    kl_weight=0.0,
    use_lora=True,
    lora_r=16,
    use_4bit=True,
)
""",
    """
from rlm.rewards import (
    FormatReward,
    ReasoningQualityReward,
    GSM8KReward,
    CombinedReward,
)

reward_fn = CombinedReward([
    FormatReward(weight=1.0),
    ReasoningQualityReward(weight=0.5),
    GSM8KReward(weight=2.0),
])
""",
    """
from rlm.rewards.base import RewardFunction

class MyReward(RewardFunction):
    def __call__(self, completion, reference_answer, **kwargs):
        if "correct" in completion.lower():
            return 1.0
        return 0.0

trainer = GRPOTrainer(
    model_name="MODEL",
    reward_fn=MyReward(),
)
""",
]
COMMANDS = {  # and what the run's config must say
    "train_grpo.py --model MODEL": {"algorithm": "topr", "tracker": "none"},
    "train_grpo.py --model MODEL --algorithm drgrpo --use_wandb --max_samples 5000": {
        "algorithm": "drgrpo", "tracker": "wandb", "max_samples": 5000,
    },
    "train_grpo.py --model MODEL --use_4bit --batch_size 2 --group_size 4": {
        "quantize": "4bit", "batch_size": 2, "group_size": 4,
    },
}  # fmt: skip
OURS = "train_grpo.py --model MODEL --preset reasoning_small --reasoning_format simple"
SHORT = " --steps 1 --eval_samples 4"


@pytest.fixture(scope="module")
def early_model(tmp_path_factory):
    """Half of the tokens end a completion: examples with 512 new tokens take seconds."""
    path = tmp_path_factory.mktemp("early")
    model = tiny_model(hidden_size=64, intermediate_size=128, head_dim=16)  # 4-bit rows of 64
    model.generation_config.eos_token_id = [*range(128), 257]
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, and a hub that has GSM8K's fields with our problems in them."""
    monkeypatch.chdir(tmp_path)
    rows = list(map(vars, word_problems.generate_word_problems("train", 40, 0, [1])))
    monkeypatch.setattr(data, "read_hub", lambda name, split, config: enumerate(rows, 1))
    torch.manual_seed(0)
    return tmp_path


def run_command(command, model):
    script, *argv = shlex.split(command.replace("MODEL", shlex.quote(str(model))))
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
    assert len(names["dataset"]) == 40  # all that this hub has
    assert left_behind(here)
    out = capsys.readouterr().out
    assert "steps: 10 (" in out  # one pass, 4 problems a step
    assert "training starts from a bare model" in out
    assert "starts from a new adapter" in out
    assert "no CUDA GPU here, so the base is loaded without quantization" in out
    # What the blocks make, and do not use themselves:
    assert names["reward_fn"]("<think>so</think><answer>5</answer>", "5") > 0.5
    reward = names["MyReward"]()
    assert [reward("That is Correct.", "5"), reward("<answer>5</answer>", "5")] == [1.0, 0.0]
    scores = names["trainer"].scorer(names["dataset"][:1], [["correct", "5"]])
    assert scores.rewards == [[1.0, 0.0]]
    assert names["config"].group_size == 8


def test_the_block_of_the_python_page_that_trains(early_model, here):
    page = Path(__file__).parent.parent / "docs" / "reference" / "python-api.md"
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (block,) = [block for block in blocks if "reward_fn=short_and_right" in block]
    for said, short in (
        ("smollm2-135m", str(early_model)),
        ("steps=20", "steps=1"),
        ('"validation")', '"validation", max_samples=2)'),
    ):
        assert said in block
        block = block.replace(said, short)
    exec(block, {})
    assert Path("weights/short/adapter_model.safetensors").exists()


def test_the_block_of_the_page_on_algorithms(early_model, here, capsys):
    page = Path(__file__).parent.parent / "docs" / "explanation" / "algorithms.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert "Qwen/Qwen2.5-0.5B-Instruct" in block
    exec(block.replace("Qwen/Qwen2.5-0.5B-Instruct", str(early_model)), {})
    assert left_behind(here)
    said = capsys.readouterr().out
    assert "bare model" not in said  # the format is paid for
    assert "steps: 10 (" in said
    metrics = json.loads(Path("runs/grpo/metrics.jsonl").read_text().splitlines()[0])
    assert metrics.keys() >= {"reward/FormatReward", "reward/CorrectnessReward"}


@pytest.mark.parametrize(
    "more",
    [pytest.param(SHORT, id="short"), pytest.param("", id="whole", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("command", [*COMMANDS, OURS])
def test_command_lines(command, more, early_model, here, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert run_command(command + more, early_model) == 0
    assert left_behind(here)
    config = json.loads((here / "runs/grpo/config.json").read_text())
    assert config["sft_adapter"] is None
    expected = COMMANDS.get(command, {"batch_size": 4, "fixed_length_normalizer": 512})
    assert {name: config[name] for name in expected} == expected
    said = capsys.readouterr().out
    assert said.count("Stage 2: GRPO\n") == 1
    # It is an extra: where it is missing, one line says so, and the run goes on.
    assert ("tracker: " in said) == ("--use_wandb" in command)


def test_help_tells_every_algorithm_and_preset(capsys):
    with pytest.raises(SystemExit):
        run_main(
            train_grpo.main, GRPOConfig, argv=["--help"], presets=PRESETS, epilog=algorithms_help()
        )
    text = capsys.readouterr().out
    for name, algorithm in ALGORITHMS.items():
        assert f"{name}: {algorithm.formula()}" in text
    assert all(f"  {name}: " in text for name in PRESETS)


@needs_shared("seeds")
def test_the_examples_are_the_documents():
    """As syntax trees, because comments are the document's own; the package's name is ours."""
    (document,) = (SHARED / "seeds").glob("002_*.txt")
    text = document.read_text(encoding="utf-8").replace("homellm.training.rl", "rlm")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    blocks = [re.sub(r'model_name="[^"]*"', 'model_name="MODEL"', block) for block in blocks]
    assert [ast.dump(ast.parse(b)) for b in blocks] == [ast.dump(ast.parse(b)) for b in BLOCKS]
    commands = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    commands = commands.replace("python -m rlm.train_rl", "train_grpo.py")
    commands = re.sub(r"--model\s+\S+", "--model MODEL", commands).splitlines()
    wanted = [line.split() for line in commands if line.startswith("train_grpo.py")]
    assert wanted == [command.split() for command in COMMANDS]
