"""What is shown is shown as it is: nothing in a path, a data set or a model's text is markup."""

from types import SimpleNamespace

import pytest

from rlm.cli import terminal


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


@pytest.mark.parametrize(
    ("total", "seconds", "lines"),
    [
        (10, [25.0] * 10, ["3 of 10, about 3 min left", "6 of 10, about 2 min left",
                           "9 of 10, about 25 s left"]),
        # The first one waits for a kernel to compile: a tenth gives no estimate of the rest.
        (40, [100.0, 0.0, 0.0, 60.0], ["1 of 40", "4 of 40, about 24 min left"]),
    ],
)  # fmt: skip
def test_without_a_terminal_a_bar_is_a_line_a_minute(total, seconds, lines, monkeypatch):
    now = 0.0
    monkeypatch.setattr(terminal.console, "_force_terminal", False)
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: now))
    with terminal.console.capture() as said, terminal.progress("judging [x]", total) as advance:
        for each in seconds:
            now += each
            advance()
    assert said.get().splitlines() == [f"judging [x]: {line}" for line in lines]
