"""Majority voting (self-consistency, Wang et al. 2023, arXiv:2203.11171) over exact answers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from rlm.grading.answers import Verdict, normalize_answer


@dataclass(frozen=True)
class Vote:
    """The result of a vote: the distinct answers, most votes first, the earlier one on a tie."""

    answers: tuple[Hashable | None, ...]  # as they were given; None abstained
    ranked: tuple[tuple[int, ...], ...]  # for each distinct answer, who gave it

    @property
    def n(self) -> int:
        return len(self.answers)

    @property
    def valid(self) -> int:
        """The number of votes without abstentions."""
        return sum(map(len, self.ranked))

    @property
    def members(self) -> tuple[int, ...]:
        """Indices of the votes for the winner."""
        return self.ranked[0] if self.ranked else ()

    @property
    def winner(self) -> Hashable | None:
        """The winning answer in its first spelling; None if all abstained."""
        return self.answers[self.members[0]] if self.members else None

    @property
    def agreement(self) -> float:
        """The winner's share of all n votes; abstentions lower it."""
        return len(self.members) / self.n

    @property
    def tied(self) -> tuple[tuple[int, ...], ...]:
        """All answers with as many votes as the winner."""
        return tuple(voters for voters in self.ranked if len(voters) == len(self.members))

    @property
    def tie(self) -> bool:
        return len(self.tied) > 1

    @property
    def counts(self) -> dict[str, int]:
        """Votes by answer, in its first spelling."""
        return {str(self.answers[voters[0]]): len(voters) for voters in self.ranked}


def majority_vote(
    answers: Sequence[Hashable | None], key: Callable[[Hashable], Hashable] = normalize_answer
) -> Vote:
    """Find the most frequent answer (None abstains). 0.5 and 1/2 are one answer.

    Args:
        key: maps equal answers to one key, such as a reader of `READERS`; by default number or
            text.

    >>> vote = majority_vote(["8", "7", "8.0", None])
    >>> vote.winner, vote.counts, vote.agreement, vote.members
    ('8', {'8': 2, '7': 1}, 0.5, (0, 2))
    """
    voters: dict[Hashable, list[int]] = {}
    for i, answer in enumerate(answers):
        if answer is not None:
            voters.setdefault(key(answer), []).append(i)
    ranked = sorted(map(tuple, voters.values()), key=lambda who: (-len(who), who[0]))
    return Vote(tuple(answers), tuple(ranked))


def majority_score(verdicts: Sequence[Verdict]) -> float:
    """Return the chance that the majority answer is right, with ties broken at random.

    This expected value does not depend on the sampling order. Its mean is maj@k.
    """
    values = [verdict.value if verdict.is_answer else None for verdict in verdicts]
    tied = majority_vote(values, key=lambda value: value).tied
    return sum(verdicts[who[0]].correct for who in tied) / len(tied) if tied else 0.0
