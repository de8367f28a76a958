"""A skip that nobody expects fails the run where CI is set."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import expected_skips
import pytest

SKIPS = """
import pytest

def test_runs():
    pass

@pytest.mark.skip(reason={reason!r})
def test_is_skipped():
    pass
"""


@pytest.mark.parametrize(
    ("reason", "is_named"),
    [
        ("needs cc", False),
        ("needs a moon", True),
        ("needs ../shared/data", True),  # which is there
    ],
)
def test_a_skip_is_expected_for_its_reason_where_it_is_true(
    tmp_path, monkeypatch, reason, is_named
):
    """No cc here, and a folder `shared`."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(expected_skips, "SHARED", tmp_path)
    skipped = SimpleNamespace(longrepr=("test_one.py", 7, f"Skipped: {reason}"))
    found = list(expected_skips.unexpected([skipped]))
    assert found == ([f"test_one.py:7: {reason}"] if is_named else [])


@pytest.mark.parametrize(
    ("processes", "ci", "code"), [([], "", 0), (["-n", "1"], "true", 1)], ids=["alone", "xdist"]
)
def test_an_unexpected_skip_fails_ci(tmp_path, processes, ci, code):
    plugin = Path(__file__).with_name("expected_skips.py").read_text(encoding="utf-8")
    (tmp_path / "conftest.py").write_text(plugin)
    (tmp_path / "test_one.py").write_text(SKIPS.format(reason="needs a moon"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *processes, str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "CI": ci},
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    assert ": needs a moon" in done.stdout
