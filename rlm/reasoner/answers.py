"""Turn finished completions into an answer: parts, vote, confidence, verdict."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from rlm.data import Format
from rlm.grading import READERS, AnswerType, Vote, majority_vote
from rlm.reasoner.stream import ReasoningStream, Status, ToolCall

# Sentence ends, to split reasoning of one long line; a decimal point is not one.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=\S)")


_MARK = re.compile(r"<<(?P<inside>[^<>]*=(?P<result>[^<>=]*))>>(?P<again>(?=(?P=result)(?!\d)))?")


@dataclass(frozen=True)
class Thinking:
    """How the reasoning of one completion ended, and how long it was."""

    status: Status
    tokens: int
    budget: int | None


@dataclass(frozen=True)
class Sample:
    """A parsed finished completion."""

    response: str
    reasoning: str | None
    answer: str
    final_answer: str | None
    finish_reason: Literal["stop", "length"]
    thinking: Thinking
    format: str  # "strict", or the reason why not
    completion_tokens: int
    mean_logprob: float | None


@dataclass(frozen=True)
class Verification:
    expected: str
    correct: bool  # graded as in training: format and answer
    correct_lenient: bool  # the answer alone
    reason: str


@dataclass(frozen=True)
class Confidence:
    """Confidence in the answer. It ranks answers; it is not a probability of being right."""

    value: float
    method: Literal["vote_share", "mean_token_probability"]
    calibrated: Literal[False] = False


@dataclass(frozen=True)
class VoteCounts:
    """agreement: the winner's votes over n; abstentions lower it."""

    n: int
    valid: int  # completions with an answer in the strict format
    winner: str | None
    agreement: float
    counts: dict[str, int]


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class Answer:
    """All samples of a question, the shown one, and the confidence.

    answer_type: decides which answers are equal in the vote.
    calls: the tool calls in each sample's `response`.
    """

    samples: list[Sample]
    answer_type: AnswerType = "number"
    calls: list[list[ToolCall]] = field(default_factory=list)

    @cached_property
    def vote(self) -> Vote:
        """The vote, over answers in the strict format."""
        answers = [s.final_answer if s.format == "strict" else None for s in self.samples]
        return majority_vote(answers, READERS[self.answer_type])

    @property
    def shown(self) -> Sample:
        """The most likely sample among the winner's voters; among all samples if none voted."""
        candidates = [self.samples[i] for i in self.vote.members] or self.samples
        drawn = [sample.mean_logprob for sample in candidates]
        likely = [-math.inf if logprob is None else logprob for logprob in drawn]
        return candidates[likely.index(max(likely))]

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls of the shown sample."""
        shown = self.shown
        return next(c for s, c in zip(self.samples, self.calls, strict=True) if s is shown)

    @property
    def vote_counts(self) -> VoteCounts | None:
        """The vote's counts; None for a single sample."""
        if len(self.samples) == 1:
            return None
        vote = self.vote
        return VoteCounts(vote.n, vote.valid, vote.winner, vote.agreement, vote.counts)

    @property
    def confidence(self) -> Confidence | None:
        """The winner's share of the votes; for one sample the mean probability of its tokens."""
        if len(self.samples) > 1:
            return Confidence(self.vote.agreement, "vote_share")
        logprob = self.samples[0].mean_logprob
        return None if logprob is None else Confidence(math.exp(logprob), "mean_token_probability")

    def usage(self, prompt_tokens: int) -> Usage:
        completion = sum(sample.completion_tokens for sample in self.samples)
        reasoning = sum(sample.thinking.tokens for sample in self.samples)
        return Usage(prompt_tokens, completion, reasoning, prompt_tokens + completion)


def read_answer(stream: ReasoningStream) -> Answer:
    """Parse all completions of a finished request."""
    samples = [read_sample(stream, i) for i in range(len(stream.completions))]
    pairs = zip(samples, stream.completions, strict=True)
    calls = [[c for c in state.tool_calls if c.end <= len(s.response)] for s, state in pairs]
    return Answer(samples, stream.format.answer_type, calls)


def read_sample(stream: ReasoningStream, index: int) -> Sample:
    """Parse a finished completion by the format alone, without a gold answer."""
    state, format = stream.completions[index], stream.format
    if state.finish_reason is None:
        raise ValueError("the completion is not finished")
    text = str(stream.tokenizer.decode(state.ids, skip_special_tokens=True))
    if state.parser.phase == "done":  # cut the stop string and what follows it
        text = state.parser.until_stop(text)
    strict, lenient = (format.grade(text, None, strict=strict) for strict in (True, False))
    found = lenient.answer if lenient.is_answer else None
    drawn = state.logprobs
    return Sample(
        response=text,
        reasoning=state.reasoning if state.parser.opened else None,
        answer=state.answer,
        final_answer=strict.answer if strict.is_answer else found,
        finish_reason=state.finish_reason,
        thinking=Thinking(state.status, state.reasoning_tokens, stream.budget),
        format="strict" if strict.is_answer else strict.reason,
        completion_tokens=len(state.ids),
        mean_logprob=math.fsum(drawn) / len(drawn) if drawn else None,
    )


def length_warnings(stream: ReasoningStream) -> list[str]:
    """Return warnings about what max_new_tokens cut off, with advice."""
    n, limit = len(stream.completions), stream.max_new_tokens
    of = f" in {{}} of {n} answers" if n > 1 else ""
    larger = f"max_new_tokens ({limit}): send a larger one"
    found = []
    if cut := [state for state in stream.completions if state.out_of_room]:
        fewest = min(state.reasoning_tokens for state in cut)
        tokens = "1 token" if fewest == 1 else f"{fewest} tokens"
        room = f"the reasoning was cut after {tokens}{of.format(len(cut))}, as only"
        found.append(f"{room} an answer still fitted into {larger}")
    if ended := sum(state.finish_reason == "length" for state in stream.completions):
        found.append(f"the text was cut{of.format(ended)} by {larger}")
    return found


def without_marks(text: str) -> str:
    """Replace calculator marks by plain equations for display.

    >>> without_marks("total: <<4*6=24>>"), without_marks("4 * 6 = <<4*6=24>>24 eggs")
    ('total: 4*6=24', '4 * 6 = 24 eggs')
    """
    return _MARK.sub(lambda m: "" if m["again"] is not None else m["inside"], text)


def trace(sample: Sample) -> list[str]:
    """Split the reasoning into its lines (or sentences, if it is one line); the answer is last."""
    reasoning = without_marks(sample.reasoning or "")
    lines = [line.strip() for line in reasoning.splitlines() if line.strip()]
    if len(lines) == 1:
        lines = _SENTENCE_END.split(lines[0])
    return [*lines, sample.answer] if sample.answer else lines


def verify(sample: Sample, expected: str, format: Format) -> Verification:
    """Grade a sample against the right answer, strictly (as in training) and leniently."""
    strict, lenient = (
        format.grade(sample.response, expected, strict=strict) for strict in (True, False)
    )
    return Verification(expected, strict.correct, lenient.correct, strict.reason)
