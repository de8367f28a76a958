"""The page in a real browser, in front of a server that follows a script.

Run with `make test-browser`. Every test also checks what `watched_browser` watches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from live_server import wait_until
from scripted_reasoning import (
    EGGS,
    ID,
    QUESTION,
    Gate,
    HangUp,
    ReasoningServer,
    Reply,
    answer,
    crumbs,
    described,
    done,
    ending,
    event,
    problem,
    problem_body,
    reasoning,
    result,
    sample,
    start,
    stream,
)
from watched_browser import expect, watched_page

from rlm.serving.app import PAGE, PAGE_POLICY
from rlm.serving.schema import ReasoningResponse

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

browser_test = pytest.mark.browser


def test_page_keeps_to_its_policy():
    names = ("index.html", "page.css", "page.js")
    html, css, script = (PAGE.joinpath(name).read_text() for name in names)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:|<script(?! src=)", html)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)
    assert not re.search(r"url\(|@import", css)
    addresses = set(re.findall(r"https?://[^'\" ]+", html + css + script))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace, which is not loaded
    assert "unsafe" not in PAGE_POLICY


@pytest.mark.parametrize("votes", [(), ("19", "19", "20")])
def test_scripted_reply_is_one_that_the_server_could_send(votes):
    """The browser tests, which run separately, would detect a new field only in CI."""
    reply = ReasoningResponse.model_validate_json(json.dumps(result(votes=votes)))
    assert reply.final_answer == "19"


@pytest.fixture
def server() -> Iterator[ReasoningServer]:
    with ReasoningServer() as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: ReasoningServer) -> Iterator[Page]:
    with watched_page(browser, server.url) as watched:
        yield watched


def visit(page: Page, server: ReasoningServer) -> None:
    page.goto(server.url)
    expect(page.locator("#status")).to_have_class("ready")


def ask(page: Page, question: str = QUESTION) -> None:
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Run", exact=True).click()


def is_open(page: Page, selector: str) -> bool:
    return page.locator(selector).evaluate("e => e.open")


# ---- Asking ------------------------------------------------------------------------------


@browser_test
def test_reasoning_is_seen_before_the_answer(page, server):
    server.script(
        stream(start(), reasoning("12 and 7 "), Gate("more"), reasoning("make 19"), *ending("19"))
    )
    visit(page, server)
    expect(page.locator("#status")).to_have_text("SmolLM2-135M-Instruct + final_rlm_lora")
    ask(page)
    expect(page.locator("#result .reasoning")).to_have_text("12 and 7")
    expect(page.locator("#result .thought")).to_have_text("Thinking…")
    expect(page.locator("#result .final")).to_be_hidden()
    page.keyboard.press("Control+Enter")  # starts no second run
    expect(page.locator("#run")).to_be_disabled()
    page.locator("#run").click(force=True)

    server.open("more")
    expect(page.locator("#result .final")).to_have_text("19")
    expect(page.locator("#result .answer")).to_be_hidden()  # the same text is not shown twice
    expect(page.locator("#result .thought")).to_have_text("Reasoning")
    expect(page.locator("#result .reasoning")).to_have_text("12 + 7 = 19")  # the text of `done`
    expect(page.locator("#result .facts")).to_contain_text("130")
    expect(page.locator("#stop")).to_be_hidden()
    assert server.asked() == [{"prompt": QUESTION, "stream": True}]  # the server has defaults


@browser_test
def test_what_a_tool_wrote_is_drawn_as_a_calculation(page, server):
    text = "cost: <<72/9=8>> so\n2 < 3 <b>"
    pieces = [reasoning("cost: <<72"), reasoning("/9=")]
    pieces += [reasoning(delta, tool=True) for delta in ("8", ">", ">")]
    pieces += [reasoning(" so\n2 < 3 "), reasoning("<b>", tool=True)]  # not a calculator's output
    other = "<<1+1=2>>2 and <<10/3=3>>"  # of several samples, another one wins
    won = done(other, details={"format": "strict", "tool_calls": [{"text": "2>>"}]}, votes=["19"])
    server.script(stream(start(), *pieces, answer("19"), done(text)), stream(start(), won))
    visit(page, server)
    ask(page)
    expect(page.locator("#result .final")).to_have_text("19")
    shown = page.locator("#result .reasoning")
    assert shown.evaluate("e => e.textContent") == "cost: 72 ÷ 9 = 8 so\n2 < 3 <b>"
    expect(shown.locator(".calculation")).to_have_text(["72 ÷ 9 = 8"])
    expect(shown.locator("ins")).to_have_text(["8", "<b>"])
    expect(page.locator("#result .legend")).to_be_visible()
    ask(page)
    expect(shown).to_have_text("1 + 1 = 22 and 10 ÷ 3 = 3")
    expect(shown.locator(".calculation")).to_have_text(["1 + 1 = 2", "10 ÷ 3 = 3"])
    expect(shown.locator("ins")).to_have_text(["2"])  # the model wrote the other result


@browser_test
def test_a_calculation_that_the_tool_refused_is_drawn_without_marks(page, server):
    text = "each: <<10/3=3>> apples"
    server.script(stream(start(), reasoning(text[:9]), reasoning(text[9:]), done(text)))
    visit(page, server)
    ask(page)
    shown = page.locator("#result .reasoning")
    expect(shown).to_have_text("each: 10 ÷ 3 = 3 apples")
    expect(shown.locator("ins")).to_have_count(0)


@browser_test
def test_base_beside_trained_is_one_click(page, server):
    texts = {"base": "I guess 20", "final_rlm_lora": "12 + 7 = 19"}

    def replies(first, second):
        server.script(first, second)
        page.get_by_role("button", name="Compare with base").click()

    visit(page, server)
    page.get_by_label("Question").fill(QUESTION)
    replies(
        stream(start(), reasoning("I guess "), Gate("end"), done(texts["base"], final="20")),
        stream(start(), done(texts["final_rlm_lora"])),
    )
    panels = page.locator("#result article")
    expect(panels).to_have_count(2)
    expect(page.locator("#compare")).to_be_disabled()
    server.open("end")
    expect(panels.locator(".who")).to_have_text(["Base", "Trained: final_rlm_lora"])
    expect(page.locator("#live")).to_contain_text("20")
    sent = [body.get("adapter") for body in server.asked()]
    assert sorted(sent, key=str) == [None, "base"]  # either may arrive first
    order = 1 if sent[0] is None else 0
    finals = ["20", "19"] if order == 0 else ["19", "20"]
    expect(panels.locator(".final")).to_have_text(finals)
    left, right = (panels.nth(i).bounding_box() for i in (0, 1))
    assert (left["y"], left["width"]) == (right["y"], right["width"])
    page.set_viewport_size({"width": 375, "height": 740})
    left, right = (panels.nth(i).bounding_box() for i in (0, 1))
    assert right["y"] >= left["y"] + left["height"]

    replies(problem(504, "deadline", "too late"), stream(start(), done()))  # one of them fails
    expect(page.locator("#notice-title")).to_have_text("too late")
    expect(panels.locator(".final").filter(has_text="19")).to_have_count(1)
    page.locator("#settings > summary").click()
    page.get_by_label("Adapter").select_option("base")
    expect(page.locator("#compare")).to_be_hidden()


@browser_test
def test_the_words_are_those_of_the_adapters_own_data(page, server):
    server.info = described(answer_types={"base": ["text"], "final_rlm_lora": ["choice"]})
    visit(page, server)
    expect(page.locator("#learned")).to_have_text("final_rlm_lora learned from sums by GRPO")
    expect(page.locator("#examples button")).to_have_text([f"{QUESTION[:60].strip()}…", EGGS])
    expect(page.get_by_label("Question")).to_have_attribute("placeholder", re.compile("choices"))
    page.get_by_role("button", name="Each box").click()
    expect(page.get_by_label("Question")).to_have_value(EGGS)
    page.locator("#settings > summary").click()
    page.get_by_label("Adapter").select_option("sft_lora")  # the server has no information about it
    expect(page.locator("#examples")).to_be_hidden()
    expect(page.locator("#learned")).to_be_hidden()


@browser_test
def test_settings_are_sent_and_only_those_that_were_set(page, server):
    numbers = {"n": 4, "max_new_tokens": 200, "thinking_budget": 64, "temperature": 0.5, "seed": 7}
    others = {"expected_answer": "19", "adapter": "base"}
    summary = page.locator("#settings > summary")
    mark = "e => getComputedStyle(e, '::after').content"
    visit(page, server)
    summary.click()
    assert "changed" not in summary.evaluate(mark)
    for name, value in [*numbers.items(), ("expected_answer", "19")]:
        page.locator(f"[name={name}]").fill(str(value))
    page.get_by_label("Adapter").select_option("base")
    summary.click()
    assert "changed" in summary.evaluate(mark)  # visible while the settings are collapsed
    ask(page)
    expect(page.locator("#result .details")).to_be_visible()
    assert server.asked() == [{"prompt": QUESTION, "stream": True} | numbers | others]


@browser_test
@pytest.mark.parametrize(
    ("field", "value"),
    [("Samples", "17"), ("Thinking budget", "-1"), ("Seed", "1.5"), ("Question", "")],
)
def test_a_field_that_is_not_right_is_pointed_at(page, server, field, value):
    visit(page, server)
    page.get_by_label("Question").fill(QUESTION)
    page.locator("#settings > summary").click()
    page.get_by_label(field).fill(value)
    page.locator("#settings > summary").click()
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_label(field)).to_be_focused()
    assert page.get_by_label(field).evaluate("e => e.validationMessage") != ""
    assert is_open(page, "#settings") == (field != "Question")
    assert server.asked() == []


@browser_test
@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_keeps_the_text_and_disconnects_and_one_can_ask_again(page, server, how):
    server.script(stream(start(), reasoning("twelve and "), Gate("never")))
    visit(page, server)
    ask(page)
    expect(page.locator("#result .reasoning")).to_have_text("twelve and")
    if how == "button":
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Run", exact=True)).to_be_focused()
    else:
        page.keyboard.press(how)
    expect(page.locator("#notice-title")).to_have_text("Stopped")
    expect(page.locator("#result .thought")).to_have_text("Reasoning so far")
    expect(page.locator("#result .reasoning")).to_have_text("twelve and")
    expect(page.locator("#stop")).to_be_hidden()
    wait_until(lambda: server.left == ["/phase1/reasoning"])

    page.get_by_role("button", name="Run again").click()
    expect(page.locator("#result .final")).to_have_text("19")
    expect(page.locator("#notice")).to_be_hidden()
    expect(page.locator("#result .reasoning")).not_to_contain_text("twelve and")


@browser_test
def test_an_answer_without_reasoning_is_kept_too(page, server):
    """The base model answers without reasoning; the answer may be complete or stopped."""
    whole = (answer("19"), done(None, final="19", status="absent"))
    server.script(stream(start(), *whole), stream(start(), answer("it is "), Gate("never")))
    visit(page, server)
    ask(page, "twelve and seven?")
    expect(page.locator("#result .final")).to_have_text("19")
    ask(page)
    expect(page.locator("#history summary").first).to_have_text("twelve and seven? → 19")
    expect(page.locator("#result .answer")).to_have_text("it is ")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#result .thought")).to_have_text("Answer so far")
    expect(page.locator("#result .answer")).to_have_text("it is ")


@browser_test
def test_the_winner_of_a_tie_is_the_first_vote(page, server):
    tied = ["8", "7"]  # JavaScript objects sort these keys
    samples = [sample(i, final) for i, final in enumerate(tied)]
    server.script(stream(start(2), *samples, done(final="8", votes=tied)))
    visit(page, server)
    ask(page)
    expect(page.locator("#result .votes dt")).to_have_text(tied)


# ---- What the answer says about itself ---------------------------------------------------


@browser_test
@pytest.mark.parametrize(
    ("given", "thought", "place", "said"),
    [
        (
            {"status": "forced", "tokens": 64, "budget": 64},
            "cut short",
            "facts",
            "64 tokens, forced",
        ),
        (
            {"status": "unclosed", "final": None, "answer": "", "finish_reason": "length"},
            "Unfinished reasoning",
            "facts",
            "Finish reasonlength",
        ),
        ({"reasoning": None, "status": "absent", "tokens": 0}, "without reasoning", "remarks", ""),
        (
            {"warnings": ["tie", "the text was cut by max_new_tokens (150): send a larger one"]},
            "",
            "remarks",
            "the text was cut by Token limit (150): send a larger one",
        ),
        ({"warnings": ["tie"]}, "", "remarks", "equally many votes"),
        ({"details": {"format": "two answers"}}, "", "facts", "Formattwo answers"),
        ({"final": None, "answer": "I do not know"}, "", "remarks", "No final answer"),
        ({"final": "XIV", "answer_type": "text"}, "", "remarks", ""),
        ({"verifier": {"expected": "19", "correct": True}}, "", "verdict", "✓ expected: 19"),
        ({"verifier": {"expected": "18", "correct": False}}, "", "verdict", "✗ expected: 18"),
    ],
)
def test_what_went_wrong_is_said(page, server, given, thought, place, said):
    visit(page, server)
    server.answer = result(**given)
    ask(page)
    expect(page.locator("#result .thought")).to_contain_text(thought or "Reasoning")
    expect(page.locator("#result .final")).to_have_text(server.answer["final_answer"] or "")
    expect(page.locator("#result .reasoning")).to_have_text(server.answer["reasoning"] or "")
    shown = page.locator(f"#result .{place}")
    expect(shown).to_contain_text(said) if said else expect(shown).to_have_text("")
    assert len(server.asked()) == 1


@browser_test
def test_votes_of_eight_samples(page, server):
    finals = ["20", "19", "19", None, "19", "20", "19", "19"]
    samples = [sample(i, final) for i, final in enumerate(finals)]
    samples[3] = sample(3, "19", "text_outside")  # found, but not counted as a vote
    samples[7] = sample(7, "19.0")  # the server knows that this is 19
    begun = (start(8), reasoning("12 + 7 = 20"), answer("20"), *samples[:3])
    ended = (Gate("rest"), *samples[3:], Gate("vote"), done("12 and 7 make 19", votes=finals))
    server.script(stream(*begun, *ended))
    visit(page, server)
    page.locator("#settings > summary").click()
    page.get_by_label("Samples").fill("8")
    ask(page)
    answers, counts = page.locator("#result .votes dt"), page.locator("#result .votes dd")
    expect(answers).to_have_text(["19", "20"])
    expect(counts).to_have_text(["2 of 8", "1 of 8"])
    expect(page.locator("#result .answer")).to_be_hidden()  # the majority is shown, not sample 0
    server.open("rest")
    expect(counts).to_have_text(["4 of 8", "2 of 8", "1 of 8", "1 of 8"])
    expect(page.locator(".winner")).to_have_count(0)
    server.open("vote")
    expect(page.locator("#result .final")).to_have_text("19")  # the majority; sample 0 is 20
    expect(answers).to_have_text(["19", "20", "no answer"])
    expect(counts.nth(0).locator("progress")).to_have_class("winner")
    values = page.locator("progress").evaluate_all("bars => bars.map(bar => 8 * bar.value)")
    assert values == [5, 2, 1]
    expect(counts).to_have_text(["5 of 8", "2 of 8", "1 of 8"])
    expect(page.locator("#result .reasoning")).to_have_text("12 and 7 make 19")
    assert server.asked()[0]["n"] == 8


# ---- The model's text is only ever text --------------------------------------------------

HOSTILE = "</div><script>alert(1)</script><img src=x onerror=alert(2)><b>bold</b>&amp;"
MARKDOWN = "[a](javascript:alert(3)) ![b](http://evil.example/x.png) `c` **d** <__proto__>"


@browser_test
@pytest.mark.parametrize("hostile", [HOSTILE, MARKDOWN, "__proto__"])
def test_markup_stays_text_wherever_it_comes_from(page, server, hostile):
    server.info = described(
        model={"base": hostile, "adapter": hostile, "adapter_sha256": None},
        adapters=[hostile],
        default_adapter=hostile,
    )
    text = result(hostile, final=hostile, answer=hostile + "!", votes=[hostile] * 2)
    text |= {"verifier": {"expected": hostile, "correct": False, "reason": hostile}}
    text |= {"warnings": [hostile], "model": server.info["model"]}
    pieces = (start(2), reasoning(hostile), sample(0, hostile), sample(1, hostile))
    server.script(
        stream(*pieces, event("done", text)),
        problem(400, "bad_request", hostile, request_id=hostile),
    )
    elements = "document.querySelectorAll('script, link, img, b, a, style').length"
    visit(page, server)
    before = page.evaluate(elements)
    page.locator("#settings > summary").click()
    page.get_by_label("Samples").fill("2")
    ask(page, hostile)
    expect(page.locator("#result .details")).to_be_visible()
    places = [f"#result .{name}" for name in ("reasoning", "final", "answer", "votes", "facts")]
    for place in ("#status", "#live", *places):
        expect(page.locator(place)).to_contain_text(hostile)
    expect(page.locator("#result .votes dd")).to_have_text(["2 of 2"])
    ask(page)
    for place in ("notice-title", "notice-text"):
        expect(page.locator(f"#{place}")).to_contain_text(hostile)
    assert page.evaluate(elements) == before


@browser_test
def test_the_checks_of_this_file_notice_a_violation(page, server):
    """The content security policy also blocks what the page's script must never do."""
    visit(page, server)
    page.evaluate(
        """() => {
            try { document.body.innerHTML = "<img>"; } catch { violations.push("refused"); }
            const image = document.createElement("img");
            document.body.append(image);
            image.src = "image.png";
            image.setAttribute("style", "color: red");
        }"""
    )
    kinds = {"refused", "require-trusted-types-for", "img-src", "style-src-attr"}
    page.wait_for_function(f"() => violations.length >= {len(kinds)}")
    assert {line.split()[0] for line in page.evaluate("violations")} == kinds
    page.evaluate("violations.length = 0")


# ---- The key -----------------------------------------------------------------------------


@browser_test
def test_wrong_key_then_right_key(page, server):
    server.keys = frozenset({"right-key"})
    page.goto(server.url)
    key = page.get_by_label("This server asks for a key")
    expect(key).to_be_focused()
    ask(page)  # the question waits for the key
    expect(key).to_be_focused()
    expect(page.locator("#notice")).to_be_hidden()  # the form asks for the key
    key.fill("wrong-key")
    key.press("Enter")
    expect(page.locator("#key-label")).to_have_text("That key was not accepted")
    key = page.locator("#key")
    key.fill("a key")
    key.press("Enter")
    assert key.evaluate("e => e.validationMessage") != ""
    key.fill(" right-key ")
    key.press("Enter")
    expect(key).to_be_hidden()
    expect(page.locator("#run")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#result .final")).to_have_text("19")
    sent = [seen.headers.get("authorization") for seen in server.requests]
    assert sent[-1] == "Bearer right-key"
    assert set(sent) == {None, "Bearer wrong-key", "Bearer right-key"}
    kept = "[Object.entries(sessionStorage), localStorage.length, document.cookie]"
    assert page.evaluate(kept) == [[["rlm.key", "right-key"]], 0, ""]
    assert "right-key" not in page.url

    page.reload()
    expect(page.locator("#status")).to_contain_text("final_rlm_lora")
    expect(key).to_be_hidden()
    expect(page.locator("#openapi")).to_be_hidden()  # a link cannot send a key
    page.get_by_role("button", name="Forget key").click()
    expect(key).to_be_focused()
    assert page.evaluate("sessionStorage.length") == 0

    server.keys = frozenset()
    visit(page, server)
    server.keys = frozenset({"new"})  # the page asks again if the key is rejected
    ask(page)
    expect(page.get_by_label("This server asks for a key")).to_be_focused()


# ---- When the server cannot --------------------------------------------------------------


@browser_test
@pytest.mark.parametrize(
    ("code", "status"), [("queue_full", 503), ("busy", 503), ("rate_limited", 429)]
)
def test_what_passes_by_itself_is_asked_again(page, server, code, status):
    refusals = [problem(status, code, "come back later", retry_after=wait) for wait in (3, 600)]
    server.script(*refusals)
    visit(page, server)
    ask(page)
    expect(page.locator("#notice-title")).to_have_text("come back later")
    expect(page.locator("#notice-text")).to_contain_text("asked again in 3 s")
    expect(page.get_by_role("button", name="Run again")).to_be_hidden()
    expect(page.locator("#notice-text")).to_contain_text("asked again in 600 s")
    page.keyboard.press("Escape")  # cancels waiting
    expect(page.locator("#notice-title")).to_have_text("Stopped")
    page.get_by_role("button", name="Run again").click()
    expect(page.locator("#result .final")).to_have_text("19")
    expect(page.locator("#notice")).to_be_hidden()
    assert len(server.asked()) == 3


@browser_test
def test_a_model_that_is_still_loading(page, server):
    server.not_ready = "loading"
    server.script(problem(503, "loading", "the model is still being loaded"))
    page.goto(server.url)
    expect(page.locator("#status")).to_have_text("it is loading")
    ask(page)
    expect(page.locator("#notice-title")).to_have_text("the model is still being loaded")
    server.not_ready = None
    expect(page.locator("#status")).to_contain_text("final_rlm_lora")
    expect(page.locator("#result .final")).to_have_text("19")
    expect(page.locator("#notice")).to_be_hidden()


HTML = Reply((b"<h1>Bad gateway</h1>",), 502, "text/html")
NO_STREAM = Reply((b"<h1>Hello</h1>",), 200, "text/html")
NO_JSON = stream(start(), b"event: reasoning\ndata: {\n\n", Gate("never"))
NO_FIELDS = stream(start(), event("done", {"answer": ""}), Gate("never"))


@browser_test
@pytest.mark.parametrize(
    ("reply", "title"),
    [
        (problem(503, "draining", "the server is shutting down"), "the server is shutting down"),
        (problem(503, "engine_down", "the engine died"), "the engine died"),
        (problem(504, "deadline", "not finished within 120 seconds"), "not finished within 120"),
        (problem(413, "body_too_large", "the body exceeds 9 bytes"), "the body exceeds 9 bytes"),
        (problem(422, "validation", "n: must be smaller"), "Samples: must be smaller"),
        (problem(500, "internal", "a fault of the server"), "a fault of the server"),
        (problem(503, "no_reason"), "The server answered 503"),
        (HTML, "The server answered 502"),
        (NO_STREAM, "The connection was lost"),
        (NO_JSON, "The answer cannot be read"),
        (NO_FIELDS, "The answer cannot be read"),
    ],
)
def test_every_refusal_is_one_notice(page, server, reply, title):
    visit(page, server)
    server.script(reply)
    ask(page)
    expect(page.locator("#notice-title")).to_contain_text(title)
    if reply.content_type == "application/problem+json":
        expect(page.locator("#notice-text")).to_contain_text("req-1")  # the id in the log
    expect(page.locator("#stop")).to_be_hidden()
    again = page.get_by_role("button", name="Run again")
    if reply.status in (413, 422):  # it would be rejected again
        expect(again).to_be_hidden()
        again = page.locator("#run")
    again.click()
    expect(page.locator("#result .final")).to_have_text("19")
    if len(reply.pieces) > 1:
        wait_until(lambda: server.left)  # an unread response is closed


@browser_test
def test_a_refusal_points_at_its_field(page, server):
    refusal = "max_new_tokens: 900, the limit is 512"
    error = {"message": refusal, "type": "", "param": "max_new_tokens", "code": "validation"}
    server.script(problem(422, "validation", refusal, error=error))
    visit(page, server)
    ask(page)
    expect(page.locator("#notice-title")).to_have_text("Token limit: 900, the limit is 512")
    field = page.get_by_label("Token limit")
    expect(field).to_be_visible()  # the settings are open now
    expect(field).to_have_attribute("aria-invalid", "true")
    field.fill("100")
    expect(field).not_to_have_attribute("aria-invalid", "true")


@browser_test
@pytest.mark.parametrize(
    ("end", "title"),
    [
        (HangUp(), "The connection was lost"),
        (event("reasoning", {"sample": 0, "delta": ""}), "The connection was lost"),  # no `done`
        (event("error", problem_body(504, "deadline", "too late")), "too late"),
    ],
)
def test_a_break_in_the_middle_keeps_the_text(page, server, end, title):
    server.script(stream(start(), reasoning("twelve and seven"), Gate("break"), end))
    visit(page, server)
    ask(page)
    expect(page.locator("#result .reasoning")).to_have_text("twelve and seven")
    server.open("break")
    expect(page.locator("#notice-title")).to_have_text(title)
    expect(page.locator("#result .reasoning")).to_have_text("twelve and seven")
    page.get_by_role("button", name="Run again").click()
    expect(page.locator("#result .final")).to_have_text("19")


@browser_test
def test_a_server_that_falls_silent_is_given_up(page, server):
    page.clock.install()
    server.script(stream(start(), reasoning("twelve"), Gate("never")))
    visit(page, server)
    ask(page)
    expect(page.locator("#result .reasoning")).to_have_text("twelve")
    page.clock.fast_forward(55_000)
    expect(page.locator("#stop")).to_be_visible()
    page.clock.fast_forward(6_000)
    expect(page.locator("#notice-title")).to_have_text("No data from the server for 60 s")
    expect(page.locator("#result .reasoning")).to_have_text("twelve")
    wait_until(lambda: server.left == ["/phase1/reasoning"])


@browser_test
def test_a_server_that_is_gone(page, server):
    visit(page, server)
    page.context.set_offline(True)
    ask(page)
    expect(page.locator("#notice-title")).to_have_text("The server cannot be reached")
    expect(page.locator("#status")).to_have_text("The server cannot be reached")
    page.context.set_offline(False)
    expect(page.locator("#status")).to_have_class("ready")
    page.get_by_role("button", name="Run again").click()
    expect(page.locator("#result .final")).to_have_text("19")


# ---- Server-sent events ------------------------------------------------------------------


@browser_test
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_do_not_depend_on_where_their_bytes_are_cut(page, server, end):
    # U+2028 ends a line for JavaScript's ^, $ and . but not for server-sent events.
    text = "π ≈ 3, 🍏🍏\u2028data: {}\u2028\u2028event: error\x85"
    events = (
        event("start", {"id": ID, "n": 1}, end)
        + f": still here{end}{end}".encode()
        + event("reasoning", {"sample": 0, "delta": text}, end)
        + event("unheard_of", {"a": 1}, end)
        + event("done", result(text), end)
    )
    visit(page, server)
    for size in (1, 2, 3, 5, 7, 100, len(events)):
        server.script(stream(*crumbs(events, size)))
        ask(page)
        expect(page.locator("#result .final")).to_have_text("19")
        assert page.locator("#result .reasoning").evaluate("e => e.textContent") == text


# ---- Everybody ---------------------------------------------------------------------------


@browser_test
def test_all_of_it_by_keyboard(page, server):
    server.script(
        stream(start(), reasoning("let me see"), Gate("answer now"), *ending("19")),
        stream(start(2), reasoning("again"), Gate("never")),
    )
    visit(page, server)
    press = page.keyboard.press

    def tab_to(selector: str) -> None:
        for _ in range(30):
            if page.locator(selector).evaluate("e => e === document.activeElement"):
                return
            press("Tab")
        raise AssertionError(f"Tab does not reach {selector}")

    expect(page.get_by_label("Question")).to_be_focused()  # from the start
    page.keyboard.type("to be replaced by the example")
    tab_to("button[value*=eggs]")
    press("Enter")
    press("Control+Enter")
    expect(page.locator("#answer-now")).to_be_visible()
    tab_to("#answer-now")
    press("Enter")
    expect(page.locator("#result .final")).to_have_text("19")
    assert server.requests[-1].path == f"/phase1/reasoning/{ID}/answer"
    assert "6 eggs" in server.asked()[0]["prompt"]
    expect(page.locator("#run")).to_be_focused()  # the focused button has disappeared
    tab_to("#settings > summary")
    press("Enter")
    tab_to("[name=n]")
    page.keyboard.type("2")
    tab_to("#result .thought")
    press("Space")
    assert not is_open(page, "#result .thinking")
    press("Control+Enter")
    expect(page.locator("#result .reasoning")).to_have_text("again")
    assert not is_open(page, "#result .thinking")  # what the user has collapsed stays collapsed
    press("Escape")
    expect(page.locator("#notice-title")).to_have_text("Stopped")
    assert [body.get("n") for body in server.asked()] == [None, 2]
