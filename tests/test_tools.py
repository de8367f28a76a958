"""Tools: the calculator compared with exact arithmetic, hostile texts, and checks of --tool."""

import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from conftest import loop_seconds
from hypothesis import given
from hypothesis import strategies as st

from rlm.cli import UsageError
from rlm.grading import evaluate_expression
from rlm.tools import MAX_LENGTH, Calculator, as_tool, load_tool

ask = Calculator()


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("11*5", "55"), ("3 + 4", "7"), ("48/2", "24"), ("2+3*4", "14"), ("(2+3)*4", "20"),
        ("10-2-3", "5"), ("100/10/2", "5"), (".5*20", "10"), ("0.1+0.2", "0.3"), ("5.", "5"),
        ("1/4", "0.25"), ("3-5", "-2"), ("-3*-2", "6"), ("+30+46", "76"), ("2*(-(1+1))", "-4"),
        ("20%*50", "10"), ("(5+5)%", "0.1"), ("0-0", "0"), ("1/1000000", "0.000001"),
        ("999999999999999+0", "999999999999999"), ("1/3*3", "1"), ("2*((3))", "6"), ("7", "7"),
    ],
)  # fmt: skip
def test_a_result_is_exact(expression, result):
    assert ask(f"it is {expression} = <<{expression}=") == f"{result}>>"


@pytest.mark.parametrize(
    "text",
    [
        "<<10/3=", "<<1/3=", "<<1/128=", "<<999999999999999+1=",  # no short decimal result
        "<<1/0=", "<<5/(3-3)=", "<<=", "<< =", "<<+=", "<<3+=", "<<*3=", "<<(3+4=", "<<3+4)=",
        "<<()=", "<<3 4=", "<<2(3)=", "<<3+4", "<<3+4==", "<<3+4>>=", "3+4=", "<3+4=", "<<3+\n4=",
        "<<x=", "<<1e5=", "<<2**3=", "<<7//2=", "<<1,000+1=", "<<$3+4=", "<<.=", "<<1.2.3=",
        "<<٣+1=", "<<3²=", "<<__import__('os')=", "", "=", "<<3+4=7",
    ],
)  # fmt: skip
def test_what_has_no_exact_result_is_left_to_the_model(text):
    assert ask(text) is None


def test_only_the_last_mark_counts():
    assert ask("<<1+1=2>> and <<2+2=") == "4>>"
    assert ask("<<3+<<4*2=") == "8>>"


def test_hostile_text_costs_nothing():
    started = time.process_time()
    for text in (
        "<<" * 100_000 + "=", "=" * 200_000, "<<" + "(" * 200_000 + "=", "<<" + "9" * 200_000 + "=",
        "<<" + "(" * MAX_LENGTH + "=", "<<" + "-" * (MAX_LENGTH - 1) + "1=",
        "<<" + "9*" * 49 + "9=", "<<" + "(" * 49 + "1" + ")" * 50 + "=",
    ):  # fmt: skip
        ask(text)
    assert time.process_time() - started < 100 * loop_seconds()
    assert ask("<<" + "(" * 49 + "1" + ")" * 49 + "=") == "1>>"
    assert ask("<<" + "1" + "+1" * (MAX_LENGTH // 2 - 1) + "=") == f"{MAX_LENGTH // 2}>>"
    assert ask("<<" + "1" + "+1" * (MAX_LENGTH // 2) + "=") is None  # too long
    assert ask("<<" + "0" * (MAX_LENGTH - 1) + "1=") == "1>>"
    assert ask("<<" + "0" * MAX_LENGTH + "1=") is None


NUMBERS = st.integers(0, 10**6).map(str) | st.decimals(0, 1000, places=2).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
        lambda parts: f"({parts[0]}{parts[1]}{parts[2]})"
    ),
    max_leaves=6,
)


@given(EXPRESSIONS)
def test_it_agrees_with_python_on_fractions(expression):
    exact = "".join(
        f"Fraction('{part}')" if part[:1].isdigit() else part
        for part in expression.replace("(", " ( ").replace(")", " ) ").replace("+", " + ")
        .replace("-", " - ").replace("*", " * ").split(" ")
    )  # fmt: skip
    value = eval(exact, {"Fraction": Fraction})
    assert evaluate_expression(expression) == value
    inserted = ask(f"<<{expression}=")
    assert inserted is None or Fraction(inserted.removesuffix(">>")) == value


def test_a_tool_is_named_by_a_word_or_a_file(tmp_path):
    assert load_tool("none") is None
    assert isinstance(load_tool("calculator"), Calculator)
    file = tmp_path / "mine.py"
    file.write_text(
        "class Shout:\n    name, trigger = 'shout', '!'\n"
        "    def __call__(self, text):\n        return '!!'\n"
        "ready = Shout()\n"
        "def bare(text):\n    return 'x'\n"
    )
    for name in ("Shout", "ready"):
        assert load_tool(f"{file}:{name}")("hi!") == "!!"
    for spec, message in {
        "calc": "--tool calc: use none, calculator or FILE.py:NAME",
        f"{file}:bare": r"--tool .*tool\.name must be a str",
        f"{file}:other": "--tool .*no function or class 'other'; the file defines Shout",
        f"{tmp_path}/none.py:f": "does not exist",
    }.items():
        with pytest.raises(UsageError, match=message):
            load_tool(spec)


def test_the_tool_of_the_docs_page(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "tools.md").read_text(encoding="utf-8")
    (tmp_path / "own.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    tool = load_tool(f"{tmp_path}/own.py:Weekday")
    inserted, asked = re.search(r"it inserts `(.*)` after `(.*)`", page).groups()
    assert asked.endswith(tool.trigger)
    assert (tool(f"Today, {asked}"), tool("This is a")) == (inserted, None)


def test_what_is_no_tool_is_refused():
    class Silent:
        name, trigger = "silent", ""

    with pytest.raises(TypeError, match="must be callable with a str"):
        as_tool(Silent())
    with pytest.raises(TypeError, match=r"tool\.trigger must be"):
        as_tool(type("Half", (), {"name": "half", "__call__": lambda self, text: None}))
    assert isinstance(as_tool(Calculator), Calculator)
