"""Loads, compares and copies the results of finished cells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evidence.intervals import Interval, Scores, crossed_bootstrap, difference, scores
from benchmarks.evidence.plan import ARMS, EvidenceConfig, read_json
from benchmarks.evidence.pools import OTHER, WORDS
from rlm.cli import UsageError
from rlm.runs import replace_file

HASH_DIGITS = 12  # at the end of the id of a generated problem
Result = dict[str, Any]  # a cell's result.json


@dataclass(frozen=True)
class Results:
    """Contains the finished cells of a grid by method, in the order of ARMS, and then by seed."""

    arms: dict[str, list[Result]]

    @classmethod
    def load(cls, folder: Path) -> Results:
        """Load the results of all methods, whose cells must have the same settings."""
        files = sorted(folder.glob("*.json"))
        found = [cell for file in files for cell in json.loads(file.read_text(encoding="utf-8"))]
        check_settings(folder, found)
        by_arm = {arm: [one for one in found if one["arm"] == arm] for arm in ARMS}
        return cls({a: sorted(rows, key=lambda r: r["seed"]) for a, rows in by_arm.items() if rows})

    @property
    def cells(self) -> list[Result]:
        return [cell for cells in self.arms.values() for cell in cells]

    @property
    def settings(self) -> dict[str, Any]:
        return self.cells[0]["settings"]

    @property
    def seeds(self) -> list[int]:
        """The training seeds, without the seed of the base model, which is not trained."""
        return sorted({c["seed"] for c in self.cells if ARMS[c["arm"]].kind != "base"})

    @property
    def sets(self) -> list[str]:
        """The test sets on which every cell was evaluated."""
        return [n for n in self._all_sets if all(n in cell["tests"] for cell in self.cells)]

    @property
    def left_out(self) -> list[str]:
        """The test sets on which at least one cell was not evaluated."""
        return [name for name in self._all_sets if name not in self.sets]

    @property
    def pooled(self) -> list[str]:
        """The test sets that are pooled in most tables."""
        shared = self.sets
        return [name for name in WORDS if name in shared] or [n for n in shared if n != OTHER]

    @property
    def _all_sets(self) -> list[str]:
        return list(dict.fromkeys(name for cell in self.cells for name in cell["tests"]))

    def accuracy(
        self, arm: str, metric: str, grading: str = "strict", sets: Sequence[str] = ()
    ) -> Interval:
        """Return the mean score of a method, with its interval, over `sets` or the pooled sets."""
        return crossed_bootstrap(matrix(self.arms[arm], sets or self.pooled, metric, grading))

    def lead(self, arm: str, over: str, metric: str, without: str = "") -> Interval:
        """Return the lead of `arm` over `over` in strict accuracy.

        It is computed on their common seeds and problems, except for those of the template
        `without`.
        """
        return difference(*self.paired(over, arm, metric, without))

    @property
    def templates(self) -> list[str]:
        """The templates of the generated problems, or [] if the problems have no templates."""
        tests = self.cells[0]["tests"]
        found = dict.fromkeys(
            template_of(p) for name in self.pooled for p in tests[name]["problems"]
        )
        return [] if "" in found else list(found)

    def largest_lead(self, arm: str, over: str) -> str:
        """Return the template on which the greedy lead of `arm` over `over` is largest."""
        return max(self.templates, key=lambda t: self.right(arm, t) - self.right(over, t))

    def right(self, arm: str, template: str) -> float:
        """Return the mean greedy strict accuracy of a method on the problems of a template."""
        cells, sets = self.arms[arm], self.pooled
        names = [p for name in sets for p in cells[0]["tests"][name]["problems"]]
        chosen = [template_of(name) == template for name in names]
        return float(matrix(cells, sets, "greedy", "strict")[:, chosen].mean())

    def shared(self, a: str, b: str) -> list[list[Result]]:
        """Return the cells of two methods for their common seeds.

        The base model is paired with all seeds.
        """
        rows = [self.arms.get(a, []), self.arms.get(b, [])]
        if "base" in (ARMS[a].kind, ARMS[b].kind):
            return rows
        seeds = set.intersection(*({cell["seed"] for cell in side} for side in rows))
        return [[cell for cell in side if cell["seed"] in seeds] for side in rows]

    def share_a_seed(self, a: str, b: str) -> bool:
        return all(self.shared(a, b))

    def paired(self, a: str, b: str, metric: str, without: str = "") -> tuple[Scores, Scores]:
        """Return both methods' scores on their common seeds and problems, except for one template.

        The base model is sampled on fewer problems, which are the first problems of the others.
        """
        if not self.share_a_seed(a, b):
            raise ValueError("no seed is finished for both methods")
        left, right = [], []
        for name in self.pooled:
            mine, theirs = (matrix(side, [name], metric, "strict") for side in self.shared(a, b))
            count = min(mine.shape[1], theirs.shape[1])
            first, second = (side[0]["tests"][name]["problems"] for side in self.shared(a, b))
            if (names := first[:count]) != second[:count]:
                raise ValueError(f"{a} and {b} were evaluated on different problems")
            kept = [not without or template_of(problem) != without for problem in names]
            left.append(mine[:, :count][:, kept])
            right.append(theirs[:, :count][:, kept])
        return np.concatenate(left, axis=1), np.concatenate(right, axis=1)


def check_settings(folder: Path, found: Sequence[Result]) -> None:
    """Check that all results, which are or will be in `folder`, have the same settings."""
    for one in found[1:]:
        mine, first = one["settings"], found[0]["settings"]
        if any(mine[name] != first[name] for name in mine.keys() & first.keys()):
            names = f"{one['cell']} and {found[0]['cell']}"
            raise UsageError(f"{folder}: {names} have different settings")


def matrix(cells: Sequence[Result], sets: Sequence[str], metric: str, grading: str) -> Scores:
    """Return a method's scores on all problems of the test sets: (seeds, problems)."""
    names = [[cell["tests"][name]["problems"] for name in sets] for cell in cells]
    if any(other != names[0] for other in names):
        raise ValueError("the cells of a method were evaluated on different problems")
    return np.array(
        [[s for name in sets for s in scores(c["tests"][name], metric, grading)] for c in cells]
    )


def template_of(problem: str) -> str:
    """Return the template in the id of a generated problem, such as age_later-b648b0e82a13."""
    name, _, number = problem.rpartition("-")
    return name if len(number) == HASH_DIGITS else ""


def copy_results(config: EvidenceConfig) -> None:
    """Copy the results of finished cells to the committed files, one file per method.

    The files keep the results of seeds that are not in this grid. If the settings differ from those
    of the committed results, no file is changed.
    """
    target = config.docs / "evidence"
    stored = [json.loads(file.read_text(encoding="utf-8")) for file in target.glob("*.json")]
    arms = {cells[0]["arm"]: {cell["seed"]: cell for cell in cells} for cells in stored}
    changed: set[str] = set()
    for file in sorted((config.grid / "cells").glob("*/result.json")):
        result = read_json(file)  # of any seed, also if it is not in --seeds
        arms.setdefault(result["arm"], {})[result["seed"]] = result
        changed.add(result["arm"])
    check_settings(target, [cell for cells in arms.values() for cell in cells.values()])
    for arm in changed:
        lines = ",\n".join(json.dumps(arms[arm][n], ensure_ascii=False) for n in sorted(arms[arm]))
        target.mkdir(parents=True, exist_ok=True)
        replace_file(target / f"{arm}.json", f"[\n{lines}\n]\n")


def machine_name(cell: Result) -> str:
    """Return a machine's name. Seconds are comparable between cells with the same name."""
    found = cell["machine"]
    sets = [name for name in found.get("instruction_sets") or () if name not in ("fma", "f16c")]
    limit = found.get("onednn_max_cpu_isa")
    parts = [
        found["cpu"] + (f" ({sets[-1]})" if sets else ""),
        f"{found['cores']} cores",
        f"{found['memory_gb']} GB",
        found["dtype"] + (f" (ONEDNN_MAX_CPU_ISA={limit})" if limit else ""),
        *([found["gpu"]] if found["gpu"] else []),
    ]
    return ", ".join(parts)
