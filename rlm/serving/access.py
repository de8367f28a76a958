"""Access control: API keys, the Host header, origins, and the rate limit per client."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from starlette.datastructures import Headers

from rlm.cli import UsageError

MIN_KEY_LENGTH = 16
NEW_KEY_HINT = "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::[0-9]{1,5})?")
_NAME = re.compile(r"[a-z0-9._-]{1,253}")
_ORIGIN = re.compile(r"https?://([a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\])(:[0-9]{1,5})?")
FORM = "application/x-www-form-urlencoded"  # the media type that `curl -d` sends by default
WINDOW_SECONDS = 60  # length of the window of the rate limit


class Keys:
    """The API keys, stored as SHA-256 hashes. A server without keys listens only on loopback.

    Requests with a wrong key share one rate limit (middleware.py). No address is locked out,
    because all clients behind a tunnel have the same address. Short keys are rejected, because they
    could be guessed.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        """Hash the keys.

        Raises:
            UsageError: a key is too short, or it contains characters that a header cannot contain.
        """
        keys = list(keys)
        for key in keys:
            if not (key.isascii() and key.isprintable()) or " " in key:
                raise UsageError("an API key must be printable ASCII without spaces")
            if len(key) < MIN_KEY_LENGTH:
                raise UsageError(
                    f"an API key must have {MIN_KEY_LENGTH} characters or more; create one: "
                    f"{NEW_KEY_HINT}"
                )
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    @property
    def required(self) -> bool:
        return bool(self._hashes)

    def allows(self, headers: Headers) -> str | None:
        """Return the id of a request's key ("key-1" for the first), or None if the key is invalid.

        Without keys, the result is "open". The id contains the key's number and not a part of its
        hash, which could reveal a weak key. X-API-Key takes precedence over Authorization, which a
        proxy may use for its own password. A request in which one of the headers occurs twice is
        denied.
        """
        if not self._hashes:
            return "open"
        sent = hashlib.sha256(sent_key(headers)).digest()
        matches = [hmac.compare_digest(sent, known) for known in self._hashes]  # no early exit
        return f"key-{matches.index(True) + 1}" if any(matches) else None


def sent_key(headers: Headers) -> bytes:
    """Return the key that a request sends, valid or not; "" if it sends no key or several keys."""
    own, shared = headers.getlist("x-api-key"), headers.getlist("authorization")
    if len(own) > 1 or len(shared) > 1:
        return b""
    scheme, _, key = ("bearer", "", own[0]) if own else "".join(shared).partition(" ")
    return key.encode("latin-1") if scheme.lower() == "bearer" else b""


def load_keys(env: Mapping[str, str], key_file: Path | None) -> Keys:
    """Load the API keys from RLM_API_KEY and from `key_file` (one key per line).

    If neither is given, the result contains no keys.

    Raises:
        UsageError: the file cannot be read, or a key is invalid. An empty variable or file is an
            error too, because the server would then require no key.
    """
    keys = []
    if "RLM_API_KEY" in env:
        keys.append(env["RLM_API_KEY"].strip())
        if not keys[0]:
            raise UsageError(f"RLM_API_KEY is empty; unset it, or create a key: {NEW_KEY_HINT}")
    if key_file is not None:
        try:
            lines = key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{key_file}: cannot read the API keys: {error}") from error
        in_file = [line.strip() for line in lines if line.strip()]
        if not in_file:
            raise UsageError(f"{key_file} contains no API key; create one: {NEW_KEY_HINT}")
        keys += in_file
    return Keys(keys)


class AllowedHosts(set[str]):
    """The host names that requests may be addressed to, in lower case and without a port.

    The check of the Host header prevents DNS rebinding. A web page whose host name resolves to
    127.0.0.1 could otherwise use this server. The page cannot choose the Host header.
    """

    def __init__(self, names: Iterable[str] = (), *, numeric: bool = False) -> None:
        """
        Args:
            numeric: allow every IP address, for a server bound to 0.0.0.0. DNS rebinding needs a
                name, so addresses are safe.

        Raises:
            UsageError: a name cannot occur in a Host header, for example because it has a port.
        """
        super().__init__(name.lower().removeprefix("[").removesuffix("]") for name in names)
        for name in self:
            if _read_address(name) is None and not _NAME.fullmatch(name):
                raise UsageError(f"--allow-host {name}: expected a name without scheme and port")
        self.numeric = numeric

    def allows(self, headers: Headers) -> bool:
        host = asked_host(headers)
        return host in self or (self.numeric and _read_address(host) is not None)


def asked_host(headers: Headers) -> str:
    """Return the host of the Host header in lower case, without the port; "" if invalid."""
    values = headers.getlist("host")
    match = _HOST.fullmatch(values[0].lower()) if len(values) == 1 else None
    return match[1].strip("[]") if match else ""


def read_origins(origins: Iterable[str]) -> list[str]:
    """Normalise origins to the form that browsers send: lower case, without a trailing slash.

    Raises:
        UsageError: an origin is `*` or invalid.
    """
    found = [origin.lower().removesuffix("/") for origin in origins]
    for origin in found:
        if origin == "*":
            raise UsageError(
                "--allow-origin *: every web page that you visit could use this server; list "
                "the origins, such as https://my.app or http://localhost:3000"
            )
        if not _ORIGIN.fullmatch(origin):
            raise UsageError(f"--allow-origin {origin}: expected a form like https://my.app:3000")
    return found


def is_form_of_ours(headers: Headers, allowed: Iterable[str]) -> bool:
    """Return whether a request has the media type of a form and comes from an allowed client.

    `curl -d` sends this media type by default, without an Origin header. A browser sends a form to
    another server without a CORS preflight, so a web page may use this media type only if its
    origin is this server or is allowed. Parameters of the media type, such as a charset, are
    ignored.
    """
    types = [value.partition(";")[0].strip().lower() for value in headers.getlist("content-type")]
    if types != [FORM]:
        return False
    if (origin := headers.get("origin")) is None:
        return headers.get("sec-fetch-site", "none").lower() in ("none", "same-origin")
    own = {f"{scheme}://{headers.get('host', '').lower()}" for scheme in ("http", "https")}
    return origin.lower() in {*own, *allowed}


def client_address(peer: str, headers: Headers) -> str:
    """Return the client address for the rate limit of a public server.

    X-Forwarded-For is used only if the peer is this machine, where a tunnel's agent or a proxy
    appends the client's address to the header. Otherwise the result is the address of the peer.
    An IPv6 client is identified by its network (/64), because one client has many addresses.
    """
    values = headers.getlist("x-forwarded-for")
    if values and is_loopback(peer):
        peer = values[-1].rpartition(",")[2].strip()
    address = _read_address(peer)
    if address is None:
        return "unknown"
    return str(address) if address.version == 4 else f"{int(address) >> 64:x}"


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is loopback, without a DNS lookup."""
    address = _read_address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _read_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IP address. An IPv4 address in IPv6 form (::ffff:1.2.3.4) becomes IPv4."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


class SlidingWindow:
    """A rate limit: at most `per_minute` requests in any 60 seconds."""

    def __init__(self, per_minute: int, now: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._now = per_minute, now
        self._recent: deque[float] = deque()  # times of the requests of the last 60 seconds

    def take(self) -> int:
        """Count one request and return 0, or return the seconds until a request is allowed."""
        now = self._now()
        while self._recent and now - self._recent[0] >= WINDOW_SECONDS:
            self._recent.popleft()
        if len(self._recent) < self._per_minute:
            self._recent.append(now)
            return 0
        return max(1, math.ceil(self._recent[0] + WINDOW_SECONDS - now - 1e-6))
