"""The page of a run's rollouts: what is in it, hostile text, and itself in Chromium."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import time

import pytest
from watched_browser import expect, watched_page

from rlm.cli import UsageError
from rlm.runs import view

browser_test = pytest.mark.browser
HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)> @SCRIPT@ \u2028 \ud800 <!--"
)
RIGHT = "<think>\n12 + 7 = 19\n</think>\n<answer>19</answer>"
FLAWED = "<think>\n12 + 7 = 18\n</think>\n<answer>19</answer>"


def write_run(path, steps=3, groups=2, size=4, text=RIGHT, **more):
    """A run directory as training leaves it, as far as the page looks."""
    path.mkdir()
    rows = [
        {
            "step": step,
            "problem": f"p{step}-{g}",
            "question": f"What is 12 + 7 in step {step}?",
            "answer": "19",
            "answer_type": "number",
            "completions": [text, *["<think>\nno\n</think>\n<answer>18</answer>"] * (size - 1)],
            "truncated": [False] * (size - 1) + [True],
            "verdicts": ["correct", *["wrong"] * (size - 1)],
            "rewards": [1.0, *[0.0] * (size - 1)],
            "advantages": [1.5, *[-0.5] * (size - 1)],
            **more,
        }
        for step in range(steps)
        for g in range(groups)
    ]
    (path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [{"step": step, "reward/mean": 0.25, "time/sample": 1.0} for step in range(steps)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return path


def page_of(tmp_path, *runs):
    output = tmp_path / "page.html"
    assert view.main(view.ViewConfig(*runs[:1], *(runs[1:] or [None]), output)) == 0
    return output


def data_in(html):
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    return json.loads(data)


def test_the_page_holds_the_run(tmp_path, capsys):
    output = page_of(tmp_path, write_run(tmp_path / "run", text=FLAWED, tool_calls=[[[0, 3]]] * 4))
    assert "24 rollouts" in capsys.readouterr().out
    (run,) = data_in(output.read_text())
    assert run["steps"] == {str(step): {"reward/mean": 0.25} for step in range(3)}
    first, *_, last = run["groups"][0]["completions"]
    assert first == {
        "text": FLAWED, "reward": 1.0, "advantage": 1.5, "verdict": "correct", "truncated": False,
        "tool_calls": [[0, 3]], "flawed": True,
    }  # fmt: skip
    assert (last["truncated"], last["flawed"]) == (True, False)


def test_the_command_takes_the_run_without_a_flag(tmp_path):
    run = write_run(tmp_path / "run")
    rlm = "from rlm.scripts import main; main()"
    command = [sys.executable, "-c", rlm, "view", str(run), "--compare", str(run)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"written: {run}/rollouts.html (48 rollouts" in said
    assert len(data_in((run / "rollouts.html").read_text())) == 2


def test_completions_that_are_no_answers_have_no_verdict(tmp_path):
    run = write_run(tmp_path / "run", text="agent one", verdicts=["no_reasoning"] * 4)
    (shown,) = data_in(page_of(tmp_path, run).read_text())
    assert {c["verdict"] for group in shown["groups"] for c in group["completions"]} == {None}


def test_a_reward_that_is_no_number_is_shown_as_none(tmp_path):
    run = write_run(tmp_path / "run", rewards=[float("nan"), float("inf"), None, 0.5])
    (shown,) = data_in(page_of(tmp_path, run).read_text())
    rewards = [row["reward"] for row in shown["groups"][0]["completions"]]
    assert rewards == [None, None, None, 0.5]


def test_what_a_model_wrote_stays_data(tmp_path):
    html = page_of(
        tmp_path, write_run(tmp_path / "run", text=HOSTILE, question=HOSTILE)
    ).read_text()
    assert len(re.findall("<script", html)) == 2
    assert "<img" not in html
    assert "<!--" not in html
    run = data_in(html)[0]["groups"][0]
    assert run["question"] == HOSTILE == run["completions"][0]["text"]


def test_the_page_runs_its_own_script_alone(tmp_path):
    html = page_of(tmp_path, write_run(tmp_path / "run")).read_text()
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in html
    assert "default-src 'none'" in html
    assert not re.search(r"https?://|url\(|@import|\sstyle=|\son[a-z]+=", html)
    script = (view.PAGE / "view.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_a_directory_without_rollouts_is_a_mistake(tmp_path):
    with pytest.raises(UsageError, match="holds no rollouts; name the directory of a run"):
        view.main(view.ViewConfig(tmp_path))
    for number, name in enumerate(("first", "second", "old.prev")):
        write_run(tmp_path / name)
        os.utime(tmp_path / name / "samples.jsonl", (number, number))
    listed = f"the newest first: {tmp_path / 'second'}, {tmp_path / 'first'}$"
    for path in (tmp_path, tmp_path / "typo"):
        with pytest.raises(UsageError, match=listed):
            view.main(view.ViewConfig(path))


# ---- In Chromium ---------------------------------------------------------------------------


@pytest.fixture
def page(browser):
    with watched_page(browser, "file:", viewport={"width": 1200, "height": 800}) as watched:
        yield watched


@browser_test
def test_steps_filters_and_a_tool(page, tmp_path):
    run = write_run(tmp_path / "run", text=FLAWED, tool_calls=[[[15, 19]], [], [], []])
    page.goto(page_of(tmp_path, run).as_uri())
    expect(page.locator("nav button")).to_have_count(3)
    expect(page.locator(".completion")).to_have_count(8)
    expect(page.locator(".completion ins").first).to_have_text("= 18")
    first = page.locator(".completion").first
    expect(first).to_contain_text("correct")
    expect(first.locator("pre")).to_have_text(FLAWED)
    expect(first.locator("pre")).to_have_class("up")
    expect(page.locator(".completion pre").nth(1)).to_have_class("down")
    page.get_by_role("button", name="step 3").click()
    expect(page.locator("h3").first).to_have_text("What is 12 + 7 in step 2?")
    for name, count in (("right for a wrong reason", 6), ("truncated", 6), ("wrong", 18)):
        page.get_by_label(name, exact=True).check()
        expect(page.locator("h2")).to_contain_text(f"{count} completions")
        expect(page.locator(".completion")).to_have_count(count)


@browser_test
def test_hostile_text_is_shown_as_it_is(page, tmp_path):
    run = write_run(tmp_path / "run", text=HOSTILE, question=HOSTILE)
    page.goto(page_of(tmp_path, run).as_uri())
    expect(page.locator("pre").first).to_contain_text("</script><script>alert(1)</script><img")
    expect(page.locator("h3").first).to_contain_text("onerror=alert(2)")


@browser_test
def test_two_runs_stand_side_by_side(page, tmp_path):
    runs = [write_run(tmp_path / name, steps=n) for name, n in (("one", 2), ("two", 4))]
    page.goto(page_of(tmp_path, *runs).as_uri())
    expect(page.locator("nav button")).to_have_count(4)
    expect(page.locator("#runs > section")).to_have_count(2)
    left, right = (page.locator("#runs > section").nth(i).bounding_box() for i in (0, 1))
    assert abs(left["y"] - right["y"]) < 1
    assert abs(left["width"] - right["width"]) < 2
    page.get_by_role("button", name="step 4").click()
    expect(page.locator("h2").first).to_contain_text("0 completions")


@browser_test
def test_ten_thousand_rollouts_open_in_two_seconds(page, tmp_path):
    text = f"<think>\n{'12 + 7 = 19; ' * 25}\n</think>\n<answer>19</answer>"
    run = write_run(tmp_path / "run", steps=100, groups=20, size=5, text=text)
    output = page_of(tmp_path, run)
    began = time.monotonic()
    page.goto(output.as_uri())
    expect(page.locator(".completion").first).to_be_visible()
    assert time.monotonic() - began < 2
    expect(page.locator("nav button")).to_have_count(100)
    page.get_by_label("wrong", exact=True).check()
    expect(page.locator("h2")).to_contain_text("8000 completions")
    assert page.locator(".completion").count() < 400  # made as they come into sight
    made = page.locator(".completion").count()
    page.locator("#runs > section").evaluate("e => e.scrollTo(0, e.scrollHeight)")
    expect(page.locator(".completion").nth(made)).to_be_attached()
