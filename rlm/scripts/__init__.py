"""Finds the five scripts, imports them as modules and runs them as the console command `rlm`.

In a checkout they lie at its top; an installed wheel has them beside this file, because a top-level
module `evaluate` would hide Hugging Face's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from rlm import __version__
from rlm.cli import CONSOLE, UsageError, run_main, tell

# Command → script, and options that come before the user's.
COMMANDS = {command: (script,) for script, command in CONSOLE.items()}
COMMANDS["doctor"] = ("train_grpo", "--doctor")
SCRIPTS = tuple(CONSOLE)
HERE, CHECKOUT = Path(__file__).parent, Path(__file__).parents[2]
FOLDER = HERE if (HERE / "train_grpo.py").exists() else CHECKOUT
HELP = """usage: rlm COMMAND [options]

  rlm sft        as python train_sft.py: stage 1, teaches the format
  rlm grpo       as python train_grpo.py: stage 2, GRPO
  rlm evaluate   as python evaluate.py: accuracy with intervals
  rlm ask        as python inference.py: one question, or a prompt loop
  rlm serve      as python server.py: an HTTP server with a page
  rlm doctor     as python train_grpo.py --doctor: why is a reward flat?
  rlm reward     writes a reward of your own to begin with: rlm reward mine.py
  rlm view       shows a run's curves and completions in a browser: rlm view runs/grpo --follow

rlm COMMAND --help lists the options of a command; rlm --version says which rlm this is.
"""

__all__ = ["COMMANDS", "SCRIPTS", "give_way", "load_script", "main", *SCRIPTS]


def load_script(name: str) -> ModuleType:
    """Import a script, whether or not its folder is on sys.path.

    In a checkout it is the module that `import train_grpo` finds there, but for `evaluate`: that
    name is Hugging Face's.
    """
    own_name = FOLDER == CHECKOUT and name != "evaluate"
    full_name = name if own_name else f"{__name__}.{name}"
    if full_name not in sys.modules:
        spec = spec_from_file_location(full_name, FOLDER / f"{name}.py")
        module = sys.modules[full_name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[full_name]
            raise
    return sys.modules[full_name]


def __getattr__(name: str) -> ModuleType:
    """Import a script at first use: `from rlm.scripts import inference`."""
    if name in SCRIPTS:
        return load_script(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def give_way(name: str, search: Iterable[str] | None = None) -> None:
    """Import the package `name` that lies elsewhere on sys.path, in place of our script.

    Raises:
        ModuleNotFoundError: there is none.
    """
    folders = [path for path in search or sys.path if Path(path).resolve() != FOLDER]
    spec = PathFinder.find_spec(name, folders)
    del sys.modules[name]  # ours, whose import is under way
    if spec is None:
        reason = f"No module named {name!r} (the script is rlm.scripts.{name})"
        raise ModuleNotFoundError(reason, name=name)
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)


def _write_reward(options: Sequence[str]) -> int:
    """Write the template of a reward; the exit code."""
    from rlm.rewards import write_reward_template

    if len(options) != 1 or options[0].startswith("-"):
        tell("usage: rlm reward FILE.py (a new file, for --reward FILE.py:reward)")
        return 0 if options == ["--help"] else 2
    try:
        write_reward_template(Path(options[0]))
    except UsageError as error:
        tell(f"error: {error}")
        return 2
    tell(f"{options[0]}: a reward that runs as it is; try it: python {options[0]}")
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
        tell(f"error: unknown command {command!r}: one of {', '.join(known)}")
        sys.exit(2)
    script, *first = COMMANDS[command]
    sys.argv = [f"rlm {command}", *first, *options]
    spec = spec_from_file_location("__main__", FOLDER / f"{script}.py")
    module = sys.modules["__main__"] = module_from_spec(spec)
    module.__spec__ = None  # as of a script: child processes find it by its file
    spec.loader.exec_module(module)
    sys.exit(0)
