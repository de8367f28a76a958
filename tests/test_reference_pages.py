"""docs/reference/options.md and python-api.md are what the code says: `make reference`."""

import pytest
from reference_pages import REFERENCE, api_section, options_page, with_section


def test_the_options_are_those_of_the_scripts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "")  # it is set inside, and put back here
    page = (REFERENCE / "options.md").read_text(encoding="utf-8")
    assert page == options_page(), "make reference"
    assert "| `--learning-rate float` |" in page
    assert page.count("\n## ") == 10


def test_the_signatures_are_those_of_the_code():
    page = (REFERENCE / "python-api.md").read_text(encoding="utf-8")
    assert page == with_section(page, api_section()), "make reference"
    assert "0x" not in page
