"""Run a script: parse its command line, call its `main`, and exit with an exit code.

A user's mistake is printed as a one-line error. The exit code is the return value of `main` (0 for
None), 2 after a user's mistake or without enough memory or disk space, or 128 + n after signal n.
"""

import dataclasses
import errno
import logging
import os
import select
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rlm.cli.flags import print_stderr, replace_unencodable, with_dashes
from rlm.cli.options import Interrupted, UsageError, check, resolve_config

T = TypeVar("T")

# Maps each script to its subcommand of `rlm`.
CONSOLE = {
    "train_sft": "sft",
    "train_grpo": "grpo",
    "eval": "eval",
    "inference": "ask",
    "server": "serve",
}
IS_INSTALLED = not (Path(__file__).parents[2] / "requirements.txt").exists()  # from a wheel


def check_command_line(cls: type, **parse_options: Any) -> None:
    """Exit if the command line contains --help or a mistake.

    Scripts call this function before slow imports; `run_main` parses the command line again. If the
    config defines `check_files`, that method checks the files that are named by options.
    """
    _open_standard_streams()
    sys.excepthook = _report_error  # Ctrl-C during the imports that follow prints no traceback
    try:
        config = check(cls, **parse_options)
        if hasattr(config, "check_files"):
            config.check_files()
    except UsageError as error:
        sys.exit(_refuse(error))


def run_main(main: Callable[[T], int | None], cls: type[T], **parse_options: Any) -> NoReturn:
    """Resolve the command line, call `main(config)` and exit with the code it returns."""
    _open_standard_streams()
    logging.basicConfig(format="%(message)s")
    if os.environ.get("RANK", "0") == "0":  # only the main process logs
        logging.getLogger("rlm").setLevel(logging.INFO)
    try:
        code = main(resolve_config(cls, **parse_options))
        sys.stdout.flush()
    except UsageError as error:
        code = _refuse(error)
    except Interrupted as error:
        if error.note:
            print_stderr(error.note + _how_to_resume(cls, parse_options.get("argv")))
        code = 128 + error.number
    except KeyboardInterrupt:
        print_stderr("interrupted")
        code = 130
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print_stderr(f"error: out of memory: {_what_takes_less(cls)} ({first_line})")
        code = 2
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # no events: only errors are reported
        if not poll.poll(0):  # stdout is intact, so another pipe broke: a bug
            raise
        # The process that reads stdout has ended, as in `script | head`. Python flushes stdout at
        # exit, so redirect it to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except OSError as error:  # a full disk damages no file, so the command can be repeated
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = f"{error.filename} cannot be written" if error.filename else "the disk is full"
        go_on = _how_to_resume(cls, parse_options.get("argv")) or " and run it again"
        print_stderr(f"error: {what}: {error.strerror}; free disk space{go_on}")
        code = 2
    sys.exit(code)


def _open_standard_streams() -> None:
    """Open standard streams that the parent process closed (`>&-`).

    Otherwise the next file that is opened would get the number of a standard stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open() uses the lowest free number, which is `number`
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115
    replace_unencodable(sys.stdout)


def _report_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an uncaught exception as Python does, but print one line for Ctrl-C."""
    if issubclass(kind, KeyboardInterrupt):
        print_stderr("interrupted")
    else:
        sys.__excepthook__(kind, error, trace)


def _refuse(error: UsageError) -> int:
    """Print an error as one line and return the exit code."""
    print_stderr(f"error: {' '.join(str(error).split())}")
    return 2


def _how_to_resume(cls: type, argv: Sequence[str] | None) -> str:
    """Return a hint with the command that resumes the run; "" if the script has no --resume.

    With several processes, the hint contains no command, because the launcher is not known.
    """
    if "resume" not in {field.name for field in dataclasses.fields(cls)}:
        return ""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return "; to continue, start all processes again with --resume"
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # not None for python -m
    name = sys.argv[0]  # train_grpo.py, or `rlm grpo` if started by the console command
    script = name.split() if name.startswith("rlm ") else ["python", name]
    script = ["python", "-m", spec.name.removesuffix(".__main__")] if spec else script
    typed = [str(token) for token in (sys.argv[1:] if argv is None else argv)]
    typed += [] if "--resume" in typed else ["--resume"]
    return f"; continue with: {shlex.join([*script, *typed])}"


def command_of(script: str, **options: object) -> str:
    """Return the command that runs a script.

    The command is `rlm NAME` in an installation from a wheel, which has no script files.

    Args:
        options: options of the command, quoted for a shell; options that are None are omitted.

    >>> command_of("train_sft", dataset="my file.jsonl", columns=None)
    "python train_sft.py --dataset 'my file.jsonl'"
    """
    command = f"rlm {CONSOLE[script]}" if IS_INSTALLED else f"python {script}.py"
    typed = [
        (with_dashes(name), str(value)) for name, value in options.items() if value is not None
    ]
    return " ".join([command, *(shlex.join(pair) for pair in typed)])


def _what_takes_less(cls: type) -> str:
    """Return advice on the options of a script that reduce its memory use."""
    options = {field.name for field in dataclasses.fields(cls)}
    lower = ("train_batch_size", "micro_batch", "max_num_seqs", "max_length", "max_new_tokens")
    use = {"quantize": "--quantize 4bit", "model": "a smaller --model"}
    named = " or ".join(with_dashes(name) for name in lower if name in options)
    used = ", ".join(text for name, text in use.items() if name in options)
    return (
        "; ".join(filter(None, [named and f"lower {named}", used and f"use {used}"]))
        or "see --help"
    )


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocator (Python's, PyTorch's or that of the GPU) ran out of memory."""
    name, text = type(error).__name__, str(error)
    return name in ("MemoryError", "OutOfMemoryError") or "allocate memory" in text
