"""`make demo-experience` with a scripted model, and with its server as a process."""

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
        # The demo must not use the variables of a paid endpoint.
        monkeypatch.setenv("GENERATOR_1_BASE_URL", "https://api.example.org/v1")
        monkeypatch.setenv("GENERATOR_2_MODEL", "another")
        make_small(monkeypatch, problems=8, groups=2, held_out=44, trial_size=20)
        config = demo.DemoConfig(dataset=str(data), problems=30, run_dir=tmp_path / "run")
        assert demo.main(config) == 0
        assert {body["model"] for body in server.asked("chat/completions")} == {"base"}
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())["rows"]
    assert found["selected_experiences"]["accuracy"]["mean"] == 1.0
    assert found["selected_experiences"]["difference"]["low"] > 0
    assert "selected_experiences has no placebo row" in capsys.readouterr().out  # one kind
    with pytest.raises(UsageError, match="run exists; remove it or name another"):
        demo.main(config)


@pytest.mark.slow
def test_the_demo_asks_a_server_of_its_own(model_dir, tmp_path, monkeypatch, capsys):
    make_small(monkeypatch, problems=2, groups=1, held_out=6, trial_size=6)
    config = demo.DemoConfig(model=str(model_dir), max_tokens=8, run_dir=tmp_path / "run")
    assert demo.main(config) == 0  # a random model is never right
    assert "No lesson helped, so none was kept" in capsys.readouterr().out
