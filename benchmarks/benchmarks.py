"""Found as `benchmarks` where a script here is run by its path: says how it is run."""

import sys
from pathlib import Path

sys.stderr.write(f"error: run it as python -m benchmarks.{Path(sys.argv[0]).stem}\n")
sys.exit(2)
