"""Compiles the C files for this CPU and loads the library; kept on disk for the next process."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = [
    FOLDER / name for name in ("attention.c", "decode.c", "learn.c", "logits.c", "products.c")
]
# Nobody looks at errno or floating-point traps, so loops over conversions may become vectors.
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
CPU_INFO = Path("/proc/cpuinfo")
# Lines of it that -march=native depends on; others change while the machine runs.
CPU_FEATURES = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")


class BuildError(Exception):
    """There is no compiler, or it makes nothing that can be loaded."""


def load_library(macros: Sequence[str]) -> ctypes.CDLL:
    """Compile with these macros, or take what an earlier process compiled, and load it.

    Raises:
        BuildError: one line that says why not.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    command = [*compiler, *FLAGS, *(f"-D{macro}" for macro in macros), "-shared", "-fPIC"]
    kept = _cached_file(compiler, command)
    if kept and kept.exists():
        with contextlib.suppress(OSError):  # cut short by a full disk, say: compiled again
            return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(dir=kept and kept.parent) as scratch:
        library = Path(scratch) / "kernels.so"
        try:
            subprocess.run(
                [*command, "-o", str(library), *map(str, SOURCES), "-lm"],
                check=True, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            # OpenMP's threads are torch's: its library is in the process already.
            loaded = ctypes.CDLL(str(library))
            if kept:
                library.replace(kept)  # whole or not at all
        except subprocess.CalledProcessError as error:
            lines = error.stderr.splitlines() or ["no reason given"]
            first = next((line for line in lines if "error" in line), lines[0])
            raise BuildError(f"{compiler[0]} failed: {first}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(str(error)) from error
    return loaded


def _cached_file(compiler: Sequence[str], command: Sequence[str]) -> Path | None:
    """Find the place of the library of this compiler, command, source and CPU.

    None where that is not certain, or another user could put a library of his own there.
    """
    folder = Path(os.environ.get("RLM_CACHE", Path.home() / ".cache" / "rlm")) / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if about.st_uid != os.getuid() or about.st_mode & 0o022:
            return None
        version = subprocess.run(
            [*compiler, "--version"], check=True, capture_output=True, timeout=10
        ).stdout
        first_cpu = CPU_INFO.read_text().split("\n\n")[0].splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    cpu = [line for line in first_cpu if line.startswith(CPU_FEATURES)]
    digest = hashlib.sha256(repr((command, version, cpu)).encode())
    for file in (*SOURCES, FOLDER / "numbers.h"):
        digest.update(file.read_bytes())
    return folder / f"{digest.hexdigest()}.so"
