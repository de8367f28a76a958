"""Output: tables and progress bars if stdout is a terminal, otherwise plain lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rlm.cli.flags import replace_unencodable


class _Console(Console):
    """A console that becomes silent if its pipe or terminal is closed, so the run continues."""

    def print(self, *objects: Any, **options: Any) -> None:
        replace_unencodable(self.file)
        try:
            super().print(*objects, **options)
        except (OSError, ValueError):  # ValueError: the file object was closed
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError):  # Python flushes stdout at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Markup and emoji codes are disabled, because paths, data and the text of a model may contain
# brackets or a:b:c.
console = _Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


def table(title: str, rows: Mapping[str, object]) -> None:
    """Print a two-column table."""
    if not console.is_terminal:
        console.print(title)
        for name, value in rows.items():
            console.print(f"  {name}: {value}")
        return
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, Text(str(value)))
    console.print(table)


def line(text: str) -> None:
    """Print one line without formatting."""
    console.print(text)


def sample(question: str, completion: str, verdict: str) -> None:
    """Print a question and its completion, with the verdict in the title."""
    if not console.is_terminal:
        indented = "\n".join(f"  | {row}" for row in f"{question}\n{completion}".splitlines())
        line(f"  sample ({verdict})\n{indented}")
        return
    body = Text.assemble((question, "bold"), "\n", completion)
    console.print(Panel(body, title=Text(f"sample: {verdict}"), title_align="left", width=88))


def bars(counts: Mapping[str, int], total: int) -> None:
    """Print a bar chart of the number of votes per answer; a full bar represents `total`."""
    for answer, count in counts.items():
        shown = " ".join(answer.split())  # on one line
        line(f"  {shown:>12.12} {'█' * round(24 * count / total)} {count} of {total}")


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar until the context ends; yield a function that advances the bar by one.

    If stdout is not a terminal, a line is printed every minute instead.
    """
    if not console.is_terminal:
        yield _lines(description, total)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


def _lines(description: str, total: int) -> Callable[[], None]:
    done, began = 0, time.monotonic()
    said = began

    def advance() -> None:
        nonlocal done, said
        done, now = done + 1, time.monotonic()
        if now - said >= 60 and done < total:
            said = now
            left = f", {time_left((now - began) / done * (total - done))}"
            # The first iterations include the compilation of kernels, so no estimate is shown.
            line(f"{description}: {done} of {total}{left if 10 * done >= total else ''}")

    return advance


def duration(seconds: float) -> str:
    """Format a duration in seconds for display.

    >>> duration(7.2), duration(200)
    ('7 s', '3 min 20 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def time_left(seconds: float) -> str:
    """Format an estimate of the remaining time, given in seconds.

    >>> time_left(12.3), time_left(250), time_left(4000)
    ('about 12 s left', 'about 4 min left', 'about 1 h 7 min left')
    """
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours:
        return f"about {hours} h {minutes} min left"
    return f"about {minutes} min left" if minutes > 1 else f"about {round(seconds)} s left"
