"""Print how to run a benchmark: `benchmarks` is this file if a script is run by its path."""

import sys
from pathlib import Path

sys.stderr.write(f"error: run it as python -m benchmarks.{Path(sys.argv[0]).stem}\n")
sys.exit(2)
