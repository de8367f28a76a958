"""The C files, compiled for other CPUs, compute the same as on this CPU.

The ARM code runs in QEMU. Without QEMU or the cross compiler, its tests are skipped.
"""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from rlm.ops import cpu as this_cpu

# Maximum error relative to the largest number that a function returns; bf16 has 8 bits.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
MACROS = ("-DQUERIES=3", "-DWIDTH=64", "-DDRAWN=256", f"-I{this_cpu.FOLDER}")
# Name: (compiler, flag, emulator, whether matmuls are compiled).
CPUS = {
    "AVX2": ("cc", "-march=haswell", (), True),
    "AVX alone": ("cc", "-march=sandybridge", (), False),
    "any x86": ("cc", "-march=x86-64", (), False),
    "ARM": ("aarch64-linux-gnu-gcc", "-march=armv8-a", ("qemu-aarch64",), True),
}


def results(folder: Path, compiler: str, flag: str, runner: tuple[str, ...], dtype: str):
    """Compile and run the test program; return the results of each function by name."""
    flags = [*this_cpu.FLAGS, "-DBF16"] if dtype == "bf16" else this_cpu.FLAGS
    sources = [Path(__file__).with_name("other_cpus.c"), *this_cpu.SOURCES]
    program = folder / "program"
    command = [compiler, flag, *flags, *MACROS, "-static", "-o", program, *sources, "-lm"]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    done = subprocess.run([*runner, program], check=True, capture_output=True, text=True)
    found: dict[str, list[float]] = {}
    for line in done.stdout.splitlines():
        name, value = line.split()
        found.setdefault(name, []).append(float(value))
    return found


@pytest.fixture(scope="module", params=TOLERANCE)
def here(request, tmp_path_factory):
    """The dtype, and the results on this CPU."""
    if shutil.which("cc") is None:
        pytest.skip("there is no compiler")
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, results(folder, "cc", "-march=native", (), request.param)


@pytest.mark.slow
@pytest.mark.parametrize("cpu", CPUS)
def test_another_cpu_computes_the_same(cpu, here, tmp_path):
    compiler, flag, runner, multiplies = CPUS[cpu]
    if compiler == "cc" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("this is no x86 CPU")
    missing = [program for program in (compiler, *runner) if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    dtype, wanted = here
    found = results(tmp_path, compiler, flag, runner, dtype)
    assert ("linear" in found) == multiplies
    both = wanted.keys() & found.keys()
    assert both >= wanted.keys() - {"linear"}
    for name in both:
        largest = max(map(abs, wanted[name]))
        pairs = zip(found[name], wanted[name], strict=True)
        worst = max(abs(one - other) for one, other in pairs)
        assert worst <= TOLERANCE[dtype] * largest, name
