"""Output on the terminal: paths, datasets and texts of a model are never read as markup."""

import io
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from rlm.cli import check_command_line, flag, terminal
from rlm.evaluation import show_table

ODD = "[/x] [old] a:b:c 1:100:2"


@pytest.mark.parametrize("on_a_terminal", [True, False])
def test_brackets_are_text(monkeypatch, on_a_terminal):
    monkeypatch.setattr(terminal.console, "_force_terminal", on_a_terminal)
    with terminal.console.capture() as said:
        terminal.line(f"line {ODD}")
        terminal.table(f"title {ODD}", {"name": f"value {ODD}"})
        terminal.sample(f"question {ODD}", f"completion {ODD}", f"verdict {ODD}")
        show_table(f"table {ODD}", {f"row {ODD}": {f"column {ODD}": f"cell {ODD}"}})
    assert terminal.console.is_terminal is on_a_terminal
    parts = "line title value question completion verdict table row column cell"
    for what in parts.split():
        assert f"{what} {ODD}" in said.get()


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


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_what_an_encoding_cannot_show_is_replaced_and_the_rest_is_shown(encoding, monkeypatch):
    @dataclass
    class Options:
        rate: int = flag(1, "from → to")

    def terminal_of(encoding):
        stream = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        return stream.buffer

    shown = terminal_of(encoding)
    terminal.line("2 → 3")  # from Python
    terminal.line("the rest")
    sys.stdout.flush()
    assert shown.getvalue() == b"2 ? 3\nthe rest\n"
    shown = terminal_of(encoding)
    monkeypatch.setattr(sys, "argv", ["script", "--help"])
    with pytest.raises(SystemExit) as end:
        check_command_line(Options)
    sys.stdout.flush()
    assert b"from ? to (default: 1)" in shown.getvalue()
    assert not end.value.code
