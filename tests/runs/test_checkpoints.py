"""Checkpoints are complete or absent, damaged ones are set aside, and no code is executed."""

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import faults
import pytest
import torch
from conftest import byte_tokenizer

from rlm.cli.options import UsageError
from rlm.runs import directory
from rlm.runs.checkpoints import (
    Checkpoints,
    changed_inputs,
    check_space,
    data_id,
    file_hash,
    writing,
    writing_beside,
)
from rlm.runs.directory import RunDirectory


def saved(folder, *steps, keep=9):
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save(step, {"x": torch.full((4,), float(step))}, {"note": "ä"}, keep=keep)
    return checkpoints


def seal(folder):
    """Write a valid manifest, as a hostile checkpoint would have."""
    names = ("state.safetensors", "state.json")
    manifest = {name: file_hash(folder / name) for name in names}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edited(name, change):
    """Return a function that damages a checkpoint by changing the content of a file."""

    def damage(folder):
        content = (folder / name).read_bytes()
        assert change(content) != content
        (folder / name).write_bytes(change(content))

    return damage


def copy_of_another_step(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step_000001"), folder)


def without(name):
    return lambda folder: (folder / name).unlink()


def sealed(damage):
    return lambda folder: (damage(folder), seal(folder))


TENSORS, STATE, MANIFEST = "state.safetensors", "state.json", "manifest.json"
flip_a_byte = edited(TENSORS, lambda content: content[:-2] + bytes([content[-2] ^ 1, content[-1]]))
longer = edited(TENSORS, lambda content: content.replace(b'"shape":[4]', b'"shape":[9]'))
DAMAGE = {
    "a byte of the tensors": flip_a_byte,
    "a byte of the state": edited(STATE, lambda content: content.replace(b"note", b"nope")),
    "truncated, sealed": sealed(edited(TENSORS, lambda content: content[:-1])),
    "a lie about a size, sealed": sealed(longer),
    "empty state, sealed": sealed(edited(STATE, lambda content: b"")),
    "deep state, sealed": sealed(edited(STATE, lambda content: b"[" * 100_000)),
    "state without a step, sealed": sealed(edited(STATE, lambda content: b"[1]")),
    "manifest of nothing": edited(MANIFEST, lambda content: b"{}"),
    "manifest that is a list": edited(
        MANIFEST, lambda content: json.dumps([STATE, TENSORS]).encode()
    ),
    "copy of another step": copy_of_another_step,
    **{f"no {name}": without(name) for name in (MANIFEST, STATE, TENSORS)},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_wins(tmp_path, capsys, damage):
    checkpoints = saved(tmp_path, 1, 2)
    DAMAGE[damage](tmp_path / "step_000002")
    tensors, state = checkpoints.load()
    assert (tensors["x"].tolist(), state["step"]) == ([1.0] * 4, 1)
    assert "step_000002 is damaged and set aside: " in capsys.readouterr().out
    assert (tmp_path / "step_000002.damaged").is_dir()
    assert checkpoints.steps() == [1]
    saved(tmp_path, 2)  # the run gets there again
    assert checkpoints.load()[1]["step"] == 2


def test_a_checkpoint_that_cannot_be_read_now_is_not_set_aside(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 1, 2)

    def fails(folder):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("rlm.runs.checkpoints._hashes", fails)
    with pytest.raises(UsageError, match="step_000002 cannot be read: Input/output error"):
        checkpoints.load()
    monkeypatch.undo()
    assert checkpoints.load()[1]["step"] == 2


def test_all_damaged_is_none_and_nothing_is_deleted(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    for step in (1, 2):
        flip_a_byte(tmp_path / f"step_{step:06d}")
    assert checkpoints.load() is None
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step_000001.damaged",
        "step_000002.damaged",
    ]
    saved(tmp_path, 2)
    flip_a_byte(tmp_path / "step_000002")
    assert checkpoints.load() is None
    assert (tmp_path / "step_000002.damaged2").is_dir()


class Evil:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (open, (str(self.file), "w"))


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_a_pickle_is_not_executed(tmp_path, name):
    checkpoints, proof = saved(tmp_path / "c", 1, 2), tmp_path / "executed"
    hostile = tmp_path / "c" / "step_000002"
    (hostile / name).write_bytes(pickle.dumps(Evil(proof)))
    (hostile / "optimizer.pt").write_bytes(pickle.dumps(Evil(proof)))
    seal(hostile)
    assert checkpoints.load()[1]["step"] == 1
    assert not proof.exists()
    pickle.loads(pickle.dumps(Evil(proof))).close()
    assert proof.exists()  # else it would be no attack


def test_only_the_newest_are_kept(tmp_path):
    assert saved(tmp_path, 1, 2, 3, 9, 10, keep=2).steps() == [9, 10]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000009", "step_000010"]


def test_a_protected_checkpoint_is_kept_as_well(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3)
    checkpoints.save(4, {"x": torch.zeros(1)}, {}, keep=1, protect=2)
    assert checkpoints.steps() == [2, 4]
    assert checkpoints.load(at_most=3)[1]["step"] == 2


def test_a_clock_that_jumps_back_changes_nothing(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    os.utime(tmp_path / "step_000002", (0, 0))
    assert checkpoints.load()[1]["step"] == 2
    checkpoints.save(3, {"x": torch.zeros(1)}, {}, keep=2)
    assert checkpoints.steps() == [2, 3]


def test_the_id_of_data_with_odd_columns():
    grid = {(0, 0): 1}  # not a key of JSON
    assert data_id("problems", [["a", {"grid": grid}]]).startswith("1 problems, sha256 ")
    assert data_id("problems", [["a", grid]]) != data_id("problems", [["b", grid]])


def test_an_input_that_was_not_recorded_has_not_changed():
    assert changed_inputs({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"}) == ["b"]


def test_tensors_come_back_bit_for_bit(tmp_path):
    tensors = {
        "a/b": torch.randn(3, 5).t(),  # not contiguous
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "count": torch.tensor(7),
    }
    Checkpoints(tmp_path).save(1, tensors, {}, keep=1)
    found, _ = Checkpoints(tmp_path).load()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].nan_to_num(9), tensor.nan_to_num(9))


def test_other_files_in_the_directory_are_left_alone(tmp_path):
    checkpoints = saved(tmp_path, 1)
    for name in ("step_000007.bak", "step_x", "notes"):
        (tmp_path / name).mkdir()
    assert checkpoints.steps() == [1]
    saved(tmp_path, 2, keep=1)
    assert {p.name for p in tmp_path.iterdir()} == {
        "step_000002",
        "step_000007.bak",
        "step_x",
        "notes",
    }


def test_a_checkpoint_has_its_name_only_when_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    """After a kill between two writes, no checkpoint has the final name."""
    seen, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: seen.append([*tmp_path.glob("s*")]) or sync(file))
    saved(tmp_path, 1)
    assert len(seen) == 5  # three files, their folder and, after the rename, its parent
    assert not any(seen[:-1])
    assert seen[-1] == [tmp_path / "step_000001"]


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"No space left.*unchanged"):
        saved(tmp_path, 1)
    assert os.listdir(tmp_path) == []


def test_two_runs_that_export_to_the_same_folder_take_turns(tmp_path):
    path = tmp_path / "adapter"

    def export(weights):
        with writing_beside(path) as scratch:
            for name in ("adapter_model.safetensors", "run.json"):
                (scratch / name).write_text(weights)
                time.sleep(0.05)
            shutil.rmtree(path, ignore_errors=True)
            scratch.rename(path)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(export, "1234"))
    assert len({file.read_text() for file in path.iterdir()}) == 1
    assert [path] == list(tmp_path.iterdir())


def test_too_little_room_is_said_before(tmp_path, monkeypatch):
    check_space("--run-dir", tmp_path, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 1, 2**20))
    with pytest.raises(UsageError, match=r"--run-dir .*: 5 MB are needed, 1 MB are free"):
        check_space("--run-dir", tmp_path, 5 * 2**20)


# --- the run directory ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        b'{"step": 3, "x\xc3',  # cut in the middle of a character
        b'\0\0\0\0\n{"step": 4}\n',  # space that was given to the file and not written
        b"[3]\n",
    ],
)
def test_a_torn_or_strange_line_does_not_hide_the_lines_before_it(tmp_path, damage):
    run = RunDirectory(tmp_path, resume=True)
    for step in range(3):
        run.log({"step": step, "x": float("nan") if step == 1 else 0.5})
        run.log_samples([{"step": step, "completions": ["a\u2028b\x85c\ud7ff"]}])
    with run.metrics_file.open("ab") as stream:
        stream.write(damage)
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["x"] != rows[1]["x"]  # NaN
    for line in run.metrics_file.read_bytes().splitlines()[:3]:
        json.loads(line, parse_constant=pytest.fail)  # strict JSON: no NaN in it
    run.truncate(2)
    assert [row["step"] for row in run.metrics()] == [0, 1]
    samples = run.samples_file.read_text().split("\n")
    assert [json.loads(line)["step"] for line in samples[:-1]] == [0, 1]
    assert json.loads(samples[1])["completions"] == ["a\u2028b\x85c\ud7ff"]


@pytest.mark.parametrize("damage", [b"\xff", b"{}", b'{"stfp": 1}'])
def test_a_damaged_row_before_a_checkpoint_costs_no_other_row(tmp_path, capsys, damage):
    run = RunDirectory(tmp_path, resume=True)
    for step in range(4):
        run.log({"step": step})
    lines = run.metrics_file.read_bytes().splitlines()
    run.metrics_file.write_bytes(b"\n".join([lines[0], damage, *lines[2:], b""]))
    run.truncate(3)
    assert [row["step"] for row in run.metrics()] == [0, 2]
    said = f"damaged rows removed from {run.metrics_file}: 1"
    assert said in "".join(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_that_no_run_made_is_left_alone(tmp_path, resume):
    """With `--run-dir data` or `--run-dir .`, other files would be deleted or renamed."""
    data = tmp_path / "mine.jsonl"
    data.write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match=r"--run-dir .* contains files that are not a run"):
        RunDirectory(tmp_path, resume=resume)
    assert data.read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "mine.jsonl"]
    with pytest.raises(UsageError, match=r"--run-dir .*mine.jsonl cannot be written"):
        RunDirectory(data, resume=resume)


@pytest.mark.parametrize("name", [".write_test_1", "sampler_adapter/adapter_config.json"])
def test_what_a_kill_before_the_lock_or_the_doctor_left_is_no_obstacle(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with RunDirectory(tmp_path, resume=False):
        pass


def test_a_new_run_deletes_logs_without_a_step_and_nothing_else(tmp_path):
    RunDirectory(tmp_path, resume=False)
    for name in ("samples.jsonl", "mine.jsonl"):
        (tmp_path / name).write_text("{}")
    RunDirectory(tmp_path, resume=False)
    assert not (tmp_path / "samples.jsonl").exists()
    assert (tmp_path / "mine.jsonl").read_text() == "{}"


def test_a_held_run_is_neither_opened_nor_moved_away(tmp_path):
    path = tmp_path / "a run ü"
    with RunDirectory(path, resume=False) as run:
        saved(run.checkpoints.folder, 1)
        for resume in (False, True):
            with pytest.raises(UsageError, match=r"process \d+ on .* trains there"):
                RunDirectory(path, resume=resume)
        assert run.checkpoints.steps() == [1]
    with RunDirectory(path, resume=False) as run:
        assert run.checkpoints.steps() == []
        assert Checkpoints(tmp_path / "a run ü.prev" / "checkpoints").steps() == [1]
        with pytest.raises(UsageError, match="trains there"):  # the new one is held too
            RunDirectory(path, resume=True)


def test_starts_that_failed_do_not_push_out_a_finished_run(tmp_path):
    path = tmp_path / "run"
    with RunDirectory(path, resume=False) as run:
        saved(run.checkpoints.folder, 0)
        run.log({"step": 0})
    for _ in range(3):  # checkpoint 0 is written before the servers start
        with RunDirectory(path, resume=False) as run:
            assert run.checkpoints.steps() == run.metrics() == []
            saved(run.checkpoints.folder, 0)
    assert (tmp_path / "run.prev" / "metrics.jsonl").exists()


def test_a_kill_while_the_run_before_is_deleted_is_no_obstacle(tmp_path, monkeypatch):
    path, rmtree = tmp_path / "run", shutil.rmtree
    for _ in range(2):
        with RunDirectory(path, resume=False) as run:
            saved(run.checkpoints.folder, 1)
            (path / "curves.png").touch()

    def cut_short(folder, **options):
        if folder.exists():
            rmtree(folder / "checkpoints")
            os._exit(1)

    def start():
        shutil.rmtree = cut_short
        RunDirectory(path, resume=False)

    assert faults.run(start, tmp_path / "said").code == 1
    with RunDirectory(path, resume=False):
        pass
    assert (tmp_path / "run.prev" / "checkpoints").is_dir()


def test_the_logs_of_a_run_are_kept_if_its_checkpoints_were_deleted(tmp_path):
    path = tmp_path / "run"
    with RunDirectory(path, resume=False) as run:
        saved(run.checkpoints.folder, 1)
        run.log({"step": 0})
    shutil.rmtree(path / "checkpoints")  # to free disk space
    RunDirectory(path, resume=False)
    assert (tmp_path / "run.prev" / "metrics.jsonl").exists()


def test_a_link_leads_to_the_new_run_where_the_old_one_was(tmp_path):
    disk, link = tmp_path / "disk" / "run", tmp_path / "run"
    disk.mkdir(parents=True)
    link.symlink_to(disk)
    with RunDirectory(link, resume=False) as run:
        saved(run.checkpoints.folder, 1)
    with RunDirectory(link, resume=False) as run:
        run.log({"step": 0})
    assert link.is_symlink()
    assert (disk / "metrics.jsonl").exists()
    assert Checkpoints(tmp_path / "disk" / "run.prev" / "checkpoints").steps() == [1]


def test_a_run_that_cannot_be_moved_away_is_refused_in_one_line(tmp_path):
    path = tmp_path / "run"
    with RunDirectory(path, resume=False) as run:
        saved(run.checkpoints.folder, 1)
    (tmp_path / "run.prev").write_text("somebody's file")
    with pytest.raises(UsageError, match="cannot be moved to"):
        RunDirectory(path, resume=False)
    assert Checkpoints(path / "checkpoints").steps() == [1]
    assert (tmp_path / "run.prev").read_text() == "somebody's file"
    (tmp_path / "run.prev").unlink()
    (tmp_path / "run.prev").mkdir()
    (tmp_path / "run.prev" / "notes.txt").write_text("of mine")
    with pytest.raises(UsageError, match=r"run\.prev contains files that are not a run"):
        RunDirectory(path, resume=False)
    assert (tmp_path / "run.prev" / "notes.txt").exists()


def test_the_current_directory_is_not_moved_away(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunDirectory(Path("."), resume=False) as run:
        saved(run.checkpoints.folder, 1)
    with pytest.raises(
        UsageError, match=r"--run-dir \. contains another run, which cannot be moved"
    ):
        RunDirectory(Path("."), resume=False)
    with RunDirectory(Path("."), resume=True) as run:  # its lock is free again
        assert run.checkpoints.steps() == [1]


def test_what_a_killed_process_left_is_cleaned_up(tmp_path):
    folder = tmp_path / "checkpoints"
    saved(folder, 1)
    for name in (".step_000002.new", ".step_000000.old"):
        shutil.copytree(folder / "step_000001", folder / name)
    with RunDirectory(tmp_path, resume=True):
        assert [p.name for p in folder.iterdir()] == ["step_000001"]


def test_the_commit_is_that_of_our_code_and_not_of_a_repository_around_it(tmp_path, monkeypatch):
    def git(*command):
        name = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", "-C", tmp_path, *name, *command], capture_output=True)
        return done.stdout.decode().strip()

    file = tmp_path / ".venv/rlm/directory.py"
    file.parent.mkdir(parents=True)
    file.touch()
    (tmp_path / ".gitignore").write_text(".venv")
    git("init")
    git("add", ".")
    git("commit", "-m", "a user's own project")
    monkeypatch.setattr(directory, "__file__", str(file))
    assert directory.git_commit() is None
    git("add", "-f", file)
    git("commit", "-m", "with our code in it")
    assert directory.git_commit() == git("rev-parse", "HEAD")


def test_in_a_notebook_a_second_signal_does_not_kill_the_kernel(tmp_path, monkeypatch):
    def be_told_twice():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
        with suppress(KeyboardInterrupt), RunDirectory(tmp_path / "run", resume=False) as run:
            os.kill(os.getpid(), signal.SIGINT)
            assert run.interrupted
            os.kill(os.getpid(), signal.SIGINT)
        return 3

    assert faults.run(be_told_twice, tmp_path / "said").code == 3


def test_a_tokenizer_that_does_not_fit_on_the_disk_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="No space left on device"), writing(tmp_path / "model"):
        byte_tokenizer().backend_tokenizer.save("/dev/full")
    with pytest.raises(ValueError, match="a bug"), writing(tmp_path / "model"):
        raise ValueError("a bug")
