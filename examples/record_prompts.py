"""Ask a running server the questions of prompts.json and record the answers.

    python server.py &
    python examples/record_prompts.py

Each question gets its curl command, the answer, and whether the answer equals `gold`. Questions
with right answers come first. `model` describes the model that answered, and `score` counts the
right answers. The requests are also written to requests.http in the same folder, in the same order.
If the server needs a key, set RLM_API_KEY. Nothing is written unless all questions were answered.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from rlm.cli import UsageError, flag, run_main, terminal
from rlm.grading import grade, parse_number
from rlm.runs import replace_file, replace_json

# Fields kept from a response. The others (ids, times, parts of the text) repeat these or would
# differ in every run.
KEPT = (
    *("response", "final_answer", "finish_reason", "thinking", "vote", "confidence", "verifier"),
    *("usage", "seed", "warnings"),
)


@dataclass
class RecordConfig:
    url: str = flag("http://127.0.0.1:8000", "URL of the running server")
    file: Path = flag(
        Path(__file__).with_name("prompts.json"), "file of questions, to which answers are added"
    )


def main(config: RecordConfig) -> int:
    try:
        book = json.loads(config.file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--file {config.file} cannot be read: {error}") from error
    key = os.environ.get("RLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx2.Client(base_url=config.url, headers=headers, timeout=300) as client:
        book["model"] = ask(client, "GET", "/phase1/info")["model"]
        for entry in book["prompts"]:
            answer = ask(client, "POST", "/phase1/reasoning", entry["request"])
            entry["curl"] = curl(config.url, entry["request"], keyed=bool(key))
            entry["right"] = is_right(answer["response"], entry["gold"])
            entry["answer"] = {name: answer[name] for name in KEPT}
            verdict = "right" if entry["right"] else f"wrong, it is {entry['gold']}"
            terminal.line(f"{entry['name']}: {answer['final_answer'] or 'no answer'} ({verdict})")
    book["prompts"].sort(key=lambda entry: not entry["right"])
    right = sum(entry["right"] for entry in book["prompts"])
    book["score"] = f"{right} of {len(book['prompts'])} right"
    terminal.line(book["score"])
    replace_json(config.file, {name: book[name] for name in ("model", "score", "prompts")})
    http = config.file.with_name("requests.http")
    if http.exists():
        replace_file(http, as_http(http.read_text(encoding="utf-8"), book))
    return 0


def is_right(response: str, gold: str) -> bool:
    """Return whether the answer in a response equals the reference answer, a number or a text."""
    kind = "number" if parse_number(gold) is not None else "text"
    return grade(response, gold, strict=False, kind=kind).correct


def as_http(text: str, book: dict[str, Any]) -> str:
    """Return the text of requests.http with the new requests and score, otherwise unchanged."""
    names = {f"### {entry['name']}" for entry in book["prompts"]}
    blocks = re.split(r"^(?=###)", text, flags=re.M)
    is_ours = [block.partition("\n")[0] in names for block in blocks]
    new = [
        f"### {entry['name']}\nPOST {{{{url}}}}/phase1/reasoning\nContent-Type: application/json\n"
        "Authorization: Bearer {{key}}\n\n"
        f"{json.dumps(entry['request'], ensure_ascii=False, indent=2)}\n\n"
        for entry in book["prompts"]
    ]
    first = is_ours.index(True) if any(is_ours) else len(blocks)
    others = [b for b, ours in zip(blocks, is_ours, strict=True) if not ours]
    whole = "".join([*others[:first], *new, *others[first:]])
    return re.sub(r"\d+ of \d+ right", book["score"], whole, count=1)


def ask(client: httpx2.Client, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """Send a request; return the JSON of the response.

    Raises:
        UsageError: no server answers, or it refuses the request.
    """
    try:
        response = client.request(method, path, json=body)
    except httpx2.TransportError as error:
        raise UsageError(
            f"no answer from {client.base_url}: {error}; run: python server.py"
        ) from error
    if response.status_code != 200:
        hint = "; set RLM_API_KEY" if response.status_code == 401 else ""
        raise UsageError(f"{path} answered {response.status_code}{hint}: {response.text:.300}")
    return response.json()


def curl(url: str, body: dict[str, Any], *, keyed: bool) -> str:
    """Return the curl command of a request, which reads the key from RLM_API_KEY."""
    key = ' -H "Authorization: Bearer $RLM_API_KEY"' if keyed else ""
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    endpoint = shlex.quote(url.rstrip("/") + "/phase1/reasoning")
    return f"curl -sS {endpoint} -H 'Content-Type: application/json'{key} -d {data}"


if __name__ == "__main__":
    run_main(main, RecordConfig, description=__doc__)
