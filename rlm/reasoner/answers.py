"""Turns completions into an answer with its vote and confidence, and verifies the answer."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from rlm.data import Format
from rlm.grading import AnswerType, Vote, majority_vote
from rlm.reasoner.stream import ReasoningStream, Status, ToolCall

# Matches the space after a sentence, to split reasoning that is one long line. A decimal point does
# not match, because no space follows it.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=\S)")
# Matches a calculator annotation, such as <<4*6=24>>. The group `again` matches if the result is
# repeated after the annotation.
_ANNOTATION = re.compile(
    r"<<(?P<inside>[^<>]*=(?P<result>[^<>=]*))>>(?P<again>(?=(?P=result)(?!\d)))?"
)


@dataclass(frozen=True)
class Thinking:
    """How the reasoning of one completion ended, and its length and budget in tokens."""

    status: Status
    tokens: int
    budget: int | None


@dataclass(frozen=True)
class Sample:
    """A finished completion, parsed into its parts."""

    response: str
    reasoning: str | None
    answer: str
    final_answer: str | None
    finish_reason: Literal["stop", "length"]
    thinking: Thinking
    format: str  # "strict", or the reason why the strict format does not match
    completion_tokens: int
    mean_logprob: float | None


@dataclass(frozen=True)
class Verification:
    """The comparison of an answer with the expected answer."""

    expected: str
    correct: bool  # both format and answer are correct, as graded in training
    correct_lenient: bool  # the answer is correct, in any format
    reason: str


@dataclass(frozen=True)
class Confidence:
    """Confidence in an answer: a value to rank answers, not a probability of being correct."""

    value: float
    method: Literal["vote_share", "mean_token_probability"]
    calibrated: Literal[False] = False


@dataclass(frozen=True)
class VoteCounts:
    """The result of a majority vote.

    agreement: the winner's votes divided by n, so that abstentions lower the agreement.
    """

    n: int
    valid: int  # number of completions with an answer in the strict format
    winner: str | None
    agreement: float
    counts: dict[str, int]


@dataclass(frozen=True)
class Usage:
    """The numbers of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class Answer:
    """All samples of a question, with the vote, the sample to show, and the confidence.

    answer_type: the type that determines which answers the vote treats as equal.
    calls: the tool calls in the `response` of each sample.
    """

    samples: list[Sample]
    answer_type: AnswerType = "number"
    calls: list[list[ToolCall]] = field(default_factory=list)

    @cached_property
    def vote(self) -> Vote:
        """The majority vote over all answers in the strict format."""
        answers = [s.final_answer if s.format == "strict" else None for s in self.samples]
        return majority_vote(answers, self.answer_type)

    @cached_property
    def _shown(self) -> int:
        logprobs = [sample.mean_logprob for sample in self.samples]
        likely = [-math.inf if logprob is None else logprob for logprob in logprobs]
        return max(self.vote.members or range(len(likely)), key=likely.__getitem__)

    @property
    def shown(self) -> Sample:
        """The sample with the highest mean log-probability among those with the winning answer.

        If no answer won, it is chosen among all samples.
        """
        return self.samples[self._shown]

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls of the shown sample."""
        return self.calls[self._shown]

    @property
    def vote_counts(self) -> VoteCounts | None:
        """The counts of the vote; None for a single sample."""
        if len(self.samples) == 1:
            return None
        vote = self.vote
        return VoteCounts(vote.n, vote.valid, vote.winner, vote.agreement, vote.counts)

    @property
    def confidence(self) -> Confidence | None:
        """The winner's votes divided by the number of samples.

        For a single sample, it is the geometric mean of the probabilities of the sampled tokens.
        """
        if len(self.samples) > 1:
            return Confidence(self.vote.agreement, "vote_share")
        logprob = self.samples[0].mean_logprob
        return None if logprob is None else Confidence(math.exp(logprob), "mean_token_probability")


def count_tokens(stream: ReasoningStream, prompt_tokens: int) -> Usage:
    """Count the tokens of the prompt and of all samples."""
    completion = sum(len(state.ids) for state in stream.completions)
    reasoning = sum(state.reasoning_tokens for state in stream.completions)
    return Usage(prompt_tokens, completion, reasoning, prompt_tokens + completion)


def read_answer(stream: ReasoningStream) -> Answer:
    """Parse all completions of a finished request into an answer."""
    samples = [read_sample(stream, i) for i in range(len(stream.completions))]
    pairs = zip(samples, stream.completions, strict=True)
    calls = [[c for c in state.tool_calls if c.end <= len(s.response)] for s, state in pairs]
    return Answer(samples, stream.format.answer_type, calls)


def read_sample(stream: ReasoningStream, index: int) -> Sample:
    """Parse a finished completion with its format, without a reference answer."""
    state, format = stream.completions[index], stream.format
    if state.finish_reason is None:
        raise ValueError("the completion is not finished")
    text = state.text if state.parser.phase == "done" else stream.decode(state)
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


def length_warnings(stream: ReasoningStream, longest: int) -> list[str]:
    """Return warnings about completions that max_new_tokens cut off, with advice.

    Args:
        longest: the largest max_new_tokens that the server accepts.
    """
    n, limit = len(stream.completions), stream.max_new_tokens
    of = f" in {{}} of {n} answers" if n > 1 else ""
    is_largest = limit >= longest
    advice = ", the server's limit (--max-new-tokens)" if is_largest else ": send a larger one"
    larger = f"max_new_tokens ({limit}){advice}"
    found = []
    if cut := [state for state in stream.completions if state.out_of_room]:
        fewest = min(state.reasoning_tokens for state in cut)
        tokens = "1 token" if fewest == 1 else f"{fewest} tokens"
        room = f"the reasoning was cut after {tokens}{of.format(len(cut))}, as only"
        found.append(f"{room} an answer still fitted into {larger}")
    if ended := sum(state.finish_reason == "length" for state in stream.completions):
        found.append(f"the text was cut{of.format(ended)} by {larger}")
    return found


def without_annotations(text: str) -> str:
    """Replace calculator annotations with plain equations, for display.

    >>> without_annotations("total: <<4*6=24>>"), without_annotations("4 * 6 = <<4*6=24>>24 eggs")
    ('total: 4*6=24', '4 * 6 = 24 eggs')
    """
    return _ANNOTATION.sub(lambda m: "" if m["again"] is not None else m["inside"], text)


def trace(sample: Sample) -> list[str]:
    """Split a sample into its steps: the lines of the reasoning, then the answer.

    Reasoning of a single line is split into sentences.
    """
    reasoning = without_annotations(sample.reasoning or "")
    lines = [line.strip() for line in reasoning.splitlines() if line.strip()]
    if len(lines) == 1:
        lines = _SENTENCE_END.split(lines[0])
    return [*lines, sample.answer] if sample.answer else lines


def verify(sample: Sample, expected: str, format: Format) -> Verification:
    """Grade a sample against the expected answer, strictly (as in training) and leniently."""
    strict, lenient = (
        format.grade(sample.response, expected, strict=strict) for strict in (True, False)
    )
    return Verification(expected, strict.correct, lenient.correct, strict.reason)
