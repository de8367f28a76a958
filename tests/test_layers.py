"""Imports go in one direction: they follow the layer table, and contain no cycles."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A package imports from lower layers only (docs/explanation/architecture.md shows the same table).
LAYERS = {
    "cli": 0,
    "grading": 0,
    "api_client": 1,
    "data": 1,
    "ops": 1,
    "runs": 1,
    "tools": 1,
    "model": 2,
    "rewards": 3,
    "sampling": 3,
    "evaluation": 4,
    "training": 5,
    "reasoner": 5,
    "conformance": 6,
    "serving": 6,
    "console": 7,
}
SCRIPTS = {"train_sft", "train_grpo", "eval", "inference", "server"}


def imported(code: str) -> set[str]:
    """Return the modules that code imports anywhere, including imports inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def packages(code: str) -> set[str]:
    """Return the packages and modules directly below `rlm` that code imports."""
    names = {name.split(".")[1] for name in imported(code) if name.startswith("rlm.")}
    return names & LAYERS.keys()


def against_the_table(package: str, code: str) -> set[str]:
    if package == "serving":
        return packages(code) & {"training"}
    return {p for p in packages(code) - {package} if LAYERS[p] >= LAYERS[package]}


def modules(folder: str) -> dict[str, str]:
    """Return a map from the dotted name of each module below a folder to its code."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return {
        ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f.read_text()
        for f in files
    }


RLM = modules("rlm")


def test_rlm_itself_offers_one_name_of_a_script():
    """`from rlm import GRPOTrainer` is the exception; it loads the script at its first use."""
    names = imported(RLM["rlm"])
    assert {name for name in names if not name.startswith("rlm")} & SCRIPTS == {"train_grpo"}
    assert packages(RLM["rlm"]) == {"data", "training"}


def test_a_package_imports_lower_layers_only():
    for module in (name for name in RLM if name.count(".")):
        package = module.split(".")[1]
        assert package in LAYERS, f"{package}: a new package takes a place in the table"
        assert not against_the_table(package, RLM[module]), module
        above = {name.split(".")[0] for name in imported(RLM[module])}
        assert not above & (SCRIPTS | {"recipes", "benchmarks"}), module


@pytest.mark.parametrize("folder", ["recipes/orchestrator", "recipes/experience", "benchmarks"])
def test_recipes_and_benchmarks_do_not_import_each_other(folder):
    others = {"recipes.orchestrator", "recipes.experience", "benchmarks"} - {
        folder.replace("/", ".")
    }
    for code in modules(folder).values():
        for name in imported(code):
            assert not any(name == other or name.startswith(f"{other}.") for other in others)


def test_no_circle_inside_a_package():
    for package in {n.split(".")[1] for n in RLM if n.count(".") == 2}:
        inside = {name: code for name, code in RLM.items() if name.startswith(f"rlm.{package}.")}
        arrows = {name: imported(code) & inside.keys() for name, code in inside.items()}
        while arrows:
            leaves = {name for name, targets in arrows.items() if not targets & arrows.keys()}
            assert leaves, f"these import each other: {sorted(arrows)}"
            arrows = {name: targets for name, targets in arrows.items() if name not in leaves}


OUTSIDE = [
    f.relative_to(ROOT)
    for folder in ("rlm", "recipes", "benchmarks", "examples")
    for f in sorted((ROOT / folder).rglob("*.py"))
] + [Path(f"{script}.py") for script in sorted(SCRIPTS)]


def test_others_import_from_the_package_not_from_its_files():
    for file in OUTSIDE:
        own = file.parts[1] if file.parts[0] == "rlm" and len(file.parts) > 2 else None
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            parts = module.split(".")
            inner = parts[0] == "rlm" and len(parts) == 3
            assert not inner or parts[1] == own, f"{file}:{node.lineno} imports from {module}"


@pytest.mark.parametrize("package", sorted(LAYERS))
def test_what_a_package_exports_is_there(package):
    module = importlib.import_module(f"rlm.{package}")
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None
