"""The commands of the experience recipe with a scripted server."""

import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
from conftest import exit_code
from scripted_model import Model, numbers, operations, plan, problems, stage_of, write_problems
from scripted_server import ScriptedServer, chat_reply, refuse

from recipes.experience import agent, evaluate, select, train, trainer
from recipes.experience.agent import GENERATORS, ROLES, Endpoint, load_endpoints
from recipes.experience.library import CRITIC_CATEGORIES, Library
from recipes.experience.plan import parse_plan
from recipes.experience.trainer import records_path
from rlm.api_client import Budget
from rlm.cli.options import UsageError, parse
from rlm.data.experiences import load_experiences
from rlm.runs.atomic_files import Journal, lock_file, read_lines
from server import ServerConfig

ROOT = Path(__file__).parents[2]
KEY = "sk-very-secret"


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def server(model):
    with ScriptedServer(model) as server:
        yield server


class Place:
    """A working directory with endpoints, data, a run and libraries."""

    def __init__(self, path: Path, server: ScriptedServer) -> None:
        self.path, self.server = path, server
        self.run_dir, self.libraries = path / "run", path / "libraries"
        self.config, self.data = path / "api_config.json", path.parent / "pens.jsonl"
        path.mkdir(exist_ok=True)
        self.configure()
        write_problems(self.data, problems(10))

    def configure(self, judge: dict | None = None, **fields) -> None:
        """Write the same endpoint for all roles, and an endpoint of the judge only if given."""
        entry = {"base_url": self.server.url, "model": "m", "backoff": 0.001} | fields
        roles = dict.fromkeys(ROLES, entry) | ({} if judge is None else {"judge": entry | judge})
        self.config.write_text(json.dumps(roles))

    def arguments(self, *more) -> list[str]:
        where = ["--api-config", self.config, "--run-dir", self.run_dir]
        where += ["--library-dir", self.libraries]
        return [str(word) for word in (*more, *where)]

    def run(self, *command) -> int:
        """Run `python -m recipes.experience.train …`, and return the exit code."""
        more = () if command[0] == "critic" else ("--dataset", self.data)
        return exit_code(train, train.TrainConfig, *self.arguments(*command, *more))

    def run_group(self) -> int:
        """Run one problem with two rollouts, of which one is right."""
        answers = [2232, 2233]
        self.model.answer = lambda prompt, seed: f"Final answer: {answers.pop()}"
        return self.run("generator", 1, "--rollouts", 2, "--max-problems", 1)

    def rows(self, name="generator_1") -> list[dict]:
        return read_lines(records_path(self.run_dir, name))

    def lessons(self, name="generator_1") -> tuple[str, ...]:
        path = self.libraries / f"{name}_experiences.json"
        return tuple(lesson.content for lesson in load_experiences(path))

    def items(self, name="generator_1") -> list[dict]:
        return json.loads((self.libraries / f"{name}_experiences.json").read_text())

    def summary(self, name="generator_1") -> dict:
        return json.loads((self.run_dir / f"{name}_summary.json").read_text())

    def asked(self, *stages: str) -> list[dict]:
        bodies = self.server.asked("chat/completions")
        return [body for body in bodies if not stages or stage_of(body) in stages]

    def everything(self) -> dict[str, str]:
        """Return all files without times, and with sorted journals, because threads run freely."""
        found = {}
        for file in sorted([*self.run_dir.glob("[!.]*"), *self.libraries.glob("[!.]*")]):
            text = file.read_text().replace(str(self.libraries), "LIBRARIES")
            lines = re.sub(r"\d{4}-\d\d-\d\dT[\d:+]+", "T", text).splitlines()
            found[file.name] = "\n".join(sorted(lines) if "_calls" in file.name else lines)
        return found


def assert_same(place: Place, other: Place) -> None:
    files, expected = place.everything(), other.everything()
    assert set(files) == set(expected)
    for name, text in files.items():
        assert text == expected[name], name


@pytest.fixture
def place(tmp_path, server, model):
    place = Place(tmp_path / "place", server)
    place.model = model
    return place


def one_line(capsys) -> str:
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def prompt_of(body: dict) -> str:
    return body["messages"][-1]["content"]


# --- generators -----------------------------------------------------------------------------


def test_a_generator_writes_a_line_per_problem_in_the_published_format(place):
    assert place.run("generator", 1, "--max-problems", 10) == 0
    rows = place.rows()
    assert len(rows) == 10
    for row, problem in zip(rows, problems(10), strict=True):
        assert row["problem_id"] == problem["id"]
        assert row["problem_text"] == problem["question"]
        assert row["ground_truth"] == problem["answer"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", row["timestamp"])
        assert [r["rollout_id"] for r in row["rollouts"]] == [1, 2, 3]
        for r in row["rollouts"]:
            assert parse_plan(r["scaffold"]).text() == r["scaffold"]
            assert isinstance(json.loads(r["scaffold"]), dict)
            assert r["is_correct"] is (r["answer"] == problem["answer"])
            assert r["r_ans"] == float(r["is_correct"])
            # The plan is right, so a wrong answer does not follow from it.
            assert (r["r_logic"], r["r_graph"]) == (r["r_ans"], 1.0)
            assert r["r_total"] == pytest.approx(0.75 * r["r_ans"] + 0.25)
            assert r["scored_by"] == {"answer": "exact", "logic": "checks"}
    assert place.summary()["plans"] == {"parsed": 30}
    assert place.items()
    for number, item in enumerate(place.items(), 1):
        assert item["id"] == f"G1-{number:03d}"
        assert {"content", "category", "source_problem", "created_at"} < set(item)


def test_flags_reach_the_requests(place):
    options = ("--rollouts", 2, "--temperature", 0.9, "--max-tokens", 77, "--tau", 0.9)
    assert place.run("generator", 2, "--max-problems", 2, *options) == 0
    assert [len(row["rollouts"]) for row in place.rows("generator_2")] == [2, 2]
    bodies = place.asked()
    assert {body["temperature"] for body in bodies} == {0.9}
    assert {body["max_tokens"] for body in bodies} == {77}
    assert len({body["seed"] for body in bodies}) == len(bodies)
    assert len(place.asked("scaffold")) == 4
    assert place.asked("generator_extraction") == []  # no group differs that much
    place.configure(max_tokens=50, model="")  # the endpoint's longest reply, and its first model
    assert place.run("generator", 1, "--max-problems", 1) == 0
    sent = {(body["max_tokens"], body["model"]) for body in place.asked()}
    assert sent == {(77, "m"), (50, "base")}


def test_a_lesson_stands_in_the_prompts_of_the_next_problem(place, model):
    model.generator_extraction = lambda prompt, seed: operations(
        {"action": "add", "content": "Count the boxes twice.", "category": "validation"}
    )
    assert place.run("generator", 1) == 0
    assert place.lessons() == ("Count the boxes twice.",)
    (source,) = place.items()
    first = [p["id"] for p in problems(10)].index(source["source_problem"])
    for body in place.asked("scaffold"):
        after = numbers(prompt_of(body))[0] - 31 > first
        assert ("Count the boxes twice." in prompt_of(body)) is after
    later = [r for row in place.rows()[first + 1 :] for r in row["rollouts"]]
    assert source["usage_count"] == len(later) == 3 * (9 - first)
    assert source["success_count"] == sum(r["is_correct"] for r in later)


def test_the_gold_reaches_no_prompt_but_that_of_the_comparison(place, model):
    """No answer is right. Attempts with a plan score higher, so the attempts are compared."""
    model.answer = lambda prompt, seed: f"Final answer: {numbers(prompt)[0] + seed % 2}"
    model.scaffold = lambda prompt, seed: json.dumps(plan(*numbers(prompt))) if seed % 2 else "none"
    assert place.run("all", "--max-problems", 3) == 0
    assert place.asked("generator_extraction")
    for body in place.asked():
        held, boxes = numbers(prompt_of(body))
        told = str(held * boxes) in prompt_of(body)
        assert told is stage_of(body).endswith("_extraction")
        assert (f"Right answer: {held * boxes}" in prompt_of(body)) is told


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ((0.06, 0.04, 0.9), "σ=0.050 → Skip (σ≤τ)"),
        ((0.0602, 0.04, 0.8998), "σ=0.050 → Extract (σ>τ)"),
    ],
    ids=["0.05", "0.0501"],
)
def test_a_sigma_of_tau_is_not_yet_above_it(place, capsys, monkeypatch, weights, said):
    """One of two attempts is right, so σ is half of the weights of r_ans and r_logic."""
    monkeypatch.setattr("recipes.experience.rewards.GENERATOR_WEIGHTS", weights)
    assert place.run_group() == 0
    taught = "Extract" in said
    assert place.rows()[0]["std"] == pytest.approx(0.0501 if taught else 0.05, abs=1e-9)
    assert len(place.asked("generator_extraction")) == len(place.lessons()) == taught
    assert said in capsys.readouterr().err
    assert place.summary()["groups with σ > τ"] == taught


def test_a_plan_that_is_no_scaffold_is_counted_and_still_answered(place, model):
    model.scaffold = lambda prompt, seed: "First multiply, then be done."
    assert place.run("generator", 1, "--max-problems", 2) == 0
    for row in place.rows():
        for r in row["rollouts"]:
            assert json.loads(r["scaffold"]) == {"invalid": "First multiply, then be done."}
            assert r["scaffold_error"].startswith("no_json")
            assert (r["r_logic"], r["r_graph"]) == (0.0, 0.0)
            assert r["r_total"] == 0.5 * r["is_correct"]
    assert "First multiply, then be done." in prompt_of(place.asked("answer")[0])
    assert place.summary()["plans"] == {"no_json": 6}


@pytest.mark.parametrize(
    ("limit", "named"),
    [(None, "--max-tokens"), (50, "max_tokens of generator_1 in --api-config")],
)
def test_a_plan_that_the_token_limit_cut_off_is_told_from_invalid_json(place, limit, named):
    place.configure(max_tokens=limit)
    place.server.answer = lambda body: chat_reply('{"target_variable": "pe', finish="length")
    assert place.run("generator", 1, "--max-problems", 1, "--rollouts", 2) == 0
    assert place.rows()[0]["rollouts"][0]["scaffold_error"].startswith("truncated: ")
    assert place.summary()["plans"] == {"truncated": 2}
    assert f"raise {named}, set a model" in place.summary()["learned"]


def test_what_no_file_can_hold_ends_no_run(place, model):
    """A plan contains half of a surrogate pair, which no UTF-8 file can contain."""
    model.scaffold = lambda prompt, seed: json.dumps(
        plan(*numbers(prompt)) | {"knowns": {"\ud800": 1}}
    )
    lesson = {"action": "add", "content": "Check \ud800 it.", "category": "validation"}
    model.generator_extraction = lambda prompt, seed: operations(lesson)
    assert place.run_group() == 0
    assert place.lessons() == ("Check ? it.",)


def test_operations_are_told_recorded_and_counted_as_proposed_parsed_kept(place, model, capsys):
    add, leak = (
        operations({"action": "add", "content": text, "category": "validation"})
        for text in ("Check it.", "It is GOLD pens.")
    )
    replies = iter([add, "garbage", add, leak, '{"operations": 3}'])
    model.answer = lambda prompt, seed: f"Final answer: {numbers(prompt)[0] * 103 + seed}"
    model.scaffold = lambda prompt, seed: json.dumps(plan(*numbers(prompt))) if seed % 2 else "none"
    model.generator_extraction = lambda prompt, seed: next(replies).replace(
        "GOLD", str(math.prod(numbers(prompt)))
    )
    assert place.run("generator", 1, "--rollouts", 5, "--max-problems", 5) == 0
    summary = place.summary()
    assert summary["groups with σ > τ"] == 5  # the seeds give each both kinds of plan
    assert summary["extractions"] == {"parsed": 3, "failed": 2}
    assert summary["operations"] == {"kept": 1, "duplicate": 1, "gold_leak": 1}
    assert summary["lessons"] == 1
    assert summary["learned"].startswith("1 lesson is stored in ")
    assert place.lessons() == ("Check it.",)
    (refused,) = place.rows()[3]["extraction"]["operations"]
    assert (refused["kept"], refused["reason"]) == (False, "gold_leak")
    assert "✗ Refused (gold_leak): add" in capsys.readouterr().err


def test_a_lesson_that_left_the_library_is_not_called_saved(capsys):
    rows = [{"action": a, "id": "G1-001", "content": None, "kept": True} for a in ("add", "delete")]
    trainer._say_extraction({"error": None, "operations": [*rows, rows[1] | {"action": "evict"}]})
    said = re.findall("✅ (.*)", capsys.readouterr().err)
    assert said == ["Saved: add G1-001", "Dropped: delete G1-001", "Dropped: evict G1-001"]


# --- the critic, and all of them ------------------------------------------------------------


def test_the_critic_writes_three_lines_a_problem_and_reads_its_lessons(place):
    assert place.run("all", "--max-problems", 6) == 0
    rows = place.rows("critic")
    assert [row["generator_id"] for row in rows] == list(GENERATORS) * 6
    fields = {"problem_id", "problem_text", "ground_truth", "generator_id", "fused_scaffold"}
    fields |= {"final_answer", "is_correct", "rewards", "timestamp"}
    for row in rows:
        assert fields <= set(row)
        assert parse_plan(row["fused_scaffold"])
        assert row["fusion"] == "fused"
        assert list(row["rewards"]) == ["r_ans", "r_logic", "r_graph", "r_fusion", "r_total"]
        r = row["rewards"]
        total = 0.3 * r["r_ans"] + 0.2 * r["r_logic"] + 0.2 * r["r_graph"] + 0.3 * r["r_fusion"]
        assert r["r_total"] == pytest.approx(total)
        # Equal to proposals that agree: 0.3 + 0.3 · 0.7 + 0.2 + 0.2 · 0.5
        assert r["r_fusion"] == pytest.approx(0.81)
    assert place.summary("critic")["fusions"] == {"fused": 18}
    assert place.lessons("critic")[0] in prompt_of(place.asked("fusion")[-1])
    assert place.items("critic")[0]["id"] == "C-001"
    learned = place.summary("critic")["learned"]  # no other program uses this library
    assert learned.endswith("critic_experiences.json")
    critics = place.asked("fusion", "critic_extraction")
    assert {body["temperature"] for body in critics} == {0.0}
    assert {body["temperature"] for body in place.asked("scaffold")} == {0.3}


def cyclic(prompt: str, seed: int) -> str:
    loop = plan(*numbers(prompt))
    loop["causal_graph"].append({"cause": ["pens"], "effect": "held", "rule": "pens / boxes"})
    return json.dumps(loop)


@pytest.mark.parametrize(
    ("fusion", "reason"),
    [(cyclic, "cycle: "), (lambda prompt, seed: "no plan", "no_json: ")],
    ids=["cycle", "no plan"],
)
def test_a_fusion_that_is_none_is_refused_with_a_reason(place, model, fusion, reason):
    model.fusion = fusion
    assert place.run("all", "--max-problems", 1) == 0
    for row in place.rows("critic"):
        assert row["fusion"] == "best_of"
        assert row["scaffold_error"].startswith(reason)
        assert row["rewards"]["r_fusion"] == 0.0
        assert parse_plan(row["fused_scaffold"])  # the best proposal
    assert place.summary("critic")["fusions"] == {"best_of": 3}
    assert place.summary("critic")["plans"] == {reason.strip(": "): 3}


def test_too_few_valid_proposals_are_not_called_a_fusion(place, model):
    """In this case the critic's lessons are neither used nor credited."""
    only = [json.dumps(plan(31, 72))]  # one generator has one valid plan, the others have none
    model.scaffold = lambda prompt, seed: only.pop() if only else "no plan"
    assert place.run("all", "--max-problems", 1) == 0
    said = place.summary("critic")["learned"]
    assert said.startswith("nothing was learned: no generator has two valid plans")
    place.run_dir.rename(place.path / "first")
    place.libraries.mkdir(exist_ok=True)
    lesson = {"id": "C-001", "content": "Compare the units.", "category": CRITIC_CATEGORIES[0]}
    (place.libraries / "critic_experiences.json").write_text(json.dumps([lesson]))
    only = [json.dumps(plan(31, 72))]  # one generator has one valid plan, the others have none
    model.scaffold = lambda prompt, seed: only.pop() if only else "no plan"
    assert place.run("all", "--max-problems", 1) == 0
    rows = place.rows("critic")
    assert sorted(row["fusion"] for row in rows) == ["best_of", "none", "none"]
    for row in rows:
        assert row["rewards"]["r_fusion"] is None
        assert "r_fusion" not in row["r_total_of"]
    assert place.asked("fusion") == []
    assert rows[-1]["std"] == 0.0  # nothing to compare
    (item,) = place.items("critic")
    assert (item["usage_count"], item["success_count"]) == (0, 0)


def test_three_at_once_are_as_if_alone(tmp_path, server):
    together, alone = Place(tmp_path / "a", server), Place(tmp_path / "b", server)
    assert together.run("all", "--max-problems", 4) == 0
    for number in (3, 1, 2):
        assert alone.run("generator", number, "--max-problems", 4) == 0
    assert alone.run("critic") == 0
    assert_same(together, alone)


def test_the_critic_grades_with_the_tolerance_of_the_problem(place, model):
    write_problems(place.data, [row | {"rel_tol": 0.01} for row in problems(1)])
    model.answer = lambda prompt, seed: "Final answer: 2240"  # 0.4 % above 31 · 72
    assert place.run("all", "--max-problems", 1) == 0
    assert {r["is_correct"] for r in place.rows()[0]["rollouts"]} == {True}
    assert {row["is_correct"] for row in place.rows("critic")} == {True}


def test_the_critic_takes_the_problems_that_all_three_have(place, capsys):
    for number, count in ((1, 3), (3, 2)):
        assert place.run("generator", number, "--max-problems", count) == 0
    capsys.readouterr()
    assert place.run("critic") == 2
    assert "train generator 2" in one_line(capsys)
    assert place.run("generator", 2, "--max-problems", 1) == 0
    assert place.run("critic") == 0
    assert {row["problem_id"] for row in place.rows("critic")} == {"pens_000"}


# --- a judge --------------------------------------------------------------------------------


def test_the_critic_of_all_takes_the_problems_of_the_command(place, capsys):
    """Earlier records of the generators contain more problems, which the critic must not take."""
    for number in (1, 2, 3):
        assert place.run("generator", number, "--max-problems", 3) == 0
    assert place.run("all", "--max-problems", 1) == 0
    assert "critic: at most 7 requests" in capsys.readouterr().out
    assert {row["problem_id"] for row in place.rows("critic")} == {"pens_000"}


def test_a_judge_that_fails_is_null_and_counted(place, model):
    place.configure({})
    model.judge_logic = lambda prompt, seed: "I cannot judge this."
    assert place.run("generator", 1, "--max-problems", 2) == 0
    for row in place.rows():
        assert {r["r_logic"] for r in row["rollouts"]} == {None}
        assert {r["judge_error"] for r in row["rollouts"]} == {"no_json: the reply contains no {"}
        assert (row["mean"], row["std"]) == (None, 0.0)
    assert place.summary()["judge"] == {"failed": 6}
    assert place.asked("generator_extraction") == []


def test_all_roles_share_the_judge_and_its_limits(place, model):
    """With a concurrency of 1, only one of the three generators calls the judge at a time."""
    place.configure({"concurrency": 1})
    asking, most = [], []

    def judge_logic(prompt, seed):
        asking.append(seed)
        most.append(len(asking))
        time.sleep(0.01)
        asking.pop()
        return Model.judge_logic(model, prompt, seed)

    model.judge_logic = judge_logic
    assert place.run("all", "--max-problems", 2) == 0
    assert len(most) == 2 * 3 * 3 + 2 * 3
    assert max(most) == 1


# --- failures, limits, cost -----------------------------------------------------------------


def test_429_twice_and_then_success(place):
    place.server.script(refuse(429), refuse(429))
    assert place.run("generator", 1, "--max-problems", 1) == 0
    assert place.summary()["retries of this process"] == 2
    assert len(place.rows()) == 1


def test_plans_are_asked_for_by_schema_until_the_endpoint_refuses_one(place, capsys):
    assert place.run("generator", 1, "--max-problems", 1) == 0
    asked = {stage_of(body): body.get("response_format") for body in place.asked()}
    for stage in ("scaffold", "generator_extraction"):
        shape = asked[stage]["json_schema"]["schema"]
        assert (asked[stage]["type"], shape["type"]) == ("json_schema", "object")
    assert asked["answer"] is None
    assert "JSON schemas" not in capsys.readouterr().err
    place.server.script(refuse(422, "response_format is not offered"))
    assert place.run("generator", 1, "--max-problems", 3) == 0
    assert capsys.readouterr().err.count("continues without JSON schemas") == 1
    assert "response_format" not in place.asked("scaffold")[-1]
    assert place.summary()["failed calls"] == 0


@pytest.mark.parametrize(
    ("scaffold", "why"),
    [
        (lambda prompt, seed: "no plan", "nothing was learned: no reply was a valid plan (6 no_"),
        (lambda prompt, seed: json.dumps(plan(*numbers(prompt))), "σ ≤ 0.05 (0 of 6 attempts"),
    ],
)
def test_a_run_that_learned_nothing_says_why_and_what_to_type(place, model, capsys, scaffold, why):
    model.scaffold, model.answer = scaffold, lambda prompt, seed: "Final answer: 1"
    assert place.run("generator", 1, "--max-problems", 2) == 0
    learned = place.summary()["learned"]
    assert why in learned
    assert "python -m recipes.experience.select" in learned
    assert learned in capsys.readouterr().out


def test_a_call_that_fails_for_good_is_recorded_and_not_scored(place):
    place.configure(attempts=1)
    place.server.script(refuse(413, "prompt too long"))
    assert place.run("generator", 1, "--max-problems", 1) == 0
    (row,) = place.rows()
    failed = [r for r in row["rollouts"] if r["error"]]
    assert len(failed) == 1
    assert "prompt too long" in failed[0]["error"]
    assert {failed[0][name] for name in ("r_ans", "r_logic", "r_graph", "r_total")} == {None}
    assert place.summary()["failed calls"] == 1


def test_a_problem_that_is_always_rejected_does_not_block_the_run(place, model, capsys):
    """A rejected problem is recorded and not tried again; three in a row end the run."""
    rejected = {32, 34}

    def answer(body):
        if numbers(prompt_of(body))[0] in rejected:
            return refuse(400, "too long")
        return model(body)

    place.server.answer = answer
    assert place.run("all", "--max-problems", 4) == 0
    assert "generator_1: all requests for pens_001 failed: " in capsys.readouterr().err
    ids = ["pens_000", "pens_001", "pens_002", "pens_003"]
    assert [row["problem_id"] for row in place.rows()] == ids
    assert [row["problem_id"] for row in place.rows("critic")][::3] == ids
    assert place.rows()[1]["mean"] is None
    before = len(place.asked())
    assert place.run("all", "--max-problems", 4) == 0
    assert len(place.asked()) == before
    rejected.update(range(35, 45))
    assert place.run("generator", 1) == 2
    assert "all requests for pens_006 failed" in capsys.readouterr().err
    assert len(place.rows()) == 4  # these three are tried again: the options may be the cause


def test_a_call_that_fails_is_no_use_of_a_lesson(place):
    assert place.run("generator", 1, "--max-problems", 1) == 0
    place.configure(attempts=1)
    place.server.script(refuse(413, "prompt too long"))
    assert place.run("generator", 1, "--max-problems", 2) == 0
    sampled = place.rows()[1]["rollouts"]
    (lesson,) = place.rows()[1]["library_after"][:1]
    assert sum(r["error"] is None for r in sampled) == len(sampled) - 1 == lesson["usage_count"]


def test_a_problem_that_changed_under_its_id_is_refused(place, capsys):
    assert place.run("generator", 1, "--max-problems", 2) == 0
    rows = [json.loads(line) for line in place.data.read_text().splitlines()]
    rows[0]["question"] += " Tell."
    place.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    assert place.run("generator", 1, "--max-problems", 3) == 2
    assert "the problem pens_000 has changed since" in one_line(capsys)
    for number in (2, 3):
        assert place.run("generator", number, "--max-problems", 2) == 0
    capsys.readouterr()
    assert place.run("critic") == 2
    assert "practised on different problems with the id pens_000" in one_line(capsys)


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "generator_1: "),
        (404, "generator_1: "),
        (500, "generator_1: all requests for pens_000 failed"),
        (400, "generator_1: all requests for pens_000 failed"),
    ],
)
def test_an_endpoint_that_always_fails_ends_the_run_and_records_nothing(
    place, status, says, capsys
):
    place.configure(api_key=KEY, attempts=2)
    place.server.script(*[refuse(status, f"bad key {KEY}")] * 100)
    assert place.run("generator", 1, "--max-problems", 1) == 2
    output = capsys.readouterr()
    assert f"error: {says}" in output.err
    place_of_key = f"GENERATOR_1_API_KEY, or generator_1 in {place.config}"
    assert (place_of_key in output.err) is (status == 401)
    assert KEY not in output.err + output.out
    assert "Traceback" not in output.err
    assert place.rows() == []


PRICE = {"prompt": 0.0, "completion": 1e6}  # a token written costs 1; the server writes 5 a reply


def test_the_cost_cap_holds_with_concurrent_calls_and_can_be_raised(place, capsys):
    place.configure(price=PRICE, concurrency=8)
    place.server.delay = 0.01
    options = ("generator", 1, "--max-problems", 3, "--rollouts", 5, "--max-tokens", 10)
    assert place.run(*options, "--max-cost", 83) == 2
    output = capsys.readouterr()
    assert "error: stopped at a cost of" in output.err
    paid = len(place.asked())
    assert 5 * paid <= 83
    assert 5 * (paid + 2) > 83  # what could not pass the cap was sent
    assert place.summary()["in all"]["cost"] == 5 * paid
    assert place.run(*options, "--max-cost", 83) == 2  # the earlier cost counts
    assert len(place.asked()) == paid
    assert place.run(*options, "--max-cost", 1000) == 0
    assert len(place.rows()) == 3
    seeds = [body["seed"] for body in place.asked()]
    assert len(set(seeds)) == len(seeds)  # no paid call was repeated


def test_a_cap_needs_prices(place, capsys):
    """Without a price, the cost would not be counted. This also holds for the judge."""
    assert place.run("generator", 1, "--max-cost", 1) == 2
    assert "--max-cost requires a price for generator_1 in" in capsys.readouterr().err
    place.configure({"base_url": "https://api.example/v1", "api_key": KEY})
    roles = json.loads(place.config.read_text())
    for name in ROLES:
        roles[name]["price"] = PRICE
    place.config.write_text(json.dumps(roles))
    assert place.run("all", "--max-cost", 1) == 2
    assert "--max-cost requires a price for judge in" in capsys.readouterr().err
    assert place.asked() == []


def test_costs_are_accounted_by_role_and_stage(place):
    place.configure({}, price={"prompt": 1000.0, "completion": 100_000.0})
    assert place.run("generator", 1, "--max-problems", 2) == 0
    summary = place.summary()
    # 10 tokens read for 0.001 each, 5 written for 0.1 each, of 6 requests.
    expected = {"calls": 6, "prompt_tokens": 60, "completion_tokens": 30}
    expected["cost"] = pytest.approx(3.06)
    for name in ("generator_1: scaffold", "generator_1: answer", "judge: judge_logic"):
        assert summary[name] == expected
    assert {body["temperature"] for body in place.asked("judge_logic")} == {0.0}
    rollouts = [r for row in place.rows() for r in row["rollouts"]]
    assert {(r["r_logic"], r["scored_by"]["logic"]) for r in rollouts} == {(0.75, "judge")}
    assert summary["judge"] == {"scored": 6}
    assert place.run("generator", 1, "--max-problems", 2) == 0
    assert place.summary()["in all"] == summary["in all"]  # the run's, not the process's


# --- interruptions --------------------------------------------------------------------------


def start(place, *command) -> subprocess.Popen:
    data = () if command[0] == "critic" else ("--dataset", place.data)
    return subprocess.Popen(
        [sys.executable, "-m", "recipes.experience.train", *place.arguments(*command, *data)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # If the tests run in the background, they ignore Ctrl-C, and child processes do so, too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_lines(path: Path, count: int, process: subprocess.Popen) -> None:
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert process.poll() is None
        time.sleep(0.01)


class Killed(BaseException):
    """An exception that the program does not catch."""


def test_a_kill_after_any_paid_call_repeats_none(tmp_path, server, monkeypatch):
    whole = Place(tmp_path / "whole", server)
    options = ("generator", 1, "--max-problems", 2, "--rollouts", 2)
    assert whole.run(*options) == 0
    total, add = len(whole.asked()), Journal.add
    assert total >= 8
    for calls in range(1, total + 1):
        place, added = Place(tmp_path / f"after {calls}", server), []

        def add_and_die(journal, key, row, added=added, calls=calls):
            add(journal, key, row)
            added.append(key)
            if len(added) >= calls:
                raise Killed

        server.requests.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "add", add_and_die)
            with pytest.raises(Killed):
                place.run(*options)
        assert place.run(*options) == 0
        assert len(place.asked()) == total
        assert_same(place, whole)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_beside_the_library_is_made_good(tmp_path, server, monkeypatch, when):
    whole, place = Place(tmp_path / "whole", server), Place(tmp_path / "place", server)
    assert whole.run("all", "--max-problems", 3) == 0
    save = Library.save
    for name, number in (("generator_1", 1), ("generator_1", 2), ("critic", 1)):
        saves = []

        def save_and_die(library, name=name, number=number, saves=saves):
            saves.append(library.role)
            dies = saves.count(name) == number
            if when == "after" or not dies:
                save(library)
            if dies:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(Library, "save", save_and_die)
            with pytest.raises(Killed):
                place.run("all", "--max-problems", 3)
    assert place.run("all", "--max-problems", 3) == 0
    assert_same(place, whole)


@pytest.mark.parametrize("name", ["generator_1_rollouts", "generator_1_calls", "critic_results"])
def test_a_cache_cut_anywhere_is_repaired(tmp_path, server, name):
    whole = Place(tmp_path / "whole", server)
    assert whole.run("all", "--max-problems", 3) == 0
    content = (whole.run_dir / f"{name}.jsonl").read_bytes()
    lines = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in (lines[-1] - 1, (lines[-2] + lines[-1]) // 2, lines[-2] - 9, lines[-2]):
        (whole.run_dir / f"{name}.jsonl").write_bytes(content[:cut])
        server.requests.clear()
        assert whole.run("all", "--max-problems", 3) == 0
        rows = whole.rows("critic" if "critic" in name else "generator_1")
        count = 9 if "critic" in name else 3
        assert len({(r["problem_id"], r["generator_id"]) for r in rows}) == len(rows) == count
        if "calls" in name or "critic" in name:
            assert whole.asked() == []  # replayed from the journal, or not needed at all


def test_damaged_options_are_one_line(place, capsys):
    assert place.run("generator", 1, "--max-problems", 1) == 0
    for content in ("", '{"tau": 0.0', "[1]", "\0" * 9):
        (place.run_dir / "generator_1_config.json").write_text(content)
        capsys.readouterr()
        assert place.run("generator", 1, "--max-problems", 1) == 2
        assert "generator_1_config.json is not a JSON object" in one_line(capsys)


def test_replies_are_stored_by_endpoint_and_weights(tmp_path):
    """After training, the same name refers to other weights."""
    journal = Journal(tmp_path / "calls.jsonl")

    def ask(server, name="base"):
        entry = {"base_url": server.url, "model": name}
        (tmp_path / "api.json").write_text(json.dumps({"critic": entry}))
        endpoint = load_endpoints(["critic"], tmp_path / "api.json", {})["critic"]
        given = (endpoint, endpoint.client(Budget()), journal, agent.load_prompts())
        asker = agent.Agent("critic", *given, temperature=0.0, max_tokens=9)
        return asker.ask("question", "1", {"problem": "2 + 2?"}).text

    def served(base, adapter):
        return {"model": {"base_hash": base}, "about": {"tuned": {"sha256": adapter}}}

    with ScriptedServer(lambda body: "old") as one, ScriptedServer(lambda body: "other") as two:
        assert (ask(one), ask(two)) == ("old", "other")
        one.info = served("a", "b")
        assert (ask(one), ask(one, "tuned")) == ("old", "old")
        one.answer = lambda body: "new"
        assert (ask(one), ask(one, "tuned")) == ("old", "old")
        one.info = served("a", "c")  # the adapter alone was trained again
        assert (ask(one), ask(one, "tuned")) == ("old", "new")
        one.info = served("d", "c")
        assert ask(one) == "new"
        one.info = served("a", "b")
        assert (ask(one), ask(one, "tuned")) == ("old", "old")
        assert len(one.asked("chat/completions")) == 5


def test_a_run_does_not_go_on_with_other_weights(place, server, capsys):
    server.info = {"model": {"base_hash": "a"}}
    assert place.run("generator", 1, "--max-problems", 1) == 0
    server.info = {"model": {"base_hash": "b"}}
    capsys.readouterr()
    assert place.run("generator", 1, "--max-problems", 2) == 2
    assert "generator_1 weights base a (now base b)" in one_line(capsys)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        pytest.param("generator_1", signal.SIGINT, marks=pytest.mark.slow),
        ("critic", signal.SIGINT),
        pytest.param("generator_1", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_ended_goes_on(tmp_path, server, capsys, name, sent):
    """Ctrl-C ends the process after the current problem, and a kill ends it at once."""
    whole, place = Place(tmp_path / "whole", server), Place(tmp_path / "place", server)
    assert whole.run("all", "--max-problems", 3) == 0
    if name == "critic":
        for number in (1, 2, 3):
            assert place.run("generator", number, "--max-problems", 3) == 0
    target = ["critic"] if name == "critic" else ["generator", 1, "--max-problems", 3]
    server.delay = 0.2
    process = start(place, *target)
    wait_for_lines(place.run_dir / f"{name}_calls.jsonl", 9, process)
    wait_for_lines(records_path(place.run_dir, name), 1, process)
    process.send_signal(sent)
    assert "Traceback" not in process.communicate(timeout=60)[1]
    if sent == signal.SIGINT:
        assert process.returncode == 130
        assert place.summary(name)["problems"] == 2  # the first and the current problem
    server.delay = 0.0
    capsys.readouterr()
    assert place.run(*target) == 0
    out, said = capsys.readouterr()
    assert f"{name}: 100%" in said
    assert re.search(rf"  {name}: μ=0\.\d{{3}}, σ=0\.\d{{3}} → (Extract \(σ>τ\)|Skip)", said)
    assert "plans: 9 parsed" in out
    assert place.run("all", "--max-problems", 3) == 0
    assert_same(place, whole)


def test_two_processes_on_one_run_are_refused(place, capsys):
    for directory in (place.run_dir, place.libraries):  # other runs may have the same library
        directory.mkdir(exist_ok=True)
        with lock_file(directory / ".generator_1.lock", "here", ""):
            assert place.run("generator", 1) == 2
        assert re.search(f"{directory}: process .* runs generator_1", capsys.readouterr().err)
    place.libraries = place.run_dir  # one lock then
    assert place.run("generator", 1, "--max-problems", 1) == 0


def test_other_options_do_not_mix_with_a_run(place, capsys):
    place.configure({})
    assert place.run("generator", 1, "--max-problems", 1) == 0
    assert place.run("generator", 1, "--max-problems", 1, "--rollouts", 5) == 2
    assert "rollouts 3 (now 5)" in capsys.readouterr().err
    place.configure()
    assert place.run("generator", 1, "--max-problems", 2) == 2
    assert "judge model m (now None)" in capsys.readouterr().err
    place.configure({})
    assert place.run("generator", 1, "--max-problems", 2) == 0


# --- mistakes -------------------------------------------------------------------------------


def test_keys_before_caches_before_data(place, capsys, monkeypatch):
    monkeypatch.chdir(place.path)
    place.run_dir.mkdir()
    roles = {name: {"api_key": KEY, "base_url": "https://api.example.org/v1"} for name in ROLES}
    for command in (["generator", 1], ["generator", 2], ["generator", 3], ["critic"], ["all"]):
        name = f"generator_{command[1]}" if len(command) == 2 else "critic"
        missing = {role: entry for role, entry in roles.items() if role != name}
        place.config.write_text(json.dumps(missing))
        place.data = "no such dataset"
        assert place.run(*command) == 2
        error = one_line(capsys)
        assert f"API key not found for {name}" in error
        assert f"{name.upper()}_API_KEY" in error
        assert KEY not in error
    place.configure()
    assert place.run("critic") == 2
    error = one_line(capsys)
    assert "Rollouts file not found" in error
    assert f"python -m recipes.experience.train generator 1 --run-dir {place.run_dir}" in error
    (place.run_dir / "generator_1_rollouts.jsonl").write_text("not JSON\n")
    assert place.run("generator", 1) == 2
    assert "line 1 is not a JSON" in one_line(capsys)
    (place.run_dir / "generator_1_rollouts.jsonl").unlink()
    assert place.run("generator", 1) == 2
    assert "no such dataset" in one_line(capsys)
    assert place.server.requests == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rel_tol": "1 %"}, "rel_tol must be a fraction"),
        ({"rel_tol": 1.5}, "rel_tol must be a fraction"),
        ({"rel_tol": -0.1}, "rel_tol must be a fraction"),
        ({"rel_tol": [0.01]}, "rel_tol must be a fraction"),
        ({"answer": "B", "answer_type": "choice"}, "answers of the type choice"),
    ],
    ids=str,
)
def test_problems_that_cannot_be_graded_are_refused_at_the_start(place, capsys, changes, says):
    write_problems(place.data, [row | changes for row in problems(1)])
    assert place.run("all") == 2
    assert says in one_line(capsys)
    assert place.asked() == []


@pytest.mark.parametrize(
    ("script", "option"),
    [
        (train, "--run-dir"),
        (train, "--library-dir"),
        (select, "--run-dir"),
        (select, "--library-dir"),
        (evaluate, "--run-dir"),
    ],
)
def test_a_folder_that_cannot_be_written_is_told_before_any_request(place, capsys, script, option):
    file = place.path / "file"
    file.write_text("mine")
    options = {"--api-config": place.config, "--dataset": place.data, "--run-dir": place.run_dir}
    config = {train: train.TrainConfig, select: select.SelectConfig}.get(script)
    options |= {"--library-dir": place.libraries} if config else {"--library": ""}
    words = [word for pair in (options | {option: file}).items() for word in pair]
    assert exit_code(script, config or evaluate.EvaluateConfig, *words) == 2
    assert f"{option} {file} cannot be written" in one_line(capsys)
    assert place.asked() == []


def test_no_server_or_no_settings_are_one_line(place, capsys, monkeypatch):
    with ScriptedServer() as gone:
        url = gone.url
    place.config.write_text(json.dumps({"generator_1": {"base_url": url}}))
    assert place.run("generator", 1) == 2
    error = one_line(capsys)
    assert f"generator_1: no server answers at {url}" in error
    assert "server.py" not in error
    monkeypatch.setattr(agent, "OWN_SERVER", {"base_url": url})
    assert place.run("generator", 1) == 2
    advice = "start python server.py, or write your endpoints to data/api_keys/api_config.json"
    assert advice in one_line(capsys)
    place.config.unlink()  # no other model is selected
    assert place.run("generator", 1) == 2
    assert f"--api-config {place.config} does not exist" in one_line(capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        "generator", "generator 4", "generator1 2", "critic 1", "nobody", "all --rollouts 1",
        "--samples 0", "--role critic",  # of evaluate
    ],
)  # fmt: skip
def test_flags_that_make_no_sense(arguments):
    config = evaluate.EvaluateConfig if arguments.startswith("--") else train.TrainConfig
    with pytest.raises(UsageError) as refused:
        parse(config, arguments.split())
    assert "\n" not in str(refused.value)


def test_a_generator_is_named_in_one_word_or_two():
    one, two = (parse(train.TrainConfig, typed.split()) for typed in ("generator_2", "generator 2"))
    assert one == two


# --- settings -------------------------------------------------------------------------------


def test_the_example_has_every_role_and_the_real_file_is_ignored():
    example = ROOT / "data/api_keys/api_config.json.example"
    roles = json.loads(example.read_text())
    assert set(roles) == {*ROLES, "judge"}
    for entry in roles.values():
        assert Endpoint.model_validate(entry).api_key.get_secret_value() == ""
    if (ROOT / ".git").exists() and shutil.which("git"):
        names = ["data/api_keys/api_config.json", "data/grpo_experiences/critic_experiences.json"]
        check = subprocess.run(
            ["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert check.stdout.split() == names


def test_endpoints_from_the_file_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = load_endpoints(["critic", "judge"], environment={})
    assert own["critic"].base_url == "http://127.0.0.1:8000/v1"
    assert own["critic"].max_tokens <= ServerConfig.max_new_tokens  # that of `python server.py`
    assert set(own) == {"critic"}  # no judge
    path = tmp_path / "api_config.json"
    url = {"base_url": "https://api.example.org/v1"}
    path.write_text(json.dumps({"critic": {"api_key": "a"} | url, "math_expert": {"x": 1}}))
    assert load_endpoints(["critic"], path, {})["critic"].api_key.get_secret_value() == "a"
    given = {"CRITIC_API_KEY": "b", "CRITIC_MODEL": "m", "JUDGE_BASE_URL": "http://localhost:1/v1"}
    found = load_endpoints(["critic", "judge"], path, given)
    assert found["critic"].api_key.get_secret_value() == "b"
    assert (found["critic"].model, set(found)) == ("m", {"critic", "judge"})
    assert KEY not in repr(Endpoint(api_key=KEY))
    for url in ("http://127.0.0.1:1/v1", "http://localhost/v1", "http://[::1]:9"):  # need no key
        path.write_text(json.dumps({"critic": {"base_url": url}}))
        assert load_endpoints(["critic"], path, {})["critic"].base_url == url


@pytest.mark.parametrize(
    ("given", "is_ours"),
    [
        ({"MODEL": "base"}, True),
        ({"BASE_URL": "http://localhost:8000/v1"}, True),
        ({"BASE_URL": "http://127.0.0.1:8000", "API_KEY": "k", "MODEL": "base"}, True),
        ({"BASE_URL": "http://127.0.0.1:11434/v1"}, False),
        ({"BASE_URL": "https://api.example.org:8000/v1", "API_KEY": "k"}, False),
        ({"API_KEY": "k"}, None),  # the key has no URL
        ({"BASE_URL": "http://localhost:x/v1"}, False),
        ({"BASE_URL": "http://[::1:8000/v1"}, None),
    ],
)
def test_variables_keep_the_defaults_of_our_server(tmp_path, monkeypatch, given, is_ours):
    monkeypatch.chdir(tmp_path)  # no file
    variables = {f"GENERATOR_1_{name}": value for name, value in given.items()}
    if is_ours is None:
        with pytest.raises(UsageError, match="base_url"):
            load_endpoints(["generator_1"], environment=variables)
        return
    endpoint = load_endpoints(["generator_1"], environment=variables)["generator_1"]
    own = Endpoint(**agent.OWN_SERVER) if is_ours else Endpoint()
    assert (endpoint.max_tokens, endpoint.concurrency) == (own.max_tokens, own.concurrency)
    assert endpoint.base_url == given.get("BASE_URL", own.base_url)
    assert endpoint.model == given.get("MODEL", "")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ('{"critic": "key"}', "not a JSON object with an object per role, as in data/api_keys"),
        ('{"critic": ["ab"]}', "not a JSON object with an object per role"),
        (f'{{"critic": {{"api_key": "{KEY}", "base_ulr": "x"}}}}', "base_ulr"),
        (f'{{"critic": {{"api_key": ["{KEY}"]}}}}', "api_key"),
        (f'{{"critic": {{"api_key": "{KEY}"}}}}', "no base_url"),
        ('{"critic": {"base_url": "http://x.example.org"}}', "API key not found for critic"),
        ('{"critic": {"base_url": "http://localhost", "concurrency": 0}}', "concurrency"),
        ('{"critic": {"base_url": "http://[::1:8000/v1"}}', "base_url: .*Invalid IPv6 URL"),
        (
            '{"critic": {"base_url": "http://localhost", "price": {"prompt": -1}}}',
            "price: .*least 0",
        ),
        (
            '{"critic": {"base_url": "http://localhost", "price": {"prompt": NaN}}}',
            "price: .*least 0",
        ),
    ],
)
def test_bad_settings_are_one_line_without_the_key(tmp_path, content, says):
    path = tmp_path / "api_config.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=says) as refused:
        load_endpoints(["critic"], path, {})
    assert KEY not in str(refused.value)
    assert KEY not in "".join(traceback.format_exception(refused.value))


def test_reasoning_that_comes_apart_is_kept(place):
    reply = chat_reply("Final answer: 2232")
    reply.body["choices"][0]["message"]["reasoning_content"] = "31 times 72"
    place.model.answer = lambda prompt, seed: reply
    assert place.run("generator", 1, "--max-problems", 1, "--rollouts", 2) == 0
    for rollout in place.rows()[0]["rollouts"]:
        assert rollout["solution"] == "<think>31 times 72</think>Final answer: 2232"
        assert rollout["is_correct"]
