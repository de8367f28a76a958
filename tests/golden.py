"""Goldens: recorded outputs that must stay the same while files, names and structure change.

The functions `compute_…` in test_goldens.py and test_goldens_texts.py compute the outputs from the
current code, and the tests compare them with the files in tests/goldens. RLM_WRITE_GOLDENS=1
rewrites these files. Rewrite them only if a change is meant to change what a user gets.
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
    """Check that a value equals the golden of this name, with tolerances for floats."""
    file, found = GOLDENS / f"{name}.json", json.loads(json.dumps(found))
    if os.environ.get("RLM_WRITE_GOLDENS"):
        file.write_text(json.dumps(found, separators=(",", ":"), sort_keys=True) + "\n")
    differences = [*differ(found, json.loads(file.read_text()), rel, abs, name)]
    assert not differences, "\n".join(differences[:10])


def differ(found: Any, golden: Any, rel: float, abs: float, path: str) -> Iterator[str]:
    """Yield a line for each difference between two JSON values."""
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
    """Run `python script.py …` or `python -m module …` here; return the exit code and stdout."""
    argv, out = sys.argv, io.StringIO()
    sys.argv = [script, *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a test may have imported the module
            if script.endswith(".py"):
                runpy.run_path(str(ROOT / script), run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        return exit.code or 0, out.getvalue()
    finally:
        sys.argv = argv
    return 0, out.getvalue()
