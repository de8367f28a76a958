"""Completes the OpenAPI schema: refusals, keys, and what this server offers."""

from __future__ import annotations

import json
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
        entry["enum"] = list(service.models.adapters)
    for fields, name in (
        (reasoning, "max_new_tokens"),
        (chat, "max_tokens"),
        (chat, "max_completion_tokens"),
    ):
        fields[name]["anyOf"][0]["maximum"] = service.limits.new_tokens


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() else number
