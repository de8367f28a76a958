"""docs/tutorials/your-own-task.md: its commands run as they are written, on a tiny model."""

import inspect
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from golden import ROOT

import eval as evaluate
import inference
import server
import train_grpo
import train_sft
from examples.roman import reward
from rlm import console
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
                console.main()
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
    said = [command.split()[0] for command in COMMANDS]
    assert {*SCRIPTS, "server.py", "rlm"} <= {*said}
    for command in COMMANDS:
        run_command(command.replace("smollm2-135m", shlex.quote(str(model_dir))))
    assert Path("runs/roman/adapter/adapter_model.safetensors").exists()
    assert Path("runs/roman/grpo/rollouts.html").exists()
    out = capsys.readouterr().out
    assert "54 problems, 2 to validate on" in out  # of 60, 6 of them held out


def test_its_files(tmp_path):
    made = shutil.copy(ROOT / "examples/roman.py", tmp_path)
    subprocess.run([sys.executable, made], check=True)
    for name in ("roman.jsonl", "roman_test.jsonl"):
        assert (tmp_path / name).read_bytes() == (ROOT / "examples" / name).read_bytes()
    rows = load_problems(str(ROOT / "examples/roman.jsonl"), "test")
    test = load_problems(str(ROOT / "examples/roman_test.jsonl"), "test")
    assert (len(rows), len(test)) == (60, 120)
    assert not {row.question for row in rows} & {row.question for row in test}
    solved = [row for row in load_problems(str(ROOT / "examples/roman.jsonl")) if row.solution]
    assert len(solved) == 12  # none of them validates
    assert {part.split()[0] for row in solved for part in row.solution.splitlines()} == {
        *map(str, range(1, 10)), *map(str, range(10, 101, 10)),
    }  # fmt: skip
    assert (ROOT / "examples/roman.jsonl").read_text().splitlines()[0] in PAGE
    assert (ROOT / "examples/roman.yaml").read_text() in PAGE


def test_its_reward():
    right = "<think>\n10 is X\n4 is IV\n</think>\n<answer>XIV</answer>"
    assert reward(right, "XIV") == 1.0
    assert reward(right, "XV") == pytest.approx(0.4)  # 2 · 2 equal letters of 5, halved
    assert reward(right.replace("XIV", "14"), "XIV") == 0.0
    assert inspect.getsource(reward) in PAGE
