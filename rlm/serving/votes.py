"""What several answers to one question agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlm.answers import ballot


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
            voters.setdefault(ballot(answer), []).append(i)
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
