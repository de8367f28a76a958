"""Summarises a role's records and paid calls; a function of the files, so that a resumed run's
summary covers all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from recipes.experience.rollouts import Row
from recipes.experience.trainer import Trainer


def summarize(trainer: Trainer) -> dict[str, object]:
    """Count what became of a role's rollouts, groups, operations and calls."""
    rows, agents = trainer.rows, filter(None, (trainer.agent, trainer.judge))
    rollouts = [rollout for row in rows for rollout in row.get("rollouts", [row])]
    groups = [row for row in rows if "library_after" in row]
    taught = [row["extraction"] for row in groups if row["extraction"]]
    replied = [a for a in rollouts if not a["error"]]
    planned = [a for a in replied if a.get("fusion") in (None, "fused") or a["scaffold_error"]]
    judged = [a for a in replied if "judge" in a["scored_by"].values()]
    operations = [done for extraction in taught for done in extraction["operations"]]
    proposed = [done for done in operations if done["action"] != "evict"]
    refused = Counter(done["reason"] for done in proposed if not done["kept"])
    kept = len(proposed) - refused.total()
    reasons = Counter((a["scaffold_error"] or "").partition(":")[0] for a in rollouts)
    answers = Counter(a["answer_reason"] for a in rollouts)
    read = answers.pop("correct", 0) + answers.pop("wrong", 0)
    lines: dict[str, object] = {
        "problems": len(groups),
        "right": _share(sum(a["is_correct"] for a in rollouts), len(rollouts)),
        "failed calls": _share(len(rollouts) - len(replied), len(rollouts)),
        "scaffolds parsed": _share(sum(not a["scaffold_error"] for a in planned), len(planned))
        + _counts(reasons),
        "answers read": _share(read, len(rollouts)) + _counts(answers),
        "judge failed": _share(sum(a["judge_failed"] for a in judged), len(judged)),
        "groups with σ > τ": _share(len(taught), len(groups)),
        "extractions parsed": _share(sum(not e["error"] for e in taught), len(taught)),
        "operations": f"{len(proposed)} proposed, {kept} kept" + _counts(refused),
        "lessons": len(groups[-1]["library_after"]) if groups else 0,
        "retries of this process": sum(agent.client.retries for agent in agents),
    }
    if trainer.is_critic and rollouts:
        lines["fusions"] = _counts(Counter(a["fusion"] for a in rollouts)).strip(" ()")
    return lines | _usage(trainer.agent.journal.rows.values())


def _usage(calls: Iterable[Row]) -> dict[str, str]:
    """Add up calls, tokens and cost by role and stage, and in all."""
    usage: dict[str, list[float]] = {}
    for call in calls:
        reply = call["reply"]
        one = (1, reply["prompt_tokens"], reply["completion_tokens"], call["cost"])
        for name in (f"{call['role']}: {call['stage']}", "in all"):
            usage[name] = [a + b for a, b in zip(usage.get(name, (0,) * 4), one, strict=True)]
    return {
        name: f"{calls} calls, {read} tokens read, {written} written, cost {cost:.4g}"
        for name, (calls, read, written, cost) in sorted(usage.items())
    }


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({100 * part / whole:.0f} %)" if whole else "")


def _counts(counts: Counter[str]) -> str:
    shown = ", ".join(f"{n} {name}" for name, n in counts.most_common() if n and name)
    return f" ({shown})" if shown else ""
