"""The example requests, and the script that records their answers."""

import json
import shlex
from pathlib import Path

import pytest
from scripted_reasoning import ReasoningServer, problem

from examples.record_prompts import RecordConfig, as_http, is_right, main
from rlm.cli.options import UsageError
from rlm.runs.checkpoints import file_hash

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
BOOK = json.loads((EXAMPLES / "prompts.json").read_text())


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """Write a file with two questions.

    The second question contains characters of the shell. The scripted server answers it correctly.
    """
    path = tmp_path / "prompts.json"
    odd = {"prompt": 'It\'s $HOME, "12" + 7 = π?', "n": 2}
    prompts = [
        {"name": "plain", "request": {"prompt": "1 + 1?"}, "gold": "2"},
        {"name": "odd", "request": odd, "gold": "19"},
    ]
    path.write_text(json.dumps({"model": None, "prompts": prompts}))
    return path


def test_the_recorded_file_is_one_run_of_the_shipped_adapter():
    """Right answers come first and are counted. requests.http contains the same requests."""
    assert len({entry["name"] for entry in BOOK["prompts"]}) == len(BOOK["prompts"]) >= 10
    for entry in BOOK["prompts"]:
        assert json.loads(shlex.split(entry["curl"])[-1]) == entry["request"]
        assert f"{RecordConfig().url}/" in entry["curl"]
    shipped = file_hash(ROOT / "weights/final_rlm_lora/adapter_model.safetensors")
    assert BOOK["model"]["adapter_sha256"] == shipped
    right = [is_right(e["answer"]["response"], e["gold"]) for e in BOOK["prompts"]]
    assert right == sorted(right, reverse=True) == [e["right"] for e in BOOK["prompts"]]
    assert sum(right) >= 1
    assert BOOK["score"] == f"{sum(right)} of {len(right)} right"
    http = (EXAMPLES / "requests.http").read_text()
    assert BOOK["score"] in http
    assert as_http(http, BOOK) == http
    other = BOOK | {"prompts": BOOK["prompts"][::-1], "score": "0 of 12 right"}
    assert as_http(http, other) != http == as_http(as_http(http, other), BOOK)


def test_answers_and_curl_lines_are_written(book, monkeypatch):
    monkeypatch.delenv("RLM_API_KEY", raising=False)
    with ReasoningServer() as server:
        assert main(RecordConfig(url=server.url.rstrip("/"), file=book)) == 0
    written = json.loads(book.read_text())
    assert written["model"]["adapter"] == "final_rlm_lora"
    assert (written["score"], [e["name"] for e in written["prompts"]]) == (
        "1 of 2 right", ["odd", "plain"],
    )  # fmt: skip
    for entry, body in zip(written["prompts"], reversed(server.asked()), strict=True):
        words = shlex.split(entry["curl"])
        assert words[:3] == ["curl", "-sS", server.url + "phase1/reasoning"]
        assert json.loads(words[-1]) == entry["request"] == body
        assert "Bearer" not in entry["curl"]
        assert entry["answer"]["final_answer"] == "19"
        assert "request_id" not in entry["answer"]
    assert list(book.parent.iterdir()) == [book]


def test_a_key_is_sent_and_not_written(book, monkeypatch):
    monkeypatch.setenv("RLM_API_KEY", "the-key")
    with ReasoningServer() as server:
        server.keys = frozenset({"the-key"})
        main(RecordConfig(url=server.url, file=book))
    assert "Bearer $RLM_API_KEY" in book.read_text()
    assert "the-key" not in book.read_text()


def test_nothing_is_written_when_one_is_refused(book, monkeypatch):
    monkeypatch.delenv("RLM_API_KEY", raising=False)
    before = book.read_text()
    with ReasoningServer() as server:
        server.script(problem(503, "queue_full", "full"))
        with pytest.raises(UsageError, match=r"503.*full"):
            main(RecordConfig(url=server.url, file=book))
        server.keys = frozenset({"k"})
        with pytest.raises(UsageError, match="RLM_API_KEY"):
            main(RecordConfig(url=server.url, file=book))
    with pytest.raises(UsageError, match=r"python server\.py"):
        main(RecordConfig(url=server.url, file=book))
    assert book.read_text() == before
