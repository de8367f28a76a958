"""Command lines: a dataclass becomes flags, YAML and presets; exit codes, one-line errors, tables,
progress bars."""

import lazy_loader

# File → what other packages import of it.
EXPORTS = {
    "flags": "by_field check_values find_choice flag merge_switches say_once takes_aliases tell",
    "main": "CONSOLE check_command_line command_of run_main",
    "options": "Interrupted UsageError parse resolve_config to_dict",
    "user_code": "load_from_file",
}
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={file: names.split() for file, names in EXPORTS.items()}
)
