"""Demonstrates that an experience library can improve a base model without changing its weights.

The demo starts this project's server with the base model, which answers word problems. It keeps a
worked example as a lesson if the model solves more held-out problems with it. The demo then
compares the model without the library, with the library, and with placebo lessons, on problems that
were not used to make the lessons. The base model was not trained on such problems here; the adapter
in weights/ was trained on similar ones.

    python -m recipes.experience.demo        (`make demo-experience`)
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from recipes.experience import evaluate, select
from recipes.experience.agent import OWN_SERVER, ROLES, variables_of
from rlm.cli import UsageError, check_values, flag, run_main, terminal
from rlm.serving import server_process


@dataclass
class DemoConfig:
    model: str = flag("smollm2-135m", "base model that answers the problems")
    adapter: Path | None = flag(None, "adapter to use; none: the base model without an adapter")
    dataset: str = flag("word-problems:1", "dataset of problems to answer")
    split: str = flag(
        "test_families",
        "split of the dataset; the default's problem types are new to the base model, but similar "
        "to training problems of the adapter in weights/",
    )
    problems: int = flag(240, "number of problems to evaluate", min=1)
    max_tokens: int = flag(96, "maximum length of a reply in tokens", min=1)
    run_dir: Path = flag(Path("runs/demo_experience"), "folder for all files of the demo")

    def __post_init__(self) -> None:
        check_values(self)


def server_command(config: DemoConfig) -> list[str]:
    who = ["--adapter", str(config.adapter)] if config.adapter else ["--base"]
    limits = ["--max-prompt-tokens", "2048", "--requests-per-minute", "1000000"]
    return ["server.py", *who, "--model", config.model, *limits]


def main(config: DemoConfig) -> int:
    began = time.monotonic()
    if config.run_dir.exists():
        raise UsageError(f"--run-dir {config.run_dir} exists; remove it or name another")
    config.run_dir.mkdir(parents=True)
    folders = {"run_dir": config.run_dir, "api_config": config.run_dir / "api_config.json"}
    asked = {"dataset": config.dataset, "split": config.split, "max_tokens": config.max_tokens}
    asked |= {"instructions": False} | folders
    terminal.line("[1 of 3] the server loads the model")
    with server_process(server_command(config), log=config.run_dir / "server.log") as (url, _):
        roles = dict.fromkeys(ROLES, OWN_SERVER | {"base_url": f"{url}/v1"})
        folders["api_config"].write_text(json.dumps(roles))
        for variable in (name for role in roles for name in variables_of(role).values()):
            os.environ.pop(variable, None)  # otherwise, it would override the file
        terminal.line(
            "\n[2 of 3] the model attempts problems; each lesson made from the attempts is tested"
        )
        tried = {"kinds": ("example",), "groups": 10, "held_out": 240, "trial_size": 120}
        select.main(select.SelectConfig(library_dir=config.run_dir, **tried, **asked))
        library = config.run_dir / select.LIBRARY
        if not json.loads(library.read_text(encoding="utf-8")):
            terminal.line("No lesson helped, so none was kept, and there is no library to compare.")
            return 0
        terminal.line(
            "\n[3 of 3] evaluation of the library on problems that were not used to make lessons"
        )
        table = {"library": (library,), "placebo": True, "max_problems": config.problems}
        evaluate.main(evaluate.EvaluateConfig(samples=1, temperature=0.0, **table, **asked))
    terminal.line(f"total time: {terminal.duration(time.monotonic() - began)}; library: {library}")
    return 0


if __name__ == "__main__":
    run_main(main, DemoConfig, description=__doc__)
