"""A task with text answers: Roman numerals. docs/tutorials/your-own-task.md trains on it.

`--reward examples/roman.py:reward` calls `reward`. As a script, this file writes roman.jsonl, the
problems to train on, and roman_test.jsonl, other problems to evaluate on:

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
UNSOLVED, TEST = 48, 120  # problems


def reward(completion: str, reference_answer: str, strict_verdict: Verdict) -> float:
    """Return 1 for a right answer whose parts are right in the reasoning, and otherwise 0."""
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
