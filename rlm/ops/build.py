"""Compiles the C files for this CPU, and keeps the library on disk for the next process."""

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
# Nothing reads errno or floating-point traps, so loops over conversions may become vectors.
FLAGS = ("-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
# Without it GCC uses 256 of 512 bits. For ARM it refuses the option.
X86_FLAGS = ("-mprefer-vector-width=512",)
CPU_INFO = Path("/proc/cpuinfo")
# Lines of it that -march=native depends on; others change while the machine runs.
CPU_FEATURES = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")


class BuildError(Exception):
    """No compiler, or none whose library can be loaded."""


def load_library(macros: Sequence[str]) -> ctypes.CDLL:
    """Load the library compiled with these macros, by an earlier process or now.

    CC names the compiler, RLM_MARCH the architecture: this CPU's if it is not set.

    Raises:
        BuildError: the message is one line.
    """
    compiler, command = _command(macros)
    kept = _cached_file(compiler, command)
    if kept and kept.exists():
        with contextlib.suppress(OSError):  # perhaps cut short by a full disk: compile again
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


def kernels_digest() -> str:
    """Return a digest of what the kernels' speed depends on: sources, compiler, flags and CPU;
    "none" without a compiler."""
    try:
        return _digest(*_command(()))
    except (OSError, subprocess.SubprocessError):
        return "none"


def cpu_features() -> list[str]:
    """Return the lines on the first CPU in /proc/cpuinfo that -march=native depends on.

    Raises:
        OSError: there is no such file.
    """
    first_cpu = CPU_INFO.read_text().split("\n\n")[0].splitlines()
    return [line for line in first_cpu if line.startswith(CPU_FEATURES)]


def _command(macros: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the compiler, and the command that compiles a library with it, without files."""
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

    None if that is not certain, or if another user could write there.
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
