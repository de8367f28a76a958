"""The page in a browser with the real server, from end to end. `make test-browser` runs it."""

from __future__ import annotations

import pytest
from live_server import ADD, live, make_service, wait_until

from rlm.serving.access import Keys
from rlm.serving.app import PAGE, PAGE_POLICY
from tests.serving.test_page import ask, browser_test, expect, page  # noqa: F401

KEY = "a-key-of-some-length"
EVIL = "<think>\n<script>alert(1)</script>\n</think>\n<answer><img src=x onerror=alert(2)></answer>"
SCRIPT = {
    "two and three": ADD,
    "evil": EVIL,
    "slow": "<think>" + "again " * 80,
}


@pytest.fixture
def keys() -> Keys:
    return Keys([])


@pytest.fixture
def server(tokenizer, keys):
    service, _ = make_service(tokenizer, SCRIPT, pause=0.01)
    with live(service, keys) as running:
        yield running


@pytest.mark.parametrize("keys", [Keys([KEY])])
@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [
        ("/", "index.html", "text/html"),
        ("/page.css", "page.css", "text/css"),
        ("/page.js", "page.js", "text/javascript"),
    ],
)
def test_files_need_no_key_and_are_sent_with_type_caching_and_policy(server, path, name, kind):
    for method in ("GET", "HEAD"):
        with server.client() as client:
            reply = client.request(method, path)
        assert reply.status_code == 200
        assert reply.text == (PAGE.joinpath(name).read_text() if method == "GET" else "")
        assert reply.headers["content-type"] == f"{kind}; charset=utf-8"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-store"  # all files have the same version
        assert reply.headers["content-security-policy"] == PAGE_POLICY
    for other in (f"{path}x", f"/{name}/", f"/page/{name}", "/index.html"):
        assert server.get(other).status_code == 401


@browser_test
@pytest.mark.parametrize("keys", [Keys([KEY])])
def test_key_ask_stop_ask_again_and_answer_now(page, server):  # noqa: F811
    page.goto(server.url)
    page.locator("#key").fill(KEY)
    page.get_by_role("button", name="Use key").click()
    expect(page.locator("#status")).to_have_class("ready")
    ask(page, "two and three")
    expect(page.locator("#result .final")).to_have_text("5")
    expect(page.locator("#result .thought")).to_have_text("Reasoning")
    for button in ("Stop", "Answer now"):
        ask(page, "slow")
        expect(page.get_by_text("again again").first).to_be_visible()
        page.get_by_role("button", name=button, exact=True).click()
        expect(page.get_by_role("button", name="Run", exact=True)).to_be_enabled()
    expect(page.locator("#result .final")).to_have_text("7")
    ask(page, "evil")
    expect(page.locator("#result .answer")).to_contain_text("onerror=alert(2)")
    assert (page.locator("script").count(), page.locator("img").count()) == (1, 0)
    wait_until(lambda: server.service.requests == 0)
