"""Training of the orchestrator with a tiny model whose tokens contain the structure of a graph.

A graph has only six tokens, so the cold start, GRPO, the evaluation and questions take seconds.
"""

import csv
import dataclasses
import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import byte_tokenizer, let_it_speak, tiny_model
from conftest import exit_code as run
from expected_skips import SHARED, needs_shared
from safetensors.torch import load_file, save_file
from scripted_llm import ScriptedLLM
from scripted_sampler import ScriptedSampler
from scripted_server import ScriptedServer

import train_sft
from recipes.orchestrator import ask, cold_start, evaluate
from recipes.orchestrator import train as recipe
from recipes.orchestrator.cold_start import train_start_adapter
from recipes.orchestrator.config import DEFAULT_AGENT_ADAPTER, Config, OrchestratorConfig
from recipes.orchestrator.graph import Graph, InvalidGraph, parse_graph
from recipes.orchestrator.orchestrator import (
    SYSTEM_PROMPTS,
    AgentModel,
    Orchestrator,
    choose_agents,
    identify_agents,
)
from recipes.orchestrator.runner import LocalLLM, RemoteLLM, Reply, Trajectory
from recipes.orchestrator.train import LOGS, OrchestratorTrainer
from rlm.api_client import APIClient
from rlm.cli import resolve_config
from rlm.cli.options import Interrupted, UsageError, parse
from rlm.data.loaders import load_problems
from rlm.data.problem import Problem
from rlm.model.adapter_info import ADAPTER_FILES
from rlm.model.adapters import exported_tensors, new_adapter, set_gradient_checkpointing
from rlm.model.base import base_model_hash, load_base, load_tokenizer
from rlm.model.export import save_adapter
from rlm.model.hardware import Setup
from rlm.sampling import SamplingParams
from tests.test_train_grpo import CPU

ROOT = Path(__file__).parents[2]
WORDS = ("red", "blue", "green", "gold")
SKELETON = re.split("solve|WORD", Graph.chain("solve", "WORD").to_json())
GOOD, BAD = (Graph.chain("solve", word).to_json() for word in ("gold", "red"))
LEAKING = Graph.chain("solve", "gold, 420")  # 20 + 400
PROBLEMS = [Problem(f"p{i}", f"{i} + {i * i}?", str(i + i * i)) for i in range(20, 60)]

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*orchestrator*.yaml"))


def toy_graph(rng, format):
    return Graph.chain("solve", rng.choice(WORDS))


def solver(text="draft", word="gold"):
    """Make agents: the first writes `text`, the second is right if its prompt contains `word`."""

    def answer(call):
        if "DRAFT" not in call.text:
            return Reply(text, 1, 1)
        one, two = re.match(r"PROBLEM: (\d+) \+ (\d+)", call.text).groups()
        return Reply(f"[{int(one) + int(two)}]" if word in call.system_prompt else "[0]", 1, 1)

    return ScriptedLLM(answer)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Save a base model whose tokenizer has the prompt, the structure and the words as tokens."""
    path = tmp_path_factory.mktemp("orchestrator_base")
    tokenizer = byte_tokenizer()
    instruction = SYSTEM_PROMPTS["prompts"].partition("{")[0].strip()
    tokenizer.add_tokens([instruction, *SKELETON, "solve", *WORDS])
    model = tiny_model()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)  # or no adapter could make it sure of anything
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def options(base, tmp_path, name="run", **more):
    quick = {
        "model": str(base), "sft_adapter": None, "agent_adapter": None, "run_dir": tmp_path / name,
        "algorithm": "grpo",
        "steps": 3, "batch_size": 4, "group_size": 4, "max_new_tokens": 12, "agent_max_tokens": 6,
        "learning_rate": 3e-3, "kl_weight": 0.05, "warmup_steps": 0, "lr_schedule": "constant",
        "lora_r": 8, "eval_every": 0, "eval_samples": 4, "save_every": 1,
    }  # fmt: skip
    return OrchestratorConfig(**quick | more)


def teach_toy_graphs(patch):
    """Use toy graphs in the cold start, which makes it fast."""
    patch.setattr(cold_start, "random_graph", toy_graph)
    patch.setattr(cold_start, "LEARNING_RATE", 2e-2)


@pytest.fixture(scope="module")
def start(base, tmp_path_factory):
    """Run the cold start once, and return its adapter."""
    path = tmp_path_factory.mktemp("start") / "adapter"
    with pytest.MonkeyPatch.context() as patch:
        teach_toy_graphs(patch)
        config = options(base, path.parent, sft_adapter=path)
        cold_start.train_start_adapter(config, (PROBLEMS * 10)[:320])
    return path


def make_trainer(config, agents=None):
    return OrchestratorTrainer(config, agents or solver(), device=CPU)


def train(config, agents=None, problems=PROBLEMS, validation=(), test=()):
    trainer = make_trainer(config, agents)
    return trainer, *trainer.train_and_test(problems, validation, test)


def log_of(config, name):
    return [json.loads(line) for line in (config.run_dir / f"{name}.jsonl").open()]


def test_a_cold_start_teaches_the_format(base, start, tmp_path):
    config = options(base, tmp_path, sft_adapter=start)
    trainer = make_trainer(config)
    params = SamplingParams(12, temperature=1.0)
    prompts = [trainer.render(problem) for problem in PROBLEMS[:4]]
    groups = trainer.sampler.sample(prompts, 16, params, range(4))
    texts = [trainer.tokenizer.decode(c.token_ids[:-1]) for group in groups for c in group]
    graphs = [parse_graph(text, "prompts") for text in texts]
    valid = [graph for graph in graphs if isinstance(graph, Graph)]
    assert len(valid) > 0.9 * len(graphs)
    words = [graph.texts[1] for graph in valid]
    assert set(words) >= set(WORDS)
    # At temperature 1, other tokens are sampled sometimes.
    assert sum(word in WORDS for word in words) > 0.9 * len(words)
    run = json.loads((start / "run.json").read_text())
    assert run["stage"] == "orchestrator_start"
    assert run["examples"] == 640


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_the_word_that_helps_is_learned(base, start, tmp_path, seed):
    config = options(
        base, tmp_path, sft_adapter=start, steps=24, group_size=8, seed=seed,
        lr_schedule="linear", save_every=0,
        learning_rate=1e-3,  # at 3e-3, rounding decides whether a run collapses
    )  # fmt: skip
    _, logs, summary = train(config, test=PROBLEMS[:8])
    rewards = [row["reward_mean"] for row in logs]
    assert sum(rewards[:2]) / 2 < 0.6
    assert sum(rewards[-3:]) / 3 > 0.8
    assert sum(row["valid_json_rate"] for row in logs[-3:]) / 3 > 0.9
    assert summary["test"] == {"correct": 8, "total": 8, "accuracy": 1.0}


def test_what_the_agents_say_is_not_in_the_loss(base, start, tmp_path):
    """Other texts of the first agent with the same rewards give the same adapter."""
    adapters = []
    for i, text in enumerate(("a", "a much longer draft " * 20)):
        config = options(base, tmp_path, f"run{i}", sft_adapter=start, steps=2)
        adapters.append(train(config, solver(text))[0].adapter)
    for name, tensor in adapters[0].items():
        assert torch.equal(tensor, adapters[1][name]), name


def test_invalid_graphs_are_trained_against(base, tmp_path):
    """A model that writes no graph gets the reward 0, and causes no error.

    Without an initial adapter, the reference model of the KL term is the base model.
    """
    config = options(base, tmp_path, steps=2, kl_weight=1.0)
    trainer, logs, _ = train(config)
    assert logs[0]["valid_json_rate"] == logs[0]["reward_mean"] == 0
    assert logs[0]["kl_value"] == pytest.approx(0, abs=1e-6)
    assert "reference" not in trainer.policy.peft_config


class Writes(ScriptedSampler):
    """An orchestrator whose graphs for each problem are scripted by the test."""

    matches_trainer = True


def test_rewards_and_advantages_stay_with_their_graphs(base, start, tmp_path):
    """Invalid graphs stay in their groups, whose numbers of invalid graphs differ."""
    script = {
        "20 + 400?": [GOOD, "{", BAD],
        "21 + 441?": ["{", Graph.chain("solve", "red, 462").to_json(), "{"],  # leaks, and is wrong
        "22 + 484?": [BAD, BAD, GOOD],
    }
    size = {"steps": 1, "batch_size": 3, "group_size": 3}
    trainer = make_trainer(config := options(base, tmp_path, sft_adapter=start, **size))
    trainer.sampler = Writes(trainer.policy, trainer.tokenizer, script)
    (log,), _ = trainer.train_and_test(PROBLEMS[:3])
    graphs = {row["question"]: row["graphs"] for row in log_of(config, "rollouts")}
    rewards = {"20 + 400?": [1, 0, 0], "21 + 441?": [0, 0, 0], "22 + 484?": [0, 0, 1]}
    assert {q: [graph["reward"] for graph in group] for q, group in graphs.items()} == rewards
    assert [graph["verdict"] for graph in graphs["21 + 441?"]] == ["bad_json", "wrong", "bad_json"]
    # 2/3 and −1/3 by a standard deviation of 1/√3 (and 10⁻⁴).
    right, wrong = (share / (3**-0.5 + 1e-4) for share in (2 / 3, -1 / 3))
    advantages = {row["question"]: row["advantages"] for row in log_of(config, "samples")}
    assert advantages["20 + 400?"] == pytest.approx([right, wrong, wrong], abs=1e-5)
    assert advantages["21 + 441?"] == [0, 0, 0]
    assert advantages["22 + 484?"] == pytest.approx([wrong, wrong, right], abs=1e-5)
    # Of 9 graphs 6 are valid, of three kinds; their agents write a token each. An end token counts.
    length = len(trainer.tokenizer.encode(GOOD)) + 1
    expected = {
        "reward_mean": 2 / 9, "valid_json_rate": 6 / 9, "distinct_graphs": 3 / 6,
        "answer_leak_rate": 1 / 9,
        "tokens_per_problem": (6 * length + len(", 462") + 3 * 2 + 6 * 2) / 9,
    }  # fmt: skip
    assert {name: log[name] for name in expected} == pytest.approx(expected)
    (metrics,) = log_of(config, "metrics")
    assert metrics["agents/correct"] == pytest.approx(2 / 9)
    assert (metrics["graph/bad_json"], metrics["graph/no_json"]) == (pytest.approx(3 / 9), 0)
    assert len(trainer.orchestrator.runner.agents.batches) == 2


@pytest.mark.parametrize("zero_leaks", [True, False])
def test_the_best_adapter_is_not_the_one_that_leaks_most(
    base, start, tmp_path, monkeypatch, zero_leaks
):
    """The validations and the final test use the same criterion as the reward."""
    trainer = make_trainer(options(base, tmp_path, sft_adapter=start, zero_leaks=zero_leaks))
    replies = [Reply("draft"), Reply("[420]")]
    graphs = [LEAKING, Graph.chain("solve", "gold"), LEAKING]
    runs = [Trajectory(PROBLEMS[0], graph, replies=replies) for graph in graphs]
    monkeypatch.setattr(trainer.orchestrator, "solve", lambda *_, **__: runs)
    found = trainer.validation_scores(PROBLEMS[:3], 1, lambda: None)
    assert found == {"accuracy": [0.0, 1.0, 0.0] if zero_leaks else [1.0] * 3}


def test_no_advice_about_the_form_of_the_orchestrator_s_answer(base, start, tmp_path):
    trainer = make_trainer(options(base, tmp_path, sft_adapter=start))
    asks = Problem("p", "What is 1 + 1? Put your final answer in \\boxed{}.", "2")
    assert trainer.prepare([asks], None).warnings == []


def test_agents_behind_a_server(base, start, tmp_path):
    """The requests to the server follow the options for agents."""
    with ScriptedServer(lambda body: "[420]") as server:
        config = options(
            base, tmp_path, sft_adapter=start, steps=1, agent_url=server.url, agent_model="theirs",
            agent_temperature=0.5, agent_max_tokens=7,
        )  # fmt: skip
        train(config, choose_agents(config), problems=PROBLEMS[:4])
        bodies = server.asked("chat/completions")
    graphs = [graph for row in log_of(config, "rollouts") for graph in row["graphs"]]
    assert len(bodies) == 2 * sum(graph["graph"] is not None for graph in graphs) > 0
    asked = [{body[name] for body in bodies} for name in ("model", "temperature", "max_tokens")]
    assert asked == [{"theirs"}, {0.5}, {7}]
    assert len({body["seed"] for body in bodies}) == len(bodies)


def test_a_failure_in_validation_is_told_or_ends_the_run(base, start, tmp_path, capsys):
    def broken(call):
        raise ZeroDivisionError

    down = ScriptedLLM(lambda call: Reply("", error="out of order"))
    trainer = make_trainer(options(base, tmp_path, sft_adapter=start), down)
    found = trainer.validation_scores(PROBLEMS[:4], 1, lambda: None)
    assert found == {"accuracy": [None] * 4}
    says = "4 of 4 problems are left out of the accuracy: the agents' server"
    assert says in capsys.readouterr().out
    with pytest.raises(ZeroDivisionError):
        train(options(base, tmp_path, "broken", sft_adapter=start), ScriptedLLM(broken))


def test_a_run_leaves_these_files(base, start, tmp_path, capsys):
    config = options(base, tmp_path, sft_adapter=start, eval_every=2)
    trainer, logs, _ = train(config, validation=PROBLEMS[:4])
    assert {file.name for file in config.run_dir.iterdir()} == {
        "config.json", "metrics.jsonl", "train_logs.csv", "samples.jsonl", "rollouts.jsonl",
        "curves.png", "checkpoints", "adapters_lora", "summary.json", ".lock",
        "adapter_best", "adapter_last",
    }  # fmt: skip
    rows = list(csv.DictReader((config.run_dir / "train_logs.csv").open()))
    assert list(rows[0]) == list(LOGS)
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert float(rows[1]["reward_mean"]) == logs[1]["reward_mean"]
    assert (rows[0]["val_acc"], logs[0]["val_acc"]) == ("", None)
    assert float(rows[1]["val_acc"]) == logs[1]["val_acc"]
    for row in logs:
        assert row["loss"] == pytest.approx(row["policy_loss"] + row["kl_penalty"])
    assert logs[0]["kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert logs[2]["kl_penalty"] > 0
    lines = re.findall(r"^  reward_mean .*", capsys.readouterr().out, re.M)
    assert len(lines) == 3
    for name in ("reward_mean", "reward_std", "loss", "kl_penalty", "val_acc"):
        assert all(re.search(rf"\b{name} [-\d.]+", line) for line in lines), name
    rollout = log_of(config, "rollouts")[0]
    assert {"step", "problem", "question", "answer", "graphs"} == set(rollout)
    ran = next(g for g in rollout["graphs"] if g["graph"])
    assert set(ran["trace"]["agents"]) == {"agentA", "agentB"}
    # Two levels are two batches, in 3 steps and 3 validations; the cache may know all replies.
    assert 3 < len(trainer.orchestrator.runner.agents.batches) <= 2 * (3 + 3)


def test_three_steps_a_kill_and_three_more_equal_six(base, start, tmp_path):
    more = {"sft_adapter": start, "steps": 6, "eval_every": 2}
    whole = options(base, tmp_path, "whole", **more)
    train(whole, validation=PROBLEMS[:4])

    agents = solver()

    def killed(call):
        if len(agents.batches) > 8:  # a first validation, then two batches a step or less
            raise KeyboardInterrupt
        return solver().answer(call)

    agents.answer = killed
    parts = options(base, tmp_path, "parts", **more)
    with pytest.raises(KeyboardInterrupt):
        train(parts, agents, validation=PROBLEMS[:4])
    assert 1 < len(log_of(parts, "metrics")) < 6
    with (parts.run_dir / "rollouts.jsonl").open("a") as stream:
        stream.write('{"step": 99}\n{"torn')  # a kill may leave such lines
    resumed = options(base, tmp_path, "parts", resume=True, **more)
    train(resumed, validation=PROBLEMS[:4])
    for name in ("train_logs.csv", "rollouts.jsonl", "samples.jsonl"):
        assert (parts.run_dir / name).read_text() == (whole.run_dir / name).read_text(), name
    expected, got = (load_file(c.output / "adapter_model.safetensors") for c in (whole, parts))
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def sends_first(function):
    """Return the function, whose first call also sends SIGTERM to this process."""
    numbers = [signal.SIGTERM]

    def wrapped(*arguments, **options):
        while numbers:
            os.kill(os.getpid(), numbers.pop())
        return function(*arguments, **options)

    return wrapped


def test_a_signal_during_an_export_starts_no_further_stage(base, start, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train_sft, "save_adapter", sends_first(save_adapter))
        with pytest.raises(Interrupted) as stopped:
            train_start_adapter(options(base, tmp_path, sft_adapter=tmp_path / "new"), PROBLEMS)
    assert stopped.value.number == signal.SIGTERM
    assert (tmp_path / "new" / ADAPTER_FILES[1]).is_file()
    more = {"sft_adapter": start, "steps": 1}
    with monkeypatch.context() as patch:
        patch.setattr("rlm.training.trainer.save_adapter", sends_first(save_adapter))
        with pytest.raises(Interrupted, match="saved up to step 1"):
            train(options(base, tmp_path, **more), test=PROBLEMS[:2])
    config = options(base, tmp_path, resume=True, **more)

    def interrupted(*_):
        raise KeyboardInterrupt

    trainer = make_trainer(config)
    trainer.validation_scores = interrupted
    with pytest.raises(Interrupted, match="is exported, but not tested"):
        trainer.train_and_test(PROBLEMS, test=PROBLEMS[:2])
    (row,) = csv.DictReader((config.run_dir / "train_logs.csv").open())
    assert "reward_mean" in row  # the names of the recipe, before the test
    _, _, summary = train(config, test=PROBLEMS[:2])
    assert summary["test"]["total"] == 2


# --- who the agents are -------------------------------------------------------------------------


def a_solver(base, path):
    """Save an adapter for the agents whose output differs from that of the base model."""
    policy = new_adapter(load_base(str(base), CPU), r=4, alpha=8)
    torch.manual_seed(1)
    let_it_speak(policy, 0.3)
    save_adapter(policy, load_tokenizer(str(base)), path, {})
    return path


def frozen_weights(model):
    return {n: t.clone() for n, t in model.named_parameters() if ".default." not in n}


@pytest.mark.parametrize("with_adapter", [False, True])
def test_agents_on_the_same_base_share_it(base, start, tmp_path, with_adapter, in_fp32):
    """Agents on a shared model behave as on a model of their own, and are never trained."""
    adapter = a_solver(base, tmp_path / "solver") if with_adapter else None
    config = options(base, tmp_path, sft_adapter=start, sampler="merged", save_every=0)
    shared = make_trainer(config, AgentModel(str(base), adapter))
    runner = shared.orchestrator.runner
    assert runner.agents.sampler is shared.sampler
    # Another name for the same directory is not recognized as the same model.
    named_otherwise = AgentModel(f"{base}/.", adapter)
    apart = make_trainer(options(base, tmp_path, sft_adapter=start), named_otherwise)
    assert apart.orchestrator.runner.agents.sampler is not apart.sampler
    asked = (PROBLEMS[:2], [Graph.chain("solve", "gold"), Graph.chain("red", "blue")], range(2))

    def replies(trainer):
        trainer.orchestrator.runner._cache.clear()
        return [run.to_dict() for run in trainer.orchestrator.runner.run(*asked)]

    frozen = frozen_weights(shared.policy)
    before = replies(shared)
    assert before == replies(apart)
    shared.train_and_test(PROBLEMS)
    now = frozen_weights(shared.policy)
    assert all(torch.equal(now[name], tensor) for name, tensor in frozen.items())
    assert replies(shared) == before
    saved = load_file(config.output / "adapter_model.safetensors")
    assert not any("agent" in name for name in saved)
    if with_adapter:
        bare = make_trainer(options(base, tmp_path, sft_adapter=start), AgentModel(str(base)))
        assert replies(bare) != before


def test_layers_stay_checkpointed_when_the_agents_come(base, start, tmp_path):
    solver = a_solver(base, tmp_path / "solver")
    for wanted in (False, True):
        config = options(base, tmp_path, str(wanted), sft_adapter=start)
        trainer = make_trainer(config, AgentModel(str(base), solver))
        policy = trainer.policy
        set_gradient_checkpointing(policy, wanted)  # as the run's memory plan does
        layers = policy.get_base_model().get_decoder().layers
        assert {layer.training for layer in layers} == {wanted}
        assert not any(m.training for m in policy.modules() if m not in set(layers))


def test_an_agents_adapter_of_another_base_is_one_line(base, start, tmp_path):
    solver = a_solver(base, tmp_path / "solver")
    (solver / "run.json").write_text('{"base_model": "other", "base_hash": "sha256:0"}')
    with pytest.raises(UsageError, match="other weights"):
        make_trainer(options(base, tmp_path, sft_adapter=start), AgentModel(str(base), solver))


# --- options ------------------------------------------------------------------------------------


def test_the_published_names_and_flags_touch_no_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = OrchestratorConfig(
        model="a", agent_model="b", steps=7, batch_size=3, group_size=5, eval_samples=9,
        run_dir=Path("elsewhere"),
    )  # fmt: skip
    assert (
        expected.output == dataclasses.replace(expected).output == Path("elsewhere/adapters_lora")
    )
    config = Config()
    config.steps, config.batch_problems, config.trajectories_per_problem = 7, 3, 5
    config.run_root, config.val_rows = "elsewhere", 9
    config.orchestrator_id, config.agent_model_id = "a", "b"
    assert config.to_options() == expected
    assert Config().to_options() == OrchestratorConfig()
    with pytest.raises(
        AttributeError,
        match="no attribute trajectories; its attributes are orchestrator_id, agent_mod",
    ):
        config.trajectories = 5
    typed = (
        "--steps 7 --batch-problems 3 --trajectories 5 --lr 1e-3 --run-dir elsewhere "
        "--kl-coef 0.2 --orchestrator-model a --agent-model b --eval-samples 9"
    )
    expected = dataclasses.replace(expected, learning_rate=1e-3, kl_weight=0.2)
    assert parse(OrchestratorConfig, typed.split()) == expected
    small = parse(OrchestratorConfig, ["--debug", "--steps", "50"])
    assert (small.steps, small.batch_size, small.group_size, small.eval_every) == (5, 2, 2, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--graph-form plans", "questions"),
        ("--agent-url http://x", "--agent-model"),
        ("--agent-key KEY", "--agent-url"),
        ("--agent-temperature -1", "at least 0"),
        ("--agent-max-tokens 0", "at least 1"),
        ("--trajectories 1", "--group-size"),
        ("--doctor", "--doctor is an option of train_grpo.py"),
        ("--plan", "--plan is an option of train_grpo.py"),
        ("--reward nope.py:f", "--reward is an option of train_grpo.py"),
        ("--reasoning-format simple", "--reasoning-format is an option of train_grpo.py"),
        ("--system-prompt deepseek", "--system-prompt is an option of train_grpo.py"),
    ],
)
def test_contradictions_are_one_line(typed, message):
    with pytest.raises(UsageError, match=message):
        parse(OrchestratorConfig, typed.split())


# --- the commands -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    """Run `python -m recipes.orchestrator.train` with a cold start and agents on the same model."""
    path = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        teach_toy_graphs(patch)
        code = run(
            recipe, OrchestratorConfig, "--orchestrator-model", base, "--sft-adapter",
            path / "start", "--dataset", "word-problems:1", "--start-questions", 320,
            "--max-samples", 320, "--lora-r", 8, "--steps", 2, "--batch-problems", 2,
            "--trajectories", 2, "--max-new-tokens", 12, "--agent-max-tokens", 6,
            "--eval-samples", 2, "--test-samples", 2, "--run-dir", path / "run",
            "--agent-adapter", a_solver(base, path / "solver"),
        )  # fmt: skip
    assert code == 0
    return path


def test_the_command_makes_the_start_adapter_and_goes_on_from_it(finished):
    assert (finished / "start" / "adapter_model.safetensors").exists()
    summary = json.loads((finished / "run" / "summary.json").read_text())
    assert summary["start_adapter"] == str(finished / "start")
    assert summary["test"]["total"] == 2
    config = json.loads((finished / "run" / "config.json").read_text())
    assert config["agent_adapter"] == str(finished / "solver")
    assert not list(finished.glob(".*"))


def test_a_default_agent_adapter_that_is_missing_is_said(
    base, start, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    typed = ["--model", str(base), "--dataset", "word-problems:1", "--sft-adapter", str(start)]
    assert resolve_config(OrchestratorConfig, typed).agent_adapter is None
    assert "the agents use their base model" in capsys.readouterr().out
    named = resolve_config(OrchestratorConfig, [*typed, "--agent-adapter", "nowhere"])
    with pytest.raises(UsageError, match="nowhere does not exist"):
        choose_agents(named)


def test_a_default_agent_adapter_of_another_base_is_left_out(
    base, start, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    tiny_model(seed=1).save_pretrained(other)
    byte_tokenizer().save_pretrained(other)
    about = {"base_model": str(other), "base_hash": base_model_hash(str(other))}
    policy = new_adapter(load_base(str(other), CPU), r=4, alpha=8)
    save_adapter(policy, byte_tokenizer(), tmp_path / DEFAULT_AGENT_ADAPTER, about)
    typed = ["--model", str(base), "--dataset", "word-problems:1", "--sft-adapter", str(start)]
    assert resolve_config(OrchestratorConfig, typed).agent_adapter is None
    assert "the agents use their base model without an adapter: " in capsys.readouterr().out
    kept = resolve_config(OrchestratorConfig, [*typed, "--agent-model", str(other)])
    assert kept.agent_adapter == DEFAULT_AGENT_ADAPTER
    named = resolve_config(
        OrchestratorConfig, [*typed, "--agent-adapter", str(DEFAULT_AGENT_ADAPTER)]
    )
    with pytest.raises(UsageError, match="other weights"):  # before a cold start
        choose_agents(named)


def test_the_seed_of_a_config_is_used(monkeypatch):
    seeds = []

    def begun(config, *arguments, **loaded):
        seeds.append(config.seed)
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "OrchestratorTrainer", begun)
    policy = SimpleNamespace(origin={})
    for config, seed in (
        (OrchestratorConfig(seed=7), None),
        (OrchestratorConfig(seed=7), 3),
        (Config(), None),
    ):
        with pytest.raises(KeyboardInterrupt):
            recipe.run_grpo_training(
                config, policy, None, AgentModel("base"), None, [], [], [], seed
            )
    assert seeds == [7, 3, 42]


def test_a_start_from_with_a_system_prompt_of_its_own_is_taken(base, tmp_path, capsys):
    model = load_base(str(base), CPU)
    about = {"base_model": str(base), "base_hash": base_model_hash(str(base))}
    policy = new_adapter(model, r=4, alpha=8)
    save_adapter(
        policy,
        byte_tokenizer(),
        tmp_path / "from",
        about | {"config": {"system_prompt": "Be brief."}},
    )
    config = OrchestratorConfig(
        model=str(base), dataset="word-problems:1", sft_adapter=tmp_path / "made",
        start_from=tmp_path / "from", run_dir=tmp_path / "run", batch_size=2,
    )  # fmt: skip
    capsys.readouterr()
    train_start_adapter(config, PROBLEMS[:1])
    said = capsys.readouterr().out
    assert "too few: use more --start-questions" in said
    assert "--epochs" not in said  # an option of train_sft.py alone
    assert json.loads((tmp_path / "made" / "adapter_config.json").read_text())["r"] == 4
    plans = dataclasses.replace(config, graph_form="questions")
    with pytest.raises(UsageError, match="no plan can be made from --dataset word-problems:1"):
        train_start_adapter(plans, [Problem("p", "How many?", "2")])


def test_a_start_adapter_is_not_made_inside_the_run_directory(base, tmp_path, capsys):
    arguments = ("--model", base, "--run-dir", tmp_path / "run", "--agent-adapter", "none")
    inside = tmp_path / "run" / "start"
    assert run(recipe, OrchestratorConfig, *arguments, "--sft-adapter", inside) == 2
    assert f"--sft-adapter {inside} is in --run-dir" in capsys.readouterr().err
    assert not inside.exists()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for place, why in ((tmp_path / "link" / "start", "is in --run-dir"), (tmp_path, "contains")):
        assert run(recipe, OrchestratorConfig, *arguments, "--sft-adapter", place) == 2
        assert f"--sft-adapter {place} {why}" in capsys.readouterr().err
    made, before = tmp_path / "made", tmp_path / "made.prev"
    assert run(recipe, OrchestratorConfig, *arguments, "--sft-adapter", made,
               "--start-from", before) == 2  # fmt: skip
    assert f"would replace --start-from {before}" in capsys.readouterr().err


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_no_config_makes_its_start_inside_its_run(config, monkeypatch):
    # Otherwise the weights of the embedded model would be unpacked and hashed.
    monkeypatch.setattr("rlm.model.adapter_mismatch", lambda *_: "")
    resolved = resolve_config(OrchestratorConfig, ["--config", str(config)])
    assert resolved.run_dir not in resolved.sft_adapter.parents


def test_agents_with_other_weights_are_said(base, finished, tmp_path, monkeypatch, capsys):
    agents = AgentModel(str(base), a_solver(base, tmp_path / "solver"))
    [(what, before)] = identify_agents(agents).items()
    with (tmp_path / "solver" / "adapter_model.safetensors").open("ab") as stream:
        stream.write(b" ")
    assert identify_agents(agents)[what] != before
    with ScriptedServer() as server:  # a server of another project publishes no hashes
        assert identify_agents(RemoteLLM(APIClient(server.url), "theirs")) == {}

    def others(agents):
        return dict.fromkeys(identify_agents(agents), "another hash")

    monkeypatch.setattr("recipes.orchestrator.orchestrator.identify_agents", others)
    Orchestrator.load(finished / "run")
    model, run = f"{base} + {finished / 'solver'}", finished / "run"
    said = f"warning: the model of the agents ({model}) has changed since the training in {run}:"
    assert said in capsys.readouterr().out


def test_the_dtype_of_a_run_is_that_of_all_its_models(base, finished, tmp_path):
    run = shutil.copytree(finished / "run", tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config |= {"dtype": "bfloat16", "agent_model": f"{base}/.", "agent_adapter": None}
    (run / "config.json").write_text(json.dumps(config))
    loaded = Orchestrator.load(run)
    assert loaded.policy.dtype == loaded.runner.agents.sampler.model.dtype == torch.bfloat16


def test_the_table_has_every_row(finished, capsys):
    assert run(
        evaluate, evaluate.EvaluateConfig, "--run", finished / "run", "--max-samples", 3,
        "--output", finished / "evaluation",
    ) == 0  # fmt: skip
    result = json.loads((finished / "evaluation" / "evaluation.json").read_text())
    rows = result["rows"]
    assert list(rows)[:7] == [
        "single agent", "asked twice", "two agents, by hand", "two agents, fixed plan",
        "orchestrator, bare model", "orchestrator, untrained", "orchestrator, trained",
    ]  # fmt: skip
    assert re.fullmatch(r"single agent, vote of \d+", list(rows)[7])
    pairs = list(result["compared"])
    assert pairs[0] == "orchestrator, trained − orchestrator, untrained"
    assert rows["orchestrator, bare model"]["graph/valid_rate"] == 0
    assert rows["orchestrator, untrained"]["graph/valid_rate"] == 1
    assert rows["orchestrator, trained"]["orchestrator"] == 6
    single = rows["single agent"]
    assert single["against_single"]["points"] == 0
    assert 0 < single["written"] <= 12  # the length of two replies
    traces = [json.loads(line) for line in (finished / "evaluation" / "traces.jsonl").open()]
    assert {trace["row"] for trace in traces} == set(rows)
    vote = [trace for trace in traces if "vote" in trace["row"]]
    ids = {problem.id for problem in load_problems("word-problems:1", "test", max_samples=3)}
    k = int(re.search(r"vote of (\d+)", vote[0]["row"])[1])
    asked = {(trace["problem"], trace["number"]) for trace in vote}
    assert asked == {(id, number) for id in ids for number in range(1, k + 1)}
    said = capsys.readouterr().out
    assert "asked twice" in said
    assert "has changed since" not in said  # the agents are those of the training


def write_rows(path):
    rows = [{"task": f"What is {n} + {n}?", "result": str(2 * n)} for n in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_start_adapter_of_the_other_graph_form_is_refused(start, base, tmp_path):
    config = options(base, tmp_path, sft_adapter=start, graph_form="questions")
    says = f"was trained with --graph-form prompts, not questions: pass .*{start}_questions"
    with pytest.raises(UsageError, match=says):
        make_trainer(config)
    recipe.check_graph_form(dataclasses.replace(config, resume=True))  # keeps its form


@pytest.fixture
def splits(monkeypatch):
    """Return a function that runs the command up to training, and returns the problems it loaded.

    They are the training, validation and test problems.
    """

    def load(config):
        found = []

        def stop(self, *loaded):
            found.extend(loaded)
            raise KeyboardInterrupt

        trainer = type("Trainer", (), {"__init__": lambda *_: None, "train_and_test": stop})
        monkeypatch.setattr(recipe, "OrchestratorTrainer", trainer)
        with pytest.raises(KeyboardInterrupt):
            recipe.main(config)
        return found

    return load


@pytest.mark.parametrize("first", ["", "word-problems:1+"])
def test_no_problem_of_a_file_is_in_train_and_in_test(tmp_path, splits, first, base):
    """This holds for a single file and in a mixture, with the run's columns and rows."""
    dataset = f"{first}{write_rows(tmp_path / 'own.jsonl')}"
    config = options(
        base, tmp_path, dataset=dataset, columns="question=task,answer=result", split="train[:20]",
        max_samples=40,
    )  # fmt: skip
    train, _, test = splits(config)
    assert test == []
    trained = {problem.question for problem in train}
    chosen = evaluate.choose_split(evaluate.EvaluateConfig(), config, dataset)
    assert chosen[0] == "validation"
    found = {p.question for p in load_problems(dataset, chosen[0], max_samples=40, **chosen[1])}
    assert found
    assert not found & trained
    own = {f"What is {n} + {n}?" for n in range(20)}
    assert {q for q in found | trained if q.startswith("What is") and q in own}
    assert not {f"What is {n} + {n}?" for n in range(20, 30)} & (found | trained)
    by_hand = evaluate.choose_split(evaluate.EvaluateConfig(split="test"), config, dataset)
    assert by_hand == ("test", {"columns": config.columns, "rows": None})
    ours = evaluate.choose_split(evaluate.EvaluateConfig(), config, "word-problems:1")
    assert ours[0] == "test"


def test_no_training_problem_is_tested_if_the_run_used_the_test_split(tmp_path, splits, base):
    write_rows(tmp_path / "test.jsonl")
    config = options(
        base, tmp_path, dataset=f"{tmp_path}", columns="question=task,answer=result",
        split="test[:20]", max_samples=40,
    )  # fmt: skip
    assert splits(config)[2] == []
    chosen = evaluate.choose_split(evaluate.EvaluateConfig(), config, f"{tmp_path}")
    assert chosen == ("validation", {"columns": config.columns, "rows": "test[:20]"})


def test_a_dataset_without_a_test_split_is_trained_on_and_not_tested(
    base, start, tmp_path, splits, capsys
):
    row = {"problem_id": "p", "generator_id": "g", "ground_truth": "2"}
    right = {"rollout_id": "1", "is_correct": True, "solution": "<think>1 + 1 = 2</think>2"}
    rows = [row | {"problem_text": f"Is {i} 2?", "problem_id": f"p{i}"} for i in range(20)]
    file = tmp_path / "kept.jsonl"
    file.write_text("".join(json.dumps(row | {"rollouts": [right]}) + "\n" for row in rows))
    dataset = f"rollouts:{file}"
    unused = f"--start-from {start} is not used: --sft-adapter"
    for given, why in (({}, "is none"), ({"sft_adapter": start}, f"{start} exists")):
        config = options(base, tmp_path, dataset=dataset, start_from=start, **given)
        assert splits(config)[2] == []
        assert f"{unused} {why}" in capsys.readouterr().out
    assert evaluate.choose_split(evaluate.EvaluateConfig(), config, dataset)[0] == "validation"


def test_an_evaluation_reads_the_run_s_columns(finished, tmp_path, monkeypatch):
    run_dir = shutil.copytree(finished / "run", tmp_path / "run")
    config = json.loads((run_dir / "config.json").read_text())
    config |= {"dataset": str(write_rows(tmp_path / "own.jsonl")), "split": "train[:20]"}
    config |= {"columns": "question=task,answer=result"}
    (run_dir / "config.json").write_text(json.dumps(config))
    loaded = []

    def stop(orchestrator, others, problems, seed):
        loaded.extend(problems)
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "make_rows", stop)
    with pytest.raises(KeyboardInterrupt):
        evaluate.main(evaluate.EvaluateConfig(run=(run_dir,), output=tmp_path / "evaluation"))
    expected = load_problems(
        config["dataset"], "validation", columns=config["columns"], rows=config["split"]
    )
    assert [p.question for p in loaded] == [p.question for p in expected]


def test_several_runs_are_averaged(finished, tmp_path, capsys):
    """Two copies of a run have the results of one; a run with other agents is rejected."""
    common = ("--max-samples", 3, "--output")
    results = []
    for runs in (f"{finished / 'run'}", f"{finished / 'run'},{finished / 'run'}"):
        assert run(
            evaluate, evaluate.EvaluateConfig, "--run", runs, *common, tmp_path / "evaluation"
        ) == 0  # fmt: skip
        results.append(json.loads((tmp_path / "evaluation" / "evaluation.json").read_text()))
    one, two = (result["rows"] for result in results)
    assert {**two[evaluate.TRAINED], "accuracy": 0} == {**one[evaluate.TRAINED], "accuracy": 0}
    means = [rows[evaluate.TRAINED]["accuracy"]["mean"] for rows in (one, two)]
    assert means[0] == means[1]
    assert results[0]["compared"] == results[1]["compared"]
    assert "; means over 2 runs, intervals over the problems alone" in results[1]["title"]
    shutil.copytree(finished / "run", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"agent_max_tokens": 7}))
    runs = f"{finished / 'run'},{tmp_path / 'other'}"
    assert run(evaluate, evaluate.EvaluateConfig, "--run", runs, *common, tmp_path / "e") == 2
    assert "other used --agent-max-tokens 7, but the first run used 6" in capsys.readouterr().err


def test_an_evaluation_that_could_not_be_written_is_not_begun(finished, capsys, tmp_path):
    (tmp_path / "taken").write_text("a file")
    arguments = ("--run", finished / "run", "--output", tmp_path / "taken")
    assert run(evaluate, evaluate.EvaluateConfig, *arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: --output {tmp_path / 'taken'} cannot be written")
    assert said.out == ""


def test_a_failed_call_leaves_its_problem_out_of_every_row(finished, capsys, monkeypatch):
    chat, batches = LocalLLM.chat, []

    def lose_the_first(self, calls, *params):  # of the single agent, greedy
        replies = chat(self, calls, *params)
        batches.append(calls)
        return replies if batches[1:] else [Reply("", error="down"), *replies[1:]]

    monkeypatch.setattr(LocalLLM, "chat", lose_the_first)
    arguments = ("--run", finished / "run", "--max-samples", 3, "--output", finished / "failures")
    assert run(evaluate, evaluate.EvaluateConfig, *arguments) == 0
    said = json.loads((finished / "failures" / "evaluation.json").read_text())
    assert said["left_out"] == 1
    assert {row["problems"] for row in said["rows"].values()} == {2}
    assert "1 of 3 problems are left out of all rows" in capsys.readouterr().out
    traces = [json.loads(line) for line in (finished / "failures" / "traces.jsonl").open()]
    assert sum(trace["verdict"] == "agent_failed" for trace in traces) == 1


def runs_of(*texts):
    """Return trajectories of a single agent for a problem whose answer is 18; None: it failed."""
    replies = [Reply("", error="down") if text is None else Reply(text) for text in texts]
    problem, graph = Problem("p", "how many?", "18"), Graph.chain("solve")
    return [Trajectory(problem, graph, replies=[reply]) for reply in replies]


def test_rows_need_a_problem_that_all_have_a_verdict_on():
    right, failed = runs_of("18"), runs_of(None)
    rows = {"a": [right, failed, right], "b": [right, right, failed]}
    assert [len(row) for row in evaluate.without_failures(rows).values()] == [1, 1]
    with pytest.raises(UsageError, match="a call failed on every problem"):
        evaluate.without_failures({"a": [right, failed], "b": [failed, right]})


def test_a_row_that_solves_more_than_the_single_agent_is_ahead_of_it():
    right, wrong = runs_of("18"), runs_of("7")
    single, better = [right, wrong, wrong, wrong], [right, right, right, wrong]
    gain = evaluate.row_metrics(better, single)["against_single"]
    assert gain["points"] == 50
    assert 0 <= gain["low"] <= 50 <= gain["high"] <= 100
    assert evaluate.row_metrics(single, better)["against_single"]["points"] == -50


def test_the_score_of_a_vote_is_its_majority_s_and_of_several_runs_their_mean():
    right, wrong, also_wrong = runs_of("18", "7", "7")
    assert evaluate.scores([[right, wrong, also_wrong], [right, right, wrong]]) == [0, 1]
    for trajectory in (right, wrong, also_wrong):
        trajectory.written = Reply("a graph")
    assert evaluate.scores([[right, wrong, also_wrong], [right, right, wrong]]) == [1 / 3, 2 / 3]


def test_asking_shows_graph_texts_and_answer(finished, capsys):
    question = "Tom has 3 pens and buys 4. How many has he?"
    assert run(ask, ask.AskConfig, question, "--run", finished / "run") == 0
    out = capsys.readouterr().out
    assert "agentA received: solve" in out
    assert re.search(r"agentB received: (red|blue|green|gold)", out)
    assert "answer: " in out


def test_a_reply_with_two_numbers_is_no_answer(monkeypatch, capsys):
    (solved,) = runs_of("It is 3 or 4")
    solved.written = Reply("a graph", completion_tokens=5)
    orchestrator = SimpleNamespace(solve=lambda *_, **options: [solved])
    monkeypatch.setattr(Orchestrator, "load", lambda run_dir: orchestrator)
    assert run(ask, ask.AskConfig, "How many?") == 0
    assert "answer: none found  (tokens: 5 for the graph" in capsys.readouterr().out


def test_asking_without_a_run_or_a_graph_is_one_line(finished, tmp_path, capsys, monkeypatch):
    assert run(ask, ask.AskConfig, "1?", "--run", tmp_path) == 2
    assert "contains no run" in capsys.readouterr().err
    assert run(ask, ask.AskConfig) == 2
    assert "type a question" in capsys.readouterr().err
    none = InvalidGraph("bad_json", "cut off")
    monkeypatch.setattr("recipes.orchestrator.orchestrator.parse_graph", lambda *_: none)
    assert run(ask, ask.AskConfig, "1?", "--run", finished / "run", "--tries", 2) == 2
    output = capsys.readouterr()
    assert output.out.count("no valid graph (bad_json: cut off)") == 2
    assert "error: no valid graph in 2 tries" in output.err


def test_only_evaluate_needs_the_start_adapter(finished, monkeypatch, capsys):
    run_dir, start = finished / "run", finished / "start"
    loaded = evaluate.load_run(run_dir)
    assert set(loaded.policy.peft_config) == {"default", "start", "agent"}
    assert loaded.config.sft_adapter == start
    assert "has changed since" not in capsys.readouterr().out
    monkeypatch.setattr(evaluate, "adapter_hash", lambda path: "another hash")
    evaluate.load_run(run_dir)
    says = f"warning: {start} has changed since {run_dir} was started from it"
    assert says in capsys.readouterr().out
    start.rename(finished / "away")
    try:
        with pytest.raises(UsageError, match="the run was started from this adapter"):
            evaluate.load_run(run_dir)
        loaded = Orchestrator.load(run_dir)
    finally:
        (finished / "away").rename(start)
    assert set(loaded.policy.peft_config) == {"default", "agent"}
    assert isinstance(loaded.runner.agents, LocalLLM)
    # A training problem, because rounding may change the graph for any other problem.
    (solved,) = loaded.solve(load_problems("word-problems:1", "train", max_samples=1))
    assert isinstance(solved.graph, Graph)
    assert len(solved.written.logprobs) == solved.written.completion_tokens > 0


def test_a_run_that_was_moved_keeps_its_own_adapter(finished, tmp_path):
    """The folder at --output may contain the adapter of another run."""
    moved = shutil.copytree(finished / "run", tmp_path / "run.prev")
    name = json.loads((moved / "summary.json").read_text())["exported"]
    kept = moved / f"adapter_{name}" / "adapter_model.safetensors"
    own = {key: tensor + 1 for key, tensor in load_file(kept).items()}
    save_file(own, kept)
    loaded = exported_tensors(Orchestrator.load(moved).policy)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in own.items())
    shutil.rmtree(moved / "adapter_last")
    with pytest.raises(UsageError, match="the run is not finished: continue it with --resume"):
        Orchestrator.load(moved)


# --- the published Python block -----------------------------------------------------------------


def read_block(source):
    """Return the Python block of this recipe's README, or of the published description."""
    readme = ROOT / "recipes" / "orchestrator" / "README.md"
    (file,) = [readme] if source == "README" else (SHARED / "seeds").glob("000_*.txt")
    return re.search(r"```python\n(.*?)```", file.read_text(encoding="utf-8"), re.S)[1]


@pytest.mark.parametrize(
    "source",
    ["README", pytest.param("description", marks=(pytest.mark.slow, needs_shared("seeds")))],
)
def test_the_published_block_runs(base, tmp_path, monkeypatch, source, capsys):
    """Only the imports, the model ids and the sizes are changed."""
    block = read_block(source)
    data = {"train": PROBLEMS[:27], "validation": PROBLEMS[27:32], "test": PROBLEMS[32:35]}
    monkeypatch.setattr(recipe, "load_problems", lambda name, split: data[split])

    class SmallConfig(Config):
        def __init__(self):
            super().__init__()
            self.run_root, self.val_rows = tmp_path / "run", 3

        def to_options(self):
            small = {"max_new_tokens": 6, "agent_max_tokens": 4, "eval_every": 0}
            return dataclasses.replace(super().to_options(), **small)

    names = vars(recipe) | {"Config": SmallConfig}
    # Without an id, the default model of the machine is used.
    setup = Setup(str(base), "gsm8k", "test")
    monkeypatch.setattr(recipe, "default_setup", lambda: setup)
    if source == "README":  # its imports are of this project
        exec(block.partition("cfg =")[0], {})
    code = re.sub(r"^(from|import) [^(]*?(\(.*?\))?\n", "", block, flags=re.M | re.S)
    code = code.replace("Qwen/Qwen2.5-1.5B-Instruct", str(base))
    code = re.sub(r"cfg\.steps = \d+", "cfg.steps = 2", code)
    exec(code, names)
    assert [row["step"] for row in names["logs"]] == [0, 1]
    assert set(names["logs"][0]) == set(LOGS)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["seed"], config["batch_size"], config["group_size"]) == (42, 4, 4)
    # The agents that were passed, not the default ones
    passed = names["agent_model"].name, None
    assert (config["agent_model"], config["agent_adapter"]) == passed
    assert (tmp_path / "run" / "adapters_lora" / "adapter_config.json").exists()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test"]["total"] == 3
    assert "warning: the orchestrator starts without a trained adapter" in capsys.readouterr().out


def test_gsm8k_is_read_from_a_folder(monkeypatch):
    monkeypatch.setattr(recipe, "load_problems", lambda name, split: [name, split])
    train, validation, _ = recipe.load_gsm8k(1, path="files")
    assert (train, validation) == (["gsm8k:files", "train"], ["gsm8k:files"])


def test_the_published_api_can_start_from_a_cold_start(base, start):
    policy = recipe.make_lora_orchestrator(str(base), start_adapter=start)
    assert policy.origin["sft_adapter"] == start  # the reference of the KL term, too
    assert policy.origin["lora_r"] == 8  # as the cold start has it, not the default's 16
    saved = load_file(start / "adapter_model.safetensors").values()
    trained = [tensor for tensor in policy.parameters() if tensor.requires_grad]
    sums = [sum(t.float().abs().sum().item() for t in tensors) for tensors in (saved, trained)]
    assert sums[1] == pytest.approx(sums[0], rel=1e-2)  # of bf16, where the machine has it
