"""Faults during a run: kills, signals, full disks, bad gradients and closed pipes.

Each fault ends a real process (tests/faults.py). Then `--resume` must produce exactly the adapter,
the metrics and the samples of an uninterrupted run. docs/explanation/reliability.md lists the
faults.
"""

import errno
import json
import os
import resource
import shlex
import shutil
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import faults
import pytest
import torch
from conftest import byte_tokenizer
from safetensors.torch import load

import train_grpo
from rlm.cli.main import run_main
from rlm.cli.options import to_dict
from rlm.runs.atomic_files import read_log
from rlm.runs.checkpoints import differences, free_steps
from rlm.runs.directory import RunDirectory
from rlm.sampling import Sampler
from rlm.training import distributed
from rlm.training.config import GRPOConfig
from rlm.training.distributed import Distributed
from rlm.training.state import MAY_CHANGE, TrainingState
from tests.test_train_grpo import CPU, PROBLEMS, likes_letters, without_clock

KILLED = -signal.SIGKILL


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def limit_file_sizes():
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


class Runs:
    """Starts runs of three steps with the tiny model, each in a process of its own."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.said = folder / "said.txt"

    def options(self, name: str, **changes: object) -> list[str]:
        options = {
            "model": self.model, "sft_adapter": "none", "steps": 3, "batch_size": 4,
            "algorithm": "grpo",
            "group_size": 4, "max_new_tokens": 6, "learning_rate": 0.01, "lora_r": 4,
            "eval_every": 2, "save_every": 1, "seed": 3,
            "run_dir": self.folder / name, "output": self.folder / f"{name}_adapter",
        }  # fmt: skip
        return [f"--{key}={value}" for key, value in (options | changes).items()]

    def main(self, name, *flags, before=lambda: None, **changes) -> None:
        """Call `before`, and then train as `python train_grpo.py` does."""

        def main(config):
            trainer = train_grpo.GRPOTrainer(
                config.model, config, reward_fn=likes_letters, device=CPU
            )
            trainer.train(PROBLEMS, PROBLEMS[:3])
            return 0

        before()
        run_main(main, GRPOConfig, argv=[*self.options(name, **changes), *flags])

    def start(self, *arguments, **options) -> int:
        return faults.start(partial(self.main, *arguments, **options), self.said)

    def run(self, name, *flags, **arguments) -> faults.Ended:
        return faults.wait(self.start(name, *flags, **arguments), self.said)

    def together(
        self, name, *flags, before=(lambda: None,) * 2, of_second=(), **changes
    ) -> list[faults.Ended]:
        """Run two processes, as on two machines that do not share a disk."""
        elsewhere = self.folder / "elsewhere"
        there = {"run_dir": elsewhere / name, "output": elsewhere / f"{name}_adapter"}

        def be(rank):
            more, options = (of_second, changes | there) if rank else ((), changes)
            self.main(name, *flags, *more, before=before[rank], **options)

        ended = faults.run_two(be, self.folder)
        assert not elsewhere.exists()  # only the main process writes
        return ended

    def watched(self, name, react, *flags, **arguments) -> faults.Ended:
        """Run training, and call `react` before each change on the disk."""

        def before():
            faults.on_file_events(self.folder, react)

        return self.run(name, *flags, before=before, **arguments)

    def result(self, name) -> tuple:
        """Return the adapter, metrics, samples and CSV columns, which must not depend on faults."""
        run, adapter = self.folder / name, self.folder / f"{name}_adapter"
        rows = read_log(run / "metrics.jsonl")
        history = json.loads((adapter / "run.json").read_text())
        return (
            (adapter / "adapter_model.safetensors").read_bytes(),
            without_clock(rows),
            (run / "samples.jsonl").read_text(),
            (run / "train_logs.csv").read_text().splitlines()[0],
            [history[key] for key in ("step", "accuracy", "steps_run", "base_hash")],
        )

    def leftovers(self) -> list[Path]:
        return [p for p in self.folder.rglob(".*") if p.name != ".lock"]


@pytest.fixture(scope="module")
def undisturbed(model_dir, tmp_path_factory):
    """Return the result of an uninterrupted run."""
    # Imports everything before the first fork.
    train_grpo.GRPOTrainer(str(model_dir), GRPOConfig(sft_adapter=None), device=CPU)
    runs = Runs(model_dir, tmp_path_factory.mktemp("undisturbed"))
    ended = runs.run("run")
    assert ended.code == 0, ended.text
    assert not {"\x1b", "\r"} & {*ended.text}  # without a terminal, there are no control characters
    first, *_ = result = runs.result("run")
    assert result[1][0]["optim/grad_norm"] > 0  # the run has trained
    assert len(first) > 1000
    return result


@pytest.fixture
def runs(model_dir, tmp_path):
    return Runs(model_dir, tmp_path)


# --- kill -9 ------------------------------------------------------------------------------------


def some(names, kept):
    """Return all names as test parameters; only those in `kept` also run in `make test`."""
    return [
        pytest.param(name, marks=() if name in kept else pytest.mark.slow, id=str(name))
        for name in names
    ]


def test_killed_and_resumed_equals_undisturbed(runs, undisturbed):
    """test_killed_before_every_change_on_the_disk tests kills at all other changes."""
    ended = runs.watched("run", faults.at("os.rename", "checkpoints/step_000002", 1, kill))
    assert ended.code == KILLED, ended.text
    ended = runs.run("run", "--resume")
    assert ended.code == 0, ended.text
    assert "damaged" not in ended.text
    assert runs.result("run") == undisturbed
    assert runs.leftovers() == []


def test_killed_between_the_two_renames_of_an_export(runs, undisturbed):
    """The kill comes after the old adapter has been moved, and before the new one is moved."""
    assert runs.run("run", seed=4).code == 0
    old = (runs.folder / "run_adapter" / "adapter_model.safetensors").read_bytes()
    ended = runs.watched("run", faults.at("os.rename", "/run_adapter", 2, kill))
    assert ended.code == KILLED, ended.text
    assert not (runs.folder / "run_adapter").exists()
    assert runs.run("run", "--resume").code == 0
    assert runs.result("run") == undisturbed
    kept = runs.folder / "run_adapter.prev" / "adapter_model.safetensors"
    assert kept.read_bytes() == old != undisturbed[0]


@pytest.mark.slow
def test_killed_twice_and_in_the_middle_of_a_file(runs, undisturbed):
    """The system ends the process while it writes the tensors of the second checkpoint."""

    def cut():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        limit_file_sizes()

    ended = runs.run("run", before=cut)
    assert ended.code == -signal.SIGXFSZ, ended.text
    assert list((runs.folder / "run" / "checkpoints").glob(".step_000001.new/*"))
    ended = runs.watched("run", faults.at("open", "metrics.jsonl", 2, kill), "--resume")
    assert ended.code == KILLED, ended.text
    assert runs.run("run", "--resume").code == 0
    assert runs.result("run") == undisturbed
    assert runs.leftovers() == []


@pytest.mark.slow
def test_killed_before_every_change_on_the_disk(runs, undisturbed):
    """One process is started for each change on the disk."""
    ended = runs.watched("counted", lambda event, path: print("a change:", event))  # noqa: T201
    assert ended.code == 0
    changes = ended.text.count("a change:")
    assert 50 < changes < 200
    for number in range(1, changes + 1):
        left = [number]

        def react(event, path, left=left):
            left[0] -= 1
            if left[0] == 0:
                kill()

        name = f"run{number}"
        ended = runs.watched(name, react)
        assert ended.code == KILLED, (number, ended.text)
        ended = runs.run(name, "--resume")
        if ended.code == 2:  # no checkpoint was saved, so a new run starts
            assert "no checkpoint" in ended.text
            ended = runs.run(name)
        assert ended.code == 0, (number, ended.text)
        assert "damaged" not in ended.text
        assert runs.result(name) == undisturbed, number
        assert [p for p in runs.leftovers() if "write_test" not in p.name] == [], number


# --- signals ------------------------------------------------------------------------------------


def on_call(owner, name, number, action):
    """Replace a function by one that runs `action` before its n-th call."""
    function, count = getattr(owner, name), 0

    def wrapped(*arguments, **options):
        nonlocal count
        count += 1
        if count == number:
            action()
        return function(*arguments, **options)

    setattr(owner, name, wrapped)


def sends(*numbers):
    """Return a function that makes the process receive these signals in its second step."""

    def action():
        for number in numbers:
            os.kill(os.getpid(), number)

    def begin():
        for number in numbers:  # nohup and some shells start processes that ignore signals
            if signal.getsignal(number) == signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        on_call(torch.nn.utils, "clip_grad_norm_", 2, action)

    return begin


CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.parametrize("number", some(CODES, [signal.SIGTERM]))
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(runs, undisturbed, number):
    ended = runs.run("a run ü", before=sends(number), save_every=0)
    assert ended.code == CODES[number]
    assert "stopping after this step" in ended.text
    assert "is saved up to step 2; continue with: python " in ended.text
    assert "Traceback" not in ended.text
    command = shlex.split(ended.text.partition("continue with: ")[2])
    expected = [*runs.options("a run ü", save_every=0), "--resume"]
    assert command[-len(expected) :] == expected
    assert runs.run("a run ü", "--resume", save_every=0).code == 0
    assert runs.result("a run ü") == undisturbed


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(runs, undisturbed):
    ended = runs.run("run", before=sends(signal.SIGINT, signal.SIGTERM))
    assert ended.code == -signal.SIGTERM  # a shell would report 143
    assert len((runs.folder / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert runs.run("run", "--resume").code == 0
    assert runs.result("run") == undisturbed


def test_of_several_processes_none_is_ended_by_a_repeated_signal(tmp_path):
    """The launcher of the processes repeats the signal of the terminal."""

    def be_told_twice():
        os.environ["WORLD_SIZE"] = "2"
        with RunDirectory(tmp_path / "run", resume=False) as run:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            return 3 if run.interrupted else 0

    assert faults.run(be_told_twice, tmp_path / "said").code == 3


@pytest.mark.parametrize("place", some(["rollout", "backward", "save", "export"], []))
def test_a_signal_anywhere(runs, undisturbed, place):
    def interrupt():
        os.kill(os.getpid(), signal.SIGTERM)

    def before():
        if place == "rollout":
            on_call(Sampler, "sample", 3, interrupt)
        elif place == "backward":
            on_call(torch.Tensor, "backward", 2, interrupt)
        else:
            name = {"save": "checkpoints/step_000001", "export": "/run_adapter"}[place]
            faults.on_file_events(runs.folder, faults.at("os.rename", name, 1, interrupt))

    ended = runs.run("run", before=before)
    if place == "export":  # all steps were done, so the export is completed
        assert ended.code == 0, ended.text
    else:
        assert ended.code == 143, ended.text
        assert runs.run("run", "--resume").code == 0
    assert runs.result("run") == undisturbed


@pytest.mark.slow
def test_what_was_ignored_stays_ignored(runs, undisturbed):
    """With nohup, the terminal may be closed."""

    def before():
        sends(signal.SIGHUP)()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    assert runs.run("run", before=before).code == 0
    assert runs.result("run") == undisturbed


# --- two trainers -------------------------------------------------------------------------------


def test_a_second_trainer_is_refused_until_the_first_is_dead(runs, undisturbed):
    reading, writing = os.pipe()

    def stay():
        os.write(writing, b"!")
        time.sleep(600)

    first = runs.start("run", before=lambda: on_call(torch.nn.utils, "clip_grad_norm_", 2, stay))
    assert os.read(reading, 1) == b"!"
    for flags in ([], ["--resume"]):
        second = runs.run("run", *flags)
        assert second.code == 2
        assert f"process {first} on " in second.text
        assert "trains there" in second.text
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    assert runs.run("run", "--resume").code == 0
    assert runs.result("run") == undisturbed


# --- disks --------------------------------------------------------------------------------------


def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FULL = {
    "state": ("open", ".step_000002.new/.state.json", 1),
    "checkpoint": ("os.rename", "checkpoints/step_000002", 1),
    "metrics": ("open", "metrics.jsonl", 2),
    "samples": ("open", "samples.jsonl", 2),
    "export": ("open", ".run_adapter.new/.run.json", 1),
    "spreadsheet": ("open", "train_logs.csv", 1),
}
LIMIT = "a limit on the size of files"  # the write fails inside a library


@pytest.mark.parametrize("place", some([*FULL, LIMIT], ["metrics"]))
def test_a_full_disk_is_one_line_and_costs_nothing_that_was_saved(runs, undisturbed, place):
    if place == LIMIT:
        ended = runs.run("run", before=limit_file_sizes)
    else:
        ended = runs.watched("run", faults.at(*FULL[place], full))
    assert ended.code == 2, ended.text
    (line,) = [line for line in ended.text.splitlines() if "error" in line]
    assert f"cannot be written: {'' if place == LIMIT else 'No space left on device'}" in line
    assert "--resume" in line
    assert "Traceback" not in ended.text
    assert runs.leftovers() == []
    assert runs.run("run", "--resume").code == 0
    assert runs.result("run") == undisturbed


# --- gradients that are not finite --------------------------------------------------------------


def poison(updates):
    """Replace the gradients of these updates (counted from 0) by NaN."""
    count = -1
    clip = torch.nn.utils.clip_grad_norm_

    def poisoned(parameters, limit):
        nonlocal count
        count += 1
        parameters = list(parameters)
        if count in updates:
            parameters[0].grad[0] = torch.nan
        return clip(parameters, limit)

    torch.nn.utils.clip_grad_norm_ = poisoned


def rates(runs, name):
    rows = read_log(runs.folder / name / "metrics.jsonl")
    return [row["optim/lr"] for row in rows], [row["optim/skipped"] for row in rows]


FOREVER = {"steps": 8, "lr_schedule": "constant", "warmup_steps": 0}


def test_three_bad_gradients_in_a_row_go_back_to_the_last_good_weights(runs):
    """Updates 2, 3 and 4 are bad, so training continues from the weights before update 1."""

    def poisoned_and_kept():
        begin = TrainingState.begin

        def keeping(state, *arguments):
            state.keep = 9
            return begin(state, *arguments)

        TrainingState.begin = keeping
        poison({2, 3, 4})

    ended = runs.run("run", before=poisoned_and_kept, **FOREVER)
    assert ended.code == 0, ended.text
    assert "checkpoint of step 1 with half the learning rate" in ended.text
    assert ended.text.count("update skipped") == 3
    assert rates(runs, "run") == ([0.01] * 5 + [0.005] * 3, [0, 0, 1, 2, 3, 3, 3, 3])
    folders = [runs.folder / "run" / "checkpoints" / f"step_00000{n}" for n in (1, 4, 5)]
    good, lost, back = (load((f / "state.safetensors").read_bytes()) for f in folders)
    names = [name for name in good if not name.startswith("best/")]
    assert {name.partition("/")[0] for name in names} == {"adapter", "optimizer"}
    assert all(torch.equal(back[name], good[name]) for name in names)
    assert not any(torch.equal(lost[name], good[name]) for name in names)


@pytest.mark.slow
def test_going_back_survives_a_kill(runs):
    """No update is counted twice after a kill, before or after the weights are restored."""
    whole = runs.run("whole", before=lambda: poison({2, 3, 4}), **FOREVER)
    assert whole.code == 0, whole.text
    for step in (4, 6):  # after two skipped updates, and after the weights are restored
        name = f"killed{step}"

        def before(step=step):
            poison({2, 3, 4})
            react = faults.at("open", "samples.jsonl", step + 1, kill)
            faults.on_file_events(runs.folder, react)

        assert runs.run(name, before=before, **FOREVER).code == KILLED
        left = {number - step for number in (2, 3, 4)}
        ended = runs.run(name, "--resume", before=lambda left=left: poison(left), **FOREVER)
        assert ended.code == 0, ended.text
        assert runs.result(name) == runs.result("whole")


# --- several processes --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed_pair(undisturbed, model_dir, tmp_path_factory):
    """Return the result of an uninterrupted run of two processes."""
    runs = Runs(model_dir, tmp_path_factory.mktemp("pair"))
    leader, follower = runs.together("run")
    assert (leader.code, follower.code) == (0, 0), (leader.text, follower.text)
    assert "2 processes share this run" in leader.text
    result = runs.result("run")
    assert result[1][0]["reward/mean"] == undisturbed[1][0]["reward/mean"]  # the same rollouts
    return result


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_of_two_processes_stops_both_and_both_resume(runs, undisturbed_pair, rank):
    before = [lambda: None, lambda: None]
    before[rank] = sends(signal.SIGTERM)
    leader, follower = runs.together("run", before=before, save_every=0)
    assert (leader.code, follower.code) == (143, 143), (leader.text, follower.text)
    # A command that begins with `python` would continue with one process.
    assert "is saved up to step 2; to continue, start all processes again with -" in leader.text
    assert "to continue" not in follower.text  # it is said once
    # The notice does not mention a second signal.
    assert "stopping after this step\n" in [leader, follower][rank].text
    ended = runs.together("run", "--resume", save_every=0)
    assert [each.code for each in ended] == [0, 0], ended
    assert runs.result("run") == undisturbed_pair


LOST = "error: another process of this run has ended or does not answer"


@pytest.mark.parametrize("rank", some([0, 1], [0]))
def test_one_of_two_processes_is_killed_and_both_resume(runs, undisturbed_pair, rank):
    """The other process ends with one line, long before the timeout."""
    before = [lambda: None, lambda: None]
    before[rank] = lambda: on_call(torch.nn.utils, "clip_grad_norm_", 2, kill)
    began = time.monotonic()
    ended = runs.together("run", before=before)
    assert time.monotonic() - began < 60
    assert ended[rank].code == KILLED
    other = ended[1 - rank]
    assert other.code == 2, other.text
    assert other.text.splitlines()[-1].startswith(LOST)
    assert other.text.endswith("start all processes again with --resume\n")
    assert "Traceback" not in other.text
    ended = runs.together("run", "--resume")
    assert [each.code for each in ended] == [0, 0], ended
    assert runs.result("run") == undisturbed_pair


def test_a_run_that_torchrun_restarts_continues(runs, undisturbed):
    """With --max-restarts, torchrun repeats the command, which would move the run away."""

    def restarted():
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"

    def killed():
        restarted()
        on_call(torch.nn.utils, "clip_grad_norm_", 3, kill)

    assert (
        runs.run("run", before=killed).code == KILLED
    )  # in the first step, so there is nothing to continue
    ended = runs.run("run", before=restarted)
    assert ended.code == 0, ended.text
    assert "before step 3" in ended.text
    assert runs.result("run") == undisturbed


def test_a_run_that_torchrun_restarts_continues_no_earlier_run(runs, undisturbed):
    """The first attempt may end before it moves the earlier run away."""
    assert runs.run("run", seed=4).code == 0
    for folder in (runs.folder / "run" / "checkpoints").iterdir():
        os.utime(folder, (0, 0))
    ended = runs.run("run", before=lambda: os.environ.update(TORCHELASTIC_RESTART_COUNT="1"))
    assert ended.code == 0, ended.text
    assert "the earlier run in" in ended.text
    assert runs.result("run") == undisturbed


@pytest.mark.slow
def test_what_two_processes_began_one_ends(runs):
    """The results differ only by rounding, because two processes sum in another order."""
    same = {"learning_rate": 1e-4, "steps": 6}
    before = (lambda: None, lambda: on_call(torch.nn.utils, "clip_grad_norm_", 3, kill))
    assert runs.together("run", before=before, **same)[0].code == 2
    assert runs.run("run", "--resume", **same).code == 0
    assert runs.run("alone", **same).code == 0
    both, alone = (load(runs.result(name)[0]) for name in ("run", "alone"))
    assert max(tensor.abs().max() for name, tensor in both.items() if "lora_B" in name) > 1e-4
    assert all(torch.allclose(t, alone[name], rtol=0, atol=1e-6) for name, t in both.items())


@pytest.mark.slow
def test_a_process_that_is_silent_ends_the_others(runs):
    """A machine that loses its network sends no message."""

    def wait_less():
        distributed.TIMEOUT = timedelta(seconds=8)

    def stop():
        if os.fork() == 0:  # a stopped process cannot end itself
            time.sleep(20)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)

    def fall_silent():
        wait_less()
        on_call(torch.nn.utils, "clip_grad_norm_", 2, stop)

    began = time.monotonic()
    silent, other = runs.together("run", before=(fall_silent, wait_less))
    assert (silent.code, other.code) == (KILLED, 2), (silent.text, other.text)
    assert other.text.splitlines()[-1].startswith(LOST)
    assert "Traceback" not in other.text
    assert time.monotonic() - began < 60


def test_a_process_of_another_run_is_refused(runs):
    """Each machine has its own files and its own command line, which may differ."""

    def have_other_files():
        PROBLEMS.pop()
        train_grpo.base_model_hash = lambda *_, **__: "another"

    before = (lambda: None, have_other_files)
    leader, other = runs.together("run", before=before, of_second=["--resume", "--seed=4"])
    assert (leader.code, other.code) == (2, 2), (leader.text, other.text)
    for difference in (
        "--seed: 3 → 4",
        "--resume: False → True",
        "training data: 40 problems",
        "the base model",
    ):
        assert difference in other.text
    assert LOST in leader.text
    assert "Traceback" not in leader.text + other.text


@pytest.mark.slow
def test_two_processes_go_back_together(runs):
    """Only one process has bad gradients, but both get the sum."""

    def poison_mine():
        add, count = Distributed.all_reduce, -1

        def poisoned(distributed, parameters):
            nonlocal count
            count += 1
            parameters = list(parameters)
            if count in {2, 3, 4}:
                parameters[0].grad = torch.full_like(parameters[0], torch.nan)
            add(distributed, parameters)

        Distributed.all_reduce = poisoned

    shorter = FOREVER | {"steps": 6}
    ended = runs.together("two", before=(lambda: None, poison_mine), **shorter)
    assert [each.code for each in ended] == [0, 0], ended
    assert "checkpoint of step 1 with half the learning rate" in ended[0].text
    assert rates(runs, "two") == ([0.01] * 5 + [0.005], [0, 0, 1, 2, 3, 3])
    assert runs.run("one", before=lambda: poison({2, 3, 4}), **shorter).code == 0
    one, two = (load(runs.result(name)[0]) for name in ("one", "two"))
    assert all(torch.allclose(tensor, two[name], atol=1e-4) for name, tensor in one.items())


def test_what_ends_one_of_two_processes_is_said_by_it_and_ends_the_other(runs):
    def fill_the_disk():
        faults.on_file_events(runs.folder, faults.at(*FULL["metrics"], full))

    leader, other = runs.together("two", before=(fill_the_disk, lambda: None))
    assert (leader.code, other.code) == (2, 2), (leader, other)
    assert "No space left on device" in leader.text
    assert LOST in other.text
    assert "Traceback" not in leader.text + other.text


# --- what a resumed run may change --------------------------------------------------------------


def test_other_options_and_data_are_shown_and_refused(runs, monkeypatch):
    assert runs.run("run", steps=2).code == 0
    config = (runs.folder / "run" / "config.json").read_text()
    changes = {"steps": 2, "learning_rate": 0.02, "group_size": 8, "max_num_seqs": 7}
    ended = runs.run("run", "--resume", **changes)
    assert ended.code == 2
    assert "--learning-rate: 0.01 → 0.02" in ended.text
    assert "--group-size: 4 → 8" in ended.text
    assert "use the original values" in ended.text
    assert "--max-num-seqs" not in ended.text  # it changes only the speed
    assert (runs.folder / "run" / "config.json").read_text() == config  # the file is unchanged

    ended = runs.run("run", "--resume", steps=3, lr_schedule="linear")
    assert (ended.code, "before step 3; 3 steps instead of 2" in ended.text) == (0, True)

    monkeypatch.setattr("tests.test_faults.PROBLEMS", PROBLEMS[1:])
    ended = runs.run("run", "--resume", steps=3, lr_schedule="linear")
    assert ended.code == 2
    assert "training data: 40 problems, sha256 " in ended.text
    assert "→ 39 problems, sha256 " in ended.text


def test_what_is_a_change_and_what_is_none():
    origin = {"config": to_dict(GRPOConfig()), "data": {}, "start": "aa"}
    assert differences(origin, dict(origin), MAY_CHANGE) == []
    # These options change names, the duration and the speed; of the data, a hash is compared.
    assert {
        "resume", "model", "sft_adapter", "dataset", "max_samples", "eval_samples", "run_dir",
        "output", "save_every", "max_minutes", "tracker", "max_num_seqs", "sampler", "server",
        "train_batch_size",
    } == MAY_CHANGE  # fmt: skip
    (change,) = differences(origin, origin | {"start": "bb"}, MAY_CHANGE)
    assert "the initial adapter: its file has changed" in change
    old = origin | {"config": {k: v for k, v in origin["config"].items() if k != "dtype"}}
    assert differences(old, origin, MAY_CHANGE) == [
        "--dtype: not recorded → auto"
    ]  # the option is newer than the run
    fewer = ["--steps: 20 → 19"]
    for schedule, steps, expected in (
        ("linear", 19, fewer), ("linear", 21, []), ("constant", 19, []),
    ):  # fmt: skip
        configs = [to_dict(GRPOConfig(steps=n, lr_schedule=schedule)) for n in (20, steps)]
        both = [{"config": config, "data": {}, "start": "aa"} for config in configs]
        assert differences(*both, {*MAY_CHANGE, *free_steps(*configs)}) == expected
        # Two machines of one run must have the same number, whatever the schedule.
        assert differences(*both, MAY_CHANGE) == [f"--steps: 20 → {steps}"]


# --- readers, terminals, memory -----------------------------------------------------------------


def close_the_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)


def close_stdout():
    os.close(1)
    sys.stdout = None


def close_all():
    for number in (0, 1, 2):
        os.close(number)
    sys.stdout = sys.stderr = sys.stdin = None


def full_stdout():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


CLOSE = {f.__name__: f for f in (close_the_pipe, close_stdout, close_all, full_stdout)}


@pytest.mark.parametrize("close", some(CLOSE, ["close_all"]))
def test_nobody_has_to_read_what_a_run_prints(runs, undisturbed, close):
    ended = runs.run("run", before=CLOSE[close])
    assert ended.code == 0, ended.text
    assert runs.result("run") == undisturbed  # no output was written to another file


def test_out_of_memory_is_one_line(runs):
    def starve():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))
        on_call(torch.nn.utils, "clip_grad_norm_", 1, lambda: torch.zeros(2**28))

    ended = runs.run("run", before=starve)
    assert ended.code == 2, ended.text
    assert "error: out of memory: lower --train-batch-size or " in ended.text
    assert "use --quantize 4bit, a smaller --model" in ended.text
    assert "Traceback" not in ended.text


def with_another_tokenizer(runs, tokenizer, monkeypatch):
    shutil.copytree(runs.model, runs.folder / "model")
    other = byte_tokenizer()
    other.add_tokens(["one", "too", "many"])
    other.save_pretrained(runs.folder / "model")
    return {"model": runs.folder / "model"}


def with_a_full_disk(runs, tokenizer, monkeypatch):
    usage = shutil._ntuple_diskusage(9, 9, 4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    return {}


@pytest.mark.parametrize(
    ("with_what", "said"),
    [
        (with_another_tokenizer, "the tokenizer has 262 tokens, but the model has only 259"),
        (with_a_full_disk, "are needed, 0 MB are free"),
    ],
)
def test_what_cannot_go_well_is_refused_before_training(
    runs, tokenizer, monkeypatch, with_what, said
):
    ended = runs.run("run", **with_what(runs, tokenizer, monkeypatch))
    assert ended.code == 2, ended.text
    assert said in ended.text
    assert "step 1/3" not in ended.text
