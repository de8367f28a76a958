"""A reward of your own: 1 for the right number, 0.5 if the reasoning is long, 0 if it is wrong.

Use it with `--reward examples/my_reward.py:my_reward`, as docs/tutorials/your-own-task.md does.
"""

LONG = 40  # words


def my_reward(completion: str, reference_answer: str) -> float:
    """Score one completion; `reference_answer` is the line's `answer`, as text."""
    if f"<answer>{reference_answer}</answer>" not in completion:
        return 0.0
    return 1.0 if len(completion.split()) <= LONG else 0.5
