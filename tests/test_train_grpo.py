"""The GRPO loop with a tiny model: learning, resuming, validation, files, memory and processes."""

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path

import faults
import pytest
import torch
from conftest import let_it_speak
from safetensors.torch import load_file
from scripted_server import ScriptedServer

import train_grpo
import train_sft
from rlm.cli.options import Interrupted, UsageError
from rlm.data.problem import Problem
from rlm.model.adapters import new_adapter
from rlm.model.base import load_base
from rlm.model.export import save_adapter
from rlm.model.hardware import Device
from rlm.rewards import RewardFunction
from rlm.runs.directory import RunDirectory
from rlm.sampling import SamplingParams, prompt_seed
from rlm.training import memory_plan
from rlm.training import metrics as report
from rlm.training import state as training_state
from rlm.training import trainer as training
from rlm.training.config import GRPOConfig
from rlm.training.distributed import Distributed
from rlm.training.logprobs import token_logprobs
from rlm.training.memory_plan import HEADROOM, activation_bytes
from rlm.training.sft_config import SFTConfig
from rlm.training.state import LOG_BYTES
from rlm.training.validation import Validation, Validations, choose_export, validation_facts
from train_grpo import GRPOTrainer

CPU = Device("cpu", torch.float32, "test")
PROBLEMS = [Problem(f"p{i}", f"{i} + {i}?", str(2 * i)) for i in range(40)]
LETTERS = set("etaoinshrdlu")


def likes_letters(completions, **_):
    """A reward that a random model sometimes earns: the text contains one of twelve letters."""
    return [float(bool(LETTERS & set(text))) for text in completions]


def a_config(tmp_path: Path, name: str = "run", **options) -> GRPOConfig:
    defaults = {
        "algorithm": "grpo",
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
        "save_every": 1,
        "run_dir": tmp_path / name,
        "output": tmp_path / f"{name}_adapter",
    }
    return GRPOConfig(**defaults | options)


def a_trainer(model_dir, config, reward=likes_letters, device=CPU):
    torch.manual_seed(config.seed)
    return GRPOTrainer(str(model_dir), config, reward_fn=reward, device=device)


def train(model_dir, config, reward=likes_letters, evaluate_on=()):
    trainer = a_trainer(model_dir, config, reward)
    return trainer, trainer.train(PROBLEMS, evaluate_on)


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


def test_a_random_reward_teaches_nothing(model_dir, tmp_path):
    """Ten steps with the true reward do raise it, so the test would notice learning."""
    rng = random.Random(0)

    def coin(completions, **_):
        return [float(rng.random() < 0.5) for _ in completions]

    def rise(name, reward):
        config = a_config(tmp_path, name, steps=10, group_size=8, save_every=0)
        train(model_dir, config, reward)
        likes = [sum(likes_letters(g["completions"])) / 8 for g in logged_groups(config)]
        return (sum(likes[-12:]) - sum(likes[:12])) / 12  # the last minus the first three steps

    assert rise("true", likes_letters) > 0.5
    assert abs(rise("coin", coin)) < 0.2


def test_only_the_adapter_changes_and_all_of_it(model_dir, tmp_path):
    config = a_config(tmp_path, steps=4)
    trainer = a_trainer(model_dir, config)
    base = base_tensors(trainer)
    adapter = {name: tensor.detach().clone() for name, tensor in trainer.adapter.items()}
    trainer.train(PROBLEMS)
    assert base_tensors(trainer) == base
    assert len(adapter) == 2 * 7 * 2  # A and B of seven projections in two layers
    for name, tensor in trainer.adapter.items():
        assert not torch.equal(tensor, adapter[name]), name


def test_the_first_ratio_is_one_and_the_sampler_agrees(model_dir, tmp_path):
    """Scoring and sampling must use the same distribution, including the temperature."""
    config = a_config(tmp_path, steps=2, temperature=0.7)
    train(model_dir, config)
    for row in rows(config):
        assert row["policy/clip_fraction"] == 0
        assert row["sampler/logprob_gap_max"] < 1e-4
        assert abs(row["loss/policy"]) < 1e-6
        assert row["optim/grad_norm"] > 0


def test_the_optimizer_gets_the_options(model_dir, tmp_path):
    """The learning rates follow the warm-up and the schedule, and the gradients are clipped."""
    config = a_config(
        tmp_path, steps=2, learning_rate=0.01, warmup_steps=2, lr_schedule="linear",
        max_grad_norm=1e-3, updates_per_batch=2, batch_size=16,
    )  # fmt: skip
    trainer = a_trainer(model_dir, config)
    stepped = []

    def note(optimizer, *_):
        (group,) = optimizer.param_groups
        norm = torch.stack([p.grad.norm() for p in group["params"]]).norm().item()
        stepped.append((group["lr"], norm))

    trainer.optimizer.register_step_pre_hook(note)
    trainer.train(PROBLEMS)
    rates, norms = zip(*stepped, strict=True)
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.0055])
    assert rates == pytest.approx([config.learning_rate_at(done / 2, done) for done in range(4)])
    assert norms == pytest.approx([1e-3] * 4, rel=1e-3)
    assert [row["optim/lr"] for row in rows(config)] == pytest.approx(rates[1::2])
    assert all(row["optim/grad_norm"] > 1e-3 for row in rows(config))  # the norm before clipping


def test_a_run_leaves_these_files(model_dir, tmp_path, monkeypatch):
    drawn = []

    def draw(rows, path, title):
        drawn.append(len(rows))
        path.touch()

    monkeypatch.setattr(training, "learning_curves", draw)
    config = a_config(tmp_path, steps=5, eval_every=2)
    _, summary = train(model_dir, config, evaluate_on=PROBLEMS[:4])
    assert {file.name for file in config.run_dir.iterdir()} == {
        "config.json", "metrics.jsonl", "train_logs.csv", "samples.jsonl", "curves.png",
        "checkpoints", ".lock", "adapter_best", "adapter_last",
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
    assert run["start_accuracy"] == rows(config)[0]["eval/start_accuracy"]
    assert run["steps_run"] == 5
    evaluated = [row["step"] + 1 for row in rows(config) if "eval/accuracy" in row]
    assert evaluated == drawn == [2, 4, 5]


def validated(*means, measure="accuracy", problems=6):
    """Return validations after steps 0, 1, …; each number in `means` is that of solved problems."""
    record = Validations(measure)
    for step, solved in enumerate(means):
        record.add(step, [1.0] * solved + [0.0] * (problems - solved))
    return record


LAST, BETTER = "the adapter after the last step (2)", "scored significantly better than"


@pytest.mark.parametrize(
    ("record", "options", "step", "said"),
    [
        # With six problems, 5 solved problems are not significantly better than 3.
        (validated(1, 5, 3), {}, 2, f"{LAST}; step 1 scored better by +33.3 points"),
        (validated(1, 5, 3), {}, 2, "(95 % interval -33.4 to +100.0, best of 2), but not signif"),
        (validated(1, 5, 3), {"stopped": "the KL rose"}, 1, "; the KL rose"),
        # A lead of 20 of 100 problems has t = 4.97, so p is far below 0.05 / 2.
        (validated(10, 60, 40, problems=100), {}, 1, f"step 1, which {BETTER} {LAST}, by +20.0"),
        (validated(60, 30, 40, problems=100), {}, 0, f"the initial adapter, which {BETTER}"),
        (validated(1, 2, 2), {}, 2, f"{LAST}, which is also the best"),  # the later of two equals
        (validated(0, 5, 0, problems=5), {}, 2, "to compare (fewer than 6)"),
        (validated(), {}, 2, f"{LAST}; nothing was validated"),
        (validated(1, 5), {}, 2, f"{LAST}; it was not validated"),
    ],
)
def test_the_best_step_is_exported_only_if_its_lead_is_no_chance(record, options, step, said):
    name, reason = choose_export(record, 2, **options)
    assert said in reason
    assert (name == "best") == (step < 2)
    assert Validations.from_dict(json.loads(json.dumps(asdict(record)))) == record


def test_the_more_steps_were_tried_the_wider_is_the_interval_of_the_best():
    """A lead of 4 of 100 problems has t = 2.03: enough for one comparison, but not for nine."""
    lead = [validated(*[0] * tried, 14, 10, problems=100) for tried in (0, 8)]
    assert [choose_export(one, len_ + 1)[0] for one, len_ in zip(lead, (0, 8), strict=True)] == [
        "best", "last",
    ]  # fmt: skip


def test_a_validation_in_which_no_problem_was_solved_is_not_certain():
    found = Validation(0, [0.0] * 20).summary("accuracy")
    assert (found["low"], found["high"]) == (0.0, pytest.approx(0.161, abs=1e-3))  # Wilson
    assert Validation(0, [0.0] * 20).summary("reward")["high"] == 0.0


def test_problems_without_a_verdict_are_not_compared():
    record = Validations("reward")
    for step, scores in enumerate([[None] * 8, [9.0, None, *[1.0] * 6], [None, 9.0, *[0.5] * 6]]):
        record.add(step, scores)
    assert record.start.mean == 0.0
    assert f"step 1, which {BETTER} {LAST}, by +0.500" in choose_export(record, 2)[1]


def test_a_validation_without_any_verdict_is_never_the_best():
    """Its mean counts as 0, which would be more than the negative rewards of other validations."""
    for scores, best in (([[-0.3], [-0.1], [None]], 1), ([[None], [-0.3], [-0.5]], 1)):
        record = Validations("reward")
        for step, score in enumerate(scores):
            record.add(step, score)
        assert record.best.step == best


def test_the_summary_shows_start_best_and_last(capsys):
    record = validated(1, 5, 3, problems=10)
    summary = {"validation": record.summary(4), "validated_on": 10, "seconds": 1.0}
    summary |= {"reason": "the last step", "peak_memory_gb": 1.0}
    report.summary_card(GRPOConfig(), summary)
    shown = capsys.readouterr().out
    assert (
        "validation accuracy: start 10.0%, best 50.0% (step 1), last 30.0% (step 2); "
        "4 completions of each of 10 problems\n"
    ) in shown
    # Two of ten differences are 1, so s = 0.4216, t(9) = 2.2622, and the half-width is 0.3016.
    assert "last +20.0 points (95 % interval -10.2 to +50.2)\n" in shown
    assert "exported: the last step\n" in shown
    report.summary_card(GRPOConfig(), summary | {"validation": None, "validated_on": 0})
    assert "validation: not measured\n" in capsys.readouterr().out


def scripted(monkeypatch, *solved):
    """Replace the validations: each one solves the next number of problems in `solved`."""
    counts = iter(solved)

    def scores(self, problems, k, advance):
        right = next(counts)
        found = [float(i < right) for i in range(len(problems))]
        return {"accuracy": found, "reward": found}

    monkeypatch.setattr(GRPOTrainer, "validation_scores", scores)
    return counts


def test_best_and_last_are_kept_and_survive_a_resume(model_dir, tmp_path, monkeypatch):
    """The best adapter is of step 1, whose checkpoint is deleted before the run is resumed."""
    left = scripted(monkeypatch, 0, 20, 4, 4, 6)
    options = {"eval_every": 1}
    config = a_config(tmp_path, steps=3, **options)
    _, before = train(model_dir, config, evaluate_on=PROBLEMS[:20])
    assert (before["step"], before["accuracy"], before["exported"]) == (1, 1.0, "best")
    assert not (config.run_dir / "checkpoints" / "step_000001").exists()

    def tensors(folder):
        return load_file(folder / "adapter_model.safetensors")

    best, of_step_3 = tensors(config.output), tensors(config.run_dir / "adapter_last")
    resumed = a_config(tmp_path, steps=4, resume=True, **options)
    trainer, summary = train(model_dir, resumed, evaluate_on=PROBLEMS[:20])
    assert not list(left)
    assert (summary["step"], summary["accuracy"], summary["steps_run"]) == (1, 1.0, 4)
    saved = json.loads((config.run_dir / "checkpoints/step_000003/state.json").read_text())
    assert 0 < saved["seconds"] <= before["seconds"]
    assert trainer.state._seconds_before == saved["seconds"] < summary["seconds"]
    assert [saved["validations"][name]["step"] for name in ("start", "best", "last")] == [0, 1, 3]
    for folder in (config.output, config.run_dir / "adapter_best"):
        assert all(torch.equal(tensor, tensors(folder)[name]) for name, tensor in best.items())
    last = tensors(config.run_dir / "adapter_last")
    assert not all(torch.equal(tensor, last[name]) for name, tensor in of_step_3.items())
    record = json.loads((config.run_dir / "adapter_best" / "run.json").read_text())
    assert (record["step"], record["accuracy"]) == (1, 1.0)
    assert not list(config.run_dir.glob("*.prev"))


@pytest.mark.parametrize("damage", ["a row", "the file"])
def test_a_damaged_log_changes_nothing_that_is_exported(model_dir, tmp_path, damage):
    config = a_config(tmp_path, eval_every=1)
    _, before = train(model_dir, config, evaluate_on=PROBLEMS[:6])
    log = config.run_dir / "metrics.jsonl"
    log.write_text(log.read_text().replace('"step": 1', '"stfp": 1') if damage == "a row" else "")
    again = a_config(tmp_path, eval_every=1, resume=True)
    _, after = train(model_dir, again, evaluate_on=PROBLEMS[:6])
    for name in ("step", "steps_run", "exported", "reason", "validation"):
        assert after[name] == before[name]


def test_a_run_that_ends_between_two_mini_batches_repeats_the_step(
    model_dir, tmp_path, monkeypatch
):
    options = {"algorithm": "topr", "mini_batch_size": 1, "warmup_steps": 5}
    whole = a_config(tmp_path, "whole", **options)
    train(model_dir, whole)
    norms = torch.nn.utils.clip_grad_norm_
    calls = iter(range(99))

    def power_cut(*arguments):
        if next(calls) == 5:  # in a second step, as a step has at most 4 updates
            raise ConnectionResetError
        return norms(*arguments)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", power_cut)
    with pytest.raises(ConnectionResetError):
        train(model_dir, a_config(tmp_path, "cut", **options))
    resumed = a_config(tmp_path, "cut", resume=True, **options)
    train(model_dir, resumed)
    assert without_clock(rows(resumed)) == without_clock(rows(whole))
    one, two = (load_file(c.output / "adapter_model.safetensors") for c in (whole, resumed))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_another_measure_begins_a_new_comparison(model_dir, tmp_path, monkeypatch, capsys):
    """Accuracies cannot be paired with the mean rewards of earlier validations."""
    scripted(monkeypatch, 3, 9, 2, 5, 4)
    train(model_dir, a_config(tmp_path, steps=2, eval_every=1), evaluate_on=PROBLEMS[:10])
    resumed = a_config(tmp_path, steps=4, resume=True, eval_every=1)
    _, summary = train(model_dir, resumed, None, evaluate_on=PROBLEMS[:10])
    assert summary["validation"] is None  # the start was measured by the reward
    assert "start by another score" in validation_facts(summary)["validation"]
    assert "earlier validations are not compared" in capsys.readouterr().out
    assert summary["step"] == 4


def test_a_resumed_run_says_that_the_code_of_its_reward_has_changed(model_dir, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("def letters(completions): ...\n")
    said = f"warning: the file of --reward {file}:letters has changed since the last start"

    def run(steps, **options):
        train(model_dir, a_config(tmp_path, steps=steps, reward=f"{file}:letters", **options))
        return said in capsys.readouterr().out

    assert not run(1)
    assert not run(2, resume=True)
    file.write_text("def letters(completions, answer): ...\n")
    assert run(3, resume=True)
    assert not run(4, resume=True)  # the warning is printed once


def test_processes_with_other_code_of_the_reward_do_not_train_together(
    model_dir, tmp_path, monkeypatch
):
    file = tmp_path / "mine.py"
    file.write_text("def letters(completions): ...\n")
    main = {"inputs": {f"the file of --reward {file}:letters": "the hash on another machine"}}
    monkeypatch.setattr(Distributed, "broadcast", lambda self, value: {**value, **main})
    config = a_config(tmp_path, reward=f"{file}:letters")
    state = a_trainer(model_dir, config).state
    with (
        RunDirectory(config.run_dir, resume=False) as run,
        pytest.raises(UsageError, match=r"differs from .* \(the file of --reward"),
    ):
        state.begin(run, config, PROBLEMS, ())


def test_a_trainer_trains_once(model_dir, tmp_path):
    trainer, _ = train(model_dir, a_config(tmp_path, steps=1))
    with pytest.raises(RuntimeError, match="has already trained; make a new GRPOTrainer"):
        trainer.train(PROBLEMS)


def test_validation_gives_a_reward_the_same_columns_as_training(model_dir, tmp_path):
    asked = []

    def of_length(completions, completion_ids, is_truncated):
        asked.append(len(completions))
        assert is_truncated == [ids[-1] != 257 for ids in completion_ids]  # no end token
        return [float(len(ids)) for ids in completion_ids]

    _, summary = train(model_dir, a_config(tmp_path, steps=1), of_length, PROBLEMS[:2])
    assert summary["validation"]["start"]["mean"] > 1
    # Validation, training, validation. A failed assertion would cause a call for each completion.
    assert asked == [16, 16, 16]


def test_validation_draws_as_training_does(model_dir, tmp_path):
    trainer = a_trainer(model_dir, a_config(tmp_path, temperature=0.7, seed=5))
    drawn = trainer.evaluate(PROBLEMS[:4], 4, lambda: None).groups
    prompts = [trainer.render(problem) for problem in PROBLEMS[:4]]
    seeds = [prompt_seed(5, problem.id) for problem in PROBLEMS[:4]]
    expected = trainer.sampler.sample(prompts, 4, SamplingParams(6, temperature=0.7), seeds)
    one, two = ([[c.token_ids for c in group] for group in some] for some in (drawn, expected))
    assert one == two


def test_the_start_is_exported_if_training_made_it_worse(model_dir, tmp_path, monkeypatch):
    scripted(monkeypatch, 20, 19, 1)
    config = a_config(tmp_path, steps=2, eval_every=1)
    trainer = a_trainer(model_dir, config)
    start = {name: tensor.clone() for name, tensor in trainer.adapter.items()}
    summary = trainer.train(PROBLEMS, PROBLEMS[:20])
    assert (summary["step"], summary["accuracy"]) == (0, 1.0)
    assert "(2), by +0.950 (" in summary["reason"]
    assert all(torch.equal(t, start[name]) for name, t in trainer.adapter.items())


def test_a_run_that_makes_answers_worse_is_stopped(model_dir, tmp_path, monkeypatch, capsys):
    """A fall of the accuracy stops the run, unless the reward rises significantly."""

    def train_to(name, accuracies, rewards):
        left = iter(list(zip(accuracies, rewards, strict=True)))

        def scores(self, problems, k, advance):
            right, liked = next(left)
            return {
                kind: [float(i < count) for i in range(len(problems))]
                for kind, count in {"accuracy": right, "reward": liked}.items()
            }

        monkeypatch.setattr(GRPOTrainer, "validation_scores", scores)
        config = a_config(tmp_path, name, steps=3, eval_every=1, save_every=0)
        _, summary = train(model_dir, config, evaluate_on=PROBLEMS[:20])
        assert (config.run_dir / f"checkpoints/step_00000{summary['steps_run']}").exists()
        return summary["steps_run"], summary["step"]

    # Step 2 has the same mean reward as step 1, but a lower accuracy.
    assert train_to("noise", [12, 11, 3], [10, 10, 10]) == (2, 1)
    said = capsys.readouterr().out
    assert "stopped after step 2: the accuracy changed by -45.0 points (95 % interval -7" in said
    assert train_to("both", [12, 11, 3], [10, 9, 3]) == (2, 0)  # the start is exported
    assert train_to("another aim", [12, 8, 3, 2], [3, 12, 15, 17]) == (3, 3)
    assert train_to("honest", [3, 4, 2, 5], [3, 4, 2, 5]) == (3, 3)
    assert "stopped after step" not in capsys.readouterr().out.split("another aim")[-1]


def test_a_stopped_run_that_is_killed_in_its_export_only_exports_again(
    model_dir, tmp_path, monkeypatch
):
    """The run stops after step 2 of 3. A third step would need a fourth validation, which fails."""

    def result(name, **options):
        config = a_config(tmp_path, name, eval_every=1, **options)
        _, summary = train(model_dir, config, evaluate_on=PROBLEMS[:20])
        return {key: summary[key] for key in ("exported", "reason", "step", "steps_run")}

    scripted(monkeypatch, 12, 13, 1)
    whole = result("whole")
    assert (whole["step"], whole["steps_run"]) == (1, 2)
    scripted(monkeypatch, 12, 13, 1)
    with monkeypatch.context() as patch:
        patch.setattr(training, "save_adapter", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            result("killed")
    assert result("killed", resume=True) == whole


def test_a_signal_during_a_validation_ends_the_run_at_once(model_dir, tmp_path, monkeypatch):
    def scores(self, problems, k, advance):
        if self.run and not self.run.directory.interrupted:  # once, and not before training
            os.kill(os.getpid(), signal.SIGTERM)
        return {"accuracy": [0.0] * len(problems), "reward": [0.0] * len(problems)}

    monkeypatch.setattr(GRPOTrainer, "validation_scores", scores)
    config = a_config(tmp_path, eval_every=1, save_every=0)
    with pytest.raises(Interrupted, match="is saved up to step 1"):
        train(model_dir, config, evaluate_on=PROBLEMS[:2])
    assert len(rows(config)) == 1  # no further step


def test_of_a_run_that_improves_the_last_step_is_exported(model_dir, tmp_path):
    """The validation on six problems uses the custom reward."""
    config = a_config(tmp_path, steps=12, eval_every=3)
    _, summary = train(model_dir, config, evaluate_on=PROBLEMS[:6])
    assert (summary["step"], summary["exported"]) == (12, "last")
    found = summary["validation"]
    assert (found["measure"], found["completions"]) == ("reward", 3)
    assert found["last"]["mean"] > found["start"]["mean"]
    row = rows(config)[-1]
    assert row["eval/reward"] == found["last"]["mean"]
    assert row["eval/reward_low"] <= row["eval/reward"] <= row["eval/reward_high"]
    assert row["eval/accuracy"] == 0.0  # the accuracy is logged, too


def test_curves_are_drawn_at_each_validation_of_open_answers(model_dir, tmp_path, monkeypatch):
    """Open answers have only a reward. The curves are also drawn at the end of the run."""
    drawn = []
    monkeypatch.setattr(training, "learning_curves", lambda rows, *_: drawn.append(len(rows)))
    problems = [Problem(f"p{i}", f"{i}?", "", answer_type="open") for i in range(4)]
    trainer = a_trainer(model_dir, a_config(tmp_path, steps=3, eval_every=2))
    trainer.train(problems, problems[:2])
    assert drawn == [2, 3]


@pytest.mark.parametrize(("problems", "samples"), [(100, 2), (40, 4), (6, 16)])
def test_few_validation_problems_have_many_completions(problems, samples):
    """A validation samples about as many completions as a training step, which has 160."""
    assert GRPOConfig().eval_group_size_for(problems) == samples


@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
def test_a_reference_is_computed_only_for_a_kl_term(model_dir, tmp_path, monkeypatch, kl_weight):
    calls = {"token_logprobs": 0, "reference_logprobs": 0, "policy_loss": 0}

    def count(module, name):
        function = getattr(module, name)

        def counted(*arguments, **options):
            calls[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, counted)

    count(training_state, "token_logprobs")
    count(train_grpo, "policy_loss")
    count(train_grpo, "reference_logprobs")
    train(model_dir, a_config(tmp_path, steps=1, updates_per_batch=2, kl_weight=kl_weight))
    batches = calls["policy_loss"] // 2  # per pass; only the first computes the reference
    assert batches
    assert calls["token_logprobs"] == calls["policy_loss"]
    assert calls["reference_logprobs"] == (batches if kl_weight else 0)


@pytest.mark.parametrize("mini_batch_size", [4, 2])
def test_every_pass_compares_with_the_policy_before_the_first(
    model_dir, tmp_path, monkeypatch, mini_batch_size
):
    """One mini-batch keeps the values of its first pass, and two mini-batches need a forward pass.

    The sampler's values are not used, because its merged weights are rounded.
    """
    seen, loss = [], train_grpo.policy_loss

    def watched(logprobs, micro, *arguments, **options):
        seen.append((logprobs.detach(), micro.old_logprobs))
        return loss(logprobs, micro, *arguments, **options)

    monkeypatch.setattr(train_grpo, "policy_loss", watched)
    config = a_config(tmp_path, steps=1, updates_per_batch=3, mini_batch_size=mini_batch_size)
    train(model_dir, config, odd_texts)
    count = len(seen) // 3
    first, *later = [seen[i : i + count] for i in range(0, len(seen), count)]
    before = [new if old is None else old for new, old in first]
    assert torch.allclose(first[0][0], before[0], atol=1e-6)
    assert [old is None for _, old in first] == [mini_batch_size == 4] * count
    for later_pass in later:
        for (new, old), expected in zip(later_pass, before, strict=True):
            assert torch.equal(old, expected)
            assert not torch.equal(new, expected)


def test_a_gradient_that_is_not_finite_changes_nothing(model_dir, tmp_path, monkeypatch):
    """The step makes no further pass, because the same weights would give the same gradient."""
    config = a_config(tmp_path, steps=3, updates_per_batch=2, kl_weight=0.1)
    norms, seen = iter([0.5, 0.5, torch.nan, 0.5, 0.5]), []  # step 2 has one pass

    def poisoned(parameters, limit):
        seen.append(torch.cat([p.detach().flatten() for p in parameters]))
        return torch.tensor(next(norms))

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", poisoned)
    train(model_dir, config)
    changed = [not torch.equal(*pair) for pair in itertools.pairwise(seen)]
    assert changed == [True, True, False, True]
    assert [row["optim/skipped"] for row in rows(config)] == [0, 1, 1]
    assert not list(norms)


def test_in_fp16_the_pass_after_an_overflow_has_another_scale(model_dir, tmp_path, monkeypatch):
    norms = iter([torch.inf, 0.5])
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(next(norms)))
    config = a_config(tmp_path, steps=1, updates_per_batch=2)
    a_trainer(model_dir, config, device=Device("cpu", torch.float16, "test")).train(PROBLEMS)
    assert not list(norms)
    assert rows(config)[0]["optim/grad_norm"] == 0.5


def test_a_step_without_an_update_does_not_prove_its_weights(model_dir, tmp_path):
    """Otherwise a run could go back to bad weights whose next step had no signal."""
    config = a_config(tmp_path)
    state = a_trainer(model_dir, config).state
    state.count_update(1, skipped=False)
    state.restore_if_diverged(None)
    assert state.last_finite == 1
    state.count_update(3, skipped=True)  # step 2 made no update
    state.restore_if_diverged(None)
    assert (state.last_finite, state.consecutive_skips) == (1, 1)


def test_in_fp16_a_skipped_update_lowers_the_scale_of_the_loss(model_dir, tmp_path):
    """Such an update does not show that the weights are bad. Good updates raise the scale again."""
    fp16 = Device("cpu", torch.float16, "test")
    config = a_config(tmp_path)
    state = a_trainer(model_dir, config, device=fp16).state
    scale = state.weights.loss_scale
    assert scale == 2.0**14
    for halvings in range(1, 5):  # more than end a run in fp32
        state.count_update(0, skipped=True)
        assert state.weights.loss_scale == scale / 2**halvings
    assert state.consecutive_skips == 0
    assert state.skipped_total == 4
    for _ in range(203):
        state.count_update(0, skipped=False)
    with RunDirectory(config.run_dir, resume=False) as run:
        state._began -= 3600  # loading the model does not count as training
        state.begin(run, config, PROBLEMS, ())
        assert state.minutes < 30
        again = a_trainer(model_dir, config, device=fp16).state
        again.origin = state.origin
        run.log({"step": 0})  # logged after the checkpoint
        again.restore(run)
        assert run.metrics() == []
        in_fp32 = a_trainer(model_dir, config).state  # as with --dtype auto on another machine
        in_fp32.origin = state.origin
        in_fp32.restore(run)
    assert (again.weights.loss_scale, again.weights.good_updates) == (scale / 2**3, 3)
    assert (in_fp32.weights.loss_scale, in_fp32.weights.good_updates) == (1, 0)
    for _ in range(3000):
        state.count_update(0, skipped=False)
    assert state.weights.loss_scale == 2.0**16
    for _ in range(16 + 2):
        state.count_update(0, skipped=True)
    assert (state.weights.loss_scale, state.consecutive_skips) == (1, 2)


def test_bad_gradients_from_the_start_at_half_the_rate_too_end_the_run(
    model_dir, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(torch.inf))
    with pytest.raises(UsageError, match="even at half the learning rate; start again"):
        train(model_dir, a_config(tmp_path, steps=30))
    said = capsys.readouterr().out
    assert "continuing from the checkpoint of step 0 with half the learning rate" in said
    assert said.count("update skipped") == 6  # three before and three after the restore


def a_start_adapter(model_dir, tokenizer, path: Path) -> Path:
    """Save an adapter that changes the completions of the base model."""
    policy = let_it_speak(new_adapter(load_base(str(model_dir), CPU), r=4, alpha=8), 0.1)
    save_adapter(policy, tokenizer, path, {})
    return path


def test_a_config_made_in_python_has_the_rank_of_its_start_adapter(model_dir, tmp_path, tokenizer):
    """Otherwise the recorded rank would be wrong. test_adapter_info tests the command line."""
    start = a_start_adapter(model_dir, tokenizer, tmp_path / "start")  # rank 4, alpha 8
    other = {"sft_adapter": start, "output": tmp_path / "out", "run_dir": tmp_path / "run"}
    config = a_trainer(model_dir, GRPOConfig(**other)).config
    assert (config.lora_r, config.lora_alpha) == (4, 8)
    with pytest.raises(UsageError, match=r"--lora-r 32: the adapter .* has 4"):
        a_trainer(model_dir, GRPOConfig(**other, lora_r=32))
    # SFT records the rank, too.
    problems = [Problem("p", "1 + 1?", "2", "1 + 1 = 2")]
    names = {"adapter": start, "output": tmp_path / "sft", "run_dir": tmp_path / "sft_run"}
    run = train_sft.train(SFTConfig(model=str(model_dir), dataset="two", **names), problems)
    assert (run["config"]["lora_r"], run["config"]["lora_alpha"]) == (4, 8)
    # PEFT allows an alpha that is not an integer.
    settings = json.loads((start / "adapter_config.json").read_text()) | {"lora_alpha": 8.5}
    (start / "adapter_config.json").write_text(json.dumps(settings))
    assert a_trainer(model_dir, GRPOConfig(**other)).config.lora_alpha == 8.5


@pytest.mark.parametrize("start", ["an adapter", "the base"])
def test_kl_begins_at_zero_and_grows(model_dir, tmp_path, tokenizer, start):
    """The reference model is the initial adapter, or the base model if there is no initial adapter.

    It is scored at the temperature of the policy.
    """
    adapter = None
    if start == "an adapter":
        adapter = a_start_adapter(model_dir, tokenizer, tmp_path / "start")
    config = a_config(tmp_path, steps=3, kl_weight=0.1, sft_adapter=adapter, temperature=0.7)
    trainer, _ = train(model_dir, config)
    kls = [row["loss/kl"] for row in rows(config)]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert kls[-1] > 1e-5
    saved = load_file(config.output / "adapter_model.safetensors")
    assert not any("reference" in name for name in saved)
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())
    assert len(trainer.adapter) == len(saved)


# --- dynamic sampling, lengths ------------------------------------------------------------------


def never_for_most(prompts, completions, **_):
    """A reward that is 0 for all problems but the first twelve."""
    likes = likes_letters(completions)
    return [r if int(p.split()[0]) < 12 else 0.0 for p, r in zip(prompts, likes, strict=True)]


def logged_groups(config):
    return [json.loads(line) for line in (config.run_dir / "samples.jsonl").open()]


def test_groups_without_a_difference_are_replaced(model_dir, tmp_path):
    config = a_config(tmp_path, steps=2, algorithm="dapo", batch_size=6)
    _, summary = train(model_dir, config, never_for_most)
    groups = logged_groups(config)
    for row in rows(config):
        mine = [group for group in groups if group["step"] == row["step"]]
        signal = [len(set(group["rewards"])) > 1 for group in mine]
        assert len(mine) > 6  # other groups were added
        assert len({group["problem"] for group in mine}) == len(mine)  # of other problems
        assert sum(signal) <= 6
        assert row["sampling/dropped_groups"] == len(mine) - sum(signal)
        # The mean reward includes the dropped groups, whose number is logged.
        every = [reward for group in mine for reward in group["rewards"]]
        kept = [r for group, s in zip(mine, signal, strict=True) if s for r in group["rewards"]]
        assert row["reward/mean"] == pytest.approx(sum(every) / len(every))
        assert row["reward/kept_mean"] == pytest.approx(sum(kept) / len(kept))
        assert row["reward/kept_mean"] > row["reward/mean"]
        for group, teaches in zip(mine, signal, strict=True):
            assert any(group["advantages"]) == teaches
    assert summary["steps_run"] == 2


def test_an_exhausted_pool_is_no_error(model_dir, tmp_path):
    config = a_config(tmp_path, steps=1, algorithm="dapo", batch_size=25)
    train(model_dir, config, lambda completions: [1.0] * len(completions))
    (row,) = rows(config)
    assert row["sampling/dropped_groups"] == 40
    assert row["reward/mean"] == 1.0
    assert "loss/policy" not in row  # no update without signal


ENDS = frozenset(range(80))  # a third of all tokens, so the lengths differ


def train_with_ends(model_dir, config, reward, ends=ENDS):
    """Train with other end tokens."""
    trainer = a_trainer(model_dir, config, reward)
    trainer.sampler.stop_ids = ends
    trainer.train(PROBLEMS)
    return trainer


def test_the_overlong_penalty_reaches_the_advantages_and_not_the_reward(model_dir, tmp_path):
    """Longer completions get lower advantages, but the logged reward stays 1."""
    config = a_config(tmp_path, steps=2, group_size=8, overlong_buffer=6)
    train_with_ends(model_dir, config, lambda completions: [1.0] * len(completions))
    assert all(row["reward/mean"] == 1.0 for row in rows(config))
    assert all(-1 <= row["reward/overlong"] < 0 for row in rows(config))
    assert any(any(group["advantages"]) for group in logged_groups(config))
    # DAPO drops groups with equal verdicts, so lengths alone give no signal.
    dapo = a_config(tmp_path, "dapo", steps=1, overlong_buffer=6, dynamic_sampling=True)
    train_with_ends(model_dir, dapo, lambda completions: [1.0] * len(completions))
    assert not any(any(group["advantages"]) for group in logged_groups(dapo))


def odd_texts(completions):
    return [float(sum(map(ord, text)) % 2) for text in completions]


@pytest.mark.parametrize("masked", [True, False])
def test_masked_truncated_completions_teach_nothing(model_dir, tmp_path, monkeypatch, masked):
    options = {"steps": 1, "group_size": 8, "max_new_tokens": 3, "mask_truncated": masked}
    last = []  # the last token of each learned completion
    score = training_state.token_logprobs

    def watched(model, micro, temperature):
        last.extend(tokens[-1].item() for tokens in micro.targets.split(micro.lengths))
        return score(model, micro, temperature)

    monkeypatch.setattr(training_state, "token_logprobs", watched)
    config = a_config(tmp_path, "some", **options)
    train_with_ends(model_dir, config, odd_texts)
    assert 0 < rows(config)[0]["completion/truncated_rate"] < 1
    assert any(token in ENDS for token in last)
    assert all(token in ENDS for token in last) == masked

    config = a_config(tmp_path, "none ends", **options)  # no completion is learned if masked
    trainer = train_with_ends(model_dir, config, odd_texts, ends=frozenset())
    (row,) = rows(config)
    assert (row["completion/truncated_rate"], row["reward/zero_signal_share"] < 1) == (1, True)
    moved = any(t.any() for name, t in trainer.adapter.items() if "lora_B" in name)
    assert (moved, "loss/policy" in row) == (not masked, not masked)


def test_a_reward_that_fails_on_some_rollouts_does_not_end_the_run(model_dir, tmp_path, capsys):
    class Sometimes(RewardFunction):
        def __call__(self, completion, reference_answer, **columns):
            return 1 / bool(LETTERS & set(completion))

    config = a_config(tmp_path, steps=2)
    train(model_dir, config, Sometimes())
    assert len(rows(config)) == 2
    for row in rows(config):
        assert row["reward/failed"] * 16 == pytest.approx(row["reward/no_verdict"])
    assert "ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1, 1, 0.8682, 0.55, 0.2318]),
    ],
)
def test_learning_rate_schedules(schedule, rates):
    config = GRPOConfig(
        algorithm="grpo", steps=6, warmup_steps=2, learning_rate=1.0, lr_schedule=schedule
    )
    assert [config.learning_rate_at(s, s) for s in range(6)] == pytest.approx(rates, abs=1e-4)


def test_a_pass_over_the_problems_becomes_steps(model_dir, tmp_path, capsys):
    """The number of steps is recorded, so the resumed run may also name it."""
    config = a_config(tmp_path, steps=None, batch_size=20)  # a pass has two steps
    train(model_dir, config)
    assert len(rows(config)) == 2
    recorded = json.loads((config.run_dir / "config.json").read_text())
    assert recorded["steps"] == 2
    for steps in (None, 2):
        again = a_config(tmp_path, resume=True, steps=steps, batch_size=20)
        resumed, _ = train(model_dir, again)
        assert resumed.config.steps == 2
    resumed.run.data.announce(resumed)
    assert "steps: 2 (" in " ".join(capsys.readouterr().out.split())


# --- samplers, dtypes, memory -------------------------------------------------------------


def test_a_merged_copy_trains_as_the_model_itself_does(model_dir, tmp_path, monkeypatch):
    """With the merged copy, importance weights correct for its slightly different probabilities."""
    handed, adapters, loss = [], [], train_grpo.policy_loss

    def watched(logprobs, micro, algorithm, **options):
        handed.append((options["correct_sampler"], micro.sampler_logprobs[micro.completion_mask]))
        return loss(logprobs, micro, algorithm, **options)

    monkeypatch.setattr(train_grpo, "policy_loss", watched)
    for sampler in ("merged", "unmerged"):
        handed.clear()
        trainer, _ = train(model_dir, a_config(tmp_path, sampler, sampler=sampler))
        adapters.append(trainer.adapter)
        assert {corrected for corrected, _ in handed} == {sampler == "merged"}
        assert all((sampled < 0).all() for _, sampled in handed)
        assert trainer.sampler.matches_trainer == (sampler == "unmerged")
    for name, tensor in adapters[0].items():
        assert torch.allclose(tensor, adapters[1][name], atol=1e-4), name


def test_rollouts_come_from_a_server_and_the_adapter_goes_there(model_dir, tmp_path, monkeypatch):
    with ScriptedServer() as server:
        url = server.url
        config = a_config(
            tmp_path, steps=2, sampler="vllm", server=url, eval_every=1, max_num_seqs=1
        )
        server.delay = 0.01
        trainer = a_trainer(model_dir, config)
        # Saving the adapter must not load the config of the base model, which may be on the hub.
        refuse = classmethod(lambda *_, **__: pytest.fail("asked for the base's config"))
        monkeypatch.setattr("transformers.LlamaConfig.from_pretrained", refuse)
        trainer.train(PROBLEMS, PROBLEMS[:2])
        loaded = [body["lora_path"] for body in server.asked("load_lora_adapter")]
        drawn = [body["model"] for body in server.asked("completions")]
    assert server.most_in_flight == 1  # --max-num-seqs is 1
    assert len(loaded) == 3  # before training and after each of two steps
    assert len(set(drawn)) == 1 + 3  # the base model is used for the check
    assert all((Path(path) / "adapter_model.safetensors").exists() for path in loaded)
    # The scripted server returns other log-probabilities, so there must be a gap.
    learned = [row for row in rows(config) if "loss/policy" in row]
    assert all(row["sampler/logprob_gap_max"] > 0.01 for row in learned)


def test_a_resumed_run_does_not_sample_with_the_adapter_of_an_earlier_call(model_dir, tmp_path):
    with ScriptedServer() as server:
        options = {"sampler": "vllm", "server": server.url}
        train(model_dir, a_config(tmp_path, steps=1, **options))
        trainer = a_trainer(model_dir, a_config(tmp_path, steps=2, resume=True, **options))
        trainer.generate("1 + 1?")
        trainer.train(PROBLEMS)
        *_, before, after = dict.fromkeys(body["model"] for body in server.asked("completions"))
        asked = [body["model"] for body in server.asked("completions")]
    assert (asked.count(before), asked.count(after)) == (1, 4)


def test_bf16_computes_in_bf16_and_learns_in_fp32(model_dir, tmp_path):
    config = a_config(tmp_path, steps=4, learning_rate=1e-4, save_every=2)
    bf16 = Device("cpu", torch.bfloat16, "test")
    trainer = a_trainer(model_dir, config, device=bf16)
    start = {name: tensor.detach().clone() for name, tensor in trainer.adapter.items()}
    trainer.train(PROBLEMS)
    moved = 0
    for name, computed in trainer.weights.model_weights.items():
        master = trainer.adapter[name]
        assert computed.dtype == torch.bfloat16
        assert master.dtype == torch.float32
        assert torch.equal(computed, master.bfloat16())
        moved += (master != start[name]).sum() - (computed != start[name].bfloat16()).sum()
    assert moved > 0  # fp32 keeps updates that are too small for bf16
    checkpoint = load_file(config.run_dir / "checkpoints" / "step_000004" / "state.safetensors")
    exported = load_file(config.output / "adapter_model.safetensors")
    assert {t.dtype for k, t in checkpoint.items() if "lora" in k and "adapter/" in k} == {
        torch.float32
    }
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}

    resumed = a_config(tmp_path, steps=6, learning_rate=1e-4, resume=True)
    again = a_trainer(model_dir, resumed, device=bf16)
    run = RunDirectory(resumed.run_dir, resume=True)
    assert again.state.begin(run, again.config, PROBLEMS, ()) == 4
    for name, tensor in trainer.adapter.items():
        assert torch.equal(tensor, again.adapter[name]), name
        assert torch.equal(
            trainer.weights.model_weights[name], again.weights.model_weights[name]
        ), name


def force_checkpointing(monkeypatch):
    """Simulate a lack of memory, so that checkpointing is used, but with full micro-batches."""
    monkeypatch.setattr("rlm.training.memory_plan.available_memory", lambda device: 1000)
    monkeypatch.setattr("rlm.training.memory_plan.SMALLEST_MICRO_BATCH", 10**6)


def test_checkpointing_changes_memory_and_nothing_else(model_dir, tmp_path, tokenizer, monkeypatch):
    """The plan counts the input of each layer, and all activations of one layer.

    Loading the reference adapter, which sets eval mode, must not disable checkpointing.
    """
    start, kept, plans, adapters = a_start_adapter(model_dir, tokenizer, tmp_path / "a"), [], [], []
    for checkpointing in (False, True):
        options = {"sft_adapter": start, "kl_weight": 0.1}
        if checkpointing:
            force_checkpointing(monkeypatch)
        trainer, _ = train(model_dir, a_config(tmp_path, f"run{checkpointing}", **options))
        kept.append(activation_bytes(trainer.policy))
        plans.append(trainer.run.memory_plan)
        adapters.append(trainer.adapter)
    assert kept[1] < kept[0] / 4
    model = trainer.policy.config
    inputs = model.num_hidden_layers * model.hidden_size * 4
    tokens = plans[0].train_batch_tokens
    saved = plans[0].learning - plans[1].learning
    assert saved == pytest.approx(tokens * (kept[0] - inputs), rel=0.05)
    for name, tensor in adapters[0].items():
        assert torch.equal(tensor, adapters[1][name]), name


def test_out_of_memory_halves_what_was_computed(model_dir, tmp_path, monkeypatch):
    """Half of the planned size may be more than was computed, and would fail again."""
    sizes = []

    def fails_once(policy, micro, temperature):
        sizes.append(micro.input_ids.numel())
        if len(sizes) == 1:
            raise torch.OutOfMemoryError
        return token_logprobs(policy, micro, temperature)

    monkeypatch.setattr(training_state, "token_logprobs", fails_once)
    monkeypatch.setitem(memory_plan.CPU_MICRO_BATCH, torch.float32, 10_000)
    # A KL term needs all rollouts.
    trainer, _ = train(model_dir, a_config(tmp_path, steps=1, kl_weight=0.1))
    whole, *halves = sizes
    assert len(halves) > 1
    assert max(halves) <= trainer.run.memory_plan.train_batch_tokens == whole // 2


def test_the_output_may_be_deep_in_the_run_directory(model_dir, tmp_path):
    """The first run finds only the folders of its output; the second one moves them away."""
    config = a_config(tmp_path, steps=1, output=tmp_path / "run" / "adapters" / "mine")
    for _ in range(2):
        train(model_dir, config)
        assert (config.output / "adapter_model.safetensors").is_file()
    assert (tmp_path / "run.prev" / "adapters" / "mine" / "run.json").is_file()


def test_an_output_that_is_no_adapter_is_refused_first(model_dir, tmp_path):
    config = a_config(tmp_path, steps=1)
    train(model_dir, config)
    (tmp_path / "run_adapter.prev").write_text("a file")
    with pytest.raises(UsageError, match="--output"):
        train(model_dir, config)
    assert not (tmp_path / "run.prev").exists()  # the old run was not moved


@pytest.mark.parametrize(
    ("option", "checkpoints", "logs"), [("--run-dir", 5, LOG_BYTES), ("--output", 1, 0)]
)
def test_there_must_be_room_for_a_whole_run(
    model_dir, tmp_path, monkeypatch, option, checkpoints, logs
):
    """A checkpoint is as large as four adapters.

    The run needs space for the two newest checkpoints, a protected one, one that is being written,
    and the exported adapters, which count as a fifth.
    """
    config = a_config(tmp_path, output=tmp_path / "other disk" / "adapter")
    state = a_trainer(model_dir, config).state
    adapter = sum(4 * tensor.numel() for tensor in state.adapter.values())
    needed = checkpoints * 4 * adapter + logs

    def usage(path):
        is_meant = ("other" in str(path)) == (option == "--output")
        return shutil._ntuple_diskusage(0, 0, free if is_meant else 2**40)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with RunDirectory(config.run_dir, resume=False) as run:
        free = needed - 1
        with pytest.raises(UsageError, match=f"{option} .* MB are needed"):
            state.begin(run, config, PROBLEMS, ())
        free = needed
        state.begin(run, config, PROBLEMS, ())


def test_the_plan_makes_micro_batches_that_fit(model_dir, tmp_path, monkeypatch, capsys):
    trainer, _ = train(model_dir, a_config(tmp_path, steps=1, batch_size=8, group_size=8))
    assert trainer.run.memory_plan.train_batch_tokens == 512
    # The cache also contains the prompts without their common prefix.
    assert trainer.run.memory_plan.sampling > trainer.sampler.bytes_for([8] * 8, 0, 6)
    assert "memory: about" in capsys.readouterr().out
    long = Problem("v", "long " * 50, "1")  # validation problems count, too
    assert trainer.prepare(PROBLEMS, [long]).longest_prompts[0] == trainer.render(long)
    needed, beside = (
        trainer.run.memory_plan.learning,
        trainer.run.memory_plan.optimizer + trainer.run.memory_plan.kept,
    )
    free = int((0.7 * needed + beside) / HEADROOM)  # too little for the whole micro-batch
    monkeypatch.setattr("rlm.training.memory_plan.available_memory", lambda device: free)
    options = {"steps": 1, "batch_size": 8, "group_size": 8, "max_num_seqs": 7}
    smaller, _ = train(model_dir, a_config(tmp_path, "tight", **options))
    # The KV cache has 7 rows instead of 64.
    assert smaller.run.memory_plan.sampling < trainer.run.memory_plan.sampling
    assert 64 < smaller.run.memory_plan.train_batch_tokens < 512
    assert smaller.run.memory_plan.learning < 0.7 * needed
    for name, tensor in trainer.adapter.items():  # the result does not depend on the plan
        assert torch.allclose(tensor, smaller.adapter[name], atol=1e-5), name
    monkeypatch.setattr("rlm.training.memory_plan.available_memory", lambda device: 1000)
    train(model_dir, a_config(tmp_path, "hopeless", steps=1))
    assert "may not fit" in capsys.readouterr().out


# --- several processes --------------------------------------------------------------------------


def no_signal_for_odd_problems(prompts, completions, **_):
    """A reward with which the second of two processes never has a group with signal."""
    likes = likes_letters(completions)
    return [r if int(p.split()[0]) % 2 == 0 else 0.0 for p, r in zip(prompts, likes, strict=True)]


REWARDS = {
    "uneven": no_signal_for_odd_problems,
    "mini": no_signal_for_odd_problems,
    "mini KL": lambda completions, **_: likes_letters(completions),
    "open": lambda completions, **_: likes_letters(completions),
}


OPTIONS = {
    "uneven": {"algorithm": "dapo"},
    "mini": {"algorithm": "topr", "mini_batch_size": 2, "learning_rate": 1e-3},
    "mini KL": {"algorithm": "grpo", "mini_batch_size": 3, "kl_weight": 0.1},
    "open": {},
}


def train_shared(model_dir, folder: Path, name: str, kind: str) -> None:
    """Train with the reward and the options of this kind.

    In the kind "uneven", the second process has neither signal nor a validation problem, so both
    processes must agree on the refills of dynamic sampling. In the kind "open", all validation
    problems of the first process are open.
    """
    asked = PROBLEMS[: 1 if kind == "uneven" else 5]
    if kind == "open":
        asked[::2] = [replace(problem, answer_type="open") for problem in asked[::2]]
    options = {"steps": 2, "batch_size": 5, "eval_every": 1, "updates_per_batch": 2}
    config = a_config(folder, name, **options | OPTIONS[kind])
    train(model_dir, config, REWARDS[kind], evaluate_on=asked)


@pytest.fixture(scope="module")
def two_processes(model_dir, tmp_path_factory) -> Path:
    """The folder in which two processes have trained once for each kind (`two_uneven`, …)."""
    folder = tmp_path_factory.mktemp("two")

    def train_with_each_reward(rank):
        for kind in REWARDS:
            train_shared(model_dir, folder, f"two_{kind}", kind)

    ends = faults.run_two(train_with_each_reward, folder)
    assert [end.code for end in ends] == [0, 0], ends
    said = "".join(end.text for end in ends)
    assert said.count("2 processes share this run") == len(REWARDS)
    return folder


@pytest.mark.parametrize("kind", list(REWARDS))
def test_two_processes_learn_what_one_does(model_dir, two_processes, kind, capsys):
    train_shared(model_dir, two_processes, f"one_{kind}", kind)
    assert "processes share this run" not in capsys.readouterr().out
    folder, names = two_processes, (f"one_{kind}", f"two_{kind}")
    one, two = (
        load_file(folder / f"{name}_adapter" / "adapter_model.safetensors") for name in names
    )
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-5), name
    one, two = (without_clock(rows(a_config(folder, name))) for name in names)
    assert len(one) == len(two) == 2  # only one process writes
    for left, right in zip(one, two, strict=True):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert right[key] == pytest.approx(value, abs=1e-4), key
