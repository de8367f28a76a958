"""docs/explanation/architecture.md: every file and every name in its tables exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
TABLE_ROWS = [line for line in PAGE.splitlines() if line.startswith("|") and "`" in line]


def names_in(code: str) -> set[str]:
    """The names that a module defines, a class's methods as Class.method."""
    found = set()
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}" for method in methods}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("row", TABLE_ROWS)
def test_what_a_row_names_is_there(row):
    cells = [re.findall(r"`([^`]+)`", cell) for cell in row.strip("|").split("|")]
    files = [name for cell in cells for name in cell if "/" in name or name.endswith(".py")]
    assert files or re.match(r"\| \d", row)
    for file in files:
        assert (ROOT / file).exists() or (ROOT / f"{file}.py").exists(), file
    if len(files) == 1 and files[0].endswith(".py"):
        defined = names_in((ROOT / files[0]).read_text(encoding="utf-8"))
        column = next(i for i, cell in enumerate(cells) if files[0] in cell)
        for name in cells[column + 1] if column + 1 < len(cells) else []:
            assert name in defined, f"{files[0]} has no {name}"


def test_the_picture_names_files_that_exist():
    picture = (ROOT / "docs" / "explanation" / "architecture.svg").read_text(encoding="utf-8")
    files = re.findall(r">([\w/]+\.py)<", picture)
    assert len(files) == 8
    assert all((ROOT / file).is_file() for file in files)


def test_the_packages_are_those_of_the_layer_test():
    from tests.test_layers import LAYERS

    listed = re.findall(r"^\| (\d) \| `rlm/(\w+)`", PAGE, re.M)
    assert {name: int(layer) for layer, name in listed} == LAYERS
