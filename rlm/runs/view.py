"""Write a run's rollouts as one HTML file that a browser opens: no server, no network.

    rlm view runs/grpo                                # -> runs/grpo/rollouts.html
    rlm view runs/grpo --compare runs/other --output both.html

Steps on the left; their groups with rewards; the completions, coloured by advantage, with what a
tool wrote, the verdict and its reason; filters: wrong, truncated, right for a wrong reason.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlm.cli import UsageError, flag, run_main, terminal
from rlm.grading import has_wrong_equation
from rlm.runs.atomic_files import read_log, replace_file

RUNS_SHOWN = 8
PAGE = Path(__file__).parent / "view_page"
SHOWN = ("reward/mean", "completion/truncated_rate", "sampler/logprob_gap_mean", "eval/accuracy")


@dataclass
class ViewConfig:
    run: Path = flag(Path("runs/grpo"), "run directory to read", positional=True)
    compare: Path | None = flag(None, "another run, shown beside it")
    output: Path | None = flag(
        None, "HTML file to write", default_text="rollouts.html in the run's folder"
    )


def main(config: ViewConfig) -> int:
    runs = [read_run(path) for path in (config.run, config.compare) if path]
    output = config.output or config.run / "rollouts.html"
    replace_file(output, render_page(runs))
    count = sum(len(group["completions"]) for run in runs for group in run["groups"])
    size = output.stat().st_size / 1e6
    terminal.line(f"written: {output} ({count} rollouts, {size:.1f} MB); open it in a browser")
    return 0


def read_run(path: Path) -> dict[str, Any]:
    """Read what the page shows of a run: {name, steps, groups}.

    Raises:
        UsageError: the run left no samples.
    """
    groups = read_log(path / "samples.jsonl")
    if not groups:
        others = _runs_in(path) or "name the directory of a run"
        raise UsageError(f"{path}/samples.jsonl holds no rollouts; {others}")
    steps = {
        row["step"]: {name: row[name] for name in SHOWN if _finite(row.get(name)) is not None}
        for row in read_log(path / "metrics.jsonl")
    }
    # A run whose completions are no answers (graphs, say) is judged by its reward alone.
    answered = any({"correct", "wrong"} & set(group.get("verdicts", ())) for group in groups)
    shown = [_group(group if answered else group | {"verdicts": None}) for group in groups]
    return {"name": str(path), "steps": steps, "groups": shown}


def _runs_in(path: Path) -> str:
    """The runs with rollouts that lie in a folder, or beside it where it does not exist."""
    folder = path if path.is_dir() else path.parent
    files = sorted(folder.glob("*/samples.jsonl"), key=lambda f: f.stat().st_mtime, reverse=True)
    runs = [str(f.parent) for f in files if f.stat().st_size and f.parent.suffix != ".prev"]
    return f"runs that do, the newest first: {', '.join(runs[:RUNS_SHOWN])}" if runs else ""


def _group(group: dict[str, Any]) -> dict[str, Any]:
    texts = group["completions"]
    nothing = [None] * len(texts)  # a run without a tool has no calls
    columns = (
        map(_finite, group["rewards"]),
        map(_finite, group["advantages"]),
        *(group.get(name) or nothing for name in ("verdicts", "truncated", "tool_calls")),
    )
    names = ("text", "reward", "advantage", "verdict", "truncated", "tool_calls")
    rows = [dict(zip(names, row, strict=True)) for row in zip(texts, *columns, strict=True)]
    for row in rows:
        row["flawed"] = row["verdict"] == "correct" and has_wrong_equation(row["text"])
    kept = {name: group[name] for name in ("step", "problem", "question", "answer")}
    return kept | {"completions": rows}


def _finite(value: float | None) -> float | None:
    """Return None for what JSON in a browser cannot hold."""
    return value if value is not None and math.isfinite(value) else None


def render_page(runs: list[dict[str, Any]]) -> str:
    """Return the page with style, script and the runs' data in it.

    What a model wrote is hostile: it stands in a block of data in which no `<` is left, the script
    puts it into the page as text, and the page's policy runs no other script and loads nothing.
    """
    html, style, script = (
        (PAGE / name).read_text(encoding="utf-8") for name in ("view.html", "view.css", "view.js")
    )
    data = json.dumps(runs, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    parts = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": data}
    for name, text in parts.items():  # the data last: it may hold a mark
        html = html.replace(f"@{name}@", text, 1)
    return html


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


if __name__ == "__main__":
    run_main(main, ViewConfig, description=__doc__)
