"""Agents answer prompts: generator_1, generator_2, generator_3, the critic, perhaps a judge.

Each role has its endpoint, key, price and limits, from data/api_keys/api_config.json or from
variables like GENERATOR_1_API_KEY, GENERATOR_1_BASE_URL and GENERATOR_1_MODEL, which win. Without
either, all roles talk to this project's own server on this machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, cycle
from pathlib import Path
from string import Template
from threading import Event
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, ValidationError
from tqdm import tqdm

from rlm.api_client import (
    FREE,
    APIClient,
    APIError,
    Budget,
    BudgetExceeded,
    ChatReply,
    Price,
    RateLimit,
)
from rlm.cli import UsageError
from rlm.runs import Journal
from rlm.serving import is_loopback

GENERATORS = ("generator_1", "generator_2", "generator_3")
API_CONFIG = Path("data/api_keys/api_config.json")
# python server.py; max_tokens is its own limit, of which half is kept for the JSON of a plan.
OWN_SERVER = {"base_url": "http://127.0.0.1:8000/v1", "max_tokens": 512, "concurrency": 16}
PROMPTS = Path(__file__).parent / "prompts"
PLACEHOLDERS = {
    "scaffold": "experiences problem",
    "answer": "problem scaffold",
    "fusion": "experiences problem proposals",
    "generator_experience_extraction": "problem gold rollouts library room",
    "critic_experience_extraction": "problem gold rollouts library room",
    "judge_logic": "problem scaffold solution",
    "solve": "problem",
    "question": "problem",
    "rule": "problem right wrong",
    "critic_answer": "problem attempts",
}


def load_prompts(directory: Path = PROMPTS) -> dict[str, Template]:
    """Load the prompts, NAME.txt with $placeholders; raise if these are not PLACEHOLDERS."""
    prompts = {}
    for name, expected in PLACEHOLDERS.items():
        path = directory / f"{name}.txt"
        try:
            prompts[name] = template = Template(path.read_text(encoding="utf-8").strip())
        except OSError as error:
            raise UsageError(f"cannot read the prompt {path}: {error.strerror}") from error
        if not template.is_valid():
            raise UsageError(f"{path}: a $ that begins no placeholder (write $$ for the sign)")
        if wrong := set(expected.split()).symmetric_difference(template.get_identifiers()):
            wrong = ", ".join(f"${name}" for name in sorted(wrong))
            raise UsageError(f"{path}: these placeholders are missing or unknown: {wrong}")
    return prompts


class Endpoint(BaseModel):
    """A role's entry in api_config.json. Prices are per million tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    api_key: SecretStr = SecretStr("")
    base_url: str = ""
    model: str = ""  # "": the first that the endpoint offers
    description: str = ""  # this and the next two are notes for the reader
    role: str = ""
    notes: str = ""
    price: Price = FREE
    max_tokens: int | None = Field(None, ge=1)  # longest reply that the endpoint gives
    concurrency: int = Field(4, ge=1)
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    timeout: float = Field(600, gt=0)
    attempts: int = Field(5, ge=1)
    backoff: float = Field(0.5, ge=0)

    _key_source: str = PrivateAttr("")  # where the user may change the key

    def client(self, budget: Budget) -> APIClient:
        """Make a role's client, which keeps the role's limits: use only one in a process."""
        options = ("price", "concurrency", "timeout", "attempts", "backoff")
        return APIClient(
            self.base_url,
            api_key=self.api_key.get_secret_value(),
            key_source=self._key_source,
            budget=budget,
            rate_limit=RateLimit(self.requests_per_minute, self.tokens_per_minute),
            **{name: getattr(self, name) for name in options},
        )


def load_endpoints(
    names: Sequence[str],
    path: Path = API_CONFIG,
    environment: Mapping[str, str] = os.environ,
    *,
    max_cost: float | None = None,
) -> dict[str, Endpoint]:
    """Load the endpoints of these roles, the judge's only if it is configured. Nothing is sent.

    Raises:
        UsageError: settings are invalid, a key is missing, or `max_cost` is given without a price.
    """
    if path != API_CONFIG and not path.exists():  # this project's server would answer instead
        raise UsageError(f"--api-config {path} does not exist")
    try:
        roles = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        entries = {name: dict(roles.get(name, {})) for name in names}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no JSON object of roles: {error}") from error
    endpoints = {}
    for name, entry in entries.items():
        for key in ("api_key", "base_url", "model"):
            if value := environment.get(f"{name}_{key}".upper()):
                entry[key] = value
        if entry or name != "judge":
            own = {} if path.exists() else OWN_SERVER
            endpoints[name] = endpoint = _checked_endpoint(name, entry or own, path)
            if max_cost is not None and "price" not in endpoint.model_fields_set:
                raise UsageError(f"--max-cost needs a price for {name} in {path}")
    return endpoints


def _checked_endpoint(name: str, entry: dict[str, Any], path: Path) -> Endpoint:
    try:
        endpoint = Endpoint.model_validate(entry)
    except ValidationError as error:  # its text would quote the key
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}: {name}: {where}: {first['msg']}") from error
    variable = f"{name.upper()}_API_KEY"
    advice = f"{path} (copy {API_CONFIG}.example)"
    endpoint._key_source = f"{variable}, or {name} in {advice}"
    local = is_loopback(urlsplit(endpoint.base_url).hostname or "")
    if not local and not endpoint.api_key.get_secret_value().strip():
        raise UsageError(
            f"API key not found for {name}: put it into {advice} or into the environment variable "
            f"{variable}" + (", or remove the judge, which is optional" if name == "judge" else "")
        )
    if not endpoint.base_url:
        raise UsageError(f"{name} has no base_url; add it to {path} or {name.upper()}_BASE_URL")
    return endpoint


@dataclass(frozen=True)
class Agent:
    """Answers prompts in one role; any number of threads may share it."""

    name: str
    endpoint: Endpoint
    client: APIClient
    journal: Journal  # every paid reply is kept there and not asked for again
    prompts: Mapping[str, Template]
    temperature: float
    max_tokens: int
    seed: int | None = None  # of the run; None: all runs ask the same
    no_schemas: Event = field(default_factory=Event)  # set once the endpoint has refused one

    @cached_property
    def model(self) -> str:
        """The model's name, which is requested once per run, before anything is paid."""
        try:
            return self.endpoint.model or self.client.models()[0]["id"]
        except UsageError as error:
            raise UsageError(f"{self.name}: {error}") from error

    @property
    def reply_tokens(self) -> int:
        """The longest reply, in tokens."""
        return min(self.max_tokens, self.endpoint.max_tokens or self.max_tokens)

    def ask(
        self,
        stage: str,
        seed: str,
        values: Mapping[str, str],
        *,
        examples: Sequence[tuple[str, str]] = (),
        schema: Mapping[str, Any] | None = None,
    ) -> ChatReply:
        """Return the reply to a prompt, from the journal if the same was asked before.

        Args:
            stage: the prompt's name.
            seed: any value that tells this request from others; a hash of it is sent as the seed.
            values: what replaces the prompt's placeholders; a $ inside a value stays a $.
            examples: earlier turns, (question, answer).
            schema: JSON schema that the reply must match, if the endpoint can enforce one.

        Raises:
            APIError: there is no reply; the caller records it.
            UsageError: no further request makes sense (key, model, budget).
        """
        seed = seed if self.seed is None else f"{self.seed} {seed}"
        prompt = self.prompts[stage].substitute(values).strip()
        plain = {
            "messages": _conversation([*chain(*examples), prompt]),
            "model": self.model,
            "temperature": self.temperature,
            "max_tokens": self.reply_tokens,
            "seed": int(_sha256(f"{self.name} {stage} {seed}")[:7], 16),
        }
        if schema is None or self.no_schemas.is_set():
            return self._send(stage, plain)
        asked = {"type": "json_schema", "json_schema": {"name": stage, "schema": schema}}
        try:
            return self._send(stage, plain | {"response_format": asked})
        except APIError as error:
            if error.status not in (400, 422):
                raise
            reply = self._send(stage, plain)  # raises if it was not the schema
            if not self.no_schemas.is_set():
                self.no_schemas.set()
                tqdm.write(f"  {self.name}: continues without JSON schemas ({error})", sys.stderr)
            return reply

    def _send(self, stage: str, request: dict[str, Any]) -> ChatReply:
        key = _sha256(json.dumps([self.name, request], sort_keys=True))
        if row := self.journal.rows.get(key):
            return ChatReply(**row["reply"])
        try:
            reply = self.client.chat(**request)
        except (APIError, BudgetExceeded):
            raise
        except UsageError as error:
            raise UsageError(f"{self.name}: {error}") from error
        row = {"role": self.name, "stage": stage, "cost": reply.cost, "reply": vars(reply)}
        self.journal.add(key, row)
        return reply


def _conversation(texts: Sequence[str]) -> list[dict[str, str]]:
    """Write texts as turns of the user and the assistant."""
    return [{"role": r, "content": t} for r, t in zip(cycle(("user", "assistant")), texts)]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
