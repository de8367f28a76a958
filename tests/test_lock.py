"""requirements.lock has a version and hashes for everything that requirements.txt pins."""

import re
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
NOT_LOCKED = {"torch"}  # the build depends on the machine


def test_the_lock_has_every_pin_with_hashes():
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").open()]
    pins = [Requirement(line) for line in lines if line]
    entries = re.findall(
        r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
        (ROOT / "requirements.lock").read_text(encoding="utf-8"),
        re.M,
    )
    locked = {name: version for name, version, _ in entries}
    assert len(locked) == len(entries) == (ROOT / "requirements.lock").read_text().count("==")
    assert len(pins) > 20
    for pin in pins:
        name = pin.name.lower()
        assert (name in NOT_LOCKED) != (name in locked), name
        if name in locked:
            assert pin.specifier.contains(locked[name]), f"{name}: run `make lock`"
