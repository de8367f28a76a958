"""Export of an adapter, which replaces only another adapter, and only completely."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import tiny_model

from rlm.cli.options import UsageError
from rlm.model.adapters import new_adapter
from rlm.model.export import check_output, save_adapter


@pytest.fixture
def export(tokenizer, tmp_path):
    policy = new_adapter(tiny_model(), r=4, alpha=8)

    def save(number, path=tmp_path / "lora"):
        for name, tensor in policy.named_parameters():
            if "lora_B" in name:
                tensor.data.fill_(number)
        save_adapter(policy, tokenizer, path, {"number": number})

    return save


ROOT = Path(__file__).parents[2]


def number(folder):
    return json.loads((folder / "run.json").read_text())["number"]


def test_everyone_who_may_read_one_file_of_an_adapter_may_read_all(export, tmp_path):
    export(1)  # safetensors creates files that only their owner can read
    assert len({file.stat().st_mode for file in (tmp_path / "lora").iterdir()}) == 1


@pytest.mark.parametrize("place", ["", "a folder", "a file"])
def test_only_an_adapter_is_replaced(tmp_path, monkeypatch, place):
    """Otherwise `--output weights`, for example, would delete everything in that folder."""
    output = tmp_path / place
    thesis = output / "thesis.tex" if place != "a file" else output
    thesis.parent.mkdir(exist_ok=True)
    thesis.write_text("years of work")
    monkeypatch.chdir(tmp_path)
    for named in (output, tmp_path / "."):
        with pytest.raises(UsageError, match="--output"):
            check_output(named)
    assert thesis.read_text() == "years of work"


def test_what_is_in_the_way_of_the_old_adapter_is_left_alone(export, tmp_path):
    export(1)
    check_output(tmp_path / "lora")
    previous = tmp_path / "lora.prev"
    previous.write_text("a file")
    with pytest.raises(UsageError, match="exists and is not an adapter"):
        check_output(tmp_path / "lora")
    previous.unlink()
    (previous / "thesis").mkdir(parents=True)
    with pytest.raises(UsageError, match="exists and is not an adapter"):
        check_output(tmp_path / "lora")


def test_the_old_adapter_is_kept_beside_also_behind_a_link(export, tmp_path):
    disk, link = tmp_path / "disk" / "lora", tmp_path / "lora"
    disk.parent.mkdir()
    link.symlink_to(disk)
    for i in (1, 2, 3):
        export(i)
        assert number(disk) == i
    assert link.is_symlink()
    assert number(tmp_path / "disk" / "lora.prev") == 2


def test_an_empty_folder_is_not_kept_in_place_of_an_older_adapter(export, tmp_path):
    for i in (1, 2):
        export(i)
    shutil.rmtree(tmp_path / "lora")
    (tmp_path / "lora").mkdir()
    export(3)
    assert (number(tmp_path / "lora"), number(tmp_path / "lora.prev")) == (3, 1)
    check_output(tmp_path / "lora")  # the next run may use the same --output


def test_a_save_that_fails_brings_no_older_adapter_back(export, tmp_path, monkeypatch):
    for i in (1, 2):
        export(i)
    (tmp_path / "lora").rename(tmp_path / "kept")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlm.model.export.sync", full)
    with pytest.raises(UsageError, match="No space left"):
        export(3)
    assert not (tmp_path / "lora").exists()  # lora.prev is older and is not moved back
    assert number(tmp_path / "lora.prev") == 1


def test_a_kill_while_the_old_adapter_is_deleted_is_no_obstacle(export, tmp_path, monkeypatch):
    for i in (1, 2):
        export(i)

    def cut_short(folder, **options):
        if folder.exists() and "prev" in folder.name:
            (folder / "adapter_config.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut_short)
        with pytest.raises(KeyboardInterrupt):
            export(3)
    check_output(tmp_path / "lora")
    export(3)
    assert (number(tmp_path / "lora"), number(tmp_path / "lora.prev")) == (3, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"lora", "lora.prev"}


def test_an_export_that_is_repeated_keeps_the_adapter_of_the_run_before(export, tmp_path):
    """`--resume` may export the same adapter again."""
    for i in (1, 2, 2):
        export(i)
    assert (number(tmp_path / "lora"), number(tmp_path / "lora.prev")) == (2, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"lora", "lora.prev"}


def test_the_adapter_that_came_with_the_project_is_kept_for_good(export, tmp_path, capsys):
    output, shipped = tmp_path / "final_rlm_lora", tmp_path / "shipped_rlm_lora"
    export(1, output)
    run = json.loads((output / "run.json").read_text())
    (output / "run.json").write_text(json.dumps(run | {"shipped": True}))
    for i in (2, 3, 4):
        check_output(output)
        export(i, output)
        said = capsys.readouterr().out
        assert (f"is now in {shipped}" in said) == (i == 2)  # printed once, when it is moved
        assert (number(output), number(shipped)) == (i, 1)
    with pytest.raises(UsageError, match="contains the adapter that came with the project"):
        check_output(shipped)


def test_the_tracked_adapter_says_that_it_came_with_the_project():
    """benchmarks/ship.py sets this value, without which train_grpo.py would replace the adapter."""
    run = json.loads((ROOT / "weights/final_rlm_lora/run.json").read_text())
    assert run["shipped"] is True
