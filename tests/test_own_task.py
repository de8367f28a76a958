"""docs/tutorials/your-own-task.md: its commands run as they are written, on a tiny model."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from golden import ROOT

import eval as evaluate
import inference
import server
import train_grpo
import train_sft
from examples.my_reward import my_reward
from rlm import scripts
from rlm.cli import resolve_config
from rlm.cli.main import run_main
from rlm.data import load_problems

PAGE = (ROOT / "docs/tutorials/your-own-task.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```sh\n(.*?)```", PAGE, re.S))
COMMANDS = re.findall(r"^(?:python )?((?<=python ).+|rlm .+)$", BLOCKS, re.M)
SCRIPTS = {
    "train_sft.py": (train_sft, train_sft.SFTConfig, "--max-samples 8"),
    "train_grpo.py": (
        train_grpo,
        train_grpo.GRPOConfig,
        "--steps 1 --batch-size 2 --group-size 2 --max-new-tokens 8 --eval-samples 2",
    ),
    "eval.py": (evaluate, evaluate.EvaluateConfig, "--max-samples 2 --max-new-tokens 8"),
    "inference.py": (inference, inference.InferenceConfig, "--max-new-tokens 8"),
}


def run_command(command: str) -> None:
    name, *argv = shlex.split(command, comments=True)
    if name == "server.py":  # made, and not started
        config = resolve_config(server.ServerConfig, argv)
        assert server._service(config).models.default == config.adapter.name
    elif name == "rlm":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [name, *argv])
            with pytest.raises(SystemExit) as exit:
                scripts.main()
        assert not exit.value.code, command
    else:
        script, config, shorter = SCRIPTS[name]
        with pytest.raises(SystemExit) as exit:
            run_main(script.main, config, argv=[*argv, *shorter.split()])
        # The doctor says that this model knows nothing.
        assert exit.value.code in ((1,) if "--doctor" in argv else (0, None)), command


def test_its_commands_run(model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples")
    shutil.copytree(ROOT / "data", "data")
    argv = ["--model", str(model_dir), "--dataset", "word-problems:1", "--max-samples", "8"]
    start = resolve_config(train_sft.SFTConfig, [*argv, "--output", "weights/final_rlm_lora"])
    train_sft.main(start)
    said = [command.split()[0] for command in COMMANDS]
    assert {*SCRIPTS, "server.py", "rlm"} <= {*said}
    for command in COMMANDS:
        run_command(command.replace("MODEL", shlex.quote(str(model_dir))))
    assert Path("runs/mine/adapter/adapter_model.safetensors").exists()
    assert Path("runs/mine/rollouts.html").exists()
    out = capsys.readouterr().out
    assert "215 problems, 2 to validate on" in out  # of 238, 23 of them held out


def test_its_files():
    problems = load_problems(str(ROOT / "examples/my_problems.jsonl"), "test")
    assert len(problems) == 238
    assert all(problem.solution for problem in problems)
    line = json.loads((ROOT / "examples/my_problems.jsonl").read_text().splitlines()[0])
    assert json.dumps(line) in PAGE


def test_its_reward():
    right = "<think>\n8 * 3 = 24\n</think>\n<answer>24</answer>"
    assert my_reward(right, "24") == 1.0
    assert my_reward(right.replace("8 *", "so " * 40), "24") == 0.5
    assert my_reward(right, "25") == 0.0
    function = (ROOT / "examples/my_reward.py").read_text().split('"""\n', 1)[1].strip()
    assert function in PAGE
