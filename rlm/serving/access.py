"""Authenticate requests by API key, check the Host header, limit requests per client."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from starlette.datastructures import Headers

from rlm.cli import UsageError

MIN_KEY_LENGTH = 16
NEW_KEY_HINT = "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::[0-9]{1,5})?")
_NAME = re.compile(r"[a-z0-9._-]{1,253}")
_ORIGIN = re.compile(r"https?://([a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\])(:[0-9]{1,5})?")
FORM = "application/x-www-form-urlencoded"  # curl -d's default


def new_key() -> str:
    return secrets.token_urlsafe(32)


class Keys:
    """The API keys, as SHA-256 hashes. Without any the server is open (loopback only).

    Wrong keys share one rate limit (middleware.py), but nobody is locked out, because behind a
    tunnel all clients have one address. Short keys are refused, so guessing is hopeless.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        """Raise UsageError for a key that is short or not valid in a header."""
        keys = list(keys)
        for key in keys:
            if not (key.isascii() and key.isprintable()) or " " in key:
                raise UsageError("an API key is made of ASCII letters, digits and signs, no spaces")
            if len(key) < MIN_KEY_LENGTH:
                raise UsageError(
                    f"an API key has {MIN_KEY_LENGTH} characters or more; make one: {NEW_KEY_HINT}"
                )
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    @property
    def required(self) -> bool:
        return bool(self._hashes)

    def allows(self, headers: Headers) -> str | None:
        """Return the id of the sent key ("key-1", in the order given), "open", or None if denied.

        The id is a number rather than a part of the hash, which would reveal a guessable key.
        X-API-Key precedes Authorization, which a proxy may need for its own password. A request
        with two of either header is denied.
        """
        if not self._hashes:
            return "open"
        sent = hashlib.sha256(sent_key(headers)).digest()
        matches = [hmac.compare_digest(sent, known) for known in self._hashes]  # no early exit
        return f"key-{matches.index(True) + 1}" if any(matches) else None


def sent_key(headers: Headers) -> bytes:
    """Return the sent key, right or wrong; "" without one."""
    own, shared = headers.getlist("x-api-key"), headers.getlist("authorization")
    if len(own) > 1 or len(shared) > 1:
        return b""
    scheme, _, key = ("bearer", "", own[0]) if own else "".join(shared).partition(" ")
    return key.encode("latin-1") if scheme.lower() == "bearer" else b""


def load_keys(env: Mapping[str, str], key_file: Path | None) -> Keys:
    """Load the keys of RLM_API_KEY and `key_file` (one per line); without both there are none.

    An *empty* key raises UsageError, because it must not open the server.
    """
    keys = []
    if "RLM_API_KEY" in env:
        keys.append(env["RLM_API_KEY"].strip())
        if not keys[0]:
            raise UsageError(f"RLM_API_KEY is empty; unset it, or make a key: {NEW_KEY_HINT}")
    if key_file is not None:
        try:
            lines = key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{key_file}: cannot read the API keys: {error}") from error
        in_file = [line.strip() for line in lines if line.strip()]
        if not in_file:
            raise UsageError(f"{key_file} contains no API key; make one: {NEW_KEY_HINT}")
        keys += in_file
    return Keys(keys)


class AllowedHosts(set[str]):
    """Host names, in lower case and without a port, that requests may be addressed to.

    A web page can make its own name point to 127.0.0.1 and then use this server as if it were its
    own (DNS rebinding), but it cannot choose the Host header.
    """

    def __init__(self, names: Iterable[str] = (), *, numeric: bool = False) -> None:
        """
        Args:
            numeric: allow every IP address, for a bind to 0.0.0.0; addresses cannot be rebound.

        Raises:
            UsageError: a name that no Host header can have, such as one with a port.
        """
        super().__init__(name.lower() for name in names)
        for name in self:
            if not _is_address(name) and not _NAME.fullmatch(name):
                raise UsageError(f"--allow-host {name}: a host's name, without a port or a scheme")
        self.numeric = numeric

    def allows(self, headers: Headers) -> bool:
        host = asked_host(headers)
        return host in self or (self.numeric and _is_address(host))


def asked_host(headers: Headers) -> str:
    """Return the Host header's name in lower case without a port; "" if it is invalid."""
    values = headers.getlist("host")
    match = _HOST.fullmatch(values[0].lower()) if len(values) == 1 else None
    return match[1].strip("[]") if match else ""


def read_origins(origins: Iterable[str]) -> list[str]:
    """Normalise origins as a browser sends them: in lower case, without a trailing slash.

    Raises:
        UsageError: `*`, or an invalid origin.
    """
    found = [origin.lower().removesuffix("/") for origin in origins]
    for origin in found:
        if origin == "*":
            raise UsageError(
                "--allow-origin *: every web page that you visit could use this server; name "
                "the origins, such as https://my.app or http://localhost:3000"
            )
        if not _ORIGIN.fullmatch(origin):
            raise UsageError(f"--allow-origin {origin}: an origin is like https://my.app:3000")
    return found


def is_form_of_ours(headers: Headers, allowed: Iterable[str]) -> bool:
    """Return whether a form's media type (curl -d's default) was sent, but not by a web page whose
    origin is not allowed.

    A page needs a preflight to send JSON to another server (CORS), but not to send a form. Browsers
    set Origin in both cases.
    """
    if [value.lower() for value in headers.getlist("content-type")] != [FORM]:
        return False
    if (origin := headers.get("origin")) is None:
        return headers.get("sec-fetch-site", "none").lower() in ("none", "same-origin")
    own = {f"{scheme}://{headers.get('host', '').lower()}" for scheme in ("http", "https")}
    return origin.lower() in {*own, *allowed}


def client_address(peer: str, headers: Headers) -> str | None:
    """Return the client address that a request to an open server counts for; None for this machine.

    X-Forwarded-For is used only if the peer is this machine: a tunnel's agent here appends the
    address that it saw. An IPv6 client is identified by its network, because it has many addresses.
    """
    values = headers.getlist("x-forwarded-for")
    if is_loopback(peer):
        if not values and is_loopback(asked_host(headers)):
            return None
        peer = values[-1].rpartition(",")[2].strip() if values else ""
    if not _is_address(peer):
        return "unknown"
    address = ipaddress.ip_address(peer)
    return str(address) if address.version == 4 else f"{int(address) >> 64:x}"


def is_loopback(host: str) -> bool:
    """Return whether a name or address is loopback, without a lookup."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Bucket:
    """A token bucket of size `per_minute`, refilled at that rate."""

    def __init__(self, per_minute: float, now: Callable[[], float] = time.monotonic) -> None:
        self._size = self._left = float(per_minute)
        self._now = now
        self._then = now()

    def take(self) -> int:
        """Take one token; return 0, or the seconds until one is available."""
        now = self._now()
        self._left = min(self._size, self._left + (now - self._then) * self._size / 60)
        self._then = now
        if self._left > 1 - 1e-9:
            self._left -= 1
            return 0
        return math.ceil((1 - self._left) * 60 / self._size - 1e-6)
