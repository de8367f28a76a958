"""Compiles the C files for this CPU, and caches the library on disk for the next process."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = [
    FOLDER / name for name in ("attention.c", "decode.c", "learn.c", "logits.c", "products.c")
]
# Nothing reads errno or floating-point traps, so GCC may vectorize loops with conversions.
FLAGS = ("-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
# Without this option GCC uses 256-bit vectors. GCC for ARM rejects it.
X86_FLAGS = ("-mprefer-vector-width=512",)
CPU_INFO = Path("/proc/cpuinfo")
# Lines of CPU_INFO that -march=native depends on; others change while the machine runs.
CPU_FEATURES = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")


class BuildError(Exception):
    """There is no compiler, or its library cannot be loaded."""


def load_library(macros: Sequence[str]) -> ctypes.CDLL:
    """Load the library for these macros, and compile it unless an earlier process did.

    CC names the compiler, and RLM_MARCH the architecture (default: this CPU's).

    Raises:
        BuildError: it cannot be compiled or loaded; the message is one line.
    """
    compiler, command = _command(macros)
    kept = _cached_file(compiler, command)
    if kept and kept.exists():
        with contextlib.suppress(OSError):  # perhaps truncated by a full disk: compile again
            return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(dir=kept and kept.parent) as scratch:
        library = Path(scratch) / "kernels.so"
        try:
            subprocess.run(
                [*command, "-o", str(library), *map(str, SOURCES), "-lm"],
                check=True, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            # The kernels share torch's OpenMP threads: torch has loaded OpenMP already.
            loaded = ctypes.CDLL(str(library))
            if kept:
                library.replace(kept)  # complete or not at all
        except subprocess.CalledProcessError as error:
            lines = error.stderr.splitlines() or ["no reason given"]
            first = next((line for line in lines if "error" in line), lines[0])
            raise BuildError(f"{compiler[0]} failed: {first}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(str(error)) from error
    return loaded


def kernels_digest() -> str:
    """Return a digest of what the kernels' speed depends on: sources, compiler, flags and CPU;
    "none" without a compiler."""
    try:
        return _digest(*_command(()))
    except (OSError, subprocess.SubprocessError):
        return "none"


def cpu_features() -> list[str]:
    """Return the first CPU's lines of /proc/cpuinfo on which -march=native depends.

    Raises:
        OSError: there is no such file.
    """
    first_cpu = CPU_INFO.read_text().split("\n\n")[0].splitlines()
    return [line for line in first_cpu if line.startswith(CPU_FEATURES)]


def _command(macros: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the compiler, and its command for a library, still without file names."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    flags = [*FLAGS, f"-march={os.environ.get('RLM_MARCH') or 'native'}"]
    flags += X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ()
    return compiler, [*compiler, *flags, *(f"-D{macro}" for macro in macros), "-shared", "-fPIC"]


def _digest(compiler: Sequence[str], command: Sequence[str]) -> str:
    version = subprocess.run(
        [*compiler, "--version"], check=True, capture_output=True, timeout=10
    ).stdout
    digest = hashlib.sha256(repr((command, version, cpu_features())).encode())
    for file in (*SOURCES, FOLDER / "numbers.h"):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _cached_file(compiler: Sequence[str], command: Sequence[str]) -> Path | None:
    """Return the path for the library of this compiler, command, source and CPU.

    None if the path cannot be determined, or if another user could write to its folder.
    """
    folder = Path(os.environ.get("RLM_CACHE", Path.home() / ".cache" / "rlm")) / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if about.st_uid != os.getuid() or about.st_mode & 0o022:
            return None
        return folder / f"{_digest(compiler, command)}.so"
    except (OSError, subprocess.SubprocessError):
        return None
