"""Error responses: RFC 9457's problem details and OpenAI's `error` in one body.

Error responses repeat nothing that a client sent: an echo can fool a log or a page, and a lone
surrogate in it cannot be encoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

PROBLEM_TYPE = "application/problem+json"
_FIELDS = ("type", "title", "detail", "code", "request_id")
REFUSED = {  # for OpenAPI
    "description": "Refused: `code` says why",
    "content": {
        PROBLEM_TYPE: {
            "schema": {
                "type": "object",
                "required": [*_FIELDS, "status", "error"],
                "properties": {name: {"type": "string"} for name in _FIELDS}
                | {"status": {"type": "integer"}, "error": {"type": "object"}}
                | {"errors": {"type": "array", "items": {"type": "object"}}},
            }
        }
    },
}
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_MAX_ERRORS = 20  # a body of 64 KB can cause 40,000
# pydantic's error type → message; {…} is the limit.
_SAID = {
    "missing": "is missing",
    "extra_forbidden": "there is no such field",
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "string_too_long": "has more than {max_length} characters",
    "string_too_short": "is empty",
    "too_long": "has more than {max_length} entries",
    "too_short": "is empty",
}
_NO_PATH = {  # the router's message → advice for a client that uses another protocol or path
    "Not Found": "there is no such path here; ask by POST /phase1/reasoning, or, as OpenAI's "
    "clients do, by POST /v1/chat/completions (their base_url ends with /v1)",
    "Method Not Allowed": "this path takes another method: questions are sent by POST, lists are "
    "read by GET",
}
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(eq=False)
class HTTPProblem(Exception):
    """An error response, as an exception."""

    status: int  # of HTTP
    code: str  # for programs
    detail: str  # for people
    param: str | None = None  # the field at fault
    errors: list[dict[str, Any]] | None = None  # each {"loc": [...], "msg": "..."}
    retry_after: int | None = None  # whole seconds

    def body(self, request_id: str) -> dict[str, Any]:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        body: dict[str, Any] = {
            "type": "about:blank",  # RFC 9457 4.2.1: the title is the status, `code` says more
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "request_id": request_id,
            "error": {
                "message": self.detail,
                "type": _TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            },
        }
        if self.errors is not None:
            body["errors"] = self.errors
        return body

    def response(self, request_id: str) -> Response:
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = 'Bearer realm="rlm"'
        if self.code == "bad_request":  # it is unclear where the request ends
            headers["Connection"] = "close"
        if self.status in (500, 504):  # a retry of the openai client would fail again
            headers["X-Should-Retry"] = "false"
        return JSONResponse(self.body(request_id), self.status, headers, PROBLEM_TYPE)


def as_problem(error: Exception) -> HTTPProblem:
    """Convert an exception to a problem; a bug reveals nothing to the client."""
    if isinstance(error, HTTPProblem):
        return error
    if isinstance(error, RequestValidationError):
        return invalid(error.errors())
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "validation")
        return HTTPProblem(error.status_code, code, _NO_PATH.get(error.detail, str(error.detail)))
    return HTTPProblem(500, "internal", "a fault of the server; the log has the request id")


def invalid(errors: Iterable[Mapping[str, Any]]) -> HTTPProblem:
    """Return the 422 for pydantic's `errors()`: the first locations and messages, without values.

    A location may contain a field name from the client, which is kept only if it looks like a name.
    """
    found = list(islice(errors, _MAX_ERRORS))
    kept = [{"loc": list(map(_place, error["loc"])), "msg": _said(error)} for error in found]
    # pydantic reports an error for each type of a union; show the one of the type that was sent.
    same = [i for i, error in enumerate(found) if error["loc"][:2] == found[0]["loc"][:2]]
    shown = next((i for i in same if not found[i].get("type", "").endswith("_type")), 0)
    param = ".".join(str(part) for part in kept[shown]["loc"] if part not in ("body", "?"))
    detail = f"{param}: {kept[shown]['msg']}" if param else kept[shown]["msg"]
    return HTTPProblem(422, "validation", detail, param=param or None, errors=kept)


def _said(error: Mapping[str, Any]) -> str:
    if said := _SAID.get(error.get("type", "")):
        return said.format_map(error["ctx"]) if "{" in said else said
    return error["msg"].removeprefix("Value error, ")


def _place(part: int | str) -> int | str:
    return part if isinstance(part, int) or _FIELD.fullmatch(part) else "?"
