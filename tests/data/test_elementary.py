"""The elementary table of the generator: wordings, marks, numbers and splits."""

import random
import re
import string
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from rlm.data import word_problems
from rlm.data.families import YAML_FILES, Family, Shown, load_word_problem_table
from rlm.data.loaders import load_jsonl
from rlm.data.word_problems import SPLITS, draw_problem, generate_word_problems, split_of

TABLE = load_word_problem_table("elementary")
EVERYDAY = load_jsonl(Path(__file__).parents[2] / "data" / "everyday.jsonl")
PEOPLE = {"name", "friend", "he", "his", "him", "He", "His"}
MARK = re.compile(r"<<([\d.]+)([-+*/])([\d.]+)=([\d.]+)>>")
LINE = re.compile(rf"[a-z]+(?: [a-z]+){{0,2}}: {MARK.pattern}")

each_family = pytest.mark.parametrize("family", TABLE.families, ids=lambda family: family.name)


def generate(split, count, seed=0, **options):
    return generate_word_problems(split, count, seed, dataset="elementary", **options)


def slots(text):
    return {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}


def normal(question):
    return re.sub(r"[^a-z0-9.+*/×÷=-]+", " ", question.lower().replace(",", "")).strip()


def test_there_are_enough_families_and_wordings():
    trained = Counter(family.level for family in TABLE.families if not family.held_out)
    assert trained.total() >= 100
    assert all(trained[level] >= least for level, least in {1: 60, 2: 30, 3: 8}.items())
    assert sum(family.held_out for family in TABLE.families) == 6
    names = [family.name for family in TABLE.families]
    assert len(set(names)) == len(names)
    assert {*TABLE.women} < {*TABLE.names}


@each_family
def test_wordings_state_the_same_numbers_and_nothing_unknown(family):
    assert len(family.wordings) >= 4
    assert len(set(family.wordings)) == len(family.wordings)
    for wording in family.wordings:
        assert slots(wording) - PEOPLE - {*TABLE.nouns} == {*family.stated}, wording
        assert not ({"he", "his", "him", "He", "His"} & slots(wording)) or "{name}" in wording
    for distractor in family.distractors:
        assert {"extra"} <= slots(distractor) <= {"name", "friend", "extra"}


@each_family
def test_problems_are_well_formed_and_spread(family):
    rng, answers = random.Random(family.name), Counter()
    for _ in range(50):
        problem, _ = draw_problem(family, rng, TABLE, calculator_marks=True)
        question, lines = problem.question, problem.solution.split("\n")
        assert not re.search(r"[{}]|  |\banswer\b", question, re.IGNORECASE)
        assert question == question.strip()
        assert not question[0].islower()
        assert not re.search(r"\ba \$?(8|11|18)(?!\d\d)", question), "needs 'an'"
        assert not re.search(r"(?<![\d.,/])\b1 (?!plus|minus|times)[a-z]+s\b", question), (
            "needs a singular"
        )
        assert len(lines) == family.level
        values = [LINE.fullmatch(line)[4] for line in lines]
        assert problem.answer == values[-1]
        answers[problem.answer] += 1
    assert len(answers) >= 8
    assert answers.most_common(1)[0][1] <= 16


def test_every_mark_is_exact_and_followed_by_its_number():
    apply = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__}
    apply["/"] = Fraction.__truediv__
    checked = 0
    for problem in generate("train", 2000, calculator_marks=True):
        assert problem.solution.count("<<") == problem.columns["level"]
        for left, sign, right, value in MARK.findall(problem.solution):
            assert apply[sign](Fraction(left), Fraction(right)) == Fraction(value)
            checked += 1
    assert checked >= 2500


@pytest.mark.parametrize("dataset", ["elementary", "word-problems"])
def test_marks_change_only_the_solution(dataset):
    options = {"split": "train", "count": 200, "seed": 3, "dataset": dataset}
    marked = generate_word_problems(**options, calculator_marks=True)
    for with_marks, without in zip(marked, generate_word_problems(**options), strict=True):
        assert "<<" in with_marks.solution
        assert "<<" not in without.solution
        plain = MARK.sub(r"\1 \2 \3 = \4", with_marks.solution)
        assert replace(with_marks, solution=plain) == without


def test_answers_are_integers_decimals_and_zeros_up_to_ten_thousand():
    answers = [Fraction(problem.answer) for problem in generate("train", 4000)]
    assert 0 in answers
    assert max(answers) > 9000
    assert min(answers) >= 0
    assert max(answers) <= 10_000
    decimals = sum(answer.denominator > 1 for answer in answers)
    assert 0.03 < decimals / len(answers) < 0.2


def test_small_numbers_are_sometimes_words():
    written = [p.question for p in generate("train", 2000) if re.search(r"\bthree\b", p.question)]
    assert 5 <= len(written) <= 100


def test_splits_share_no_question():
    seen = {}
    for split in SPLITS:
        for seed in (0, 1) if split == "train" else (0,):
            for problem in generate(split, 350, seed):
                assert seen.setdefault(normal(problem.question), split) == split
    families = {split: {p.columns["family"] for p in generate(split, 300)} for split in SPLITS}
    assert not families["test_families"] & families["train"]


# --- the everyday questions -----------------------------------------------------------------------


def test_everyday_questions_are_fifty_and_no_wording_is_one_of_them():
    questions = [problem.question for problem in EVERYDAY]
    assert len(set(map(normal, questions))) == 50
    assert all(Fraction(problem.answer) >= 0 for problem in EVERYDAY)
    wordings = {normal(w) for name in YAML_FILES for w in every_wording(name)}
    assert not wordings & set(map(normal, questions))


def every_wording(dataset):
    return [w for family in load_word_problem_table(dataset).families for w in family.wordings]


@pytest.mark.parametrize("dataset", YAML_FILES)
def test_no_training_problem_is_an_everyday_question(dataset):
    """Every wording that such a question could be made of has another text or other numbers.

    Not a sample of the generator: a question in the training split is found whatever its seed.
    """
    questions = [normal(problem.question) for problem in EVERYDAY]
    table = load_word_problem_table(dataset)
    for family in (family for family in table.families if not family.held_out):
        drawn = family.numbers.items()
        for wording in family.wordings:
            pattern = as_pattern(wording, table)
            for question in questions:
                if (match := pattern.fullmatch(question)) is None:
                    continue
                stated = match.groupdict()
                numbers = {name: Fraction(stated[name]) for name in family.stated}
                if any(numbers.get(name, options[0]) not in options for name, options in drawn):
                    continue  # out of its range: never drawn
                assert split_of(family, numbers) != "train", (family.name, question)


def as_pattern(wording, table):
    """A regular expression for the questions of a wording, as `normal` writes them."""
    marked, names = "", {}
    for literal, name, _, _ in string.Formatter().parse(wording):
        marked += literal
        if name is not None:
            marked += names.setdefault(name, f"zq{chr(97 + len(names))}qz")
    text = re.escape(normal(marked))
    for name, mark in names.items():
        words = [*table.names, "he", "she", "his", "her", "him"] if name in PEOPLE else ()
        words = table.nouns.get(name, words)
        kind = "|".join(map(str.lower, words)) or r"\d+(?:\.\d+)?"
        text = text.replace(mark, f"(?P<{name}>{kind})", 1).replace(mark, f"(?P={name})")
    return re.compile(text)


def test_a_family_that_runs_out_leaves_the_others(monkeypatch):
    few = Family(
        "few", ("sum = a + b",), {"a": range(2, 5), "b": [2, 3]}, ("{a} and {b}",), held_out=True
    )
    many = replace(few, name="many", numbers={"a": range(2, 99), "b": range(4, 99)})
    table = replace(TABLE, families=[few, many])
    monkeypatch.setattr(word_problems, "load_word_problem_table", lambda dataset: table)
    counts = Counter(p.columns["family"] for p in generate("test_families", 50))
    assert counts == {"few": 6, "many": 44}


def test_levels_and_prefixes():
    assert {p.columns["level"] for p in generate("train", 90, levels=[1, 3])} == {1, 3}
    assert generate("test", 10, seed=5) == generate("test", 100, seed=5)[:10]


@pytest.mark.parametrize(
    ("value", "spec", "text"),
    [
        (2345, "", "2345"),
        (2345, ",", "2,345"),
        (Fraction(9, 2), "", "4.5"),
        (Fraction(9, 2), "$", "4.50"),
        (Fraction(4), "$", "4"),
        (Fraction(4691, 2), ",", "2,345.5"),
        (Fraction(1, 20), "", "0.05"),
    ],
)
def test_numbers_are_shown(value, spec, text):
    assert f"{Shown(value):{spec}}" == text


def test_numbers_of_the_setup_are_stated_but_not_shown_in_the_solution():
    family = Family(
        "shared",
        setup=("total = each * people",),
        steps=("share = total / people",),
        numbers={"each": [6], "people": [4]},
        wordings=("{people} share {total}. How many each?",),
    )
    problem, _ = draw_problem(family, random.Random(0), TABLE)
    assert family.stated == ["people", "total"]
    assert problem.question in {"4 share 24. How many each?"}
    assert (problem.solution, problem.answer) == ("share: 24 / 4 = 6", "6")
