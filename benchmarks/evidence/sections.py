"""What the report says about accuracy: a function for each section, [] where there are no data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.evidence import plots
from benchmarks.evidence.intervals import METRICS, crossed_bootstrap
from benchmarks.evidence.plan import ARMS, OURS, START
from benchmarks.evidence.pools import TITLES
from benchmarks.evidence.results import (
    FEW_SEEDS,
    GRADINGS,
    NAMES,
    Results,
    accuracy,
    lead,
    lead_where_sampled,
    machine_name,
    pairs_up,
    per_cent,
    points,
    shared_sets,
    table,
    verdict,
)


def head(results: Results) -> list[str]:
    cells = [cell for rows in results.values() for cell in rows]
    settings = cells[0]["settings"]
    seeds = sorted({cell["seed"] for cell in cells if ARMS[cell["arm"]].kind != "base"})
    return [
        "# Results",
        "",
        "Made by `python -m benchmarks.evidence report` from the files in [evidence/](evidence/). "
        "The last section has each cell's own command, commit and time; without its `--cells` the "
        "command runs all arms of its seeds.",
        "",
        f"Model: `{settings['model']}`; data: {settings['dataset']}; machine: {_machines(cells)}.",
        f"Learning: SFT on {settings['solved']} worked solutions ({settings['sft_passes']} "
        f"passes); then {settings['steps']} steps "
        f"of {settings['batch_size']} problems × {settings['group_size']} completions, "
        f"rate {settings['learning_rate']:g}, at most {settings['max_new_tokens']} tokens. "
        f"Training seeds: {', '.join(map(str, seeds)) or 'none'}.",
        "",
        "Intervals are 95 %, from a bootstrap over seeds and problems, which are crossed. "
        f"Over fewer than {FEW_SEEDS} seeds they are too narrow as to seeds (where nothing else "
        "varies, one over 3 seeds holds the truth in 74 % of the cases, over 5 in 83): a verdict "
        "is about these seeds alone, and a bound near zero is undecided. "
        "A difference of two arms is over the seeds and problems that both have, so it need not "
        "be that of their rows. "
        "No adapter is chosen by its score; all are judged after their last update. "
        "*Sampled* is the mean over all samples at temperature 1, *maj@8* the most frequent answer "
        "of 8, *lenient* accepts an answer outside the format.",
        *_left_out(results),
    ]


def concluded(docs: Path) -> list[str]:
    """What a person concludes, from this grid and others: conclusions.md, where there is one."""
    file = docs / "conclusions.md"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _left_out(results: Results) -> list[str]:
    _, others = shared_sets(results)
    names = ", ".join(TITLES.get(name, name) for name in others)
    return ["", f"Left out, as not every cell was judged on it: {names}."] if others else []


def _machines(cells: Sequence[Mapping[str, Any]]) -> str:
    """The machine of most cells; then any other, with its cells."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        found.setdefault(machine_name(cell), []).append(cell["cell"])
    first, *others = sorted(found, key=lambda name: -len(found[name]))
    texts = [f"{', '.join(sorted(found[name]))}: {name}" for name in others]
    return "; ".join([first, *texts]) + (", whose seconds do not compare" if others else "")


def summary_rows(results: Results, sets: Sequence[str]) -> list[str]:
    """The table of all arms on the pooled sets."""
    rows = []
    names = Counter(machine_name(cell) for cells in results.values() for cell in cells)
    usual = names.most_common(1)[0][0]
    for arm, cells in results.items():
        figures = [
            per_cent(accuracy(results, arm, sets, metric, grading))
            for metric in METRICS
            for grading in GRADINGS
        ]
        trained = [c["training"] for c in cells if "seconds" in c["training"]]
        timed = [
            c["training"]["seconds"]
            for c in cells
            if "seconds" in c["training"] and machine_name(c) == usual
        ]
        seconds = f"{mean(timed):.0f}" if timed else "–"
        samples = f"{mean(t['samples'] for t in trained):.0f}" if trained else "–"
        rows.append([ARMS[arm].title, len(cells), *figures, seconds, samples])
    heads = [f"{NAMES[metric]}, {grading}" for metric in METRICS for grading in GRADINGS]
    return table(["arm", "seeds", *heads, "training s", "samples"], rows)


def summary(results: Results, sets: Sequence[str]) -> list[str]:
    tests = next(iter(results.values()))[0]["tests"]
    sizes = ", ".join(f"{TITLES.get(n, n)} {len(tests[n]['problems'])}" for n in sets)
    trained = [cells for arm, cells in results.items() if ARMS[arm].kind != "base"]
    starts = {tuple(cell["seed"] for cell in cells) for cells in trained}
    other_starts = (
        " Arms with other seeds had other starts: the leads below take the seeds that both have."
    )
    return [
        "## All arms",
        "",
        *summary_rows(results, sets),
        "",
        f"Per cent right on {sizes} problems (greedy; the first of each set are sampled). "
        "Training seconds, of the machine that most cells ran on, come on top of the start's; "
        f"judging and checkpoints are not in them.{other_starts if len(starts) > 1 else ''}",
    ]


def leads(results: Results, sets: Sequence[str]) -> list[str]:
    if OURS not in results:
        return []
    others = [
        arm
        for arm in results
        if arm != OURS and ARMS[arm].role != "control" and pairs_up(results, OURS, arm)
    ]
    pairs = [(metric, grading) for metric in ("greedy", "sampled") for grading in GRADINGS]
    rows = [
        [
            ARMS[arm].title,
            *(points(lead(results, OURS, arm, sets, metric, grading)) for metric, grading in pairs),
        ]
        for arm in others
    ]
    heads = [f"{metric}, {grading}" for metric, grading in pairs]
    lines = ["## GRPO's lead, in points", "", *table(["over", *heads], rows), ""]
    rivals = [arm for arm in others if ARMS[arm].role == "rival"]
    for metric, grading in pairs if rivals else ():
        # Each on the seeds that it shares with GRPO: a mean over others would compare seeds.
        over = {arm: lead(results, OURS, arm, sets, metric, grading) for arm in rivals}
        best = min(over, key=lambda arm: over[arm].mean)
        ahead = over[best]
        lines.append(
            f"- {metric}, {grading}: over the best arm of equal cost ({ARMS[best].title}) "
            f"**{points(ahead)}**: {verdict(ahead)}."
        )
        if (metric, grading) == ("greedy", "strict"):
            few = lead_where_sampled(results, OURS, best, sets, grading)
            lines[-1] += f" On the {few.problems} problems that are sampled too: {points(few)}."
    return lines


def controls(results: Results, sets: Sequence[str]) -> list[str]:
    rows = []
    for arm in results:
        if ARMS[arm].role != "control" or not pairs_up(results, arm, START):
            continue
        for metric in ("greedy", "sampled"):
            change = lead(results, arm, START, sets, metric, "strict")
            said = "gains: the cause is to be found" if change.low > 0 else "gains nothing"
            said += ", loses" if change.high < 0 else ""
            rows.append([ARMS[arm].title, f"{metric}, strict", points(change), said])
    return rows and [
        "## Controls, which must not gain",
        "",
        "Against the SFT start, in points.",
        "",
        *table(["control", "measured", "change", "read"], rows),
    ]


def by_set(results: Results, sets: Sequence[str]) -> list[str]:
    arms = [arm for arm in results if ARMS[arm].role != "control"]
    tests, _ = shared_sets(results)
    if len(tests) < 2:
        return []
    lines = ["## By test set", ""]
    for metric in ("greedy", "sampled"):
        rows = [
            [
                ARMS[arm].title,
                *(per_cent(accuracy(results, arm, [name], metric, "strict")) for name in tests),
            ]
            for arm in arms
        ]
        heads = [TITLES.get(name, name) for name in tests]
        lines += [*table([f"{metric}, strict, %", *heads], rows), ""]
    if pairs_up(results, OURS, START):
        rows = [
            [
                TITLES.get(name, name),
                *(points(lead(results, OURS, START, [name], m, "strict")) for m in METRICS),
            ]
            for name in tests
        ]
        heads = [f"{NAMES[m]}, strict" for m in METRICS]
        lines += ["GRPO over its SFT start, in points:", "", *table(["test set", *heads], rows)]
    return lines


def passes(results: Results, sets: Sequence[str], docs: Path) -> list[str]:
    """Is the distribution sharpened (pass@1 up, pass@16 not) or extended (both up)?"""
    arms = [arm for arm in results if ARMS[arm].role != "control"]
    k_max = next(iter(results.values()))[0]["settings"]["samples"]
    ks = sorted({2**i for i in range(k_max.bit_length())} | {k_max})
    found = {
        arm: [(k, accuracy(results, arm, sets, f"pass@{k}", "lenient")) for k in ks] for arm in arms
    }
    shown = {arm: line for arm, line in found.items() if ARMS[arm].role != "algorithm"}
    plots.pass_at_k(shown, docs / "pass_at_k.png", "pass@k, lenient, pooled test sets")
    rows = [[ARMS[arm].title, *(per_cent(i) for _, i in found[arm])] for arm in arms]
    lines = [
        "## pass@k",
        "",
        "Chance that k samples hold a right answer (unbiased estimator), lenient, %. "
        "The base samples fewer problems: compare it by its intervals.",
        "",
        *table(["arm", *(f"k = {k}" for k in ks)], rows),
        "",
        "![pass@k](pass_at_k.png)",
    ]
    if pairs_up(results, OURS, START):
        few, many = (lead(results, OURS, START, sets, f"pass@{k}", "lenient") for k in (1, k_max))
        lines += [
            "",
            f"GRPO over SFT: pass@1 {points(few)} ({verdict(few)}), pass@{k_max} {points(many)} "
            f"({verdict(many)}). pass@1 alone would mean a sharper distribution, both a wider one.",
        ]
    return lines


def curves(results: Results, docs: Path) -> list[str]:
    """Validation against seconds and samples; all start where SFT ended."""
    arms = [
        arm
        for arm in results
        if ARMS[arm].kind not in ("base", "sft")
        and ARMS[arm].role not in ("control", "algorithm")
        and pairs_up(results, START, arm)
    ]
    if not arms:
        return []
    panels: dict[str, dict[str, list[plots.Point]]] = {}
    kinds = [k for k in ("sampled", "greedy") if k in results[START][0]["curve"][-1]]
    for kind in kinds:
        for axis, label in (("seconds", "training seconds"), ("samples", "samples")):
            learned = [
                a for a in arms if axis == "seconds" or results[a][0]["curve"][-1]["samples"]
            ]
            panels[f"{label} | {kind}, strict, %"] = {
                arm: _curve_points(results, arm, axis, kind) for arm in learned
            }
    plots.curves(panels, docs / "curves.png")
    return [
        "## Along the way",
        "",
        "Right on validation problems as training goes on, from the SFT start; mean over seeds. "
        "Adapters were saved on the way and judged afterwards: judging takes no training time. "
        "The band is GRPO's interval. Most of it is which problems are asked, the same for all "
        "arms: what tells them apart is the table of leads.",
        "",
        "![accuracy against seconds and samples](curves.png)",
    ]


def _curve_points(results: Results, arm: str, axis: str, kind: str) -> list[plots.Point]:
    starts = {cell["seed"]: cell["curve"][-1] for cell in results[START]}
    cells = [cell for cell in results[arm] if cell["seed"] in starts]
    rows = [[starts[c["seed"]] | {"seconds": 0, "samples": 0}, *c["curve"]] for c in cells]
    return [
        (
            mean(point[axis] for point in place),
            crossed_bootstrap([point[kind]["strict"] for point in place]),
        )
        for place in zip(*rows, strict=False)
    ]
