"""The middleware: keys, hosts, rates and bodies, and its responses and logs."""

from __future__ import annotations

import asyncio
import hmac
import io
import json
import logging
import re
import time
from functools import partial

import pytest
from live_server import wait_until
from secured_server import KEY, OTHER_KEY, SecuredServer, request, small_app
from starlette.datastructures import Headers

from rlm.cli.options import UsageError
from rlm.serving import logging as logs
from rlm.serving.access import AllowedHosts, Keys, SlidingWindow, is_loopback, load_keys
from rlm.serving.errors import HTTPProblem, invalid
from rlm.serving.middleware import SecurityMiddleware, SecuritySettings, read_body

AUTH = f"Authorization: Bearer {KEY}"


@pytest.fixture(scope="module")
def wall():
    with SecuredServer() as wall:
        yield wall


@pytest.fixture
def lines(server_log):
    """Return `lines(n)`, which returns the n log lines as objects and checks that no more exist."""
    time.sleep(0.05)  # waits for the log lines of the last test, which follow their responses
    server_log.truncate(0)
    server_log.seek(0)

    def wait_for(number: int) -> list[dict]:
        wait_until(lambda: server_log.getvalue().count("\n") >= number, seconds=10)
        written = [json.loads(line) for line in server_log.getvalue().split("\n")[:-1]]
        assert len(written) == number
        return written

    return wait_for


# What is sent


def test_the_parts_of_a_body_count_together(monkeypatch):
    """The limit holds for the sum of the parts in which a body arrives."""
    monkeypatch.setattr("rlm.serving.middleware.MAX_BODY", 5)

    async def read(size: int) -> bytes:
        sent = [b"12", b"34", b"5" * (size - 4)]
        parts = iter({"body": part, "more_body": part is not sent[-1]} for part in sent)

        async def receive():
            return {"type": "http.request", **next(parts)}

        replay = await read_body({}, receive, Headers({}), [])
        return (await replay())["body"]

    assert asyncio.run(read(5)) == b"12345"
    with pytest.raises(HTTPProblem) as caught:
        asyncio.run(read(6))
    assert caught.value.status == 413


# Errors


def test_types_of_errors():
    """The goldens contain most cases with their whole bodies."""
    kinds = {400: "invalid_request", 401: "authentication", 404: "invalid_request"}
    kinds |= {429: "rate_limit", 500: "server", 503: "server", 504: "server"}
    for status, kind in kinds.items():
        problem = HTTPProblem(status, "internal", "x")
        assert problem.body("")["error"]["type"] == f"{kind}_error"
        headers = problem.response("").headers
        assert ("www-authenticate" in headers) == (status == 401)
        assert (headers.get("x-should-retry") == "false") == (status in (500, 504))


def test_validation_errors_repeat_no_value_and_no_made_up_name():
    errors = [
        {"loc": ("body", "n"), "msg": "too large", "input": "secret", "ctx": {"x": "secret"}},
        {"loc": ("body", "stop", 3, "<script>"), "msg": "no such field"},
        {"loc": ("body", "a" * 65), "msg": "no such field"},
    ]
    problem = invalid(error | {"type": "value_error"} for error in errors)
    assert (problem.status, problem.code, problem.param) == (422, "validation", "n")
    assert problem.detail == "n: too large"
    assert [error["loc"] for error in problem.body("")["errors"]] == [
        ["body", "n"],
        ["body", "stop", 3, "?"],
        ["body", "?"],
    ]
    assert "secret" not in json.dumps(problem.body(""))
    whole = invalid([{"loc": ("body",), "msg": "should be an object", "type": "value_error"}])
    assert (whole.detail, whole.param) == ("should be an object", None)
    both = invalid({"loc": ("body", name), "type": "string_type"} for name in ("prompt", "adapter"))
    assert (both.detail, both.param) == ("prompt: must be a string", "prompt")


# Keys

DENIED = {
    "no key": [],
    "an empty header": ["Authorization:"],
    "no key after the scheme": ["Authorization: Bearer"],
    "two spaces": [f"Authorization: Bearer  {KEY}"],
    "a tab": [f"Authorization: Bearer\t{KEY}"],
    "no scheme": [f"Authorization: {KEY}"],
    "another scheme": [f"Authorization: Basic {KEY}"],
    "a part of the key": [f"Authorization: Bearer {KEY[:-1]}"],
    "more than the key": [f"Authorization: Bearer {KEY}1"],
    "the key twice": [f"Authorization: Bearer {KEY} {KEY}"],
    "another case": [f"Authorization: Bearer {KEY.upper()}"],
    "Latin-1": [b"Authorization: Bearer \xff\xfe"],
    "UTF-8": ["Authorization: Bearer ключ".encode()],
    "two headers": [AUTH, AUTH],
    "two own headers": [f"X-API-Key: {KEY}", f"X-API-Key: {KEY}"],
    "an empty own header": ["X-API-Key:", AUTH],
    "a wrong own header": ["X-API-Key: wrong", AUTH],
    "a cookie": [f"Cookie: key={KEY}"],
}


@pytest.mark.parametrize("headers", DENIED.values(), ids=DENIED.keys())
def test_denied_with_the_same_answer_always(wall, headers):
    first = wall.ask("POST", "/phase1/reasoning", "X-Request-ID: one")
    answer = wall.ask("POST", "/phase1/reasoning", "X-Request-ID: one", *headers)
    assert (answer.status, answer.body) == (401, first.body)
    assert answer.headers["www-authenticate"] == 'Bearer realm="rlm"'
    assert wall.ask("GET", "/metrics", AUTH + "\0").status == 400  # invalid in HTTP


def test_let_in(wall):
    for headers in (
        [AUTH],
        [f"authorization: bearer {KEY}"],
        [f"AUTHORIZATION: BEARER {OTHER_KEY}"],
        [f"X-API-Key: {KEY}"],
        [f"X-API-Key: {KEY}", "Authorization: Basic dGhlIGVkZ2UncyBvd24="],
    ):
        assert wall.ask("GET", "/metrics", *headers).status == 200


def test_a_key_in_the_url_does_not_count_and_is_not_written_down(wall, lines):
    for path in (f"/metrics?key={KEY}", f"/metrics?api_key={KEY}", f"/{KEY}", f"/v1/{KEY}/x"):
        assert wall.ask("GET", path).status == 401
        wall.ask("GET", path, AUTH)
    assert KEY not in json.dumps(lines(8))


PATHS = r"""
//phase1/reasoning /phase1//reasoning /phase1/./reasoning /health/../phase1/reasoning
/%2e%2e/phase1/reasoning /phase1%2freasoning /phase1/reasoning;a /phase1/reasoning/
/phase1/reasoning%00 /phase1/reasoning?/health /phase1/reasoning#/health /PHASE1/reasoning
/health/ //health /health%20 /Health /health;/phase1/reasoning
http://localhost/health http://localhost/phase1/reasoning \health
"""


@pytest.mark.parametrize("path", PATHS.split())
def test_other_spellings_of_a_path_do_not_get_past_the_key(wall, path):
    assert wall.ask("POST", path, body=b"{}").status == 401
    assert wall.ask("GET", path).status == 401
    known = (200,) if path == "/health/" else (307, 404, 405)  # a slash at the end is allowed
    assert wall.ask("GET", path, AUTH).status in known


def test_all_hashes_are_compared_in_constant_time(monkeypatch):
    calls = []

    def compare(a: bytes, b: bytes) -> bool:
        calls.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = Keys([KEY, OTHER_KEY])
    sent = [KEY, OTHER_KEY, "wrong", ""]
    ids = [keys.allows(Headers({"X-API-Key": key})) for key in sent]
    assert ids == ["key-1", "key-2", None, None]
    assert calls == [(32, 32)] * 8


def test_websockets_are_closed():
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": "/health", "headers": []}
    settings = SecuritySettings(Keys([KEY]), AllowedHosts())
    asyncio.run(SecurityMiddleware(small_app(), settings)(scope, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


# Keys at start-up


def test_keys_come_from_the_environment_and_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"\n{OTHER_KEY}\n\n")
    assert not load_keys({}, None).required
    keys = load_keys({"RLM_API_KEY": KEY + "\n"}, file)
    assert keys.required
    assert keys.allows(Headers({"X-API-Key": KEY})) == "key-1"
    assert keys.allows(Headers({"X-API-Key": OTHER_KEY})) == "key-2"
    assert keys.allows(Headers({"X-API-Key": ""})) is None
    assert KEY not in repr(vars(keys))


@pytest.mark.parametrize(
    "value", ["", "  ", "\n", "short", "with a space in it", "не-ascii-ключ-ключ"]
)
def test_a_bad_key_stops_the_start(tmp_path, value):
    file = tmp_path / "keys"
    file.write_text(value, encoding="utf-8")
    with pytest.raises(UsageError) as by_env:
        load_keys({"RLM_API_KEY": value}, None)
    with pytest.raises(UsageError) as by_file:
        load_keys({"RLM_API_KEY": KEY}, file)
    with pytest.raises(UsageError, match="cannot read"):
        load_keys({}, tmp_path / "nothing")
    for error in (str(by_env.value), str(by_file.value)):
        assert "\n" not in error
        assert not value.strip() or value not in error


# Hosts


NO_HTTP = b"Invalid HTTP request received."  # a response of uvicorn
HOSTS = """
evil.com localhost.evil.com localhost. localhost/v1/models? localhost/phase1/reasoning a@localhost
localhost@a localhost:80:80 localhost: localhost:x [localhost] 192.168.0.1 [::1]
"""


@pytest.mark.parametrize("host", [*HOSTS.split(), "localhost, evil.com", "a" * 300, ""])
def test_a_host_that_is_not_ours_is_400_everywhere(wall, host):
    for path in ("/", "/health", "/phase1/reasoning"):
        answer = wall.send(request("GET", path, AUTH.encode(), host=host))
        assert answer.status == 400
        assert b"bad_host" in answer.body or answer.body == NO_HTTP
        assert {*host}.isdisjoint("@?/, ") or b"--allow-host" not in answer.body


def test_hosts_of_ours_come_and_go_and_may_be_numbers(wall):
    for host in ("localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:1"):
        assert wall.send(request("GET", "/health", host=host)).status == 200

    def allows(hosts, *values):
        return hosts.allows(Headers(raw=[(b"host", value) for value in values]))

    hosts = AllowedHosts(["localhost", "::1"])
    assert allows(hosts, b"[::1]:80")
    assert not allows(hosts)
    assert not allows(hosts, b"localhost", b"localhost")
    assert not allows(hosts, b"a.ngrok.app")
    hosts.add("a.ngrok.app")
    assert allows(hosts, b"A.ngrok.app")
    hosts.discard("a.ngrok.app")
    assert not allows(hosts, b"a.ngrok.app")
    assert not allows(hosts, b"10.0.0.7:8000")
    assert allows(AllowedHosts(["My.Machine"]), b"my.machine:8000")
    for wrong in ("my.machine:8000", "http://my.machine", "a b", ""):
        with pytest.raises(UsageError, match="--allow-host"):
            AllowedHosts([wrong])
    numeric = AllowedHosts(["localhost"], numeric=True)
    assert allows(numeric, b"10.0.0.7:8000")
    assert allows(numeric, b"[fe80::1]")
    assert not allows(numeric, b"10.0.0.7.evil.com")


# Rates


def test_a_rate_holds_in_every_minute_and_the_wait_is_told():
    now = 0.0
    rate = SlidingWindow(per_minute=3, now=lambda: now)
    assert [rate.take(), rate.take()] == [0, 0]
    now = 20.5
    assert [rate.take(), rate.take()] == [0, 40]
    now = 59.0
    assert rate.take() == 1
    now = 60.0
    assert [rate.take() for _ in range(3)] == [0, 0, 21]
    now = 1e6
    assert [rate.take() for _ in range(4)] == [0, 0, 0, 60]


def test_addresses_of_this_machine():
    for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"):
        assert is_loopback(host)
    for host in ("", "10.0.0.7", "::ffff:10.0.0.7", "localhost.evil.com", "::"):
        assert not is_loopback(host)


@pytest.fixture
def no_time_passes(monkeypatch):
    still = partial(SlidingWindow, now=lambda: 0.0)
    monkeypatch.setattr("rlm.serving.middleware.SlidingWindow", still)


def test_each_key_has_its_rate_whatever_address_it_claims(no_time_passes):
    with SecuredServer(requests_per_minute=5) as wall:
        answers = [wall.post(b"{}", f"X-Forwarded-For: 10.0.0.{i}") for i in range(8)]
        assert [answer.status for answer in answers] == [200] * 5 + [429] * 3
        assert answers[0].json["client"] == "127.0.0.1"
        assert answers[-1].headers["retry-after"] == "60"
        assert answers[-1].json["code"] == "rate_limited"
        assert wall.post(b"{}", key=OTHER_KEY).status == 200
        assert wall.ask("GET", "/health", AUTH).status == 200


def test_guessing_is_throttled_and_locks_nobody_out(no_time_passes):
    with SecuredServer(failures_per_minute=20) as wall:
        tries = [
            wall.post(b"{}", f"X-Forwarded-For: 10.0.0.{i}", key=f"guess {i}") for i in range(100)
        ]
        assert [answer.status for answer in tries] == [401] * 20 + [429] * 80
        assert tries[-1].headers["retry-after"] == "60"
        assert wall.post(b"{}").status == 200


def test_who_sends_no_key_is_asked_for_one_however_often():
    """Otherwise a stranger could prevent the page from asking other users for their key."""
    with SecuredServer(failures_per_minute=1) as wall:
        nothing = ["", "Authorization: Basic abc", "Authorization: Bearer"]
        for header in nothing * 3:
            headers = [header] if header else []
            assert wall.ask("GET", "/phase1/info", *headers).status == 401
        guess = "Authorization: Bearer a-guess"
        assert [wall.ask("GET", "/x", guess).status for _ in range(2)] == [401, 429]


def test_an_open_server_limits_nobody():
    with SecuredServer(keys=Keys([]), requests_per_minute=1, failures_per_minute=1) as wall:
        for _ in range(5):
            answer = wall.ask(
                "POST", "/phase1/reasoning", "Content-Type: application/json", body=b"1"
            )
            assert answer.status == 200


# Answers


def test_every_answer_carries_the_headers(wall):
    answers = [
        wall.ask("GET", "/health"),
        wall.ask("GET", "/nothing"),
        wall.ask("GET", "/nothing", AUTH),
        wall.ask("GET", "/fails", AUTH),
        wall.post(b"{"),
        wall.send(request("GET", "/", host="evil.com")),
    ]
    assert [answer.status for answer in answers] == [200, 401, 404, 500, 400, 400]
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert "server" not in answer.headers
        assert not any(name.startswith("access-control") for name in answer.headers)
    page = wall.ask("GET", "/")
    assert page.headers["content-security-policy"] == "the-page's-own"


def test_request_ids_are_kept_if_they_are_harmless(wall):
    assert wall.ask("GET", "/", "X-Request-ID: a.B-9_").headers["x-request-id"] == "a.B-9_"
    odd = ["a b", 'a"}', "<script>", "a" * 65, "", b"\xff", "a/b"]
    sent = [[b"X-Request-ID: " + (v if isinstance(v, bytes) else v.encode())] for v in odd]
    for headers in [*sent, ["X-Request-ID: a", "X-Request-ID: b"], []]:
        assert re.fullmatch("[0-9a-f]{32}", wall.ask("GET", "/", *headers).headers["x-request-id"])


def test_a_failure_says_nothing_and_logs_the_place_only(wall, lines):
    answer = wall.ask("GET", "/fails", AUTH, "X-Request-ID: broken-1")
    assert (answer.status, answer.json["code"]) == (500, "internal")
    assert answer.json["request_id"] == "broken-1"
    assert b"Traceback" not in answer.body
    assert b"ValueError" not in answer.body
    failure, _ = written = lines(2)
    assert (failure["error"], failure["request_id"]) == ("ValueError", "broken-1")
    assert failure["at"][-1].endswith(" fails")
    assert "the prompt in it" not in json.dumps(written)


def test_a_failure_without_an_answer_gets_one_and_half_an_answer_is_cut(lines):
    async def app(scope, receive, send):
        if scope["path"] == "/half":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        raise ValueError("the prompt")

    with SecuredServer(app) as wall:
        assert wall.ask("GET", "/whole", AUTH).json["code"] == "internal"
        assert wall.send(request("GET", "/half", AUTH.encode())) is None
        assert wall.ask("GET", "/whole", AUTH).status == 500
        written = lines(8)  # two per request, and uvicorn's about its start and an error
    assert "the prompt" not in json.dumps(written)


# Logs


def test_one_line_a_request_with_the_route_and_no_more(wall, lines):
    body = b'{"prompt": "my secret prompt"}'
    wall.post(body, "X-Request-ID: r-1")
    wall.post(body[:-1])
    wall.ask("POST", "/phase1/reasoning/some-id/answer?a=secret", AUTH)
    wall.ask("GET", "/nothing/here", "Authorization: Bearer secret-guess-12345")
    wall.ask("GET", "/health")
    first, *others = written = lines(5)
    assert first.pop("time").endswith("+00:00")
    assert first.pop("ms") >= 0
    assert first == {
        "level": "info",
        "event": "request",
        "request_id": "r-1",
        "method": "POST",
        "path": "/phase1/reasoning",
        "status": 200,
        "key_id": "key-1",
    }
    assert [(line["path"], line["status"], line.get("key_id")) for line in others] == [
        ("/phase1/reasoning", 400, "key-1"),
        ("/phase1/reasoning/{name}/answer", 200, "key-1"),
        ("/nothing/here", 401, None),
        ("/health", 200, "public"),
    ]
    assert "secret" not in json.dumps(written)


def test_nobody_can_write_a_log_line_of_his_own(wall, lines):
    forged = '{"event":"forged"}'
    for path in (f"/a%0d%0a{forged}", "/%1b[31mred", "/%e2%80%a8x", "/" + "%0a" * 500):
        wall.ask("GET", path, AUTH)
    wall.ask("GET", "/health", f'X-Request-ID: a"\t{forged}')
    lines(5)
    logs.log(
        "note", text=f"a\r\n{forged}\x1b[31m\u2028\ud800" + "x" * 500, nan=float("nan"), obj=wall
    )
    written = lines(6)
    assert [line["event"] for line in written] == ["request"] * 5 + ["note"]
    for line in written[:5]:
        assert re.fullmatch(r"[A-Za-z0-9._~/{}?*-]{1,100}", line["path"])
    assert (len(written[-1]["text"]), written[-1]["nan"]) == (logs.MAX_TEXT, "nan")


def test_lines_of_libraries_are_objects_too(lines):
    logging.getLogger("somewhere").warning("a\n%s", "the prompt")
    logging.getLogger("somewhere").info("not important")
    logging.getLogger("uvicorn.error").info("started")
    assert [(line["logger"], line["message"]) for line in lines(2)] == [
        ("somewhere", "a"),
        ("uvicorn.error", "started"),
    ]


def test_on_a_terminal_a_line_is_for_people_and_still_one_line():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    try:
        logs.configure(terminal := Terminal())
        fields = {"method": "POST", "status": 200, "ms": 1234.5, "key_id": "key-1"}
        logs.log("request", path="/phase1/reasoning", **fields)
        logs.log("request", path="/page.css", **fields)  # this line and the next one are not logged
        logging.getLogger("uvicorn.error").info("started")
        logs.log("note", text="a\r\n\x1b[31m\u2028")
        logs.log_error("step_failed", ValueError("the prompt"), adapter="base")
        said = [line.partition("  ")[2] for line in terminal.getvalue().split("\n")]
        assert said == [
            "POST /phase1/reasoning 200 in 1.2 s",
            "note  text a???[31m?",
            "ERROR  step failed  adapter base  error ValueError  at []",
            "",
        ]
        logs.configure(asked := Terminal(), as_json=True)
        logs.log("note")
        assert json.loads(asked.getvalue())["event"] == "note"
    finally:
        root.handlers[:] = before
