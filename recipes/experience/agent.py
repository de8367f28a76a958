"""Defines the agents that answer prompts: three generators, a critic, and optionally a judge.

The endpoint, key, price and limits of each role are read from data/api_keys/api_config.json.
Environment variables such as GENERATOR_1_API_KEY, GENERATOR_1_BASE_URL and GENERATOR_1_MODEL
override the file. Without the file, a role with no URL and no key uses this project's own server on
this machine.
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

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
)
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
ROLES = (*GENERATORS, "critic")
API_CONFIG = Path("data/api_keys/api_config.json")
# The endpoint of `python server.py`. max_tokens is the default limit of this server, which reserves
# half of the limit for the JSON of a plan. A larger --max-tokens has no effect.
OWN_SERVER: dict[str, Any] = {
    "base_url": "http://127.0.0.1:8000/v1",
    "max_tokens": 512,
    "concurrency": 16,
}
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
    """Load the prompt templates from the files NAME.txt, and check their $placeholders."""
    prompts = {}
    for name, expected in PLACEHOLDERS.items():
        path = directory / f"{name}.txt"
        try:
            prompts[name] = template = Template(path.read_text(encoding="utf-8").strip())
        except OSError as error:
            raise UsageError(f"cannot read the prompt {path}: {error.strerror}") from error
        if not template.is_valid():
            raise UsageError(
                f"{path}: a $ does not start a placeholder: write $$ for a dollar sign"
            )
        if wrong := set(expected.split()).symmetric_difference(template.get_identifiers()):
            wrong = ", ".join(f"${name}" for name in sorted(wrong))
            raise UsageError(f"{path}: the prompt has missing or unknown placeholders: {wrong}")
    return prompts


class Endpoint(BaseModel):
    """Contains a role's entry in api_config.json. Prices are per million tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    api_key: SecretStr = SecretStr("")
    base_url: str = ""
    model: str = ""  # "" selects the first model that the endpoint lists
    description: str = ""  # description, role and notes are not used by the code
    role: str = ""
    notes: str = ""
    price: Price = FREE
    max_tokens: int | None = Field(None, ge=1)  # maximum reply length of the endpoint
    concurrency: int = Field(4, ge=1)
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    timeout: float = Field(600, gt=0)
    attempts: int = Field(5, ge=1)
    backoff: float = Field(0.5, ge=0)

    _key_source: str = PrivateAttr("")  # the place of the key, for error messages

    @field_validator("base_url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        urlsplit(url)  # raises ValueError
        return url

    def client(self, budget: Budget) -> APIClient:
        """Create the client of a role.

        The client enforces the role's rate limits, so create only one client per role in a process.
        """
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
    """Load the endpoints of roles without sending any request.

    The judge is optional: its endpoint is returned only if it is configured.
    """
    # A missing file must not silently select this project's server.
    if path != API_CONFIG and not path.exists():
        raise UsageError(f"--api-config {path} does not exist")
    try:
        roles = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        entries = {name: {**roles.get(name, {})} for name in names}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        form = f"a JSON object with an object per role, as in {API_CONFIG}.example"
        raise UsageError(f"{path} is not {form}: {error}") from None
    endpoints = {}
    for name, entry in entries.items():
        for key, variable in variables_of(name).items():
            if value := environment.get(variable):
                entry[key] = value
        if entry or name != "judge":
            own = OWN_SERVER if not path.exists() and _is_own_server(entry) else {}
            endpoints[name] = endpoint = _checked_endpoint(name, own | entry, path)
            if max_cost is not None and "price" not in endpoint.model_fields_set:
                raise UsageError(f"--max-cost requires a price for {name} in {path}")
    return endpoints


def variables_of(name: str) -> dict[str, str]:
    """Return the environment variables that override a role's entry, by the key of the entry."""
    return {key: f"{name}_{key}".upper() for key in ("api_key", "base_url", "model")}


def _is_own_server(entry: Mapping[str, Any]) -> bool:
    """Return whether a role that only environment variables define uses this project's server.

    A key without a URL is for a provider whose URL is missing.
    """
    if "base_url" not in entry:
        return "api_key" not in entry
    try:
        url, own = urlsplit(entry["base_url"]), urlsplit(OWN_SERVER["base_url"])
        return is_loopback(url.hostname or "") and url.port == own.port
    except ValueError:  # the URL or its port is invalid, which is reported later
        return False


def _checked_endpoint(name: str, entry: dict[str, Any], path: Path) -> Endpoint:
    try:
        endpoint = Endpoint.model_validate(entry)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        # A traceback with the original error may contain the key.
        raise UsageError(f"{path}: {name}: {where}: {first['msg']}") from None
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
        raise UsageError(f"{name} has no base_url: set it in {path} or in {name.upper()}_BASE_URL")
    return endpoint


@dataclass(frozen=True)
class Agent:
    """Answers prompts in one role. An agent can be shared by threads."""

    name: str
    endpoint: Endpoint
    client: APIClient
    journal: Journal  # stores every paid reply, so that none is requested twice
    prompts: Mapping[str, Template]
    temperature: float
    max_tokens: int
    seed: int | None = None  # the run's seed; None gives all runs the same request seeds
    no_schemas: Event = field(default_factory=Event)  # set once the endpoint has rejected a schema

    @cached_property
    def model(self) -> str:
        """The name of the model.

        If the endpoint's settings do not name a model, the name is requested from the endpoint once
        per run, before any paid request.
        """
        try:
            return self.endpoint.model or self.client.models()[0]["id"]
        except UsageError as error:
            own = self.endpoint.base_url == OWN_SERVER["base_url"]
            advice = f"; start python server.py, or write your endpoints to {API_CONFIG}"
            unreached = own and isinstance(error, APIError) and error.status is None
            raise UsageError(f"{self.name}: {error}{advice * unreached}") from error

    @cached_property
    def origin(self) -> dict[str, Any]:
        """The endpoint's URL and, for this project's server, hashes of the served weights."""
        return {"url": self.client.url, "weights": self.client.served_weights(self.model)}

    @property
    def reply_tokens(self) -> int:
        """The maximum length of a reply in tokens."""
        return min(self.max_tokens, self.endpoint.max_tokens or self.max_tokens)

    @property
    def limited_by(self) -> str:
        """The option that limits the length of a reply."""
        own = self.reply_tokens == self.max_tokens
        return "--max-tokens" if own else f"max_tokens of {self.name} in --api-config"

    def ask(
        self,
        stage: str,
        seed: str,
        values: Mapping[str, str],
        *,
        examples: Sequence[tuple[str, str]] = (),
        schema: Mapping[str, Any] | None = None,
    ) -> ChatReply:
        """Return the reply to a prompt, from the journal if the same request was sent before.

        A stored reply is used only if it came from the same endpoint and, for this project's
        server, from the same weights.

        Args:
            stage: the name of the prompt.
            seed: a text that distinguishes this request from other requests with the same prompt.
                The seed sent to the endpoint is a hash of this text.
            values: the values of the prompt's placeholders. A $ inside a value is not replaced.
            examples: earlier turns of the conversation, as pairs (question, answer).
            schema: JSON schema that the reply must match, if the endpoint can enforce one.

        Raises:
            APIError: this request failed; the caller records the error.
            UsageError: further requests would fail too, because of the key, model or budget.
        """
        seed = seed if self.seed is None else f"{self.seed} {seed}"
        prompt = self.prompts[stage].substitute(values).strip()
        turns = zip(cycle(("user", "assistant")), [*chain(*examples), prompt])
        messages = [{"role": role, "content": text} for role, text in turns]
        plain = {
            "messages": messages,
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
            reply = self._send(stage, plain)  # raises if the schema was not the cause
            if not self.no_schemas.is_set():
                self.no_schemas.set()
                tqdm.write(
                    f"  {self.name}: the run continues without JSON schemas ({error})", sys.stderr
                )
            return reply

    def _send(self, stage: str, request: dict[str, Any]) -> ChatReply:
        key = _sha256(json.dumps([self.name, self.origin, request], sort_keys=True))
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


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
