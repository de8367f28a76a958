"""Load a reward or a tool from a user's Python file."""

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
    """Run a file as a module, once per version of the file, because a script loads it before and
    after its slow imports."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look the module up
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        # At the end of sys.path: a file named like a library must not hide it from other modules.
        sys.path.remove(folder)
        sys.path.append(folder)
    return module


def load_from_file(option: str, spec: str, kinds: tuple[type, ...] = ()) -> Any:
    """Return the object NAME of FILE.py:NAME.

    The file can import modules from its folder.

    Args:
        option: the flag that names it, for messages.
        kinds: accepted types besides callables.

    Raises:
        UsageError: the file or name does not exist, or running the file fails.
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
    except (Exception, SystemExit) as error:  # sys.exit would end the program silently
        raise UsageError(f"{option} {spec}: {type(error).__name__}: {error}") from error
    if not callable(found) and not isinstance(found, kinds):
        own = vars(module).items()
        there = [n for n, v in own if getattr(v, "__module__", "") == module.__name__]
        names = ", ".join(there) or "none"
        raise UsageError(f"{option} {spec}: no function or class {name!r}; it has {names}")
    return found
