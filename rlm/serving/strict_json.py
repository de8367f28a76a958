"""Strict JSON (RFC 8259) for routes with a body.

`json.loads` accepts NaN, repeated names, lone surrogates, UTF-16 and numbers that become infinity.
Each of these has crashed or fooled a server after the parser.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from rlm.serving.errors import HTTPProblem

MAX_DEPTH = 32
_UNFIT = re.compile("[\x00\ud800-\udfff]")  # paired surrogates are one character by now
_MEDIA_TYPE = re.compile(r'application/json *(?:; *(?:charset="?utf-8"? *)?)*', re.IGNORECASE)


def require_json(headers: Headers) -> None:
    """Raise a 415 unless the only Content-Type is application/json."""
    types = headers.getlist("content-type")
    if len(types) != 1 or not _MEDIA_TYPE.fullmatch(types[0]):
        raise HTTPProblem(
            415, "unsupported_media_type", "send a JSON object, and Content-Type: application/json"
        )


def parse(body: bytes) -> Any:
    """Parse `body` (UTF-8, no byte order mark); raise a 400 that repeats none of it."""
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=lambda _: _refuse("NaN and Infinity are not JSON"),
        )
    except UnicodeDecodeError:
        _refuse("the body is not UTF-8")
    except json.JSONDecodeError as error:
        if body.startswith(codecs.BOM_UTF8):  # in files of PowerShell
            _refuse("the body begins with a byte order mark: send UTF-8 without one")
        _refuse(f"not JSON: line {error.lineno}, column {error.colno}")
    except ValueError:  # Python refuses integers of more than 4300 digits
        _refuse("an integer does not fit in 64 bits")
    except RecursionError:
        _refuse(f"nested deeper than {MAX_DEPTH}")
    _check(value)
    return value


def _refuse(detail: str) -> NoReturn:
    raise HTTPProblem(400, "malformed_json", detail) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        _refuse("a name appears twice in one object")
    return value


def _check(value: object, depth: int = 0) -> None:
    """Refuse values that JSON or another parser cannot represent."""
    if isinstance(value, str) and _UNFIT.search(value):
        _refuse("a string contains NUL or half of a surrogate pair")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        _refuse("an integer does not fit in 64 bits")
    if isinstance(value, float) and math.isinf(value):
        _refuse("a number is too large")
    if isinstance(value, dict | list):
        if depth == MAX_DEPTH:
            _refuse(f"nested deeper than {MAX_DEPTH}")
        for item in [*value, *(value.values() if isinstance(value, dict) else ())]:
            _check(item, depth + 1)


class StrictRoute(APIRoute):
    """Parses the body before FastAPI does, so that JSON errors have our form."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            if self.body_field is not None:
                require_json(request.headers)
                request._json = parse(await request.body())  # what request.json() returns
            return await handle(request)

        return strict
