"""`make demo-experience`: against a scripted model, and its server as a process."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
from scripted_model import write_problems
from scripted_server import ScriptedServer

from recipes.experience import demo
from rlm.cli.options import UsageError
from tests.recipes.test_experience_select import Pupil, both_kinds


def make_small(monkeypatch, **fewer):
    """Select from fewer problems and attempts than the demo does."""
    config = demo.select.SelectConfig
    monkeypatch.setattr(demo.select, "SelectConfig", lambda **own: config(**own | fewer))


def test_the_demo_ends_with_a_table_of_the_library(tmp_path, monkeypatch, capsys):
    data = write_problems(tmp_path / "all.jsonl", both_kinds(600))
    with ScriptedServer(Pupil()) as server:

        @contextmanager
        def scripted(command, log):
            yield server.url.removesuffix("/v1"), None

        monkeypatch.setattr(demo, "server_process", scripted)
        # The variables of a paid endpoint are not for the demo.
        monkeypatch.setenv("GENERATOR_1_BASE_URL", "https://api.example.org/v1")
        monkeypatch.setenv("GENERATOR_2_MODEL", "another")
        make_small(monkeypatch, problems=8, groups=2, held_out=44, trial_size=20)
        config = demo.DemoConfig(dataset=str(data), problems=30, run_dir=tmp_path / "run")
        assert demo.main(config) == 0
        assert {body["model"] for body in server.asked("chat/completions")} == {"base"}
    assert {file.name for file in config.run_dir.iterdir()} <= demo.FILES
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())["rows"]
    assert found["selected_experiences"]["accuracy"]["mean"] == 1.0
    assert found["selected_experiences"]["difference"]["low"] > 0
    assert "selected_experiences has no placebo row" in capsys.readouterr().out  # one kind
    demo.clear_run_dir(config.run_dir)  # as another demo begins: of this one nothing is left
    assert {file.name: file.read_text() for file in config.run_dir.iterdir()} == {
        demo.SERVER_LOG: ""
    }


def keys(folder):
    (folder / "api_config.json").write_text("{}")  # as in data/api_keys


def subfolder(folder):
    (folder / "server.log").write_text("")
    (folder / "evaluation.json").mkdir()


def notes(folder):
    (folder / "server.log").write_text("")
    (folder / "notes.txt").write_text("mine")


@pytest.mark.parametrize("fill", [keys, subfolder, notes])
def test_a_folder_that_is_no_demo_s_is_left_alone(tmp_path, fill, monkeypatch):
    monkeypatch.setattr(demo, "server_process", None)  # is not reached
    fill(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="which the demo did not make: pass a new or empty"):
        demo.main(demo.DemoConfig(run_dir=tmp_path))
    assert sorted(tmp_path.rglob("*")) == before
    file = tmp_path / ("notes.txt" if fill is notes else "api_config.json")
    if file.exists():
        with pytest.raises(UsageError, match="is not a folder"):
            demo.main(demo.DemoConfig(run_dir=file))


@pytest.mark.slow
def test_the_demo_asks_a_server_of_its_own(model_dir, tmp_path, monkeypatch, capsys):
    make_small(monkeypatch, problems=2, groups=1, held_out=6, trial_size=6)
    config = demo.DemoConfig(model=str(model_dir), max_tokens=8, run_dir=tmp_path / "run")
    assert demo.main(config) == 0  # a random model is never right
    assert "No lesson helped, so none was kept" in capsys.readouterr().out
