"""Error responses, which combine the problem details of RFC 9457 with OpenAI's `error` object."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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
    "description": "Error: `code` gives the reason",
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
_MAX_ERRORS = 20  # a body of 64 KB can contain 40,000 errors
# Maps pydantic's error types to messages; {…} is replaced by a value of pydantic's error context.
_SAID = {
    "missing": "is missing",
    "extra_forbidden": "this field does not exist",
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
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
    "union_tag_invalid": "its {discriminator} must be {expected_tags}",
    "union_tag_not_found": "its {discriminator} is missing",
}
_NO_PATH = {  # maps the router's messages to advice for clients that use another path or method
    "Not Found": "this path does not exist; send questions to POST /phase1/reasoning, or with "
    "OpenAI's protocol to POST /v1/chat/completions (the client's base_url must end with /v1)",
    "Method Not Allowed": "this path does not support this method: use POST to send questions "
    "and GET to read lists",
}
# Fields whose type is a union: pydantic appends the type that failed to the location of an error.
_UNIONS = ("response_format", "json", "expected_answer")
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(eq=False)
class HTTPProblem(Exception):
    """An exception that is sent to the client as an error response."""

    status: int  # HTTP status
    code: str  # error code for programs
    detail: str  # message for people
    param: str | None = None  # the name of the invalid field
    errors: list[dict[str, Any]] | None = None  # each {"loc": [...], "msg": "..."}
    retry_after: int | None = None  # whole seconds

    def body(self, request_id: str) -> dict[str, Any]:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        body: dict[str, Any] = {
            "type": "about:blank",  # RFC 9457 4.2.1: the title is that of the status
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
        if self.code == "bad_request":  # the end of the request is ambiguous
            headers["Connection"] = "close"
        if self.status in (500, 504):  # a retry of the openai client would fail again
            headers["X-Should-Retry"] = "false"
        return JSONResponse(self.body(request_id), self.status, headers, PROBLEM_TYPE)


def as_problem(error: Exception) -> HTTPProblem:
    """Convert an exception to an HTTPProblem. Unexpected errors reveal no details to the client."""
    if isinstance(error, HTTPProblem):
        return error
    if isinstance(error, RequestValidationError):
        return invalid(error.errors())
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "validation")
        return HTTPProblem(error.status_code, code, _NO_PATH.get(error.detail, str(error.detail)))
    return HTTPProblem(500, "internal", "internal error: look up the request id in the server log")


def invalid(errors: Iterable[Mapping[str, Any]]) -> HTTPProblem:
    """Return the 422 response for pydantic's `errors()`.

    The response contains the locations and messages of the first errors, but not the values that
    were sent: an echoed value could be long, or inject text into a web page. A location may contain
    a field name from the client, which is replaced by "?" unless it is a valid identifier.
    """
    found = list(islice(errors, _MAX_ERRORS))
    kept = [{"loc": _location(error["loc"]), "msg": _said(error)} for error in found]
    # pydantic reports an error for each type of a union; show the error of the type that was sent.
    same = [i for i, error in enumerate(found) if error["loc"][:2] == found[0]["loc"][:2]]
    shown = next((i for i in same if not found[i]["type"].endswith("_type")), 0)
    param = ".".join(str(part) for part in kept[shown]["loc"] if part not in ("body", "?"))
    said = kept[shown]["msg"]
    if found[shown]["type"].endswith("_type"):  # no type of the union fits
        types = [e["msg"].removeprefix("must be ") for e in kept if e["loc"] == kept[shown]["loc"]]
        types = [
            t for t in dict.fromkeys(types) if t != "a whole number" or "a number" not in types
        ]
        said = f"must be {' or '.join(types)}"
    if not param and found[shown]["type"] in _SAID:
        said = f"the body {said}"
    detail = f"{param}: {said}" if param else said
    return HTTPProblem(422, "validation", detail, param=param or None, errors=kept)


def _said(error: Mapping[str, Any]) -> str:
    if said := _SAID.get(error["type"]):
        return said.format_map(error["ctx"]) if "{" in said else said
    return error["msg"].removeprefix("Value error, ")


def _location(parts: Sequence[int | str]) -> list[int | str]:
    """Return a location in the request, without the type names that pydantic inserts in unions."""
    return [
        part if isinstance(part, int) or _FIELD.fullmatch(part) else "?"
        for before, part in zip(("", *parts), parts, strict=False)
        if before not in _UNIONS
    ]
