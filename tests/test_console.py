"""The console command `rlm`, and the wheel that installs it."""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from rlm.cli import CONSOLE
from rlm.cli import main as command_lines
from rlm.console import COMMANDS, main
from rlm.rewards import load_reward
from rlm.training import GRPOConfig

ROOT = Path(__file__).parent.parent


def console(monkeypatch, *arguments):
    """Run `rlm arguments` in this process, and return the exit code."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/rlm", *arguments])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with pytest.raises(SystemExit) as exit:
        main()
    return exit.value.code or 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_its_script(monkeypatch, capsys, command):
    assert console(monkeypatch, command, "--hlep") == 2
    assert "unknown option --hlep" in capsys.readouterr().err
    assert console(monkeypatch, command, "--help") == 0
    described, said = importlib.import_module(COMMANDS[command][0]).__doc__, capsys.readouterr().out
    assert said.startswith(f"usage: rlm {command} [")
    assert described.splitlines()[0] in said


def test_doctor_is_a_flag_of_stage_2(monkeypatch, capsys):
    assert console(monkeypatch, "doctor", "--plan") == 2
    assert "--doctor and --plan exclude each other" in capsys.readouterr().err


def test_the_command_itself_answers(monkeypatch, capsys):
    assert console(monkeypatch) == 0
    said = capsys.readouterr().out
    assert all(f"  rlm {command} " in said for command in COMMANDS)
    assert console(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("rlm 0.")
    assert console(monkeypatch, "fly") == 2
    assert capsys.readouterr().err == (
        "error: unknown command 'fly'; choose from sft, grpo, eval, ask, serve, doctor, reward, "
        "view\n"
    )


def test_a_template_of_a_reward_runs_as_it_is(monkeypatch, capsys, tmp_path):
    file = tmp_path / "mine.py"
    assert console(monkeypatch, "reward", str(file)) == 0
    assert "wrote the reward template" in capsys.readouterr().err
    done = subprocess.run(
        [sys.executable, file], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["1.1", "0.0", "0.0"]
    reward = load_reward(f"{file}:reward")
    right = "<think>\n3 + 5 = 8\n</think>\n<answer>8</answer>"
    texts = [right, right.replace("3 + 5", "3 + 5 " + "+ 0 " * 200)]
    assert [reward(text, "8", is_truncated=False, level=2) for text in texts] == [1.1, 1.0]
    assert f"train_grpo.py --reward {file}:reward --doctor" in file.read_text()
    assert console(monkeypatch, "reward", str(file)) == 2
    assert "File exists" in capsys.readouterr().err
    for wrong in (["mine.txt"], [], ["--help"]):
        assert console(monkeypatch, "reward", *wrong) == (0 if wrong == ["--help"] else 2)


def test_the_page_of_a_run_has_a_command(monkeypatch, capsys, tmp_path):
    assert console(monkeypatch, "view", "--help") == 0
    assert capsys.readouterr().out.startswith("usage: rlm view [run] [options]")
    assert console(monkeypatch, "view", str(tmp_path)) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/samples.jsonl contains no rollouts; pass the directory of a GRPO run\n"
    )


@pytest.mark.parametrize(
    ("called", "command"),
    [("rlm grpo", "rlm grpo --steps 3 --resume"), ("a b.py", "python 'a b.py' --steps 3 --resume")],
)
def test_a_run_goes_on_by_the_command_that_started_it(monkeypatch, called, command):
    monkeypatch.setattr(sys, "argv", [called, "--steps", "3"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    assert command_lines._how_to_resume(GRPOConfig, None) == f"; continue with: {command}"


def test_a_wheel_holds_the_scripts_and_the_shipped_adapter(tmp_path):
    """The wheel is installed as by `pip install .`, and used from another folder."""
    build = ["egg_info", "--egg-base", tmp_path, "build", "--build-base", tmp_path / "build"]
    build += ["install_lib", "--install-dir", tmp_path / "lib"]
    build += ["install_data", "--install-dir", tmp_path]
    setup = "from setuptools import setup; setup()"
    subprocess.run([sys.executable, "-c", setup, "-q", *build], cwd=ROOT, check=True)
    scripts = {f"{script}.py" for script in CONSOLE}
    assert {path.name for path in (tmp_path / "lib").iterdir()} == {"recipes", "rlm", *scripts}
    code = (
        "import sys; sys.path.insert(0, 'lib'); sys.prefix = '.'\n"
        "import inference\n"
        "from rlm.console import main\n"
        "from rlm.evaluation import EvaluateConfig\n"
        "from rlm.model import HOW_TO_TRAIN_SFT\n"
        "assert EvaluateConfig.adapter == inference.ADAPTER\n"
        "print(inference.ADAPTER, inference.ADAPTER.is_dir(), HOW_TO_TRAIN_SFT)\n"
        "sys.argv = ['rlm', 'ask', '--json']\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "share/rlm/weights/final_rlm_lora True run: rlm sft\n"
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--json answers one question" in done.stderr


def test_a_python_without_the_environment_says_how_to_make_one():
    command = [sys.executable, "-S", "train_grpo.py", "--help"]  # -S hides installed packages
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert "lacks transformers" in last
    assert "`make install`" in last


def test_a_script_run_by_its_path_says_how_it_is_run():
    command = [sys.executable, "recipes/experience/train.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = "error: run it as python -m recipes.experience.train\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_a_command_of_another_readme_runs_ours():
    done = run_python("-m", "homellm.training.rl.train_rl", "--group_size", "1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: --group-size must")


@pytest.mark.filterwarnings("ignore:'recipes.orchestrator.train' found in sys.modules")
def test_a_script_of_another_readme_runs_ours(monkeypatch, capsys):
    """The script runs in this process, which has already imported torch."""
    monkeypatch.setattr(sys, "argv", ["train_rl.py", "--trajectories-per-problem", "1"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(ROOT / "train_rl.py"), run_name="__main__")
    out, said = capsys.readouterr()
    assert (exit.value.code, out, said.count("\n")) == (2, "", 1)
    assert said.startswith("error: --group-size must be")


def test_a_generator_of_another_readme_keeps_its_number(monkeypatch, tmp_path):
    monkeypatch.setenv("GENERATOR_2_BASE_URL", "https://example.invalid")  # there is no key
    options = ["--dataset", "word-problems", "--run-dir", tmp_path]
    done = run_python("-m", "grpo_training.generator2", *options)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: API key not found for generator_2")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("grpo_training.critic", "file not found: grpo_training/cache/generator_1_rollouts.jsonl"),
        ("homellm.training.rl.train_rl --model smollm2-135m", "dataset gsm8k: the hub is out of"),
    ],
)
def test_a_command_of_another_readme_has_its_folder_and_its_data(
    monkeypatch, tmp_path, command, says
):
    monkeypatch.chdir(tmp_path)
    for name, value in {"PYTHONPATH": ROOT, "HF_HUB_OFFLINE": 1, "HF_HOME": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    typed = [sys.executable, "-m", *command.split()]
    done = subprocess.run(typed, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert says in done.stderr


def test_a_module_of_another_readme_that_has_no_counterpart_names_the_page():
    assert "docs/reference/names.md" in run_python("-c", "import grpo_training").stderr


def run_python(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
