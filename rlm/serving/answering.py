"""From finished completions to what is returned: one home for both protocols and inference.py."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlm.data.prompts import Format
from rlm.grading.answers import grade, normalize_answer
from rlm.serving.schema import (
    Confidence,
    Sample,
    Step,
    ThinkingReport,
    Usage,
    Verified,
    VoteReport,
)
from rlm.serving.thinking import Row, Thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Ends of sentences, for reasoning that is one long line. A point inside a number ends nothing.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=\S)")


def finished_samples(thinking: Thinking, only: Sequence[int] | None = None) -> list[Sample]:
    """The completions of a request, read and graded for format (there is no gold here)."""
    rows = thinking.rows if only is None else [thinking.rows[i] for i in only]
    return [_sample(row, thinking.budget, thinking.tokenizer, thinking.format) for row in rows]


def _sample(
    row: Row, budget: int | None, tokenizer: PreTrainedTokenizerBase, format: Format
) -> Sample:
    text = tokenizer.decode(row.ids, skip_special_tokens=True)
    if row.splitter.phase == "done":  # the stop text and what was drawn with it are not returned
        text = row.splitter.cut(text)
    # Only whether a number is there matters: a gold that it is compared with has to be given.
    strict, lenient = (grade(text, "0", strict=strict, **format.tags) for strict in (True, False))
    kept = strict.is_answer
    found = lenient.answer if lenient.is_answer else None
    return Sample(
        response=text,
        reasoning=row.reasoning if row.splitter.opened else None,
        answer=row.answer,
        final_answer=strict.answer if kept else found,
        finish_reason=row.finish_reason,
        thinking=ThinkingReport(status=row.status, tokens=row.reasoning_tokens, budget=budget),
        format="strict" if kept else strict.reason,
        completion_tokens=len(row.ids),
        mean_logprob=math.fsum(row.logprobs) / len(row.logprobs) if row.logprobs else None,
    )


@dataclass(frozen=True)
class Vote:
    """n samples, of which `valid` had an answer.

    agreement: the winner's votes over n (not over the valid ones: abstaining lowers it).
    members: which samples voted for the winner.
    """

    n: int
    valid: int
    winner: str | None
    agreement: float
    counts: dict[str, int]
    tie: bool
    members: tuple[int, ...]


def vote(answers: Sequence[str | None]) -> Vote:
    """The answer given most often; on a tie the one that came first (None abstains).

    0.5 and 1/2 are one answer, shown as it was first written.

    >>> result = vote(["8", "7", "8.0", None])
    >>> result.winner, result.counts, result.agreement, result.members
    ('8', {'8': 2, '7': 1}, 0.5, (0, 2))
    """
    voters: dict[object, list[int]] = {}
    for i, answer in enumerate(answers):
        if answer is not None:
            voters.setdefault(normalize_answer(answer), []).append(i)
    ranked = sorted(voters.values(), key=lambda members: (-len(members), members[0]))
    counts = {str(answers[members[0]]): len(members) for members in ranked}
    winner = ranked[0] if ranked else []
    tie = len(ranked) > 1 and len(ranked[1]) == len(winner)
    return Vote(
        n=len(answers),
        valid=sum(map(len, ranked)),
        winner=answers[winner[0]] if winner else None,
        agreement=len(winner) / len(answers),
        counts=counts,
        tie=tie,
        members=tuple(winner),
    )


def count_votes(samples: Sequence[Sample]) -> Vote:
    """Only answers in the strict format vote."""
    return vote([s.final_answer if s.format == "strict" else None for s in samples])


def vote_report(result: Vote) -> VoteReport:
    return VoteReport.model_validate(result, from_attributes=True)


def shown_sample(samples: Sequence[Sample], result: Vote) -> Sample:
    """Of the samples that voted for the winner the likeliest; the likeliest of all if none did."""
    candidates = [samples[i] for i in result.members] or list(samples)
    return max(candidates, key=lambda s: -math.inf if s.mean_logprob is None else s.mean_logprob)


def confidence(samples: Sequence[Sample], result: Vote) -> Confidence | None:
    """The winner's share of the votes, or of one sample how likely its tokens were on average.

    Neither is calibrated: it orders answers, it is no probability of being right.
    """
    if len(samples) > 1:
        return Confidence(value=result.agreement, method="vote_share")
    if samples[0].mean_logprob is None:
        return None
    return Confidence(value=math.exp(samples[0].mean_logprob), method="mean_token_probability")


def trace(sample: Sample) -> list[Step]:
    """The reasoning's lines (or sentences, if it is one line), then the answer, from step 0."""
    reasoning = sample.reasoning or ""
    lines = [line.strip() for line in reasoning.splitlines() if line.strip()]
    if len(lines) == 1:
        lines = _SENTENCE_END.split(lines[0])
    parts = [*lines, sample.answer] if sample.answer else lines
    return [Step(step=i, content=content) for i, content in enumerate(parts)]


def verify(sample: Sample, expected: str, format: Format) -> Verified:
    strict = grade(sample.response, expected, strict=True, **format.tags)
    lenient = grade(sample.response, expected, strict=False, **format.tags)
    return Verified(
        expected=expected,
        correct=strict.correct,
        correct_lenient=lenient.correct,
        reason=strict.reason,
    )


def usage(prompt_tokens: int, samples: Sequence[Sample]) -> Usage:
    completion = sum(sample.completion_tokens for sample in samples)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion,
        reasoning_tokens=sum(sample.thinking.tokens for sample in samples),
        total_tokens=prompt_tokens + completion,
    )
