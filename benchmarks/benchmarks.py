"""Prints how to run a benchmark.

If a script in this folder is run by its path, Python imports this file as `benchmarks`.
"""

import sys
from pathlib import Path

sys.stderr.write(f"error: run it as python -m benchmarks.{Path(sys.argv[0]).stem}\n")
sys.exit(2)
