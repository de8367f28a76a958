"""Command lines: a dataclass becomes flags, YAML and presets; exit codes, one-line errors, tables,
progress bars."""
