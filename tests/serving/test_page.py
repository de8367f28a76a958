"""The page in a real browser, in front of a server that follows a script.

Run with `make test-browser`. Every test also checks what `watched_browser` watches.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from scripted_reasoning import (
    ID,
    PAGE,
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
    policy,
    problem,
    problem_body,
    reasoning,
    result,
    sample,
    start,
    stream,
    wait_until,
)
from watched_browser import expect, watched_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

browser_test = pytest.mark.browser


def test_page_keeps_to_its_policy():
    html = PAGE.read_text()
    assert "\r" not in html  # a browser hashes the text after it has turned CRLF into LF
    assert html.count("<style") == html.count("<script") == 1
    assert not re.search(r"\sstyle=|\son[a-z]+=|javascript:", html)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", html)
    addresses = set(re.findall(r"https?://[^'\" ]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert "unsafe" not in policy(html)


@pytest.fixture
def server() -> Iterator[ReasoningServer]:
    with ReasoningServer() as running:
        yield running


@pytest.fixture
def options() -> dict[str, Any]:
    """Of the browser's window; a test overrides them with parametrize."""
    return {}


@pytest.fixture
def page(
    browser: Browser,
    server: ReasoningServer,
    options: dict[str, Any],
) -> Iterator[Page]:
    with watched_page(browser, server.url, **options) as watched:
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
    expect(page.locator("#reasoning")).to_have_text("12 and 7")
    expect(page.locator("#thinking-title")).to_have_text(re.compile(r"^Thinking… \d+\.\d s$"))
    expect(page.locator("#answer")).to_be_hidden()
    assert is_open(page, "#thinking")

    server.open("more")
    expect(page.locator("#final")).to_have_text("19")
    expect(page.locator("#answer-text")).to_have_text("")  # the tag is not shown twice
    title = re.compile(r"^Thought for \d+\.\d s \(121 tokens\)$")
    expect(page.locator("#thinking-title")).to_have_text(title)
    expect(page.locator("#badge")).to_be_hidden()
    assert not is_open(page, "#thinking")
    expect(page.locator("#facts")).to_contain_text("130")
    expect(page.locator("#stop")).to_be_hidden()
    assert server.asked() == [{"prompt": QUESTION, "stream": True}]  # defaults are the server's

    page.locator("#thinking > summary").click()
    expect(page.locator("#reasoning")).to_have_text("12 + 7 = 19")  # the final word is `done`


@browser_test
def test_the_answer_is_seen_without_its_tag_while_it_arrives(page, server):
    pieces = [answer(delta) for delta in ("\n<ans", "wer>1", "9</an", "swer>")]
    gated = [part for i, piece in enumerate(pieces) for part in (piece, Gate(f"{i}"))]
    server.script(stream(start(), reasoning("…"), *gated, done()))
    visit(page, server)
    ask(page)
    for i, seen in enumerate(("", "1", "19", "19")):
        expect(page.locator("#final")).to_have_text(seen)
        server.open(f"{i}")
    expect(page.locator("#facts")).to_be_visible()


@browser_test
def test_prose_and_number_both_stand_in_the_answer(page, server):
    prose = "He has 12 + 7 = 19 apples.\nSo the answer is 19."
    visit(page, server)
    server.answer = result(answer=prose)
    ask(page)
    expect(page.locator("#final")).to_have_text("19")
    expect(page.locator("#answer-text")).to_have_text(prose)


@browser_test
def test_settings_are_sent_and_only_those_that_were_set(page, server):
    visit(page, server)
    expect(page.locator("#changed")).to_have_text("")
    page.locator("#settings > summary").click()
    assert page.get_by_label("Temperature").get_attribute("placeholder") == "0"
    page.get_by_label("Samples").fill("4")
    assert page.get_by_label("Temperature").get_attribute("placeholder") == "0.7"
    page.get_by_label("Thinking budget").fill("64")
    page.get_by_label("Token limit").fill("200")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Expected answer").fill("19")
    page.get_by_label("Adapter").select_option("base")
    expect(page.locator("#changed")).to_contain_text("4 samples · temperature 0.5 · budget 64")
    ask(page)
    expect(page.locator("#facts")).to_be_visible()
    assert server.asked()[0] == {
        "prompt": QUESTION,
        "n": 4,
        "max_new_tokens": 200,
        "thinking_budget": 64,
        "temperature": 0.5,
        "seed": 7,
        "adapter": "base",
        "expected_answer": "19",
        "stream": True,
    }


@browser_test
@pytest.mark.parametrize(
    ("field", "value"), [("Samples", "17"), ("Thinking budget", "-1"), ("Seed", "1.5")]
)
def test_a_setting_out_of_range_is_pointed_at(page, server, field, value):
    visit(page, server)
    page.locator("#settings > summary").click()
    page.get_by_label(field).fill(value)
    page.locator("#settings > summary").click()
    ask(page)
    expect(page.get_by_label(field)).to_be_focused()
    assert is_open(page, "#settings")
    assert server.asked() == []


@browser_test
def test_an_empty_question_is_not_sent(page, server):
    visit(page, server)
    ask(page, "  \n ")
    expect(page.locator("#fault")).to_have_text("Write a question first.")
    expect(page.get_by_label("Question")).to_be_focused()
    assert page.get_by_label("Question").get_attribute("aria-invalid") == "true"
    page.get_by_label("Question").fill("x" * 8001)
    expect(page.locator("#fault")).to_be_hidden()
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator("#fault")).to_contain_text("8,001 characters; the server takes 8,000")
    assert server.asked() == []


@browser_test
def test_an_example_fills_the_question(page, server):
    visit(page, server)
    page.get_by_role("button", name="eggs").click()
    page.keyboard.press("Control+Enter")
    expect(page.locator("#facts")).to_be_visible()
    assert "6 eggs" in server.asked()[0]["prompt"]


# ---- Stopping, hurrying ------------------------------------------------------------------


@browser_test
@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_keeps_the_text_and_frees_the_seat_and_one_can_ask_again(page, server, how):
    server.script(stream(start(), reasoning("twelve and "), Gate("never")))
    visit(page, server)
    ask(page)
    expect(page.locator("#reasoning")).to_have_text("twelve and")
    if how == "button":
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Run", exact=True)).to_be_focused()
    else:
        page.keyboard.press(how)
    expect(page.locator("#notice-title")).to_have_text("Stopped")
    expect(page.locator("#reasoning")).to_have_text("twelve and")
    expect(page.locator("#stop")).to_be_hidden()
    assert wait_until(lambda: server.left == ["/phase1/reasoning"])
    assert is_open(page, "#thinking")

    page.get_by_role("button", name="Run again").click()
    expect(page.locator("#final")).to_have_text("19")
    expect(page.locator("#notice")).to_be_hidden()
    expect(page.locator("#reasoning")).not_to_contain_text("twelve and")


@browser_test
def test_answer_now(page, server):
    forced = done(status="forced", tokens=12)
    server.script(
        stream(start(), reasoning("Let me see"), Gate("answer now"), answer("19"), forced)
    )
    visit(page, server)
    ask(page)
    page.get_by_role("button", name="Answer now").click()
    expect(page.locator("#final")).to_have_text("19")
    expect(page.locator("#badge")).to_have_text("cut short: answer now")
    expect(page.locator("#answer-now")).to_be_hidden()
    assert server.requests[-1].path == f"/phase1/reasoning/{ID}/answer"


@browser_test
def test_a_second_run_does_not_start_while_one_is_on(page, server):
    server.script(stream(start(), reasoning("first"), Gate("end"), *ending("19")))
    visit(page, server)
    ask(page)
    expect(page.locator("#reasoning")).to_have_text("first")
    page.keyboard.press("Control+Enter")
    run = page.get_by_role("button", name="Run", exact=True)
    expect(run).to_be_disabled()
    run.click(force=True)
    server.open("end")
    expect(page.locator("#final")).to_have_text("19")
    assert len(server.asked()) == 1


# ---- What the answer says about itself ---------------------------------------------------


@browser_test
@pytest.mark.parametrize(
    ("given", "badge", "note"),
    [
        ({"status": "forced", "tokens": 64, "budget": 64}, "cut short: budget of 64", None),
        ({"status": "forced", "tokens": 40}, "cut short: to leave room for the answer", None),
        (
            {"status": "unclosed", "final": None, "answer": "", "finish_reason": "length"},
            "never finished",
            "Cut off at the limit of tokens.",
        ),
        ({"finish_reason": "deadline"}, None, "Cut off at the server's time limit."),
        ({"warnings": ["tie"]}, None, "Answers share the first place"),
        ({"warnings": ["a new one"]}, None, "a new one"),
        ({"details": {"format": "two answers"}}, None, "not in the form"),
        ({"final": None, "answer": "I do not know"}, None, "No final answer was found"),
    ],
)
def test_what_went_wrong_is_said(page, server, given, badge, note):
    visit(page, server)
    server.answer = result(**given)
    ask(page)
    expect(page.locator("#facts")).to_be_visible()
    if badge:
        expect(page.locator("#badge")).to_have_text(badge)
    else:
        expect(page.locator("#badge")).to_be_hidden()
    if note:
        expect(page.locator("#notes")).to_contain_text(note)
    assert is_open(page, "#thinking") == (given.get("status") == "unclosed")


@browser_test
def test_no_thinking_at_all(page, server):
    server.answer = result("", status="absent", tokens=0)
    server.script(stream(start(), answer("19"), event("done", server.answer)))
    visit(page, server)
    ask(page)
    expect(page.locator("#notes")).to_contain_text("without thinking aloud")
    expect(page.locator("#thinking")).to_be_hidden()


@browser_test
@pytest.mark.parametrize("correct", [True, False])
def test_the_expected_answer_is_compared(page, server, correct):
    visit(page, server)
    server.answer = result(verifier={"expected": "19", "correct": correct, "reason": "ok"})
    ask(page)
    said = "✓ Correct: 19 was expected" if correct else "✗ Not correct: 19 was expected"
    expect(page.locator("#verdict")).to_have_text(said)


@browser_test
def test_votes_of_eight_samples(page, server):
    finals = ["20", "19", "19", None, "19", "20", "19", "19"]
    samples = [sample(i, final) for i, final in enumerate(finals)]
    samples[3] = sample(3, "19", "text_outside")  # found, but it does not vote
    server.script(
        stream(
            start(8),
            reasoning("12 + 7 = 20"),
            answer("<answer>20</answer>"),
            *samples[:3],
            Gate("rest"),
            *samples[3:],
            Gate("vote"),
            done("12 and 7 make 19", votes=finals),
        )
    )
    visit(page, server)
    page.locator("#settings > summary").click()
    page.get_by_label("Samples").fill("8")
    ask(page)
    expect(page.locator("#votes-title")).to_have_text("Votes: 3 of 8 samples have finished")
    rows = page.locator("#bars li")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("192 of 8")  # "19", then "2 of 8"
    expect(page.locator("#answer")).to_be_hidden()  # the vote decides, not sample 0
    server.open("rest")
    expect(rows).to_have_text(["195 of 8", "202 of 8", "no answer1 of 8"])
    server.open("vote")
    expect(page.locator("#votes-title")).to_have_text("Votes of 8 samples")
    expect(rows).to_have_text(["195 of 8", "202 of 8", "no answer1 of 8"])
    expect(rows.nth(0)).to_have_class("winner")
    page.wait_for_function("() => document.getAnimations().length === 0")  # the bars have grown
    widths = page.locator("#bars i").evaluate_all(
        "bars => bars.map(b => Math.round(8 * b.clientWidth / b.parentElement.clientWidth))"
    )
    assert widths == [5, 2, 1]
    expect(page.locator("#final")).to_have_text("19")  # the winner, though sample 0 said 20
    said = "Winning sample: thought for 121 tokens"
    expect(page.locator("#thinking-title")).to_have_text(said)
    page.locator("#thinking > summary").click()
    expect(page.locator("#reasoning")).to_have_text("12 and 7 make 19")
    assert server.asked()[0]["n"] == 8


# ---- The model's text is only ever text --------------------------------------------------

HOSTILE = "</div><script>alert(1)</script><img src=x onerror=alert(2)><b>bold</b>&amp;"


@browser_test
def test_markup_stays_text_wherever_it_comes_from(page, server):
    server.info = described(
        model={"base": HOSTILE, "adapter": HOSTILE, "adapter_sha256": None},
        adapters=[HOSTILE],
        default_adapter=HOSTILE,
    )
    text = result(HOSTILE, final=HOSTILE, answer=HOSTILE, votes=[HOSTILE] * 2, warnings=[HOSTILE])
    text |= {"verifier": {"expected": HOSTILE, "correct": False, "reason": HOSTILE}}
    text["model"]["base"] = HOSTILE
    server.script(
        stream(start(2), reasoning(HOSTILE), answer(HOSTILE), event("done", text)),
        problem(400, "bad_request", HOSTILE, request_id=HOSTILE),
        problem(422, "validation", "", errors=[{"loc": ["body", "n"], "msg": HOSTILE}]),
    )
    before = "document.querySelectorAll('script, img, b, style').length"
    visit(page, server)
    elements = page.evaluate(before)
    ask(page, HOSTILE)
    expect(page.locator("#facts")).to_be_visible()
    page.locator("#thinking > summary").click()
    for place in ("#reasoning", "#final", "#bars", "#notes", "#verdict"):
        expect(page.locator(place)).to_contain_text(HOSTILE)
    for place in ("#facts", "#status"):  # of a model's path, the last part
        expect(page.locator(place)).to_contain_text("b>&amp;")
    ask(page)
    expect(page.locator("#notice-text")).to_have_text(HOSTILE)
    ask(page)
    expect(page.locator("#fault")).to_have_text("Samples: " + HOSTILE)
    assert page.evaluate(before) == elements


@browser_test
def test_the_checks_of_this_file_notice_a_violation(page, server):
    visit(page, server)
    page.evaluate("document.body.innerHTML = '<img src=x onerror=alert(1)><p style=color:red>'")
    page.wait_for_function("() => violations.length >= 2")
    kinds = {line.split()[0] for line in page.evaluate("violations")}
    assert kinds == {"script-src-attr", "style-src-attr", "img-src"}
    page.evaluate("violations.length = 0")


# ---- The key -----------------------------------------------------------------------------


@browser_test
def test_wrong_key_then_right_key(page, server):
    server.keys = frozenset({"right-key"})
    page.goto(server.url)
    key = page.get_by_label("This server asks for a key")
    expect(key).to_be_focused()
    expect(page.locator("#key-fault")).to_be_hidden()
    ask(page)  # the question waits for the key
    expect(key).to_be_focused()
    key.fill("wrong-key")
    key.press("Enter")
    expect(page.locator("#key-fault")).to_have_text("That key was not accepted.")
    key.fill("a key")
    key.press("Enter")
    expect(page.locator("#key-fault")).to_contain_text("without spaces")
    key.fill("right-key")
    key.press("Enter")
    expect(page.locator("#final")).to_have_text("19")  # asked again by itself
    expect(key).to_be_hidden()
    assert server.requests[-1].headers["authorization"] == "Bearer right-key"
    assert page.evaluate("[Object.entries(sessionStorage), localStorage.length]") == [
        [["rlm.key", "right-key"]],
        0,
    ]

    page.reload()
    expect(page.locator("#status")).to_contain_text("final_rlm_lora")
    expect(key).to_be_hidden()
    page.get_by_role("button", name="Forget key").click()
    expect(key).to_be_focused()
    assert page.evaluate("sessionStorage.getItem('rlm.key')") == ""


@browser_test
def test_a_key_that_stops_working_is_asked_for_again(page, server):
    visit(page, server)
    expect(page.locator("#key-form")).to_be_hidden()
    server.keys = frozenset({"new"})
    ask(page)
    page.get_by_label("This server asks for a key").fill("new")
    page.keyboard.press("Enter")
    expect(page.locator("#final")).to_have_text("19")


# ---- When the server cannot --------------------------------------------------------------


@browser_test
def test_a_full_queue_is_counted_down_and_asked_again(page, server):
    server.script(problem(503, "queue_full", "32 requests wait", retry_after=6))
    visit(page, server)
    ask(page)
    expect(page.locator("#notice-title")).to_have_text("All seats are taken")
    # Three seconds each: the browser is looked at once a second.
    expect(page.locator("#notice-text")).to_contain_text(re.compile(r"Trying again in [456] s\."))
    expect(page.locator("#notice-text")).to_contain_text(re.compile(r"Trying again in [123] s\."))
    expect(page.locator("#final")).to_have_text("19")
    expect(page.locator("#notice")).to_be_hidden()
    assert len(server.asked()) == 2


@browser_test
def test_waiting_can_be_cut_short_or_given_up(page, server):
    server.script(*[problem(429, "rate_limited", "", retry_after=600)] * 2)
    visit(page, server)
    ask(page)
    expect(page.locator("#notice-title")).to_have_text("Too many requests")
    expect(page.locator("#notice-text")).to_contain_text("600 s")
    page.get_by_role("button", name="Try now").click()
    assert wait_until(lambda: len(server.asked()) == 2)
    expect(page.locator("#notice-text")).to_contain_text("600 s")
    page.keyboard.press("Escape")
    expect(page.locator("#notice-title")).to_have_text("Stopped")
    ask(page)
    expect(page.locator("#final")).to_have_text("19")


@browser_test
def test_a_model_that_is_still_loading(page, server):
    server.not_ready = "loading"
    server.script(problem(503, "loading", ""))
    page.goto(server.url)
    expect(page.locator("#status")).to_have_text("Loading the model…")
    ask(page)
    expect(page.locator("#notice-title")).to_have_text("The model is loading")
    server.not_ready = None
    expect(page.locator("#status")).to_contain_text("final_rlm_lora")
    expect(page.locator("#final")).to_have_text("19")
    expect(page.locator("#notice")).to_be_hidden()


HTML = Reply((b"<h1>Bad gateway</h1>",), 502, "text/html")
NO_STREAM = Reply((b"<h1>Hello</h1>",), 200, "text/html")
NO_JSON = stream(start(), b"event: reasoning\ndata: {\n\n", Gate("never"))


@browser_test
@pytest.mark.parametrize(
    ("reply", "title", "text"),
    [
        (problem(503, "draining"), "The server is shutting down", "Run again when it is back"),
        (problem(503, "engine_down"), "The engine has stopped", ""),
        (problem(504, "deadline"), "Out of time", "time limit"),
        (problem(413, "body_too_large"), "The question is too long", ""),
        (problem(500, "internal"), "The server made a mistake", ""),
        (problem(400, "bad_host", "This host."), "The server refused", "This host."),
        (HTML, "The server refused", "It answered 502 and gave no reason."),
        (NO_STREAM, "The answer cannot be read", ""),
        (NO_JSON, "The answer cannot be read", ""),
    ],
)
def test_every_refusal_has_a_face(page, server, reply, title, text):
    visit(page, server)
    server.script(reply)
    ask(page)
    expect(page.locator("#notice-title")).to_have_text(title)
    expect(page.locator("#notice-text")).to_contain_text(text)
    expect(page.locator("#stop")).to_be_hidden()
    page.get_by_role("button", name="Run again").click()
    expect(page.locator("#final")).to_have_text("19")
    assert reply is not NO_JSON or wait_until(lambda: server.left)  # what is not read is let go


@browser_test
@pytest.mark.parametrize("place", ["n", "thinking_budget", "prompt"])
def test_a_refused_field_is_pointed_at(page, server, place):
    errors = [{"loc": ["body", place], "msg": "must be smaller"}]
    server.script(problem(422, "validation", "", errors=errors))
    visit(page, server)
    ask(page)
    expect(page.locator(f"#{place}")).to_be_focused()
    expect(page.locator("#fault")).to_contain_text("must be smaller")


@browser_test
@pytest.mark.parametrize(
    ("end", "title"),
    [
        (HangUp(), "The connection was lost"),
        (event("reasoning", {"sample": 0, "delta": ""}), "The connection was lost"),  # no `done`
        (event("error", problem_body(504, "deadline", "")), "Out of time"),
    ],
)
def test_a_break_in_the_middle_keeps_the_text(page, server, end, title):
    server.script(stream(start(), reasoning("twelve and seven"), Gate("break"), end))
    visit(page, server)
    ask(page)
    expect(page.locator("#reasoning")).to_have_text("twelve and seven")
    server.open("break")
    expect(page.locator("#notice-title")).to_have_text(title)
    expect(page.locator("#notice-text")).to_contain_text("What arrived is kept below.")
    expect(page.locator("#reasoning")).to_have_text("twelve and seven")
    assert is_open(page, "#thinking")
    page.get_by_role("button", name="Run again").click()
    expect(page.locator("#final")).to_have_text("19")


@browser_test
def test_a_server_that_falls_silent_is_given_up(page, server):
    page.clock.install()
    server.script(stream(start(), reasoning("twelve"), Gate("never")))
    visit(page, server)
    ask(page)
    expect(page.locator("#reasoning")).to_have_text("twelve")
    page.clock.fast_forward(55_000)
    expect(page.locator("#stop")).to_be_visible()
    page.clock.fast_forward(6_000)
    expect(page.locator("#notice-title")).to_have_text("No word from the server")
    expect(page.locator("#reasoning")).to_have_text("twelve")
    assert wait_until(lambda: server.left == ["/phase1/reasoning"])


@browser_test
def test_a_server_that_is_gone(page, server):
    visit(page, server)
    page.context.set_offline(True)
    ask(page)
    expect(page.locator("#notice-title")).to_have_text("The server cannot be reached")
    expect(page.locator("#status")).to_have_text("Not reachable")
    page.context.set_offline(False)
    expect(page.locator("#status")).to_have_class("ready")
    page.get_by_role("button", name="Run again").click()
    expect(page.locator("#final")).to_have_text("19")


# ---- Server-sent events ------------------------------------------------------------------


@browser_test
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_stream_in_single_bytes(page, server, end):
    text = "π ≈ 3, 🍏🍏"
    two_lines = ("event:reasoning", 'data: {"sample": 0,', f'data:"delta": "{text}"}}', "", "")
    events = (
        event("start", {"id": ID, "n": 1}, end)
        + end.join((": ping", "", "retry: 5", *two_lines)).encode()
        + event("unheard-of", {"a": 1}, end)
        + event("done", result(text), end)
    )
    server.script(stream(*crumbs(events)))
    visit(page, server)
    ask(page)
    expect(page.locator("#final")).to_have_text("19")
    page.locator("#thinking > summary").click()
    expect(page.locator("#reasoning")).to_have_text(text)


@browser_test
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_events_do_not_depend_on_where_the_text_is_cut(page, server, end):
    lines = [
        "event: a",
        "data: 1",
        "data:2",
        "",
        ": ping",
        "",
        "data",
        "data:  x: y",
        "",
        "data: cut",
    ]
    visit(page, server)
    wrong = page.evaluate(
        """([text, expected]) => {
            const wrong = [];
            for (let i = 0; i <= text.length; i++) for (let j = i; j <= text.length; j++) {
                const seen = [], feed = eventParser((event, data) => seen.push([event, data]));
                [text.slice(0, i), text.slice(i, j), text.slice(j)].forEach(feed);
                if (JSON.stringify(seen) !== JSON.stringify(expected)) wrong.push([i, j, seen]);
            }
            return wrong;
        }""",
        [end.join(lines), [["a", "1\n2"], ["message", "\n x: y"]]],
    )
    assert wrong == []


# ---- Everybody ---------------------------------------------------------------------------


@browser_test
@pytest.mark.parametrize("options", [{"viewport": {"width": 360, "height": 740}}])
def test_nothing_scrolls_sideways_on_a_small_screen(page, server, options):
    def fits() -> bool:
        return page.evaluate(
            "document.documentElement.scrollWidth <= innerWidth && "
            "[...document.querySelectorAll('button, input, select, textarea, summary')]"
            ".filter(e => e.checkVisibility())"
            ".every(e => e.getBoundingClientRect().right <= innerWidth)"
        )

    long = "9" * 400
    server.keys = frozenset({"k"})
    server.info = described(model={"base": "B" * 90, "adapter": "a" * 90, "adapter_sha256": None})
    server.script(
        stream(start(8), reasoning(long), Gate("end"), done(long, votes=[long] * 3 + ["1"])),
        problem(400, "bad_request", long, request_id="r" * 64),
    )
    page.goto(server.url)
    expect(page.locator("#key-form")).to_be_visible()
    assert fits()
    page.get_by_label("This server asks for a key").fill("k")
    page.keyboard.press("Enter")
    page.locator("#settings > summary").click()
    ask(page, long)
    expect(page.locator("#reasoning")).to_be_visible()
    assert fits()
    server.open("end")
    expect(page.locator("#facts")).to_be_visible()
    page.locator("#thinking > summary").click()
    assert fits()
    ask(page)
    expect(page.locator("#notice-text")).to_have_text(long)
    assert fits()


@browser_test
def test_all_of_it_by_keyboard(page, server):
    server.script(
        stream(start(), reasoning("let me see"), Gate("answer now"), *ending("19")),
        stream(start(), reasoning("again"), Gate("never")),
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
    page.keyboard.type(QUESTION)
    press("Control+Enter")
    expect(page.locator("#answer-now")).to_be_visible()
    tab_to("#answer-now")
    press("Enter")
    expect(page.locator("#final")).to_have_text("19")
    expect(page.locator("#run")).to_be_focused()  # the button that had the focus is gone
    tab_to("#settings > summary")
    press("Enter")
    tab_to("#n")
    page.keyboard.type("2")
    tab_to("#thinking > summary")
    press("Space")
    assert is_open(page, "#thinking")
    press("Control+Enter")
    expect(page.locator("#reasoning")).to_have_text("again")
    press("Escape")
    expect(page.locator("#notice-title")).to_have_text("Stopped")
    assert [body.get("n") for body in server.asked()] == [None, 2]


@browser_test
def test_a_block_that_the_reader_folded_stays_folded_and_one_being_read_stays_open(page, server):
    pieces = (start(), reasoning("let me see"), Gate("1"), reasoning("…"), Gate("2"), *ending("19"))
    server.script(
        stream(*pieces), stream(start(), reasoning("let me see"), Gate("3"), *ending("1"))
    )
    visit(page, server)
    ask(page)
    expect(page.locator("#reasoning")).to_be_visible()
    page.locator("#thinking > summary").click()
    server.open("1")
    expect(page.locator("#reasoning")).to_contain_text("see…")
    assert not is_open(page, "#thinking")
    server.open("2")
    expect(page.locator("#final")).to_have_text("19")
    assert not is_open(page, "#thinking")

    ask(page)
    expect(page.locator("#reasoning")).to_have_text("let me see")
    page.locator("#reasoning").select_text()
    server.open("3")
    expect(page.locator("#final")).to_have_text("1")
    assert is_open(page, "#thinking")


@browser_test
def test_a_screen_reader_is_not_flooded(page, server):
    deltas = [part for i in range(40) for part in (reasoning(f"word {i} "), Gate(f"{i}"))]
    server.script(stream(start(), *deltas, *ending("19")))
    visit(page, server)
    page.evaluate(
        "window.said = []; new MutationObserver(() => said.push(live.textContent))"
        ".observe(live, {childList: true})"
    )
    assert page.locator("#live").get_attribute("aria-live") == "polite"
    ask(page)
    for i in range(40):
        expect(page.locator("#reasoning")).to_contain_text(f"word {i}")
        server.open(f"{i}")
    page.wait_for_function("() => said.includes('Answer: 19')")
    assert page.evaluate("said.length") <= 4
    others = page.locator("[aria-live], [role=alert], [role=status], [role=log], output")
    expect(others).to_have_count(1)


@browser_test
@pytest.mark.parametrize("options", [{"reduced_motion": "reduce"}, {}])
def test_nothing_moves_for_those_who_asked_for_that(page, server, options):
    server.script(stream(start(), reasoning("let me see"), Gate("never")))
    visit(page, server)
    ask(page)
    expect(page.locator("#reasoning")).to_have_text("let me see")
    assert bool(page.evaluate("document.getAnimations().length")) != bool(options)


@browser_test
@pytest.mark.parametrize("options", [{"color_scheme": "light"}, {"color_scheme": "dark"}])
def test_text_stands_out_from_its_ground(page, server, options):
    """Contrast of at least 4.5 for text, 3 for edges of controls (WCAG 2.2, 1.4.3, 1.4.11)."""
    visit(page, server)
    read = "name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()"
    colours = {
        name: page.evaluate(read, name)
        for name in ("paper", "field", "ink", "soft", "edge", "accent", "on-accent")
    }

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(c * 2 for c in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(colours[one]), luminance(colours[other])))
        return (high + 0.05) / (low + 0.05)

    for ground in ("paper", "field"):
        assert min(contrast(text, ground) for text in ("ink", "soft", "accent")) >= 4.5
        assert contrast("edge", ground) >= 3
    assert contrast("on-accent", "accent") >= 4.5
    assert (luminance(colours["paper"]) > 0.5) == (options["color_scheme"] == "light")


# ---- Copy as code ------------------------------------------------------------------------


@browser_test
@pytest.mark.parametrize("language", ["curl", "Python"])
def test_copied_code_asks_the_same_question(page, server, language):
    server.keys = frozenset({"secret-key"})
    question = 'It\'s "12" + 7 $HOME `x` \\n\nAnd 🍏?'
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(server.url)
    page.get_by_label("This server asks for a key").fill("secret-key")
    page.keyboard.press("Enter")
    page.locator("#settings > summary").click()
    page.get_by_label("Samples").fill("3")
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name=language).click()
    expect(page.locator("#copy-" + language.lower())).to_have_text("copied")
    code = page.evaluate("navigator.clipboard.readText()")
    assert "secret-key" not in code

    if language == "curl" and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["bash", "-c", code] if language == "curl" else [sys.executable, "-c", code]
    env = os.environ | {"RLM_API_KEY": "secret-key"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=True)
    assert server.asked() == [{"prompt": question, "n": 3}]
    printed = json.loads(ran.stdout)["response"] if language == "curl" else ran.stdout.strip()
    assert printed == server.answer["response"]


@browser_test
def test_code_can_be_taken_by_hand_where_the_clipboard_is_closed(page, server):
    visit(page, server)
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.get_by_label("Question").fill(QUESTION)
    page.get_by_role("button", name="curl").click()
    expect(page.locator("#snippet")).to_be_focused()
    assert QUESTION in page.evaluate("getSelection().toString()")
