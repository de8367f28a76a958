"""Strict JSON (RFC 8259) for routes with a request body.

`json.loads` accepts NaN, repeated names, lone surrogates, UTF-16 and numbers that become infinity.
Such values have caused crashes and security holes in servers, so they are rejected here.
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
_UNFIT = re.compile("[\x00\ud800-\udfff]")  # NUL and lone surrogates
_MEDIA_TYPE = re.compile(r'application/json *(?:; *(?:charset="?utf-8"? *)?)*', re.IGNORECASE)


def require_json(headers: Headers) -> None:
    """Raise a 415 error unless the request has exactly one Content-Type, application/json."""
    types = headers.getlist("content-type")
    if len(types) != 1 or not _MEDIA_TYPE.fullmatch(types[0]):
        raise HTTPProblem(
            415, "unsupported_media_type", "send a JSON object with Content-Type: application/json"
        )


def parse(body: bytes) -> Any:
    """Parse a JSON body in UTF-8 without a byte order mark.

    Raises:
        HTTPProblem: 400 for an invalid body; the message does not repeat any part of the body.
    """
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=lambda _: _refuse("NaN and Infinity are not JSON"),
        )
    except UnicodeDecodeError:
        _refuse("the body is not UTF-8")
    except json.JSONDecodeError as error:
        if body.startswith(codecs.BOM_UTF8):  # PowerShell writes such files
            _refuse("the body begins with a byte order mark: send UTF-8 without one")
        _refuse(f"the body is not JSON: line {error.lineno}, column {error.colno}")
    except ValueError:  # Python rejects integers of more than 4300 digits
        _refuse("an integer does not fit in 64 bits")
    except RecursionError:
        _refuse(f"the JSON is nested more than {MAX_DEPTH} levels deep")
    _check(value)
    return value


def _refuse(detail: str) -> NoReturn:
    raise HTTPProblem(400, "malformed_json", detail) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        _refuse("a key appears twice in one object")
    return value


def _check(value: object, depth: int = 0) -> None:
    """Reject values that not all JSON parsers can represent."""
    if isinstance(value, str) and _UNFIT.search(value):
        _refuse("a string contains a NUL character or a lone surrogate")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        _refuse("an integer does not fit in 64 bits")
    if isinstance(value, float) and math.isinf(value):
        _refuse("a number is too large")
    if isinstance(value, dict | list):
        if depth == MAX_DEPTH:
            _refuse(f"the JSON is nested more than {MAX_DEPTH} levels deep")
        for item in [*value, *(value.values() if isinstance(value, dict) else ())]:
            _check(item, depth + 1)


class StrictRoute(APIRoute):
    """A route that checks the body before FastAPI parses it, so that errors have our format."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            # FastAPI answers an empty body with 422, and parses an accepted body again.
            if self.body_field is not None and (body := await request.body()):
                require_json(request.headers)
                parse(body)
            return await handle(request)

        return strict
