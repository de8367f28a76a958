"""The soak test: its failures, and a short run with the tiny model."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from benchmarks import soak
from benchmarks.soak import Serving, SoakConfig, Training
from tests.test_server import weights  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    ("memory", "growth"),
    [([900] + [100] * 5, 1.0), ([100, 100, 100, 110, 120, 130], 1.3), ([7], 1.0)],
)
def test_growth_leaves_the_warm_up_out(memory, growth):
    assert Serving(memory=memory).growth() == pytest.approx(growth)


def test_damage_changes_one_byte_of_the_newest_checkpoint(tmp_path):
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / f"step_{step:06}"
        folder.mkdir(parents=True)
        (folder / "adapter.safetensors").write_bytes(bytes(50))
    assert soak._damage(tmp_path, "damaged checkpoint", random.Random(0))
    old, new = (
        file.read_bytes() for file in sorted(tmp_path.glob("checkpoints/*/adapter.safetensors"))
    )
    assert old == bytes(50)
    assert sum(byte != 0 for byte in new) == 1


def test_the_last_line_of_the_metrics_is_torn(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    assert soak._damage(tmp_path, "torn metrics", random.Random(0))
    lines = (tmp_path / "metrics.jsonl").read_text().split("\n")
    assert lines[0] == '{"step": 0}'
    assert not lines[1].endswith("}")


def test_a_fault_with_nothing_to_damage_is_a_kill(tmp_path, monkeypatch):
    codes = iter([-9, -9, 0])
    process = SimpleNamespace(wait=lambda *_: next(codes), send_signal=lambda _: None)
    monkeypatch.setattr(Training, "start", lambda *_, **__: process)
    training = Training(SoakConfig(run_dir=tmp_path))
    faults = iter(["damaged checkpoint", "torn metrics", "SIGINT"])
    draw = SimpleNamespace(choice=lambda _: next(faults), uniform=lambda *_: 0.0)
    assert training._finish("disturbed_1", draw) == 0
    assert training.faults == {"SIGKILL": 2}


def test_a_run_that_differs_or_a_server_that_grows_is_a_failure():
    training = Training(SoakConfig(), equal=3)
    serving = Serving(memory=[100, 100, 100, 100, 100, 120])
    assert (
        "grew by a factor of 1.20" in soak.summary(SoakConfig(), training, serving)["failures"][0]
    )
    serving.memory = [100.0]
    assert soak.summary(SoakConfig(), training, serving)["failures"] == []
    training.failures.append("disturbed_1 differs")
    assert soak.summary(SoakConfig(), training, serving)["failures"] == ["disturbed_1 differs"]


def test_what_stops_the_thread_that_trains_is_a_failure(tmp_path, monkeypatch):
    """A run that exits with 0 but has no adapter counts as a failure."""
    monkeypatch.setattr(Training, "start", lambda *_, **__: SimpleNamespace(wait=lambda *_: 0))
    training = Training(SoakConfig(run_dir=tmp_path))
    training.run(end=0.0)
    (failure,) = training.failures
    assert failure.startswith("the training stopped: FileNotFoundError: ")
    assert "undisturbed_adapter" in failure


@pytest.mark.slow
def test_a_soak_of_half_a_minute(weights, model_dir, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(soak, "LEAST_SECONDS", 3)
    monkeypatch.setattr(soak, "MOST_SECONDS", 12)
    monkeypatch.setattr(soak, "SMALL_FILE", 3_000)
    config = SoakConfig(
        model=str(model_dir),
        adapter=str(weights / "final_rlm_lora"),
        minutes=0.5,
        clients=2,
        steps=3,
        run_dir=tmp_path / "soak",
        json=tmp_path / "soak.json",
    )
    assert soak.main(config) == 0, capsys.readouterr().out
