"""Conformance: formulas with hand-computed values, run against this trainer and others."""

import lazy_loader

# File → what other packages import of it.
EXPORTS = {"cases": "Case load_cases run_case", "comparison": "compare table"}
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={file: names.split() for file, names in EXPORTS.items()}
)
