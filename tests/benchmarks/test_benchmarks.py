"""The benchmarks with a tiny model; these tests check results, but no speeds."""

import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from conftest import tiny_model
from expected_skips import needs_git

from benchmarks import (
    batch_invariance,
    grpo_step,
    harness,
    rollout,
    samplers,
    serving,
    structured_outputs,
    trainers,
)
from rlm.cli import UsageError, run_main, to_dict
from rlm.sampling import Sampler

ROOT = Path(__file__).parents[2]
PROMPTS, SEEDS = [[10, 11, 12, 13, 14], [10, 11, 20]], [1, 100]


def test_a_bit_that_depends_on_the_batch_is_noticed(model_dir, tmp_path, monkeypatch, capsys):
    report = tmp_path / "report.json"
    config = batch_invariance.BatchInvarianceConfig(
        model=str(model_dir), json=report, threads=(1,), completions=8, max_new_tokens=4
    )
    assert batch_invariance.main(config) == 0
    found = json.loads(report.read_text())
    assert found["equal"]
    assert {row["completions"] for row in found["completions"]["float32"]["settings"].values()} == {
        8
    }
    usual = Sampler.sample

    def moved(sampler, *arguments):
        sampler.batch_note = None  # as if the matmuls were compiled
        groups = usual(sampler, *arguments)
        groups[0][5].logprobs[-1] -= 1e-6 * sampler.max_num_seqs
        return groups

    monkeypatch.setattr(Sampler, "sample", moved)
    assert batch_invariance.main(config) == 1
    assert "16, 1 threads: 1 of 8 completions differ" in capsys.readouterr().out


# --- the harness --------------------------------------------------------------------------------


def test_arms_alternate_on_the_same_work_after_a_warm_up(monkeypatch):
    seen = []
    arms = {name: lambda i, name=name: seen.append((name, i)) or 10 * i for name in "ab"}
    assert harness.alternate(arms, repeats=2) == {"a": [10, 20], "b": [10, 20]}
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    lines = []
    monkeypatch.setattr(harness.terminal, "line", lines.append)
    found = harness.alternate(
        {"a": lambda i: i}, repeats=2, warm_up=False, say=lambda *what: f"{what}"
    )
    assert found == {"a": [1, 2]}
    assert lines == ["[1 of 2] ('a', 1, 1); about 0 s left", "[2 of 2] ('a', 2, 2)"]


def test_a_rate_and_a_time_both_say_that_ours_is_ahead():
    rates = harness.cell(
        "c", "tokens/s", {"ours": [10.0, 30.0, 20.0], "peer": [5.0, 5.0, 20.0]}, more_is_better=True
    )
    assert rates["arms"]["ours"] == {
        "runs": [10.0, 30.0, 20.0], "median": 20.0, "min": 10.0, "max": 30.0
    }  # fmt: skip
    assert rates["ratio"] == {"peer": 4.0}  # of the medians, 20 and 5
    assert rates["ratio_range"] == {"peer": [1.0, 6.0]}
    times = harness.cell("c", "s", {"ours": [2.0], "peer": [8.0]}, more_is_better=False)
    assert times["ratio"] == {"peer": 4.0}
    with pytest.raises(ValueError, match="shorter"):
        harness.cell("c", "s", {"ours": [1.0, 2.0], "peer": [1.0]}, more_is_better=False)


def test_a_report_says_what_it_takes_to_run_it_again(tmp_path, capsys):
    cell = harness.cell("64 rows", "s", {"ours": [1.0], "peer": [2.0]}, more_is_better=False)
    report = harness.report("rollout", cell, [cell], {"ours": 1.0, "peer": 4.0}, extra=1)
    harness.write_report(tmp_path / "new" / "report.json", report)
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert report["ratio"] == {"peer": 2.0}
    assert report["memory_ratio"] == {"peer": 0.25}  # ours over the peer's
    assert (report["headline"], report["extra"], len(report["cells"])) == ("64 rows", 1, 1)
    assert report["command"].startswith("python -m benchmarks.rollout")
    assert {"commit", "date"} <= set(report)
    machine = {"cpu", "cores", "threads", "dtype", "instruction_sets", "versions"}
    assert machine <= set(report["machine"])
    assert set(report["machine"]["versions"]) == {"torch", "transformers", "trl", "peft"}
    harness.show("t", [cell | {"note": "of the floor"}])
    shown = capsys.readouterr().out
    for text in ("64 rows, s", "2.00 ×", "of the floor"):
        assert text in shown


@pytest.mark.slow
def test_a_child_returns_its_dict_and_its_peak_memory():
    result = harness.run_child("builtins", "dict", {"a": 1})
    assert result["a"] == 1
    assert 0.05 < result["peak_memory_gb"] < 4
    with pytest.raises(harness.ChildFailed, match="missing 1 required"):  # its last words
        harness.run_child("json", "loads", {"nonsense": 1})


@pytest.mark.slow
def test_a_child_ends_when_its_parent_is_killed(tmp_path, monkeypatch):
    (tmp_path / "begin_and_end.py").write_text(
        "import os, time\n"
        "def say(fd):\n"
        "    for word in (b'b', b'e'):\n"
        "        os.write(fd, word)\n"
        "        time.sleep(20)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    read, write = os.pipe()
    run = f"run_child('begin_and_end', 'say', dict(fd={write}), inherited=[{write}])"
    code = f"from benchmarks.harness import run_child; {run}"
    parent = subprocess.Popen([sys.executable, "-c", code], pass_fds=[write])
    os.close(write)
    assert os.read(read, 1) == b"b"
    parent.kill()
    parent.wait()
    assert os.read(read, 1) == b""  # closed by the child's end, before it says e
    os.close(read)


@needs_git
def test_the_commit_is_marked_where_files_were_changed(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        name = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *name, *words], check=True)

    git("init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    git("add", "code.py")
    git("commit", "-q", "-m", "x")
    (tmp_path / "notes").write_text("untracked")
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setattr(harness, "git_commit", lambda: 40 * "a")
    assert harness.code_commit() == 40 * "a"
    (tmp_path / "code.py").write_text("2\n")
    assert harness.code_commit() == 40 * "a" + "-dirty"
    monkeypatch.setattr(harness, "git_commit", lambda: None)  # no checkout
    assert harness.code_commit() is None


# --- rollouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["ours", "generate", "generate, static cache"])
def test_arms_draw_as_many_tokens_as_asked_for(tokenizer, arm):
    options = {"cache_implementation": "static"} if "static" in arm else {}
    if arm == "ours":
        arm = samplers.Ours(Sampler(tiny_model(), tokenizer))
    else:
        arm = samplers.Generate(tiny_model(), options)
    assert arm.draw(PROMPTS, [[7] * 3] * 2, SEEDS, 6) == 2 * 3 * 7
    # `generate` in batches of 4 rows: it raises by itself unless each ends with its longest row.
    assert arm.draw(PROMPTS, [[1, 9, 2], [4, 1, 3]], SEEDS, 4) == 20


def test_a_rate_of_too_few_tokens_is_refused():
    assert rollout.rate(lambda: 5, 5) > 0
    with pytest.raises(RuntimeError, match="generated 4 tokens instead of 5"):
        rollout.rate(lambda: 4, 5)


class _Completions(BaseHTTPRequestHandler):
    asked: list[dict] = []  # noqa: RUF012

    def do_GET(self):
        self._send(json.dumps({"data": [{"id": "served"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body.get("stream"):
            content, usage = {"choices": [{"delta": {"content": "5"}}]}, {"completion_tokens": 3}
            chunks = [json.dumps(content), json.dumps({"choices": [], "usage": usage}), "[DONE]"]
            return self._send("".join(f"data: {chunk}\n\n" for chunk in chunks))
        drawn = body["n"] * body["max_tokens"]
        self._send(json.dumps({"usage": {"prompt_tokens": 5, "completion_tokens": drawn}}))

    def _send(self, text):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def vllm():
    _Completions.asked.clear()
    with HTTPServer(("127.0.0.1", 0), _Completions) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        yield samplers.VLLM(f"http://127.0.0.1:{http.server_port}/v1")
        http.shutdown()


def test_vllm_gets_one_request_a_prompt_or_a_row_and_nothing_that_filters(vllm):
    assert vllm.draw(PROMPTS, [[7] * 3] * 2, SEEDS, 6) == 42
    assert sorted(body["prompt"] for body in _Completions.asked) == sorted(PROMPTS)
    body = _Completions.asked[0]
    assert (body["model"], body["n"], body["max_tokens"]) == ("served", 3, 7)
    assert (body["temperature"], body["top_p"], body["top_k"]) == (1.0, 1.0, -1)
    assert body["ignore_eos"]
    assert vllm.draw(PROMPTS, [[1, 9, 2], [4, 1, 3]], SEEDS, 6) == 20  # each of its own length
    asked = _Completions.asked[2:]
    assert sorted(body["max_tokens"] for body in asked) == [1, 1, 2, 3, 4, 9]
    assert len({body["seed"] for body in asked}) == 6


def test_a_server_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match="refused"):
        samplers.VLLM("http://127.0.0.1:9")


def test_two_servers_are_asked_in_turns_in_a_row_and_at_once(vllm, capsys):
    config = serving.ServingConfig(requests=2, repeats=1)
    servers = {
        "ours": serving.Server(vllm.client.url, "base", []),
        serving.PEER: serving.Server(vllm.client.url, "m", [serving.SYSTEM]),
    }
    report = serving.measure(config, servers)
    asked = [body for body in _Completions.asked if "messages" in body]
    assert len(asked) == 2 * 2 * 2 * 2  # servers, requests, a warm-up, in a row and at once
    for ours, theirs in zip(asked[0:2], asked[2:4], strict=True):
        assert theirs["messages"] == [serving.SYSTEM, *ours["messages"]]
        assert (ours["model"], theirs["model"], theirs["max_tokens"]) == ("base", "m", 64)
    assert [cell["unit"] for cell in report["cells"]][::2] == list(serving.FIGURES)
    assert set(report["ratio"]) == {serving.PEER}


def test_the_other_server_computes_in_the_dtype_of_the_machine(monkeypatch):
    """`generate` and TRL get this dtype, too. Our server selects its dtype by itself."""
    started = []

    @contextmanager
    def server_process(command, **_):
        started.append(command)
        yield "http://127.0.0.1:9", None

    monkeypatch.setattr(serving, "server_process", server_process)
    monkeypatch.setattr(serving, "measure", lambda *_: {})
    monkeypatch.setattr(harness, "describe_machine", lambda: {"dtype": "bfloat16"})
    assert serving.main(serving.ServingConfig()) == 0
    assert [command[command.index("--dtype") + 1] for command in started[1:]] == ["bfloat16"]


# --- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "second"), [("half", [0, 0, 0]), ("all", [1, 0, 1])])
def test_scripted_rewards_are_a_second_clock(kind, second):
    """Either every second group has signal, or all groups have."""
    reward = trainers.ScriptedReward(kind, group_size=3)
    assert reward.score(completions=["x"] * 9, answer=["1"] * 9) == [1, 0, 1, *second, 1, 0, 1]
    reward.score(completions=["x"] * 9)
    steps = [{"sample": 1.0, "score": 2.0, "learn": 4.0, "length_mean": 8.0} for _ in range(2)]
    result = reward.result(steps)
    assert [step["total"] for step in result["steps"]] == [7.0, 7.0]
    assert len(result["between_calls"]) == 1


@pytest.fixture(scope="module")
def step_config(model_dir):
    return grpo_step.GRPOStepConfig(
        model=str(model_dir), batch_size=2, group_size=2, max_new_tokens=4, trl_batch=2, steps=1
    )


@pytest.mark.parametrize("arm", ["ours", "trl"])
def test_arms_train_and_account_for_every_step(step_config, arm):
    from benchmarks import trl_arm  # loads TRL

    work = {"config": to_dict(step_config.training()), "signal": "half"}
    if arm == "ours":
        result = trainers.run_ours(**work, ignore_ends=True)
        assert [step["length_mean"] for step in result["steps"]] == [4.0, 4.0]
        assert result["planned_memory_gb"] > 0
    else:
        result = trl_arm.run_trl(**work, settings=step_config.trl_settings())
    assert len(result["steps"]) == 2  # one to warm up
    assert all(step["learn"] > 0 for step in result["steps"])
    assert len(result["between_calls"]) == 1


def test_the_adapter_that_ships_is_a_start():
    """A run without --output would write to the folder of this adapter, and would be rejected."""
    config = grpo_step.GRPOStepConfig(adapter=Path("weights/final_rlm_lora"))
    assert config.training().sft_adapter == Path("weights/final_rlm_lora")


def test_the_first_step_of_a_process_is_not_measured():
    step = {"sample": 1.0, "score": 0.0, "learn": 2.0, "length_mean": 8.0}

    def run(*totals):
        return {
            "steps": [step | {"total": total} for total in totals],
            "between_calls": [1.0],
            "peak_memory_gb": 2.0 * totals[-1],
            "planned_memory_gb": 3.0,
        }

    cell = grpo_step.step_cell("half", {"ours": [run(99.0, 1.0)], "trl": [run(99.0, 6.0)]})
    assert cell["arms"]["ours"]["runs"] == [1.0]
    assert cell["ratio"] == {"trl": 6.0}
    assert cell["memory_gb"] == {"ours": 2.0, "trl": 12.0}


def test_trl_sees_the_same_prompts_and_one_update_a_step(tokenizer, step_config):
    from benchmarks import trl_arm  # loads TRL

    right = "<think>\n1 + 1 = 2\n</think>\n<answer>2</answer>"
    assert trl_arm.strict_reward([right, "2"], answer=["2", "2"], prompts=[]) == [1.0, 0.0]
    options = replace(step_config, group_size=4, steps=2)
    config = options.training()
    problems = trl_arm.in_order(config, trainers.problem_pool(config))
    assert len(problems) == 2 * 3  # one step more, to warm up
    assert [row["answer"] for row in trl_arm.dataset(problems, tokenizer)] == [
        problem.answer for problem in problems
    ]
    theirs = trl_arm.trl_config(config, options.trl_settings())
    assert theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps == 8
    assert theirs.generation_batch_size == 8
    assert (theirs.top_k, theirs.temperature, theirs.beta) == (0, 1.0, 0.0)


@pytest.mark.parametrize(("alone", "children"), [(False, 4), (True, 1)])
def test_a_growing_step_is_measured_alone(step_config, monkeypatch, tmp_path, alone, children):
    asked = []

    def run_child(module, function, payload):
        asked.append((function, payload["signal"], payload.get("ignore_ends")))
        step = {"sample": 1.0, "score": 0.0, "learn": 1.0, "length_mean": 4.0, "total": 2.0}
        memory = {"peak_memory_gb": 1.0, "planned_memory_gb": 1.5}
        return {"steps": [step, step], "between_calls": [1.0], **memory}

    monkeypatch.setattr(harness, "run_child", run_child)
    file = tmp_path / "report.json"
    assert grpo_step.main(replace(step_config, alone=alone, rounds=1, json=file)) == 0
    assert len(asked) == children
    assert asked[-1] == (("run_ours", "all", True) if alone else ("run_trl", "all", None))
    assert json.loads(file.read_text())["ratio"] == ({} if alone else {"trl": 1.0})


# --- the scripts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "config", "mistake"),
    [
        (rollout, rollout.RolloutConfig, ["--rows", "12"]),
        (grpo_step, grpo_step.GRPOStepConfig, ["--trl-batch", "7"]),
        (serving, serving.ServingConfig, ["--requests", "0"]),
    ],
)
def test_help_works_and_contradictions_are_refused(script, config, mistake, capsys):
    for arguments, code in ((["--help"], 0), (mistake, 2)):
        with pytest.raises(SystemExit) as end:
            run_main(script.main, config, argv=arguments, description=script.__doc__)
        assert (end.value.code or 0) == code
    assert capsys.readouterr().err.startswith("error: ")


def test_all_cells_of_the_rollouts_are_measured(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout, "LENGTHS", tmp_path / "lengths.json")
    (tmp_path / "lengths.json").write_text('{"lengths": [[1, 9, 2], [4, 1, 3]], "limit": 9}')
    file = tmp_path / "report.json"
    config = rollout.RolloutConfig(
        model=str(model_dir), rows=(16, 8), new_tokens=4, repeats=1, json=file
    )
    assert rollout.main(config) == 0
    report = json.loads(file.read_text())
    assert (report["headline"], len(report["cells"])) == ("16 rows x 4", 3)
    assert report["ratio"]["generate"] > 0


def test_answers_are_validated_and_masks_timed(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(structured_outputs.torch, "set_num_threads", lambda _: None)
    file = tmp_path / "report.json"
    config = structured_outputs.StructuredOutputsConfig(
        model=str(model_dir), schemas=8, max_new_tokens=48, rows=2, timed_tokens=4, repeats=1,
        json=file,
    )  # fmt: skip
    assert structured_outputs.main(config) == 0  # each of them valid, or cut off
    report = json.loads(file.read_text())
    assert report["ratio"]["free"] > 0
    counted = (report["answers"][name].values() for name in ("valid", "invalid", "cut"))
    assert sum(map(sum, counted)) == 8


@pytest.mark.parametrize("script", ["rollout", "evidence"])
def test_a_script_run_by_its_path_says_how_it_is_run(script):
    path = ROOT / "benchmarks" / (script if script == "evidence" else f"{script}.py")
    done = subprocess.run([sys.executable, path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"error: run it as python -m benchmarks.{script}\n"
