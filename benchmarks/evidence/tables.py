"""The report's tables of accuracy, as Markdown: arms beside each other; "" without data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean

from benchmarks.evidence.intervals import Interval, crossed_bootstrap, difference
from benchmarks.evidence.plan import ARMS, OURS, START
from benchmarks.evidence.pools import TITLES
from benchmarks.evidence.results import Results, machine_name

GRADINGS = ("strict", "lenient")
METRICS = {"greedy": "greedy", "sampled": "sampled", "majority": "maj@8"}
HEADLINE = ("greedy", "sampled")
PAIRS = [(metric, grading) for metric in HEADLINE for grading in GRADINGS]
Family = tuple[str, str]  # its name, the title of its test set


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def average(values: Iterable[float]) -> str:
    values = list(values)
    return f"{mean(values):.0f}" if values else "–"


def titles(sets: Iterable[str]) -> list[str]:
    return [TITLES.get(name, name) for name in sets]


def all_arms(results: Results) -> str:
    """Every arm on the pooled sets, and what its training took."""
    usual = Counter(map(machine_name, results.cells)).most_common(1)[0][0]
    rows = []
    for arm, cells in results.arms.items():
        figures = [results.accuracy(arm, m, g).percent for m in METRICS for g in GRADINGS]
        trained = [cell for cell in cells if "seconds" in cell["training"]]
        there = [cell for cell in trained if machine_name(cell) == usual]
        seconds = average(cell["training"]["seconds"] for cell in there)
        samples = average(cell["training"]["samples"] for cell in trained)
        rows.append([ARMS[arm].title, len(cells), *figures, seconds, samples])
    heads = [f"{shown}, {grading}" for shown in METRICS.values() for grading in GRADINGS]
    return table(["arm", "seeds", *heads, "training s", "samples"], rows)


# --- leads ----------------------------------------------------------------------------------------


def leads(results: Results) -> str:
    """GRPO over each arm but the controls; over the best rival in words."""
    if OURS not in results.arms:
        return ""
    others = [
        arm
        for arm in results.arms
        if arm != OURS and ARMS[arm].role != "control" and results.share_a_seed(OURS, arm)
    ]
    rows = [
        [ARMS[arm].title, *(results.lead(OURS, arm, *pair).points for pair in PAIRS)]
        for arm in others
    ]
    shown = table(["over", *(", ".join(pair) for pair in PAIRS)], rows)
    rivals = [arm for arm in others if ARMS[arm].role == "rival"]
    if not rivals:
        return shown
    return "\n".join([shown, "", *(_over_the_best(results, rivals, *pair) for pair in PAIRS)])


def _over_the_best(results: Results, rivals: Sequence[str], metric: str, grading: str) -> str:
    # Each on the seeds that it shares with GRPO: a mean over others would compare seeds.
    over = {arm: results.lead(OURS, arm, metric, grading) for arm in rivals}
    best = min(over, key=lambda arm: over[arm].mean)
    line = (
        f"- {metric}, {grading}: over the best arm of equal cost ({ARMS[best].title}) "
        f"**{over[best].points}**: {over[best].verdict}."
    )
    if (metric, grading) == ("greedy", "strict"):
        few = results.lead_where_sampled(OURS, best)
        line += f" On the {few.problems} problems that are sampled too: {few.points}."
    return line


def grids(found: Mapping[str, Results]) -> str:
    """GRPO's lead in each of several grids, the greedy one and the sampled one.

    Args:
        found: "here" or the grid's folder → its results.
    """
    over = [arm for arm in ARMS if arm == START or ARMS[arm].role == "rival"]
    tables = []
    for metric in HEADLINE:
        rows = [
            [
                name if name == "here" else f"[{name}]({name}/README.md)",
                *_described(grid),
                *(_lead_or_dash(grid, OURS, arm, metric) for arm in over),
            ]
            for name, grid in found.items()
        ]
        heads = ["data", "GRPO", "numbers", "seeds", *(ARMS[arm].title for arm in over)]
        tables.append(table([f"{metric}, over", *heads], rows))
    return "\n\n".join(tables)


def _lead_or_dash(results: Results, arm: str, over: str, metric: str) -> str:
    return results.lead(arm, over, metric).points if results.share_a_seed(arm, over) else "–"


def _described(results: Results) -> list[str]:
    settings = results.settings
    each = settings["batch_size"] * settings["group_size"]
    types = sorted({cell["machine"]["dtype"] for cell in results.arms[OURS]})
    return [
        settings["dataset"].partition(":")[0],
        f"{settings['steps']} × {each}, rate {settings['learning_rate']:g}",
        ", ".join(types),
        str(len(results.arms[OURS])),
    ]


def controls(results: Results) -> str:
    """What each control changed of its start."""
    rows = []
    for arm in results.arms:
        if ARMS[arm].role != "control" or not results.share_a_seed(arm, START):
            continue
        for metric in HEADLINE:
            change = results.lead(arm, START, metric)
            said = "gains: the cause is to be found" if change.low > 0 else "gains nothing"
            said += ", loses" if change.high < 0 else ""
            rows.append([ARMS[arm].title, f"{metric}, strict", change.points, said])
    return table(["control", "measured", "change", "read"], rows) if rows else ""


# --- test sets, samples, families -----------------------------------------------------------------


def by_set(results: Results) -> str:
    """Each test set by itself, and GRPO's change on it."""
    tests = results.sets
    if len(tests) < 2:
        return ""
    arms = [arm for arm in results.arms if ARMS[arm].role != "control"]
    parts = []
    for metric in HEADLINE:
        rows = [
            [ARMS[a].title, *(results.accuracy(a, metric, sets=[name]).percent for name in tests)]
            for a in arms
        ]
        parts.append(table([f"{metric}, strict, %", *titles(tests)], rows))
    if results.share_a_seed(OURS, START):
        rows = [
            [*titles([name]), *(results.lead(OURS, START, m, sets=[name]).points for m in METRICS)]
            for name in tests
        ]
        heads = [f"{shown}, strict" for shown in METRICS.values()]
        parts += ["GRPO over its SFT start, in points:", table(["test set", *heads], rows)]
    return "\n\n".join(parts)


def pass_at_k(results: Results) -> dict[str, list[tuple[int, Interval]]]:
    """Arm → (k, pass@k, lenient) for k = 1, 2, 4, …, all samples."""
    most = results.settings["samples"]
    ks = sorted({2**i for i in range(most.bit_length())} | {most})
    return {
        arm: [(k, results.accuracy(arm, f"pass@{k}", "lenient")) for k in ks]
        for arm in results.arms
        if ARMS[arm].role != "control"
    }


def pass_at_k_table(found: Mapping[str, Sequence[tuple[int, Interval]]]) -> str:
    rows = [[ARMS[arm].title, *(i.percent for _, i in line)] for arm, line in found.items()]
    ks = [k for k, _ in next(iter(found.values()))]
    return table(["arm", *(f"k = {k}" for k in ks)], rows)


def sharper_or_wider(results: Results) -> str:
    """Is the distribution sharpened (pass@1 up, pass@16 not) or extended (both up)?"""
    if not results.share_a_seed(OURS, START):
        return ""
    most = results.settings["samples"]
    few, many = (results.lead(OURS, START, f"pass@{k}", "lenient") for k in (1, most))
    return (
        f"GRPO over SFT: pass@1 {few.points} ({few.verdict}), pass@{most} {many.points} "
        f"({many.verdict})."
    )


def families(results: Results, metric: str) -> dict[Family, list[Interval]]:
    """Family → before GRPO, after it, the change; [] if it was not measured."""
    found: dict[Family, list[Interval]] = {}
    for name in results.sets:
        old, new = results.paired(START, OURS, metric, sets=[name])
        of = results.arms[OURS][0]["tests"][name]["families"]
        for family in sorted(set(of)):
            columns = [i for i in range(old.shape[1]) if of[i] == family]
            before, after = old[:, columns], new[:, columns]
            row = found[family or name, TITLES.get(name, name)] = []
            if columns:
                row += [crossed_bootstrap(before), crossed_bootstrap(after)]
                row.append(difference(before, after))
    return found


def families_table(found: Mapping[str, Mapping[Family, Sequence[Interval]]]) -> str:
    """
    Args:
        found: metric → what `families` found.
    """

    def texts(row: Sequence[Interval]) -> list[str]:
        if not row:
            return ["0", "–", "–", "–"]
        before, after, change = row
        return [str(change.problems), before.percent, after.percent, change.points]

    rows = [
        [*family, *(text for rows in found.values() for text in texts(rows[family]))]
        for family in found["greedy"]
    ]
    columns = ("problems", ARMS[START].title, ARMS[OURS].title, "points")
    heads = [f"{metric}: {column}" for metric in found for column in columns]
    return table(["family", "test set", *heads], rows)


# --- TRL and the algorithms -----------------------------------------------------------------------


def beside_trl(results: Results) -> str:
    """Seconds and memory of each seed, ours and TRL's, and the lead at equal samples."""
    if not results.share_a_seed(OURS, "trl"):
        return ""
    theirs = {cell["seed"]: cell for cell in results.arms["trl"]}
    rows = []
    for mine in results.arms[OURS]:
        if not (peer := theirs.get(mine["seed"])):
            continue
        seconds, memory = (
            [cell["training"][key] for cell in (mine, peer)]
            for key in ("seconds", "peak_memory_gb")
        )
        alike = machine_name(mine) == machine_name(peer)
        ahead = f"{seconds[1] / seconds[0]:.1f} ×" if alike else "other machine"
        shown = [f"{s:.0f}" for s in seconds], [f"{gb:.1f}" for gb in memory]
        rows.append([mine["seed"], *shown[0], ahead, *shown[1]])
    lines = [table(["seed", "ours, s", "TRL, s", "ahead", "ours, GB", "TRL, GB"], rows), ""]
    for metric in HEADLINE:
        found = results.lead(OURS, "trl", metric)
        lines.append(
            f"- {metric}, strict, at equal samples: ours − TRL {found.points}: {found.verdict}."
        )
    return "\n".join(lines)


def variants(results: Results) -> list[str]:
    """GRPO's variants that were run on its seeds."""
    arms = [arm for arm in results.arms if ARMS[arm].role == "algorithm"]
    return [arm for arm in arms if results.share_a_seed(arm, OURS)]


def algorithms(results: Results) -> str:
    """GRPO and its variants on the same budget; what the interval does not part is a tie."""
    if not variants(results):
        return ""
    rows = []
    for arm in (OURS, *variants(results)):
        cells = results.arms[arm]
        figures = [results.accuracy(arm, metric).percent for metric in HEADLINE]
        drawn = [c["tests"][name]["sampled"]["tokens"] for c in cells for name in results.pooled]
        cost = [average(c["training"][key] for c in cells) for key in ("samples", "seconds")]
        apart = ["", ""]
        if arm != OURS:
            ahead = [results.lead(arm, OURS, metric) for metric in HEADLINE]
            apart = [f"{i.points}: {'tie' if i.holds_zero else i.verdict}" for i in ahead]
        rows.append([ARMS[arm].title, len(cells), *figures, f"{mean(drawn):.1f}", *cost, *apart])
    over = [f"{metric} over GRPO" for metric in HEADLINE]
    heads = ["algorithm", "seeds", *HEADLINE, "tokens", "samples", "training s", *over]
    return table(heads, rows)


def algorithms_over_others(results: Results) -> str:
    """Each algorithm's lead over the start and over the arms of equal cost."""
    others = [arm for arm in results.arms if arm == START or ARMS[arm].role == "rival"]
    pairs = [(metric, arm) for arm in others for metric in HEADLINE]
    rows = [
        [ARMS[one].title, *(_lead_or_dash(results, one, other, m) for m, other in pairs)]
        for one in (OURS, *variants(results))
    ]
    return table(["algorithm", *(f"{m} over {ARMS[arm].title}" for m, arm in pairs)], rows)
