"""Goldens: outputs that must not move while files, names and structure change.

test_goldens.py and test_goldens_texts.py hold what makes them, a `compute_…` each, from the code as
it is (test_inference.py uses one of them); RLM_WRITE_GOLDENS=1 writes to tests/goldens/ what the
tests else compare with. Write them only for a change that is meant to change what a user gets.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT, GOLDENS = Path(__file__).parent.parent, Path(__file__).parent / "goldens"
ABSENT = "(absent)"


def check(name: str, found: Any, rel: float = 0.0, abs: float = 0.0) -> None:
    """The golden of that name is what was found; floats within the tolerances."""
    file, found = GOLDENS / f"{name}.json", json.loads(json.dumps(found))
    if os.environ.get("RLM_WRITE_GOLDENS"):
        file.write_text(json.dumps(found, separators=(",", ":"), sort_keys=True) + "\n")
    differences = [*differ(found, json.loads(file.read_text()), rel, abs, name)]
    assert not differences, "\n".join(differences[:10])


def differ(found: Any, golden: Any, rel: float, abs: float, path: str) -> Iterator[str]:
    """A line for each place that differs."""
    if isinstance(golden, dict | list) and type(found) is type(golden):
        left, right = (dict(enumerate(x)) if isinstance(x, list) else x for x in (found, golden))
        for key in {**right, **left}:
            pair = left.get(key, ABSENT), right.get(key, ABSENT)
            yield from differ(*pair, rel, abs, f"{path}/{key}")
    elif isinstance(golden, float) and isinstance(found, float):
        if found != pytest.approx(golden, rel=rel, abs=abs):
            yield f"{path}: {found!r} is not {golden!r}"
    elif found != golden or type(found) is not type(golden):
        yield f"{path}: {found!r} is not {golden!r}"


def run(script: str, *arguments: object) -> tuple[int, str]:
    """What `python script.py …` or `python -m module …` does in this process: exit code, stdout."""
    argv, out = sys.argv, io.StringIO()
    sys.argv = [script, *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a module that a test has imported
            if script.endswith(".py"):
                runpy.run_path(str(ROOT / script), run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        return exit.code or 0, out.getvalue()
    finally:
        sys.argv = argv
    return 0, out.getvalue()
