"""Trackers get the same metrics, also offline, and their errors do not stop training."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
from live_server import wait_until

import rlm.runs.trackers as tracking
from rlm.cli.options import UsageError, to_dict
from rlm.runs import RunDirectory
from rlm.runs.trackers import (
    TABLE_ROWS,
    TRACKER_NAMES,
    Tracker,
    _run_id,
    open_tracker,
)
from rlm.training import GRPOConfig
from tests.test_train_grpo import PROBLEMS, a_config, a_trainer

OTHER_NAMES = {
    "rollouts/returns_mean", "training/loss", "training/kl", "training/grad_norm", "val/accuracy",
}  # fmt: skip


class Recorder:
    where = "here"

    def __init__(self, run_dir=None, config=None, first_step=0):
        self.run_dir, self.config, self.first_step = run_dir, config, first_step
        self.logged, self.tables, self.closed = [], [], 0

    def log(self, step, figures):
        self.logged.append((step, dict(figures)))

    def table(self, step, rows):
        self.tables.append((step, list(rows)))

    def close(self):
        self.closed += 1


@pytest.fixture
def recorder(monkeypatch):
    made = []

    def make(*arguments):
        made.append(Recorder(*arguments))
        return made[-1]

    monkeypatch.setitem(tracking.BACK_ENDS, "wandb", make)
    return made


def train(model_dir, config):
    return a_trainer(model_dir, config).train(PROBLEMS, PROBLEMS[:2])


def test_a_run_is_shown_under_our_names_and_the_others(model_dir, tmp_path, recorder, capsys):
    config = a_config(tmp_path, steps=3, use_wandb=True, eval_every=3)
    train(model_dir, config)
    (back_end,) = recorder
    assert "tracker: wandb; here" in capsys.readouterr().out
    assert back_end.config["learning_rate"] == config.learning_rate
    assert back_end.run_dir == config.run_dir
    assert back_end.closed == 1
    assert [step for step, _ in back_end.logged] == [0, 1, 2]
    figures = back_end.logged[-1][1]
    assert set(figures) >= OTHER_NAMES
    written = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").open()]
    for row, (_, shown) in zip(written, back_end.logged, strict=True):
        assert {k: v for k, v in shown.items() if k not in OTHER_NAMES} == {
            k: v for k, v in row.items() if k != "step"
        }
    assert not OTHER_NAMES & set(written[0])  # one name a concept in our own files
    assert [step for step, _ in back_end.tables] == [0, 2]
    rows = back_end.tables[0][1]
    assert len(rows) == min(TABLE_ROWS, 16)
    sample = json.loads((config.run_dir / "samples.jsonl").open().readline())
    expected = (sample["completions"][0], sample["rewards"][0], sample["advantages"][0])
    assert tuple(rows[0]) == (0, sample["question"], sample["answer"], *expected)


@pytest.mark.parametrize(
    "method", ["table", *(pytest.param(name, marks=pytest.mark.slow) for name in ("log", "close"))]
)
def test_a_tracker_that_fails_is_left_out_and_training_goes_on(
    model_dir, tmp_path, recorder, capsys, monkeypatch, method
):
    def fail(*arguments):
        raise ConnectionError("the service\nis gone")

    monkeypatch.setattr(Recorder, method, fail)
    config = a_config(tmp_path, tracker="wandb", eval_every=1)
    assert train(model_dir, config)["steps_run"] == 3
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "tracker wandb failed" in line
    ]
    assert len(lines) == 1  # once, and then no more
    assert "ConnectionError" in lines[0]
    assert (config.output / "run.json").exists()


def test_a_tracker_that_is_not_installed_or_does_not_start(
    model_dir, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train(model_dir, a_config(tmp_path, steps=1, tracker="wandb"))["steps_run"] == 1
    assert "pip install -e '.[track]' installs wandb" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace())  # no `init` in it
    assert train(model_dir, a_config(tmp_path, steps=1, tracker="trackio"))["steps_run"] == 1
    assert "no tracker: trackio does not start: AttributeError" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.parametrize(("variable", "project"), [("theirs", "theirs"), (None, "rlm")])
def test_the_project_is_the_variable_or_rlm(name, variable, project, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    if variable:
        monkeypatch.setenv("WANDB_PROJECT", variable)
    asked = []
    run = SimpleNamespace(define_metric=lambda *_, **__: None, url="there", offline=False)
    module = SimpleNamespace(Settings=dict, init=lambda **given: asked.append(given) or run)
    monkeypatch.setitem(sys.modules, name, module)
    config = to_dict(GRPOConfig(tracker=name, run_dir=tmp_path))
    assert open_tracker(name, tmp_path, config, 0) is not None
    assert [given["project"] for given in asked] == [project]


def test_figures_that_are_not_finite_are_left_out():
    back_end = Recorder()
    Tracker("wandb", back_end).log({"step": 4, "loss/kl": float("nan"), "reward/mean": 0.5})
    assert back_end.logged == [(4, {"reward/mean": 0.5, "rollouts/returns_mean": 0.5})]
    assert set(tracking.BACK_ENDS) == set(TRACKER_NAMES) - {"none"}


def test_each_figure_has_the_name_that_others_know():
    back_end = Recorder()
    ours = {"reward/mean": 0.1, "loss/policy": 0.2, "loss/kl": 0.3, "optim/grad_norm": 0.4}
    Tracker("wandb", back_end).log({"step": 4, "eval/accuracy": 0.5} | ours)
    ((_, shown),) = back_end.logged
    assert {name: shown[name] for name in OTHER_NAMES} == {
        "rollouts/returns_mean": 0.1, "training/loss": 0.2, "training/kl": 0.3,
        "training/grad_norm": 0.4, "val/accuracy": 0.5,
    }  # fmt: skip


# --- the tools themselves, offline --------------------------------------------------------------


def test_a_run_that_is_refused_is_shown_nowhere(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("rlm.runs.directory.open_tracker", pytest.fail)
    config = a_config(tmp_path, resume=True, tracker="tensorboard")
    with pytest.raises(UsageError, match="no checkpoint"):
        train(model_dir, config)


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """Simulate a user without an account and without a network, in an empty home directory."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    return run_dir


def show(name, run_dir, first_step=0, *, killed=False):
    """Log a config, two steps and a table to a tracker, as a run does."""
    config = {"learning_rate": 1e-4, "model": None}
    tracker = open_tracker(name, run_dir, config, first_step)
    assert tracker is not None
    for step in (first_step, first_step + 1):
        tracker.log({"step": step, "reward/mean": 0.25 * (step + 1)})
    group = {
        "step": step, "question": "2 | 2?", "answer": "4", "completions": ["a\nb", "c"],
        "rewards": [1.0, None], "advantages": [0.5, 0.0],
    }  # fmt: skip
    tracker.log_samples([group])
    if not killed:
        tracker.close()


@pytest.mark.trackers
def test_wandb_offline(alone, capfd, monkeypatch):
    import wandb

    # It advertises where it sees this imported; a training process has not.
    monkeypatch.delitem(sys.modules, "openai", raising=False)

    show("wandb", alone)
    out, err = capfd.readouterr()
    assert err == ""
    (line,) = out.splitlines()
    assert line.startswith("tracker: wandb; run `wandb sync ")
    (folder,) = (alone / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    assert wandb.run is None
    wandb.teardown()  # as at the end of a process: its service writes the file, and may be behind
    texts = (b"rollouts/returns_mean", b"reward/mean", b"learning_rate", b"samples")
    wait_until(lambda: all(text in file.read_bytes() for text in texts))
    assert list(folder.rglob("*.table.json"))

    killed = alone / "wandb" / f"offline-run-1-{_run_id(alone)}"  # before its first entry
    killed.mkdir()
    (killed / "run.wandb").write_bytes(file.read_bytes()[:7])
    show("wandb", alone, 1)  # a resumed run adds a folder; the command uploads both
    parts = capfd.readouterr().out.partition("wandb sync ")[2].partition("`")[0]
    folders = {*(alone / "wandb").glob("offline-run-*")} - {killed}
    assert len(folders) == 2
    assert parts == " ".join(map(str, sorted(folders)))


def test_a_new_run_has_an_id_of_its_own_and_a_resumed_one_keeps_it(tmp_path):
    ids = []
    for resume in (False, True, False, True):
        with RunDirectory(tmp_path / "run", resume=resume):
            ids.append(_run_id(tmp_path / "run"))
    assert ids[0] == ids[1] != ids[2] == ids[3]


@pytest.mark.trackers
def test_tensorboard(alone, capsys):
    from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator

    show("tensorboard", alone, killed=True)  # nothing that was logged may be lost
    assert "tensorboard --logdir" in capsys.readouterr().out
    events = event_accumulator.EventAccumulator(str(alone / "tensorboard"))
    events.Reload()
    for name in ("reward/mean", "rollouts/returns_mean"):
        assert [(e.step, e.value) for e in events.Scalars(name)] == [(0, 0.25), (1, 0.5)]
    (table,) = events.Tensors("samples/text_summary")
    text = table.tensor_proto.string_val[0].decode()
    assert "| 1 | 2 \\| 2? | 4 | a<br>b | 1.0 | 0.5 |" in text

    show("tensorboard", alone, 1)  # a resumed run repeats step 1, and TensorBoard shows it once
    page = plugin_event_accumulator.EventAccumulator(str(alone / "tensorboard"))
    page.Reload()
    assert [e.step for e in page.Tensors("reward/mean")] == [0, 1, 2]
    assert [e.step for e in page.Tensors("samples/text_summary")] == [2]


@pytest.mark.trackers
def test_trackio(alone, capsys, monkeypatch):
    # It reads TRACKIO_DIR when it is imported, and TRL may have imported it.
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    show("trackio", alone)
    assert capsys.readouterr().out == "tracker: trackio; trackio show --project rlm\n"
    assert list((alone.parent / "trackio").rglob("rlm*"))
