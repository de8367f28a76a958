"""Lessons that improve a model's accuracy, and their evaluation and libraries."""

import json
import re
import time
from types import SimpleNamespace

import pytest
from conftest import exit_code
from scripted_model import Model, operations, plan, write_endpoints, write_problems
from scripted_server import ScriptedServer, refuse

from recipes.experience import evaluate, train
from recipes.experience.agent import GENERATORS
from rlm.cli.options import UsageError
from rlm.data.loaders import load_problems
from rlm.data.problem import Problem

GROSS = 144
LESSON = "One gross is {} pieces: multiply the number of gross by {}."


def gross_problems(count: int, start: int = 3) -> list[dict[str, str]]:
    return [
        {
            "id": f"gross_{n}",
            "question": f"A crate holds {n} gross of pens. How many pens is that?",
            "answer": str(n * GROSS),
        }
        for n in range(start, start + count)
    ]


class Clerk(Model):
    """Mistakes a gross for a dozen in two of three answers, unless a lesson states the factor.

    From a comparison, the model extracts the factor of an attempt that is marked as right.
    """

    def factor(self, prompt: str, seed: int) -> int:
        lesson = re.search(LESSON.format(r"(\d+)", r"\d+"), prompt)
        return int(lesson[1]) if lesson else GROSS if seed % 3 == 0 else 12

    def count(self, prompt: str) -> int:
        return int(re.search(r"holds (\d+) gross", prompt)[1])

    def scaffold(self, prompt, seed):
        return json.dumps(plan(self.count(prompt), 1, f"held * {self.factor(prompt, seed)}"))

    def answer(self, prompt, seed):
        factor = int(re.search(r"held \* (\d+)", prompt)[1])
        return f"Final answer: {self.count(prompt) * factor}"

    def fusion(self, prompt, seed):
        rules = re.findall(r"held \* (\d+)", prompt)
        return json.dumps(plan(self.count(prompt), 1, f"held * {rules[seed % len(rules)]}"))

    def generator_extraction(self, prompt, seed):
        listing = prompt.partition("Your library")[0]
        factor = re.search(r"Attempt \d+ \(right.*?\nPlan: .*?held \* (\d+)", listing)[1]
        return operations(
            {"action": "add", "content": LESSON.format(factor, factor), "category": "validation"},
            {"action": "add", "content": f"So it is {self.count(prompt) * GROSS}."},
        )

    def critic_extraction(self, prompt, seed):
        lesson = "Prefer the rule that most proposals share."
        return operations({"action": "add", "content": lesson, "category": "fusion_strategy"})

    def solve(self, prompt, seed):
        return f"Final answer: {self.count(prompt) * self.factor(prompt, seed)}"


@pytest.fixture(scope="module")
def practised(tmp_path_factory):
    """Run the whole recipe with a server whose model can learn one lesson."""
    path = tmp_path_factory.mktemp("clerk")
    with ScriptedServer(Clerk()) as server:
        price = {"prompt": 100.0, "completion": 1000.0}
        write_endpoints(path / "api.json", server.url, price=price)
        data = write_problems(path / "practice.jsonl", gross_problems(8))
        write_problems(path / "unseen.jsonl", gross_problems(24, start=50))
        # With this seed, each generator's first group with different rewards has one right attempt.
        options = ("--seed", 5, "--library-dir", path / "lib")
        assert run(path, train, "all", "--dataset", data, *options) == 0
        yield path, server


def run(path, module, *arguments) -> int:
    config = {train: train.TrainConfig}.get(module) or evaluate.EvaluateConfig
    where = ["--api-config", path / "api.json", "--run-dir", path / "run"]
    return exit_code(module, config, *arguments, *where)


def library(path, name="generator_1"):
    return path / "lib" / f"{name}_experiences.json"


def evaluation(path) -> dict[str, dict]:
    return json.loads((path / "run" / "evaluation.json").read_text())["rows"]


def lessons(path) -> dict[str, list[str]]:
    found = json.loads((path / "run" / "evaluation.json").read_text())["lessons"]
    return {name: [lesson["content"] for lesson in listed] for name, listed in found.items()}


def test_the_loop_finds_and_keeps_the_lesson_that_matters(practised):
    path, _ = practised
    for name in GENERATORS:
        (item,) = json.loads(library(path, name).read_text())
        assert item["content"] == LESSON.format(GROSS, GROSS)
        # Every attempt with the lesson was right.
        assert item["success_count"] == item["usage_count"] > 0
        rows = [json.loads(line) for line in (path / "run" / f"{name}_rollouts.jsonl").open()]
        taught = [row["problem_id"] for row in rows].index(item["source_problem"])
        assert all(r["is_correct"] for row in rows[taught + 1 :] for r in row["rollouts"])
        refused = [d["reason"] for d in rows[taught]["extraction"]["operations"] if not d["kept"]]
        assert refused == ["too_many"]


def test_the_evaluation_shows_it_with_an_interval(practised, capsys):
    path, server = practised
    data = ("--dataset", path / "unseen.jsonl", "--library", library(path))
    server.requests.clear()
    assert run(path, evaluate, *data) == 0
    rows = evaluation(path)
    none, learned = rows["no library"], rows["generator_1_experiences"]
    assert none["problems"] == learned["problems"] == 24
    assert learned["accuracy"]["mean"] == 1.0
    # A third is right by chance: 96 answers of 24 problems.
    right = [body["seed"] % 3 == 0 for body in asked(server) if "Lessons" not in body["prompt"]]
    assert len(right) == 96
    assert none["accuracy"]["mean"] == pytest.approx(sum(right) / 96)
    assert none["accuracy"]["low"] < none["accuracy"]["mean"] < none["accuracy"]["high"] < 0.6
    points, low, high = learned["difference"].values()
    assert points == pytest.approx(100 * (1 - none["accuracy"]["mean"]))
    assert 40 < low < points < high
    # 10 tokens read and 5 written for each of 96 replies, for 0.0001 and 0.001 each.
    assert none["cost"] == pytest.approx(96 * 0.006)
    assert (none["tokens_read"], none["tokens_written"]) == (960, 480)
    shown = capsys.readouterr().out
    assert re.search(r"generator_1_experiences +1 +24 +100\.0 \(86–100\) +\+\d\d\.", shown)
    # Both rows use the same seeds, and no call is paid twice.
    seeds = [{b["seed"] for b in asked(server) if ("Lessons" in b["prompt"]) is w} for w in (0, 1)]
    assert seeds[0] == seeds[1]
    before = len(server.asked("chat/completions"))
    assert run(path, evaluate, *data) == 0
    assert len(server.asked("chat/completions")) == before
    assert evaluation(path) == rows


def asked(server) -> list[dict]:
    bodies = server.asked("chat/completions")
    return [body | {"prompt": body["messages"][-1]["content"]} for body in bodies]


def test_problems_of_the_practice_are_refused(practised, tmp_path, capsys):
    path, _ = practised
    data = ("--dataset", path / "practice.jsonl", "--library", library(path))
    assert run(path, evaluate, *data) == 2
    assert "all 8 problems" in capsys.readouterr().err
    assert run(path, evaluate, "--library", library(path)) == 2  # the run's own dataset
    assert "were used to make or to test the lessons" in capsys.readouterr().err
    # The libraries of all three generators are evaluated with any model.
    row = {"problem_text": gross_problems(1, start=51)[0]["question"]}
    (tmp_path / "generator_2_rollouts.jsonl").write_text(json.dumps(row) + "\n")
    config = evaluate.EvaluateConfig(dataset=str(path / "unseen.jsonl"), run_dir=tmp_path)
    left = [problem.id for problem in evaluate.load_unseen(config)]
    assert left == [row["id"] for row in gross_problems(24, start=50) if row["id"] != "gross_51"]
    assert "1 problems are left out: they were used to make" in capsys.readouterr().out
    config.max_problems = 2  # of the remaining problems
    assert len(evaluate.load_unseen(config)) == 2


def test_the_practice_of_another_run_is_left_out(practised, tmp_path):
    path, _ = practised
    where = {"dataset": str(path / "practice.jsonl"), "run_dir": tmp_path}
    with pytest.raises(UsageError, match="all 8 problems"):
        evaluate.load_unseen(evaluate.EvaluateConfig(library=(library(path),), **where))


@pytest.mark.parametrize(
    ("practised", "evaluated"),
    [
        ("aime2024", "aime2025"),
        ("HuggingFaceH4/aime_2024", "aime2025"),  # the name of the same dataset on the hub
        ("aime2025", "aime2024"),
        ("gsm8k", "gsm8k"),
    ],
)
def test_the_other_year_is_evaluated(tmp_path, monkeypatch, practised, evaluated):
    (tmp_path / "generator_1_config.json").write_text(json.dumps({"dataset": practised}))
    problem = Problem("p", "?", "1")
    monkeypatch.setattr(
        evaluate, "load_problem_set", lambda name, *_: [problem] * (name == evaluated)
    )
    config = evaluate.EvaluateConfig(run_dir=tmp_path, library=())
    assert evaluate.load_unseen(config) == [problem]


def test_ctrl_c_sends_no_queued_request():
    asked = []

    def ask(stage, seed, values, examples):
        asked.append(seed)
        if len(asked) == 1:
            raise KeyboardInterrupt
        time.sleep(0.05)

    agent = SimpleNamespace(name="g", client=SimpleNamespace(concurrency=1), ask=ask)
    with pytest.raises(KeyboardInterrupt):
        evaluate.answer_all(agent, [Problem("p", "?", "1")], [], samples=20, stage="solve")
    assert len(asked) < 5  # only calls that had already begun


def test_an_empty_library_costs_nothing_more(practised):
    path, server = practised
    (path / "empty.json").write_text("[]")
    server.requests.clear()
    data = ("--dataset", path / "unseen.jsonl", "--library", path / "empty.json")
    assert run(path, evaluate, *data, "--seed", 7, "--max-problems", 3) == 0
    assert len(asked(server)) == 12
    assert lessons(path)["empty"] == []
    assert set(evaluation(path)["empty"]["difference"].values()) == {0.0}


def test_a_failed_call_leaves_its_problem_out_of_every_row(practised, capsys):
    path, server = practised
    server.script(refuse(400, "too long"))
    data = ("--dataset", path / "unseen.jsonl", "--library", library(path))
    assert run(path, evaluate, *data, "--seed", 8, "--max-problems", 4) == 0
    assert {row["problems"] for row in evaluation(path).values()} == {3}
    assert re.search(r"gross_5\d: the request failed: .*400 .*too long", capsys.readouterr().out)


def test_without_a_run_or_with_odd_libraries_it_says_what_to_do(tmp_path, practised, capsys):
    path, _ = practised
    other = tmp_path / library(path).name
    (tmp_path / "api.json").write_text((path / "api.json").read_text())
    assert run(tmp_path, evaluate, "--library", library(path)) == 2
    assert "pass a --dataset" in capsys.readouterr().err
    assert run(tmp_path, evaluate, "--library", other) == 2
    assert "cannot read the library" in capsys.readouterr().err
    other.write_text("[]")
    assert run(path, evaluate, "--library", f"{library(path)},{other}") == 2
    said = capsys.readouterr().err  # two libraries have the same name
    assert (str(library(path)) in said, str(other) in said) == (True, True)
    keyless = {"generator_1": {"base_url": "https://api.example.org/v1"}}
    (tmp_path / "api.json").write_text(json.dumps(keyless))
    data = "no such dataset"  # a missing key is reported first
    assert run(tmp_path, evaluate, "--library", library(path), "--dataset", data) == 2
    assert "API key not found for generator_1" in capsys.readouterr().err


# --- what becomes of rollouts and lessons ---------------------------------------------------


def test_correct_rollouts_are_sft_data(practised):
    path, _ = practised
    file = path / "run" / "generator_1_rollouts.jsonl"
    rows = [json.loads(line) for line in file.open()]
    right = [(row, r) for row in rows for r in row["rollouts"] if r["is_correct"]]
    # The replies consist only of "Final answer: …", so there is nothing to learn.
    with pytest.raises(UsageError, match="contains no problems"):
        load_problems(f"rollouts:{file}", "train")
    for number, (_, r) in enumerate(right):
        thought = r["solution"].replace("Final", f"144 a gross ({number}).\n\n**Final")
        r["solution"] = thought if number % 2 else f"<think>As {number}.</think>{thought}"
    copy = path / "rollouts.jsonl"
    copy.write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = [load_problems(f"rollouts:{copy}", split) for split in ("train", "validation")]
    found = {problem.id: problem for problems in splits for problem in problems}
    assert len(found) == len(right)
    assert not {p.question for p in splits[0]} & {p.question for p in splits[1]}
    for number, (row, r) in enumerate(right):
        problem = found[f"{row['problem_id']}-generator_1-{r['rollout_id']}"]
        assert (problem.question, problem.answer) == (row["problem_text"], row["ground_truth"])
        assert problem.solution == (f"144 a gross ({number})." if number % 2 else f"As {number}.")


@pytest.mark.parametrize("row", ["{", "{}", '{"rollouts": [{}]}', '{"rollouts": 3}'])
def test_what_is_no_rollouts_file_is_refused(tmp_path, row):
    file = tmp_path / "x.jsonl"
    file.write_text(row + "\n")
    with pytest.raises(UsageError, match="line 1"):
        load_problems(f"rollouts:{file}", "train")
    with pytest.raises(UsageError, match="name the file"):
        load_problems("rollouts", "train")


def test_invalid_lines_are_counted_against_rows_not_rollouts(tmp_path):
    row = {"problem_id": "a", "generator_id": "b", "problem_text": "1 + 1?", "ground_truth": "2"}
    right = {"is_correct": True, "solution": "<think>so</think>2"}
    row["rollouts"] = [right | {"rollout_id": str(n)} for n in range(30)]
    file = tmp_path / "x.jsonl"
    file.write_text(f"{json.dumps(row)}\n{{\n")
    with pytest.raises(UsageError, match="1 of 2 lines are invalid"):
        load_problems(f"rollouts:{file}", "train")
