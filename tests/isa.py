"""Runs the numerical tests with the instruction sets of other CPUs: `make test-isa`.

Each setting compiles our code for an architecture and limits torch and oneDNN to its instructions.
A setting that this CPU cannot run is left out, and the reason is printed.

    python tests/isa.py                 all settings, all numerical tests
    python tests/isa.py --quick         a part of the tests, as .ci/run does
    python tests/isa.py --only avx2     one setting; further options go to pytest
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlm.cli import terminal
from rlm.ops.cpu import CPU_INFO

TESTS = Path(__file__).parent
STAND_IN = f"-include {shlex.quote(str(TESTS / 'ops' / 'tiles.h'))}"
# Name → the flags that the CPU must have, and the environment variables.
SETTINGS = {
    "avx2": (
        "avx2 fma",
        {"RLM_MARCH": "haswell", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    ),
    "avx512": (
        "avx512f avx512bw avx512cd avx512dq avx512vl",
        {"RLM_MARCH": "skylake-avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    ),
    "avx512-bf16": (
        "avx512_bf16 avx512_vnni",
        {"RLM_MARCH": "cooperlake", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    ),
    "amx": ("", {}),  # emulated in C on a CPU without AMX
    "no-compiler": ("", {"CC": "none"}),
}
# The numerical tests: kernels, sampling, training, goldens, answers, and the choice of a dtype.
NUMBERS = (
    "ops", "sampling/test_engine.py",
    "training/test_batches.py",
    "training/test_logprobs.py", "training/test_loss.py", "training/test_same_completions.py",
    "training/test_tool_mask.py", "test_goldens.py", "test_goldens_texts.py", "test_inference.py",
    "test_train_grpo.py",
)  # fmt: skip
QUICK = ("ops/test_kernels.py", "ops/test_linear.py", "test_goldens.py")


def cpu_flags() -> set[str]:
    """Return the flags of this CPU; the set is empty if the system does not list them."""
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.is_file() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


def run(name: str, tests: tuple[str, ...], options: list[str]) -> int:
    """Run the tests in a setting; return pytest's exit code, or 0 if this CPU cannot run them."""
    needed, variables = SETTINGS[name]
    flags = cpu_flags()
    if missing := sorted(set(needed.split()) - flags):
        terminal.line(f"== {name}: SKIPPED, this CPU has no {', '.join(missing)}")
        return 0
    if name == "amx" and "amx_bf16" not in flags:
        variables = variables | {"CC": f"{os.environ.get('CC') or 'cc'} {STAND_IN}"}
        terminal.line("== amx: this CPU has none, so its instructions are those of tiles.h")
    command = [sys.executable, "-m", "pytest", "-q", *options, *(str(TESTS / t) for t in tests)]
    shown = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
    terminal.line(f"== {name}: {shown}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        code = subprocess.run(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1", "RLM_CACHE": cache} | variables,
            cwd=TESTS.parent,
            check=False,
        ).returncode
    terminal.line(f"== {name}: exit code {code}, {time.monotonic() - started:.0f} s")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SETTINGS, action="append", help="a setting")
    parser.add_argument("--quick", action="store_true", help="a part of the tests")
    arguments, options = parser.parse_known_args()
    tests = QUICK if arguments.quick else NUMBERS
    codes = {name: run(name, tests, options) for name in arguments.only or SETTINGS}
    failed = [name for name, code in codes.items() if code]
    terminal.line(f"failed: {', '.join(failed)}" if failed else "no setting failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
