"""What OpenAPI cannot say of a request, so that schemathesis may see it refused."""

from __future__ import annotations

import schemathesis

RULES = (
    "the limit is",  # of this server: tokens of the prompt, and of all completions together
    "is empty",  # a question of spaces and invisible characters
    "n above 1 needs a temperature above 0",
    "system messages stand at the beginning",
    "user and assistant take turns",
    "stream_options needs stream",
    "valid integer",  # JSON Schema takes 7.0 for one
)


@schemathesis.hook
def before_call(context, case, kwargs) -> None:
    """Of two names for one limit a valid request gives one; left alone, most would give both."""
    both = isinstance(case.body, dict) and {"max_tokens", "max_completion_tokens"} <= set(case.body)
    if both and case.meta.generation.mode.is_positive:
        case.body["max_tokens"] = None


@schemathesis.hook
def filter_failure(context, failure, case, response) -> bool:
    """Whether it is one: a request that fits the schema may only be refused by a rule above; one
    that does not may also be refused for its size, before anybody has read it."""
    if failure.code == "ST201":
        return response.status_code != 413
    if failure.code != "ST202":
        return True
    return not any(rule in response.json()["detail"] for rule in RULES)
