"""A client for OpenAI-compatible servers: the LLM APIs that the recipes use, and vLLM.

The client retries requests itself, because each attempt has to wait for the rate limit and count
against the budget.
"""

from __future__ import annotations

import json
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from rlm.cli import UsageError

__all__ = [
    "FREE",
    "APIClient",
    "APIError",
    "Budget",
    "BudgetExceeded",
    "ChatReply",
    "Price",
    "RateLimit",
    "Usage",
]


class BudgetExceeded(UsageError):
    """The next request could exceed the budget, so it was not sent."""


@dataclass(frozen=True)
class Price:
    """The price of a million prompt tokens and of a million completion tokens."""

    prompt: float = 0.0
    completion: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= price < math.inf for price in (self.prompt, self.completion)):
            raise ValueError("a price must be a number of at least 0")

    def cost(self, prompt_tokens: float, completion_tokens: float) -> float:
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


FREE = Price()


@dataclass
class Usage:
    """The cost and tokens of a request.

    Before the reply, these are the maximum cost and an estimate of the tokens. Then they are
    replaced with the actual values.
    """

    cost: float = 0.0
    tokens: int = 0
    started: float = 0.0  # set by RateLimit.wait, on the clock of `time.monotonic`


class Budget:
    """Counts the cost of all requests, and limits it. Thread-safe."""

    def __init__(self, max_cost: float | None = None) -> None:
        self.max_cost = math.inf if max_cost is None else max_cost
        self.cost = 0.0
        self._reserved: list[float] = []  # the maximum costs of the requests in flight
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, usage: Usage) -> Iterator[None]:
        """Reserve a request's maximum cost while the request runs; then count its actual cost.

        If the maximum does not fit into the budget together with the requests in flight, wait for
        these requests: most of them will cost less than their maximum.

        Args:
            usage: contains the maximum cost; the caller replaces it with the actual cost.

        Raises:
            BudgetExceeded: the request does not fit even when no other request is in flight.
        """
        max_cost = usage.cost
        with self._changed:
            self._changed.wait_for(lambda: self._fits(max_cost) or not self._reserved)
            if not self._fits(max_cost):
                raise BudgetExceeded(
                    f"stopped at a cost of {self.cost:.4g}: the next call could cost "
                    f"{max_cost:.2g}, and the budget is {self.max_cost:g}"
                )
            self._reserved.append(max_cost)
        try:
            yield
        finally:
            with self._changed:
                self._changed.notify_all()
                self._reserved.remove(max_cost)
                self.cost += usage.cost

    def _fits(self, cost: float) -> bool:
        return self.cost + math.fsum(self._reserved) + cost <= self.max_cost


class RateLimit:
    """Limits requests and tokens per minute."""

    def __init__(
        self, requests: int | None = None, tokens: int | None = None, window: float = 60.0
    ) -> None:
        self._requests, self._tokens = requests or math.inf, tokens or math.inf
        self._window = window  # seconds
        self._recent: deque[Usage] = deque()
        self._lock = threading.Lock()

    def wait(self, usage: Usage) -> None:
        """Wait until a request fits into the limits.

        A request that exceeds a limit by itself waits until the window is empty.
        """
        while True:
            with self._lock:
                now = time.monotonic()
                while self._recent and now - self._recent[0].started >= self._window:
                    self._recent.popleft()
                tokens = sum(other.tokens for other in self._recent) + usage.tokens
                fits = len(self._recent) < self._requests and tokens <= self._tokens
                if fits or not self._recent:
                    usage.started = now
                    self._recent.append(usage)
                    return
                pause = self._recent[0].started + self._window - now
            time.sleep(max(pause, 0.001))


MAX_RETRY_AFTER = 60.0  # seconds; a longer Retry-After raises an APIError
TEMPLATE_TOKENS = 64  # tokens that a server may add to a conversation (system prompt, roles)


class APIError(UsageError):
    """The server rejected a request, or every attempt failed.

    `status` is the HTTP status, or None if there was no response.
    """

    def __init__(self, message: str, status: int | None = None, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after

    @property
    def is_final(self) -> bool:
        """Whether the same request would fail again, so that it is not retried."""
        return self.status is not None and self.status != 429 and self.status < 500


@dataclass(frozen=True)
class ChatReply:
    """A reply. `text` is "" if the reply has no text, as when a reasoning model is cut off."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cost: float
    reasoning: str = ""  # set if the server sends `reasoning` or `reasoning_content`


class APIClient:
    """A thread-safe client for one server."""

    def __init__(
        self,
        url: str,
        *,
        api_key_env: str | None = None,
        api_key: str = "",
        key_source: str = "",
        price: Price = FREE,
        budget: Budget | None = None,
        rate_limit: RateLimit | None = None,
        concurrency: int = 16,
        timeout: float = 600.0,
        attempts: int = 5,
        backoff: float = 0.5,
    ) -> None:
        """
        Args:
            url: base URL, such as http://127.0.0.1:8000/v1; /v1 is added to a URL without a path.
            api_key_env: the environment variable that contains the key. If neither this nor
                `api_key` is given, no key is sent.
            key_source: the place where the user sets `api_key`, named in error messages.
            budget, rate_limit: may be shared by several clients; every attempt counts.
            concurrency: maximum number of requests in flight; further requests wait.
            timeout: an attempt fails after this many seconds without a byte from the server.
            attempts: number of attempts per request, including the first.
            backoff: seconds before the second attempt, doubled before each further attempt.

        Raises:
            UsageError: the URL is invalid, or the environment variable is not set.
        """
        self.api_key_env = api_key_env
        self._key_source = f"the environment variable {api_key_env}" if api_key_env else key_source
        self._key = _checked_key(api_key_env, api_key, self._key_source)
        self.url = _checked_url(url)
        self.price, self.budget = price, budget or Budget()
        self.concurrency, self._rate_limit = concurrency, rate_limit or RateLimit()
        self._slots = threading.Semaphore(concurrency)
        self.retries = 0  # number of retries of all requests together
        self._count = threading.Lock()
        self._attempts, self._backoff = attempts, backoff
        self._jitter = random.Random()  # separate from the run's seeded generator
        self._client = _http_client(self.url, self._key, concurrency, timeout)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str,
        temperature: float,
        max_tokens: int,
        **options: Any,
    ) -> ChatReply:
        """Return one reply to a conversation.

        Args:
            options: further fields of the request body (top_p, seed, stop, response_format, …).

        Raises:
            APIError: the server rejected the request, every attempt failed, or the reply is
                invalid.
            BudgetExceeded: the request could exceed the budget, so it was not sent.
            UsageError: the URL or model does not exist (404), or the server rejects the key.
        """
        body = {"model": model, "messages": list(messages), "temperature": temperature}
        body |= {"max_tokens": max_tokens, **options}
        # Each token covers at least one byte of text, so the number of bytes is an upper bound.
        size = len(json.dumps(body, ensure_ascii=False).encode()) + TEMPLATE_TOKENS
        max_cost = self.price.cost(size, max_tokens)
        reply = self.post("chat/completions", body, max_cost, size // 4 + max_tokens)
        try:
            choice, tokens = reply["choices"][0], _token_counts(reply)
            message = choice["message"]
            text = _text(message.get("content"))  # some servers omit empty content
            # vLLM and OpenRouter send "reasoning"; others send "reasoning_content".
            reasoning = _text(message.get("reasoning") or message.get("reasoning_content"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise APIError(f"{self.url}: the reply has no message or no usage", 200) from error
        cost = self.price.cost(*tokens)
        return ChatReply(text, choice.get("finish_reason"), *tokens, cost, reasoning)

    def models(self) -> list[dict[str, Any]]:
        """List the server's models, without retries; this checks that the server answers.

        Raises:
            UsageError: the server does not answer, or it lists no models.
        """
        models = self._send("GET", "models", Usage()).get("data")
        if not models:
            raise UsageError(f"{self.url} lists no models; is it an OpenAI-compatible server?")
        return models

    def served_weights(self, model: str) -> dict[str, Any]:
        """Return the hashes of the base model, the adapter and the lessons that a server uses.

        Only this project's server publishes them, so for other servers the result is empty. The
        requests are free.

        Args:
            model: the name of the served model.
        """
        root = self.url.removesuffix("/v1")
        try:
            ours = [card for card in self.models() if card.get("owned_by") == "rlm"]
            info = self._send("GET", f"{root}/phase1/info", Usage()) if ours else {}
        except UsageError:  # the server does not answer, or it does not list its models
            return {}
        about = info.get("model") or {}
        found = {"base": about.get("base_hash"), "lessons": info.get("experiences_id")}
        found["adapter"] = info.get("about", {}).get(model, {}).get("sha256")
        return {name: value for name, value in found.items() if value}

    def post(
        self, path: str, body: dict[str, Any], max_cost: float = 0.0, tokens: int = 0
    ) -> dict[str, Any]:
        """Post a JSON object and return the JSON object of the response ({} for plain text).

        Status 429, status 5xx and broken connections are retried. The wait before a retry is the
        server's Retry-After plus a pause with jitter, which doubles with each attempt. Other errors
        are not retried.

        Args:
            max_cost: the maximum cost of the request, reserved in the budget.
            tokens: an estimate of the request's tokens, for the rate limit.
        """
        for attempt in range(1, self._attempts + 1):
            try:
                return self._send("POST", path, Usage(max_cost, tokens), body)
            except APIError as error:
                if error.is_final:
                    raise
                if attempt == self._attempts:
                    raise APIError(f"{error} (attempts: {attempt})", error.status) from error
                if error.retry_after > MAX_RETRY_AFTER:
                    wish = f"the server requests a pause of {error.retry_after:.0f} s"
                    raise APIError(f"{error} ({wish})", error.status) from error
                pause = self._backoff * 2 ** (attempt - 1) * self._jitter.uniform(0.5, 1)
                wait = error.retry_after + min(MAX_RETRY_AFTER, pause)
            with self._count:
                self.retries += 1
            time.sleep(wait)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _send(
        self, method: str, path: str, usage: Usage, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send a request once.

        A request costs nothing if the server rejects it or cannot be reached. A request without a
        reply is counted at its maximum cost.
        """
        # The rate limit comes last: a request that waits after it would be sent in a later minute.
        with self._slots, self.budget.reserve(usage):
            self._rate_limit.wait(usage)
            try:
                response = self._client.request(method, path, json=body)
            except httpx2.RequestError as error:
                what = str(error) or type(error).__name__  # timeouts have no message
                if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
                    usage.cost = 0.0
                    raise APIError(f"no server answers at {self.url}: {what}") from error
                raise APIError(f"{self.url}/{path}: no reply: {what}") from error
            if not response.is_success:
                usage.cost = 0.0
                raise self._status_error(response)
            if "json" not in response.headers.get("content-type", ""):
                return {}
            try:
                answer = dict(response.json())
                if "choices" not in answer and isinstance(fault := answer.get("error"), dict):
                    # Some gateways answer with status 200, and with the status in the error.
                    usage.cost, code = 0.0, fault.get("code")
                    status = code if isinstance(code, int) else 200
                    raise self._refusal(f"{response.url}", self._message(answer), status)
                if "usage" in answer:
                    counts = _token_counts(answer)
                    usage.cost, usage.tokens = self.price.cost(*counts), sum(counts)
            except (ValueError, TypeError, KeyError) as error:
                raise APIError(f"{response.url}: invalid reply", 200) from error
            return answer

    def _status_error(self, response: httpx2.Response) -> UsageError:
        """Return the exception for a response whose status is not 2xx."""
        try:
            said = response.json()
        except ValueError:  # for example a proxy's page
            said = response.text
        status = response.status_code
        where = f"{response.url}: {status} {response.reason_phrase}"
        wait = _retry_after(response.headers.get("retry-after", "0"))
        return self._refusal(where, self._message(said), status, wait)

    def _refusal(self, url: str, message: str, status: int, wait: float = 0.0) -> UsageError:
        """Return the exception for an error; only an `APIError` may be retried."""
        text = f"{url}: {message}"
        if status in (401, 403):
            where = f"; it is read from {self._key_source}" if self._key_source else ""
            return UsageError(f"{text} (wrong or missing API key{where})")
        if status == 404:  # for a missing model the message names the model
            hint = " (the URL usually ends in /v1)" if message.lower() == "not found" else ""
            return UsageError(text + hint)
        return APIError(text, status, wait)

    def _message(self, said: Any) -> str:
        """Return the message in the body of an error, as one line without the key."""
        for key in ("error", "message", "detail"):  # the keys of OpenAI and of FastAPI
            said = said[key] if isinstance(said, dict) and key in said else said
        message = " ".join(str(said).split())
        if self._key:  # some servers repeat the key; mask it before the text is truncated
            message = message.replace(self._key, "***")
        return message[:300]


def _checked_key(variable: str | None, given: str, source: str) -> str:
    key = (os.environ.get(variable, "") if variable else given).strip()
    if variable and not key:
        raise UsageError(f"API key not found: set the environment variable {variable}")
    if not (key.isascii() and key.isprintable()):  # the HTTP library's error would contain the key
        raise UsageError(f"{source or 'api_key'} is not a valid API key")
    return key


def _checked_url(url: str) -> str:
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise UsageError(f"{url!r} is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"{url!r} is not a URL like http://127.0.0.1:8000/v1")
    if parsed.userinfo:  # error messages contain the URL
        raise UsageError("put the key into an environment variable, not into the URL")
    return url.rstrip("/") + ("/v1" if parsed.path == "/" else "")


def _http_client(url: str, key: str, concurrency: int, timeout: float) -> httpx2.Client:
    return httpx2.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx2.Timeout(timeout, pool=None),
        # Servers close idle connections (commonly after 5 s). A request on a connection that is
        # being closed would look like a crash, so the client closes idle connections earlier.
        limits=httpx2.Limits(max_connections=concurrency, keepalive_expiry=2.0),
        # A company proxy does not reach servers on this machine.
        trust_env=httpx2.URL(url).host not in ("127.0.0.1", "localhost", "::1"),
        verify=httpx2.URL(url).scheme == "https",  # loading certificates takes a tenth of a second
        follow_redirects=False,  # a redirect could send the key to another server
    )


def _token_counts(reply: dict[str, Any]) -> tuple[int, int]:
    counts = reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]
    if not all(isinstance(count, int) for count in counts):
        raise TypeError("token counts must be integers")
    return counts


def _text(content: Any) -> str:
    """Return a message's text from None, a string, or a list of parts."""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    # A lone surrogate (half of an emoji) cannot be encoded, so it is replaced.
    return (content or "").encode(errors="replace").decode()


def _retry_after(value: str) -> float:
    """Return the seconds given by a Retry-After header (a number or a date); 0 if it is invalid."""
    try:
        return max(0.0, float(value))
    except ValueError:
        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        except ValueError:
            return 0.0
