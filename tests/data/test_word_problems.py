"""The table of the word-problem generator, and the problems that it makes."""

import hashlib
import json
import os
import random
import re
import string
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from operator import add, floordiv, mul, sub
from statistics import median

import pytest

from rlm.data import families, word_problems
from rlm.data.families import Family, load_word_problem_table, solve
from rlm.data.word_problems import SPLITS, draw_problem
from rlm.data.word_problems import generate_word_problems as generate

TABLE = load_word_problem_table()
FAMILIES, NOUNS = TABLE.families, TABLE.nouns
OPERATORS = {"+": add, "-": sub, "*": mul, "/": floordiv}
STEP_LINE = re.compile(r"(?P<label>[a-z]+(?: [a-z]+){0,2}): (\d+) ([-+*/]) (\d+) = (\d+)")

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@cache
def sample(split):
    return generate(split, 400)


@cache
def draws(family_name):
    family = next(family for family in FAMILIES if family.name == family_name)
    rng = random.Random(family_name)
    return [draw_problem(family, rng, TABLE) for _ in range(50)]


def steps(problem):
    """(left, operator, right, value) of each line of the solution."""
    found = [STEP_LINE.fullmatch(line).groups()[1:] for line in problem.solution.split("\n")]
    return [(int(left), operator, int(right), int(value)) for left, operator, right, value in found]


def slots(text):
    return {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}


# --- the table ------------------------------------------------------------------------------------


def test_there_are_enough_different_families_of_every_level():
    trained = Counter(family.level for family in FAMILIES if not family.held_out)
    assert Counter(f.level for f in FAMILIES if f.held_out) == {1: 2, 2: 2, 3: 2, 4: 2}
    assert all(trained[level] >= least for level, least in {1: 12, 2: 14, 3: 8, 4: 6}.items())
    assert trained.total() >= 40
    for texts in ([f.name for f in FAMILIES], [text for f in FAMILIES for text in f.wordings]):
        assert len(set(texts)) == len(texts)


@each_family
def test_wordings_state_every_number_and_nothing_unknown(family):
    """So a number that YAML reads as a truth value (an unquoted `on`) is found here, too."""
    assert 4 <= len(family.wordings) <= 6
    for wording in family.wordings:
        assert slots(wording) - {"name", "friend", *NOUNS} == set(family.numbers)
    for distractor in family.distractors:
        assert {"extra"} <= slots(distractor) <= {"name", "friend", "extra"}
    assert set(family.numbers) <= {term for step in family.steps for term in step.split()}


def test_an_entry_that_is_no_range_is_named(tmp_path, monkeypatch):
    table = families.YAML_FILES["word-problems"].read_text()
    file = tmp_path / "words.yaml"
    monkeypatch.setitem(families.YAML_FILES, "word-problems", file)
    file.write_text(table.replace("start: 4 to 40", "start: 4-40", 1))
    with pytest.raises(ValueError, match=r"words\.yaml: '4-40' is neither a list nor like"):
        load_word_problem_table.__wrapped__()


def test_the_problems_are_those_that_published_results_were_made_with():
    asked = [(s, seed, level) for s in SPLITS for seed in (0, 1) for level in (1, 2, 3, 4)]
    made = [vars(p) for s, seed, level in asked for p in generate(s, 40, seed, [level])]
    digest = hashlib.sha256(json.dumps(made).encode()).hexdigest()
    assert digest == "6aa68b1246bd756e5431fdd02a0dd491b8729155e17462092bb1446a8c1ab70d"


# --- the problems ---------------------------------------------------------------------------------


@each_family
def test_solutions_recompute_from_what_is_known(family):
    literals = {int(term) for step in family.steps for term in step.split() if term.isdigit()}
    for problem, _ in draws(family.name):
        assert len(steps(problem)) == problem.columns["level"] == family.level
        known = literals | {int(number) for number in re.findall(r"\d+", problem.question)}
        for left, operator, right, value in steps(problem):
            assert {left, right} <= known
            assert OPERATORS[operator](left, right) == value > 0
            assert operator != "/" or left % right == 0
            known.add(value)
        assert problem.answer == str(value)


@each_family
def test_questions_are_well_formed(family):
    for problem, _ in draws(family.name):
        question = problem.question
        assert not re.search(r"[{}]|  |\banswer\b", question, re.IGNORECASE)
        assert question == question.strip()
        assert question[-1] in ".?"
        assert not question[0].islower()
        assert not re.search(r"\ba \$?(8|11|18)(?!\d\d)", question), "needs 'an'"
        assert not re.search(r"\b1 [a-z]+s\b", question), "needs a singular"


@each_family
def test_answers_of_a_family_are_spread(family):
    answers = Counter(problem.answer for problem, _ in draws(family.name))
    assert len(answers) >= 12
    assert answers.most_common(1)[0][1] <= 12


def test_questions_are_short():
    words = {level: [] for level in (1, 2, 3, 4)}
    for problem in sample("train"):
        words[problem.columns["level"]].append(len(problem.question.split()))
    limits = {1: 20, 2: 30, 3: 35, 4: 40}
    assert all(median(words[level]) <= limit for level, limit in limits.items())


def test_distractors_change_only_the_text():
    with_distractor = total = 0
    for family in filter(lambda family: family.distractors, FAMILIES):
        plain_family = replace(family, distractors=())
        for seed in range(20):
            problem, split = draw_problem(family, random.Random(seed), TABLE)
            plain, plain_split = draw_problem(plain_family, random.Random(seed), TABLE)
            assert (problem.solution, split) == (plain.solution, plain_split)
            total += 1
            if problem.question != plain.question:
                with_distractor += 1
                kept = set(re.split(r"(?<=[.?]) ", plain.question))
                added = set(re.split(r"(?<=[.?]) ", problem.question)) - kept
                assert len(added) == 1
                (extra,) = re.findall(r"\d+", added.pop())
                assert extra not in re.findall(r"\d+", plain.question)
    assert 0.15 < with_distractor / total < 0.35


# --- the splits -----------------------------------------------------------------------------------


def test_splits_share_no_problem_whatever_the_seed_and_levels():
    seen = {}
    for split in SPLITS:
        for seed, levels in [(0, (1, 2, 3, 4)), (1, (1,)), (2, (2, 3)), (3, (4, 1))]:
            for problem in generate(split, 100, seed, levels):
                # The solution shows every number of the problem.
                identity = problem.columns["family"], problem.solution
                assert seen.setdefault(identity, split) == split


def test_buckets_hold_about_80_10_10_percent():
    trained = [family.name for family in FAMILIES if not family.held_out]
    shares = Counter(split for name in trained for _, split in draws(name))
    assert shares["train"] / shares.total() == pytest.approx(0.8, abs=0.04)
    assert shares["validation"] / shares.total() == pytest.approx(0.1, abs=0.03)
    assert shares["test"] / shares.total() == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_is_even_and_without_repeats(split):
    expected = {f.name for f in FAMILIES if f.held_out == (split == "test_families")}
    counts = Counter(problem.columns["family"] for problem in sample(split))
    assert set(counts) == expected
    assert max(counts.values()) - min(counts.values()) <= 1
    answers = Counter(problem.answer for problem in sample(split))
    assert answers.most_common(1)[0][1] <= 0.08 * len(sample(split))
    assert len({problem.question for problem in sample(split)}) == len(sample(split))
    assert len({problem.id for problem in sample(split)}) == len(sample(split))


# --- generate -------------------------------------------------------------------------------------


def test_a_smaller_count_gives_a_prefix_and_seeds_differ():
    assert generate("test", 10, seed=5) == generate("test", 100, seed=5)[:10]
    assert generate("train", 20, seed=1) != generate("train", 20, seed=2)


def test_the_hash_seed_of_python_does_not_matter():
    module = "rlm.data.word_problems"
    code = f"from {module} import *; print(generate_word_problems('validation', 60, seed=3))"
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout == f"{generate('validation', 60, seed=3)}\n"


def test_levels_narrow_the_selection():
    assert {p.columns["level"] for p in generate("train", 80, levels=[1, 3])} == {1, 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "dev"}, "unknown split: 'dev'; known: train, validation, test, test_families"),
        ({"levels": [1, 5]}, "unknown level: 5; known: 1, 2, 3, 4"),
        ({"levels": []}, "no family is selected"),
        ({"count": 0}, "count must be at least 1, got 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        generate(**{"split": "train", "count": 5} | arguments)
    assert "\n" not in str(error.value)


TINY = Family(
    "tiny",
    steps=("total = first + second",),
    numbers={"first": range(2, 5), "second": range(2, 5)},
    wordings=("What is {first} plus {second}?",),
)


def test_an_exhausted_selection_says_how_many_there_are(monkeypatch):
    table = replace(TABLE, families=[replace(TINY, held_out=True)])
    monkeypatch.setattr(word_problems, "load_word_problem_table", lambda dataset: table)
    assert len(generate("test_families", 9)) == 9
    with pytest.raises(ValueError, match=r"cannot make 10 different .* ran out after about 9"):
        generate("test_families", 10)


def test_ranges_that_cannot_work_are_reported():
    hopeless = replace(
        TINY, steps=("left = first - second",), numbers={"first": [3], "second": [4]}
    )
    with pytest.raises(RuntimeError, match="family 'tiny': no usable numbers"):
        draw_problem(hopeless, random.Random(0), TABLE)


# --- the steps ------------------------------------------------------------------------------------


def test_solve_fills_in_literals_and_earlier_values():
    solved = list(solve(("two_sides = a + b", "perimeter = two_sides * 2"), {"a": 3, "b": 4}))
    assert [step.value for step in solved] == [7, 14]
    assert [step.line() for step in solved] == ["two sides: 3 + 4 = 7", "perimeter: 7 * 2 = 14"]
    assert solved[1].line(calculator_mark=True) == "perimeter: <<7*2=14>>"


@pytest.mark.parametrize("step", ["x = a - b", "x = b - b", "x = a / b"])
def test_a_draw_stops_at_a_step_that_gives_no_positive_integer(step):
    """So nothing is divided by a 0 before it."""
    impossible = replace(
        TINY, steps=(step, "y = a / x"), numbers={"a": [3], "b": [4]}, wordings=[""]
    )
    with pytest.raises(RuntimeError, match="no usable numbers"):
        draw_problem(impossible, random.Random(0), TABLE)
