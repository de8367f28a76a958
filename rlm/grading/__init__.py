"""Grades a completion: finds the final answer and compares it exactly with the gold answer."""

import lazy_loader

# File → what other packages import of it.
EXPORTS = {
    "answers": "Verdict gold_from_gsm8k grade split_completion without_boxes",
    "arithmetic": "evaluate_expression",
    "equations": "Equation find_equations has_wrong_equation",
    "numbers": "numbers_in parse_number",
    "text": "ANSWER_TYPES AnswerType READERS read_choice",
    "voting": "Vote majority_score majority_vote",
}
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={file: names.split() for file, names in EXPORTS.items()}
)
