"""The library is cached by compiler, source and CPU, and only in a folder of this user."""

import shlex
import shutil
import stat

import pytest

from rlm.cli.options import UsageError
from rlm.ops import cpu as this_cpu
from rlm.ops.cpu import load_library

MACROS = ["QUERIES=1", "WIDTH=8", "DRAWN=256"]


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler for one small source file; returns a function that counts the builds so far."""
    calls = tmp_path / "calls"
    script = tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\necho "$@" >> "{calls}"\nexec cc "$@"\n')
    script.chmod(0o755)
    source = tmp_path / "small.c"
    source.write_text("int block_columns(void) { return 1; }\n")
    monkeypatch.setattr(this_cpu, "SOURCES", [source])
    monkeypatch.setenv("CC", shlex.quote(str(script)))
    monkeypatch.setenv("RLM_CACHE", str(tmp_path))
    if shutil.which("cc") is None:
        pytest.skip("needs cc")
    load_library(MACROS)
    if not this_cpu.CPU_INFO.is_file():
        pytest.skip("nothing is kept where the CPU is not known")

    def compiled():
        return sum("--version" not in line for line in calls.read_text().splitlines())

    assert compiled() == 1
    return compiled


def test_an_equal_build_is_taken_from_disk(compiler, tmp_path):
    assert load_library(MACROS).block_columns() >= 0
    assert compiler() == 1
    load_library([*MACROS, "BF16"])
    assert compiler() == 2
    folder = tmp_path / "kernels"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(list(folder.iterdir())) == 2  # no incomplete file


def test_a_folder_that_cannot_be_written_keeps_no_build(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda folder, mode: False)  # chmod would not stop root
    assert load_library([*MACROS, "BF16"]).block_columns() >= 0
    assert compiler() == 2
    assert len(list((tmp_path / "kernels").iterdir())) == 1


def test_a_user_without_a_home_is_told_to_name_a_cache(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("RLM_CACHE", raising=False)
    monkeypatch.setattr(this_cpu.Path, "home", no_home)
    with pytest.raises(UsageError, match="no home directory: set RLM_CACHE"):
        this_cpu.cache_folder()


def test_a_failed_build_is_no_part_of_a_measurement(tmp_path, monkeypatch):
    monkeypatch.setenv("RLM_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(this_cpu, "_failed", set())
    (tmp_path / "wrong.c").write_text("this is no C")
    monkeypatch.setattr(this_cpu, "SOURCES", (tmp_path / "wrong.c",))
    if shutil.which("cc") is None:
        pytest.skip("needs cc")
    assert this_cpu.kernels_digest() != "none"
    with pytest.raises(this_cpu.BuildError):
        load_library(MACROS)
    assert this_cpu.kernels_digest() == "none"
    monkeypatch.setenv("RLM_MARCH", "x86-64")  # no build has failed with these flags
    assert this_cpu.kernels_digest() != "none"


@pytest.mark.parametrize("changed", ["source", "cpu"])
def test_another_source_or_cpu_is_compiled_anew(compiler, tmp_path, monkeypatch, changed):
    if changed == "cpu":
        monkeypatch.setattr(this_cpu, "CPU_INFO", tmp_path / "cpuinfo")
        this_cpu.CPU_INFO.write_text("flags : none\ncpu MHz : 1\n\nflags : of the second")
    else:
        source = tmp_path / "more.c"
        source.write_text("int more(void) { return 1; }\n")
        monkeypatch.setattr(this_cpu, "SOURCES", [*this_cpu.SOURCES, source])
    load_library(MACROS)
    assert compiler() == 2
    if changed == "cpu":
        this_cpu.CPU_INFO.write_text("flags : none\ncpu MHz : 2\n")
    load_library(MACROS)
    assert compiler() == 2


def cut_short(tmp_path, monkeypatch):
    (file,) = (tmp_path / "kernels").iterdir()
    file.unlink()
    file.write_bytes(b"\x7fELF")


def writable_by_others(tmp_path, monkeypatch):
    (tmp_path / "kernels").chmod(0o777)


def no_folder(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLM_CACHE", str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("change", "compilations"), [(cut_short, 2), (writable_by_others, 3), (no_folder, 3)]
)
def test_what_cannot_be_trusted_is_compiled_anew(
    compiler, tmp_path, monkeypatch, change, compilations
):
    change(tmp_path, monkeypatch)
    load_library(MACROS)
    load_library(MACROS)
    assert compiler() == compilations
