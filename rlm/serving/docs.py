"""The API's description: the schema completed, and a page of it that needs no script."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from rlm.serving.middleware import PUBLIC
from rlm.serving.service import Service

PROBLEM = {
    "type": "object",
    "description": "RFC 9457 problem details and OpenAI's error in one",
    "required": ["type", "title", "status", "detail", "code", "request_id", "error"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "request_id": {"type": "string"},
        "errors": {"type": "array", "items": {"type": "object"}},
        "error": {"type": "object"},
    },
}
REFUSED = {
    "description": "Refused: `code` says why",
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


def event_stream(*names: str) -> dict[str, Any]:
    """The content of a response in server-sent events; each has one of the names, if any."""
    data = {"type": "string", "description": "JSON"}
    event = {"event": {"type": "string", "enum": list(names)}} if names else {}
    item = {"type": "object", "properties": event | {"data": data}, "required": [*event, "data"]}
    return {"text/event-stream": {"itemSchema": item}}


def complete_schema(app: FastAPI, service: Service, needs_key: bool) -> None:
    """Say what this server offers, what a refusal looks like, whether and how keys are sent."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas["Problem"] = PROBLEM
            _narrow(schemas, service)
            made["components"]["securitySchemes"] = KEYS
            made["security"] = [{"bearer": []}, {"header": []}] if needs_key else [{}]
            for path, operations in made["paths"].items():
                for operation in operations.values():
                    if path in PUBLIC:
                        operation["security"] = []
            # Of an integer's bound FastAPI makes a float: 16.0.
            app.openapi_schema = json.loads(json.dumps(made), parse_float=_number)
        return app.openapi_schema

    app.openapi = schema


def _narrow(schemas: dict[str, Any], service: Service) -> None:
    """The fields whose range this server has fixed: names of adapters, and the longest completion.

    The model classes cannot say it: they are the same for every server.
    """
    chat, reasoning = (schemas[name]["properties"] for name in ("ChatRequest", "ReasoningRequest"))
    for entry in (chat["model"], reasoning["adapter"]["anyOf"][0]):
        entry["enum"] = list(service.catalog.offered)
    for fields, name in (
        (reasoning, "max_new_tokens"),
        (chat, "max_tokens"),
        (chat, "max_completion_tokens"),
    ):
        fields[name]["anyOf"][0]["maximum"] = service.limits.new_tokens


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() else number


def page(schema: dict[str, Any]) -> str:
    """Every operation with the fields of its request, as plain HTML."""
    sections = [
        _operation(schema, method, path, operation)
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    ]
    title = escape(schema["info"]["title"])
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title}: API</title><link rel="stylesheet" href="page.css"><h1>{title}: API</h1>'
        f"<p>{escape(schema['info']['description'])} The machine-readable form is "
        "<code>/openapi.json</code>. A key goes into <code>Authorization: Bearer …</code> or "
        "<code>X-API-Key</code>, where the server wants one.</p>" + "".join(sections) + "</html>"
    )


def _operation(schema: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    head = f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    text = f"<p>{escape(operation.get('summary', ''))}</p>"
    body = operation.get("requestBody")
    if body is None:
        return head + text
    name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    model = schema["components"]["schemas"][name]
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code></td><td>{escape(_kind(entry))}"
        f"{', needed' if field in model.get('required', ()) else ''}</td>"
        f"<td>{escape(entry.get('description', ''))}</td></tr>"
        for field, entry in model["properties"].items()
    )
    return f"{head}{text}<table><tr><th>field</th><th>type</th><th></th></tr>{rows}</table>"


def _kind(entry: dict[str, Any]) -> str:
    """A schema entry in a few words.

    >>> _kind({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]})
    'integer ≥ 1'
    """
    if "anyOf" in entry:
        return " or ".join(_kind(one) for one in entry["anyOf"] if one.get("type") != "null")
    if "const" in entry:
        return repr(entry["const"])
    if "$ref" in entry:
        return entry["$ref"].rpartition("/")[2]
    if "enum" in entry:
        return " | ".join(map(repr, entry["enum"]))
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {entry[key]}" for key, sign in signs.items() if key in entry]
    if "maxLength" in entry:
        bounds.append(f"at most {entry['maxLength']} characters")
    if "maxItems" in entry:
        bounds.append(f"at most {entry['maxItems']}")
    return " ".join([entry.get("type", "any"), *bounds])
