"""The parts of the experience recipe without a server: plans, rewards, libraries and prompts."""

import copy
import json
import math
import re
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_model import write_problems

from recipes.experience import train
from recipes.experience.agent import GENERATORS, PLACEHOLDERS, PROMPTS, load_prompts
from recipes.experience.answers import tokens_of
from recipes.experience.library import Library, reveals_gold, shorten
from recipes.experience.plan import (
    Plan,
    ReplyError,
    check_plan,
    is_arithmetic,
    parse_plan,
    plan_value,
)
from recipes.experience.rewards import (
    CRITIC_WEIGHTS,
    GENERATOR_WEIGHTS,
    LOGIC_SCORES,
    compute_rewards,
    fusion_reward,
    grade_answer,
    graph_reward,
    logic_checks,
    weighted_mean,
)
from recipes.experience.trainer import ROUNDING, group_statistics
from rlm.api_client import APIError
from rlm.cli.options import UsageError, parse
from rlm.data.experiences import load_experiences
from rlm.data.problem import Problem
from rlm.grading.numbers import parse_number

ROOT = Path(__file__).parents[2]
NOW = "2026-01-01T00:00:00+00:00"
PENS = Problem("pens", "A box holds 12 pens. How many pens are in 90 boxes?", "1080")


def plan_of(**changes) -> Plan:
    return Plan.model_validate(TOTAL | changes)


def link(cause, effect, rule="") -> dict:
    return {"cause": cause, "effect": effect, "rule": rule}


TOTAL = {
    "target_variable": "total",
    "knowns": {"pens": 12, "boxes": 90},
    "causal_graph": [link(["pens", "boxes"], "total", "total = pens * boxes")],
    "computation_plan": [{"id": "step1", "target": "total", "inputs": ["pens", "boxes"]}],
}


# --- plans ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        json.dumps(TOTAL),
        f"Here it is:\n```json\n{json.dumps(TOTAL, indent=1)}\n```\nDone {{}}.",
        json.dumps({"problem_analysis": TOTAL}),
        f"<think>{{'not': this}}</think>{json.dumps(TOTAL)} trailing }}",
        json.dumps(TOTAL | {"extra": "{ not counted }"}),
    ],
    ids=["bare", "fenced", "wrapped", "after thinking", "braces in text"],
)
def test_a_plan_is_found_in_a_reply(reply):
    assert parse_plan(reply).text() == plan_of().text()


def test_what_models_write_loosely():
    loose = plan_of(
        knowns={"pens": "12 pens", "boxes": 90.0, "unknown": None},
        causal_graph=[{"cause": "pens", "effect": "total"}],
        constraints_and_premises=["total is positive"],
        computation_plan=[{"id": "s", "target": "total", "inputs": [{"ref": "s0"}]}],
    )
    assert loose.causal_graph[0].cause == ["pens"]
    assert loose.constraints == ["total is positive"]
    assert loose.computation_plan[0].inputs == ["s0"]
    assert parse_plan(loose.text()) == loose  # a stored plan can be read back


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        ("no object at all", "no_json", "no {"),
        (f"<think>{json.dumps(TOTAL)}</think> done", "no_json", "no {"),
        (json.dumps(TOTAL)[:-2], "bad_json", "not valid JSON"),
        ("{" * 100_000, "bad_json", "not valid JSON"),
        ('{"answer": 4}', "schema", "causal_graph"),
        (json.dumps(TOTAL | {"causal_graph": []}), "schema", "causal_graph: "),
        (json.dumps(TOTAL | {"knowns": ["pens"]}), "schema", "knowns: "),
        (json.dumps(TOTAL | {"knowns": {"pens": True}}), "schema", "knowns.pens"),
        (json.dumps(TOTAL | {"knowns": {"pens": math.nan}}), "schema", "knowns.pens"),
        (json.dumps(TOTAL | {"target_variable": ""}), "schema", "target_variable"),
        (json.dumps(TOTAL | {"computation_plan": [{"id": "s"}]}), "schema", "target"),
        (json.dumps(TOTAL | {"causal_graph": [link([["a"]], "b")]}), "schema", "cause"),
    ],
)
def test_what_is_no_plan_has_a_type_and_a_reason(reply, kind, says):
    with pytest.raises(ReplyError, match=f"^{kind}: .*{says}"):
        parse_plan(reply)


def test_a_cycle_is_named():
    loop = plan_of(causal_graph=[link(["a"], "b"), link(["b"], "c"), link(["c"], "a")])
    with pytest.raises(ReplyError, match=r"^cycle: (a → b → c|b → c → a|c → a → b)"):
        parse_plan(loop.text(), acyclic=True)
    assert parse_plan(loop.text()) == loop  # a proposal may have a cycle, which lowers r_graph
    assert parse_plan(plan_of().text(), acyclic=True) == plan_of()


ALL_CHECKS = ("inputs_there", "target_reached", "rules_parse")
CHAIN = {
    "causal_graph": [
        link(["pens", "boxes"], "cost", "pens * boxes"),
        link(["cost"], "total", "cost"),
    ],
    "computation_plan": [
        {"id": "step1", "target": "cost", "inputs": ["pens", "boxes"]},
        {"id": "step2", "target": "total", "inputs": [{"ref": "step1"}, "cost"]},
    ],
}


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, {}),
        (CHAIN, {}),
        # A step that comes before its input has no result.
        (
            CHAIN | {"computation_plan": CHAIN["computation_plan"][::-1]},
            {"inputs_there": 0.5, "target_reached": 0},
        ),
        (
            {"causal_graph": [link(["pens"], "total", "multiply them")]},
            {"target_reached": 0, "rules_parse": 0},
        ),
        # A target that is already known is not computed.
        (
            {"knowns": {"total": 1080}, "causal_graph": [link(["x"], "y", "x")]},
            {"inputs_there": 0, "target_reached": 0},
        ),
    ],
)
def test_r_logic_without_a_judge(changes, failed):
    assert check_plan(plan_of(**changes)) == dict.fromkeys(ALL_CHECKS, 1.0) | failed


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        ("pens * boxes", Fraction(2232)),
        ("pens / boxes - 0.1", Fraction(31, 72) - Fraction(1, 10)),
        ("max(pens, -boxes) ** 2 % 1000 // 7", Fraction(961 % 1000 // 7)),
        ("pens ** 1000", None),  # too large
        ("sqrt(pens)", None),  # has no exact value
        ("pens / (boxes - 72)", None),
        ("crates * 2", None),
        ("pens.bit_length()", None),
        ("(" * 5000, None),
        ("pens; boxes", None),
        ("total = pens * boxes", Fraction(2232)),
        ("total -= pens", None),  # the rule needs an earlier total
    ],
)
def test_a_plan_is_computed_exactly_or_not_at_all(rule, value):
    knowns = {"pens": 31, "boxes": "72 boxes"}
    links = [link(["pens", "boxes"], "total", rule)]
    assert plan_value(plan_of(knowns=knowns, causal_graph=links)) == value


@pytest.mark.parametrize("rule", ["-({})**64", "{0} * {0}", "({})**2", "1 / {}**3", "{}**-64"])
@pytest.mark.parametrize("start", ["2", "-3", "10**12", "-(10**12)"])
def test_a_plan_whose_values_grow_without_limit_is_not_computed(rule, start, monkeypatch):
    """Each step applies the rule to the result of the step before it."""

    class Limited(Fraction):
        def __new__(cls, *of):
            value = Fraction(*of)
            assert max(value.numerator.bit_length(), value.denominator.bit_length()) < 10_000
            return value

    monkeypatch.setattr("recipes.experience.plan.Fraction", Limited)
    names = [f"s{i}" for i in range(16)]
    links = [link([], "s0", start)]
    links += [link([a], b, rule.format(a)) for a, b in pairwise(names)]
    steps = [{"id": f"step{i}", "target": name, "inputs": []} for i, name in enumerate(names)]
    plan = plan_of(target_variable="s15", causal_graph=links, computation_plan=steps)
    assert plan_value(plan) is None


@pytest.mark.parametrize(
    ("question", "answer", "knowns", "score"),
    [
        ("31 pens in each of 72 boxes?", "2,232.0", {"pens": 31, "boxes": 72}, 1.0),
        # There is no answer to compare.
        ("31 pens in each of 72 boxes?", "", {"pens": 31, "boxes": 72}, 1.0),
        # The answer differs from the plan's result.
        ("31 pens in each of 72 boxes?", "2233", {"pens": 31, "boxes": 72}, 0.0),
        # The plan's numbers are not in the problem; the second answer follows from the plan.
        ("A game for Ana and Bob.", "204", {"pens": 3, "boxes": 4}, 0.0),
        ("A game for Ana and Bob.", "12", {"pens": 3, "boxes": 4}, 0.75),
        # 0.125 rounded to two decimals; 2e-4 is not rounded to 4e-3.
        ("0.25 pens in each of 0.5 boxes?", "0.13", {"pens": 0.25, "boxes": 0.5}, 1.0),
        ("0.02 pens in each of 0.01 boxes?", "0.004", {"pens": 0.02, "boxes": 0.01}, 0.0),
        # 30 % may be meant as 30 or as 0.3, so nothing is compared.
        ("30% of 5 boxes?", "1.5", {"pens": "30%", "boxes": 5}, 1.0),
    ],
)
def test_r_logic_asks_whether_the_answer_follows_from_the_plan(question, answer, knowns, score):
    plan = plan_of(knowns=knowns, causal_graph=[link(["pens", "boxes"], "total", "pens * boxes")])
    assert logic_checks(plan, Problem("p", question, "7"), answer) == score


@pytest.mark.parametrize(
    "rule",
    [
        "", "multiply them", "a < b", "a = b = c < d", "x.y", "().__class__", "[1, 2]", "lambda: 1",
        "1 if 1 else 2", "import os", "1; 2", "f'{1}'", "(" * 250 + "1" + ")" * 250, "1" * 301,
        "\x00", "3 = 4", "a: int", "a: b = 1", "a += b", "return a",
        "max(1, key=abs)",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_does_not_parse(rule):
    assert not is_arithmetic(rule)
    assert is_arithmetic("f = -m * a ** 2 / sqrt(k)")


@given(st.text(max_size=60))
def test_any_text_is_arithmetic_or_not(rule):
    assert is_arithmetic(rule) in (True, False)


# --- rewards ----------------------------------------------------------------------------------


def test_the_weighted_totals():
    def mean(*rewards):
        weights = CRITIC_WEIGHTS if len(rewards) == 4 else GENERATOR_WEIGHTS
        return weighted_mean(dict(enumerate(rewards)), weights)

    assert mean(1, 0.85, 0.90, 0.75) == 0.875
    # Without r_logic, the weights are rescaled: (0.5 · 1 + 0.25 · 0.8) / 0.75.
    assert mean(1, None, 0.80) == pytest.approx(0.7 / 0.75)
    assert mean(None, None, None) is None


@pytest.mark.parametrize(
    ("text", "gold", "tolerance", "reason"),
    [
        ("12 * 90 = 1080\nFinal answer: 1,080", "1080", 0, "correct"),
        ("<think>x</think>\n<answer>025</answer>", "25", 0, "correct"),
        ("Final answer: 3 + 4", "7", 0, "not_a_number"),
        ("Final answer: 29.9 m/s", "29.71", 0.01, "correct"),
        ("Final answer: 29.9 m/s", "29.71", 0, "wrong"),
        ("Final answer: 30.1", "29.71", 0.01, "wrong"),  # 1.3 % off
        (r"Final answer: 1.61 \times 10^{-19}", "1.602e-19", 0.01, "correct"),
        ("Final answer: 1.6 × 10^−19 J", "1.602e-19", 0.01, "correct"),
        ("Final answer: 1.6 × 10⁻¹⁹ C", "1.602e-19", 0.01, "correct"),
        ("Final answer: 1.42 × 10³ J", "1419", 0.01, "correct"),
        ("Final answer: 1.6·10^-19 C", "1.602e-19", 0.01, "correct"),
        ("Final answer: 1.42⋅10³", "1419", 0.01, "correct"),
        ("Final answer: 1.42 × 10⁴", "1419", 0.01, "wrong"),
        (r"Final answer: 59.1 \Omega", "59.1", 0.01, "correct"),
        (r"Final answer: $59.1\,k\Omega$", "59.1", 0.01, "correct"),
        (r"Final answer: 15 \mu m", "15", 0.01, "correct"),
        (r"Final answer: 5 \pi", "5", 0.01, "not_a_number"),
        ("Final answer: -29.7", "29.71", 0.01, "wrong"),
        ("Final answer: 103", "100", 0.03, "correct"),  # the float 0.03 is less than 3/100
    ],
)
def test_answers_are_exact_or_within_the_tolerance(text, gold, tolerance, reason):
    correct, _, why = grade_answer(text, Problem("p", "?", gold, columns={"rel_tol": tolerance}))
    assert (correct, why) == (reason == "correct", reason)


def test_r_graph_by_hand():
    assert graph_reward(plan_of()) == pytest.approx(1.0)
    assert graph_reward(None) == 0.0
    # A cycle: −0.3. Nodes a, b; needed pens, boxes, total: −0.2.
    cyclic = plan_of(causal_graph=[link(["a"], "b", "a"), link(["b"], "a", "b")])
    assert graph_reward(cyclic) == pytest.approx(0.5)
    # Half the links have a rule (0.2), 2 of 3 needed names (0.4 / 3), 3 of 5 nodes together (0.06).
    parts = plan_of(causal_graph=[link(["pens", "x"], "total", "x"), link(["y"], "z")])
    assert graph_reward(parts) == pytest.approx(0.3 + 0.4 / 3 + 0.2 + 0.06)


def test_r_fusion_by_hand():
    first = plan_of()
    other = plan_of(
        causal_graph=[link(["pens", "boxes"], "total", "pens + boxes"), link(["total"], "tax", "1")]
    )
    # The fusion equals the better proposal. It resolves the only conflict (total), and keeps what
    # both or half of the proposals contain. r_graph is 1 for all three: improvement 0.5.
    assert fusion_reward(other, [first, other]) == pytest.approx(0.3 + 0.3 + 0.2 + 0.1)
    # Neither both rules nor a third rule resolve the conflict.
    for rules in (("pens * boxes", "pens + boxes"), ("pens / boxes",)):
        links = [link(["pens", "boxes"], "total", rule) for rule in rules]
        odd = plan_of(causal_graph=[*links, link(["total"], "tax", "1")])
        assert fusion_reward(odd, [first, other]) == pytest.approx(0.3 + 0.2 + 0.1)
    # The tax, which half of the proposals contain, is dropped; 3 of 4 nodes and 2 of 3 edges stay.
    expected = 0.3 + 0.3 + 0.2 * (0.4 * 3 / 4 + 0.6 * 2 / 3) + 0.1
    assert fusion_reward(first, [first, other]) == pytest.approx(expected)
    # If the proposals have no conflict, its share counts 0.7.
    assert fusion_reward(first, [first, first]) == pytest.approx(0.3 + 0.21 + 0.2 + 0.1)
    # Invented and omitted parts lower the reward.
    invented = plan_of(causal_graph=[*TOTAL["causal_graph"], link(["moon"], "total", "moon")])
    dropped = plan_of(causal_graph=[link(["pens"], "total", "pens * 90")])
    for worse in (invented, dropped):
        assert 0 <= fusion_reward(worse, [first] * 3) < fusion_reward(first, [first] * 3) <= 1


def scored(reply=None, judge=None):
    if reply:
        replies = [reply if isinstance(reply, Exception) else SimpleNamespace(text=reply)]
        judge = Mock(**{"ask.side_effect": replies})
    solution = "Final answer: 1080"
    return compute_rewards(PENS, plan_of(), solution, judge=judge)


def test_a_judge_gives_r_logic_as_the_mean_of_five():
    parts = dict(zip(LOGIC_SCORES, (1, 0.5, 0, 1, 0.75), strict=True))
    row = scored(json.dumps({"score": 0.1, "breakdown": parts, "errors": []}))
    assert row["rewards"]["r_logic"] == pytest.approx(0.65)
    assert row["scored_by"] == {"answer": "exact", "logic": "judge"}
    assert not row["judge_failed"]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("garbage", "no_json"),
        ("{", "bad_json"),
        ('{"coherence": 0.5}', "the reply does not contain five scores"),
        (json.dumps(dict.fromkeys(LOGIC_SCORES, 5)), "the reply does not contain five scores"),
        (json.dumps(dict.fromkeys(LOGIC_SCORES, True)), "the reply does not contain five scores"),
        (json.dumps(dict.fromkeys(LOGIC_SCORES, "high")), "the reply does not contain five scores"),
        (APIError("500 broken", 500), "500 broken"),
    ],
    ids=str,
)
def test_a_judge_that_fails_is_null_and_flagged_never_a_number(reply, why):
    row = scored(reply)
    assert row["rewards"]["r_logic"] is None
    assert row["judge_failed"]
    assert row["judge_error"].startswith(why)
    assert row["r_total_of"] == ["r_ans", "r_graph"]
    assert row["rewards"]["r_total"] == pytest.approx(1.0)  # (0.5 + 0.25) / 0.75
    assert group_statistics([row, scored()])[1] == 0.0  # left out


def totals(*values):
    return [{"rewards": {"r_ans": 0.0, "r_total": value}} for value in values]


def test_sigma_is_of_the_population_and_strictly_above_tau():
    assert group_statistics(totals(0.2, 0.4, 0.9)) == (
        pytest.approx(0.5),
        pytest.approx(math.sqrt((0.09 + 0.01 + 0.16) / 3)),
    )
    for middle in (0.1, 0.3, 0.5, 0.7):  # σ = 0.05 up to rounding, on either side
        assert group_statistics(totals(middle - 0.05, middle + 0.05))[1] <= 0.05 + ROUNDING
        assert group_statistics(totals(middle - 0.0501, middle + 0.0501))[1] > 0.05 + ROUNDING
    assert group_statistics([]) == (None, 0.0)
    assert group_statistics(totals(0.3)) == (0.3, 0.0)
    assert group_statistics([{"rewards": {"r_ans": None, "r_total": 0.1}}, *totals(0.9)])[1] == 0.0


# --- libraries ------------------------------------------------------------------------------


def library_in(path, role="generator_1") -> Library:
    return Library(role, path)


def add(content, category="validation", **fields) -> dict:
    return {"action": "add", "content": content, "category": category} | fields


LESSONS = [
    "Convert all units before you add quantities.",
    "Check the result against each constraint of the plan.",
    "Name the target variable first, then work backwards to the knowns.",
]


TEMPLATE = load_prompts()["generator_experience_extraction"].template


def learn(library, *operations, problem=PENS):
    """Apply each operation as the result of a separate group."""
    return [library.apply([operation], problem, NOW, TEMPLATE)[0] for operation in operations]


def test_lessons_are_stored_in_the_published_format(tmp_path):
    library = library_in(tmp_path)
    learn(library, add(LESSONS[0]))
    library.save()
    path = tmp_path / "generator_1_experiences.json"
    (item,) = json.loads(path.read_text())
    expected = {"id": "G1-001", "content": LESSONS[0], "category": "validation"}
    expected |= {"source_problem": "pens", "created_at": NOW}
    assert item | expected == item
    assert [lesson.content for lesson in load_experiences(path)] == [LESSONS[0]]
    for role, first in (("generator_2", "G2-001"), ("generator_3", "G3-001"), ("critic", "C-001")):
        assert learn(library_in(tmp_path, role), add(LESSONS[0]))[0]["id"] == first
    assert not learn(library_in(tmp_path, "critic"), add(LESSONS[1], "causal_graph"))[0]["kept"]
    assert not learn(library, add(LESSONS[1], "fusion_strategy"))[0]["kept"]


def test_add_modify_delete_and_no_id_twice(tmp_path):
    library = library_in(tmp_path)
    done = learn(
        library,
        *map(add, LESSONS),
        {"action": "delete", "id": "G1-003"},
        {"action": "modify", "id": "G1-001", "content": "Convert lengths to metres at the start."},
        {"action": "modify", "id": "G1-009", "content": "x"},
        {"action": "delete"},
    )
    assert [d["reason"] for d in done] == [None] * 5 + ["unknown_id"] * 2
    first = library.items[0]
    assert first["content"] == "Convert lengths to metres at the start."
    assert (first["updated_at"], first["last_modified_by"]) == (NOW, "generator_1")
    library.save()
    again = library_in(tmp_path)
    again.resume([{"extraction": {"operations": done}, "library_before": "?"}])  # a run's records
    assert learn(again, add(LESSONS[2]))[0]["id"] == "G1-004"


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        ("text", "schema"),
        ({"action": "burn"}, "schema"),
        (add(7), "schema"),
        (add("  "), "schema"),
        (add("…"), "schema"),
        (add("A lesson.", "nonsense"), "category"),
        (add("A lesson.", ["validation"]), "category"),
        (add(" ".join(["word"] * 50)), "too_long"),
        (add("Multiply, and you get 1,080 pens."), "gold_leak"),
        (add("The lesson."), "copied"),  # a small model may repeat the example of the prompt
        (add("Convert ALL units, before you add quantities!"), "duplicate"),
    ],
    ids=lambda part: str(part)[:40],
)
def test_what_is_refused_changes_nothing_and_says_why(tmp_path, operation, reason):
    library = library_in(tmp_path)
    learn(library, add(LESSONS[0]))
    before = library.digest
    (done,) = learn(library, operation)
    assert (done["kept"], done["reason"]) == (False, reason)
    assert library.digest == before


def test_a_lesson_is_cut_at_a_sentence_or_refused(tmp_path):
    sentence = "Write down every quantity with its unit before the first calculation."
    long = sentence + " word" * 39
    assert learn(library_in(tmp_path), add(long))[0]["content"] == sentence
    assert shorten("word " * 33) is None
    assert shorten("word " * 32) == ("word " * 32).strip()


@pytest.mark.parametrize(
    ("lesson", "gold", "tolerance", "leaks"),
    [
        ("The total is 1080.", "1080", 0, True),
        ("It gives 1080.0, or -1080", "1080", 0, True),
        ("Expect 0.75 here", "3/4", 0, True),
        ("Multiply by 12 for a dozen", "12", 0, False),  # the problem names it
        ("Try 3 cases", "3", 0, False),  # too common
        ("Use 10800 or 108", "1080", 0, False),
        ("Check twice.", "1080", 0, False),
        ("A stone falls 4.9 m.", "4.905", 0.01, True),  # 0.1 % off, so it is graded as right
        ("A stone falls 4.9 m.", "4.905", 0, False),
        ("A stone falls 4.8 m.", "4.905", 0.01, False),  # 2.1 % off
        ("Start from 12 pens.", "12.1", 0.01, False),  # the problem names it
        ("Expect 103 here", "100", 0.03, True),
    ],
)
def test_the_gold_of_the_source_problem_stays_out(lesson, gold, tolerance, leaks):
    problem = Problem("p", PENS.question, gold, columns={"rel_tol": tolerance})
    assert reveals_gold(lesson, problem) is leaks


def test_one_group_adds_one_lesson_and_is_not_heard_for_ever(tmp_path):
    library = library_in(tmp_path)
    done = library.apply([*map(add, LESSONS), *[{"action": "delete"}] * 3], PENS, NOW, TEMPLATE)
    reasons = [d["reason"] for d in done]
    assert reasons == [None, "too_many", "too_many", "unknown_id", "too_many", "too_many"]
    assert library.lessons == LESSONS[:1]


def test_a_full_library_drops_what_helped_least(tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.experience.library.MAX_ITEMS", 2)
    library = library_in(tmp_path)
    learn(library, add(LESSONS[0]))
    library.count_use(10, 1)
    learn(library, add(LESSONS[1]))
    library.count_use(10, 9)
    assert [(i["usage_count"], i["success_count"]) for i in library.items] == [(20, 10), (10, 9)]
    evicted = library.apply([add(LESSONS[2])], PENS, NOW, TEMPLATE)[1]
    assert (evicted["action"], evicted["id"]) == ("evict", "G1-001")
    assert library.lessons == LESSONS[1:]
    monkeypatch.setattr("recipes.experience.library.MAX_TOKENS", 30)
    small = library_in(tmp_path / "small")
    learn(small, *map(add, LESSONS))
    assert tokens_of(small.lessons, 4) <= 30
    assert small.lessons == [LESSONS[2]]


def test_a_kill_between_record_and_library_loses_and_repeats_nothing(tmp_path):
    library = library_in(tmp_path)
    record = {"library_before": library.digest}
    record |= {"extraction": {"operations": learn(library, add(LESSONS[0]))}}
    record |= {"library_after": copy.deepcopy(library.items)}
    for _ in range(2):
        fresh = library_in(tmp_path)  # the library's file does not exist
        fresh.resume([record])
        assert [each.content for each in load_experiences(fresh.path)] == [LESSONS[0]]
        assert fresh.lessons == [LESSONS[0]]
    fresh.items = [{"id": "G1-005", "content": "Mine.", "category": "validation"}]
    fresh.resume([record])  # the user's own change is not undone
    assert fresh.lessons == ["Mine."]
    # The records keep the lessons if the file is lost, also if it had some before the last record.
    fresh.path.unlink()
    lost = library_in(tmp_path)
    lost.resume([record | {"library_before": fresh.digest}])
    assert lost.lessons == [each.content for each in load_experiences(lost.path)] == [LESSONS[0]]


@pytest.mark.parametrize(
    "content",
    [
        "{", "{}", '["a"]', '[{"content": 1}]', '[{"content": ""}]',
        '[{"content": "No id.", "category": "validation"}]',
        '[{"content": "No category.", "id": "G1-001"}]',
    ],
)  # fmt: skip
def test_a_file_that_is_no_library_is_refused(tmp_path, content):
    path = tmp_path / "generator_1_experiences.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=re.escape(str(path))):
        library_in(tmp_path)
    if "No" not in content:  # a lesson needs only its content
        with pytest.raises(UsageError, match=re.escape(str(path))):
            load_experiences(path)
    with pytest.raises(UsageError, match="cannot read"):
        load_experiences(tmp_path / "nowhere.json")


# --- prompts --------------------------------------------------------------------------------


def test_every_prompt_file_is_used_and_filled():
    assert {path.stem for path in PROMPTS.glob("*.txt")} == set(PLACEHOLDERS)
    prompts = load_prompts()
    for name, fields in PLACEHOLDERS.items():
        fields = fields.split()
        text = prompts[name].substitute(**{field: f"<{field} $5 ${{x}}>" for field in fields})
        for field in fields:
            assert f"<{field} $5 ${{x}}>" in text  # and a $ in a value does no harm


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("$problem $answer", "\\$answer"),
        ("no field", "\\$problem"),
        ("$problem $5", "does not start"),
    ],
)
def test_a_prompt_with_other_placeholders_is_refused(tmp_path, text, says):
    for path in PROMPTS.glob("*.txt"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "solve.txt").write_text(text)
    with pytest.raises(UsageError, match=f"solve.txt: .*{says}"):
        load_prompts(tmp_path)
    (tmp_path / "solve.txt").unlink()
    with pytest.raises(UsageError, match="cannot read the prompt"):
        load_prompts(tmp_path)


# --- data and flags -------------------------------------------------------------------------


def test_the_physics_problems_recompute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no file is read from the working directory
    assert load_prompts()
    problems = train.load_problem_set("physics", "train", None)
    assert [p.id for p in problems] == [f"physics_{i:03d}" for i in range(1, 31)]
    assert len({p.question for p in problems}) == 30
    for problem in problems:
        columns = problem.columns
        assert columns["unit"]
        assert 0 < columns["rel_tol"] <= 0.02
        # eval is safe, because the file is ours.
        value = eval(columns["expression"], {"__builtins__": {}}, vars(math))
        stated = parse_number(problem.answer)
        assert math.isclose(value, stated, rel_tol=5.1e-4), problem.id  # four digits
        assert grade_answer(f"Final answer: {problem.answer} {columns['unit']}", problem)[0]
    topics = {p.columns["topic"] for p in problems}
    assert topics == {"mechanics", "circuits", "optics", "thermodynamics", "waves", "modern"}


def test_aime_problems_are_numbered(tmp_path):
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(30)]
    write_problems(tmp_path / "aime2024.jsonl", rows)
    problems = train.load_problem_set(f"aime2024:{tmp_path}", "train", None)
    assert [p.id for p in problems] == [f"aime2024_{i:03d}" for i in range(1, 31)]


def test_practice_uses_the_train_split(tmp_path):
    """This holds for datasets of other projects, too, if they have a train split."""
    both, one = tmp_path / "both", tmp_path / "one"
    for folder, splits in ((both, ("train", "test")), (one, ("test",))):
        folder.mkdir()
        for split in splits:
            rows = [{"question": f"{n} + 1, {split}?", "answer": str(n + 1)} for n in range(300)]
            write_problems(folder / f"{split}.jsonl", rows)
    for split in ("train", "test"):
        found = train.load_problem_set(str(both), split, 40)
        assert all(f"{split}?" in problem.question for problem in found)
        assert all(p.question.endswith("test?") for p in train.load_problem_set(str(one), split, 9))
    with pytest.raises(UsageError, match="no split 'dev'; it has train, validation, test"):
        train.load_problem_set("word-problems", "dev", 9)
    with pytest.raises(UsageError, match=r"word-problems:1\+elementary: pass one dataset"):
        train.load_problem_set("word-problems:1+elementary", "train", 9)
    with pytest.raises(UsageError, match="no split 'test_families'"):
        train.load_problem_set(str(both), "test_families", 9)


@pytest.mark.parametrize(
    ("command", "role", "temperature"),
    [
        ("generator 1", "generator_1", 0.3),
        ("generator 1 --temperature 0", "generator_1", 0.0),
        ("critic", "critic", 0.0),
        ("critic --temperature 0.7", "critic", 0.7),
        ("all --temperature 0.7", "generator_2", 0.7),
        ("all --temperature 0.7", "critic", 0.0),
    ],
)
def test_the_temperature_of_a_role(command, role, temperature):
    config = parse(train.TrainConfig, command.split())
    assert config.temperature_of(role) == temperature
    assert (config.rollouts, config.tau) == (3, 0.05)


@pytest.mark.parametrize(("target", "counts"), [("critic", (2, 4)), ("generator 1", (3, 3))])
def test_the_critic_s_tokens_depend_on_the_recorded_rollouts(target, counts):
    """A run may have recorded another number of rollouts than the default of --rollouts."""

    def read(role, rollouts):
        tasks = [(PENS, [(name, [{}] * rollouts) for name in GENERATORS])] * 5
        return train.estimate(config, tasks)[role]

    config = parse(train.TrainConfig, [*target.split(), "--max-tokens", "100"])
    (requests, few), (_, many) = (read("critic", count) for count in (2, 4))
    assert requests == 7 * 5
    # Each of two more rollouts: a plan in three prompts; a solution and a plan in the comparison.
    more = (counts[1] - counts[0]) * (3 * 100 + 1500 // 4 + 100)
    assert many - few == 5 * more


def test_importing_the_recipe_loads_no_torch():
    code = "import recipes.experience.evaluate, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
