"""Runs the grid, lists its cells, or writes its report."""

import sys

if not __package__:  # python benchmarks/evidence
    sys.stderr.write("error: run it as python -m benchmarks.evidence\n")
    sys.exit(2)

from benchmarks import evidence
from benchmarks.evidence import grid
from benchmarks.evidence.plan import PRESETS, EvidenceConfig
from rlm.cli import run_main, terminal


def main(config: EvidenceConfig) -> int:
    if config.list:
        grid.show(config)
    elif config.command == "run":
        left, failed = grid.run(config)
        if failed:
            names = ", ".join(cell.name for cell in failed)
            terminal.line(f"failed: {names}; {len(left)} cells are left")
            return 1
        terminal.line(
            f"{len(left)} cells are left: run the same command again"
            if left
            else "all done; next: python -m benchmarks.evidence report"
        )
    else:
        from benchmarks.evidence.report import write_report

        write_report(config)
    return 0


if __name__ == "__main__":
    run_main(main, EvidenceConfig, presets=PRESETS, description=evidence.__doc__)
