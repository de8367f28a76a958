"""Show the learning curves of a run and all its completions with rewards in a browser.

    rlm view runs/grpo                                # -> runs/grpo/rollouts.html
    rlm view runs/grpo --follow                       # http://127.0.0.1:8008, during the run
    rlm view runs/grpo --compare runs/other --output both.html

The page contains curves with intervals, a list of the steps, and the groups of each step.
Completions are coloured by advantage and shown with their rewards and verdicts. Filters select
completions that are wrong, truncated, or right for a wrong reason. The HTML file needs no server
and no network.
With --follow, the page is updated from the logs of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlm.cli import UsageError, check_values, flag, run_main, terminal
from rlm.runs.atomic_files import read_log, replace_file
from rlm.runs.follow import serve_runs
from rlm.runs.run_page import read_run, render_page

RUNS_SHOWN = 8  # maximum number of runs that an error message lists


@dataclass
class ViewConfig:
    run: Path = flag(Path("runs/grpo"), "run directory to read", positional=True)
    compare: Path | None = flag(None, "another run to show on the same page")
    output: Path | None = flag(
        None, "HTML file to write", default_text="rollouts.html in the run's folder"
    )
    follow: bool = flag(False, "show the run while it is in progress, on a local web page")
    port: int = flag(8008, "port of the local web page; 0 selects a free port", min=0, max=65535)

    def __post_init__(self) -> None:
        check_values(self)
        if self.follow and self.output:
            raise ValueError("--follow serves the page and writes no file: leave out --output")


def main(config: ViewConfig) -> int:
    paths = [path for path in (config.run, config.compare) if path]
    if config.follow:
        return serve_runs(paths, config.port)
    for path in paths:
        if not read_log(path / "samples.jsonl"):
            others = _runs_in(path) or "pass the directory of a GRPO run"
            raise UsageError(f"{path}/samples.jsonl contains no rollouts; {others}")
    runs = [read_run(path) for path in paths]
    output = config.output or config.run / "rollouts.html"
    try:
        replace_file(output, render_page(runs))
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}") from error
    count = sum(len(group["completions"]) for run in runs for group in run["groups"])
    size = output.stat().st_size / 2**20
    terminal.line(f"written: {output} ({count} rollouts, {size:.1f} MB); open it in a browser")
    return 0


def _runs_in(path: Path) -> str:
    """List the runs with rollouts in a folder, or in its parent if the folder does not exist."""
    folder = path if path.is_dir() else path.parent
    files = sorted(folder.rglob("samples.jsonl"), key=lambda f: f.stat().st_mtime, reverse=True)
    runs = [str(f.parent) for f in files if f.stat().st_size and f.parent.suffix != ".prev"]
    return f"runs with rollouts, newest first: {', '.join(runs[:RUNS_SHOWN])}" if runs else ""


if __name__ == "__main__":
    run_main(main, ViewConfig, description=__doc__)
