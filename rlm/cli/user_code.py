"""Loads what a user's own Python file defines: a reward, a tool."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rlm.cli.options import UsageError


@cache
def _run_file(name: str, path: Path, modified: int) -> ModuleType:
    """Run a file as a module, once for each of its versions: a script looks at it before its own
    imports, and again after them."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        # Last from now on: a neighbour named like a library must not hide it from other modules.
        sys.path.remove(folder)
        sys.path.append(folder)
    return module


def load_from_file(option: str, spec: str, kinds: tuple[type, ...] = ()) -> Any:
    """Run the file of FILE.py:NAME and return the object of that name.

    The file can import its neighbours, as a script can.

    Args:
        option: the flag that names it, for messages.
        kinds: what it may be, besides something that can be called.

    Raises:
        UsageError: there is no such file or name, or the file fails when it is run.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser()
    if not name or path.suffix != ".py":
        raise UsageError(f"{option} {spec}: write FILE.py:NAME, the file and what it defines")
    if not path.is_file():
        raise UsageError(f"{option} {spec}: the file {path} does not exist")
    try:
        module = _run_file(f"{option[2:]}_{path.stem}", path.resolve(), path.stat().st_mtime_ns)
        found = getattr(module, name, None)
    except (Exception, SystemExit) as error:  # sys.exit would end the program, without a word
        raise UsageError(f"{option} {spec}: {type(error).__name__}: {error}") from error
    if not callable(found) and not isinstance(found, kinds):
        own = vars(module).items()
        there = [n for n, v in own if getattr(v, "__module__", "") == module.__name__]
        names = ", ".join(there) or "none"
        raise UsageError(f"{option} {spec}: no function or class {name!r}; it has {names}")
    return found
