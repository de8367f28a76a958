"""Who answers: generator_1, generator_2, generator_3, critic and, if there is one, the judge.

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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

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
CONFIG = Path("data/api_keys/api_config.json")
# python server.py; a small model that has not stopped after 256 tokens seldom does.
OWN_SERVER = {"base_url": "http://127.0.0.1:8000/v1", "max_tokens": 256}


class RoleSettings(BaseModel):
    """What api_config.json says of a role. Prices are for a million tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    api_key: SecretStr = SecretStr("")
    base_url: str = ""
    model: str = ""  # "": the first that the endpoint offers
    description: str = ""
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


def named(path: Path) -> Path:
    """The settings' file; only the default one may be missing.

    Raises:
        UsageError: another one is. Our own server would take the place of what it names.
    """
    if path != CONFIG and not path.exists():
        raise UsageError(f"--api-config {path} does not exist")
    return path


def load_settings(
    names: Sequence[str], path: Path = CONFIG, environment: Mapping[str, str] = os.environ
) -> dict[str, RoleSettings]:
    """The settings of these roles, and of the judge if it is configured. Nothing is sent.

    Raises:
        UsageError: a key is missing, or the file is not as docs/experience.md has it.
    """
    try:
        roles = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not all(isinstance(entry, dict) for entry in roles.values()):
            raise ValueError("not an object of objects")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is no JSON object of roles: {error}") from error
    found = {}
    for name in (*names, "judge"):
        entry = dict(roles.get(name, {}))
        for field in ("api_key", "base_url", "model"):
            if value := environment.get(f"{name}_{field}".upper()):
                entry[field] = value
        if not entry and name == "judge":
            continue
        if not entry and not path.exists():
            entry = OWN_SERVER
        found[name] = _checked(name, entry, path)
    return found


def check_prices(settings: Mapping[str, RoleSettings], path: Path) -> None:
    """Whether a cost can be capped: what is not said to cost anything would count as free.

    Raises:
        UsageError: a role elsewhere than on this machine is without a price, or all are.
    """
    unsaid = [
        name
        for name, one in settings.items()
        if not is_loopback(urlsplit(one.base_url).hostname or "")
        and "price" not in one.model_fields_set
    ]
    if not any(one.price != FREE for one in settings.values()):
        unsaid = list(settings)
    if unsaid:
        raise UsageError(f"--max-cost needs a price for {', '.join(unsaid)} in {path}")


def _checked(name: str, entry: dict[str, Any], path: Path) -> RoleSettings:
    try:
        settings = RoleSettings.model_validate(entry)
    except ValidationError as error:  # its own text would quote the key
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}: {name}: {where}: {first['msg']}") from error
    own = is_loopback(urlsplit(settings.base_url).hostname or "")  # ours needs no key
    if own or settings.api_key.get_secret_value().strip():
        if settings.base_url:
            return settings
        raise UsageError(f"{name} has no base_url; add it to {path} or {name.upper()}_BASE_URL")
    raise UsageError(
        f"API key not found for {name}: put it into {path} (copy {path}.example) or into the "
        f"environment variable {name.upper()}_API_KEY"
    )


def client_of(settings: RoleSettings, budget: Budget) -> APIClient:
    """One for a role in a process: it is who keeps the role's limits."""
    return APIClient(
        settings.base_url,
        api_key=settings.api_key.get_secret_value(),
        price=settings.price,
        budget=budget,
        concurrency=settings.concurrency,
        timeout=settings.timeout,
        attempts=settings.attempts,
        backoff=settings.backoff,
        rate_limit=RateLimit(settings.requests_per_minute, settings.tokens_per_minute),
    )


class Role:
    """An endpoint that answers prompts; any number of threads may share it."""

    def __init__(
        self, name: str, settings: RoleSettings, client: APIClient, journal: Journal
    ) -> None:
        self.name, self.client = name, client
        self._journal, self._most = journal, settings.max_tokens or sys.maxsize
        # One name for a run: asked once, and before anything is paid.
        self.model = settings.model or self._told(self.client.models, ())[0]["id"]

    def ask(
        self, stage: str, prompt: str, *, temperature: float, max_tokens: int, seed: str
    ) -> ChatReply:
        """The reply, from the journal if the same was asked before.

        Args:
            stage: what it is for, in the summary.
            seed: whatever tells this request from others; a number made of it is sent.

        Raises:
            APIError: no reply; for the caller to record.
            UsageError: no further request makes sense (key, model, budget).
        """
        asked = {
            "messages": [{"role": "user", "content": prompt}],
            "model": self.model,
            "temperature": temperature,
            "max_tokens": min(max_tokens, self._most),
            "seed": int(hashlib.sha256(f"{self.name} {stage} {seed}".encode()).hexdigest()[:7], 16),
        }
        key = hashlib.sha256(json.dumps([self.name, asked], sort_keys=True).encode()).hexdigest()
        if row := self._journal.rows.get(key):
            return ChatReply(**row["reply"])
        reply = self._told(self.client.chat, (APIError, BudgetExceeded), **asked)
        row = {"role": self.name, "stage": stage, "cost": reply.cost, "reply": vars(reply)}
        self._journal.add(key, row)
        return reply

    def _told(self, call: Any, but: tuple[type[Exception], ...], **arguments: Any) -> Any:
        """The call; what goes wrong, but for these, is told with the role's name."""
        try:
            return call(**arguments)
        except but:
            raise
        except UsageError as error:
            raise UsageError(f"{self.name}: {error}") from error
