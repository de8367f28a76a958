"""The console command `rlm`, whose subcommands run the scripts: `rlm grpo` runs train_grpo.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NoReturn

from rlm import __version__
from rlm.cli import CONSOLE, UsageError, print_stderr, run_main

__all__ = ["COMMANDS", "main"]

# Maps each command to its script and to options that are inserted before the user's options.
COMMANDS: dict[str, tuple[str, ...]] = {command: (script,) for script, command in CONSOLE.items()}
COMMANDS["doctor"] = ("train_grpo", "--doctor")
FOLDER = Path(__file__).parents[1]  # the folder of the scripts: the checkout, or site-packages
HELP = """usage: rlm COMMAND [options]

  rlm sft        runs train_sft.py: teaches the format (stage 1)
  rlm grpo       runs train_grpo.py: trains with GRPO (stage 2)
  rlm eval       runs eval.py: measures accuracy with confidence intervals
  rlm ask        runs inference.py: answers one question, or opens an interactive prompt
  rlm serve      runs server.py: serves a model over HTTP, with a web page
  rlm doctor     runs train_grpo.py --doctor: finds out why a reward is flat
  rlm reward     writes a reward template for you to edit: rlm reward mine.py
  rlm view       shows a run's curves and completions in a browser: rlm view runs/grpo --follow

rlm COMMAND --help lists the options of a command; rlm --version prints the version.
"""


def _write_reward(options: Sequence[str]) -> int:
    """Write a reward template; return the exit code."""
    from rlm.rewards import write_reward_template

    if len(options) != 1 or options[0].startswith("-"):
        print_stderr("usage: rlm reward FILE.py (a new file, for --reward FILE.py:reward)")
        return 0 if options in (["--help"], ["-h"]) else 2
    try:
        write_reward_template(Path(options[0]))
    except UsageError as error:
        print_stderr(f"error: {error}")
        return 2
    print_stderr(f"wrote the reward template {options[0]}; try it: python {options[0]}")
    return 0


def main() -> NoReturn:
    """Run `rlm COMMAND options` as `python SCRIPT.py options`."""
    command, *options = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help", "--version"):
        sys.stdout.write(f"rlm {__version__}\n" if command == "--version" else HELP)
        sys.exit(0)
    if command == "reward":
        sys.exit(_write_reward(options))
    if command == "view":
        from rlm.runs import view

        sys.argv = ["rlm view", *options]
        run_main(view.main, view.ViewConfig, description=view.__doc__)
    known = [*COMMANDS, "reward", "view"]
    if command not in COMMANDS:
        print_stderr(f"error: unknown command {command!r}; choose from {', '.join(known)}")
        sys.exit(2)
    script, *first = COMMANDS[command]
    sys.argv = [f"rlm {command}", *first, *options]
    spec = spec_from_file_location("__main__", FOLDER / f"{script}.py")
    assert spec is not None  # the .py suffix guarantees a spec and a loader
    assert spec.loader is not None
    module = sys.modules["__main__"] = module_from_spec(spec)
    module.__spec__ = None  # as for a script: child processes find the module by its file
    spec.loader.exec_module(module)  # runpy would overwrite sys.argv[0], which messages show
    sys.exit(0)
