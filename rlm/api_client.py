"""The one client of OpenAI-compatible servers: any LLM API for recipes, vLLM for rollouts.

Bounded concurrency, timeouts, retries, tokens and cost counted. Loads no torch.
"""

from __future__ import annotations

import json
import math
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from rlm.cli.options import UsageError
from rlm.rate_limit import Pace

MAX_PAUSE = 60.0  # seconds before a further try; who asks for more is told to the user instead
# Tokens that a server may put around a conversation (its default system prompt, roles).
TEMPLATE_TOKENS = 64


class APIError(UsageError):
    """A request was refused, or failed every time: one line in a script, for a recipe to record.

    status: of HTTP, None where no answer came.
    """

    def __init__(self, message: str, status: int | None = None, pause: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.pause = pause  # seconds that the server asks to wait before the next try


class BudgetExceeded(UsageError):
    """The next call could cost more than what is left; it was not sent."""


@dataclass(frozen=True)
class Price:
    """What an API takes for a million tokens read and a million tokens written."""

    prompt: float = 0.0
    completion: float = 0.0

    def of(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


FREE = Price()


@dataclass
class _Charge:
    cost: float
    tokens: tuple[int, int] = (0, 0)  # read, written


class Spending:
    """Tokens and cost of all requests so far, in the currency of the prices; threads share it."""

    def __init__(self, max_cost: float | None = None) -> None:
        self.max_cost = math.inf if max_cost is None else max_cost
        self.cost, self.prompt_tokens, self.completion_tokens = 0.0, 0, 0
        self._reserved: list[float] = []  # of the requests in flight
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, most: float) -> Iterator[_Charge]:
        """Keep `most` aside during a request; the charge is then set to what it really cost.

        So requests in flight can not pass max_cost together. One that does not fit beside them
        waits, as most end cheaper than they might have.

        Raises:
            BudgetExceeded: it does not fit even alone.
        """
        charge = _Charge(most)  # also where no answer tells: the provider may have charged it
        with self._changed:
            self._changed.wait_for(lambda: self._fits(most) or not self._reserved)
            if not self._fits(most):
                raise BudgetExceeded(
                    f"stopped at a cost of {self.cost:.4g}: the next call could cost {most:.2g}, "
                    f"and the budget is {self.max_cost:g}"
                )
            self._reserved.append(most)
        try:
            yield charge
        finally:
            with self._changed:
                self._changed.notify_all()  # who waits goes on when this block ends, however
                self._reserved.remove(most)
                self.cost += charge.cost
                self.prompt_tokens += charge.tokens[0]
                self.completion_tokens += charge.tokens[1]

    def _fits(self, most: float) -> bool:
        return self.cost + math.fsum(self._reserved) + most <= self.max_cost


@dataclass(frozen=True)
class ChatReply:
    """text is empty where the server sent none (a reasoning model cut off while it thinks)."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cost: float
    reasoning: str = ""  # where the server sends it apart (`reasoning_content`)


class APIClient:
    """Sends requests to one server; any number of threads may share it."""

    def __init__(
        self,
        url: str,
        *,
        api_key_env: str | None = None,
        api_key: str = "",
        price: Price = FREE,
        spending: Spending | None = None,
        concurrency: int = 16,
        timeout: float = 600.0,
        attempts: int = 5,
        backoff: float = 0.5,
        pace: Pace | None = None,
    ) -> None:
        """Sends nothing yet.

        Args:
            url: as in http://127.0.0.1:8000/v1; /v1 is added where there is no path.
            api_key_env: the environment variable that holds the key.
            api_key: the key itself, from a file, say. With neither, no key is sent.
            spending: one for all clients that share a budget.
            concurrency: requests in flight at the same time; more wait for their turn.
            timeout: seconds without a byte from the server.
            attempts: tries of a request, the first included.
            backoff: seconds before the second try; it doubles with each further one.
            pace: requests and tokens a minute; every try counts. None is no limit.

        Raises:
            UsageError: that is no URL, or the variable is not set.
        """
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise UsageError(f"{url!r} is not a URL: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise UsageError(f"{url!r} is not a URL like http://127.0.0.1:8000/v1")
        if parsed.userinfo:  # it would stand in every message
            raise UsageError("put the key into an environment variable, not into the URL")
        self._key = (os.environ.get(api_key_env, "") if api_key_env else api_key).strip()
        if api_key_env and not self._key:
            raise UsageError(f"API key not found: set the environment variable {api_key_env}")
        if not (self._key.isascii() and self._key.isprintable()):
            # Left to the HTTP library, its error would quote the key.
            where = f"the environment variable {api_key_env}" if api_key_env else "what is given"
            raise UsageError(f"{where} holds no API key")
        self.url = url.rstrip("/") + ("/v1" if parsed.path == "/" else "")
        self.price = price
        self.spending = spending or Spending()
        self.concurrency = concurrency
        self.retries = 0  # tries after the first of a request
        self._count = threading.Lock()
        self._pace = pace or Pace()
        self._attempts, self._backoff = attempts, backoff
        self._jitter = random.Random()  # its own: the run's random numbers stay reproducible
        self._http = httpx2.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx2.Timeout(timeout, pool=None),
            verify=parsed.scheme == "https",  # loading certificates takes a tenth of a second
            # Servers close idle connections (commonly after 5 s). A request that meets one just
            # being closed would look like a crash, so the client drops them first.
            limits=httpx2.Limits(max_connections=concurrency, keepalive_expiry=2.0),
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str,
        temperature: float,
        max_tokens: int,
        **options: Any,
    ) -> ChatReply:
        """One reply to a conversation.

        Args:
            options: sent as they are (top_p, seed, stop, response_format, …).

        Raises:
            APIError: the request was refused, failed every time, or the reply is none.
            BudgetExceeded: it was not sent.
            UsageError: no such server or model, or a key that it does not take.
        """
        body = {"model": model, "messages": list(messages), "temperature": temperature}
        body |= {"max_tokens": max_tokens, **options}
        # A token is at least one byte of text: a bound that needs no tokenizer.
        size = len(json.dumps(body, ensure_ascii=False).encode()) + TEMPLATE_TOKENS
        most, about = self.price.of(size, max_tokens), size // 4 + max_tokens
        reply = self.post("chat/completions", body, most=most, tokens=about)
        try:
            choice, tokens = reply["choices"][0], _usage(reply)
            text = _text(choice["message"]["content"])
            reasoning = _text(choice["message"].get("reasoning_content"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise APIError(f"{self.url}: a reply without message or usage", 200) from error
        cost = self.price.of(*tokens)
        return ChatReply(text, choice.get("finish_reason"), *tokens, cost, reasoning)

    def models(self) -> list[dict[str, Any]]:
        """What the server offers. One try only: this finds out whether it is there.

        Raises:
            UsageError: it is not.
        """
        models = self._once("GET", "models", None, 0.0, 0).get("data")
        if not models:
            raise UsageError(f"{self.url} offers no model; is that an OpenAI-compatible server?")
        return models

    def post(
        self, path: str, body: dict[str, Any], *, most: float = 0.0, tokens: int = 0
    ) -> dict[str, Any]:
        """The JSON object that the server answers ({} where it answers in plain text).

        429, 5xx and broken connections are tried again, after a pause that doubles, with jitter,
        and that is not shorter than the server asks for. Other refusals are final.

        Args:
            most: what the request may cost at most, kept aside while it runs.
            tokens: about as many as it takes, for the pace.
        """
        for attempt in range(1, self._attempts + 1):
            try:
                return self._once("POST", path, body, most, tokens)
            except APIError as error:
                if error.status is not None and error.status != 429 and error.status < 500:
                    raise
                if attempt == self._attempts:
                    raise APIError(f"{error} (tries: {attempt})", error.status) from error
                if error.pause > MAX_PAUSE:
                    wish = f"it asks for a pause of {error.pause:.0f} s"
                    raise APIError(f"{error} ({wish})", error.status) from error
                jitter = self._jitter.uniform(0.5, 1)
                wait = error.pause + min(MAX_PAUSE, self._backoff * 2 ** (attempt - 1) * jitter)
            with self._count:
                self.retries += 1
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def _once(
        self, method: str, path: str, body: dict[str, Any] | None, most: float, tokens: int
    ) -> dict[str, Any]:
        turn = self._pace.wait(tokens)
        with self.spending.reserve(most) as charge:
            try:
                response = self._http.request(method, f"{self.url}/{path}", json=body)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                charge.cost = 0.0
                raise APIError(f"no server answers at {self.url}: {error}") from error
            except httpx2.RequestError as error:
                what = str(error) or type(error).__name__  # time-outs come without a text
                raise APIError(f"{self.url}/{path}: no reply: {what}") from error
            if not response.is_success:
                charge.cost = 0.0
                raise self._refusal(response)
            if "json" not in response.headers.get("content-type", ""):
                return {}
            try:
                answer = dict(response.json())
                if "usage" in answer:
                    charge.tokens = _usage(answer)
                    charge.cost = self.price.of(*charge.tokens)
                    turn.tokens = sum(charge.tokens)
            except (ValueError, TypeError, KeyError) as error:
                raise APIError(f"{response.url}: the reply makes no sense", 200) from error
            return answer

    def _refusal(self, response: httpx2.Response) -> UsageError:
        """The exception for an answer that is not 2xx."""
        status, message = response.status_code, _message(response)
        if self._key:  # some servers quote it; before the text is cut, or a part of it would stay
            message = message.replace(self._key, "***")
        text = f"{response.url}: {status} {response.reason_phrase}: {message[:300]}"
        if status in (401, 403):
            return UsageError(f"{text} (wrong or missing API key)")
        if status == 404:  # a model that is not there is named; a path that is not there is not
            hint = " (the URL usually ends in /v1)" if message.lower() == "not found" else ""
            return UsageError(text + hint)
        return APIError(text, status, _pause(response))


def _usage(reply: dict[str, Any]) -> tuple[int, int]:
    counts = reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]
    if not all(isinstance(count, int) for count in counts):
        raise TypeError("a number of tokens that is none")
    return counts


def _text(content: Any) -> str:
    """What a message holds: nothing, a text, or a list of parts of which some are text."""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    # A lone surrogate (a server that cut an emoji) could be neither stored nor sent on.
    return (content or "").encode(errors="replace").decode()


def _message(response: httpx2.Response) -> str:
    """What the server says, on one line: OpenAI's and FastAPI's form, else the text."""
    try:
        said = response.json()
    except ValueError:
        said = response.text
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    return " ".join(str(said).split())


def _pause(response: httpx2.Response) -> float:
    """Seconds of a Retry-After header: a number, or a date. 0 without one."""
    value = response.headers.get("retry-after", "0")
    try:
        return max(0.0, float(value))
    except ValueError:
        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        except ValueError:
            return 0.0  # neither: nothing was asked for that one could follow
