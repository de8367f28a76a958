"""The two tables of the word-problem generator, and the generated problems."""

import hashlib
import json
import random
import re
import string
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import cache
from operator import add, mul, sub, truediv
from pathlib import Path

import pytest

from rlm.data import word_problems
from rlm.data.loaders import OwnFile
from rlm.data.word_problems import (
    SPLITS,
    YAML_FILES,
    Family,
    draw_problem,
    load_word_problem_table,
    show_number,
    solve,
    split_of,
)
from rlm.data.word_problems import generate_word_problems as generate

TABLES = {dataset: load_word_problem_table(dataset) for dataset in YAML_FILES}
TABLE = TABLES["word-problems"]
FAMILIES = TABLE.families
EVERYDAY = OwnFile(Path(__file__).parents[2] / "data" / "everyday.jsonl").read()
PEOPLE = {"name", "friend", "he", "his", "him", "He", "His"}
OPERATORS = {"+": add, "-": sub, "*": mul, "/": truediv}
STEP_LINE = re.compile(r"[a-z]+(?: [a-z]+){0,2}: ([\d.]+) ([-+*/]) ([\d.]+) = ([\d.]+)")
MARK = re.compile(r"<<([\d.]+)([-+*/])([\d.]+)=([\d.]+)>>")

each_table = pytest.mark.parametrize("dataset", TABLES)


def each_family(check):
    """Make a test that checks each family of a table, and names the family that fails."""

    @each_table
    def test(dataset):
        for family in TABLES[dataset].families:
            try:
                check(dataset, family)
            except Exception as error:
                error.add_note(f"family {family.name}")
                raise

    return test


@cache
def draws(dataset, family_name):
    table = TABLES[dataset]
    family = next(family for family in table.families if family.name == family_name)
    rng = random.Random(family_name)
    return [draw_problem(family, rng, table) for _ in range(50)]


def elementary(split, count, seed=0, **options):
    return generate(split, count, seed, dataset="elementary", **options)


def stated(question):
    text = re.sub(r"(?<=\d),(?=\d)", "", question)
    return {show_number(Fraction(n)) for n in re.findall(r"\d+(?:\.\d+)?", text)}


def slots(text):
    return {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}


def normal(question):
    return re.sub(r"[^a-z0-9.+*/×÷=-]+", " ", question.lower().replace(",", "")).strip()


# --- the tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "least", "held_out"),
    [
        ("word-problems", {1: 12, 2: 14, 3: 8, 4: 6}, {1: 2, 2: 2, 3: 2, 4: 2}),
        ("elementary", {1: 60, 2: 30, 3: 8}, {1: 1, 2: 4, 3: 1}),
    ],
)
def test_there_are_enough_different_families_of_every_level(dataset, least, held_out):
    table = TABLES[dataset]
    trained = Counter(family.level for family in table.families if not family.held_out)
    assert all(trained[level] >= number for level, number in least.items())
    assert trained.total() >= sum(least.values())
    assert Counter(f.level for f in table.families if f.held_out) == held_out
    names = [family.name for family in table.families]
    assert len(set(names)) == len(names)
    assert {*table.women} < {*table.names}


@each_family
def test_wordings_state_every_number_and_nothing_unknown(dataset, family):
    """This also detects a name that YAML reads as a boolean, such as an unquoted `on`."""
    table = TABLES[dataset]
    people = PEOPLE if table.women else {"name", "friend"}
    assert len({*family.wordings}) == len(family.wordings) >= 4
    for wording in family.wordings:
        assert slots(wording) - people - {*table.nouns} == {*family.stated}, wording
        assert not (PEOPLE - {"name", "friend"}) & slots(wording) or "{name}" in wording
    for distractor in family.distractors:
        assert {"extra"} <= slots(distractor) <= {"name", "friend", "extra"}
    if dataset == "word-problems":
        assert {*family.numbers} == {*family.stated}
        assert {*family.numbers} <= {term for step in family.steps for term in step.split()}


def test_an_entry_that_is_no_range_is_named(tmp_path, monkeypatch):
    table = word_problems.YAML_FILES["word-problems"].read_text()
    file = tmp_path / "words.yaml"
    monkeypatch.setitem(word_problems.YAML_FILES, "word-problems", file)
    file.write_text(table.replace("start: 4 to 40", "start: 4-40", 1))
    with pytest.raises(ValueError, match=r"words\.yaml: '4-40' is neither a list nor like"):
        load_word_problem_table.__wrapped__()


@pytest.mark.parametrize(
    ("dataset", "hardest", "digest"),
    [
        ("word-problems", 4, "0baad0dc19da9da5ce44ea5ffce9600ad8a9f2750e941b22a162a69c3c291ba0"),
        ("elementary", 3, "3ff02c84b9d9733f3bfc286b4e7f45a8d3481e4d12f936f99a1e989c51d631e5"),
    ],
)
def test_the_problems_are_those_that_published_results_were_made_with(dataset, hardest, digest):
    levels = [[level] for level in range(1, hardest + 1)] + [[1, 2, 3, 4]]
    asked = [(s, 40, seed, chosen) for s in SPLITS for seed in (0, 1) for chosen in levels]
    made = [vars(p) for each in asked for p in generate(*each, dataset=dataset)]
    assert hashlib.sha256(json.dumps(made).encode()).hexdigest() == digest


# --- the problems ---------------------------------------------------------------------------------


@each_family
def test_solutions_recompute_from_what_is_known(dataset, family):
    literals = {term for step in family.steps for term in step.split() if term.isdigit()}
    for problem, _ in draws(dataset, family.name):
        found = [STEP_LINE.fullmatch(line).groups() for line in problem.solution.split("\n")]
        assert len(found) == problem.columns["level"] == family.level
        known = literals | {*re.findall(r"\d+", problem.question)}
        for left, operator, right, value in found:
            assert OPERATORS[operator](Fraction(left), Fraction(right)) == Fraction(value)
            if dataset == "word-problems":  # numbers in digits, all of them integers
                assert {left, right} <= known
                assert int(value) > 0
                known.add(value)
        assert problem.answer == value


@each_family
def test_questions_are_well_formed_and_answers_spread(dataset, family):
    answers = Counter(problem.answer for problem, _ in draws(dataset, family.name))
    least, most = (12, 12) if dataset == "word-problems" else (8, 16)
    assert len(answers) >= least
    assert answers.most_common(1)[0][1] <= most
    for question in (problem.question for problem, _ in draws(dataset, family.name)):
        assert not re.search(r"[{}]|  |\banswer\b", question, re.IGNORECASE)
        assert question == question.strip()
        assert question[-1] in ".?" or dataset == "elementary"  # "3 + 4"
        assert not question[0].islower()
        assert not re.search(r"\ba \$?(8|11|18)(?!\d\d)", question), "needs 'an'"
        one = r"(?<![\d.,/])\b1 (?!plus|minus|times)[a-z]+s\b"
        assert not re.search(one, question), "needs a singular"


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


@each_family
def test_sentences_hold_the_same_equations_and_no_other_number(dataset, family):
    people = PEOPLE if TABLES[dataset].women else {"name", "friend"}
    assert len(family.sentences) == family.level
    for sentence in family.sentences:  # a word that some wording does not say would be another draw
        words = slots(sentence) & (people | {*TABLES[dataset].nouns})
        assert all(words <= slots(wording) for wording in family.wordings), sentence
    literals = {term for step in family.steps for term in step.split() if term[0].isdigit()}
    for seed in range(5):
        plain, split = draw_problem(family, random.Random(seed), TABLES[dataset])
        told = draw_problem(family, random.Random(seed), TABLES[dataset], sentences=True)
        assert told == (replace(plain, solution=told[0].solution), split)
        lines, known = told[0].solution.split("\n"), {*literals}
        for line, short in zip(lines, plain.solution.split("\n"), strict=True):
            equation = short.partition(": ")[2]
            left, _, right, _, value = equation.split()
            around = line.replace(equation, "", 1)
            assert around != line
            assert around[0].isupper() or around[0].isdigit() or line.startswith(equation)
            assert line[-1] == "."
            assert not re.search(r"[{}]|  .|\$", line)
            known |= {left, right}
            assert {*re.findall(r"\d+(?:\.\d+)?", around)} <= known | stated(plain.question), line
            known.add(value)


@each_table
def test_marks_change_only_the_solution(dataset):
    options = {"split": "train", "count": 200, "seed": 3, "dataset": dataset}
    marked = generate(**options, calculator_annotations=True)
    for with_marks, without in zip(marked, generate(**options), strict=True):
        assert with_marks.solution.count("<<") == without.columns["level"]
        assert "<<" not in without.solution
        plain = MARK.sub(r"\1 \2 \3 = \4", with_marks.solution)
        assert replace(with_marks, solution=plain) == without


def test_answers_are_integers_decimals_and_zeros_up_to_ten_thousand():
    answers = [Fraction(problem.answer) for problem in elementary("train", 4000)]
    assert 0 in answers
    assert max(answers) > 9000
    assert min(answers) >= 0
    assert max(answers) <= 10_000
    decimals = sum(answer.denominator > 1 for answer in answers)
    assert 0.03 < decimals / len(answers) < 0.2


# --- the splits -----------------------------------------------------------------------------------


@each_table
def test_splits_share_no_problem_whatever_the_seed_and_levels(dataset):
    seen = {}
    for split in SPLITS:
        for seed, levels in [(0, (1, 2, 3, 4)), (1, (1,)), (2, (2, 3)), (3, (4, 1))]:
            for problem in generate(split, 100, seed, levels, dataset=dataset):
                # The solution shows every number of the problem.
                solved = problem.columns["family"], problem.solution
                for identity in (solved, normal(problem.question)):
                    assert seen.setdefault(identity, split) == split


# --- the everyday questions -----------------------------------------------------------------------


def test_everyday_questions_are_fifty():
    questions = [problem.question for problem in EVERYDAY]
    assert len(set(map(normal, questions))) == 50
    assert all(Fraction(problem.answer) >= 0 for problem in EVERYDAY)


@each_table
def test_no_training_problem_is_an_everyday_question(dataset):
    """No wording can produce such a question in the training split, whatever the seed.

    The test compares the wordings and their numbers instead of a sample of generated problems.
    """
    questions = [normal(problem.question) for problem in EVERYDAY]
    table = TABLES[dataset]
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
    """Return a regular expression for the questions of a wording, in the form of `normal`."""
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


# --- generate -------------------------------------------------------------------------------------


@each_table
def test_a_smaller_count_gives_a_prefix_seeds_differ_and_levels_narrow(dataset):
    make = {"dataset": dataset}
    assert generate("test", 10, seed=5, **make) == generate("test", 100, seed=5, **make)[:10]
    assert generate("train", 20, seed=1, **make) != generate("train", 20, seed=2, **make)
    narrowed = generate("train", 90, levels=[1, 3], **make)
    assert {problem.columns["level"] for problem in narrowed} == {1, 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "dev"}, "unknown split: 'dev'; known: train, validation, test, test_families"),
        ({"levels": [1, 5]}, "unknown level: 5; known: 1, 2, 3, 4"),
        ({"levels": []}, "no family of problems"),
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
    sentences=("Together they make {equation}.",),
    numbers={"first": range(2, 5), "second": range(2, 5)},
    wordings=("What is {first} plus {second}?",),
)


def test_a_family_that_runs_out_leaves_the_others_and_an_exhausted_selection_says_so(monkeypatch):
    few = replace(TINY, held_out=True)
    many = replace(few, name="many", numbers={"first": range(2, 99), "second": range(5, 99)})

    def use(*chosen):
        table = replace(TABLE, families=chosen)
        monkeypatch.setattr(word_problems, "load_word_problem_table", lambda dataset: table)

    use(few)
    assert len(generate("test_families", 9)) == 9
    with pytest.raises(ValueError, match=r"cannot make 10 different .* have only about 9"):
        generate("test_families", 10)
    use(few, many)
    counts = Counter(problem.columns["family"] for problem in generate("test_families", 50))
    assert counts == {"tiny": 9, "many": 41}


# --- the steps ------------------------------------------------------------------------------------


def test_solve_fills_in_literals_and_earlier_values():
    solved = list(solve(("two_sides = a + b", "perimeter = two_sides * 2"), {"a": 3, "b": 4}))
    assert [step.value for step in solved] == [7, 14]
    assert [step.equation() for step in solved] == ["3 + 4 = 7", "7 * 2 = 14"]
    assert solved[1].equation(calculator_annotation=True) == "<<7*2=14>>"


@pytest.mark.parametrize("step", ["x = a - b", "x = b - b", "x = a / b"])
def test_a_draw_stops_at_a_step_that_gives_no_positive_integer(step):
    """Otherwise a later step could divide by 0."""
    impossible = replace(
        TINY, steps=(step, "y = a / x"), numbers={"a": [3], "b": [4]}, wordings=[""]
    )
    with pytest.raises(RuntimeError, match="family 'tiny': no usable numbers"):
        draw_problem(impossible, random.Random(0), TABLE)


@pytest.mark.parametrize(
    ("entry", "numbers"),
    [
        ("2 to 4", [2, 3, 4]),
        ("10 to 30 by 10", [10, 20, 30]),
        ("0.5 to 2 by 0.5", [Fraction(1, 2), 1, Fraction(3, 2), 2]),
        ("1.1 to 1.6 by 0.2", [Fraction(11, 10), Fraction(13, 10), Fraction(3, 2)]),
    ],
)
def test_a_range_holds_its_last_number(entry, numbers):
    assert list(word_problems._options(entry, Path("table.yaml"))) == numbers
