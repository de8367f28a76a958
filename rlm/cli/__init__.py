"""Command lines: a dataclass becomes flags, YAML and presets; exit codes, one-line errors, tables,
progress bars."""

from rlm.cli.flags import (
    by_field,
    check_values,
    find_choice,
    flag,
    merge_switches,
    takes_aliases,
    tell,
)
from rlm.cli.main import CONSOLE, check_command_line, command_of, run_main
from rlm.cli.options import Interrupted, UsageError, parse, resolve_config, to_dict
from rlm.cli.user_code import load_from_file

__all__ = [
    "CONSOLE",
    "Interrupted",
    "UsageError",
    "by_field",
    "check_command_line",
    "check_values",
    "command_of",
    "find_choice",
    "flag",
    "load_from_file",
    "merge_switches",
    "parse",
    "resolve_config",
    "run_main",
    "takes_aliases",
    "tell",
    "to_dict",
]
