"""docs/results/README.md: everything the finished cells say, and nothing else.

`result.json` of each finished cell is copied to docs/results/evidence/ (no texts, a zero or a one
for each completion); the page and its pictures are made from these copies alone, so anybody can
make them again. A section without data is left out. Sentences about an interval are written by
rule: above zero, below zero (with few seeds: for these alone), or zero lies inside. What a person
concludes stands in docs/results/conclusions.md and goes on top.
"""

from __future__ import annotations

from benchmarks.evidence import across, by_family, scrutiny, sections
from benchmarks.evidence.plan import EvidenceConfig
from benchmarks.evidence.results import collect, load_results, pooled_sets
from rlm.cli import terminal
from rlm.cli.options import UsageError


def write_report(config: EvidenceConfig) -> None:
    """
    Raises:
        UsageError: no cell is done, or the cells do not belong together.
    """
    collect(config)
    results = load_results(config.docs / "evidence")
    if not results:
        raise UsageError(f"no cell is done, in {config.grid} or {config.docs}/evidence")
    sets = pooled_sets(results)
    parts = [
        sections.head(results),
        sections.concluded(config.docs),
        sections.summary(results, sets),
        sections.leads(results, sets),
        across.longer_runs(results, config.docs),
        sections.controls(results, sets),
        sections.by_set(results, sets),
        sections.passes(results, sets, config.docs),
        sections.curves(results, config.docs),
        by_family.families(results, config.docs),
        scrutiny.beside_trl(results, sets),
        scrutiny.algorithms(results, sets),
        scrutiny.watch(results, sets),
        scrutiny.failures(config.docs / "failures"),
        scrutiny.prompts(results),
        scrutiny.cells(results),
    ]
    text = "\n\n".join("\n".join(part).strip() for part in parts if part)
    page = config.docs / "README.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text + "\n", encoding="utf-8")
    terminal.line(f"written: {page}")
