"""Grades a completion: finds the final answer and compares it exactly with the gold answer."""

from rlm.grading.answers import (
    Verdict,
    gold_from_gsm8k,
    grade,
    split_completion,
    without_boxes,
)
from rlm.grading.arithmetic import evaluate_expression
from rlm.grading.equations import Equation, find_equations, has_wrong_equation
from rlm.grading.numbers import numbers_in, parse_number
from rlm.grading.text import ANSWER_TYPES, READERS
from rlm.grading.voting import Vote, majority_score, majority_vote

__all__ = [
    "ANSWER_TYPES",
    "READERS",
    "Equation",
    "Verdict",
    "Vote",
    "evaluate_expression",
    "find_equations",
    "gold_from_gsm8k",
    "grade",
    "has_wrong_equation",
    "majority_score",
    "majority_vote",
    "numbers_in",
    "parse_number",
    "split_completion",
    "without_boxes",
]
