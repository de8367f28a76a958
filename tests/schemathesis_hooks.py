"""Tells schemathesis which requests may be rejected although they match the OpenAPI schema."""

from __future__ import annotations

import schemathesis

RULES = (
    "the limit is",  # the limits of this server on the tokens of a prompt and of all completions
    "is empty",  # a question that consists of spaces and invisible characters
    "n above 1 requires a temperature above 0",
    "system messages stand at the beginning",
    "user and assistant take turns",
    "stream_options requires stream",
    "valid integer",  # 7.0 is an integer in JSON Schema
    "an integer does not fit in 64 bits",  # FastAPI writes the bound of a seed as a float
)


LENGTHS = ("max_new_tokens", "max_tokens", "max_completion_tokens")


@schemathesis.hook
def before_call(context, case, kwargs) -> None:
    """Change valid requests to an adapter and a length that this server supports.

    Otherwise most requests would be rejected. Of OpenAI's two names for the length, one is removed.
    """
    body = case.body
    if not isinstance(body, dict) or not case.meta.generation.mode.is_positive:
        return
    body |= {name: "tuned" for name in ("model", "adapter") if body.get(name)}
    body |= {name: min(body[name], 300) for name in LENGTHS if body.get(name)}
    if set(LENGTHS[1:]) <= set(body):
        body["max_tokens"] = None


@schemathesis.hook
def filter_failure(context, failure, case, response) -> bool:
    """Return whether a failure that schemathesis reports is a real failure.

    A request that matches the schema may be rejected only by a rule above. Any other request may
    also be rejected for its size, before it is parsed.
    """
    if failure.code == "ST201":
        return response.status_code != 413
    if failure.code != "ST202":
        return True
    return not any(rule in response.json()["detail"] for rule in RULES)
