"""What a sceptic asks beside accuracy: TRL, what the reward was earned with, failures, the cells.

A function for each section, [] where there are no data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.evidence.failures import read_failures
from benchmarks.evidence.plan import ARMS, OURS, START
from benchmarks.evidence.reading import SORTS
from benchmarks.evidence.results import (
    Result,
    Results,
    accuracy,
    lead,
    machine_name,
    pairs_up,
    per_cent,
    points,
    table,
    undecided,
    verdict,
)

SHOWN_FAILURES = 5


def beside_trl(results: Results, sets: Sequence[str]) -> list[str]:
    if not pairs_up(results, OURS, "trl"):
        return []
    both = {cell["seed"]: cell for cell in results["trl"]}
    pairs = [(cell, both[cell["seed"]]) for cell in results[OURS] if cell["seed"] in both]
    rows = [
        [
            mine["seed"],
            *(f"{cell['training']['seconds']:.0f}" for cell in (mine, theirs)),
            f"{theirs['training']['seconds'] / mine['training']['seconds']:.1f} ×"
            if machine_name(mine) == machine_name(theirs)
            else "other machine",
            *(f"{cell['training']['peak_memory_gb']:.1f}" for cell in (mine, theirs)),
        ]
        for mine, theirs in pairs
    ]
    lines = [
        "## Beside TRL's GRPOTrainer",
        "",
        "The same problems in the same order, group size, lengths, schedule and optimizer, "
        f"{pairs[0][0]['training']['samples']} samples each. Fed the same samples, both end with "
        "the same adapter (tests/test_same_completions.py): what parts them here is which samples "
        "each has drawn.",
        "",
        *table(["seed", "ours, s", "TRL, s", "ahead", "ours, GB", "TRL, GB"], rows),
        "",
    ]
    for metric in ("greedy", "sampled"):
        found = lead(results, OURS, "trl", sets, metric, "strict")
        lines.append(
            f"- {metric}, strict, at equal samples: ours − TRL {points(found)}: {verdict(found)}."
        )
    return lines


def algorithms(results: Results, sets: Sequence[str]) -> list[str]:
    """GRPO and its variants on the same budget; what the interval does not part is a tie."""
    variants = [arm for arm in results if ARMS[arm].role == "algorithm"]
    variants = [arm for arm in variants if pairs_up(results, arm, OURS)]
    if not variants:
        return []
    rows = []
    for arm in (OURS, *variants):
        cells = results[arm]
        figures = [
            per_cent(accuracy(results, arm, sets, metric, "strict"))
            for metric in ("greedy", "sampled")
        ]
        length = mean(cell["tests"][name]["sampled"]["tokens"] for cell in cells for name in sets)
        trained = [cell["training"] for cell in cells]
        cost = [f"{mean(t[key] for t in trained):.0f}" for key in ("samples", "seconds")]
        apart = ["", ""]
        if arm != OURS:
            ahead = [lead(results, arm, OURS, sets, m, "strict") for m in ("greedy", "sampled")]
            apart = [f"{points(i)}: {'tie' if undecided(i) else verdict(i)}" for i in ahead]
        rows.append([ARMS[arm].title, len(cells), *figures, f"{length:.1f}", *cost, *apart])
    over = [f"{metric} over GRPO" for metric in ("greedy", "sampled")]
    heads = ["algorithm", "seeds", "greedy", "sampled", "tokens", "samples", "training s", *over]
    return [
        "## The algorithms",
        "",
        "The same start, problems, rate and number of steps, strict, per cent and points. "
        "[docs/algorithms.md](../algorithms.md) has their formulas. Each step is one update, so "
        "the ratio is 1 where the gradient is taken: clip ranges do nothing, and GSPO differs from "
        "GRPO by rounding alone.",
        "",
        *table(heads, rows),
        "",
        *_over_the_others(results, [OURS, *variants], sets),
    ]


def _over_the_others(results: Results, algorithms: Sequence[str], sets: Sequence[str]) -> list[str]:
    """Each algorithm's lead over the start and over the arms of equal cost."""
    others = [arm for arm in results if arm == START or ARMS[arm].role == "rival"]
    pairs = [(metric, arm) for arm in others for metric in ("greedy", "sampled")]
    rows = [
        [
            ARMS[one].title,
            *(
                points(lead(results, one, other, sets, metric, "strict"))
                if pairs_up(results, one, other)
                else "–"
                for metric, other in pairs
            ),
        ]
        for one in algorithms
    ]
    heads = [f"{metric} over {ARMS[arm].title}" for metric, arm in pairs]
    return [
        "Their leads over the start and the arms of equal cost, in points, each on the seeds that "
        "both have. Whichever leads among several owes a part of it to having been picked.",
        "",
        *table(["algorithm", *heads], rows),
    ]


def watch(results: Results, sets: Sequence[str]) -> list[str]:
    """Is the reward earned by reasoning?"""
    names = {
        "right_without_reasoning": "right without an equation to the answer, % of right",
        "right_with_false_step": "right with a false equation, % of right",
        "repeated": "repeated text, %",
        "reasoning_words": "words of reasoning",
    }
    rows = []
    for arm, cells in results.items():
        tests = [cell["tests"][name]["sampled"] for cell in cells for name in sets]
        figures = []
        for key in names:
            by = "right" if key.startswith("right_") else "completions"
            weights = [test["watch"][by] for test in tests]
            total = sum(test["watch"][key] * w for test, w in zip(tests, weights, strict=True))
            value = total / max(1, sum(weights))
            figures.append(f"{value:.1f}" if key == "reasoning_words" else f"{100 * value:.1f}")
        kept, cut = (100 * mean(test[key] for test in tests) for key in ("format", "truncated"))
        rows.append([ARMS[arm].title, f"{kept:.1f}", f"{cut:.1f}", *figures])
    lines = [
        "## Is the reward earned?",
        "",
        "Of the samples on the pooled test sets; right means lenient.",
        "",
        *table(["arm", "in format, %", "cut off, %", *names.values()], rows),
    ]
    if OURS in results and all("watch" in s for s in results[OURS][0]["training"]["steps"]):
        lines += ["", "GRPO's own samples, in thirds of the run:", "", *_over_time(results[OURS])]
    return lines


def _over_time(cells: Sequence[Result]) -> list[str]:
    rows = []
    runs = [cell["training"]["steps"] for cell in cells]
    thirds = ("first third", "second third", "last third")
    for index, label in enumerate(thirds):
        steps = [
            step
            for run in runs
            for step in run[len(run) * index // 3 : len(run) * (index + 1) // 3]
        ]
        if not steps:
            continue
        watched = [step["watch"] for step in steps]
        rows.append(
            [
                label,
                f"{100 * mean(step['reward'] for step in steps):.1f}",
                f"{100 * mean(step['signal'] for step in steps):.0f}",
                f"{mean(step['length'] for step in steps):.1f}",
                f"{100 * mean(w['right_without_reasoning'] for w in watched):.1f}",
                f"{100 * mean(w['right_with_false_step'] for w in watched):.1f}",
                f"{100 * mean(w['repeated'] for w in watched):.1f}",
                f"{mean(w['reasoning_words'] for w in watched):.1f}",
            ]
        )
    heads = [
        "steps",
        "rewarded, %",
        "groups with signal, %",
        "tokens",
        "right without reasoning, %",
    ]
    return table([*heads, "right with a false step, %", "repeated, %", "words of reasoning"], rows)


def failures(folder: Path) -> list[str]:
    """How wrong answers were sorted, by rule and by hand, and some of them in full."""
    files = sorted(folder.glob("*.yaml"), key=lambda f: (not f.stem.startswith(START), f.stem))
    if not files:
        return []
    read = {file.stem: read_failures(file) for file in files}
    lines = ["## Wrong answers, read", ""]
    counts = {}
    for name, content in read.items():
        rule = Counter(entry["sort"] for entry in content["wrong"])
        final = Counter(entry["by_hand"] or entry["sort"] for entry in content["wrong"])
        by_hand = [entry for entry in content["wrong"] if entry["by_hand"] is not None]
        anew = sum(entry["by_hand"] != entry["sort"] for entry in by_hand)
        counts[name] = (rule, final)
        lines.append(
            f"- `{name}`: {len(content['wrong'])} of {content['wrong_of'][0]} wrong greedy answers "
            f"({content['wrong_of'][1]} problems); {len(by_hand)} of them read and sorted by hand, "
            f"{anew} otherwise than by the rule; "
            f"{content['doubtful_of'][0]} of {content['doubtful_of'][1]} right ones have doubtful "
            f"reasoning. [Read them](failures/{name}.yaml); `{content['command']}`"
        )
    sorts = [s for s in SORTS if any(rule[s] or final[s] for rule, final in counts.values())]
    rows = [
        [s, SORTS[s], *(f"{final[s]} ({rule[s]})" for rule, final in counts.values())]
        for s in sorts
    ]
    lines += ["", *table(["sort", "meaning", *(f"{name} (by rule)" for name in counts)], rows), ""]
    last = list(read.values())[-1]
    for entry in last["wrong"][:SHOWN_FAILURES]:
        lines += _shown(entry, f"{last['cell']}: {entry['by_hand'] or entry['sort']}")
    if last["doubtful"]:
        lines += _shown(
            last["doubtful"][0], f"{last['cell']}: right, but {last['doubtful'][0]['why']}"
        )
    return lines


def _shown(entry: Mapping[str, Any], title: str) -> list[str]:
    return [
        f"**{title}.** {entry['question']} (gold {entry['gold']})",
        "",
        "```",
        entry["completion"].replace("```", "'''"),
        "```",
        "",
    ]


def prompts(results: Results) -> list[str]:
    rows = [
        [ARMS[arm].title, name, f"{100 * share:.1f}", "taken" if name == t["prompt"] else ""]
        for arm in results
        if ARMS[arm].kind == "base"
        for t in [results[arm][0]["training"]]
        for name, share in t["prompts"].items()
    ]
    if not rows:
        return []
    tried = results[next(a for a in results if ARMS[a].kind == "base")][0]["training"]["tried_on"]
    return [
        "## The base's prompts",
        "",
        f"Greedy, lenient, on {tried} validation problems; the best is the one reported above.",
        "",
        *table(["arm", "prompt", "right, %", ""], rows),
    ]


def cells(results: Results) -> list[str]:
    cells = [cell for rows in results.values() for cell in rows]
    rows = [
        [
            f"[{cell['cell']}](evidence/{cell['cell']}.json)",
            f"`{cell['command']}`",
            f"{cell['training'].get('seconds', 0):.0f}",
            f"{cell['judging_seconds']:.0f}",
            _short(cell["training"].get("commit"), "–"),  # the base and older cells have none
            _short(cell["commit"], "?"),
            cell["date"],
        ]
        for cell in cells
    ]
    total = sum(c["training"].get("wall", 0) + c["judging_seconds"] for c in cells)
    seeds = sorted({cell["seed"] for cell in cells if ARMS[cell["arm"]].kind != "base"})
    missing = []
    for arm in ARMS:
        done = {cell["seed"] for cell in results.get(arm, ())}
        left = [str(seed) for seed in seeds if seed not in done]
        if not done:
            missing.append(ARMS[arm].title)
        elif left and ARMS[arm].kind != "base":
            missing.append(f"{ARMS[arm].title} (seed {', '.join(left)})")
    commits = ("trained at", "judged at")
    lines = [
        "## Cells",
        "",
        f"{len(cells)} cells, {total / 3600:.1f} hours in all.",
        "",
        *table(["cell", "command", "training, s", "judging, s", *commits, "date"], rows),
    ]
    if missing:
        lines += ["", f"Not run: {'; '.join(missing)}."]
    return lines


def _short(commit: str | None, none: str) -> str:
    """Eight digits, and the mark behind all of them if there is one."""
    sha, dash, mark = (commit or none).partition("-")
    return sha[:8] + dash + mark
