"""The commands of the course, unchanged, and the replies of the server."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest
from live_server import ADD, LIMITS, events, live, make_service
from secured_server import SecuredServer, request, small_app
from starlette.datastructures import Headers

from rlm.cli.options import UsageError
from rlm.serving.access import AllowedHosts, Keys, SlidingWindow, client_address, read_origins
from rlm.serving.engine import Limits
from rlm.serving.middleware import MAX_CLIENTS, SecurityMiddleware, SecuritySettings, add_cors
from rlm.tools import Calculator

SCRIPT = {
    "two and three": ADD,
    "long": "<think>\n" + "word " * 60 + "\n</think>\n<answer>9</answer>",
}
FORM = "Content-Type: application/x-www-form-urlencoded"
JSON = "Content-Type: application/json"


@pytest.fixture(scope="module")
def server(tokenizer):
    service, _ = make_service(tokenizer, SCRIPT)
    with live(service, allowed_origins=["https://my.app"]) as running:
        yield running


def test_a_slash_at_the_end_is_no_redirect(server):
    with server.client() as client:
        for path in ("/health/", "/ready/", "/phase1/info/", "/v1/models/"):
            assert client.get(path).status_code == 200
            assert client.get(path).json().keys() == client.get(path[:-1]).json().keys()
        chat = {"model": "tuned", "messages": [{"role": "user", "content": "two and three"}]}
        assert client.post("/v1/chat/completions/", json=chat).status_code == 200
        for path in ("/phase1/reasoning//", "/phase1//reasoning/"):
            assert client.post(path, json={"prompt": "x"}).status_code == 404


# A browser may send a form to any server without a preflight request, with the header Origin.
PAGES = [
    ([], 200),
    (["Origin: http://localhost"], 200),  # the server's own page
    (["Origin: https://localhost"], 200),  # the same, behind a proxy that speaks TLS
    (["Origin: https://my.app"], 200),
    (["Origin: https://my.app", "Sec-Fetch-Site: cross-site"], 200),
    (["Sec-Fetch-Site: same-origin"], 200),
    (["Sec-Fetch-Site: none"], 200),
    (["Origin: http://evil.example"], 415),
    (["Origin: http://localhost.evil.example"], 415),
    (["Origin: http://localhost:3000"], 415),
    (["Origin: null"], 415),
    (["Sec-Fetch-Site: cross-site"], 415),
    (["Sec-Fetch-Site: same-site"], 415),
]


@pytest.fixture(scope="module")
def wall():
    with SecuredServer(keys=Keys([]), allowed_origins=["https://my.app"]) as wall:
        yield wall


@pytest.mark.parametrize(("headers", "status"), PAGES, ids=range(len(PAGES)))
def test_a_page_of_a_stranger_can_not_use_an_open_server(wall, headers, status):
    post = partial(wall.ask, "POST", "/phase1/reasoning", body=b'{"prompt": "x"}')
    for kind in ([FORM], [FORM.upper()], [f"{FORM}; charset=UTF-8"], [FORM, FORM]):
        answer = post(*kind, *headers)
        assert answer.status == (status if len(kind) == 1 else 415)
        assert answer.status == 200 or answer.json["code"] == "unsupported_media_type"
    assert post(JSON, *headers).status == 200  # a browser would have sent a preflight request


def test_a_form_or_broken_json_stays_refused(server):
    with server.client() as client:
        post = partial(client.post, "/phase1/reasoning", headers=dict([FORM.split(": ")]))
        for body, status in ((b"prompt=x", 415), (b"", 422), (b"[]", 415), (b'{"prompt"', 400)):
            assert post(content=body).status_code == status
        assert post(content=b'{"n": 2}').status_code == 422
        assert client.post("/phase1/reasoning").json()["detail"] == "the body is missing"


def test_named_origins_may_use_the_server_from_a_browser():
    origins = read_origins(["https://My.app/", "http://localhost:3000"])
    assert origins == ["https://my.app", "http://localhost:3000"]
    asks = ["Access-Control-Request-Method: POST"]
    # The official JavaScript client adds a dozen headers of its own.
    asks += ["Access-Control-Request-Headers: content-type,authorization,x-stainless-os,x-title"]
    settings = SecuritySettings(Keys(["a-key-of-some-length"]), AllowedHosts(["localhost"]))
    inner = SecurityMiddleware(small_app(), settings)
    sent: list[dict] = []

    def ask(method: str, origin: str, *headers: tuple[str, str]) -> dict[str, str]:
        lines = [("host", "localhost"), ("origin", origin), *headers]
        scope = {
            "type": "http", "method": method, "path": "/phase1/reasoning", "query_string": b"",
            "headers": [(n.lower().encode(), v.encode()) for n, v in lines], "client": None,
        }  # fmt: skip

        async def send(message: dict) -> None:
            sent.append(message)

        asyncio.run(add_cors(inner, origins)(scope, None, send))
        start = next(m for m in reversed(sent) if m["type"] == "http.response.start")
        return {n.decode(): v.decode() for n, v in start["headers"]} | {"status": start["status"]}

    preflight = [tuple(line.split(": ")) for line in asks]
    allowed = ask("OPTIONS", "https://my.app", *preflight)
    assert (allowed["status"], allowed["access-control-allow-origin"]) == (200, "https://my.app")
    assert "access-control-allow-credentials" not in allowed
    refused = ask("OPTIONS", "http://evil.example", *preflight)
    assert refused["status"] == 400
    assert "access-control-allow-origin" not in refused
    denied = ask("POST", "https://my.app")  # the page can read the reason
    assert (denied["status"], denied["access-control-allow-origin"]) == (401, "https://my.app")
    assert "access-control-allow-origin" not in ask("POST", "http://evil.example")


@pytest.mark.parametrize(
    "origin", ["*", "my.app", "null", "https://my.app/path", "https://*.app", ""]
)
def test_an_origin_that_opens_too_much_or_never_comes_is_refused(origin):
    with pytest.raises(UsageError, match=r"--allow-origin .*https://my\.app"):
        read_origins([origin])


# --- the reply ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "text", "right"),
    [
        *((5, "5", True), (5.0, "5.0", True), ("5", "5", True), (24.5, "24.5", False)),
        *((-3, "-3", False), (0, "0", False), (1e15, "1000000000000000.0", False)),
        (1e-7, "0.0000001", False),
    ],
)
def test_the_right_answer_may_be_a_number(server, expected, text, right):
    body = server.post({"prompt": "two and three", "expected_answer": expected}).json()
    assert (body["verifier"]["expected"], body["verifier"]["correct"]) == (text, right)
    reason = "correct" if right else "wrong"
    assert body["details"]["verifier"] == {
        "is_correct": right, "predicted": "5", "expected": text, "detail": reason,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        *((kind, "must be a string or a number") for kind in (True, [5], {})),
        *(("", "is empty"), ("5" * 201, "has more than 200 characters")),
        (1e16, "must be at most 1000000000000000.0"),
    ],
)
def test_what_is_no_answer_is_refused(server, expected, said):
    reply = server.post({"prompt": "two and three", "expected_answer": expected})
    assert (reply.status_code, reply.json()["code"]) == (422, "validation")
    assert reply.json()["detail"] == f"expected_answer: {said}"


def test_what_the_length_cuts_is_said(server):
    ask = partial(dict, prompt="long")
    roomy = server.post({"prompt": "two and three", "max_new_tokens": 300}).json()
    assert roomy["warnings"] == []
    cut = server.post(ask(max_new_tokens=100)).json()
    room = "as only an answer still fitted into max_new_tokens (100): send a larger one"
    assert cut["thinking"]["status"] == "forced"
    tokens = cut["thinking"]["tokens"]
    assert cut["warnings"][0] == f"the reasoning was cut after {tokens} tokens, {room}"
    nothing = server.post(ask(max_new_tokens=3)).json()
    assert nothing["warnings"] == ["the text was cut by max_new_tokens (3): send a larger one"]
    most = server.post(ask()).json()  # a higher value would be rejected
    assert most["warnings"][0].endswith("(300), the server's limit (--max-new-tokens)")
    several = server.post(ask(max_new_tokens=100, n=2)).json()
    assert "tokens in 2 of 2 answers, as only" in several["warnings"][0]
    # A budget that the user has set causes no warning.
    assert server.post(ask(thinking_budget=12, max_new_tokens=300)).json()["warnings"] == []


# --- a tool ---------------------------------------------------------------------------------------

MARKED = "<think>\n2 + 3 = <<2+3=5>>5\n</think>\n<answer>5</answer>"


def test_what_a_tool_wrote_is_marked_in_answer_and_stream(tokenizer):
    service, _ = make_service(tokenizer, {"sum": MARKED, "plain": ADD}, tool=Calculator())
    with live(service) as server:
        body = server.post({"prompt": "sum"}).json()
        start = MARKED.index("5>>")
        called = {"text": "5>>", "start": start, "end": start + 3}
        assert (body["response"], body["details"]["tool_calls"]) == (MARKED, [called])
        assert server.post({"prompt": "plain"}).json()["details"]["tool_calls"] == []
        assert (
            "tool_calls" not in server.post({"prompt": "sum", "adapter": "base"}).json()["details"]
        )
        stream = server.post({"prompt": "sum", "stream": True}).text
        deltas = [json.loads(data) for name, data in events(stream) if name == "reasoning"]
        assert "".join(delta["delta"] for delta in deltas) == "2 + 3 = <<2+3=5>>5"
        assert "".join(delta["delta"] for delta in deltas if delta.get("tool")) == "5>>"
        chat = {"model": "tuned", "messages": [{"role": "user", "content": "sum"}]}
        choice = server.post(chat, "/v1/chat/completions").json()["choices"][0]
        assert "<<2+3=5>>5" in choice["message"]["reasoning_content"]


# --- open to everybody ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("127.0.0.1", [], "127.0.0.1"),  # a page on this machine, a proxy, or a TCP tunnel
        ("::1", [], "0"),
        ("::ffff:10.0.0.7", [], "10.0.0.7"),
        ("127.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("127.0.0.1", ["1.2.3.4, 203.0.113.9"], "203.0.113.9"),  # the first is forged
        ("127.0.0.1", ["1.2.3.4", "203.0.113.9"], "203.0.113.9"),
        ("127.0.0.1", ["2001:db8:1:2:3::9"], "20010db800010002"),
        ("127.0.0.1", ["2001:db8:1:2:ffff::1"], "20010db800010002"),
        ("127.0.0.1", ["::ffff:203.0.113.9"], "203.0.113.9"),
        ("127.0.0.1", ["::ffff:203.0.113.10"], "203.0.113.10"),
        ("127.0.0.1", ["nonsense"], "unknown"),
        ("10.0.0.7", ["203.0.113.9"], "10.0.0.7"),  # the request does not come from our tunnel
    ],
)
def test_whom_a_request_is_counted_under(peer, forwarded, client):
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    assert client_address(peer, Headers(raw=headers)) == client


def test_a_public_server_limits_each_address_and_those_that_nobody_names(monkeypatch):
    still = partial(SlidingWindow, now=lambda: 0.0)
    monkeypatch.setattr("rlm.serving.middleware.SlidingWindow", still)
    hosts = AllowedHosts(["localhost", "my.ngrok.app"])
    open_to_all = {"keys": Keys([]), "allowed_hosts": hosts, "public": True}
    with SecuredServer(**open_to_all, requests_per_minute=3) as wall:

        def ask(address: str) -> int:
            made_up = f"X-Forwarded-For: 1.2.3.{len(address)}, {address}"
            headers = [JSON.encode(), made_up.encode()]
            path = "/phase1/reasoning"
            return wall.send(request("POST", path, *headers, body=b"1", host="my.ngrok.app")).status

        assert [ask("203.0.113.9") for _ in range(5)] == [200] * 3 + [429] * 2
        assert ask("203.0.113.10") == 200
        # Without the header, as behind a TCP tunnel, all clients share one limit.
        others = [wall.ask("POST", "/phase1/reasoning", JSON, body=b"1").status for _ in range(5)]
        assert others == [200] * 3 + [429] * 2


def test_addresses_that_were_not_seen_for_long_are_forgotten():
    settings = SecuritySettings(Keys([]), AllowedHosts(), public=True, requests_per_minute=1)
    middleware = SecurityMiddleware(None, settings)
    for i in range(MAX_CLIENTS + 5):
        middleware._rate(str(i)).take()
        middleware._rate("0").take()  # keeps this client in the cache
    assert middleware._rate.cache_info().currsize == MAX_CLIENTS
    assert middleware._rate("0").take() > 0
    assert middleware._rate("1").take() == 0  # its first use is forgotten


def test_a_public_request_may_draw_so_many_tokens(tokenizer):
    bounded = Limits(**vars(LIMITS) | {"request_tokens": 320})
    service, _ = make_service(tokenizer, SCRIPT, limits=bounded)
    chat = {"model": "tuned", "messages": [{"role": "user", "content": "two and three"}], "n": 4}
    with live(service) as server:
        body = {"prompt": "two and three", "n": 4}
        too_much = server.post(body)
        assert (too_much.status_code, too_much.json()["detail"]) == (
            422,
            "max_new_tokens: a request may generate 320 tokens in total, so at most 80 with n = 4",
        )
        assert server.post(body | {"max_new_tokens": 80}).status_code == 200
        detail = server.post(chat | {"max_tokens": 81}, "/v1/chat/completions").json()["detail"]
        assert detail.startswith("max_tokens: a request may generate 320")
        assert server.get("/phase1/info").json()["limits"]["tokens_per_request"] == 320
