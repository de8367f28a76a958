"""The model card beside a shipped adapter: one skeleton, filled in from results alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.evidence.intervals import crossed_bootstrap
from benchmarks.evidence.judging import GRADINGS, as_rows
from benchmarks.evidence.pools import TITLES
from benchmarks.evidence.results import per_cent
from rlm.evaluation.evaluator import Evaluation
from rlm.model import hardware as machine

EMBEDDED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
EMBEDDED = (
    "The base (Apache-2.0, Hugging Face) comes dequantised from a Q4_1 file: figures published for "
    "SmolLM2 do not apply to it, and this adapter belongs to these very weights (`base_hash` in "
    "run.json)."
)
CARD = """\
---
base_model: {hub_id}
library_name: peft
license: apache-2.0
---

# A reasoning adapter: {title}

LoRA in bf16 that makes the base reason between `<think>` and `</think>` and give one number between `<answer>` and `</answer>`. It is a demonstration: it does small arithmetic told as a story, and little else.

## Where it comes from

{origin}{embedded}

Data: {data}. Adapter: Apache-2.0.

## What it scores

These very weights, greedy, right in per cent with a 95 % interval over problems:

| test set | problems | strict | lenient |
|---|---|---|---|
{scores}

{before_rounding}

## One right, one wrong

{examples}
## Limits

{limits}
- English, integers of two or three digits, one step. Longer problems, other wordings and other languages were not learned; the sets nobody saw show how it fails.
- The reasoning can be wrong where the answer is right.
"""  # noqa: E501


def card(
    *,
    title: str,
    base: str,
    dataset: str,
    origin: str,
    judged: Mapping[str, Evaluation],
    before_rounding: Sequence[str],
    limits: Sequence[str],
) -> str:
    """
    Args:
        base: the --model it was trained on.
        origin: how it was made, in sentences.
        judged: the rounded weights on each test set; the examples are of the first.
        before_rounding: what the run itself measured, in lines.
        limits: of this run, besides those of all.
    """
    embedded = base == machine.EMBEDDED_MODEL
    words = dataset.startswith("word-problems")
    return CARD.format(
        hub_id=EMBEDDED_HUB_ID if embedded else base,
        title=title,
        origin=origin,
        embedded=f"\n\n{EMBEDDED}" if embedded else "",
        data="word problems from this project's own generator (Apache-2.0)"
        if words
        else "GSM8K's train file (MIT)",
        scores="\n".join(score_rows(judged)),
        before_rounding="\n".join(before_rounding),
        examples="\n".join(examples(as_rows(next(iter(judged.values()))))),
        limits="\n".join(f"- {limit}" for limit in limits),
    )


def score_rows(judged: Mapping[str, Evaluation]) -> list[str]:
    """A table row of each test set, with intervals over problems."""
    return [
        f"| {TITLES.get(name, name)} | {len(found.problems)} | "
        + " | ".join(
            per_cent(crossed_bootstrap([found.per_problem(strict)])) for strict in GRADINGS.values()
        )
        + " |"
        for name, found in judged.items()
    ]


def examples(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The first right and the first wrong greedy answer, as they came."""
    lines = []
    for right in (True, False):
        found = [r for r in rows if (r["completions"][0]["strict"] == "correct") is right]
        for row in found[:1]:
            title = "Right" if right else "Wrong"
            lines += [f"{title}. {row['question']} (gold {row['answer']})", ""]
            lines += ["```", row["completions"][0]["text"].replace("```", "'''"), "```", ""]
    return lines
