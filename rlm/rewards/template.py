"""My reward: 1 for the right number between the right tags, plus 0.1 for a short completion.

    python FILE                                       # print the rewards of the examples below
    python train_grpo.py --reward FILE:reward --doctor   # check that bad texts are not rewarded
    python train_grpo.py --reward FILE:reward

If you installed the package with pip, run `rlm grpo` instead of `python train_grpo.py`.
"""

from __future__ import annotations

from typing import Any

from rlm.grading import grade

SHORT = 400  # maximum length of a short completion, in characters


def reward(completion: str, reference_answer: str, **columns: Any) -> float | None:
    """Score one completion.

    Args:
        completion: the text that the model wrote, including the tags.
        reference_answer: the answer in the dataset.
        columns: `question`, `is_truncated` (whether the completion was cut off),
            `reasoning_format` (the name of the tags), `answer_type`, `strict_verdict` (the result
            of the strict grading, so that you need not grade again), and every other column of
            your dataset under its own name.

    Returns:
        A number on any scale, because only completions of the same problem are compared with each
        other. None leaves the completion out of the comparison and out of the loss.
    """
    verdict = columns.get("strict_verdict") or grade(completion, reference_answer, strict=True)
    if not verdict.correct:  # verdict.reason says why
        return 0.0
    is_short = len(completion) <= SHORT and not columns.get("is_truncated")
    return 1.1 if is_short else 1.0


EXAMPLES = (
    "<think>\n3 + 5 = 8\n</think>\n<answer>8</answer>",
    "<think>\n3 + 5 = 9\n</think>\n<answer>9</answer>",
    "The answer is 8.",
)

if __name__ == "__main__":
    for text in EXAMPLES:
        print(reward(text, "8"), repr(text))
