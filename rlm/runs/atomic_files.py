"""Crash-safe files: JSON lines that are synced to disk, atomic replacement, and file locks."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from rlm.cli import UsageError, terminal

LOCK = ".lock"  # file in a run directory that names the last process that trained in it
logger = logging.getLogger(__name__)


def read_lines(path: Path, *, repair: bool = True) -> list[dict[str, Any]]:
    """Read the rows of a JSON lines file; return [] if the file does not exist.

    An incomplete last line is ignored.

    Args:
        repair: whether to remove an incomplete last line from the file, with a warning. Pass False
            if another process may still be writing this line.

    Raises:
        UsageError: any other line is not a JSON object.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if repair and len(whole) < len(content):
        logger.warning("%s: the last line was incomplete and has been removed", path)
        with path.open("rb+") as stream:
            stream.truncate(len(whole))
            os.fsync(stream.fileno())
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{path}: line {number} is not a JSON object; repair or delete this line"
            ) from error
    return rows


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a run; return {} if the file does not exist.

    Raises:
        UsageError: the file is not a JSON object.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{path} is not a JSON object: restore the file, or choose another run"
        ) from error


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a log up to the first damaged row; return [] if the log does not exist.

    Rows before a checkpoint are synced to disk, so a row that a crash has damaged belongs to a
    later step, which a resumed run repeats.
    """
    return list(itertools.takewhile(bool, read_rows(path)))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a log, with {} for each damaged row; none if the log does not exist."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as stream:
        # Do not use splitlines(), because a completion may contain U+2028.
        yield from map(parse_row, stream)


def parse_row(line: str | bytes) -> dict[str, Any]:
    """Parse a row of a log; return {} if the row is damaged."""
    try:
        row = dict(json.loads(line))
    except (ValueError, TypeError):
        return {}
    return row if "step" in row else {}


def check_writable(option: str, path: Path) -> None:
    """Check that a directory can be created and written, before hours of work are spent.

    Raises:
        UsageError: the directory cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write_test_{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror}") from error


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a file, and sync the file to disk.

    After an error, such as a full disk, the file is unchanged, so that no later row follows a part
    of a row.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json_lines(rows).encode("utf-8", "backslashreplace")  # see replace_file
    with path.open("ab", buffering=0) as stream:
        end = stream.tell()
        try:
            while content:  # a full disk may take only a part
                content = content[stream.write(content) :]
            os.fsync(stream.fileno())
        except BaseException:
            with contextlib.suppress(OSError):  # report the first error
                stream.truncate(end)
            raise


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: the old file is kept until the new file is on disk.

    A lone surrogate, for example in a file name, cannot be encoded in UTF-8. It is written as an
    escape sequence, which a JSON parser converts back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is fixed, so that killed processes leave at most one such file.
    scratch = path.with_name(f".{path.name}.new")
    try:
        if isinstance(content, str):
            content = content.encode("utf-8", "backslashreplace")
        scratch.write_bytes(content)
        sync(scratch)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def replace_json(path: Path, content: object) -> None:
    """Replace a file with indented JSON atomically (see `replace_file`)."""
    replace_file(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def sync(path: Path) -> None:
    """Sync a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(path: Path, where: str, advice: str) -> IO[str]:
    """Lock a file until the returned stream is closed or this process ends.

    Args:
        where, advice: the beginning and the end of the error message.

    Raises:
        UsageError: another process holds the lock. The message has the form
            "<where>: process 7 on host <advice>".
    """
    stream = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.seek(0)
        holder = stream.read().strip() or "another process"
        stream.close()
        raise UsageError(f"{where}: {holder} {advice}") from error
    except OSError as error:  # some network file systems do not support locks
        terminal.line(
            f"{path} cannot be locked ({error.strerror}): start no other process that writes here"
        )
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    stream.flush()
    return stream


class Journal:
    """Stores rows by key in a JSON lines file, such as replies of a paid API.

    A resumed run uses the stored rows instead of paying for or computing them again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = {row["key"]: row for row in read_lines(path)}
        self._lock = threading.Lock()

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Store a row under a key, and sync it to disk."""
        with self._lock:
            append_lines(self.path, [{"key": key} | row])
            self.rows[key] = {"key": key} | row
