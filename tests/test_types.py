"""The type checker of `make lint` reports an error that is inserted into the trainer."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECKER = Path(sys.executable).with_name("basedpyright")
pytestmark = pytest.mark.slow


@pytest.mark.skipif(not CHECKER.exists(), reason="an extra: pip install -e '.[dev]'")
def test_an_error_in_a_method_of_the_trainer_is_reported(tmp_path):
    source = (ROOT / "rlm/training/trainer.py").read_text(encoding="utf-8")
    right = "        self.steps = required(config.steps, "
    assert source.count(right) == 1
    (tmp_path / "trainer.py").write_text(
        source.replace(right, "        self.steps = 1 + config.output\n" + right), encoding="utf-8"
    )
    command = [CHECKER, "--pythonpath", sys.executable, tmp_path / "trainer.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if " - error: " in line]
    place = source[: source.index(right)].count("\n") + 1
    assert done.returncode == 1
    assert len(errors) == 1, done.stdout
    assert f"trainer.py:{place}:" in errors[0]
    assert 'Operator "+" not supported' in errors[0]
