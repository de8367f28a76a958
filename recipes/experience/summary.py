"""What a role's records and paid calls add up to; a function of the files, so that a resumed run
sums up all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from recipes.experience.attempts import Row


def summarise(rows: Sequence[Row], calls: Iterable[Row], retries: int = 0) -> dict[str, object]:
    """
    Args:
        rows: records of a generator, or the lines of the critic.
        calls: the journal's rows.
        retries: of this process.
    """
    attempts = [a for row in rows for a in row.get("rollouts", [row])]
    groups = [row for row in rows if "library_after" in row]
    taught = [row["extraction"] for row in groups if row["extraction"]]
    replied = [a for a in attempts if not a["error"]]
    planned = [a for a in replied if a.get("fusion") in (None, "fused") or a["scaffold_error"]]
    judged = [a for a in replied if "judge" in a["scored_by"].values()]
    operations = [done for extraction in taught for done in extraction["operations"]]
    proposed = [done for done in operations if done["action"] != "evict"]
    kept = [done for done in proposed if done["kept"]]
    refused = Counter(done["reason"] for done in proposed if not done["kept"])
    reasons = Counter((a["scaffold_error"] or "").partition(":")[0] for a in attempts)
    answers = Counter(a["answer_reason"] for a in attempts)
    lines = {
        "problems": len(groups),
        "right": _share(sum(a["is_correct"] for a in attempts), len(attempts)),
        "failed calls": _share(len(attempts) - len(replied), len(attempts)),
        "scaffolds parsed": _share(sum(not a["scaffold_error"] for a in planned), len(planned))
        + _listed(reasons),
        "answers read": _share(answers["correct"] + answers["wrong"], len(attempts))
        + _listed(answers, "correct", "wrong"),
        "judge failed": _share(sum(a["judge_failed"] for a in judged), len(judged)),
        "groups with σ > τ": _share(len(taught), len(groups)),
        "extractions parsed": _share(sum(not e["error"] for e in taught), len(taught)),
        "operations": f"{len(proposed)} proposed, {len(kept)} kept" + _listed(refused),
        "lessons": len(groups[-1]["library_after"]) if groups else 0,
        "retries of this process": retries,
    }
    if "fusion" in (attempts[0] if attempts else {}):
        lines["fusions"] = _listed(Counter(a["fusion"] for a in attempts)).strip(" ()")
    return lines | _spent(calls)


def _spent(calls: Iterable[Row]) -> dict[str, object]:
    """Calls, tokens and cost by role and stage, and in all."""
    spent: dict[str, list[float]] = {}
    for call in calls:
        reply = call["reply"]
        one = (1, reply["prompt_tokens"], reply["completion_tokens"], call["cost"])
        for name in (f"{call['role']}: {call['stage']}", "in all"):
            spent[name] = [a + b for a, b in zip(spent.get(name, (0,) * 4), one, strict=True)]
    return {
        name: f"{calls} calls, {read} tokens read, {written} written, cost {cost:.4g}"
        for name, (calls, read, written, cost) in sorted(spent.items())
    }


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({100 * part / whole:.0f} %)" if whole else "")


def _listed(counts: Counter[str], *without: str) -> str:
    shown = [f"{n} {k}" for k, n in counts.most_common() if n and k and k not in without]
    return f" ({', '.join(shown)})" if shown else ""
