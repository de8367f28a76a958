"""The GRPO loop on a tiny model: it learns, it resumes exactly, it writes what it should."""

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scripted_server import ScriptedServer

from rlm.config import UsageError
from rlm.data import Problem
from rlm.grpo import problems_for_step
from rlm.grpo_config import GRPOConfig
from rlm.machine import Device
from rlm.memory import activation_bytes
from rlm.models import load_base, new_adapter, save_adapter
from rlm.runs import RunDirectory
from train_grpo import GRPOTrainer

CPU = Device("cpu", torch.float32, "test")
PROBLEMS = [Problem(f"p{i}", f"{i} + {i}?", str(2 * i)) for i in range(40)]
LETTERS = set("etaoinshrdlu")


def likes_letters(completions, **_):
    """A toy that a random model meets now and then: the completion holds one of twelve letters."""
    return [float(bool(LETTERS & set(text))) for text in completions]


def a_config(tmp_path: Path, name: str = "run", **options) -> GRPOConfig:
    defaults = {
        "sft_adapter": None,
        "steps": 3,
        "batch_size": 4,
        "group_size": 4,
        "max_new_tokens": 6,
        "learning_rate": 1e-2,
        "warmup_steps": 0,
        "lr_schedule": "constant",
        "lora_r": 4,
        "eval_every": 0,
        "sample_every": 0,
        "save_every": 1,
        "run_dir": tmp_path / name,
        "output": tmp_path / f"{name}_adapter",
    }
    return GRPOConfig(**defaults | options)


def train(model_dir, config, reward=likes_letters, evaluate_on=()):
    torch.manual_seed(config.seed)
    trainer = GRPOTrainer(str(model_dir), config, reward_fn=reward, device=CPU)
    summary = trainer.train(PROBLEMS, evaluate_on)
    return trainer, summary


def rows(config):
    return [json.loads(line) for line in (config.run_dir / "metrics.jsonl").open()]


def without_clock(rows):
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "tokens/"))} for row in rows
    ]


def base_tensors(trainer):
    return {
        name: hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
        for name, tensor in trainer.policy.named_parameters()
        if "lora_" not in name
    }


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_toy_reward_is_learned(model_dir, tmp_path, seed):
    config = a_config(tmp_path, steps=30, group_size=8, seed=seed, save_every=0)
    train(model_dir, config)
    rewards = [row["reward/mean"] for row in rows(config)]
    assert sum(rewards[:3]) / 3 < 0.7
    assert sum(rewards[-5:]) / 5 > 0.9


def test_a_random_reward_teaches_nothing(model_dir, tmp_path):
    rng = random.Random(0)

    def coin(completions, **_):
        return [float(rng.random() < 0.5) for _ in completions]

    config = a_config(tmp_path, steps=20, group_size=8, learning_rate=1e-3, save_every=0)
    train(model_dir, config, coin)
    likes = [
        sum(likes_letters(group["completions"])) / 8
        for group in map(json.loads, (config.run_dir / "samples.jsonl").open())
    ]
    assert abs(sum(likes[-20:]) - sum(likes[:20])) / 20 < 0.3


@pytest.mark.parametrize("algorithm", ["grpo", "drgrpo"])
def test_only_the_adapter_changes_and_all_of_it(model_dir, tmp_path, algorithm):
    torch.manual_seed(0)
    config = a_config(tmp_path, steps=4, algorithm=algorithm)
    trainer = GRPOTrainer(str(model_dir), config, reward_fn=likes_letters, device=CPU)
    base = base_tensors(trainer)
    adapter = {name: tensor.detach().clone() for name, tensor in trainer.adapter.items()}
    trainer.train(PROBLEMS)
    assert base_tensors(trainer) == base
    assert len(adapter) == 2 * 7 * 2  # A and B of seven projections in two layers
    for name, tensor in trainer.adapter.items():
        assert not torch.equal(tensor, adapter[name]), name


def test_the_first_ratio_is_one_and_the_sampler_agrees(model_dir, tmp_path):
    config = a_config(tmp_path, steps=2)
    train(model_dir, config)
    for row in rows(config):
        assert row["policy/clip_fraction"] == 0
        assert row["sampler/logprob_gap_max"] < 1e-4
        assert abs(row["loss/policy"]) < 1e-6
        assert row["optim/grad_norm"] > 0


def test_several_updates_a_batch_move_the_ratio(model_dir, tmp_path):
    config = a_config(tmp_path, steps=3, updates_per_batch=4, learning_rate=3e-2)
    train(model_dir, config)
    assert max(row["policy/clip_fraction"] for row in rows(config)) > 0


@pytest.mark.parametrize("options", [{}, {"updates_per_batch": 2}, {"kl_weight": 0.1}])
def test_three_steps_a_kill_and_three_more_equal_six(model_dir, tmp_path, options):
    options |= {"steps": 6, "lr_schedule": "cosine", "eval_every": 2}
    whole = a_config(tmp_path, "whole", **options)
    train(model_dir, whole, evaluate_on=PROBLEMS[:4])

    parts = a_config(tmp_path, "parts", **options)
    calls = 0

    def killed(completions, **_):
        nonlocal calls
        calls += 1
        if calls == 4:  # in the middle of the fourth step
            raise KeyboardInterrupt
        return likes_letters(completions)

    with pytest.raises(KeyboardInterrupt):
        train(model_dir, parts, killed, evaluate_on=PROBLEMS[:4])
    resumed = a_config(tmp_path, "parts", resume=True, **options)
    train(model_dir, resumed, evaluate_on=PROBLEMS[:4])

    assert without_clock(rows(parts)) == without_clock(rows(whole))
    expected = load_file(whole.output / "adapter_model.safetensors")
    got = load_file(parts.output / "adapter_model.safetensors")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    samples = [(c.run_dir / "samples.jsonl").read_text() for c in (whole, parts)]
    assert samples[0] == samples[1]


def test_a_damaged_checkpoint_is_passed_over(model_dir, tmp_path, capsys):
    config = a_config(tmp_path, steps=3)
    train(model_dir, config)
    newest = sorted((config.run_dir / "checkpoints").iterdir())[-1]
    tensors = newest / "state.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-5] ^= 1
    tensors.write_bytes(content)
    train(model_dir, a_config(tmp_path, steps=4, resume=True))
    out = capsys.readouterr().out
    assert "step_000003 is damaged and set aside: state.safetensors has changed" in out
    assert "before step 3" in out
    assert [row["step"] for row in rows(config)] == [0, 1, 2, 3]


def test_resume_without_a_checkpoint_is_one_line(model_dir, tmp_path):
    with pytest.raises(UsageError, match="no checkpoint"):
        train(model_dir, a_config(tmp_path, resume=True))


def test_a_second_run_keeps_the_first(model_dir, tmp_path):
    config = a_config(tmp_path, steps=1)
    train(model_dir, config)
    train(model_dir, config)
    assert (tmp_path / "run.prev" / "metrics.jsonl").exists()
    assert (tmp_path / "run_adapter.prev" / "run.json").exists()
    assert len(rows(config)) == 1


def test_a_run_leaves_these_files(model_dir, tmp_path):
    config = a_config(tmp_path, steps=5, eval_every=2, keep_checkpoints=2)
    _, summary = train(model_dir, config, evaluate_on=PROBLEMS[:4])
    assert {file.name for file in config.run_dir.iterdir()} == {
        "config.json", "metrics.jsonl", "train_logs.csv", "samples.jsonl", "curves.png",
        "checkpoints", ".lock",
    }  # fmt: skip
    checkpoints = sorted((config.run_dir / "checkpoints").iterdir())
    assert [c.name for c in checkpoints] == ["step_000004", "step_000005"]
    assert {file.name for file in checkpoints[0].iterdir()} == {
        "state.safetensors", "state.json", "manifest.json",
    }  # fmt: skip
    run = json.loads((config.output / "run.json").read_text())
    assert run["base_hash"].startswith("sha256:")
    assert run["step"] == summary["step"]
    assert run["validated_on"] == 4
    evaluated = [row["step"] + 1 for row in rows(config) if "eval/accuracy" in row]
    assert evaluated == [2, 4, 5]


def test_the_best_adapter_is_exported_not_the_last(model_dir, tmp_path, monkeypatch):
    config = a_config(tmp_path, steps=3, eval_every=1)
    accuracies = iter([0, 1, 3, 2])

    class Result:
        def accuracy(self, strict):
            return {"correct": next(accuracies), "total": 4}

    monkeypatch.setattr("train_grpo.evaluate", lambda *a, **k: Result())
    kept = []
    monkeypatch.setattr(
        "rlm.state.TrainingState.save",
        lambda self, run, step, keep: kept.append(
            {name: t.detach().clone() for name, t in self.adapter.items()}
        ),
    )
    trainer, summary = train(model_dir, config, evaluate_on=PROBLEMS[:4])
    assert (summary["step"], summary["accuracy"]) == (2, 0.75)
    assert all(torch.equal(t, kept[2][name]) for name, t in trainer.adapter.items())
    assert not all(torch.equal(kept[3][name], kept[2][name]) for name in kept[2])


def test_a_gradient_that_is_not_finite_changes_nothing(model_dir, tmp_path, monkeypatch):
    config = a_config(tmp_path, steps=3)
    seen = []

    def poisoned(parameters, limit):
        parameters = list(parameters)
        seen.append([p.detach().clone() for p in parameters])
        return torch.tensor(torch.nan if len(seen) == 2 else 0.5)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", poisoned)
    train(model_dir, config)
    assert not all(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(seen[1], seen[2], strict=True))
    assert [row["optim/skipped"] for row in rows(config)] == [0, 1, 1]


def test_three_bad_gradients_in_a_row_stop_the_run(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(torch.inf))
    with pytest.raises(UsageError, match="learning-rate"):
        train(model_dir, a_config(tmp_path, steps=9))


def test_kl_to_the_start_adapter_begins_at_zero(model_dir, tmp_path, tokenizer):
    """The reference is the adapter that training started from, not the bare base."""
    policy = new_adapter(load_base(str(model_dir), CPU), r=4, alpha=8)
    with torch.no_grad():
        for name, tensor in policy.named_parameters():
            if "lora_B" in name:
                tensor.normal_(0, 0.1)
    start = tmp_path / "start"
    save_adapter(policy, tokenizer, start, {})
    config = a_config(tmp_path, steps=3, kl_weight=0.1, sft_adapter=start)
    trainer, _ = train(model_dir, config)
    kls = [row["loss/kl"] for row in rows(config)]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert kls[-1] > 1e-5
    saved = load_file(config.output / "adapter_model.safetensors")
    assert not any("reference" in name for name in saved)
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())
    assert len(trainer.adapter) == len(saved)


def test_a_reward_without_a_verdict_leaves_the_loss(model_dir, tmp_path):
    def sometimes(completions, **_):
        return [None if i % 4 == 0 else r for i, r in enumerate(likes_letters(completions))]

    config = a_config(tmp_path, steps=1)
    train(model_dir, config, sometimes)
    assert rows(config)[0]["reward/no_verdict"] == 4


def test_problems_of_a_step_are_a_pure_function():
    problems = list(range(10))
    epoch = [p for step in range(5) for p in problems_for_step(problems, step, 2, seed=0)]
    assert sorted(epoch) == problems
    assert epoch != problems
    assert problems_for_step(problems, 3, 2, seed=0) == epoch[6:8]
    again = [p for step in range(5, 10) for p in problems_for_step(problems, step, 2, seed=0)]
    assert sorted(again) == problems
    assert again != epoch
    assert problems_for_step(problems, 0, 25, seed=0)[:10] == epoch  # a step may exceed the data


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1, 1, 0.8682, 0.55, 0.2318]),
    ],
)
def test_learning_rate_schedules(schedule, rates):
    config = GRPOConfig(steps=6, warmup_steps=2, learning_rate=1.0, lr_schedule=schedule)
    assert [config.learning_rate_at(s) for s in range(6)] == pytest.approx(rates, abs=1e-4)


# --- samplers, number types, memory -------------------------------------------------------------


def test_a_merged_copy_trains_as_the_model_itself_does(model_dir, tmp_path):
    adapters = []
    for sampler in ("merged", "unmerged"):
        trainer, _ = train(model_dir, a_config(tmp_path, sampler, sampler=sampler))
        adapters.append(trainer.adapter)
        assert trainer.sampler.exact == (sampler == "unmerged")
    for name, tensor in adapters[0].items():
        assert torch.allclose(tensor, adapters[1][name], atol=1e-4), name


def test_rollouts_come_from_a_server_and_the_adapter_goes_there(model_dir, tmp_path):
    with ScriptedServer() as server:
        url = server.url
        config = a_config(tmp_path, steps=2, sampler="vllm", sampler_url=url, eval_every=1)
        train(model_dir, config, evaluate_on=PROBLEMS[:2])
        loaded = [body["lora_path"] for body in server.asked("load_lora_adapter")]
        drawn = [body["model"] for body in server.asked("completions")]
    assert len(loaded) == 5  # three evaluations, two steps: after each the adapter may be another
    assert len(set(drawn)) == 1 + 5  # and the base, asked once whether its log-probabilities fit
    assert all((Path(path) / "adapter_model.safetensors").exists() for path in loaded)
    # The stand-in's log-probabilities are not the model's: the gap must show that.
    learned = [row for row in rows(config) if "loss/policy" in row]
    assert all(row["sampler/logprob_gap_max"] > 0.01 for row in learned)


def test_bf16_computes_in_bf16_and_learns_in_fp32(model_dir, tmp_path):
    config = a_config(tmp_path, steps=4, learning_rate=1e-4, save_every=2)
    trainer = GRPOTrainer(
        str(model_dir), config, reward_fn=likes_letters, device=Device("cpu", torch.bfloat16, "t")
    )
    start = {name: tensor.detach().clone() for name, tensor in trainer.adapter.items()}
    trainer.train(PROBLEMS)
    moved = 0
    for name, computed in trainer.trained.computed.items():
        master = trainer.adapter[name]
        assert computed.dtype == torch.bfloat16
        assert master.dtype == torch.float32
        assert torch.equal(computed, master.bfloat16())
        moved += (master != start[name]).sum() - (computed != start[name].bfloat16()).sum()
    assert moved > 0  # some updates are smaller than bf16 can show, and are kept all the same
    checkpoint = load_file(config.run_dir / "checkpoints" / "step_000004" / "state.safetensors")
    exported = load_file(config.output / "adapter_model.safetensors")
    assert {t.dtype for k, t in checkpoint.items() if "lora" in k and "adapter/" in k} == {
        torch.float32
    }
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}

    resumed = a_config(tmp_path, steps=6, learning_rate=1e-4, resume=True)
    again = GRPOTrainer(
        str(model_dir), resumed, reward_fn=likes_letters, device=Device("cpu", torch.bfloat16, "t")
    )
    assert again.state.restore(RunDirectory(resumed.run_dir, resume=True)) == 4
    for name, tensor in trainer.adapter.items():
        assert torch.equal(tensor, again.adapter[name]), name
        assert torch.equal(trainer.trained.computed[name], again.trained.computed[name]), name


def test_checkpointing_changes_memory_and_nothing_else(model_dir, tmp_path):
    kept, adapters = [], []
    for checkpointing in (False, True):
        config = a_config(tmp_path, f"run{checkpointing}", checkpointing=checkpointing)
        trainer, _ = train(model_dir, config)
        kept.append(activation_bytes(trainer.policy))
        adapters.append(trainer.adapter)
    assert kept[1] < kept[0] / 4
    for name, tensor in adapters[0].items():
        assert torch.equal(tensor, adapters[1][name]), name


def test_the_plan_makes_micro_batches_that_fit(model_dir, tmp_path, monkeypatch, capsys):
    trainer, _ = train(model_dir, a_config(tmp_path, steps=1, batch_size=8, group_size=8))
    assert trainer.plan.train_batch_tokens == 512
    assert "memory: about" in capsys.readouterr().out
    needed = trainer.plan.learning
    monkeypatch.setattr("rlm.memory.available_memory", lambda device: int(needed * 0.7))
    smaller, _ = train(model_dir, a_config(tmp_path, "tight", steps=1, batch_size=8, group_size=8))
    assert 64 <= smaller.plan.train_batch_tokens < 512
    assert smaller.plan.learning < 0.7 * needed
    for name, tensor in trainer.adapter.items():  # and what is learned does not depend on it
        assert torch.allclose(tensor, smaller.adapter[name], atol=1e-5), name
    monkeypatch.setattr("rlm.memory.available_memory", lambda device: 1000)
    train(model_dir, a_config(tmp_path, "hopeless", steps=1))
    assert "may not fit" in capsys.readouterr().out


# --- several processes --------------------------------------------------------------------------

WORKER = """
import sys, torch
sys.path[:0] = [{root!r}, {tests!r}]
import test_train_grpo as t
from pathlib import Path
torch.set_num_threads(1)
config = t.a_config(Path({folder!r}), {name!r}, **{options!r})
reward = t.no_signal_for_odd_problems if {uneven!r} else t.likes_letters
t.train({model!r}, config, reward, evaluate_on=t.PROBLEMS[:5])
"""


def no_signal_for_odd_problems(prompts, completions, **_):
    """Dealt out in turns, the second of two processes never has a group with a difference."""
    likes = likes_letters(completions)
    return [r if int(p.split()[0]) % 2 == 0 else 0.0 for p, r in zip(prompts, likes, strict=True)]


@pytest.mark.parametrize("uneven", [False, True])
def test_two_processes_learn_what_one_does(model_dir, tmp_path, uneven):
    root, tests = Path(__file__).parent.parent, Path(__file__).parent
    options = {"steps": 3, "batch_size": 5, "eval_every": 2, "updates_per_batch": 2}
    for name, launch in (("one", []), ("two", ["--nproc_per_node=2"])):
        script = tmp_path / f"{name}.py"
        script.write_text(
            WORKER.format(
                root=str(root),
                tests=str(tests),
                folder=str(tmp_path),
                name=name,
                options=options,
                uneven=uneven,
                model=str(model_dir),
            )
        )
        module = ["-m", "torch.distributed.run", "--standalone", *launch] if launch else []
        command = [sys.executable, *module, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("2 processes share this run") == (name == "two")
    one, two = (
        load_file(tmp_path / f"{name}_adapter" / "adapter_model.safetensors")
        for name in ("one", "two")
    )
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-5), name
    one, two = (without_clock(rows(a_config(tmp_path, name))) for name in ("one", "two"))
    assert len(one) == len(two) == 3  # one process writes
    for left, right in zip(one, two, strict=True):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert right[key] == pytest.approx(value, abs=1e-4), key
