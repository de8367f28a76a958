"""notebooks/colab.ipynb: its cells run in order, on a CPU, with a tiny model."""

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CELLS = json.loads((ROOT / "notebooks/colab.ipynb").read_text(encoding="utf-8"))["cells"]
LINKED = ("eval.py", "inference.py", "server.py", "train_sft.py", "train_grpo.py", "rlm")
SMALL = {
    "DATA": "word-problems:1", "SFT_EXAMPLES": 16, "STEPS": 2, "PROBLEMS": 2, "COMPLETIONS": 2,
    "NEW_TOKENS": 24, "TEST_PROBLEMS": 6,
}  # fmt: skip


def tags(cell):
    return cell["metadata"].get("tags", [])


def python_of(source: str) -> str:
    """A cell without IPython's own syntax: `!command {name}` becomes a call of `shell`."""
    return re.sub(r"^!(.*)$", lambda m: f"shell(f{m[1]!r})", source, flags=re.M)


def test_it_is_a_lesson_without_outputs():
    assert CELLS[0]["cell_type"] == "markdown"
    headings = [line for c in CELLS for line in c["source"] if line.startswith("## ")]
    assert [line[3] for line in headings] == [*"12345678"]
    for cell, before in zip(CELLS[1:], CELLS, strict=False):
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            assert before["cell_type"] == "markdown"  # says what it does
    assert [tags(cell) for cell in CELLS if tags(cell)] == [["setup"], ["parameters"]]


def test_the_setting_up_clones_and_installs():
    (cell,) = [cell for cell in CELLS if tags(cell) == ["setup"]]
    commands = [line.split()[0] for line in cell["source"] if line[0] in "!%"]
    assert commands == ["!git", "%cd", "!pip"]


@pytest.mark.slow
def test_the_cells_run_in_order(model_dir, tmp_path, monkeypatch):
    for name in LINKED:  # a checkout whose runs and weights are this test's own
        (tmp_path / name).symlink_to(ROOT / name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
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

    said, space = io.StringIO(), {"__name__": "notebook", "shell": shell}
    with contextlib.redirect_stdout(said):
        for cell in CELLS:
            if cell["cell_type"] != "code" or tags(cell) == ["setup"]:
                continue
            source = python_of("".join(cell["source"])).replace("8000", port)
            exec(compile(source, "".join(cell["source"])[:60], "exec"), space)
            if tags(cell) == ["parameters"]:
                space |= SMALL | {"MODEL": str(model_dir)}
    scripts = [re.search(r"python (\w+)\.py", command)[1] for command in commands]
    assert scripts == [
        "eval", "train_sft", "train_grpo", "train_grpo", "eval", "inference", "inference"
    ]  # fmt: skip
    assert [picture.name for picture in shown] == ["curves.png", "accuracy.png"]
    assert all((tmp_path / picture).stat().st_size > 1000 for picture in shown)
    assert "[ 0.8659, -0.8659, -0.8659,  0.8659]" in said.getvalue()  # 0.5 / (sqrt(1/3) + 1e-4)
    assert (tmp_path / "merged/model.safetensors").is_file()
