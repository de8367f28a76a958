"""Defines the task of docs/tutorials/your-own-task.md: to write numbers as Roman numerals.

`--reward examples/roman.py:reward` selects the function `reward` below. As a script, this file
writes the training problems to roman.jsonl, and other problems for evaluation to roman_test.jsonl:

    python examples/roman.py
"""

import json
import random
import re
from pathlib import Path

from rlm.grading import Verdict

UNITS = ("", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX")
TENS = ("", "X", "XX", "XXX", "XL", "L", "LX", "LXX", "LXXX", "XC")
HUNDREDS = ("", "C")
# Numbers with a worked solution. Their numerals use every part above.
SOLVED = (14, 22, 38, 49, 56, 65, 77, 83, 91, 105, 130, 162)
UNSOLVED, TEST = 48, 120  # number of training problems without a solution, and of test problems


def reward(completion: str, reference_answer: str, strict_verdict: Verdict) -> float:
    """Return 1 if the answer is right and joins the parts in the reasoning, and otherwise 0."""
    if not strict_verdict.correct:  # a wrong answer, or not the required format
        return 0.0
    parts = re.findall(r" is ([IVXLC]+)$", completion, re.MULTILINE)
    return float("".join(parts) == reference_answer)


def problem(number: int) -> dict[str, str]:
    hundreds, tens, units = number // 100, number // 10 % 10, number % 10
    parts = [(hundreds * 100, HUNDREDS[hundreds]), (tens * 10, TENS[tens]), (units, UNITS[units])]
    row = {
        "question": f"Write {number} in Roman numerals.",
        "answer": "".join(numeral for _, numeral in parts),
        "answer_type": "text",
    }
    if number in SOLVED:
        row["solution"] = "\n".join(f"{value} is {numeral}" for value, numeral in parts if value)
    return row


def write(name: str, numbers: list[int]) -> None:
    text = "".join(json.dumps(problem(number)) + "\n" for number in numbers)
    Path(__file__).with_name(name).write_text(text, encoding="utf-8")


def main() -> None:
    others = [number for number in range(1, 200) if number not in SOLVED]
    drawn = random.Random(0).sample(others, UNSOLVED + TEST)
    write("roman.jsonl", [*SOLVED, *drawn[:UNSOLVED]])
    write("roman_test.jsonl", drawn[UNSOLVED:])


if __name__ == "__main__":
    main()
