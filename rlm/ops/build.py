"""Compiles the C files for this CPU, and caches the library on disk for later processes."""

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
# The kernels read neither errno nor FP traps, so GCC may vectorize loops with conversions.
FLAGS = ("-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
# Without this option GCC uses 256-bit vectors. GCC for ARM rejects the option.
X86_FLAGS = ("-mprefer-vector-width=512",)
CPU_INFO = Path("/proc/cpuinfo")
# Lines of CPU_INFO on which -march=native depends. Other lines change while the machine runs.
CPU_FEATURES = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")


BUILD_SECONDS = 300  # a build takes seconds, but other programs may use the CPU


def cache_folder() -> Path:
    """Return the folder for compiled kernels, timings and the unpacked model."""
    named = os.environ.get("RLM_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "rlm"


_failed: set[str] = set()  # digests of this process's failed builds


class BuildError(Exception):
    """The kernels cannot be compiled, or the compiled library cannot be loaded."""


def load_library(macros: Sequence[str]) -> ctypes.CDLL:
    """Load the library for these macros, and compile it first unless it is cached on disk.

    The environment variable CC names the compiler, and RLM_MARCH names the target architecture
    (default: that of this CPU).

    Raises:
        BuildError: the library cannot be compiled or loaded; the message has one line.
    """
    compiler, command = _command(macros)
    kept = _cached_file(compiler, command)
    if kept and kept.exists():
        with contextlib.suppress(OSError):  # if a full disk truncated the file, compile it again
            return ctypes.CDLL(str(kept))
    is_writable = kept is not None and os.access(kept.parent, os.W_OK)
    try:
        with tempfile.TemporaryDirectory(dir=kept.parent if kept and is_writable else None) as made:
            library = Path(made) / "kernels.so"
            subprocess.run(
                [*command, "-o", str(library), *map(str, SOURCES), "-lm"],
                check=True, capture_output=True, text=True, timeout=BUILD_SECONDS,
            )  # fmt: skip
            # torch has already loaded OpenMP, so the kernels share torch's OpenMP threads.
            loaded = ctypes.CDLL(str(library))
            if kept and is_writable:
                library.replace(kept)  # atomic: other processes see a complete file
            return loaded
    except subprocess.CalledProcessError as error:
        lines = error.stderr.splitlines() or ["no reason given"]
        first = next((line for line in lines if "error" in line), lines[0])
        _remember_failure()
        raise BuildError(f"{compiler[0]} failed: {first}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        _remember_failure()
        raise BuildError(str(error)) from error


def _remember_failure() -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        _failed.add(_digest(*_command(())))


def kernels_digest() -> str:
    """Return a digest of everything that determines the speed of the kernels.

    The digest covers the sources, the compiler, its flags and the CPU. It is "none" without a
    compiler, or if a build has failed in this process.
    """
    try:
        digest = _digest(*_command(()))
        return "none" if digest in _failed else digest
    except (OSError, subprocess.SubprocessError):
        return "none"


def cpu_features() -> list[str]:
    """Return the lines of /proc/cpuinfo, for the first CPU, on which -march=native depends.

    Raises:
        OSError: the file cannot be read.
    """
    first_cpu = CPU_INFO.read_text().split("\n\n")[0].splitlines()
    return [line for line in first_cpu if line.startswith(CPU_FEATURES)]


def _command(macros: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the compiler, and the command that compiles a library, without file names."""
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
    """Return the path of the cached library for this compiler, command, source code and CPU.

    The result is None if the path cannot be determined, or if another user could write to its
    folder.
    """
    folder = cache_folder() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if about.st_uid != os.getuid() or about.st_mode & 0o022:
            return None
        return folder / f"{_digest(compiler, command)}.so"
    except (OSError, subprocess.SubprocessError):
        return None
