"""What is shown is shown as it is: nothing in a path, a data set or a model's text is markup."""

import pytest

from rlm import terminal


@pytest.mark.parametrize("on_a_terminal", [True, False])
def test_brackets_are_text(monkeypatch, on_a_terminal):
    monkeypatch.setattr(terminal.console, "_force_terminal", on_a_terminal)
    with terminal.console.capture() as said:
        terminal.line("line [/x] [old]")
        terminal.facts("title [/x] [old]", {"name": "value [/x] [old]"})
        terminal.sample("question [/x] [old]", "completion [/x] [old]", "verdict [/x] [old]")
    assert terminal.console.is_terminal is on_a_terminal
    for what in ("line", "title", "value", "question", "completion", "verdict"):
        assert f"{what} [/x] [old]" in said.get()
