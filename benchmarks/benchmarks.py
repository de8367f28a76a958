"""Imported as `benchmarks` if a script is run by its path: prints how to run it."""

import sys
from pathlib import Path

sys.stderr.write(f"error: run it as python -m benchmarks.{Path(sys.argv[0]).stem}\n")
sys.exit(2)
