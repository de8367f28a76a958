"""Runs the examples of the documentation unchanged, with a tiny model.

The examples are the Python blocks of two pages and of a published document, the commands of the
tutorial and the cells of the notebook.
"""

import ast
import contextlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import types
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from conftest import PACKABLE, byte_tokenizer, tiny_model
from expected_skips import SHARED, needs_shared
from golden import ROOT
from live_server import live

import eval as evaluate
import inference
import server
import train_grpo
import train_sft
from examples import roman
from rlm import console
from rlm.cli.main import run_main
from rlm.cli.options import parse, resolve_config
from rlm.data import load_problems, loaders
from rlm.data.word_problems import generate_word_problems
from rlm.rewards import Scorer, as_reward
from rlm.training import PRESETS, GRPOConfig

# --- the Python blocks ----------------------------------------------------------------------------

BLOCKS = [
    """
from homellm.training.rl import GRPOConfig, GRPOTrainer
from homellm.training.rl.data import load_gsm8k

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
from homellm.training.rl.rewards import (
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
from homellm.training.rl.rewards.base import RewardFunction

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


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("config", "GRPOConfig"),
        ("trainer", "GRPOTrainer"),
        ("loss", "policy_loss"),
        ("rollout", "Rollout"),
        ("experience", "Group"),
        ("algorithms", "PRESETS"),
        ("rewards.base", "RewardFunction"),
        ("rewards.format", "FormatReward"),
        ("rewards.math", "GSM8KReward"),
        ("data.base", "Problem"),
        ("data.gsm8k", "load_gsm8k"),
    ],
)
def test_the_modules_of_that_package_have_aliases(module, name):
    assert hasattr(import_module(f"homellm.training.rl.{module}"), name)


@pytest.fixture(scope="module")
def early_model(tmp_path_factory):
    """Save a model in which half of the tokens are end tokens, so completions are short."""
    path = tmp_path_factory.mktemp("early")
    model = tiny_model(**PACKABLE, intermediate_size=128)
    model.generation_config.eos_token_id = [*range(128), 257]
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Enter an empty directory, and simulate a hub with our own problems in GSM8K's columns."""
    monkeypatch.chdir(tmp_path)
    rows = list(map(vars, generate_word_problems("train", 12, 0, [1])))
    monkeypatch.setattr(loaders, "read_dataset", lambda name, arguments: enumerate(rows, 1))
    torch.manual_seed(0)


def test_python_blocks(early_model, hub, capsys):
    names = {}
    for block in BLOCKS:
        exec(block.replace("MODEL", str(early_model)), names)
    assert len(names["dataset"]) == 12  # the simulated hub has no more
    assert Path("weights/final_rlm_lora/adapter_model.safetensors").is_file()
    assert Path("runs/grpo/metrics.jsonl").is_file()
    out = capsys.readouterr().out
    assert "steps: 3 (" in out  # one pass, with 4 problems in each step
    assert "training starts without an SFT adapter" in out
    assert "no CUDA GPU here, so the base model is loaded without quantization" in out
    # The blocks define these names, but do not use them.
    assert names["reward_fn"]("<think>so</think><answer>5</answer>", "5") > 0.5
    scores = names["trainer"].scorer(names["dataset"][:1], [["That is Correct.", "5"]])
    assert scores.rewards == [[1.0, 0.0]]
    assert names["config"].group_size == 8


@needs_shared("seeds")
def test_the_blocks_are_those_of_the_document_and_its_commands_are_accepted():
    """The blocks are compared as syntax trees, because the comments may differ."""
    (document,) = (SHARED / "seeds").glob("002_*.txt")
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    blocks = [re.sub(r'model_name="[^"]*"', 'model_name="MODEL"', block) for block in blocks]
    assert [ast.dump(ast.parse(b)) for b in blocks] == [ast.dump(ast.parse(b)) for b in BLOCKS]
    commands = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    typed = re.findall(r"^python -m homellm\.training\.rl\.train_rl (.*)$", commands, re.M)
    assert len(typed) == 3
    assert all(parse(GRPOConfig, words.split(), presets=PRESETS).model for words in typed)


@pytest.mark.parametrize(
    ("page", "mark", "changes"),
    [
        (
            "docs/reference/python-api.md",
            "reward_fn=short_and_right",
            {
                "smollm2-135m": "MODEL",
                "steps=20": "steps=1",
                "max_samples=100": "max_samples=2",
                "weights/short": "weights/final_rlm_lora",
            },
        ),
        ("docs/explanation/algorithms.md", "GRPOTrainer", {"Qwen/Qwen2.5-0.5B-Instruct": "MODEL"}),
    ],
)
def test_a_block_of_a_page_trains(page, mark, changes, early_model, hub):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    (block,) = [block for block in blocks if mark in block]
    for written, short in changes.items():
        assert written in block
        block = block.replace(written, short)
    exec(block.replace("MODEL", str(early_model)), {})
    assert Path("weights/final_rlm_lora/adapter_model.safetensors").is_file()


# --- the tutorial: docs/tutorials/your-own-task.md ------------------------------------------------

TUTORIAL = (ROOT / "docs/tutorials/your-own-task.md").read_text(encoding="utf-8")
COMMANDS = re.findall(
    r"^(?:python )?((?<=python ).+|rlm .+)$",
    "\n".join(re.findall(r"```sh\n(.*?)```", TUTORIAL, re.S)),
    re.M,
)
SHORTER = {
    train_sft: "--max-samples 8",
    train_grpo: "--steps 1 --batch-size 2 --group-size 2 --max-new-tokens 8 --eval-samples 2",
    evaluate: "--max-samples 2 --max-new-tokens 8",
    inference: "--max-new-tokens 8",
}
SCRIPTS = {
    "train_sft.py": (train_sft, train_sft.SFTConfig),
    "train_grpo.py": (train_grpo, train_grpo.GRPOConfig),
    "eval.py": (evaluate, evaluate.EvaluateConfig),
    "inference.py": (inference, inference.InferenceConfig),
}


def run_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *argv = shlex.split(command, comments=True)
    if name == "server.py":  # only its config is made
        config = resolve_config(server.ServerConfig, argv)
        assert server._service(config, ()).models.default == config.adapter.name
        return
    if name == "rlm":
        monkeypatch.setattr(sys, "argv", [name, *argv])
        start = console.main
    else:
        script, config = SCRIPTS[name]
        argv += SHORTER[script].split()
        start = partial(run_main, script.main, config, argv=argv)
    with pytest.raises(SystemExit) as exit:
        start()
    # The doctor finds that this model solves nothing.
    assert exit.value.code in ((1,) if "--doctor" in argv else (0, None)), command


def test_the_tutorials_commands_run(model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples")
    shutil.copytree(ROOT / "data", "data")
    assert {*SCRIPTS, "server.py", "rlm"} <= {command.split()[0] for command in COMMANDS}
    for command in COMMANDS:
        command = command.replace("smollm2-135m", shlex.quote(str(model_dir)))
        run_command(command, monkeypatch)
    assert Path("runs/roman/adapter/adapter_model.safetensors").exists()
    assert Path("runs/roman/grpo/rollouts.html").exists()
    assert "54 problems, 2 to validate on" in capsys.readouterr().out  # 6 of 60 are held out


def test_the_tutorials_files(tmp_path):
    """The script writes the files, the page quotes them, and no test problem is trained on."""
    made = shutil.copy(ROOT / "examples/roman.py", tmp_path)
    subprocess.run([sys.executable, made], check=True)
    names = "roman.jsonl", "roman_test.jsonl"
    for name in names:
        assert (tmp_path / name).read_bytes() == (ROOT / "examples" / name).read_bytes()
    train, test = (load_problems(str(ROOT / "examples" / name), "test") for name in names)
    assert (len(train), len(test)) == (60, 120)
    assert not {row.question for row in train} & {row.question for row in test}
    assert (ROOT / "examples/roman.jsonl").read_text().splitlines()[0] in TUTORIAL
    assert (ROOT / "examples/roman.yaml").read_text() in TUTORIAL
    assert inspect.getsource(roman.reward) in TUTORIAL
    right = "<think>\n10 is X\n4 is IV\n</think>\n<answer>XIV</answer>"
    wrong = [
        right.replace("is IV", "is VI"),  # the answer does not follow from the parts
        right.replace(">XIV", ">XVI"),
        right + "\n</think>",
    ]
    score = Scorer(as_reward(roman.reward), "deepseek")
    fourteen = [row for row in train if row.answer == "XIV"]
    assert score(fourteen, [[right, *wrong]]).rewards == [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.slow
def test_the_tutorial_teaches_the_real_model(smollm2, tmp_path, monkeypatch):
    """The tutorial's commands work with the embedded model, up to the server's two protocols.

    GRPO improves the accuracy on held-out problems, and the interval is above zero.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples")
    trained = [command for command in COMMANDS if re.match("train_(?!.*--doctor)|eval", command)]
    assert [command.split(".")[0] for command in trained] == ["train_sft", "train_grpo", "eval"]
    for command in trained:
        script, *argv = shlex.split(command)
        subprocess.run([sys.executable, ROOT / script, *argv], check=True)
    report = json.loads(Path("runs/evaluation/evaluation.json").read_text(encoding="utf-8"))
    gain = report["sampled"]["compared"]["GRPO − SFT"]["strict"]
    assert gain["low"] > 0, gain
    [asked] = [shlex.split(command)[-1] for command in COMMANDS if command.startswith("inference")]
    with live(
        server._service(server.ServerConfig(adapter=Path("runs/roman/adapter")), ())
    ) as running:
        reply = running.post({"prompt": asked}).json()
        chat = {"model": "adapter", "messages": [{"role": "user", "content": asked}]}
        chat["temperature"] = 0
        answered = running.post(chat, "/v1/chat/completions").json()["choices"][0]["message"]
    assert set(reply["final_answer"]) <= set("IVXLC")
    assert " is " in reply["reasoning"]
    assert set(answered["content"].strip()) <= set("IVXLC")
    assert " is " in answered["reasoning_content"]


# --- notebooks/colab.ipynb ------------------------------------------------------------------------

CELLS = json.loads((ROOT / "notebooks/colab.ipynb").read_text(encoding="utf-8"))["cells"]
SMALL = {
    "DATA": "word-problems:1", "SFT_EXAMPLES": 16, "STEPS": 2, "PROBLEMS": 2, "COMPLETIONS": 2,
    "NEW_TOKENS": 24, "TEST_PROBLEMS": 6,
}  # fmt: skip


def test_the_notebooks_cell_of_advantages_runs(capsys):
    [source] = [s for cell in CELLS if "group_advantages" in (s := "".join(cell["source"]))]
    exec(compile(source, "notebook", "exec"), {})
    assert "[ 0.8659, -0.8659, -0.8659,  0.8659]" in capsys.readouterr().out


@pytest.mark.slow
def test_the_notebooks_cells_run_in_order(model_dir, tmp_path, monkeypatch):
    for name in (*SCRIPTS, "server.py", "rlm"):  # a checkout with its own runs and weights
        (tmp_path / name).symlink_to(ROOT / name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    shown: list[Path] = []
    pictures = types.ModuleType("IPython.display")
    pictures.Image, pictures.display = Path, shown.append
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", pictures)
    commands: list[str] = []

    def shell(command: str) -> None:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
        commands.append(command)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

    printed, space = io.StringIO(), {"__name__": "notebook", "shell": shell}
    with contextlib.redirect_stdout(printed):
        for cell in CELLS:
            tags = cell["metadata"].get("tags", [])
            if cell["cell_type"] != "code" or tags == ["setup"]:
                continue
            source = "".join(cell["source"]).replace("8000", port)
            # IPython's `!command {name}` becomes a call of `shell`.
            source = re.sub(r"^!(.*)$", lambda m: f"shell(f{m[1]!r})", source, flags=re.M)
            exec(compile(source, source[:60], "exec"), space)
            if tags == ["parameters"]:
                space |= SMALL | {"MODEL": str(model_dir)}
    scripts = [re.search(r"python (\w+)\.py", command)[1] for command in commands]
    assert scripts == [
        "eval", "train_sft", "train_grpo", "train_grpo", "eval", "inference", "inference"
    ]  # fmt: skip
    assert [picture.name for picture in shown] == ["curves.png", "accuracy.png"]
    assert all((tmp_path / picture).stat().st_size > 1000 for picture in shown)
    assert "[ 0.8659, -0.8659, -0.8659,  0.8659]" in printed.getvalue()  # 0.5 / (sqrt(1/3) + 1e-4)
    assert (tmp_path / "merged/model.safetensors").is_file()
