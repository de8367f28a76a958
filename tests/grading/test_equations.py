"""The equations of a text are found and checked exactly."""

import time
from fractions import Fraction

import pytest
from conftest import loop_seconds

from rlm.grading.equations import find_equations, has_wrong_equation


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("cost: 3 * 4 = 12", [12]),
        ("3 × 4 = 12, then 12 ÷ 5 = 2.4", [12, Fraction(12, 5)]),
        ("1 + 2 * 3 - 8 / 4 = 5", [5]),  # products and quotients first
        ("0.1 + 0.2 = $0.3", [Fraction(3, 10)]),  # exact
        ("3 + 4 = 7 + 5 = 12", [12]),  # 7 is no result; it begins the next equation
        ("-2 - -3 = 1", [1]),
        (r"2 \times 3 + 1 = 7, 2·3 + 1 = 7, 6 \div 2 = 3, 2 \cdot 3 = 6", [7, 7, 3, 6]),
        ("−5 + 8 = 3\n− 5 + 8 = 3", [3, 3]),  # the Unicode minus is never a bullet
        ("20 − 13 = 7, 3 - −2 = 5", [7, 5]),
        (r"\$5 * 3 = \$15, 3/4 = 75\%", [15, Fraction(3, 4)]),
        ("x = 5, 7 = 7, 1.2.3 + 1 = 2, 3 + 4 = many", []),
    ],
)
def test_equations_are_found(text, values):
    found = find_equations(text)
    assert [equation.value for equation in found] == values
    assert all(equation.holds for equation in found)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("3 * 4 = 13; 5 / 0 = 0; 2 + 2 = 4", [False, False, True]),
        ("(2 + 3) * 4 = 20", [True]),
        ("2 * (3 + 4) = 15", [False]),
        ("so (3 + 4 = 7) it is", [True]),
        ("$1,080 / 9 = $120 each, 1,000 + 234 = 1,244.", [True, False]),
        (".5 * 10 = 5", [True]),
        ("80 * 15% = 12, 15% + 10% = 25%, 5 / 20 = 25%, 5 / 20 * 100 = 25%", [True] * 4),
        ("80 * 15% = 120", [False]),
        ("3*4 = 12/day, 3 * 4 = 12 - the rest", [True, True]),
        ("- 3 + 4 = 7\n- 5 * 2 = 11", [True, False]),
        ("that's 3 + 4 = 8, paid a $3 + $4 = $7 fee", [False, True]),
        ("5. 3 + 4 = 8\n| 3 + 4 = 7 |\n### 3 + 4 = 7\n> 3 + 4 = 8", [False, True, True, False]),
        ("3 * 4 = 12 times, 30 - 15 = $15 more than Bo, 3 * 4 = 12 (apples)", [True] * 3),
        ("**3 x 4 = 12**, 3x4=13", [True, False]),
        (
            "**Step 1:** 3 + 4 = 8\n- **Cost:** **3 x 4 = 12**\n**So** 3 + 4 = 7",
            [False, True, True],
        ),
        # rounded to the decimals that are written, or wrong
        ("1/3 = 0.33, 2/3 = 0.67, 10 / 3 = 3.333, 1/3 = 33.3%, 1/8 = 0.13", [True] * 5),
        ("2/3 = 0.66, 10 / 3 = 3, 7 / 2 = 4, 1/3 = 0.3333 + 0, 1 / 3 = 0.34", [False] * 4),
        ("1/3 = 36.1%, 1/3 = 33.4%, 2/3 = 66%", [False] * 3),  # decimals of the percentage
        # the mark, and what is written around it
        ("3 + 5 = <<3+5=8>>8", [True, True]),
        ("3 + 5 = $<<3+5=8>>9", [False, True]),
        ("3 + 6 = <<3+5=8>>8", [False, True]),
        ("25 days * 8 hours = <<25*8=200>>200 hours", [True]),
        ("it is <<(2+3)*4=20>>20 and <<2+2=5>>5", [True, False]),
        # a mark is one complete equation
        ("<<3+4=8!>> <<3+4=7!>> <<twice 3+4=11>> <<3+4=7=7>> <<14//2=7>> <<1+1=x>>", [False] * 6),
        ("<<60 / 3/4=5>> <<$1,000 x 2=2000>> <<1/4=25%>> <<2*-3 = -6>>", [True] * 4),
        ("<<12=12>> <<SYS>> <<3+4>>", []),
        ("<<(3+4=7>> <<12=13>> <<=7>>", [False] * 3),
        # a symbol or a word that does not continue the equation hides nothing
        ("3 + 4 = 8! 3 + 4 = 8!! 3 + 4 = 7!\n3 + 4 = 8!", [False, False, True, False]),
        ("✓ 3 + 4 = 8\n🙂3 + 4 = 8\n~ 3 + 4 = 8\n@ 3 + 4 = 8\n% 3 + 4 = 8", [False] * 5),
        ("& 3 + 4 &= 8 \\\\\n& 3 + 4 = & 7", [False, True]),
        ("[Step] 3 + 4 = 8\n- [ ] 3 + 4 = 8\n(1) 3 + 4 = 8\n2) 3 + 4 = 7", [False] * 3 + [True]),
        ("// 3 + 4 = 8\n^ 3 + 4 = 8\n3 + 4 = 8^\n3 + 4 = 8 %", [False] * 4),
        (r"over 3 + 4 = 8, \quad 3 + 4 = 8, \text{so} 3 + 4 = 8", [False] * 3),
        # the emphasis or the box of a result, a dash as the minus, a quotient with its remainder
        (r"3 + 4 = **8**, 3 + 4 = **7** and 3 + 4 = \boxed{8}", [False, True, False]),
        ("5 – 2 = 9, 5 – 2 = 3\nStep 1 – 3 + 4 = 7", [False, True]),
        ("7 / 2 = 3 remainder 1, 7 / 2 = 3 R1", []),
        # no claim of its own: the tail of an expression, algebra, words between the numbers
        ("2 apples + 3 * 4 = 14, (5 cats + 3) * 2 = 16, 20% of 50 + 3 = 13", []),
        ("2000x 10/100 = 200, 120 – 80 - 15 = 25, 1/2 (68) + 10 = 44, 2 1/2 + 2 = 8", [True]),
        ("3 / 2 = 1 1/2, 100 * 180 = 18 000, 350 000 * 5/100 = 17500", []),
        ("60 / 3/4 = 80, 60 / 3 / 4 = 5, 12/4*3 = 9", [True] * 3),
        # an operator, a function or a symbol before the chain that is not read
        ("-(3 + 4) = -7", []),
        ("10^2 + 5 = 105, 10^(2) + 5 = 105, 2**3 + 1 = 9, 10 ** 2 + 5 = 105, √16 + 1 = 5", []),
        (r"\sqrt 16 + 1 = 5, \sqrt{16} + 1 = 5, |−5| + 1 = 6, 5! + 1 = 121, ½ + 1 = 1.5", []),
        ("12:30 - 1 = 11:30, 12 : 3 + 1 = 5, 1,5 + 2 = 3,5, 16,0000/10 = 16000", []),
        (r"\log_{2} 8 + 1 = 4, \log 8 + 1 = 2, (2 apples) (3 + 4) = 14, [2](3 + 4) = 14", []),
        (r"10 over 2 + 1 = 6, (1/2) 278 + 11 = 150, (a)**2 + 3 = 7", []),
        ("twice 5 + 1 = 11, double 3 + 1 = 7, log 100 + 1 = 3, sqrt 16 + 1 = 5", []),
        ("20 mod 7 + 1 = 7, 5 choose 2 + 1 = 11, 5 times 2 + 1 = 11, 20 divided by 5 + 1 = 5", []),
        ("5 plus 3 * 4 = 17, 20 % 7 + 1 = 7, 2 X 3 + 1 = 7, f (3) + 1 = 7, x 3 + 1 = 4", []),
        ("20% off 50 + 1 = 41, square of 3 + 1 = 10, product of 3 and 4 + 1 = 13", []),
        ("add 5 to 3 * 4 = 17, take 5 dollars from 3 * 4 = 7, 5 more than 3 * 4 = 17", []),
        ("20 apples -5 + 8 = 23, so −5 + 8 = 4", []),  # an operator, or a sign
        # a result that is only the start of an expression
        ("100 + 4 = 10^2 + 4, 1 + 7 = 2^3, 1 + 7 = 2³, 2 + 4 = 3!, 3 + 4 = 12:30, 3 + 4 = 7²", []),
        ("2 + 8 = 5 choose 2, 3 + 3 = 20 mod 7, 3 + 3 = 2 times 3, 3 + 5 = 2 cubed", []),
        ("500 + 500 = 1 thousand, 1000 + 1000 = 2k, 500 * 2 = 1e3, 12 + 12 = 2 dozen", []),
        ("2 + 3 = 5x, 10 - 3 = 5 + x, 3 + 4 = 50% of 14, 3 + 4 = 3 less than 10", []),
        ("2x - 3 = 5, x2 + 3 = 5, 1.2.3 + 1 = 2, 3 + 4 = 7 - 2, 1 + 1 = 1,5", []),
    ],
)
def test_what_is_read_and_what_holds(text, holds):
    assert [equation.holds for equation in find_equations(text)] == holds
    assert has_wrong_equation(text) == (False in holds)


@pytest.mark.parametrize(
    "text",
    [
        "1+" * 50_000,
        "9" * 100_000 + " + 1 = 2",
        "1 + 1" + " " * 100_000,
        "1-1 = -" * 20_000,
        "(" * 100_000 + "1 + 1 = 2",
        "1" + ",123" * 50_000 + "4 + 1 = 2",
        "<<" * 50_000 + "1+1=2>>",
        "(1+" * 50_000 + "1 = 2",
        "$" * 100_000,
        "1 + 1 = 3 * " * 20_000,
        "1+1=2" + ">>" * 50_000,
        "−" * 100_000,
        "− " * 50_000 + "1 + 1 = 2",
        "1 + 1 = 2" + " " * 100_000 + "of",
        "a" * 100_000 + " 1 + 1 = 2",
        "5 to 1 + 1 = 2 " * 7_000,
        "&" * 100_000 + " " * 100_000 + "= 1",
        "& " * 50_000 + "1 + 1 = 2",
        "1 + 1 = 2!" * 2_000,
        ("<<" + "(" * 190 + "1=1>>") * 500,
        "{" * 50_000 + "_{" * 50_000 + "} 1 + 1 = 2",
        "1 + 1 = 2" + " " * 100_000 + "%",
    ],
)
def test_hostile_text_costs_little(text):
    start = time.process_time()  # other programs may use the CPU
    find_equations(text)
    assert time.process_time() - start < 200 * loop_seconds()
