"""Summarizes a run from a role's records and paid calls, so that a resume covers all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from recipes.experience.trainer import Row, Trainer


def summarize(trainer: Trainer) -> dict[str, object]:
    """Count what became of a role's rollouts, groups, operations and calls, resumes included."""
    groups = [row for row in trainer.records if "library_after" in row]
    rollouts = [r for row in trainer.records for r in row.get("rollouts", [row])]
    planned = [
        r["scaffold_error"] or "parsed"
        for r in rollouts
        if r["scaffold_error"] or (not r["error"] and r.get("fusion", "fused") == "fused")
    ]
    judged = [r["judge_failed"] for r in rollouts if "judge" in r["scored_by"].values()]
    extractions = [row["extraction"] for row in groups if row["extraction"]]
    operations = [done for extraction in extractions for done in extraction["operations"]]
    agents = filter(None, (trainer.agent, trainer.judge))
    summary = {
        "problems": len(groups),
        "rollouts": f"{len(rollouts)}, right: {sum(r['is_correct'] for r in rollouts)}",
        "failed calls": sum(r["error"] is not None for r in rollouts),
        "plans": _counts(plan.partition(":")[0] for plan in planned),
        "answers": _counts(r["answer_reason"] for r in rollouts),
        "judge": _counts("failed" if failed else "scored" for failed in judged),
        "fusions": _counts(r["fusion"] for r in rollouts if "fusion" in r),
        "groups with σ > τ": f"{len(extractions)} of {len(groups)}",
        "extractions": _counts("failed" if e["error"] else "parsed" for e in extractions),
        "operations": _counts(o["reason"] or "kept" for o in operations),
        "lessons": len(trainer.library.items),
        "retries of this process": sum(agent.client.retries for agent in agents),
    }
    calls: dict[str, list[Row]] = {}
    for call in trainer.agent.journal.rows.values():
        for name in (f"{call['role']}: {call['stage']}", "in all"):
            calls.setdefault(name, []).append(call["reply"])
    for name, replies in sorted(calls.items()):
        read, written, cost = (
            sum(reply[part] for reply in replies)
            for part in ("prompt_tokens", "completion_tokens", "cost")
        )
        summary[name] = (
            f"{len(replies)} calls, {read} tokens read, {written} written, cost {cost:.4g}"
        )
    return {name: value for name, value in summary.items() if value != ""}


def _counts(names: Iterable[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())
