"""The report's tables beside accuracy: how rewards were earned, failures, prompts, the cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.evidence.failures import SORTS, read_failures
from benchmarks.evidence.plan import ARMS, OURS, START
from benchmarks.evidence.results import Results, machine_name
from benchmarks.evidence.tables import table

SHOWN_FAILURES = 5
WATCHED = {  # name in `watch` → head, factor
    "right_without_reasoning": ("right without an equation to the answer, % of right", 100),
    "right_with_false_step": ("right with a false equation, % of right", 100),
    "repeated": ("repeated text, %", 100),
    "reasoning_words": ("words of reasoning", 1),
}
THIRDS = {
    "rewarded, %": lambda step: 100 * step["reward"],
    "groups with signal, %": lambda step: 100 * step["signal"],
    "tokens": lambda step: step["length"],
    "right without reasoning, %": lambda step: 100 * step["watch"]["right_without_reasoning"],
    "right with a false step, %": lambda step: 100 * step["watch"]["right_with_false_step"],
    "repeated, %": lambda step: 100 * step["watch"]["repeated"],
    "words of reasoning": lambda step: step["watch"]["reasoning_words"],
}


def watch(results: Results) -> str:
    """Is the reward earned by reasoning? Of the samples on the pooled test sets."""
    rows = []
    for arm, cells in results.arms.items():
        tests = [cell["tests"][name]["sampled"] for cell in cells for name in results.pooled]
        figures = []
        for key, (_, factor) in WATCHED.items():
            by = "right" if key.startswith("right_") else "completions"
            weights = [test["watch"][by] for test in tests]
            total = sum(test["watch"][key] * w for test, w in zip(tests, weights, strict=True))
            figures.append(f"{factor * (total / max(1, sum(weights))):.1f}")
        kept, cut = (100 * mean(test[key] for test in tests) for key in ("format", "truncated"))
        rows.append([ARMS[arm].title, f"{kept:.1f}", f"{cut:.1f}", *figures])
    heads = [head for head, _ in WATCHED.values()]
    return table(["arm", "in format, %", "cut off, %", *heads], rows)


def watch_over_time(results: Results) -> str:
    """GRPO's own samples, in thirds of the run."""
    runs = [cell["training"]["steps"] for cell in results.arms.get(OURS, ())]
    if not runs or not all("watch" in step for step in runs[0]):
        return ""
    rows = []
    for index, label in enumerate(("first third", "second third", "last third")):
        steps = [
            step
            for run in runs
            for step in run[len(run) * index // 3 : len(run) * (index + 1) // 3]
        ]
        if steps:
            figures = {head: mean(map(value, steps)) for head, value in THIRDS.items()}
            shown = [f"{v:.{0 if 'signal' in head else 1}f}" for head, v in figures.items()]
            rows.append([label, *shown])
    return table(["steps", *THIRDS], rows)


def failures(folder: Path) -> str:
    """How wrong answers were sorted, by rule and by hand, and some of them in full."""
    files = sorted(folder.glob("*.yaml"), key=lambda f: (not f.stem.startswith(START), f.stem))
    if not files:
        return ""
    read = {file.stem: read_failures(file) for file in files}
    lines, rules, final = [], {}, {}
    for name, content in read.items():
        wrong = content["wrong"]
        rules[name] = Counter(entry["sort"] for entry in wrong)
        final[name] = Counter(entry["by_hand"] or entry["sort"] for entry in wrong)
        by_hand = [entry for entry in wrong if entry["by_hand"] is not None]
        anew = sum(entry["by_hand"] != entry["sort"] for entry in by_hand)
        lines.append(
            f"- `{name}`: {len(wrong)} of {content['wrong_of'][0]} wrong greedy answers "
            f"({content['wrong_of'][1]} problems); {len(by_hand)} of them read and sorted by hand, "
            f"{anew} otherwise than by the rule; "
            f"{content['doubtful_of'][0]} of {content['doubtful_of'][1]} right ones have doubtful "
            f"reasoning. [Read them](failures/{name}.yaml); `{content['command']}`"
        )
    rows = [
        [sort, meaning, *(f"{final[name][sort]} ({rules[name][sort]})" for name in read)]
        for sort, meaning in SORTS.items()
        if any(rules[name][sort] or final[name][sort] for name in read)
    ]
    lines += ["", table(["sort", "meaning", *(f"{name} (by rule)" for name in read)], rows), ""]
    last = list(read.values())[-1]
    for entry in last["wrong"][:SHOWN_FAILURES]:
        lines += quoted(entry, f"{last['cell']}: {entry['by_hand'] or entry['sort']}")
    for entry in last["doubtful"][:1]:
        lines += quoted(entry, f"{last['cell']}: right, but {entry['why']}")
    return "\n".join(lines).strip()


def quoted(entry: Mapping[str, Any], title: str) -> list[str]:
    """A question and its completion as it came, under a title."""
    completion = entry["completion"].replace("```", "'''")
    head = f"**{title}.** {entry['question']} (gold {entry['gold']})"
    return [head, "", "```", completion, "```", ""]


def prompts(results: Results) -> str:
    """What each prompt of the base scored on validation problems."""
    rows = [
        [ARMS[arm].title, name, f"{100 * share:.1f}", "taken" if name == tried["prompt"] else ""]
        for arm, cells in results.arms.items()
        if ARMS[arm].kind == "base"
        for tried in [cells[0]["training"]]
        for name, share in tried["prompts"].items()
    ]
    return table(["arm", "prompt", "right, %", ""], rows) if rows else ""


def tried_on(results: Results) -> int:
    """How many problems the base's prompts were tried on."""
    bases = [cell for cell in results.cells if ARMS[cell["arm"]].kind == "base"]
    return bases[0]["training"]["tried_on"] if bases else 0


def cells(results: Results) -> str:
    """What runs each cell again, how long it took and at which commits."""
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
        for cell in results.cells
    ]
    commits = ("trained at", "judged at")
    return table(["cell", "command", "training, s", "judging, s", *commits, "date"], rows)


def hours(results: Results) -> str:
    seconds = [c["training"].get("wall", 0) + c["judging_seconds"] for c in results.cells]
    return f"{len(seconds)} cells, {sum(seconds) / 3600:.1f} hours in all."


def not_run(results: Results) -> str:
    """The arms, and the seeds of arms, that no finished cell has."""
    missing = []
    for arm in ARMS:
        done = {cell["seed"] for cell in results.arms.get(arm, ())}
        left = [str(seed) for seed in results.seeds if seed not in done]
        if not done:
            missing.append(ARMS[arm].title)
        elif left and ARMS[arm].kind != "base":
            missing.append(f"{ARMS[arm].title} (seed {', '.join(left)})")
    return "; ".join(missing)


def machines(results: Results) -> str:
    """The machine of most cells; then any other, with its cells."""
    found: dict[str, list[str]] = {}
    for cell in results.cells:
        found.setdefault(machine_name(cell), []).append(cell["cell"])
    first, *others = sorted(found, key=lambda name: -len(found[name]))
    texts = [f"{', '.join(sorted(found[name]))}: {name}" for name in others]
    return "; ".join([first, *texts]) + (", whose seconds do not compare" if others else "")


def _short(commit: str | None, none: str) -> str:
    """Eight digits, and the mark behind all of them if there is one."""
    sha, dash, mark = (commit or none).partition("-")
    return sha[:8] + dash + mark
