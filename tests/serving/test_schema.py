"""schemathesis compares the API with /openapi.json; `make test-schema` runs it.

Every operation gets the same valid and invalid requests in each run. No response may have the
status 500, or a status, a content type or a body that the schema does not declare.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from live_server import ADD, live, make_service

from rlm.serving.access import Keys

KEY = "a-key-of-some-length"
FAST = {"requests_per_minute": 10**6, "failures_per_minute": 10**6}  # no rate limits


@pytest.mark.schema
@pytest.mark.parametrize("key", [None, KEY], ids=["open", "with a key"])
def test_the_api_keeps_to_its_schema(tokenizer, tmp_path, key):
    pytest.importorskip("schemathesis", reason="an extra: pip install -e '.[schema]'")
    service, _ = make_service(tokenizer, {"": ADD})
    here = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": str(here), "SCHEMATHESIS_HOOKS": "schemathesis_hooks"}
    with live(service, Keys([key]) if key else None, **FAST) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
        command += ["--max-examples", "20", "--generation-deterministic"]
        command += ["--generation-allow-x00", "false"]  # strict_json.py rejects NUL
        command += ["--generation-with-security-parameters", "false"]  # only with our key
        command += ["--continue-on-failure", "--no-color"]
        command += ["--header", f"Authorization: Bearer {key}"] if key else []
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Tested: 8" in done.stdout
