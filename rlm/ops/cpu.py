"""Compiles the kernels for this CPU, and chooses between fp32 and bf16.

Both results are cached on disk for later processes. The dtype is chosen by measurement, because the
CPU flags do not show which dtype is faster: some CPUs with AVX512-BF16 multiply bf16 at half the
speed of fp32. Each kind of work is timed in both dtypes until two timings agree. The key of a
cached result contains everything on which the result depends.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlm.cli import UsageError, terminal

if TYPE_CHECKING:  # the options need DTYPES, and --help must not import torch
    import torch

FOLDER = Path(__file__).parent
SOURCES = [
    FOLDER / name for name in ("attention.c", "decode.c", "learn.c", "logits.c", "products.c")
]
# The kernels use neither errno nor floating-point traps. GCC vectorizes more loops without them.
FLAGS = ("-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
CPU_INFO = Path("/proc/cpuinfo")
# Lines of CPU_INFO on which -march=native depends. Other lines change while the machine runs.
CPU_FEATURES = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")
BUILD_SECONDS = 300  # a build takes seconds, but other programs may use the CPU
DTYPES = ("float32", "bfloat16")
# Minimum speed of bf16 relative to fp32. At equal speed fp32 is selected, because it rounds less.
MARGIN = 1.1
# Values of ONEDNN_MAX_CPU_ISA that disable bf16 matmuls.
WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
ROWS, WIDTH, INNER = 1024, 576, 1536  # sizes of the timed matmuls
ROUNDS, SECONDS = 3, 0.04  # turns for each dtype, and minimum seconds per turn
# Two timings agree if their speed ratios of bf16 to fp32 differ by less than a factor of AGREEMENT.
# Other programs can make all timings disagree, so at most TIMINGS of them are made.
AGREEMENT, TIMINGS = 1.2, 6
# Environment variables that determine which instructions oneDNN and torch use.
VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def cache_folder() -> Path:
    """Return the folder for compiled kernels, timings and the unpacked model.

    Raises:
        UsageError: RLM_CACHE is not set, and this user has no home directory.
    """
    if named := os.environ.get("RLM_CACHE"):
        return Path(named)
    try:
        return Path.home() / ".cache" / "rlm"
    except RuntimeError as error:  # neither HOME nor an entry in passwd
        raise UsageError("this user has no home directory: set RLM_CACHE to a folder") from error


_failed: set[str | None] = set()  # digests of this process's failed builds


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
    kept = _cached_file(macros)
    if kept and kept.exists():
        with suppress(OSError):  # if a full disk truncated the file, compile it again
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
    except (OSError, subprocess.SubprocessError) as error:
        _failed.add(_digest(()))
        reason = str(error)
        if isinstance(error, subprocess.CalledProcessError):
            lines = error.stderr.splitlines() or ["no reason given"]
            first = next((line for line in lines if "error" in line), lines[0])
            reason = f"{compiler[0]} failed: {first}"
        raise BuildError(reason) from error


def kernels_digest() -> str:
    """Return a digest of everything that determines the speed of the kernels.

    The digest covers the sources, the compiler, its flags and the CPU. It is "none" without a
    compiler, or if a build has failed in this process.
    """
    digest = _digest(())
    return "none" if digest is None or digest in _failed else digest


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
    if platform.machine() in ("x86_64", "AMD64"):  # GCC for ARM rejects this option
        # Without it, GCC uses only 256-bit vectors on some CPUs with AVX-512.
        flags.append("-mprefer-vector-width=512")
    return compiler, [*compiler, *flags, *(f"-D{macro}" for macro in macros), "-shared", "-fPIC"]


def _digest(macros: Sequence[str]) -> str | None:
    """Return a digest of a library's inputs; None if the compiler or the CPU is unknown."""
    compiler, command = _command(macros)
    ask = [*compiler, "--version"]
    try:
        version = subprocess.run(ask, check=True, capture_output=True, timeout=10).stdout
        digest = hashlib.sha256(repr((command, version, cpu_features())).encode())
    except (OSError, subprocess.SubprocessError):
        return None
    for file in (*SOURCES, FOLDER / "numbers.h"):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _cached_file(macros: Sequence[str]) -> Path | None:
    """Return the path of the cached library for these macros, and this compiler, source and CPU.

    The result is None if there is no digest, or if the folder cannot be created, belongs to another
    user, or is writable by others.
    """
    folder = cache_folder() / "kernels"
    digest = _digest(macros)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError:
        return None
    is_own = about.st_uid == os.getuid() and not about.st_mode & 0o022
    return folder / f"{digest}.so" if digest and is_own else None


def fast_dtype(
    kind: str, work: Callable[[torch.dtype], Callable[[], object]]
) -> tuple[torch.dtype, str]:
    """Return the dtype in which this CPU does a kind of work faster, and a short reason.

    Args:
        kind: name of the kind of work, under which the result is cached.
        work: a function that returns, for a dtype, the function to time.
    """
    import torch

    held_down = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if held_down in WITHOUT_BF16:
        return torch.float32, f"ONEDNN_MAX_CPU_ISA={held_down} disables bf16"
    if not (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()):
        return torch.float32, "this CPU has neither AVX512-BF16 nor AMX"
    seconds = _measured(kind, work)
    times = _times_as_fast(seconds)
    name = "bfloat16" if times > MARGIN else "float32"
    return getattr(torch, name), f"measured here: bf16 is {times:.2g} times as fast as fp32"


def learning_dtype() -> tuple[torch.dtype, str]:
    """Return the dtype for the matmuls of a training pass on this CPU, and a short reason."""
    return fast_dtype("learning", _learning_products)


def _measured(kind: str, work: Callable[[torch.dtype], Callable[[], object]]) -> dict[str, float]:
    """Return the seconds per call of the work for each dtype, from the cache file if possible.

    If no two timings agree, nothing is cached, and a warning is printed.
    """
    import torch

    cache = cache_folder()
    file, known, key = cache / "number_types.json", {}, _key(kind)
    with suppress(OSError, ValueError, TypeError):
        known = dict(json.loads(file.read_text(encoding="utf-8")))
    seconds = known.get(key)
    if isinstance(seconds, dict) and seconds.keys() == {*DTYPES}:
        return seconds
    functions = {name: work(getattr(torch, name)) for name in DTYPES}
    seconds, apart = _time_until_two_agree(functions)
    if apart:
        terminal.line(
            f"warning: could not measure which dtype is faster for {kind}, because other programs "
            f"use the CPU (bf16 was {apart[0]:.2g} to {apart[1]:.2g} times as fast as fp32): the "
            "next run measures again; --dtype selects a dtype"
        )
        return seconds
    if _key(kind) != key:  # compiling the kernels failed, so other code was timed
        return seconds
    with suppress(OSError):  # if the cache is not writable, the next run measures again
        cache.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        scratch.write_text(json.dumps(known | {key: seconds}, indent=2), encoding="utf-8")
        scratch.replace(file)  # atomic: no reader sees an incomplete file
    return seconds


def _key(kind: str) -> str:
    """Return the cache key of a measurement: everything on which its result depends."""
    import torch

    try:
        features = cpu_features()
        cpu = hashlib.sha256("\n".join(features).encode()).hexdigest()[:12]
    except OSError:
        features, cpu = [], "unknown"
    names = (line.partition(":")[2].strip() for line in features if line.startswith("model name"))
    parts = [
        kind,
        next(names, platform.processor() or platform.machine()),
        f"features {cpu}",
        f"kernels {kernels_digest()[:12]}",
        f"{torch.get_num_threads()} threads",
        f"torch {torch.__version__}",
        *(f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)),
    ]
    return ", ".join(parts)


def _time_until_two_agree(
    functions: dict[str, Callable[[], object]],
) -> tuple[dict[str, float], tuple[float, float] | None]:
    """Time the functions until two timings agree.

    Returns:
        The seconds per call of each function, and None. If no two of TIMINGS timings agree, the
        second value is instead the lowest and the highest speed ratio of bf16 to fp32.
    """
    timings: list[dict[str, float]] = []
    for _ in range(TIMINGS):
        seconds = _time_in_turns(functions)
        for other in timings:
            low, high = sorted((_times_as_fast(seconds), _times_as_fast(other)))
            if high < AGREEMENT * low:
                return seconds, None
        timings.append(seconds)
    found = sorted(map(_times_as_fast, timings))
    return {name: min(each[name] for each in timings) for name in functions}, (found[0], found[-1])


def _times_as_fast(seconds: dict[str, float]) -> float:
    """Return the speed ratio of bf16 to fp32."""
    return seconds["float32"] / seconds["bfloat16"]


def _time_in_turns(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the seconds per call of each function: the best of several alternating turns."""
    import torch

    best = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):
        for name, function in functions.items():
            with torch.inference_mode():
                function()  # warm-up
                calls, begin = 0, time.perf_counter()
                while (passed := time.perf_counter() - begin) < SECONDS:
                    function()
                    calls += 1
            best[name] = min(best[name], passed / calls)
    return best


def _learning_products(dtype: torch.dtype) -> Callable[[], object]:
    """Build a function that runs a layer's matmul, and the matmul for the gradient of its input."""
    import torch

    x, weight = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(INNER, WIDTH, dtype=dtype)
    return lambda: x @ weight.mT @ weight
