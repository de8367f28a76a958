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

from rlm.data import word_problems
from rlm.data.word_problem_families import FAMILIES, NOUNS, Family
from rlm.data.word_problems import SPLITS, draw_problem, generate, solve

OPERATORS = {"+": add, "-": sub, "*": mul, "/": floordiv}
STEP_LINE = re.compile(r"(?P<label>[a-z]+(?: [a-z]+){0,2}): (\d+) ([-+*/]) (\d+) = (\d+)")

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@cache
def sample(split):
    return generate(split, 400)


@cache
def problems(family_name):
    family = next(family for family in FAMILIES if family.name == family_name)
    rng = random.Random(family_name)
    return [draw_problem(family, rng) for _ in range(50)]


def identity(record):
    """What makes two problems the same: the solution shows every number of the problem."""
    return record["family"], record["solution"]


def slots(text):
    return {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}


# The table.


def test_there_are_enough_families_of_every_level():
    trained = Counter(family.level for family in FAMILIES if not family.held_out)
    held_out = Counter(family.level for family in FAMILIES if family.held_out)
    assert held_out == {1: 2, 2: 2, 3: 2, 4: 2}
    assert trained[1] >= 12
    assert trained[2] >= 14
    assert trained[3] >= 8
    assert trained[4] >= 6
    assert trained.total() >= 40


def test_family_names_and_wordings_are_unique():
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    wordings = [wording for family in FAMILIES for wording in family.wordings]
    assert len(set(wordings)) == len(wordings)


@each_family
def test_every_wording_states_every_number_and_nothing_unknown(family):
    words = {"name", "friend", *NOUNS}
    assert 4 <= len(family.wordings) <= 6
    for wording in family.wordings:
        assert slots(wording) - words == set(family.numbers)
    for distractor in family.distractors:
        assert "extra" in slots(distractor)
        assert slots(distractor) <= {"name", "friend", "extra"}


@each_family
def test_every_number_is_used_by_a_step(family):
    terms = {term for step in family.steps for term in step.split()}
    assert set(family.numbers) <= terms


# The problems.


@each_family
def test_solutions_recompute(family):
    for problem in problems(family.name):
        record = problem.record()
        lines = record["solution"].split("\n")
        assert len(lines) == record["level"] == family.level
        for line in lines:
            _, left, operator, right, value = STEP_LINE.fullmatch(line).groups()
            assert OPERATORS[operator](int(left), int(right)) == int(value) > 0
            assert operator != "/" or int(left) % int(right) == 0
        assert record["answer"] == value


@each_family
def test_operands_are_given_or_known_from_an_earlier_step(family):
    literals = {int(term) for step in family.steps for term in step.split() if term.isdigit()}
    for problem in problems(family.name):
        known = literals | {int(number) for number in re.findall(r"\d+", problem.question)}
        assert set(problem.numbers.values()) <= known
        for step in problem.steps:
            assert {step.left, step.right} <= known
            known.add(step.value)


@each_family
def test_questions_are_well_formed(family):
    for problem in problems(family.name):
        question = problem.question
        assert not re.search(r"[{}]|  |\banswer\b", question, re.IGNORECASE)
        assert question == question.strip()
        assert question[-1] in ".?"
        assert not question[0].islower()
        assert not re.search(r"\ba \$?(8|11|18)(?!\d\d)", question), "needs 'an'"
        assert not re.search(r"\b1 [a-z]+s\b", question), "needs a singular"


@each_family
def test_answers_of_a_family_are_spread(family):
    answers = Counter(problem.steps[-1].value for problem in problems(family.name))
    assert len(answers) >= 12
    assert answers.most_common(1)[0][1] <= 12


def test_questions_are_short():
    words = {level: [] for level in (1, 2, 3, 4)}
    for record in sample("train"):
        words[record["level"]].append(len(record["question"].split()))
    limits = {1: 20, 2: 30, 3: 35, 4: 40}
    assert all(median(words[level]) <= limit for level, limit in limits.items())


def test_distractors_change_only_the_text():
    with_distractor = total = 0
    for family in filter(lambda family: family.distractors, FAMILIES):
        plain_family = replace(family, distractors=())
        for seed in range(20):
            problem = draw_problem(family, random.Random(seed))
            plain = draw_problem(plain_family, random.Random(seed))
            assert problem.steps == plain.steps
            assert problem.numbers == plain.numbers
            total += 1
            if problem.question != plain.question:
                with_distractor += 1
                kept = set(re.split(r"(?<=[.?]) ", plain.question))
                added = set(re.split(r"(?<=[.?]) ", problem.question)) - kept
                assert len(added) == 1
                (extra,) = map(int, re.findall(r"\d+", added.pop()))
                assert extra not in problem.numbers.values()
    assert 0.15 < with_distractor / total < 0.35


# The splits.


def test_splits_share_no_problem_whatever_the_seed_and_levels():
    seen = {}
    for split in SPLITS:
        for seed, levels in [(0, (1, 2, 3, 4)), (1, (1,)), (2, (2, 3)), (3, (4, 1))]:
            for record in generate(split, 100, seed, levels):
                assert seen.setdefault(identity(record), split) == split


def test_the_split_ignores_the_wording():
    for problem in problems("gather_more"):
        assert replace(problem, question="Another wording.").split == problem.split


def test_buckets_hold_about_80_10_10_percent():
    trained = [family.name for family in FAMILIES if not family.held_out]
    shares = Counter(problem.split for name in trained for problem in problems(name))
    assert shares["train"] / shares.total() == pytest.approx(0.8, abs=0.04)
    assert shares["validation"] / shares.total() == pytest.approx(0.1, abs=0.03)
    assert shares["test"] / shares.total() == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("split", SPLITS)
def test_every_family_of_the_split_appears_evenly(split):
    expected = {f.name for f in FAMILIES if f.held_out == (split == "test_families")}
    counts = Counter(record["family"] for record in sample(split))
    assert set(counts) == expected
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("split", SPLITS)
def test_no_answer_is_common(split):
    answers = Counter(record["answer"] for record in sample(split))
    assert answers.most_common(1)[0][1] <= 0.08 * len(sample(split))


@pytest.mark.parametrize("split", SPLITS)
def test_questions_and_ids_are_unique(split):
    assert len({record["question"] for record in sample(split)}) == len(sample(split))
    assert len({record["id"] for record in sample(split)}) == len(sample(split))


# The function.


def test_records_have_the_promised_fields():
    (record,) = generate("train", 1)
    assert list(record) == ["id", "question", "answer", "solution", "family", "level"]
    assert re.fullmatch(record["family"] + "-[0-9a-f]{12}", record["id"])
    assert isinstance(record["answer"], str)


def test_a_smaller_count_gives_a_prefix():
    assert generate("test", 10, seed=5) == generate("test", 100, seed=5)[:10]


def test_seeds_differ():
    assert generate("train", 20, seed=1) != generate("train", 20, seed=2)


def test_the_hash_seed_of_python_does_not_matter():
    code = "from rlm.data.word_problems import generate; print(generate('validation', 60, seed=3))"
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout == f"{generate('validation', 60, seed=3)}\n"


def test_levels_and_families_narrow_the_selection():
    assert {record["level"] for record in generate("train", 80, levels=[1, 3])} == {1, 3}
    names = ["bus_stop", "give_away"]
    assert {record["family"] for record in generate("test", 20, families=names)} == set(names)
    only_two_steps = generate("test", 20, levels=[2], families=names)
    assert {record["family"] for record in only_two_steps} == {"bus_stop"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "dev"}, "unknown split: 'dev'; known: train, validation, test, test_families"),
        ({"levels": [1, 5]}, "unknown level: 5; known: 1, 2, 3, 4"),
        ({"families": ["nope"]}, "unknown family of split 'train': 'nope'; known: gather_more, "),
        ({"families": ["age_later"]}, "unknown family of split 'train': 'age_later'; known: "),
        ({"levels": []}, "no family is selected"),
        ({"levels": [1], "families": ["bus_stop"]}, "no family is selected"),
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
    monkeypatch.setattr(word_problems, "FAMILIES", (replace(TINY, held_out=True),))
    assert len(generate("test_families", 9)) == 9
    with pytest.raises(ValueError, match=r"cannot make 10 different .* ran out after about 9"):
        generate("test_families", 10)


def test_ranges_that_cannot_work_are_reported():
    hopeless = replace(
        TINY, steps=("left = first - second",), numbers={"first": [3], "second": [4]}
    )
    with pytest.raises(RuntimeError, match="family 'tiny': no usable numbers"):
        draw_problem(hopeless, random.Random(0))


# The steps.


def test_solve_fills_in_literals_and_earlier_values():
    steps = solve(("two_sides = a + b", "perimeter = two_sides * 2"), {"a": 3, "b": 4})
    assert [str(step) for step in steps] == ["two sides: 3 + 4 = 7", "perimeter: 7 * 2 = 14"]


@pytest.mark.parametrize("step", ["x = a - b", "x = b - b", "x = a / b"])
def test_solve_rejects_values_that_are_not_positive_integers(step):
    assert solve((step,), {"a": 3, "b": 4}) is None
