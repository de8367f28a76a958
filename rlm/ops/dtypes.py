"""Chooses fp32 or bf16 on a CPU by measuring, because CPU flags do not say which is faster.

Some CPUs with AVX512-BF16 multiply bf16 at half the speed of fp32. Each kind of work is timed in
both types until two timings agree. The result is kept for this machine and all that the timings
depend on.
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
from rlm.ops.build import cpu_features, kernels_digest

if TYPE_CHECKING:  # options name the types, and --help loads no torch
    import torch

DTYPES = ("float32", "bfloat16")
# How much faster bf16 must be. At the same speed fp32 is chosen, because it rounds less.
MARGIN = 1.1
# Values of ONEDNN_MAX_CPU_ISA without bf16 products.
WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
ROWS, WIDTH, INNER = 1024, 576, 1536  # sizes of the timed products
ROUNDS, SECONDS = 3, 0.04  # number and least seconds of the turns in which each type is timed
# Two timings agree if one finds bf16 less than so many times as fast as the other does. Other
# programs make them disagree; so many timings are made at most.
AGREEMENT, TIMINGS = 1.2, 6
# These decide which instructions oneDNN, torch and our own products use.
VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def fast_dtype(
    kind: str, work: Callable[[torch.dtype], Callable[[], object]]
) -> tuple[torch.dtype, str]:
    """Return the type in which this CPU does a kind of work faster, and why in a few words.

    Args:
        kind: name of the work, under which the result is kept.
        work: makes the function to time, for a type.
    """
    import torch

    held_down = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if held_down in WITHOUT_BF16:
        return torch.float32, f"ONEDNN_MAX_CPU_ISA={held_down} has no bf16"
    if not (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()):
        return torch.float32, "this CPU has no bf16 units"
    seconds = _measured(kind, work)
    times = _times_as_fast(seconds)
    name = "bfloat16" if times > MARGIN else "float32"
    return getattr(torch, name), f"measured here: bf16 is {times:.2g} times as fast as fp32"


def learning_dtype() -> tuple[torch.dtype, str]:
    """Return the type for the products of a learning pass on this CPU, and why in a few words."""
    return fast_dtype("learning", _learning_products)


def _measured(kind: str, work: Callable[[torch.dtype], Callable[[], object]]) -> dict[str, float]:
    """Return the seconds of the work by type, from this machine's file if it has them.

    If no two timings agree, nothing is kept, and a line says so.
    """
    import torch

    cache = Path(os.environ.get("RLM_CACHE", Path.home() / ".cache" / "rlm"))
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
            f"warning: which number type is faster for {kind} could not be measured, because other "
            f"programs use the CPU (bf16 was {apart[0]:.2g} to {apart[1]:.2g} times as fast as "
            "fp32): the next run measures again; --dtype chooses one"
        )
        return seconds
    with suppress(OSError):  # a home that cannot be written to: measured again next time
        cache.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        all_known = (known if isinstance(known, dict) else {}) | {key: seconds}
        scratch.write_text(json.dumps(all_known, indent=2), encoding="utf-8")
        scratch.replace(file)  # atomic: no reader sees half a file
    return seconds


def _key(kind: str) -> str:
    """Return the key of a measurement: all that it depends on."""
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
    """Return the seconds of one call of each, and None; or, if no two of TIMINGS agree, how many
    times as fast bf16 was at least and at most."""
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
    """Return how many times as fast bf16 is as fp32."""
    return seconds["float32"] / seconds["bfloat16"]


def _time_in_turns(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the seconds of one call of each: the best of several turns, taken alternately."""
    import torch

    best = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):
        for name, function in functions.items():
            with torch.inference_mode():
                function()  # to warm up
                calls, begin = 0, time.perf_counter()
                while (passed := time.perf_counter() - begin) < SECONDS:
                    function()
                    calls += 1
            best[name] = min(best[name], passed / calls)
    return best


def _learning_products(dtype: torch.dtype) -> Callable[[], object]:
    """Run a layer's product forward, and backward to its input."""
    import torch

    x, weight = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(INNER, WIDTH, dtype=dtype)
    return lambda: x @ weight.mT @ weight


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
