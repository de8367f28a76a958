"""The benchmarks' arithmetic and their arms on a tiny model; no speed is asserted anywhere."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import chain
from pathlib import Path

import pytest
from conftest import tiny_model

from benchmarks import (
    arms,
    floor,
    graphs,
    grpo_step,
    harness,
    learning_curve,
    peers,
    rollout,
    scaling,
)
from recipes.orchestrator.agents import Reply
from rlm.cli.main import run_main
from rlm.cli.options import UsageError
from rlm.sampling import Sampler

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    rollout: rollout.RolloutConfig,
    grpo_step: grpo_step.GRPOStepConfig,
    learning_curve: learning_curve.LearningCurveConfig,
    scaling: scaling.ScalingConfig,
    graphs: graphs.GraphsConfig,
}
PROMPTS, SEEDS = [[10, 11, 12, 13, 14], [10, 11, 20]], [1, 100]


# --- the harness --------------------------------------------------------------------------------


def test_arms_alternate_on_the_same_work_after_a_warm_up():
    seen = []
    runs = harness.alternate(
        {name: lambda i, name=name: seen.append((name, i)) or 10 * i for name in "ab"}, repeats=2
    )
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert runs == {"a": [10, 20], "b": [10, 20]}


def test_without_a_warm_up_nothing_is_thrown_away():
    assert harness.alternate({"a": lambda i: i}, repeats=2, warm_up=False) == {"a": [1, 2]}


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


def test_arms_of_a_cell_need_equally_many_runs():
    with pytest.raises(ValueError, match="shorter"):
        harness.cell("c", "s", {"ours": [1.0, 2.0], "peer": [1.0]}, more_is_better=False)


def test_a_report_says_what_it_takes_to_run_it_again(tmp_path, capsys):
    cell = harness.cell("c", "s", {"ours": [1.0], "peer": [2.0]}, more_is_better=False)
    report = harness.report("rollout", cell, [cell], {"ours": 1.0, "peer": 4.0}, extra=1)
    harness.write_json(tmp_path / "new" / "report.json", report)
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert report["ratio"] == {"peer": 2.0}
    assert report["memory_ratio"] == {"peer": 0.25}  # ours over the peer's
    assert (report["headline"], report["extra"], len(report["cells"])) == ("c", 1, 1)
    assert report["command"].startswith("python -m benchmarks.rollout")
    assert {"commit", "date"} <= set(report)
    assert {"cpu", "cores", "threads", "dtype", "instruction_sets", "versions"} <= set(
        report["machine"]
    )
    assert set(report["machine"]["versions"]) == {"torch", "transformers", "trl", "peft"}


def test_a_table_shows_medians_and_ratios(capsys):
    cell = harness.cell("64 rows", "s", {"ours": [1.0], "peer": [2.0]}, more_is_better=False)
    harness.show("t", [cell | {"note": "of the floor"}])
    shown = capsys.readouterr().out
    assert "64 rows" in shown
    assert "2.00 ×" in shown
    assert "of the floor" in shown


def test_a_child_returns_its_dict_and_its_peak_memory():
    result = harness.run_child("builtins", "dict", {"a": 1})
    assert result["a"] == 1
    assert 0.05 < result["peak_memory_gb"] < 4


def test_a_child_that_fails_is_an_error_with_its_last_words():
    with pytest.raises(harness.ChildFailed, match="missing 1 required"):
        harness.run_child("json", "loads", {"nonsense": 1})


# --- the floor ----------------------------------------------------------------------------------


def test_the_floor_is_the_larger_of_reading_and_multiplying():
    cost = floor.ModelCost(
        weight_bytes=1000, row_flops=500, layers=2, query_width=8, cache_bytes_per_token=10
    )
    rates = floor.Machine(bytes_per_second=100.0, flops_per_second=1000.0)
    step = floor.decode_floor(rates, cost, prompts=1, rows=4, prompt_tokens=20, new=5)
    assert step.memory_seconds == (1000 + (20 + 4 * 5) * 10) / 100
    assert step.arithmetic_seconds == 4 * (500 + 4 * 2 * 8 * 25) / 1000
    assert (step.seconds, step.bound) == (14.0, "memory")


def test_the_cost_of_a_model_counts_each_weight_once():
    cost = floor.ModelCost.of(tiny_model())
    hidden, inner, keys, vocabulary = 32, 64, 16, 259
    weights = 2 * (2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner)
    weights += hidden * vocabulary  # the head
    assert cost.weight_bytes == 4 * weights
    assert cost.row_flops == 2 * weights
    assert cost.cache_bytes_per_token == 2 * 2 * keys * 4


# --- rollouts -----------------------------------------------------------------------------------


def test_ours_draws_as_many_tokens_as_asked_for(tokenizer):
    sampler = Sampler(tiny_model(), tokenizer)
    assert rollout.ours_fixed(sampler, PROMPTS, 3, 7, SEEDS) == 2 * 3 * 7
    lengths = [[1, 9, 2], [4, 1, 3]]
    assert rollout.ours_lengths(sampler, 2, PROMPTS, lengths, SEEDS) == 20


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
def test_generate_draws_as_many_tokens_as_asked_for(tokenizer, options):
    arm = peers.Generate(tiny_model(), tokenizer.pad_token_id, batch_rows=4, options=options)
    assert arm.fixed(PROMPTS, 3, 7, SEEDS) == 2 * 3 * 7
    # Batches of 4 rows: it raises by itself unless each ends with its longest row.
    assert arm.lengths(PROMPTS, [[1, 9, 2], [4, 1, 3]], SEEDS) == 20


def test_a_rate_of_too_few_tokens_is_refused():
    assert rollout.rate(lambda: 5, 5) > 0
    with pytest.raises(RuntimeError, match="4 tokens came out where 5"):
        rollout.rate(lambda: 4, 5)


class _Completions(BaseHTTPRequestHandler):
    asked: list[dict] = []  # noqa: RUF012

    def do_GET(self):
        self._answer({"data": [{"id": "served"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        stop_early = body["prompt"] == [0]
        drawn = body["n"] * body["max_tokens"] - stop_early
        self._answer({"usage": {"completion_tokens": drawn}})

    def _answer(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    _Completions.asked.clear()
    with HTTPServer(("127.0.0.1", 0), _Completions) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/v1"
        http.shutdown()


def test_vllm_gets_one_request_a_prompt_and_nothing_that_filters(server):
    arm = peers.vllm(server)
    assert arm.fixed(PROMPTS, 3, 7, SEEDS) == 42
    assert sorted(body["prompt"] for body in _Completions.asked) == sorted(PROMPTS)
    body = _Completions.asked[0]
    assert (body["model"], body["n"], body["max_tokens"]) == ("served", 3, 7)
    assert (body["temperature"], body["top_p"], body["top_k"]) == (1.0, 1.0, -1)
    assert body["ignore_eos"]


def test_rows_of_their_own_length_are_requests_of_their_own(server):
    arm = peers.llama_cpp(server)
    assert arm.lengths(PROMPTS, [[1, 9, 2], [4, 1, 3]], SEEDS) == 20
    assert sorted(body["max_tokens"] for body in _Completions.asked) == [1, 1, 2, 3, 4, 9]
    assert len({body["seed"] for body in _Completions.asked}) == 6


def test_a_server_that_stops_early_is_refused(server):
    with pytest.raises(RuntimeError, match="drew 6 tokens instead of 7"):
        peers.vllm(server).fixed([[0]], 1, 7, [1])


def test_a_server_that_is_not_there_is_a_usage_error():
    with pytest.raises(UsageError, match="refused"):
        peers.vllm("http://127.0.0.1:9")


# --- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "share"), [("half", 0.5), ("all", 1.0)])
def test_scripted_rewards_give_a_known_share_of_signal(kind, share):
    work = arms.Work(model="", adapter=None, prompts=4, group_size=2)
    recorder = arms.Recorder(work, save=lambda path: None)
    reward = recorder.around(arms.reward_function(kind, 2))
    rewards = reward(completions=["x"] * 8, answer=["1"] * 8)
    assert rewards[:2] == [1.0, 0.0]
    assert recorder.signal == [share]


def test_the_strict_reward_is_the_one_of_training():
    reward = arms.reward_function("strict", 2)
    right = "<think>\n1 + 1 = 2\n</think>\n<answer>2</answer>"
    assert reward(completions=[right, "2"], answer=["2", "2"], prompts=[]) == [1.0, 0.0]


def test_snapshots_carry_the_steps_done_and_take_no_time_from_a_step(tmp_path):
    work = arms.Work("", None, prompts=1, group_size=2, snapshots=str(tmp_path), snapshot_every=2)
    saved = []
    recorder = arms.Recorder(work, save=lambda path: saved.append(path.name))
    reward = recorder.around(arms.reward_function("all", 2))
    for _ in range(3):
        reward(completions=["x"] * 2)
    recorder.snapshot(3)
    recorder.saving = [0.5, 0.0, 0.25]
    steps = [{"sample": 1.0, "score": 1.0, "learn": 1.0, "length_mean": 8.0} for _ in range(3)]
    result = recorder.result(steps)
    assert saved == ["step_000000", "step_000002", "step_000003"]
    assert result["snapshots"] == [0, 2, 3]
    assert [step["total"] for step in result["steps"]] == [2.5, 3.0, 2.75]
    assert len(result["between_calls"]) == 2


def test_our_arm_trains_and_accounts_for_every_step(model_dir, tmp_path):
    work = arms.Work(
        str(model_dir), None, prompts=2, group_size=2, max_new_tokens=4, steps=2,
        ignore_ends=True, snapshots=str(tmp_path),
    )  # fmt: skip
    result = arms.run_ours(**vars(work))
    assert [step["length_mean"] for step in result["steps"]] == [4.0, 4.0]
    assert [step["signal"] for step in result["steps"]] == [0.5, 0.5]
    assert all(step["learn"] > 0 for step in result["steps"])
    assert result["snapshots"] == [0, 1, 2]
    assert (tmp_path / "step_000002" / "adapter_model.safetensors").exists()


def test_the_first_step_of_a_process_is_not_measured():
    step = {"sample": 1.0, "score": 0.0, "learn": 1.0, "length_mean": 8.0, "signal": 0.5}

    def run(*totals):
        return {
            "steps": [step | {"total": total} for total in totals],
            "between_calls": [1.0],
            "peak_memory_gb": 2.0 * totals[-1],
        }

    cell = grpo_step.step_cell("half", {"ours": [run(99.0, 1.0)], "trl": [run(99.0, 6.0)]})
    assert cell["arms"]["ours"]["runs"] == [1.0]
    assert cell["ratio"] == {"trl": 6.0}
    assert cell["memory_gb"] == {"ours": 2.0, "trl": 12.0}
    assert cell["signal"] == 0.5


def test_trl_sees_the_same_prompts_and_one_update_a_step(tokenizer, model_dir, tmp_path):
    from benchmarks import trl_arm  # loads TRL

    work = arms.Work(str(model_dir), None, prompts=2, group_size=4, max_new_tokens=8, steps=3)
    rows = trl_arm.dataset(work, tokenizer)
    assert [row["answer"] for row in rows] == [p.answer for step in work.problems() for p in step]
    settings = trl_arm.Settings(2, False, False, False, False)
    config = trl_arm.config_for(work, settings, str(tmp_path), use_cpu=True)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 8
    assert config.generation_batch_size == 8
    assert (config.top_k, config.temperature, config.beta) == (0, 1.0, 0.0)


# --- curves and scaling -------------------------------------------------------------------------


def test_curves_are_compared_where_both_have_as_many_samples():
    def row(samples, bits):
        return {"samples": samples, "seconds": float(samples), "bits": bits}

    ours = [row(0, [0, 0]), row(10, [1, 0]), row(20, [1, 1]), row(30, [1, 1])]
    trl = [row(0, [0, 0]), row(10, [1, 0]), row(20, [0, 0])]
    compared = learning_curve.compare({"ours": ours, "trl": trl})
    assert compared["last_equal_samples"]["samples"] == 20
    assert compared["last_equal_samples"]["points"] == 100
    assert compared["mean_equal_samples"]["points"] == 50
    assert compared["end"]["samples"] == {"ours": 30, "trl": 20}


def test_a_curve_counts_training_seconds_up_to_each_snapshot():
    work = arms.Work("", None, prompts=2, group_size=5)
    run = {"steps": [{"total": 1.0}, {"total": 2.0}], "snapshots": [0, 2]}
    rows = learning_curve.curve(work, run, [[0, 1], [1, 1]])
    assert [(r["seconds"], r["samples"], r["correct"]) for r in rows] == [(0.0, 0, 1), (3.0, 20, 2)]
    assert rows[0]["low"] < 0.5 < rows[0]["high"]


def test_the_picture_is_drawn(tmp_path, capsys):
    work = arms.Work("", None)
    run = {"steps": [{"total": 1.0}], "snapshots": [0, 1]}
    rows = learning_curve.curve(work, run, [[0, 1], [1, 1]])
    learning_curve.draw({"ours": rows, "trl": rows}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_growth_in_proportion_has_exponent_one():
    assert scaling.exponent([1, 2, 4], [5, 10, 20]) == pytest.approx(1)
    assert scaling.exponent([1, 10], [1, 100]) == pytest.approx(2)


def test_sizes_of_models_are_those_of_their_shapes():
    assert scaling.parameters("random:smollm2-135m") == 134_515_008
    assert scaling.parameters("random:qwen2.5-0.5b") == 494_032_768


# --- graphs of agents ----------------------------------------------------------------------------


def test_both_arms_run_the_same_graphs_in_other_batches(capsys):
    class Counting:
        def __init__(self):
            self.batches = []

        def chat(self, calls, params):
            self.batches.append([(call.system_prompt, call.text) for call in calls])
            return [Reply("4")] * len(calls)

        def release(self):
            pass

    agents = Counting()
    report = graphs.measure(graphs.GraphsConfig(graphs=3, repeats=1), agents)
    assert [len(batch) for batch in agents.batches] == [3, 3, 1, 1, 1, 1, 1, 1] * 2
    together, alone = agents.batches[8:10], agents.batches[10:]  # after the warm-up
    assert sorted(chain(*alone)) == sorted(chain(*together))
    assert set(report["ratio"]) == {"one at a time"}


# --- the scripts --------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_help_works(script, capsys):
    with pytest.raises(SystemExit) as end:
        run_main(script.main, SCRIPTS[script], argv=["--help"], description=script.__doc__)
    assert not end.value.code
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (rollout, ["--rows", "12"]),
        (grpo_step, ["--trl-batch", "7"]),
        (learning_curve, ["--minutes", "0"]),
        (scaling, ["--group-size", "1"]),
        (graphs, ["--graphs", "0"]),
    ],
)
def test_contradictions_are_refused(script, arguments, capsys):
    with pytest.raises(SystemExit) as end:
        run_main(script.main, SCRIPTS[script], argv=arguments)
    assert end.value.code == 2


@pytest.mark.slow
def test_rollouts_of_the_embedded_model(tmp_path):
    target = tmp_path / "rollout.json"
    subprocess.run(
        [
            sys.executable, "-m", "benchmarks.rollout", "--rows", "8", "--new-tokens", "8",
            "--repeats", "1", "--no-lengths", "--json", str(target),
        ],
        cwd=ROOT, check=True,
    )  # fmt: skip
    report = json.loads(target.read_text())
    assert report["ratio"]["generate"] > 0
    assert report["memory_ratio"]["generate"] > 0  # measured in processes of their own
    assert report["cells"][0]["floor"]["share"] > 0
