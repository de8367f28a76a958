"""The page of a run: its contents, hostile texts, the server for --follow, and Chromium tests."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import threading
import urllib.error
import urllib.request
from urllib.parse import quote

import pytest
from watched_browser import expect, watched_page

from rlm.cli import UsageError, parse
from rlm.runs import replace_file, run_page, view
from rlm.runs.follow import open_server

browser_test = pytest.mark.browser
HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)> @SCRIPT@ \u2028 \ud800 <!--"
)
RIGHT = "<think>\n12 + 7 = 19\n</think>\n<answer>19</answer>"
FLAWED = "<think>\n12 + 7 = 18\n</think>\n<answer>19</answer>"


def write_run(path, steps=3, groups=2, size=4, text=RIGHT, **more):
    """Write the files of a run directory that the page reads."""
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
    metrics = [{"step": step, "reward/mean": 0.25, "time/sample": 600.0} for step in range(steps)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return path


def page_of(tmp_path, *runs):
    output = tmp_path / "page.html"
    assert view.main(view.ViewConfig(*runs[:1], *(runs[1:] or [None]), output)) == 0
    return output


def data_in(html):
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    return json.loads(data)["runs"]


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


def test_the_command_takes_the_run_without_a_flag(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert view.main(parse(view.ViewConfig, [str(run), "--compare", str(run)])) == 0
    assert f"written: {run}/rollouts.html (48 rollouts" in capsys.readouterr().out
    assert len(data_in((run / "rollouts.html").read_text())) == 2


def test_a_reward_that_is_no_number_is_shown_as_none(tmp_path):
    run = write_run(tmp_path / "run", rewards=[float("nan"), float("inf"), None, 0.5])
    (shown,) = data_in(page_of(tmp_path, run).read_text())
    rewards = [row["reward"] for row in shown["groups"][0]["completions"]]
    assert rewards == [None, None, None, 0.5]


def test_one_validation_problem_has_a_curve_without_a_band(tmp_path):
    """The interval is infinite, which JSON stores as null."""
    run = write_run(tmp_path / "run")
    row = {"step": 0, "eval/reward": 0.5, "eval/reward_low": None, "eval/reward_high": None}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (shown,) = data_in(page_of(tmp_path, run).read_text())
    assert shown["curves"]["validation reward"] == [[1, 0.5, 0.5, 0.5, 0.5]]


def test_a_page_that_cannot_be_written_is_a_mistake(tmp_path):
    run = write_run(tmp_path / "run")
    with pytest.raises(UsageError, match=f"^{tmp_path} cannot be written: Is a directory$"):
        view.main(view.ViewConfig(run, output=tmp_path))


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
    assert set(re.findall(r"https?://[^\"' ]+", html)) == {"http://www.w3.org/2000/svg"}  # a name
    assert not re.search(r"url\(|@import|\sstyle=|\son[a-z]+=", html)
    script = (run_page.PAGE / "view.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


@pytest.mark.parametrize("name", ["", "one"])
def test_a_directory_without_rollouts_is_a_mistake(tmp_path, name):
    if name:
        write_run(tmp_path / name)
    which = (
        f"runs with rollouts, .*: {tmp_path}/one" if name else "pass the directory of a GRPO run"
    )
    with pytest.raises(UsageError, match=f"contains no rollouts; {which}"):
        view.main(view.ViewConfig(tmp_path))
    (tmp_path / "mine").mkdir()
    for number, name in enumerate(("first", "mine/second", "old.prev")):
        write_run(tmp_path / name)
        os.utime(tmp_path / name / "samples.jsonl", (number, number))
    listed = f"newest first: .*{tmp_path / 'mine/second'}, {tmp_path / 'first'}$"
    for path in (tmp_path, tmp_path / "typo"):
        with pytest.raises(UsageError, match=listed):
            view.main(view.ViewConfig(path))


def test_curves_have_the_bands_of_what_was_measured(tmp_path):
    run = write_run(tmp_path / "run")
    rows = [
        {"step": 0, "reward/mean": 0.25, "eval/start_accuracy": 0.5, "time/learn": 2.0}
        | {"eval/start_accuracy_low": 0.4, "eval/start_accuracy_high": 0.6},
        {"step": 1, "reward/mean": 0.75, "eval/accuracy": 0.6, "time/learn": 4.0},
        {"step": 2, "reward/mean": None, "completion/length_mean": 40.0, "time/learn": 6.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.json").write_text('{"steps": 13, "max_minutes": null}')
    found = run_page.read_run(run)
    # Two steps differ by 0.5, which is a standard deviation of 0.354; 1.96 of it, and over root 2.
    assert found["curves"]["reward"] == [[1, 0.25, 0.25, -0.443, 0.943], [2, 0.75, 0.5, 0.01, 0.99]]
    validation = [[0, 0.5, 0.5, 0.4, 0.6], [2, 0.6, 0.6, 0.6, 0.6]]  # one without an interval
    assert found["curves"]["validation, %"] == validation
    assert found["curves"]["length, tokens"] == [[3, 40.0, 40.0, 40.0, 40.0]]
    assert found["curves"]["entropy, nats"] == []
    assert (found["total"], found["left"]) == (13, 10 * 4.0)
    (run / "config.json").write_text('{"steps": 13, "max_minutes": 0.5}')
    for began, left in ((100, 30 - 12), (106, 30 - 6), (60, 0), (113, 30)):
        # A process writes its options when it begins: of a resumed run, those of the last process.
        os.utime(run / "config.json", (began, began))
        os.utime(run / "metrics.jsonl", (112, 112))
        assert run_page.read_run(run)["left"] == left


# ---- The server that follows a run ---------------------------------------------------------


@pytest.fixture
def following(tmp_path):
    server = open_server([tmp_path / "run"], 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as reply:
        return reply.read().decode()


def append(run, **more):
    """Append a step to the files of a run, with the metrics first."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = (run / name).read_text().splitlines()
        row = json.loads(lines[-1])
        row |= {"step": row["step"] + 1} | more
        (run / name).write_text("".join(f"{line}\n" for line in [*lines, json.dumps(row)]))


def test_a_page_is_told_what_is_new_and_a_run_may_begin_anew(following, tmp_path):
    def news(mark):
        (run,) = json.loads(get(f"{following}news?mark={quote(mark)}"))
        return run

    first = news("")
    assert (first["groups"], first["steps"], first["age"]) == ([], {}, None)  # no run is there yet
    run = write_run(tmp_path / "run")
    found = news(first["mark"])
    assert ([g["step"] for g in found["groups"]], len(found["steps"])) == ([0, 0, 1, 1, 2, 2], 3)
    again = news(found["mark"])
    assert (again["groups"], again["again"], again["mark"]) == ([], False, found["mark"])
    assert "curves" not in again  # nothing is sent twice
    append(run)
    with (run / "samples.jsonl").open("a") as stream:
        stream.write('{"step": 4, "prob')  # a line that is being written
    more = news(found["mark"])
    assert ([g["step"] for g in more["groups"]], more["again"]) == ([3], False)
    lines = (run / "samples.jsonl").read_text().splitlines(keepends=True)
    (run / "samples.jsonl").write_text("".join(lines[:2]))  # a resume cuts the log
    cut = news(more["mark"])
    assert ([g["step"] for g in cut["groups"]], cut["again"]) == ([0, 0], True)
    for name in ("samples.jsonl", "metrics.jsonl"):
        (run / name).write_text((run / name).read_text().replace("0.25", "0.5") * 3)
    other = news(more["mark"])  # longer than before, and not the same
    assert (len(other["groups"]), other["again"]) == (6, True)


def test_a_run_may_be_resumed_while_its_log_is_read(tmp_path, monkeypatch):
    """A mark that the server does not know would stop the page."""
    run, loads = write_run(tmp_path / "run"), json.loads

    def cut(line):
        replace_file(run / "samples.jsonl", "")
        return loads(line)

    monkeypatch.setattr(json, "loads", cut)
    assert run_page.MARK.fullmatch(run_page.read_run(run)["mark"])
    monkeypatch.undo()
    assert run_page.read_run(run)["groups"] == []


def test_only_this_machine_by_its_name_is_answered(following):
    for headers, path, status in (
        ({"Host": "evil.example"}, "", 403),
        ({"Host": "evil.example"}, "news?mark=", 403),
        ({}, "news", 404),
        ({}, "news?mark=../x", 404),
        ({}, "news?mark=&mark=", 404),  # two marks, one run
        ({}, "samples.jsonl", 404),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(f"{following}{path}", **headers)
        assert refused.value.code == status
    page = get(following, Host=following.split("/")[2].replace("127.0.0.1", "localhost"))
    assert "connect-src 'self'" in page


def test_a_damaged_config_is_told_to_the_page(following, tmp_path):
    (write_run(tmp_path / "run") / "config.json").write_text('{"steps": ')
    for path in ("", "news?mark="):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(f"{following}{path}")
        assert refused.value.code == 500
        assert "config.json is not a JSON object" in refused.value.read().decode()


def test_a_port_that_is_taken_is_a_mistake(following, tmp_path):
    port = int(following.split(":")[2].strip("/"))
    with pytest.raises(UsageError, match="choose another --port"):
        open_server([tmp_path], port)


# ---- In Chromium ---------------------------------------------------------------------------


@pytest.fixture
def page(browser):
    with watched_page(browser, "file:", viewport={"width": 1200, "height": 800}) as watched:
        yield watched


@browser_test
def test_steps_filters_search_and_a_tool(page, tmp_path):
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
    expect(page.locator("article .facts").first).to_contain_text("reference answer 19")
    expect(page.locator("article .facts").first).to_contain_text("rewards 1.00 0.00 0.00 0.00")
    page.get_by_role("button", name="step 3").click()
    expect(page.locator("h3").first).to_have_text("What is 12 + 7 in step 2?")
    for name, count in (("right for a wrong reason", 6), ("truncated", 6), ("wrong", 18)):
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.locator("h2")).to_contain_text(f"{count} completions")
        expect(page.locator(".completion")).to_have_count(count)
    page.get_by_role("button", name="a step", exact=True).click()
    page.get_by_label("search the texts").fill("IN STEP 1")
    expect(page.locator("h2")).to_contain_text("8 completions")
    figure = page.locator("#curves figure")
    expect(figure).to_contain_text(["reward 0.25"])  # what was not measured has no curve
    box = figure.locator(".plot").bounding_box()
    page.mouse.click(box["x"] + 1, box["y"] + 20)
    expect(page.locator("h3").first).to_have_text("What is 12 + 7 in step 0?")


@browser_test
def test_arrow_keys_go_from_group_to_group_and_the_first_has_a_signal(page, tmp_path):
    run = write_run(tmp_path / "run", steps=3)
    groups = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for group in groups[:3]:  # all of step 0, the first of step 1
        group |= {"rewards": [0.0] * 4, "advantages": [0.0] * 4}
    (run / "samples.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    page.goto(page_of(tmp_path, run).as_uri())
    facts = page.locator("article .facts:not(.completion *)")
    expect(facts.first).to_contain_text("step 2p1-1")  # signal first
    expect(page.locator("nav [aria-current=true]")).to_contain_text("step 2")
    focused = page.locator("article:focus")
    for key, seen in (
        *(("ArrowRight", name) for name in ("p1-1", "p1-0", "p2-0", "p2-1", "p2-1")),
        *(("ArrowLeft", name) for name in ("p2-0", "p1-0", "p1-1", "p0-1", "p0-0", "p0-0")),
    ):
        page.keyboard.press(key)
        expect(focused).to_contain_text(seen)
    page.get_by_label("order").select_option("best")
    page.keyboard.press("ArrowRight")  # the list has let the keys go
    expect(focused).to_have_count(1)
    page.get_by_label("search the texts").focus()
    page.keyboard.press("ArrowRight")
    expect(focused).to_have_count(0)


@browser_test
def test_completions_that_are_no_answers_have_no_verdict(page, tmp_path):
    run = write_run(tmp_path / "run", text="agent one", verdicts=["no_reasoning"] * 4)
    page.goto(page_of(tmp_path, run).as_uri())
    expect(page.locator(".completion").first).to_contain_text("agent one")
    expect(page.get_by_text("no reasoning")).to_have_count(0)
    page.get_by_role("button", name="wrong", exact=True).click()
    expect(page.locator("h2")).to_contain_text("18 completions")  # those without a reward


@browser_test
def test_a_page_follows_its_run_through_a_restart(browser, following, tmp_path):
    with watched_page(browser, following) as page:
        page.goto(following)
        expect(page.locator("#state")).to_have_text("waits for its first step")
        run = write_run(tmp_path / "run", steps=2)
        (run / "config.json").write_text('{"steps": 5}')
        expect(page.locator("#state")).to_contain_text("step 2 of 5 · about 30 min left")
        expect(page.locator("h3").first).to_have_text("What is 12 + 7 in step 1?")
        append(run, question="The newest?")
        expect(page.locator("h3")).to_have_text(["The newest?"])
        page.get_by_role("button", name="step 1").click()  # who reads is left alone
        append(run, question="Another?")
        expect(page.locator("nav button")).to_have_count(4)
        expect(page.locator("h3").first).to_have_text("What is 12 + 7 in step 0?")
        page.get_by_role("button", name="wrong", exact=True).click()
        append(run)
        page.get_by_role("button", name="show what is new").click()
        expect(page.locator("h2")).to_contain_text("21 completions")
        for name in ("metrics.jsonl", "samples.jsonl"):  # begun anew
            lines = (run / name).read_text().splitlines(keepends=True)
            (run / name).write_text(lines[0])
        expect(page.locator("nav button")).to_have_count(1)
        expect(page.locator("#state")).to_contain_text("step 1 of 5")
        (run / ".lock").write_text(f"process 4194304 on {socket.gethostname()}\n")  # of nobody
        expect(page.locator("#state")).to_contain_text("stopped after step 1 of 5")


@browser_test
def test_two_runs_stand_side_by_side(page, tmp_path):
    runs = [write_run(tmp_path / name, steps=n) for name, n in (("one", 2), ("two", 4))]
    page.goto(page_of(tmp_path, *runs).as_uri())
    expect(page.locator("nav button")).to_have_count(4)
    expect(page.locator("#runs > section")).to_have_count(2)
    left, right = (page.locator("#runs > section").nth(i).bounding_box() for i in (0, 1))
    assert abs(left["y"] - right["y"]) < 1
    assert page.locator("#curves .run1").count() > 0
    assert abs(left["width"] - right["width"]) < 2
    page.get_by_role("button", name="step 4").click()
    expect(page.locator("h2").first).to_contain_text("0 completions")
