"""Injects faults into processes, which are forked so that they need no imports, and really killed.

The faults occur at calls to the operating system. They are injected through Python's audit events
(for files that are opened, renamed, created and deleted) and through resource limits. The tested
code contains no hooks for them.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove")


@dataclass(frozen=True)
class Ended:
    """The exit code of a process (minus the signal that killed it), and its output."""

    code: int
    text: str


def start(action: Callable[[], int | None], said: Path) -> int:
    """Fork a process that runs `action` and writes its output to a file; return its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 70  # the exit code after a traceback
    try:
        # Tests started in the background of a shell ignore Ctrl-C, and so would this process.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # it would warn about the fork
        # A fork lacks PyTorch's thread pool, and an assertion fails if two threads create it.
        torch.set_num_threads(torch.get_num_threads())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(descriptor, number)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
        code = action() or 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(code)


def wait(pid: int, said: Path) -> Ended:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Ended(code, said.read_text(encoding="utf-8"))


def run(action: Callable[[], int | None], said: Path) -> Ended:
    return wait(start(action, said), said)


def _meet(rank: int, place: Path) -> None:
    """Join a group of two processes with the environment variables that `torchrun` sets.

    The processes meet in a file, because another test may take a port that is free now.
    """
    join = dist.init_process_group
    distributed = {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({key: str(value) for key, value in distributed.items()})
    store = dist.FileStore(str(place), 2)
    dist.init_process_group = partial(join, store=store, rank=rank, world_size=2)


def run_two(action: Callable[[int], int | None], folder: Path) -> list[Ended]:
    """Run `action(rank)` in two processes that share a run; return how each ended."""
    meeting = Path(tempfile.mkdtemp(dir=folder))
    said = [meeting / f"said{rank}.txt" for rank in (0, 1)]

    def join(rank: int) -> int | None:
        _meet(rank, meeting / "store")
        return action(rank)

    started = [start(partial(join, rank), said[rank]) for rank in (0, 1)]
    return [wait(*each) for each in zip(started, said, strict=True)]


def on_file_events(under: Path, react: Callable[[str, str], None]) -> None:
    """From now on, call `react(event, path)` before each change in a directory.

    Args:
        react: may raise an error of the operating system, or end the process.
    """

    def hook(event: str, arguments: tuple) -> None:
        opened = event == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wax"
        if not (opened or event in CHANGES) or not isinstance(arguments[0], str | Path):
            return
        path = str(
            arguments[1] if event == "os.rename" else arguments[0]
        )  # the new path of a rename
        if event in ("os.remove", "os.rmdir") and arguments[1] >= 0:  # relative to a directory
            path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[1]}"), path)
        if path.startswith(str(under)):
            react(event, path)

    sys.addaudithook(hook)


def at(event: str, name: str, occurrence: int, action: Callable[[], None]) -> Callable:
    """Return a function that runs `action` at the n-th `event` of a path that contains `name`."""
    seen = 0

    def react(what: str, path: str) -> None:
        nonlocal seen
        if what == event and name in path:
            seen += 1
            if seen == occurrence:
                action()

    return react
