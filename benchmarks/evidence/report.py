"""Writes docs/results/README.md and its pictures: what the finished cells say, and nothing else.

`result.json` of each finished cell is copied to docs/results/evidence/ (no texts, a zero or a one
for each completion); the page and its pictures are made from these copies alone, so anybody can
make them again. The page is report.md.jinja; a section without data is left out. Sentences about
an interval are written by rule: above zero, below zero (with few seeds: for these alone), or zero
lies inside. What a person wrote is taken as it is: docs/results/conclusions.md on top, and what was
read of wrong answers, failures/summary.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.evidence import plots
from benchmarks.evidence.intervals import FEW_SEEDS
from benchmarks.evidence.plan import ARMS, OURS, START, EvidenceConfig
from benchmarks.evidence.pools import TITLES
from benchmarks.evidence.results import Result, Results, copy_results, machine_name
from benchmarks.harness import template
from rlm.cli import UsageError, terminal
from rlm.evaluation import GRADINGS

HEADLINE = ("greedy", "sampled")
METRICS = (*HEADLINE, "majority")
VARIANTS = ("algorithm", "choice")  # roles of GRPO in another form
PAIRS = [(metric, grading) for metric in HEADLINE for grading in GRADINGS]


def write_report(config: EvidenceConfig) -> None:
    """
    Raises:
        UsageError: no cell is done, or the cells do not belong together.
    """
    copy_results(config)
    results = Results.load(config.docs / "evidence")
    if not results.arms:
        raise UsageError(f"no cell is done, in {config.grid} or {config.docs}/evidence")
    page = config.docs / "README.md"
    values = contents(results, config.docs)
    draw(results, values, config.docs)
    page.write_text(render(results, values), encoding="utf-8")
    terminal.line(f"written: {page}")


def render(results: Results, values: dict[str, Any]) -> str:
    return template(
        Path(__file__).with_name("report.md.jinja"),
        title_of=lambda name: TITLES.get(name, name),
        arm_title=lambda arm: ARMS[arm].title,
        k_is="k = {}".format,
        average=average,
        machine_name=machine_name,
        timed_alike=partial(timed_alike, results),
        short=short,
    ).render(values)


def contents(results: Results, docs: Path) -> dict[str, Any]:
    """What the page is filled in with."""
    arms, share = list(results.arms), results.share_a_seed
    uncontrolled = [arm for arm in arms if ARMS[arm].role != "control"]
    trained = [rows for arm, rows in results.arms.items() if ARMS[arm].kind != "base"]
    beside_ours = [arm for arm in uncontrolled if arm != OURS and share(OURS, arm)]
    # The base was once asked in several ways, and took the best; new cells have no "prompts".
    bases = {a: results.arms[a][0]["training"] for a in arms if ARMS[a].kind == "base"}
    bases = {arm: tried for arm, tried in bases.items() if "prompts" in tried}
    theirs = {cell["seed"]: cell for cell in results.arms.get("trl", ())}
    ours = results.arms.get(OURS, [])
    most = results.settings["samples"]
    grids = all_grids(results, docs)
    seconds = [c["training"].get("wall", 0) + c["judging_seconds"] for c in results.cells]
    constants = {"ARMS": ARMS, "OURS": OURS, "START": START, "FEW_SEEDS": FEW_SEEDS}
    constants |= {"GRADINGS": GRADINGS, "HEADLINE": HEADLINE, "METRICS": METRICS, "PAIRS": PAIRS}
    return constants | {
        "results": results,
        "settings": results.settings,
        "tests": results.cells[0]["tests"],
        "machines": machines(results),
        "conclusions": by_hand(docs / "conclusions.md"),
        "failures": by_hand(docs / "failures" / "summary.md"),
        "other_starts": len({tuple(cell["seed"] for cell in rows) for rows in trained}) > 1,
        "beside_ours": beside_ours,
        "rivals": [arm for arm in beside_ours if ARMS[arm].role == "rival"],
        "start_and_rivals": [arm for arm in arms if arm == START or ARMS[arm].role == "rival"],
        "controls": [a for a in arms if ARMS[a].role == "control" and share(a, START)],
        "uncontrolled": uncontrolled,
        "variants": [a for a in arms if ARMS[a].role in VARIANTS and share(a, OURS)],
        "learned": [
            arm
            for arm in arms
            if ARMS[arm].kind not in ("base", "sft")
            and ARMS[arm].role not in ("control", *VARIANTS)
            and share(START, arm)
        ],
        "gained": share(OURS, START),
        "ks": sorted({2**i for i in range(most.bit_length())} | {most}),
        "grids": grids,
        "over_grids": [
            arm
            for arm in ARMS
            if (arm == START or ARMS[arm].role == "rival")
            and any(grid.share_a_seed(OURS, arm) for grid in grids.values())
        ],
        "grids_drawn": len(alike(grids, results)) > 1,
        "trl_pairs": [(c, theirs[c["seed"]]) for c in ours if c["seed"] in theirs],
        "thirds": thirds([cell["training"]["steps"] for cell in ours]),
        "base_prompts": bases,
        "tried_on": next((tried["tried_on"] for tried in bases.values()), 0),
        "hours": sum(seconds) / 3600,
        "not_run": not_run(results),
    }


def draw(results: Results, values: dict[str, Any], docs: Path) -> None:
    """The page's pictures."""
    shown = [arm for arm in values["uncontrolled"] if ARMS[arm].role not in VARIANTS]
    plots.pass_at_k(results, shown, values["ks"], docs / "pass_at_k.png")
    if values["learned"]:
        plots.curves(results, values["learned"], docs / "curves.png")
    if values["gained"]:
        plots.families(results, docs / "families.png")
    if values["grids_drawn"]:
        same = alike(values["grids"], results)
        plots.leads(same, values["over_grids"], docs / "longer_runs.png")


def all_grids(results: Results, docs: Path) -> dict[str, Results]:
    """This grid ("here") and each in a folder of `docs`, the shortest runs first.

    Left out are those without GRPO and its start; {} if none is left to compare.
    """
    found = {"here": results}
    for folder in sorted(docs.iterdir()):
        if (folder / "evidence").is_dir():
            found[folder.name] = Results.load(folder / "evidence")
    found = {name: grid for name, grid in found.items() if grid.share_a_seed(OURS, START)}
    if len(found) < 2 or "here" not in found:
        return {}
    return dict(sorted(found.items(), key=lambda item: item[1].completions))


def alike(grids: dict[str, Results], results: Results) -> list[Results]:
    """The grids that learn from the same data as this one."""
    dataset = results.settings["dataset"]
    return [grid for grid in grids.values() if grid.settings["dataset"] == dataset]


# --- rows ---------------------------------------------------------------------------------------


def average(cells: Sequence[Result], key: str) -> str:
    """The mean over the cells that were trained."""
    values = [cell["training"][key] for cell in cells if "seconds" in cell["training"]]
    return f"{mean(values):.0f}" if values else "–"


def timed_alike(results: Results, cells: Sequence[Result]) -> list[Result]:
    """Those of the machine that most cells of all arms ran on."""
    usual = Counter(map(machine_name, results.cells)).most_common(1)[0][0]
    return [cell for cell in cells if machine_name(cell) == usual]


def machines(results: Results) -> str:
    """The machine of most cells; then any other, with its cells."""
    found: dict[str, list[str]] = {}
    for cell in results.cells:
        found.setdefault(machine_name(cell), []).append(cell["cell"])
    first, *others = sorted(found, key=lambda name: -len(found[name]))
    texts = [f"{', '.join(sorted(found[name]))}: {name}" for name in others]
    return "; ".join([first, *texts]) + (" (compare no seconds with these)" if others else "")


def thirds(runs: Sequence[Sequence[Result]]) -> dict[str, dict[str, float]]:
    """Means over the steps in each third of the runs that noted signs of reward hacking."""
    runs = [run for run in runs if all("watch" in step for step in run)]
    found = {}
    for index, label in enumerate(("first third", "second third", "last third")):
        parts = [run[len(run) * index // 3 : len(run) * (index + 1) // 3] for run in runs]
        steps = [{**step, **step["watch"]} for part in parts for step in part]
        keys = ("reward", "signal", "length", *(steps[0]["watch"] if steps else ()))
        if steps:
            found[label] = {key: mean(step[key] for step in steps) for key in keys}
    return found


def by_hand(file: Path) -> str:
    """What a person wrote for the page; "" if nobody did."""
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


def not_run(results: Results) -> str:
    """The arms, and the seeds of arms, that no finished cell has."""
    missing = []
    for arm in ARMS:
        done = {cell["seed"] for cell in results.arms.get(arm, ())}
        left = [str(seed) for seed in results.seeds if seed not in done]
        if not done and ARMS[arm].role != "choice":
            missing.append(ARMS[arm].title)
        elif done and left and ARMS[arm].kind != "base":
            missing.append(f"{ARMS[arm].title} (seed {', '.join(left)})")
    return "; ".join(missing)


def short(commit: str | None, none: str) -> str:
    """Eight digits, and the mark behind all of them if there is one."""
    sha, dash, mark = (commit or none).partition("-")
    return sha[:8] + dash + mark
