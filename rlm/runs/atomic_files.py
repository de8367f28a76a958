"""Crash-safe files: synced JSON lines, atomic replacement, and a lock."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from rlm.cli import UsageError, terminal

LOCK = ".lock"  # in a run directory; it names the process that trains there
logger = logging.getLogger(__name__)


def read_lines(path: Path, *, repair: bool = True) -> list[dict[str, Any]]:
    """Read the rows of a JSON lines file; [] if it does not exist.

    A torn last line is left out, and removed from the file with a warning.

    Args:
        repair: False leaves the file unchanged, because another process may be writing that line.

    Raises:
        UsageError: any other line is not a JSON object.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if repair and len(whole) < len(content):
        logger.warning("%s: the last line was incomplete and is ignored", path)
        with path.open("rb+") as stream:
            stream.truncate(len(whole))
            os.fsync(stream.fileno())
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path}: line {number} is not a JSON object; repair it") from error
    return rows


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a log up to the first damaged one; [] if it does not exist.

    Rows before a checkpoint are synced, so a damaged row belongs to a step that is repeated.
    """
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    with path.open(encoding="utf-8", errors="replace", newline="\n") as stream:
        for line in stream:  # not splitlines: a model may write U+2028
            try:
                rows.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                break
    return rows


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows; they are on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        stream.write(json_lines(rows).encode("utf-8", "backslashreplace"))  # as replace_file
        stream.flush()
        os.fsync(stream.fileno())


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically: the old one stays until the new one is on the disk.

    A lone surrogate (in a file name, say) cannot be encoded, so it is written as its escape, which
    JSON reads back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")  # one name, so that kills leave one file at most
    try:
        scratch.write_bytes(text.encode("utf-8", "backslashreplace"))
        sync(scratch)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def replace_json(path: Path, content: object) -> None:
    """Replace a file with indented JSON (`replace_file`)."""
    replace_file(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def sync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(path: Path, where: str, advice: str) -> IO[str]:
    """Lock a file for this process until it is closed or the process ends.

    Args:
        where, advice: the beginning and end of the error message.

    Raises:
        UsageError: another process holds it: "<where>: process 7 on host <advice>".
    """
    stream = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.seek(0)
        holder = stream.read().strip() or "another process"
        stream.close()
        raise UsageError(f"{where}: {holder} {advice}") from error
    except OSError as error:  # some network file systems have no locks
        terminal.line(
            f"{path} cannot be locked ({error.strerror}): let no other process write here"
        )
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    stream.flush()
    return stream


class Journal:
    """Stores paid replies by key, so that a resumed run does not request them again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = {row["key"]: row for row in read_lines(path)}
        self._lock = threading.Lock()

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Store a row; it is on the disk when this returns."""
        with self._lock:
            append_lines(self.path, [{"key": key} | row])
            self.rows[key] = {"key": key} | row
