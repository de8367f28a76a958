"""GSM8K as equations: which problems are kept, and what a variant may change."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.gsm8k_equations import (
    HELD_OUT,
    EquationsConfig,
    Solution,
    compute,
    draw_near,
    main,
    read_equations,
    read_sentences,
    recompute,
    to_record,
    vary,
)
from rlm.cli.options import UsageError
from rlm.data.loaders import OwnFile

QUESTION = "Ann has 8 bags of 30 nuts, twice what Bob's bags hold. She eats 7. How many?"
ANSWER = "She has 8*30=<<8*30=240>>240 nuts.\nShe keeps 240-7=<<240-7=233>>233.\n#### 233"
EQUATIONS = [("8*30", "240"), ("240-7", "233")]


def draws(question: str, equations: list[tuple[str, str]], count: int = 40) -> list:
    rng, texts = random.Random(1), [""] * (len(equations) + 1)
    drawn = [vary(question, Solution(equations, texts), rng) for _ in range(count)]
    return [variant and (variant[0], variant[1].equations) for variant in drawn]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("8*(15/4)", 30),
        ("100-50-30", 20),
        ("-3+5", 2),
        ("0.1*30", 3),
        ("1/0", None),
        ("2**9", None),
        ("50%*30", None),
        ("3*+6", None),
        ("+5", None),
        ("", None),
        ("1000,5", None),
        ("a+1", None),
        ("max(1,2)", None),
    ],
)
def test_arithmetic_is_exact_and_nothing_but_arithmetic(expression, value):
    assert compute(expression) == value


def test_equations_count_only_if_the_last_is_the_answer():
    assert read_equations(ANSWER) == (EQUATIONS, ["", "\n", ""])
    for read in read_equations, read_sentences:
        assert read(ANSWER.replace("#### 233", "#### 240")).equations == []
        assert read("It is 5.\n#### 5").equations == []


@pytest.mark.parametrize(
    ("answer", "sentences"),
    [
        (ANSWER, "She has <<8*30=240>> nuts.\nShe keeps <<240-7=233>>."),
        ("A $1,200 + $30 = $<<1200+30=1230>>1,230.\n#### 1230", "A <<1200+30=1230>> dollars."),
        ("In 2 days 3 x 4= <<3*4=12>>12 hats.\n#### 12", "In 2 days <<3*4=12>> hats."),
        ("3 hats * 4 = <<3*4=12>>12 hats.\n#### 12", "3 hats * 4 = <<3*4=12>> hats."),
        ("It takes <<60/8=7.5>>7.50 minutes.\n#### 7.5", "It takes <<60/8=7.5>> minutes."),
        ("He has <<3*4=12>>12 dollars.\n#### 12", "He has <<3*4=12>> dollars."),
        ("It grows by 50*.1=<<50*.1=5>>5%.\n#### 5", "It grows by <<50*.1=5>>%."),
    ],
)  # fmt: skip
def test_sentences_write_each_equation_once(answer, sentences):
    assert to_record("?", read_sentences(answer), marks=True)["solution"] == sentences


@pytest.mark.parametrize(
    "answer",
    [
        "It is <<3*4=12>>13.\n#### 12",  # differs from the result of the calculator
        "It is <<3*4=12>>.\n#### 12",  # no number follows
        "From 5-3 = 2 come <<2*6=12>>12.\n#### 12",  # an equation outside of the calculator
        "As 2x+6=8, it is <<3*4=12>>12.\n#### 12",
    ],
)
def test_no_sentences_that_compute_without_the_calculator(answer):
    assert read_sentences(answer).equations == []


def test_a_variants_sentences_have_its_numbers():
    told = read_sentences(ANSWER.replace("keeps", "eats 7 of the 240 and keeps"))
    rng = random.Random(1)
    variants = [variant for _ in range(40) if (variant := vary(QUESTION, told, rng))]
    assert len(variants) >= 35
    for _, solution in variants:
        eaten = solution.equations[1][0].split("-")[1]
        between = f" nuts.\nShe eats {eaten} of the {solution.equations[0][1]} and keeps "
        assert solution.texts == ["She has ", between, "."]
    for other in "of the 9", "of nine":  # the number may depend on the drawn values
        told = read_sentences(ANSWER.replace("keeps", f"eats 7 {other} and keeps"))
        assert vary(QUESTION, told, rng) is None


def test_a_variant_has_other_numbers_and_the_answer_that_follows():
    variants = [v for v in draws(QUESTION, EQUATIONS) if v]
    assert len(variants) >= 35
    for question, equations in variants:
        bags, nuts = equations[0][0].split("*")
        eaten = equations[1][0].split("-")[1]
        expected = QUESTION.replace("8", bags).replace("30", nuts)
        assert question == expected.replace("eats 7", f"eats {eaten}")
        assert int(nuts) % 10 == 0
        total = int(bags) * int(nuts)
        assert equations[0][1] == str(total)
        assert equations[1] == (f"{total}-{eaten}", str(total - int(eaten)))
    assert len({question for question, _ in variants}) > 10


@pytest.mark.parametrize(
    ("question", "equations"),
    [
        ("She has 8 and 8.", [("8+8", "16")]),  # both numbers match
        # 12 may be a result or the hats.
        ("She has 6 pairs and 12 hats.", [("6*2", "12"), ("12+12", "24")]),
        # The 7 days of a week must not change.
        ("She reads 7 pages a day. In a week?", [("7*7", "49")]),
        ("He is 2 more than twice Bo's 1.", [("1*2", "2"), ("2+2", "4")]),
        ("Half of 50% of 100.", [("100*50/100", "50"), ("50/2", "25")]),  # 100 and 50 are ambiguous
        ("20 flats for two and 5 for 4.", [("20*2", "40"), ("40+20", "60")]),  # the other 20 is 5*4
        # 24 is not in the text.
        ("She paints 8 hours, thrice as long she cooks.", [("24+8", "32")]),
        # 24 is a total, and 6 is not in the text.
        ("They ran 24 feet: 20 and 4.", [("24-6", "18")]),
        ("They ran 24 feet: 20 and 4. In two days?", [("24*2", "48")]),
        ("She has 15. She sells 10 and keeps.", [("10*2", "20")]),  # a variant might sell 30 of 15
        ("Sold at 60, made of 50 and 20 %.", [("60/50", "1.2"), ("1.2/1.2", "1"), ("20*1", "20")]),
        ("He has 3 of 70. How many?", [("3*70", "210"), ("40", "40")]),  # 40 is not computed
        ("Two throws of 30 and 17. Which is highest?", [("30+2", "32"), ("17+2", "19")]),
        ("They share it 5:8, and hers is 8.", [("5+8", "13")]),  # 8 is ambiguous
        ("How many legs have 4 dogs?", [("4*4", "16")]),  # the second 4 is not in the text
        ("She has 5 hats. He has 10 more.", [("5+15", "20")]),  # 15 is not in the text
        ("She has 9 hats.", [("9*19.5", "175.5")]),  # 19.5 may depend on the 9
        ("It costs 3 of 7.", [("3/7", "0.43")]),  # the result is rounded
        # These are not whole numbers.
        ("It is 1,000 or 2.5 or 3/4 or 7:30 or 5th.", [("1000+30", "1030")]),
    ],
)
def test_no_variant_where_one_cannot_be_sure(question, equations):
    assert all(variant is None for variant in draws(question, equations))


def test_what_a_question_says_in_words_stays_and_the_rest_is_drawn():
    question = "Jo is 3 years older than twice Ed's age, who is 18. In 48 months?"
    equations = [("18*2", "36"), ("36+3", "39"), ("48/12", "4"), ("39+4", "43")]
    drawn = [variant for variant in draws(question, equations) if variant]
    assert len({question for question, _ in drawn}) > 10
    for question, found in drawn:
        more, age, months = (int(n) for n in re.findall(r"\d+", question))
        assert found[-1][1] == str(age * 2 + more + months // 12)


def test_results_stay_of_their_kind():
    assert recompute([("9/3", "3")], {9: "10"}) is None  # the result was a whole number
    assert recompute([("9-3", "6")], {3: "11"}) is None  # the result was positive
    for again in ("2.5", "2.50", "02.5"):  # each spelling of the number is found
        assert recompute([("5/2", "2.5"), (f"{again}*4", "10")], {5: "7"}) == [
            ("7/2", "3.5"),
            ("3.5*4", "14"),
        ]
    assert recompute([("5*25", "125.00"), ("125+1.0", "126")], {5: "6"})[-1] == ("150+1.0", "151")


def test_numbers_keep_their_size_and_roundness():
    rng = random.Random(0)
    assert {draw_near(40, rng) for _ in range(200)} == {20, 30, 40, 50, 60}
    assert {draw_near(7, rng) for _ in range(200)} == {4, 5, 6, 7, 8, 9, 10}
    assert {draw_near(2, rng) for _ in range(200)} == {2, 3}  # "1 dogs" would be wrong
    assert {draw_near(100, rng) for _ in range(200)} == {100, 200, 300}


def test_the_file_trains_and_holds_out_what_gsm8k_validates_with(tmp_path: Path):
    letters = str.maketrans("0123456789", "abcdefghij")  # the names contain no digits
    names = [str(i).translate(letters) for i in range(HELD_OUT + 3)]
    rows = [{"question": f"row {name}: {QUESTION}", "answer": ANSWER} for name in names]
    rows[-1]["answer"] = "#### 3"  # has no equations
    source, output = tmp_path / "gsm8k_train.jsonl", tmp_path / "new" / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(EquationsConfig(source=tmp_path, output=output, variants=2)) == 0
    problems = OwnFile(output).read()
    rows_of = [p.question.split(":")[0].removeprefix("row ") for p in problems]
    assert rows_of == ["caa", "cab", "caa", "caa", "cab", "cab"]  # rows 200 and 201
    assert problems[0].solution == "8*30=240\n240-7=233"
    assert problems[0].answer == "233"
    assert len({p.question for p in problems}) == 6
    first = output.read_text()
    main(EquationsConfig(source=source, output=output, variants=2))
    assert output.read_text() == first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("{}\n", "is not a file of GSM8K"),
        ("[1]\n", "is not a file of GSM8K"),
        ("{\n", "is not a file of GSM8K"),
        ('{"question": "a", "answer": "#### 1"}\n', "has 1 rows"),
    ],
)
def test_another_file_is_refused_and_nothing_written(tmp_path: Path, text, message):
    source, output = tmp_path / "train.jsonl", tmp_path / "out.jsonl"
    if text is not None:
        source.write_text(text)
    with pytest.raises(UsageError, match=message):
        main(EquationsConfig(source=source, output=output))
    assert not output.exists()


def test_a_mistake_on_the_command_line_is_one_line(tmp_path: Path):
    script = Path(__file__).parent.parent / "examples" / "gsm8k_equations.py"
    rows = [{"question": QUESTION, "answer": ANSWER}] * (HELD_OUT + 1)
    source = tmp_path / "train.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for arguments, message in (
        ([source], "pass two paths"),
        ([source, source / "under" / "a_file.jsonl"], "cannot be written"),
    ):
        command = [sys.executable, script, *arguments]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 2
        assert message in run.stderr
        assert len(run.stderr.splitlines()) == 1
