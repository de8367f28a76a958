"""Majority votes over exact answers."""

import pytest

from rlm.grading.answers import Verdict, grade, majority_score, majority_vote


@pytest.mark.parametrize(
    ("answers", "winner", "members", "counts", "tie"),
    [
        (["5", "7", "5"], "5", (0, 2), {"5": 2, "7": 1}, False),
        (["0.5", "1/2", ".50"], "0.5", (0, 1, 2), {"0.5": 3}, False),  # as it was first written
        (["Paris.", "rome", "paris"], "Paris.", (0, 2), {"Paris.": 2, "rome": 1}, False),
        (["7", "5", "7", "5", "6"], "7", (0, 2), {"7": 2, "5": 2, "6": 1}, True),  # the first
        ([None, "7", None], "7", (1,), {"7": 1}, False),
        ([None, None], None, (), {}, False),
    ],
)
def test_majority_vote(answers, winner, members, counts, tie):
    vote = majority_vote(answers, "text")
    assert (vote.winner, vote.members, vote.counts, vote.tie) == (winner, members, counts, tie)
    assert (vote.n, vote.valid) == (len(answers), sum(counts.values()))
    assert vote.agreement == len(members) / len(answers)


RIGHT, SAME = Verdict(True, "correct", "1,000", 1000), Verdict(True, "correct", "1000.0", 1000)
WRONG, MUTE = Verdict(False, "wrong", "7", 7), Verdict(False, "no_answer", None)
HEDGED = Verdict(False, "several_numbers", "5 or 6")


@pytest.mark.parametrize(
    ("verdicts", "score"),
    [
        ([RIGHT, WRONG, SAME, MUTE], 1),  # two spellings, one number
        ([RIGHT, WRONG, MUTE, MUTE], 0.5),  # a tie is broken at random
        ([WRONG, WRONG, RIGHT], 0),
        ([HEDGED, HEDGED, RIGHT], 1),  # a claim that is no number has no vote
        ([MUTE, MUTE], 0),
    ],
)
def test_majority_score(verdicts, score):
    assert majority_score(verdicts) == score


def test_choices_are_voted_for_by_their_letter():
    texts = ["B", "B) Paris", "Option B", "C", "C"]
    whole = [f"<think>x</think><answer>{text}</answer>" for text in texts]
    verdicts = [grade(text, "B", strict=True, kind="choice") for text in whole]
    assert majority_score(verdicts) == 1
    assert majority_score(verdicts[2:]) == 0
