"""Ask a trained orchestrator: the graph that it designs, what both agents write, the answer.

python -m recipes.orchestrator.ask "Each box holds 6 eggs. How many eggs do 4 boxes hold?"
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipes.orchestrator.graph import Invalid
from recipes.orchestrator.orchestrator import OpenRun
from rlm.cli import terminal
from rlm.cli.flags import check_values, flag
from rlm.cli.main import run_main
from rlm.cli.options import UsageError
from rlm.grading.answers import grade
from rlm.model import hardware as machine


@dataclass
class AskConfig:
    question: str | None = flag(None, "the problem", positional=True)
    run: Path = flag(Path("runs/orchestrator"), "directory of the training run")
    tries: int = flag(3, "graphs to draw at most: the most likely one, then others", min=1)

    def __post_init__(self) -> None:
        check_values(self)
        if not (self.question or "").strip():
            raise ValueError('ask something: python -m recipes.orchestrator.ask "…"')


def main(config: AskConfig) -> int:
    machine.prepare_process()
    run = OpenRun.open(config.run)
    for attempt in range(config.tries):
        (written,) = run.write([config.question], temperature=min(attempt, 1), seed=attempt)
        if not isinstance(written.graph, Invalid):
            break
        terminal.line(f"no valid graph ({written.graph.reason}: {written.graph.detail})")
    else:
        raise UsageError(f"no valid graph in {config.tries} tries; the last: {written.text[:200]}")
    (done,) = run.runner.run([config.question], [written.graph])
    if done.error:
        raise UsageError(done.error)
    for name, call in done.calls.items():
        terminal.line(f"{name}, told: {call.system_prompt}\n{done.replies[name].text}\n")
    # The gold does not matter: the verdict also carries the answer as it was found.
    found = grade(done.final_text, "0", strict=False).answer
    tokens = len(written.completion.token_ids)
    terminal.line(
        f"answer: {found or 'none found'}  (graph {tokens} tokens, agents {done.written})"
    )
    return 0


if __name__ == "__main__":
    run_main(main, AskConfig, description=__doc__)
