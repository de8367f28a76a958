"""If CI is set, an unexpected skip makes the test run fail."""

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


@pytest.mark.parametrize(
    ("processes", "ci", "reason", "named", "code"),
    [
        ([], "", "needs a moon", True, 0),
        ([], "true", "there is no CUDA GPU here", False, 0),
        (["-n", "1"], "true", "needs ../shared/data", True, 1),  # although the folder exists
    ],
    ids=["no CI", "expected", "xdist"],
)
def test_an_unexpected_skip_fails_ci(tmp_path, processes, ci, reason, named, code):
    plugin = Path(__file__).with_name("expected_skips.py").read_text(encoding="utf-8")
    tests = tmp_path / "checkout" / "tests"
    tests.mkdir(parents=True)
    (tmp_path / "shared").mkdir()
    (tests / "conftest.py").write_text(plugin)
    (tests / "test_one.py").write_text(SKIPS.format(reason=reason))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *processes, str(tests)],
        cwd=tests, capture_output=True, text=True, check=False,
        env={**os.environ, "CI": ci},
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    assert (f": {reason}" in done.stdout) == named
