"""The client of OpenAI-compatible servers, tested with a scripted server."""

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from types import SimpleNamespace

import pytest
from scripted_server import (
    BASE,
    END,
    GARBAGE,
    HANG_UP,
    Reply,
    ScriptedServer,
    chat_reply,
    refuse,
)

from rlm.api_client import (
    APIClient,
    APIError,
    Budget,
    BudgetExceeded,
    Price,
    RateLimit,
    Usage,
)
from rlm.cli.options import UsageError
from rlm.sampling import VLLMSampler

ASK = {"model": "m", "temperature": 0.3, "max_tokens": 20}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def server():
    with ScriptedServer() as server:
        yield server


def client_of(server: ScriptedServer, **options) -> APIClient:
    return APIClient(server.url, **({"backoff": 0.001} | options))


@pytest.fixture
def nobody():
    """Yield a URL that nothing answers; the port is bound, so no other program listens on it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/v1"


# --- chat -----------------------------------------------------------------------------------


def test_chat_sends_what_it_is_given_and_returns_text_tokens_and_cost(server):
    server.script(chat_reply("four", read=1000, written=200, finish="length"))
    client = client_of(server, price=Price(prompt=2.0, completion=10.0))
    reply = client.chat(HELLO, **ASK, seed=7, top_p=0.9)
    # 1000 × 2 / 10⁶ + 200 × 10 / 10⁶
    assert (reply.text, reply.finish_reason, reply.cost) == ("four", "length", 0.004)
    assert (reply.prompt_tokens, reply.completion_tokens) == (1000, 200)
    assert server.asked("chat/completions") == [
        {"messages": HELLO, "model": "m", "temperature": 0.3, "max_tokens": 20}
        | {"seed": 7, "top_p": 0.9}
    ]
    client.chat(HELLO, **ASK)  # the default reply has 10 prompt tokens and 5 completion tokens
    assert client.budget.cost == pytest.approx(0.004 + 0.00007)


@pytest.mark.parametrize(
    "failure",
    [
        *(refuse(429), refuse(500), refuse(503), Reply("<html>bad gateway", 502), HANG_UP),
        Reply({"error": {"message": "quota", "code": 429}}),  # an error of OpenRouter
    ],
    ids=["429", "500", "503", "502 in HTML", "hang up", "429 in 200"],
)
def test_passing_failures_are_tried_again(server, failure):
    server.script(failure, failure, chat_reply("yes"))
    client = client_of(server)
    assert client.chat(HELLO, **ASK).text == "yes"
    assert len(server.requests) == 3
    client.chat(HELLO, **ASK)
    assert client.retries == 2


@pytest.mark.parametrize(
    ("failure", "kind", "says"),
    [
        (refuse(400, "prompt too long"), APIError, "400 Bad Request: prompt too long"),
        (Reply({"detail": "n is wrong"}, 422), APIError, "422 .*: n is wrong$"),
        (Reply("", 307, {"Location": "http://127.0.0.1/"}), APIError, "307"),
        (refuse(401), UsageError, "wrong or missing API key"),
        (refuse(404, "The model `m` does not exist."), UsageError, r"`m` does not exist\.$"),
        (GARBAGE, APIError, "invalid reply"),
        (Reply([1]), APIError, "invalid reply"),
        (Reply({"error": {"message": "no credit"}}), APIError, "completions: no credit$"),
        (Reply({"choices": []}), APIError, "has no message or no usage"),
        (Reply({"choices": [{"message": {}}], "usage": {}}), APIError, "invalid reply"),
        (Reply("<html>", content_type="text/html"), APIError, "has no message or no usage"),
        (chat_reply("4", written=None), APIError, "invalid reply"),
        (chat_reply([{"type": "text"}]), APIError, "has no message or no usage"),
        (chat_reply(7), APIError, "has no message or no usage"),
    ],
)
def test_other_failures_are_final_and_one_line(server, failure, kind, says):
    server.script(failure, chat_reply("not asked for"))
    with pytest.raises(UsageError, match=says) as caught:
        client_of(server).chat(HELLO, **ASK)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert len(server.requests) == 1


def test_texts_in_parts_none_and_reasoning_that_comes_apart(server):
    parts = [{"type": "thinking", "thinking": "…"}, {"type": "text", "text": "4"}]
    apart = chat_reply(None, finish="length")
    apart.body["choices"][0]["message"]["reasoning_content"] = "2 and 2"
    renamed = chat_reply("4")
    renamed.body["choices"][0]["message"]["reasoning"] = "2 and 2"  # as in vLLM and OpenRouter
    left_out = chat_reply(None, finish="length")
    del left_out.body["choices"][0]["message"]["content"]  # as in Gemini's server
    in_parts = chat_reply([*parts, {"type": "text", "text": "2 \ud83d"}])
    server.script(in_parts, apart, renamed, left_out)
    client = client_of(server)
    first, second, third, fourth = (client.chat(HELLO, **ASK) for _ in range(4))
    assert (fourth.text, fourth.finish_reason) == ("", "length")
    assert (third.text, third.reasoning) == ("4", "2 and 2")
    assert (first.text, first.reasoning) == ("42 ?", "")
    assert (second.text, second.reasoning) == ("", "2 and 2")


def test_served_weights_are_those_of_the_named_adapter(server, monkeypatch):
    about = {name: {"sha256": name * 8} for name in ("a", "b")} | {"base": {"sha256": None}}
    info = {"model": {"adapter": "a", "base_hash": "h"}, "about": about, "experiences_id": None}
    pages = {"models": {"data": [{"id": "a", "owned_by": "rlm"}]}}
    monkeypatch.setattr(APIClient, "_send", lambda self, way, path, usage: pages.get(path, info))
    client = client_of(server)
    assert client.served_weights("b") == {"base": "h", "adapter": "b" * 8}
    assert client.served_weights("base") == {"base": "h"}
    info["experiences_id"] = "3 lessons"
    assert client.served_weights("a") == {"base": "h", "adapter": "a" * 8, "lessons": "3 lessons"}


def test_a_reply_without_a_count_keeps_nobody_waiting(server):
    """Other calls wait for the part of the budget that this call has reserved."""
    server.script(chat_reply("4", written=None, delay=0.2), *[chat_reply("4")] * 2)
    price = Price(completion=1e6)
    client = client_of(server, price=price, budget=Budget(12.0 + 2 * ASK["max_tokens"]))
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(client.chat, HELLO, **ASK) for _ in range(3)]
        errors = [call.exception(timeout=10) for call in calls]
    assert sum(isinstance(error, APIError) for error in errors) == 1


def test_a_slow_server_runs_into_the_time_out(server):
    server.answer = lambda body: "in time"
    server.script(chat_reply("too late", delay=5))
    client = client_of(server, timeout=0.1, attempts=20)
    assert client.chat(HELLO, **ASK).text == "in time"
    assert client.retries > 0


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """Replace sleeping, and return the list of the seconds that the client would have slept."""
    slept = []
    clock = SimpleNamespace(sleep=slept.append, time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr("rlm.api_client.time", clock)
    return slept


def test_pauses_double_with_jitter_and_the_last_error_says_how_many_tries(server, pauses):
    server.script(*[refuse(500, "out of\nmemory")] * 4)
    with pytest.raises(APIError, match=r"500 .*: out of memory \(attempts: 4\)") as caught:
        client_of(server, attempts=4, backoff=1.0).chat(HELLO, **ASK)
    assert (caught.value.status, len(server.requests)) == (500, 4)
    assert len(pauses) == 3  # no pause follows the last attempt
    assert all(2**i / 2 <= pause <= 2**i for i, pause in enumerate(pauses))
    assert len({pause / 2**i for i, pause in enumerate(pauses)}) == 3


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [
        (lambda: "1.5", 1.5, 1.6),
        (lambda: formatdate(time.time() + 30, usegmt=True), 20, 31),  # a date has whole seconds
        (lambda: formatdate(time.time() - 30, usegmt=True), 0, 0.1),
        (lambda: "soon", 0, 0.1),
        (lambda: "-3", 0, 0.1),
    ],
    ids=["seconds", "date", "past", "word", "negative"],
)
def test_retry_after_as_seconds_or_date(server, pauses, header, low, high):
    server.script(refuse(503, retry_after=header()), chat_reply("yes"))
    client_of(server).chat(HELLO, **ASK)
    assert low <= pauses[0] <= high


def test_a_pause_of_an_hour_is_told_and_not_waited_for(server):
    server.script(refuse(429, "quota", retry_after="3600"))
    with pytest.raises(APIError, match=r"quota \(the server requests a pause of 3600 s\)"):
        client_of(server).chat(HELLO, **ASK)


def test_no_more_requests_in_flight_than_allowed(server):
    server.delay = 0.05
    client = client_of(server, concurrency=3)
    with ThreadPoolExecutor(9) as pool:
        replies = list(pool.map(lambda _: client.chat(HELLO, **ASK).text, range(9)))
    assert replies == ["ok"] * 9
    assert server.most_in_flight == 3


def test_requests_a_minute(server):
    limit, sent = RateLimit(requests=2, window=0.3), []
    wait = limit.wait
    limit.wait = lambda usage: sent.append(usage) or wait(usage)
    client = client_of(server, rate_limit=limit)
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda _: client.chat(HELLO, **ASK), range(5)))
    at = sorted(usage.started for usage in sent)
    assert len(at) == len(server.requests) == 5
    assert all(later - earlier > 0.299 for earlier, later in zip(at, at[2:], strict=False))


def test_requests_that_wait_for_a_connection_are_not_sent_at_once_later(server):
    sent = []
    server.script(chat_reply("slow", delay=0.25))
    server.answer = lambda body: sent.append(time.monotonic()) or "ok"
    limit = RateLimit(requests=2, window=0.3)
    client = client_of(server, rate_limit=limit, concurrency=1)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: client.chat(HELLO, **ASK), range(4)))
    assert sent[2] - sent[0] > 0.25  # they are the second and the fourth request


def test_tokens_a_minute_count_what_was_really_taken():
    clock = [100.0]
    limit = RateLimit(tokens=100)
    with pytest.MonkeyPatch.context() as patch:
        sleep = lambda seconds: clock.__setitem__(0, clock[0] + seconds)  # noqa: E731
        patch.setattr(
            "rlm.api_client.time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
        )
        first = Usage(tokens=90)
        limit.wait(first)
        first.tokens = 20  # fewer tokens than were reserved
        limit.wait(Usage(tokens=80))
        assert clock[0] == 100
        limit.wait(Usage(tokens=10))  # a full minute after the first
        assert clock[0] == 160
        limit.wait(Usage(tokens=1000))  # more than a minute allows, so it runs alone
        assert clock[0] == 220


# --- budget ---------------------------------------------------------------------------------


def test_the_budget_stops_before_it_is_passed(server):
    # At most 20 completion tokens cost 1 each; prompt tokens are free.
    price = Price(completion=1e6)
    client = client_of(server, price=price, budget=Budget(max_cost=44))
    server.script(*[chat_reply("x", written=12) for _ in range(9)])
    client.chat(HELLO, **ASK)  # the total cost is 12 of 44
    client.chat(HELLO, **ASK)  # the total cost is 24
    with pytest.raises(BudgetExceeded, match="cost of 24: the next call could cost 21"):
        client.chat(HELLO, **(ASK | {"max_tokens": 21}))
    client.chat(HELLO, **ASK)  # 24 plus at most 20 fits exactly; the total cost is then 36
    with pytest.raises(BudgetExceeded):
        client.chat(HELLO, **ASK)
    assert client.budget.cost == 36
    assert len(server.requests) == 3


def test_what_is_read_is_bounded_by_bytes(server):
    # "é" has two bytes, and the request is longer, so it may have more than 2,000 tokens.
    client = client_of(server, price=Price(prompt=1e6), budget=Budget(max_cost=2000))
    with pytest.raises(BudgetExceeded):
        client.chat([{"role": "user", "content": "é" * 1000}], **ASK)
    client.chat([{"role": "user", "content": "e" * 1000}], **ASK)
    assert client.budget.cost == 10


def test_concurrent_calls_can_not_pass_the_budget_together(server):
    # Each call may cost 20, but costs 5. After eight calls the cost is 40, and 20 more exceed 58.
    server.delay = 0.02
    client = client_of(server, price=Price(completion=1e6), budget=Budget(max_cost=58))

    def call(_: int) -> bool:
        try:
            client.chat(HELLO, **ASK)
        except BudgetExceeded:
            return False
        return True

    with ThreadPoolExecutor(12) as pool:
        assert sum(pool.map(call, range(12))) == 8
    assert client.budget.cost == 40
    assert server.most_in_flight == 2  # 20 + 20 + 20 > 58


def test_clients_can_share_a_budget(server):
    total = Budget(max_cost=30)
    for model, price in (("a", 1e6), ("b", 2e6)):
        client = client_of(server, price=Price(completion=price), budget=total)
        client.chat(HELLO, model=model, temperature=0, max_tokens=5)
    assert total.cost == 5 + 10


def test_what_failures_cost(server, nobody):
    def cost_after(*replies: Reply) -> float:
        client = client_of(server, price=Price(completion=1e6))
        server.script(*replies)
        client.chat(HELLO, **ASK)
        return client.budget.cost

    assert cost_after(chat_reply("x")) == 5
    assert cost_after(refuse(500), chat_reply("x")) == 5  # an error costs nothing
    assert cost_after(HANG_UP, chat_reply("x")) == 25  # the lost reply may have cost up to 20
    client = APIClient(nobody, price=Price(completion=1e6), attempts=2, backoff=0)
    with pytest.raises(APIError):
        client.chat(HELLO, **ASK)
    assert client.budget.cost == 0  # no server was reached


# --- keys and addresses ---------------------------------------------------------------------


def test_the_key_comes_from_the_environment_and_is_never_shown(server, monkeypatch, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("SOME_KEY", "sk-secret\n")
    client = client_of(server, api_key_env="SOME_KEY")
    client.chat(HELLO, **ASK)
    assert server.requests[0].headers["authorization"] == "Bearer sk-secret"
    server.script(refuse(401, "Incorrect API key provided: sk-secret."))
    with pytest.raises(UsageError, match=r"provided: \*\*\*\.") as caught:
        client.chat(HELLO, **ASK)
    assert "sk-secret" not in repr(client) + str(caught.value) + caplog.text
    server.script(refuse(401, "x" * 290 + " sk-secret."))  # the message is truncated in the key
    with pytest.raises(UsageError) as caught:
        client.chat(HELLO, **ASK)
    assert "sk-" not in str(caught.value) + caplog.text
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):  # for another server
        monkeypatch.setenv(name, "sk-secret")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Key: sk-secret")
    client_of(server).models()
    assert "authorization" not in server.requests[-1].headers
    assert "sk-secret" not in str(server.requests[-1].headers)


@pytest.mark.parametrize(
    ("value", "says"),
    [(None, "not found: set .* SOME_KEY"), (" ", "not found"), ("a\nb", "not a valid API key")],
)
def test_a_missing_or_broken_key_is_named(monkeypatch, value, says):
    if value is not None:
        monkeypatch.setenv("SOME_KEY", value)
    with pytest.raises(UsageError, match=says):
        APIClient("http://127.0.0.1:1/v1", api_key_env="SOME_KEY")


def test_a_key_may_be_given(server):
    client_of(server, api_key=" sk-own ").chat(HELLO, **ASK)
    assert server.requests[0].headers["authorization"] == "Bearer sk-own"
    with pytest.raises(UsageError, match="api_key is not a valid API key"):
        client_of(server, api_key="a\nb")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        *((url, "is not a URL") for url in ("", "127.0.0.1:8000", "localhost:8000/v1")),
        *((url, "is not a URL") for url in ("ftp://a/v1", "http://", "http://a:1e9")),
        ("http://me:sk-secret@127.0.0.1/v1", "environment variable"),
    ],
)
def test_what_is_no_url_and_a_key_in_one_that_is_not_repeated(url, says):
    with pytest.raises(UsageError, match=says) as caught:
        APIClient(url)
    assert "sk-secret" not in str(caught.value)


def test_v1_is_added_where_there_is_no_path(server):
    for url in (server.url.removesuffix("/v1"), server.url.removesuffix("v1"), server.url + "/"):
        client = APIClient(url)
        assert client.url == server.url
        assert client.models()[0]["id"] == BASE
    with pytest.raises(UsageError, match=r"404 .* \(the URL usually ends in /v1\)"):
        APIClient(server.url.removesuffix("v1") + "api").models()


def test_a_proxy_is_not_asked_for_servers_of_this_machine(server, nobody, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, nobody)
    assert APIClient(server.url).models()
    assert not APIClient("http://[::1]:9")._client.trust_env


def test_no_server(nobody, pauses):
    client = APIClient(nobody)
    with pytest.raises(UsageError, match="no server answers at http://127"):
        VLLMSampler([client], [END])
    assert (pauses, client.retries) == ([], 0)  # there was only one attempt


def test_importing_the_client_does_not_load_torch():
    code = "import rlm.api_client, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
