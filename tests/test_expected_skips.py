"""A skip that nobody expects fails the run where CI is set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS = """
import pytest

def test_runs():
    pass

@pytest.mark.skip(reason={reason!r})
def test_is_skipped():
    pass
"""


@pytest.mark.parametrize("processes", [[], ["-n", "1"]], ids=["alone", "xdist"])
@pytest.mark.parametrize(
    ("reason", "ci", "code"),
    [
        ("needs curl", "true", 0),
        ("needs a moon", "true", 1),
        ("needs a moon", "", 0),
        ("needs ../shared/data", "true", 1),  # which is there
    ],
)
def test_an_unexpected_skip_fails_ci(tmp_path, reason, ci, code, processes):
    """The plugin as it is, on files of its own: no curl there, and a folder `shared`."""
    (tmp_path / "shared").mkdir()
    tests = tmp_path / "clone" / "tests"
    tests.mkdir(parents=True)
    plugin = Path(__file__).with_name("expected_skips.py").read_text(encoding="utf-8")
    (tests / "conftest.py").write_text(plugin)
    (tests / "test_one.py").write_text(SKIPS.format(reason=reason))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *processes, str(tests)],
        cwd=tests, capture_output=True, text=True, check=False,
        env={**os.environ, "CI": ci, "PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    assert (f": {reason}" in done.stdout) == (reason != "needs curl")
