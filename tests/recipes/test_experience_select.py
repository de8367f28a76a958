"""Selection of lessons that help: candidates, trials by hand, a whole selection and evaluation."""

import json
import re
from pathlib import Path

import pytest
from conftest import exit_code
from scripted_model import Model, write_endpoints, write_problems
from scripted_server import ScriptedServer

from recipes.experience import evaluate, select
from recipes.experience.agent import Agent, Endpoint
from recipes.experience.answers import announce_cost, format_attempt, tokens_of
from recipes.experience.library import read_questions, replace_library
from recipes.experience.select import Candidate, Group, Trial, differing_groups, most_similar
from rlm.api_client import Budget, ChatReply
from rlm.cli.options import UsageError
from rlm.data.experiences import Experience, apply_experiences, load_experiences, similarity
from rlm.data.problem import Problem
from rlm.evaluation import holm
from rlm.runs import lock_file

GOOD = "A gross is 144 pieces: multiply the number of gross by 144."
KINDS = {"gross": 144, "score": 20}
URL = "http://127.0.0.1:9/v1"


def reply(text: str, reasoning: str = "") -> ChatReply:
    return ChatReply(text, "stop", 10, 5, 0.0, reasoning)


def problem(kind: str, n: int) -> Problem:
    text = {"gross": "A crate holds {} gross of pens. How many pens is that?"}
    text["score"] = "Ann lives for {} score years. What age does she reach?"
    return Problem(f"{kind}_{n}", text[kind].format(n), str(n * KINDS[kind]))


def both_kinds(end: int) -> list[dict[str, str]]:
    rows = [problem(("gross", "score")[n % 2], n) for n in range(2, end)]
    return [{"id": p.id, "question": p.question, "answer": p.answer} for p in rows]


# --- by hand ----------------------------------------------------------------------------------


def test_similarity_and_the_nearest_lessons():
    assert similarity("Ann has 3 pens.", "ann HAS 4 pens") == 1.0
    assert similarity("a b", "a b c d e f g h") == pytest.approx(2 / (2 * 8) ** 0.5)
    assert similarity("12", "12") == similarity("", "a") == 0.0  # no words
    words = Experience("Use a graph.", "W", about="apples in a box")
    shot = Experience("It is 4.", "E", question="How many apples?", about="How many apples?")
    far = Experience("Never.", "F", about="apples", reach=0.9)
    asked = apply_experiences("How many apples?", [words, far, shot], 2)
    assert asked.used == ("E", "W")
    assert asked.examples == (("How many apples?", "It is 4."),)
    assert asked.question.endswith("1. Use a graph.\n\nProblem:\nHow many apples?")
    assert apply_experiences("How many apples?", [words, far, shot], 1).question == (
        "How many apples?"
    )
    assert apply_experiences("How many pears?", [far]).used == ()


def test_holm_by_hand():
    assert holm([0.03, 0.01, 0.04]) == [False, True, False]
    assert holm([0.01, 0.02, 0.03], 0.06) == [True, True, True]  # 0.06/3, 0.06/2, 0.06/1
    assert holm([0.021, 0.001, 0.001], 0.02) == [False, True, True]
    assert holm([]) == []


def test_which_groups_teach_and_in_which_order():
    problems = [problem("gross", 2), problem("gross", 3), problem("score", 4), problem("score", 5)]
    right, wrong = ([reply(f"Final answer: {int(p.answer) + i}") for p in problems] for i in (0, 1))
    attempts = [[right[0], wrong[0], None], [right[1], wrong[1]], [wrong[2], right[2]], [right[3]]]
    groups = differing_groups(problems, attempts, 3)
    assert [group.problem.id for group in groups] == ["gross_2", "score_4", "gross_3"]
    assert (groups[0].right, groups[0].wrong) == ([right[0]], [wrong[0]])
    assert len(differing_groups(problems, attempts, 1)) == 1


def test_a_trial_counts_pairs_and_reach():
    asked = [problem("gross", n) for n in range(2, 10)]
    right, wrong = ([[reply(f"{int(p.answer) + i}")] for p in asked] for i in (0, 1))
    candidate = Candidate("rule", problem("gross", 1), GOOD)
    trial = select.judge_trial(candidate, asked, [right[0], *wrong[1:]], [wrong[0], *right[1:]])
    # 7 only with, 1 only without: 2 (C(8,0) + C(8,1)) / 2^8
    assert trial == Trial(8, 1, 7, pytest.approx(18 / 256), 1.0)
    trial = select.judge_trial(candidate, asked, [[None], *wrong[1:]], [right[0], *right[1:]])
    assert trial == Trial(7, 0, 7, pytest.approx(2 / 128), 1.0)
    others = [problem("score", 7), problem("gross", 8), problem("gross", 9)]
    assert most_similar(candidate, others, 2) == [1, 2]
    # A harmful lesson is never kept, and neither is one whose gain may be chance among all trials.
    helped, harmed = Trial(20, 1, 12, 0.001, 0), Trial(20, 12, 1, 0.001, 0)
    by_chance, none = Trial(20, 1, 7, 0.04, 0), Trial(20, 5, 5, 1.0, 0)
    assert select.select([harmed, helped, none], 0.05) == [False, True, False]
    assert select.select([by_chance, helped, none], 0.05) == [False, True, False]


def test_a_rule_is_no_example_and_a_gold_is_no_rule():
    own = problem("gross", 2)
    assert Candidate("rule", own, GOOD).lesson.question == ""
    assert Candidate("fusion", own, "288").lesson.question == own.question
    group = Group(own, [reply("288", "2 * 144 = 288")], [reply("24")])
    replies = iter(["The answer is 288.", f"<think>x</think>{GOOD}"])
    critic = type("Critic", (), {"ask": lambda *_, **__: reply(next(replies))})()
    assert select._rule(critic, group) is None
    assert select._rule(critic, group).content == GOOD
    tagged = "<think>\n2 * 144 = 288\n</think>\n<answer>288</answer>"
    assert format_attempt(group.right[0], own) == tagged


def test_an_interval_of_equal_scores_has_a_width():
    problems = [problem("gross", n) for n in range(1, 241)]
    replies = {name: [[reply("0")] for _ in problems] for name in (evaluate.BASELINE, "x")}
    replies["x"][0] = [reply(problems[0].answer)]
    rows = evaluate.compare(problems, replies)
    none, one = (rows[name]["accuracy"] for name in replies)
    assert (none["mean"], none["low"], none["correct"], none["total"]) == (0, 0, 0, 240)
    assert none["high"] == pytest.approx(1.96**2 / (240 + 1.96**2))
    assert 0 < one["low"] < 1 / 240 < one["high"]
    halves = {evaluate.BASELINE: [[reply("0"), reply(p.answer)] for p in problems]}
    assert "correct" not in evaluate.compare(problems, halves)[evaluate.BASELINE]["accuracy"]


def test_placebo_lessons_stand_where_the_others_did():
    lessons = [
        Experience(k, k, f"{k}?", about=problem(k, 1).question, reach=r)
        for k, r in (("gross", 0.5), ("score", 0.6))
    ]
    first, second = evaluate.placebo(lessons)
    assert (first.content, first.question) == ("score", "score?")
    assert (first.about, first.reach) == (lessons[0].about, 0.5)
    assert (second.content, second.reach) == ("gross", 0.6)


def test_lessons_of_one_kind_have_no_placebo():
    """A placebo is a lesson for other problems, so it needs lessons of several kinds.

    A lesson without a reach, as in the libraries of train, applies to all problems.
    """
    lessons = [
        Experience(str(n), "144", about=problem("gross", n).question, reach=0.5) for n in (1, 2)
    ]
    assert evaluate.placebo(lessons) == evaluate.placebo(lessons[:1]) == []
    untested = [Experience(k, k, about=problem(k, 1).question) for k in KINDS]
    assert evaluate.placebo(untested) == []


def test_a_price_is_named_before_it_is_paid(capsys):
    paid = Endpoint(base_url=URL, price={"prompt": 1.0, "completion": 2.0})
    budget = Budget(3.0)
    budget.cost = 1.9
    options = (paid.client(budget), None, {}, 0.0, 100)
    agents = [Agent("generator_1", paid, *options)]
    agents += [Agent("critic", Endpoint(base_url=URL, max_tokens=50), *options)]
    calls = {"generator_1": (1000, 500_000), "critic": (10, 9000), "judge": (1, 1)}
    # 0.5 million prompt tokens at 1, and 0.1 million completion tokens at 2
    announce_cost(calls, agents, budget)
    said = " ".join(capsys.readouterr().out.split())
    assert "generator_1: at most 1,000 requests, about 500,000 tokens read" in said
    assert "100,000 written, cost 0.7" in said
    assert (
        "at most 500 written (each reply at most 50: max_tokens of critic in --api-config)" in said
    )
    assert "total cost: at most about 0.7; limit 3, of which earlier replies cost 1.9" in said
    assert tokens_of(["12345678", ""]) == 2 + 64 + 64


# --- a whole selection ------------------------------------------------------------------------


class Pupil(Model):
    """Solves two of three problems with sampling, few with greedy decoding, and all with a lesson.

    An example in the prompt helps, too. The placebo's example of a score misleads the model.
    """

    def __call__(self, body):
        texts = [message["content"] for message in body["messages"]]
        if "Below is a problem with a right and a wrong attempt" in texts[-1]:
            return GOOD
        if "Several attempts at a problem follow" in texts[-1]:
            return "Final answer: 0"
        kind = "gross" if "gross" in texts[-1] else "score"
        n = int(re.search(r"(?:holds|for) (\d+) (?:gross|score)", texts[-1])[1])
        knows = body["seed"] % 3 > 0 if body["temperature"] else n % 8 == 0
        if kind == "gross":
            knows = knows or GOOD in texts[-1] or any("* 144" in text for text in texts[:-1])
        else:
            knows = True
        return f"{n} * {KINDS[kind]}\nFinal answer: {n * KINDS[kind] if knows else n * 12}"


@pytest.fixture(scope="module")
def selected(tmp_path_factory):
    path = tmp_path_factory.mktemp("pupil")
    with ScriptedServer(Pupil()) as server:
        write_endpoints(path / "api.json", server.url, price={"prompt": 1.0, "completion": 1.0})
        path = path, write_problems(path / "all.jsonl", both_kinds(90)), server
        assert run(path, select, *SELECT) == 0
        yield path


SELECT = ("--problems", 8, "--held-out", 44, "--trial-size", 20, "--groups", 2)


def run(place, module, *arguments) -> int:
    path, data, _ = place
    config = select.SelectConfig if module is select else evaluate.EvaluateConfig
    where = ["--api-config", path / "api.json", "--run-dir", path / "run", "--dataset", data]
    where += ["--library-dir", path / "lib"] if module is select else []
    return exit_code(module, config, *arguments, *where)


def test_only_what_helped_is_kept(selected):
    path, _, server = selected
    record = json.loads((path / "run" / "selection.json").read_text())
    items = json.loads((path / "lib" / "selected_experiences.json").read_text())
    assert len(record["seen"]) == 52
    # The critic's fusions are wrong, so none was tried; all groups with signal are of one kind.
    assert {row["kind"] for row in record["tried"]} == {"example", "rule"}
    assert [row["kept"] for row in record["tried"]] == [True] * 4
    assert [item["id"] for item in items] == ["S-001", "S-002", "S-003", "S-004"]
    rule = next(item for item in items if item["kind"] == "rule")
    assert (rule["content"], rule["category"]) == (GOOD, "problem_solving")
    assert rule["trial"]["with_it"] == rule["trial"]["problems"] == 20
    assert rule["trial"]["p"] < 0.05 / 4
    assert rule["reach"] == 1.0
    lessons = load_experiences(path / "lib" / "selected_experiences.json")
    assert {bool(lesson.question) for lesson in lessons} == {True, False}
    before = len(server.asked("chat/completions"))
    assert run(selected, select, *SELECT) == 0  # goes on where it was: nothing is asked again
    assert len(server.asked("chat/completions")) == before


def test_two_processes_never_pay_for_the_same_replies(selected, capsys):
    path, _, server = selected
    before = len(server.asked("chat/completions"))
    library = path / "lib" / "selected_experiences.json"
    for module, name, arguments in (
        (select, "select", SELECT),
        (evaluate, "evaluate", ("--library", library)),
    ):
        (journal := path / "run" / f"{name}_calls.jsonl").touch()
        paid = journal.read_bytes()
        with lock_file(path / "run" / f".{name}.lock", "here", ""):
            journal.write_bytes(paid + b'{"key": ')  # the other process is writing this line
            assert run(selected, module, *arguments) == 2
            assert journal.read_bytes() == paid + b'{"key": '
        journal.write_bytes(paid)
        assert re.search(f"{path / 'run'}: process .* runs {name}", capsys.readouterr().err)
    assert len(server.asked("chat/completions")) == before


def test_an_earlier_library_is_kept_unless_it_is_the_same(tmp_path, capsys):
    library = tmp_path / "selected.json"
    replace_library(library, [{"content": "first"}], ["1 + 1?"])
    replace_library(library, [{"content": "first"}], ["1 + 1?"])
    assert capsys.readouterr().out == ""
    replace_library(library, [{"content": "second"}], ["2 + 2?"])
    kept = tmp_path / "selected.prev.json"
    assert f"the earlier library {library} was moved to {kept}" in capsys.readouterr().out
    for path, content, question in ((kept, "first", "1 + 1?"), (library, "second", "2 + 2?")):
        assert json.loads(path.read_text()) == [{"content": content}]
        assert read_questions(path) == [question]


@pytest.mark.parametrize("number", range(4))
def test_a_kill_while_the_library_is_replaced_loses_no_questions(tmp_path, monkeypatch, number):
    library, kept = tmp_path / "selected.json", tmp_path / "selected.prev.json"
    replace_library(library, [{"content": "first"}], ["1 + 1?"])
    replace, replaced = Path.replace, []

    def replace_or_die(source, target):
        if len(replaced) == number:
            raise KeyboardInterrupt
        replaced.append(target)
        return replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace_or_die)
        with pytest.raises(KeyboardInterrupt):
            replace_library(library, [{"content": "second"}], ["2 + 2?"])
    replace_library(library, [{"content": "second"}], ["2 + 2?"])
    for path, content, question in ((kept, "first", "1 + 1?"), (library, "second", "2 + 2?")):
        assert json.loads(path.read_text()) == [{"content": content}]
        assert read_questions(path) == [question]


def test_an_endpoint_that_fails_leaves_the_library_alone(selected, monkeypatch, capsys):
    library = selected[0] / "lib" / "selected_experiences.json"
    before, answer_all = library.read_text(), select.answer_all

    def fail(agent, problems, lessons, samples, **options):
        return [[None] * samples for _ in problems]

    def fail_with_a_lesson(agent, problems, lessons, *rest, **options):
        call = fail if lessons else answer_all
        return call(agent, problems, lessons, *rest, **options)

    for broken, said in ((fail, "all requests failed"), (fail_with_a_lesson, "on every problem")):
        monkeypatch.setattr(select, "answer_all", broken)
        assert run(selected, select, *SELECT) == 2
        assert said in capsys.readouterr().err
        assert library.read_text() == before


def test_a_library_without_lessons_replaces_no_kept_one(tmp_path):
    library = tmp_path / "selected.json"
    for items in ([{"content": "first"}], [], [{"content": "second"}]):
        replace_library(library, items, [])
    assert json.loads((tmp_path / "selected.prev.json").read_text()) == [{"content": "first"}]


def test_the_plan_asks_nothing_and_too_few_problems_are_refused(selected, capsys):
    _, _, server = selected
    before = len(server.asked("chat/completions"))
    assert run(selected, select, *SELECT, "--plan", "--seed", 3) == 0
    assert "generator_1: at most 180 requests" in capsys.readouterr().out  # 16 + 44 + 120
    assert run(selected, evaluate, "--plan", "--seed", 3, "--library", "/") == 2
    library = selected[0] / "lib" / "selected_experiences.json"
    assert run(selected, evaluate, "--plan", "--library", library) == 0
    assert "generator_1: at most 240 requests" in capsys.readouterr().out
    assert len(server.asked("chat/completions")) == before
    assert run(selected, select, "--held-out", 900) == 2
    assert "has 88 problems, but 948 are needed" in capsys.readouterr().err


def test_no_trial_asks_the_question_of_a_candidate(tmp_path):
    """The file contains each of 20 questions twice; 12 are practised, and 8 of these return."""
    rows = [problem("gross", n) for n in range(2, 22)]
    rows = [{"id": p.id, "question": p.question, "answer": p.answer} for p in rows]
    again = [
        row | {"id": f"{i}", "question": row["question"].upper()} for i, row in enumerate(rows)
    ]
    data = write_problems(tmp_path / "twice.jsonl", [*rows, *again])
    where = {"dataset": str(data), "problems": 12}
    practise, held_out = select.load_parts(select.SelectConfig(held_out=16, trial_size=6, **where))
    assert [p.id for p in practise] == [f"gross_{n}" for n in range(2, 14)]
    assert [p.id for p in held_out] == [f"gross_{n}" for n in range(14, 22)]
    config = select.SelectConfig(held_out=16, trial_size=9, **where)
    with pytest.raises(UsageError, match=r"only 8 held-out problems .* lower --problems or"):
        select.load_parts(config)


def test_what_selected_the_library_is_not_evaluated(selected, tmp_path, capsys):
    """The library records which problems selected it, even if --run-dir is another folder."""
    path, data, _ = selected
    library = path / "lib" / "selected_experiences.json"
    seen = set(json.loads((path / "run" / "selection.json").read_text())["seen"])
    where = {"dataset": str(data), "run_dir": tmp_path, "max_problems": None}
    left = evaluate.load_unseen(evaluate.EvaluateConfig(library=(library,), **where))
    assert len(left) == 88 - 52
    assert not seen & {problem.question for problem in left}
    assert "52 problems are left out: they were used to make or to test" in capsys.readouterr().out
    shouted = tmp_path / "shouted.jsonl"  # with other letters and spaces, they are the same
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    write_problems(shouted, [row | {"question": row["question"].upper() + " "} for row in rows])
    config = evaluate.EvaluateConfig(library=(library,), **where | {"dataset": str(shouted)})
    assert len(evaluate.load_unseen(config)) == 88 - 52
    copy = tmp_path / "copy.json"  # without the file beside it
    copy.write_text(library.read_text())
    sources = {item["source_question"] for item in json.loads(copy.read_text())}
    left = evaluate.load_unseen(evaluate.EvaluateConfig(library=(copy,), **where))
    assert len(left) == 88 - len(sources)
    assert "copy.problems.json is missing" in capsys.readouterr().out
    (tmp_path / "copy.problems.json").write_text("{}")
    with pytest.raises(UsageError, match="is not a JSON list of questions"):
        evaluate.load_unseen(evaluate.EvaluateConfig(library=(copy,), **where))


def test_library_and_placebo_in_one_table(selected):
    path, _, server = selected
    library = path / "lib" / "selected_experiences.json"
    extra = json.loads(library.read_text())
    score = extra[0] | {"source_question": problem("score", 1).question, "id": "X"}
    score |= {"content": "1 * 20", "category": "worked_example"}
    (path / "two.json").write_text(json.dumps([extra[0], score]))
    options = ("--placebo", "--samples", 2, "--temperature", 0)
    assert run(selected, evaluate, "--library", path / "two.json", *options) == 0
    rows = json.loads((path / "run" / "evaluation.json").read_text())["rows"]
    assert {row["problems"] for row in rows.values()} == {30}
    assert rows["two"]["accuracy"]["mean"] == 1.0
    assert rows["two"]["difference"]["low"] > 0
    assert rows["placebo of two"]["difference"]["points"] <= 0
    asked = len(server.asked("chat/completions"))  # the same command again asks nothing
    assert run(selected, evaluate, "--library", path / "two.json", *options) == 0
    assert len(server.asked("chat/completions")) == asked
