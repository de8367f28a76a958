"""What OpenAPI cannot say of a request, so that schemathesis may see it refused."""

from __future__ import annotations

import schemathesis

RULES = (
    "the limit is",  # of this server: tokens of the prompt, and of all completions together
    "is empty",  # a question of spaces and invisible characters
    "n above 1 requires a temperature above 0",
    "system messages stand at the beginning",
    "user and assistant take turns",
    "stream_options requires stream",
    "valid integer",  # JSON Schema takes 7.0 for one
    "an integer does not fit in 64 bits",  # FastAPI writes the bound of a seed as a float
)


LENGTHS = ("max_new_tokens", "max_tokens", "max_completion_tokens")


@schemathesis.hook
def before_call(context, case, kwargs) -> None:
    """Let a valid request ask for an adapter and a length that this server has, else most would be
    refused for these; of OpenAI's two names for the length it gives one."""
    body = case.body
    if not isinstance(body, dict) or not case.meta.generation.mode.is_positive:
        return
    body |= {name: "tuned" for name in ("model", "adapter") if body.get(name)}
    body |= {name: min(body[name], 300) for name in LENGTHS if body.get(name)}
    if set(LENGTHS[1:]) <= set(body):
        body["max_tokens"] = None


@schemathesis.hook
def filter_failure(context, failure, case, response) -> bool:
    """Whether it is one: a request that fits the schema may only be refused by a rule above; one
    that does not may also be refused for its size, before anybody has read it."""
    if failure.code == "ST201":
        return response.status_code != 413
    if failure.code != "ST202":
        return True
    return not any(rule in response.json()["detail"] for rule in RULES)
