"""Selects fp32 or bf16 on a CPU by measurement: the CPU flags do not show which dtype is faster.

Some CPUs with AVX512-BF16 multiply bf16 at half the speed of fp32. Each kind of work is timed in
both dtypes until two timings agree. The result is cached on disk, under a key that contains
everything on which the timings depend.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlm.cli import terminal
from rlm.ops.build import cache_folder, cpu_features, kernels_digest

if TYPE_CHECKING:  # the options need DTYPES, and --help must not import torch
    import torch

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
# Environment variables that determine which instructions oneDNN, torch and our matmuls use.
VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def fast_dtype(
    kind: str, work: Callable[[torch.dtype], Callable[[], object]]
) -> tuple[torch.dtype, str]:
    """Return the dtype in which this CPU does a kind of work faster, and a short reason.

    Args:
        kind: name of the kind of work, under which the result is cached.
        work: returns, for a dtype, the function that is timed.
    """
    import torch

    held_down = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if held_down in WITHOUT_BF16:
        return torch.float32, f"ONEDNN_MAX_CPU_ISA={held_down} disables bf16"
    if not (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()):
        return torch.float32, "this CPU has no bf16 units"
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
    with suppress(OSError, ValueError):
        known = json.loads(file.read_text(encoding="utf-8"))
    seconds = known.get(key) if isinstance(known, dict) else None
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
    if _key(kind) != key:  # the kernels were not compiled after all
        return seconds
    with suppress(OSError):  # if the cache is not writable, the next run measures again
        cache.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        all_known = (known if isinstance(known, dict) else {}) | {key: seconds}
        scratch.write_text(json.dumps(all_known, indent=2), encoding="utf-8")
        scratch.replace(file)  # atomic: no reader sees an incomplete file
    return seconds


def _key(kind: str) -> str:
    """Return the cache key of a measurement: everything on which its result depends."""
    import torch

    try:
        cpu = hashlib.sha256("\n".join(cpu_features()).encode()).hexdigest()[:12]
    except OSError:
        cpu = "unknown"
    parts = [
        kind,
        _cpu_name(),
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
    """Build a function that runs a layer's matmuls, forward and for the gradient of its input."""
    import torch

    x, weight = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(INNER, WIDTH, dtype=dtype)
    return lambda: x @ weight.mT @ weight


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
