"""Log one JSON object per line, or readable lines on a terminal.

Clients cannot inject log lines. API keys and prompts are never logged. For an exception, only the
type and the location are logged, because the message may contain input.
"""

from __future__ import annotations

import json
import logging
import math
import re
from contextvars import ContextVar
from datetime import UTC, datetime
from traceback import extract_tb
from typing import Any, TextIO

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

MAX_TEXT = 300  # maximum characters of one value
_logger = logging.getLogger("rlm.serving")
_UNSEEN = ("/health", "/ready", "/page.css", "/page.js")  # frequent, so not shown on a terminal
_UNSAFE = re.compile(r"[^A-Za-z0-9._~/{}-]")


def configure(stream: TextIO, *, as_json: bool = False) -> None:
    """Write all log lines of the process, including those of libraries, to `stream`.

    Args:
        as_json: write JSON even if `stream` is a terminal.
    """
    handler = logging.StreamHandler(stream)
    for_people = stream.isatty() and not as_json
    handler.setFormatter(_ReadableLine() if for_people else _JsonLine())
    if for_people:
        handler.addFilter(lambda record: getattr(record, "fields", {}).get("path") not in _UNSEEN)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("rlm.serving").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING if for_people else logging.INFO)


def log(event: str, **fields: object) -> None:
    """Log `event` with its fields and the current request's id."""
    _logger.info(event, extra={"fields": fields})


def log_error(event: str, error: BaseException, **fields: object) -> None:
    _logger.error(event, extra={"fields": fields}, exc_info=error)


def safe_path(path: str) -> str:
    """Reduce an unknown path to 100 safe characters, and mask parts that could be API keys."""
    parts = path[:1000].split("/")
    return _UNSAFE.sub("?", "/".join("*" if len(part) > 15 else part for part in parts))[:100]


class _ReadableLine(logging.Formatter):
    """Formats events for a terminal.

    A request becomes `14:03:07  POST /phase1/reasoning 200 in 1.2 s`; another event is written as
    its name and its fields.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = _fields(record)
        event, level = line.pop("event"), line.pop("level")
        if event == "request":
            said = f"{line['method']} {line['path']} {line['status']} in {line['ms'] / 1000:.1f} s"
        else:
            shown = [f"{k} {v}" for k, v in line.items() if k not in ("time", "request_id")]
            said = "  ".join(["" if event == "log" else event.replace("_", " "), *shown])
            said = said if level == "info" else f"{level.upper()}  {said}"
        text = f"{datetime.fromtimestamp(record.created):%H:%M:%S}  {said}"
        # A "?" replaces unprintable characters, such as terminal control codes.
        return "".join(sign if sign.isprintable() else "?" for sign in text)


class _JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record), allow_nan=False)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    now = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    line: dict[str, Any] = {"time": now, "level": record.levelname.lower()}
    if record.name == _logger.name:
        line["event"] = record.msg
    else:
        message = record.getMessage().partition("\n")[0]  # asyncio appends tracebacks
        line |= {"event": "log", "logger": record.name, "message": _plain(message)}
    line["request_id"] = request_id.get()
    line |= {name: _plain(value) for name, value in getattr(record, "fields", {}).items()}
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        line["error"] = type(error).__name__
        frames = extract_tb(error.__traceback__)[-8:]
        line["at"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return {name: value for name, value in line.items() if value is not None}


def _plain(value: object) -> object:
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)[:MAX_TEXT]
