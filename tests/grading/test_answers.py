"""The grader: which texts count as an answer, and the time that hostile texts take."""

import json
import random
import threading
import time
from fractions import Fraction
from itertools import product

import pytest
from conftest import loop_seconds
from expected_skips import SHARED, needs_shared
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlm.grading.answers import (
    REASONS,
    gold_from_gsm8k,
    grade,
    read_choice,
    split_completion,
    without_boxes,
)
from rlm.grading.numbers import numbers_in, parse_number

COMPARED = ("correct", "wrong")


def reason(text: str, gold: str, *, strict: bool) -> str:
    verdict = grade(text, gold, strict=strict)
    assert verdict.reason in REASONS
    assert verdict.correct == (verdict.reason == "correct")
    if verdict.reason in COMPARED:
        assert verdict.answer is not None
        assert verdict.correct == (parse_number(verdict.answer) == parse_number(gold))
    return verdict.reason


# fmt: off
# the number, and texts that are exactly it
NUMBERS = {
    "37": ["37 TN residents"],
    "3": ["3 dozen", "+3", "3 m²", "٣"],
    "2": ["2 tens"],
    "700": ["7 hundred"],
    "18": [
        "18", " 18\n", "18.0", "18.", "18 dollars per day", "18 元", "18 sq. ft.", "**18**",
        "**18.**", "$18$", r"\(18\)", "\\[\n18\n\\]", "`18`", '"18"', r"\boxed{18}", "(18)", "１８",
        "𝟏𝟖", "18\u200b",
    ],
    "0": ["0", "-0"],
    "25": ["025"],
    "1/2": [".5", "½", r"\frac{1}{2}", r"\frac12"],
    "-1/2": ["-.5", r"-\frac{1}{2}", r"\frac{-1}{2}", r"\frac{1}{-2}", "-½", "−½"],
    "-3": ["-3", "- 3", "\u22123", "–3", "—3", "minus 3", "$$\n- 3\n$$", "－３"],
    "1000": [
        "1,000", "1 000", "1\u00a0000", "1\u2009000", "1'000", "1’000", "1_000", r"1{,}000",
        r"1\,000", r"1,\!000", "1e3",
    ],
    "2469135/2": ["1,234,567.5", "١٬٢٣٤٬٥٦٧٫٥"],
    "3/4": ["3/4", r"\dfrac{3}{4}", r"\tfrac34"],
    "-3/4": ["-3/4"],
    "3/2": ["1 1/2", "1½", r"1\frac{1}{2}"],
    "-3/2": ["-1 1/2", "-1½"],
    "10/3": [r"\frac{-10}{-3}"],
    "500": ["1 000/2"],
    "20": ["20%", r"20\%", "20 percent"],
    "5": [
        "$5.00", r"\$5.00", "5$", "€5", "5 €", "USD 5", "5 USD", "US$5", "5 km/h", "$5/hour",
        "5 kg·m/s", "5 m²·s⁻¹", "5 m^2·s^-1", r"5 \mathrm{N \cdot m}", "5 J/(g·K)", "5 m s⁻²",
        "5 K", "5 J·kg⁻¹·K⁻¹", "5 J kg^-1·K^-1", "5 cm3", "5 W/m2",
        "5 apples", "5 square meters", "5 dollars a day", "5 times", "5 seconds", "5 correct",
        "5 apples are left", "5 is left", "5 (five)", "5(Five) apples", "5 at most", "5 at least",
        "5 ten dollar bills",
    ],
    "-5": ["-$5", "$-5"],
    "72": ["72 clips", "72clips", r"72\text{ clips}", r"72 \mathrm{~km}"],
    "12": ["12 cm^2", r"12\text{ cm}^2", "12 eggs are remaining.", "12 (twelve) eggs"],
    "90": ["90°", r"90^\circ", r"90\degree"],
    "10": ["10 a.m."],
    "1500000": ["1.5 million"],
    "2000": ["2 thousand dollars", "2 thousands"],
    "3/2000": [
        "1.5e-3", "1.5 × 10^-3", r"1.5 \times 10^{-3}", "1.5*10^{−3} m", "1.5·10⁻³",
        "1.5x10^-3 m/s",
    ],
    "3" + "0" * 8: ["3 × 10⁸ m/s", r"3\times10^8\text{ m/s}", "3.0 x 10^8 meters per second"],
    "9" * 40: ["9" * 40],
}
# Not exactly one number. A decimal comma is not guessed, groups have one separator, a fraction has
# no spaces, a multiple in words is no unit, and `=` is for lenient regions.
NO_NUMBERS = [
    "5 hundredths", "3 tenths of it", "2 thirds", "5 lakh", "5 bn", "5bn dollars", "1 third",
    "3 halves", "7 twelfths", "7 sixteenths of it", "7 twentieths", "7 billionths", "--3", "1,00",
    "1,01", "0,125", "1,0000", "1000,000", "1,000 000", "1.000.000", "1,00,000", "17, 18", "17,18",
    "17 18", "18 or 17", "3 / 4", "1/0", "1/2/3", "1/2.5", "3 7/2", r"\frac{x}{2}", r"\frac{1}{0}",
    "17…18", "17。18", "17、18", "18 of the 20 clips", "18 and a half", "5k", "5K", "5万", "①", "Ⅷ",
    "十八", "3²", "18!", "2x", "2π", r"2\pi", r"\sqrt{4}", "x1", "3 + 4", "3*4", "3**4", "3 x 4",
    "4x4", "2(2)", "x = 18", "> 18", "≥ 18", "± 18", "18:30", "3-4", "2024-01-02", "1/2/2024",
    "5'5", "1.2.3", "1e999", "9" * 41, "18\x00", "18\ud800", "1\u200b8", "", "-", "eighteen", "NaN",
    "inf", "18" + " " * 300 + "x",
    # compound numbers in words, a second number in words, operators, verbs and doubts
    "5 hundred thousand", "5 thousand two hundred", "5 hundred and six", "2 million five", "5 six",
    "5 twenty-one", "5 to six", "5 or six", "5 maybe six", "5 plus two", "5 plus", "5 minus two",
    "5 times two", "5 divided by two", "5 over two", "5 point five", "5 mod two", "5 choose two",
    "5 percent of ten", "5 is wrong", "5 isn't it", "5 was close", "5 cannot be", "5 probably",
    "5 approximately", "5 wait", "5 I think", "5 (six)", "5 apples are rotten",
    "5 to six apples", "5 twenty five",
    r"3.\overline{3}", "3.(3)", r"3.\dot{3}", "0.3\u0305", "0.3\u0307", "5i", "8 = 5 + 3",
    "10/3 ≈ 3.33", "10/3, which is about 3.33", "10^8", "2 * 3 * 10^8", "3 × 10^x", "3 × 10^2.5",
    "3 × 10^100", "1 + 2 × 10^3", "3 × 10", "3 × 10^2^2",
]
# fmt: on
PAIRS = [(t, value) for value, texts in NUMBERS.items() for t in texts]
PAIRS += [(text, None) for text in NO_NUMBERS]


@pytest.mark.parametrize(("text", "value"), PAIRS, ids=[ascii(t)[:40] for t, _ in PAIRS])
def test_parse_number(text: str, value: str | None) -> None:
    assert parse_number(text) == (None if value is None else Fraction(value))
    for around in ("<answer>{}</answer>", r"\boxed{{{}}}") if value else ():
        assert grade(around.format(text), value, strict=False).correct


# (strict reason, lenient reason): completions; the gold is 18
# fmt: off
VERDICTS = {
    ("correct", "correct"): [
        "<think>x</think><answer>18</answer>",
        "\n<think>\nx\n</think>\n\n<answer>\n18\n</answer>\n",
        "<think>x</think><answer>$18.00</answer>", "<think>x</think><answer>18 clips.</answer>",
        r"<think>x</think><answer>\boxed{18}</answer>",
    ],
    ("wrong", "wrong"): ["<think>x</think><answer>17</answer>"],
    ("not_a_number", "correct"): [
        "<think>x</think><answer>x = 18</answer>",
        "<think>x</think><answer>The answer is 18.</answer>",
        "<think>x</think><answer><b>18</b></answer>",
    ],
    ("not_a_number", "not_a_number"): [
        "<think>x</think><answer>3 * 6</answer>", "<think>x</think><answer>eighteen</answer>",
        "<think>x</think><answer></answer>",
    ],
    ("text_outside", "not_a_number"): ["<think>x</think><answer></answer>18"],
    ("several_numbers", "several_numbers"): [
        "<think>x</think><answer>17 18</answer>", "<think>x</think><answer>17, 18</answer>",
        "<think>x</think><answer>18\n17</answer>",
        "<think>x</think><answer>18 (not 17)</answer>",
    ],
    ("empty_reasoning", "correct"): [
        "<think></think><answer>18</answer>", "<think> \n </think><answer>18</answer>",
    ],
    ("text_outside", "correct"): [
        "Sure! <think>x</think><answer>18</answer>", "<think>x</think>So <answer>18</answer>",
        "<think>x</think><answer>18</answer>.", "<think>x</think><answer>18</answer> or 17",
    ],
    ("no_reasoning", "correct"): [
        "<answer>18</answer>", "x</think><answer>18</answer>",
        "<Think>x</Think><answer>18</answer>", "18",
    ],
    ("no_answer", "no_answer"): ["<answer>18</answer><think>x</think>", "<think>18</think>"],
    ("no_reasoning", "no_answer"): [""],
    ("unclosed_reasoning", "unclosed_reasoning"): [
        "<think>x<answer>18</answer>", "</think><think>18",
        "</think>x<think><answer>18</answer>",
    ],
    ("repeated_reasoning", "unclosed_reasoning"): ["<think>x</think><answer>18</answer><think>"],
    ("repeated_reasoning", "correct"): [
        "<think>x</think><think>y</think><answer>18</answer>",
        "<think><think>x</think></think><answer>18</answer>",
    ],
    ("repeated_reasoning", "no_answer"): ["<think>x</think><answer>18</think></answer>"],
    ("answer_in_reasoning", "correct"): [
        "<think><answer>18</answer></think><answer>18</answer>",
        "<think>18 <answer></think><answer>18</answer>",
    ],
    ("answer_in_reasoning", "no_answer"): ["<think><answer>18</answer></think>"],
    ("no_answer", "correct"): ["<think>x</think>18", "<think>x</think>18</answer>"],
    ("no_answer", "several_numbers"): ["<think>x</think>17\n18"],
    ("unclosed_answer", "correct"): [
        "<think>x</think><answer>18", "<think>x</think></answer>18<answer>",
        "<think>x</think><answer>18</", "<think>x</think><answer>18</answer",
    ],
    ("repeated_answer", "correct"): [
        "<think>x</think><answer>18</answer><answer>18</answer>",
        "<think>x</think><answer><answer>18</answer></answer>",
        "<think>x</think><answer>18</answer></answer>",
    ],
    ("repeated_answer", "several_numbers"): [
        "<think>x</think><answer>17</answer> wait <answer>18</answer>",
        "<think>x</think><answer>18</answer><answer>17</answer>",
    ],
    ("repeated_answer", "wrong"): ["<think>x</think><answer>17</answer><answer>17</answer>"],
}
# fmt: on
FORMATS = [(text, *reasons) for reasons, texts in VERDICTS.items() for text in texts]


@pytest.mark.parametrize(("text", "strict", "lenient"), FORMATS, ids=[f[0][:60] for f in FORMATS])
def test_format(text: str, strict: str, lenient: str) -> None:
    assert reason(text, "18", strict=True) == strict
    assert reason(text, "18", strict=False) == lenient


# lenient reason: texts after the thinking; the gold is 18
# fmt: off
ANSWERS = {
    "correct": [
        "The answer is 18." + "\n" * 5000, "The answer is **18**.", r"\boxed{18.0}",
        r"\boxed{x = 18}", "#### $18", "#### 18 clips",
        r"<answer>18</answer> \boxed{17}", r"\boxed{18} [17]", "[18]", "So it is [18].",
        "See [1]. The answer is 18.", "The answer is 18. [2]", "See [1].\n#### 18",
        "See [1]. She has 18.",
        "#### 18\nThe answer is 17.", "The answer is 18. It took 3 steps.", r"\boxed{18",
        r"\boxed{A} \boxed{18}", r"\boxed{18} \boxed{18.0}", r"\boxed{\boxed{18}}",
        r"\boxed{\frac{36}{2}}",
        r"\boxed{\frac{a}{b} = 18}", r"\boxed{9\sqrt{4} \approx 18}",
        r"The answer is 18, because \tan x is.", r"\boxed{ \text{Total} = \$18 }", r"\fbox{18}",
        r"\sqrt[3]{8} = 2. The answer is 18.", "#### Step 3: add\nSo she has 18.",
        "#### 17\n#### 18", "The answer is 18", "the ANSWER is: 18!", "Answer: $18",
        "**Answer:** 18 apples", "Answer:\n- 18 apples", "Answer = 18", "The answer:\n\n18",
        "The final answer is:\n\\[\n18\n\\]",
        "The answer to the question is therefore 18 dollars.", "The answer would be 18.",
        "The answer is $18.00 (18 dollars).", "The answer is 17. No, the answer is 18.",
        "The answer is clear: 3 * 6 = 18.", "The answer is unknown. I have 18.",
        "<answer>x = 18</answer>", "<answer>10 + 8 = 18</answer>",
        "<answer>10 apples + 8 apples = 18 apples</answer>", "<answer>36/2 = 18</answer>",
        "<answer>36 / 2 = $18 per day</answer>", "<answer>3 x 6 = 18</answer>",
        "<answer>20 minus 2 = 18</answer>", "<answer>x ≈ 18</answer>",
        "<answer>18 = 18</answer>", "<answer>x = 18 and y = 18</answer>",
        r"\begin{align*} x &= 20 - 2 \\ &= 18 \end{align*}", "So she makes **$18** every day.",
        "She makes 18$ a day<|im_end|>", "48 + 24 = 72\n72/4 = 18", "- 5 apples\n- 18 apples",
        "Day 7: 18", "答案是**18**。", "18 apples for x1 and x2",
        "The answer that is not obvious is 18.", "The answer to how many did not pass is 18. Good.",
        "The answer isn't 17, it is 18.", "The answer is 18 because two of them left.",
        "He baked 18 two-inch cakes", "18 is what she said.", r"\boxed{\frac{-36}{-2}}",
        "She ran 3 times. The answer is 18 times.", "35/2 ≈ 18",
        "The answer is 18.00 to two decimal places.", "She has 18 over two days",
        "#### 18 and zero left", "The answer is 18 and one of them is red.",
        "The answer is 18 (eighteen).", "The answer is 18.(Because of a)", "Step 3.(a) gives 18",
    ],
    "wrong": [
        r"\boxed{17} <answer>18", "The answer is 18. No, the answer is 17.",
        # A reader would say 18, but without a marked answer the last number counts.
        "She earns 18 dollars over 7 days.",
        "The answer is 18.5.", "The answer is -18.", "The answer is - 18.",
        "The answer is negative 18.", "<answer>18 = 17</answer>", "<answer>x = -18</answer>",
        "[18]\n#### 17", "The answer is ½. It took 18 steps.", "#### ½", "It is -½.",
    ],
    "several_numbers": [
        r"\boxed{17} \boxed{18}", r"\boxed{18} \boxed{17}", r"\boxed{17 \text{ or } 18}",
        "The answer is 17, not 18.", r"\boxed{17, 18}",
        r"\boxed{17, 18} \boxed{18}", r"\boxed{17 \boxed{18}}", "[17] [18]", "#### 18 (17 + 1)",
        "#### 17 18", "The answer is 17 or 18.", "The answer is 18 because 20 - 3 = 17.",
        "The answer is 18 (3 groups of 6).",
        "<answer>x = 17, x = 18</answer>", "<answer>x = 17 or x = 18</answer>", "17, 18",
        "17 or 18", "16\n17\n18",
    ],
    "not_a_number": [
        r"\boxed{9^{9^{9^{9}}}}", r"\boxed{x \geq 18}", r"\boxed{\pm 18}",
        r"\boxed{}", r"\boxed{2 \cdot 9}", r"\boxed{\sqrt{18}}", r"\boxed{18\pi}",
        r"\boxed{\frac{a+b}{18}}", r"\boxed{\frac{x}{18}}", r"\boxed{(-\infty, 18)}",
        r"\boxed{[18, \infty)}", "<answer>(−∞, 18)</answer>", "The answer is 18 quadrillion.",
        r"\boxed{x \in \{18\}}", r"\boxed{x \neq 18}", r"\boxed{x > 18}",
        "The answer is not 18.", "The answer is 18 and a half.", "The answer is 18 + 1.",
        "The answer is 18:30.", "The answer is 18-19.", "The answer is 18^2.",
        "<answer>18 = x</answer>", "<answer>x = y + 18</answer>", "<answer>x = 18 + 1</answer>",
        "The answer isn't 18.", "The answer is not equal to 18.", "The answer cannot be 18.",
        "The answer can’t be 18.", "The answer does not equal 18.", "The answer is no longer 18.",
        "The answer is 18 or six.", "The answer is 18 to twenty.", "The answer is 18 times two.",
        "The answer is 18 point five.", "The answer is 18 plus two.", "18 thousand two hundred",
        "The answer is 18.(3)", r"The answer is 18.\dot{3}", "<answer>18 = 15 + 3</answer>",
        r"It is \frac{a}{18}", "The answer is 18i.",
        "She pays 36 / 2", "x > 18", "9^{9^{18", "18\ud800\x00",
    ],
    "no_answer": [
        "The answer is unknown.", "eighteen", "x18",
    ],
}
# fmt: on
AFTER_THINKING = [(text, reason) for reason, texts in ANSWERS.items() for text in texts]


@pytest.mark.parametrize(
    ("text", "expected"), AFTER_THINKING, ids=[ascii(a)[:60] for a, _ in AFTER_THINKING]
)
def test_lenient(text: str, expected: str) -> None:
    assert (
        reason(f"<think>x 18 <answer>18</answer></think>\n{text}", "18", strict=False) == expected
    )


APPROXIMATIONS = [
    ("The answer is 10/3 ≈ 3.33.", "10/3"),
    (r"$\frac{10}{3} \approx 3.3$", "10/3"),
    (r"\boxed{x = -\frac{10}{3} \approx -3.33}", "-10/3"),
    ("The answer is 10/3, which is about 3.33", "10/3"),
    ("It is 10/3 (about 3.33).", "10/3"),
    ("The answer is 1 1/3 or approximately $1.333", "4/3"),
    ("The answer is 7/2 ≈ 4", "4"),  # rounded to a whole number: the right side, as of "="
    ("The answer is 10 * 2/3 ≈ 6.67", "667/100"),
    ("The answer is 10/3, which is about 3.35", None),  # another value
    ("The answer is 10/3 (3.33)", None),
    ("The answer is -½.", "-1/2"),
]
# The decimals are right too, if the gold answer is rounded.
ROUNDED = [
    ("The answer is 2/3 ≈ 0.67", "0.67", True),
    ("The answer is 2/3 ≈ 0.67", "2/3", True),
    ("The answer is 2/3 ≈ 0.67", "0.66", False),
    ("10/3 ≈ 3.33 hours", "3.33", True),
    (r"\boxed{-\frac{10}{3} \approx -3.33}", "-3.33", True),
    (r"\boxed{-\frac{10}{3} \approx -3.33}", "3.33", False),
    (r"\boxed{\frac{2}{3} \approx 0.67} \boxed{5}", "0.67", False),
    ("The answer is 10/3 ≈ 3.35", "10/3", False),
]


@pytest.mark.parametrize(("text", "value"), APPROXIMATIONS, ids=[t for t, _ in APPROXIMATIONS])
def test_a_fraction_is_not_replaced_by_its_approximation(text: str, value: str | None) -> None:
    expected = None if value is None else Fraction(value)
    assert grade(text, None, strict=False).value == expected


@pytest.mark.parametrize(("text", "gold", "correct"), ROUNDED)
def test_a_rounded_gold_accepts_the_approximation(text: str, gold: str, correct: bool) -> None:
    verdict = grade(text, gold, strict=False)
    assert verdict.correct == correct
    assert not correct or verdict.value == parse_number(verdict.answer or "") == Fraction(gold)


# fmt: off
# the letter that `read_choice` reads, and texts
CHOICES = {
    "B": [
        "B", "(b)", " **(B)** ", "Option B", "B) Paris", "B. It is not far", "The answer is B.",
        "B) But I like it", "B) Paris, but I am not sure", "B. B is right.", "B) Perhaps A dog",
        "B) rate = k[A]", "B. The symbol is C", "B - Paris", "**B** – Paris", "（Ｂ）",
        "**Option B**", "B) Hepatitis B", "B. Plan A",
    ],
    None: [
        "", "Bad", "B or C", "B) or C", "B. Or C", "B) Not C", "B. And C", "B) Maybe C",
        "B. But (C)", "B. PERHAPS C", "B) Or, C", "B, C", "B is wrong", "B because of C", "not B",
        "B) But A is right", "B) or A", "B) Or I.", "B. I like it, or A", "B) Not B",
        "[B] [C] [D]", "B - C", "B - not B", "A-B", "A - rock, B - water",
        "B) Paris? The answer is C", "B) No wait, it is C", "B. Or rather C", "B) I choose C",
        "B. C", "B. or option C", "B) or else C", "B) unless C", "B. or maybe C", "B) x, C",
        "B. It could also be C", "B) Paris\nC", "B) or C)", "A, B, C, D", "Because",
    ],
}
# lenient reason: texts; the gold is B
STATED_CHOICES = {
    "correct": [
        "The answer is B because 2 + 2 = 4.", "The answer is B, since A and C are wrong.",
        "The answer is **B** because it is right. It is early.", "The correct option is B.",
        "The best choice is (B).", "My choice: B", "I choose B", "I would pick option B.",
        "Option B is correct.", "I think choice (B) is the right one.\nGood.", "(B) is correct",
        "The correct answer is (B) Paris.", r"\boxed{\textbf{(B)}}", r"$\textbf{(B)}$",
        r"\boxed{\text{B}}", r"\boxed{\mathrm{B}) 5}", "<answer>B because x</answer>",
        r"\boxed{12} \boxed{B}", "<answer>B</answer><answer>(b)</answer>",
        "The answer is A because x. No, the answer is B.", "The answer is B. B is correct.",
        "So the correct answer is B. B is right because A is not.", "The answer is B: B is correct",
        "It is not far. Option B is correct.", "Some like it.\nOption B is correct",
        "The answer is B. I don't think option C is correct.\nThe answer is B.",
    ],
    "wrong": ["The answer is C because B is wrong.", "Option C is correct."],
    "not_a_choice": [
        "The answer is B or C because x.", "The answer is B is wrong", "The answer is not B.",
        "The answer cannot be B.", "The answer isn't B.", "Option B is not correct.",
        "Option B is incorrect.", "Option B is correct, but C is too.", "I choose B. Or C",
        "The answer is C. B is right.", "I don't think option B is correct.",
        "It is not true that option B is correct.",
        "The answer is A. Some say option B is correct.", "Some say option B is correct.",
        "If you are right, option B is correct.", "I can’t say option B is correct.",
        "The correct options are A and B.", "B as well as C", "B because of x. Or C",
    ],
    "repeated_answer": ["<answer>A</answer><answer>B</answer>", r"\boxed{A} \boxed{B}"],
}
# fmt: on


@pytest.mark.parametrize(
    ("text", "letter"), [(text, letter) for letter, texts in CHOICES.items() for text in texts]
)
def test_read_choice(text: str, letter: str | None) -> None:
    assert read_choice(text) == letter


@pytest.mark.parametrize(
    ("text", "expected"), [(t, r) for r, texts in STATED_CHOICES.items() for t in texts]
)
def test_lenient_choice(text: str, expected: str) -> None:
    assert grade(f"<think>x</think>{text}", "B", strict=False, kind="choice").reason == expected


def test_a_closing_tag_that_is_cut_off_is_not_part_of_the_answer() -> None:
    for cut in ("", "</", "</answer"):
        found = grade(f"<think>x</think><answer>XIV{cut}", "XIV", strict=False, kind="text")
        assert (found.reason, found.answer) == ("correct", "XIV")


def test_tags_and_boxes_with_different_texts_are_wrong() -> None:
    for text in ("<answer>Rome</answer><answer>Paris</answer>", r"\boxed{Rome} \boxed{Paris}"):
        assert grade(text, "Paris", strict=False, kind="text").reason == "repeated_answer"
    tagged = "I write <answer> tags: <answer>Paris</answer>"
    for text in (r"\boxed{\text{Paris}}", tagged, "So the answer is Paris."):
        assert grade(text, "Paris", strict=False, kind="text").correct
    assert grade("<answer>a</answer><answer>b</answer>", None, strict=False, kind="open").is_answer


TEXTS = {  # a text gold: answers that are equal, answers that are not
    "0.5": (["1/2", r"\frac{1}{2}", r"$\dfrac12$", "0.50"], ["1/3", "-0.5", "5"]),
    "1000": (["1,000", r"1{,}000"], ["100", "1,000 km"]),
    r"\text{Evelyn}": (["Evelyn", r"\text{Evelyn}", r"\textbf{evelyn}"], ["Eve"]),
    r"\left(3, \frac{\pi}{2}\right)": ([r"(3, \dfrac{\pi}{2})"], [r"(3, \frac{\pi}{3})"]),
    "12 cats": (["12 Cats."], ["12 dogs", "12"]),
    "10²": (["10^2", " 10² "], ["102", "10"]),
    "100, 200": (["100,200", "100 , 200"], ["100200", "100 200", "200, 100"]),
    "102": (["102.0"], ["10²", "10₂"]),
    "H₂O": (["h2o"], ["H^2O"]),
    "3/4": (["³⁄₄", "¾"], ["34"]),
    "1969": (["1969!"], ["196"]),
    "Room 42": (["room 42!"], ["room 4"]),
    "x" * 1200: (["X" * 1200 + "."], ["x" * 1201]),
    "[0, 1)": (["[0,1)", "$[0, 1)$"], ["(0, 1]", "0, 1", "(0,1)"]),
    r"[0, 1) \cup (2, 3]": (
        [r"$[0,1)\cup (2,3]$."],
        [r"(0, 1) \cup (2, 3]", r"[0, 1) \cup (2, 3)"],
    ),
    r"x \in [0, f(1)]": ([r"x \in [0,f(1)]"], [r"x \in [0, f(1))"]),
    "5!": (["5!"], ["5"]),
    "Yes": (["Yes!"], ["Yes! No"]),
    "Paris": (["Paris" + " " * 50], ["Paris" + " " * 1000 + "no, London"]),
    "1, 2, 3": (["1,2,3", "1 , 2,3."], ["1, 3, 2", "123"]),
    "10-20": (["10–20", "10 − 20"], ["1020", "10"]),
    "x^2 + 1": (["x²+1", "x^{2} + 1", r"\(x^2+1\)", r"\[ x^2 + 1 \]"], ["x2 + 1", "x^3 + 1"]),
    "x^10": (["x¹⁰", "x^{10}"], ["x10"]),
    "it's": (["It’s", "“it's”"], ["its"]),
    r"\{1, 2\}": (["{1,2}"], ["{1,3}"]),
    r"(-\infty, 5]": (["(-∞,5]"], ["(-∞, 5)", "(∞, 5]", "5"]),
    "∞": ([r"\infty", r"$\infty$"], ["-∞", r"-\infty", r"\pi"]),
    r"2\sqrt{3}": (["2√3", r"2\sqrt 3"], ["2√2", "23"]),
    r"\sqrt{2x}": ([r"\sqrt{2x}."], [r"\sqrt{2}x", "√2x"]),
    r"\sqrt{23}": (["√23"], [r"\sqrt{2}3", r"\sqrt23"]),
    r"\pi r^2": (["πr²"], ["πr^3", "r^2"]),
    r"x \leq 5": (["x≤5", r"x\le 5"], ["x≥5", "x<5"]),
    r"90^\circ": (["90°", "90", r"90^{\circ}"], ["9", "90π"]),
    r"\theta = 90\degree": (["θ = 90°", r"\theta=90^\circ"], ["90", "θ = 90"]),
    r"\sqrt{10}": (["√10", r"\sqrt {10}"], ["√1", "10"]),
    r"\Delta t": (["Δt"], ["t", "δ"]),
    "> ] }": ([">]}", "`> ] }`"], [">", "> ] )"]),
}


@pytest.mark.parametrize("gold", TEXTS)
def test_a_text_that_is_a_number_is_compared_by_its_value(gold: str) -> None:
    for answers, expected in zip(TEXTS[gold], (True, False), strict=True):
        for answer, strict in product(answers, (True, False)):
            text = f"<think>x</think><answer>{answer}</answer>"
            assert grade(text, gold, strict=strict, kind="text").correct == expected, answer


@pytest.mark.parametrize("gold", ["", "A", "x", "17, 18", "1/0", "3 + 4", "None", "\ud800"])
@pytest.mark.parametrize("text", ["", "<think>x</think><answer>{}</answer>", "{}", r"\boxed{{{}}}"])
def test_an_unreadable_gold_rewards_nothing(gold: str, text: str) -> None:
    for strict in (True, False):
        assert reason(text.format(gold), gold, strict=strict) == "gold_unreadable"


def test_other_tags() -> None:
    text = "<reasoning>x</reasoning><result>18</result>"
    for strict in (True, False):
        verdict = grade(text, "18", strict=strict, reasoning_tag="reasoning", answer_tag="result")
        assert verdict.correct
    assert grade(text, "18", strict=True).reason == "no_reasoning"


def test_the_answer_is_reported_as_found() -> None:
    text = "<think>x</think><answer> $1,000 per day </answer>"
    assert grade(text, "1000", strict=True).answer == "$1,000 per day"
    assert grade("<think>x</think>It is −1,000 m.", "1", strict=False).answer == "-1,000"
    assert grade("<think>x</think>", "1", strict=False).answer is None
    assert grade("<answer>" + "a" * 9999 + "</answer>", "1", strict=False).answer == "a" * 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("18", (None, "18")),
        ("", (None, "")),
        ("<think>a</think>b", ("a", "b")),
        ("<think>\na\n</think>\nb\n", ("\na\n", "\nb\n")),
        ("p<think>a</think>b", ("a", "b")),
        ("a</think>b", ("a", "b")),  # the template had opened it
        ("<think>a</think>b</think>c", ("a</think>b", "c")),
        ("<think>a", ("a", "")),
        ("<think>a</think>b<think>c", ("a</think>b<think>c", "")),
        ("</think>b<think>c", ("c", "")),
        ("</think>b", ("", "b")),
    ],
)
def test_split_completion(text: str, expected: tuple[str | None, str]) -> None:
    assert split_completion(text) == expected


def test_gold_from_gsm8k() -> None:
    field = "He has 2*6=<<2*6=12>>12 apples.\nThen 12*90=$<<12*90=1080>>1080.\n#### 1,080"
    assert gold_from_gsm8k(field) == ("He has 2*6=12 apples.\nThen 12*90=$1080.", "1,080")
    solution, _ = gold_from_gsm8k(field, calculator_annotations=True)
    assert solution == field.partition("\n####")[0]
    for written, kept in [
        ("<<1*.5=.5>>.5 of it", "<<1*.5=0.5>>0.5 of it"),
        ("$<<2*2.25=4.50>>4.50", "$<<2*2.25=4.5>>4.50"),
        ("<<3*3=9.00>>9.", "<<3*3=9>>9."),
        ("<<100*2=200>>200", "<<100*2=200>>200"),
        ("<<4/40=0.10>>0.10", "<<4/40=0.1>>0.10"),
    ]:
        assert gold_from_gsm8k(f"{written}\n#### 1", calculator_annotations=True) == (kept, "1")
    for bad in ("", "18", "x\n####", "x\n#### eighteen", "x\n#### 17 or 18"):
        with pytest.raises(ValueError, match="no number after ####"):
            gold_from_gsm8k(bad)


# --- reward hacking -------------------------------------------------------------------------------

LISTS = [joint.join(map(str, range(1001))) for joint in (", ", ",", " ", "\n", " or ", " and ")]
LISTS += [f"[{LISTS[0]}]", "\n".join(f"- {n}" for n in range(1001)), LISTS[0] + "."]
LISTS += ["".join(f"{open_}{n}{close}" for n in range(1001)) for open_, close in ("[]", "()", "$$")]
LISTS += ["".join(rf"\boxed{{{n}}}" for n in range(1001))]


@pytest.mark.parametrize("text", LISTS, ids=[t[:12] + "…" for t in LISTS])
def test_a_list_of_all_integers_scores_nothing(text: str) -> None:
    for completion in (text, f"Let me see. {text}", f"<answer>{text}</answer>"):
        for strict in (True, False):  # no value was compared: it is wrong for every gold
            assert reason(f"<think>x</think>{completion}", "1000", strict=strict) not in COMPARED
    said = [grade(f"The answer is {text}", str(n), strict=False).correct for n in (0, 1, 999, 1000)]
    assert sum(said) <= 1


CONSTANTS = [text for text, _, _ in FORMATS] + [f"<think>x</think>{a}" for a, _ in AFTER_THINKING]
CONSTANTS += [f"<think>x</think><answer>{t}</answer>" for t, _ in PAIRS]


def test_a_constant_text_is_right_for_at_most_one_value() -> None:
    golds = ["17", "18", "-18", "3", "-3", "1", "0", "2", "1000", "1/2", "A", "", "36", "5"]
    for text in CONSTANTS:
        for strict in (True, False):
            assert sum(grade(text, gold, strict=strict).correct for gold in golds) <= 1, text


# --- properties -----------------------------------------------------------------------------------

PIECES = [
    *("<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "}", "{", "[", "]", "#### "),
    *("answer is ", "answer: ", "\n", " ", ",", ", ", ".", "-", "−", "=", "+", "*", "**", "/", "^"),
    *("$", "%", "\\frac{", "\\text{", " or ", " not ", "x", "cm", "²", "½", "1", "18", "1,000"),
    *("٣", "\ud800", "\x00", "\u200b", "…", "—", "\\", "_", "'", "e", "!", ":", ">", "万", "\\["),
]
hostile = st.one_of(
    st.text(), st.text(st.characters()), st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
)


@settings(max_examples=300, deadline=None)
@given(hostile, st.one_of(hostile, st.sampled_from(["18", "1", "1000"])))
@example("<think>a</think><answer>" + "9" * 5000 + "</answer>", "9" * 5000)
@example("<answer>1/" + "9" * 5000 + "</answer>", "18")
def test_any_text_gets_a_verdict(text: str, gold: str) -> None:
    strict, lenient = (grade(text, gold, strict=mode) for mode in (True, False))
    for mode in (True, False):
        reason(text, gold, strict=mode)
        assert grade(text, gold, strict=mode) == (strict if mode else lenient)  # pure
    assert not strict.correct or lenient.correct
    split_completion(text)


@settings(max_examples=200, deadline=None)
@given(hostile.filter(lambda t: "think>" not in t and "answer>" not in t), hostile)
def test_strict_implies_lenient(content: str, thinking: str) -> None:
    text = f"<think>{thinking}</think>\n<answer>{content}</answer>"
    value = parse_number(content)
    verdict = grade(text, str(value) if value is not None else "18", strict=True)
    if verdict.correct:
        assert grade(text, str(value), strict=False).correct
    elif verdict.reason == "wrong":
        raise AssertionError("a number differs from its own value")


@given(
    st.integers(-(10**12), 10**12), st.sampled_from([",", " ", "'", "_", "{,}", "\\,", "\u202f"])
)
def test_grouped_integers_round_trip(number: int, separator: str) -> None:
    text = f"{number:,}".replace(",", separator)
    assert parse_number(text) == number
    for around in ("${}", "**{}**", "{}.00", "{} km/h", "\\boxed{{{}}}"):
        assert parse_number(around.format(text)) == number
    assert grade(f"<think>x</think><answer>{text}</answer>", str(number), strict=True).correct


@given(st.fractions(-(10**12), 10**12, max_denominator=10**6))  # within 40 digits
def test_fractions_round_trip(number: Fraction) -> None:
    assert parse_number(str(number)) == number
    sign, top = "-" * (number < 0), abs(number.numerator)
    assert parse_number(f"{sign}\\frac{{{top}}}{{{number.denominator}}}") == number


@settings(max_examples=200)
@given(hostile.filter(str.strip), st.sampled_from([0, 1, 2]), st.integers(-99, 99))
def test_any_text_around_a_strict_completion_breaks_it(text: str, where: int, gold: int) -> None:
    parts = ["<think>x</think>", f"<answer>{gold}</answer>"]
    assert grade("\n".join(parts), str(gold), strict=True).correct
    parts.insert(where, text)
    assert not grade("\n".join(parts), str(gold), strict=True).correct


@given(hostile.filter(lambda text: "</think>" not in text), st.integers(0, 99))
def test_what_is_thought_is_not_said(thinking: str, gold: int) -> None:
    assert not grade(f"<think>{thinking}{gold}", str(gold), strict=False).correct
    text = f"<think>{thinking} {gold} \\boxed{{{gold}}}</think>I do not know."
    assert not grade(text, str(gold), strict=False).correct


# --- cost -----------------------------------------------------------------------------------------

# For 30 kB, the fastest of up to three runs takes at most a few times `loop_seconds()`. An
# algorithm whose time grows with the square of the length takes hundreds of times as long.
LIMIT = 100 * loop_seconds()
REPEATED = [
    *("[", "{", "(", "<", "<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "\\boxed{1}"),
    *("1", "1,", ",1", "1 ", "1,000", "1 000 ", "1/", "1.2", "1e9", "1 1/2 ", "[1]", "[1,", "(1)"),
    *("9^{", "\\frac{1}{", "\\", "$", "*", "_*", "- ", "\n", "\n- ", " ", "= ", "} ^", "-", "—1"),
    *("answer is ", "answer is 1 ", "answer", "answer \n", "####", "#### 1\n", "18 dollars\n"),
    *("is ", "because ", "is correct ", ",", "option B is ", "\\text{", "and ", "two ", "isn't "),
    *("1/2 ", "1/2 ≈ ", "3.(3)", "a", "x", "万", "½", "²", "٣", "１", "\u3000", "\ud800", "\x00"),
    "<answer>1</answer>",
]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"So it is $\boxed{24}$.", "So it is $24$."),
        (r"\boxed{\frac{1}{2}} and \fbox{x_{1}}", r"\frac{1}{2} and x_{1}"),
        (r"\boxed{a \boxed {b} {c}}", "a b {c}"),
        (r"\frac{1}{2} = {x}", r"\frac{1}{2} = {x}"),
        (r"\boxed{24", r"\boxed{24"),  # never closed: nobody knows where it ends
        (r"} \boxed{1} {", "} 1 {"),
        ("", ""),
    ],
)
def test_a_box_is_taken_off_what_it_holds(text: str, plain: str) -> None:
    assert without_boxes(text) == plain


@pytest.mark.parametrize("piece", REPEATED, ids=ascii)
def test_hostile_text_is_cheap(piece: str) -> None:
    flood = piece * (30_000 // len(piece))
    texts = [flood, f"<think>x</think>{flood}", f"<think>x</think><answer>{flood}</answer>"]
    texts += [
        f"<think>{flood}</think><answer>18</answer>",
        f"\\boxed{{{flood}}}",
        flood + "}" * 9999,
    ]
    golds, slowest = {"number": "18", "choice": "B", "text": "paris"}, [0.0]

    def work() -> None:
        for text, strict, (kind, gold) in product(texts, (True, False), golds.items()):
            best = 1.0
            for _ in range(3):
                start = time.thread_time()  # others may want the machine too
                grade(text, gold, strict=strict, kind=kind)
                best = min(best, time.thread_time() - start)
                if best < LIMIT:
                    break
            slowest.append(best)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(slowest) == 1 + 2 * len(golds) * len(texts)  # or one has raised
    assert max(slowest) < LIMIT


DISTINCT = " ".join(f"{n}/{n + 1}" for n in range(3_000))
FLOODS = [*(piece * (100_000 // len(piece)) for piece in REPEATED), "9" * 100_000, DISTINCT]
FLOODS += ["1" + ",123" * 25_000 + "4"]


@pytest.mark.parametrize("text", FLOODS, ids=lambda text: ascii(text[:12]))
def test_finding_all_numbers_is_cheap(text: str) -> None:
    best = 1.0
    for _ in range(3):
        start = time.thread_time()
        numbers_in(text)
        best = min(best, time.thread_time() - start)
    assert best < LIMIT


# --- GSM8K ----------------------------------------------------------------------------------------


GSM8K = [pytest.param("gsm8k_train", 7473, marks=pytest.mark.slow), ("gsm8k_test", 1319)]


@needs_shared("data")
@pytest.mark.parametrize(("name", "count"), GSM8K)
def test_every_gsm8k_gold_verifies_against_itself(name: str, count: int) -> None:
    rows = (SHARED / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(rows) == count
    kinds = set()
    values = []
    for row in rows:
        solution, gold = gold_from_gsm8k(json.loads(row)["answer"])
        assert "<<" not in solution
        assert "####" not in solution
        completion = f"<think>\n{solution}\n</think>\n<answer>{gold}</answer>"
        assert reason(completion, gold, strict=True) == "correct"
        assert reason(completion, gold, strict=False) == "correct"
        kinds |= {char for char in gold if char in ",-."}
        values.append(gold)
    assert "," in kinds
    for gold, text in zip(values, random.Random(0).sample(values, 1000), strict=False):
        completion = f"<think>x</think><answer>{text}</answer>"
        same = gold.replace(",", "") == text.replace(",", "")
        assert grade(completion, gold, strict=True).correct == same
