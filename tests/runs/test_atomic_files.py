"""Files that stay complete if the process is killed."""

import json
import resource

import pytest
from matplotlib.figure import Figure

from rlm.cli.options import UsageError
from rlm.runs.atomic_files import Journal, append_lines, read_lines, replace_json
from rlm.runs.plots import save_figure


def test_a_torn_last_line_is_cut_off_and_another_bad_one_named(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    assert read_lines(path) == []
    written = [{"a": 1}, {"b": "ü"}, {"error": "half a surrogate pair: \ud83d"}]
    append_lines(path, written)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        rows = read_lines(path, repair=False)
        assert path.read_bytes() == whole[:cut]
        assert read_lines(path) == rows == written[: whole[:cut].count(b"\n")]
        append_lines(path, [{"c": 3}])
        assert read_lines(path) == [*rows, {"c": 3}]
    assert "torn" in caplog.text
    path.write_text('{"a": 1}\nnot\n{"b": 2}\n')
    with pytest.raises(UsageError, match="line 2"):
        read_lines(path)


def test_a_row_is_on_the_disk_when_it_is_said_to_be(tmp_path, monkeypatch):
    path, synced = tmp_path / "rows.jsonl", []
    monkeypatch.setattr("os.fsync", lambda stream: synced.append(path.read_text()))
    append_lines(path, [{"a": 1}])
    append_lines(path, [{"b": 2}, {"c": 3}])
    assert synced == ['{"a": 1}\n', '{"a": 1}\n{"b": 2}\n{"c": 3}\n']


def test_a_replaced_file_is_whole_at_any_moment(tmp_path, monkeypatch):
    """If the disk is full, the old file remains."""
    path = tmp_path / "x.json"
    replace_json(path, ["é", "a name that is not UTF-8: \udcff"])

    def full(stream):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        replace_json(path, [2])
    assert json.loads(path.read_text()) == ["é", "a name that is not UTF-8: \udcff"]
    assert [path] == list(tmp_path.iterdir())  # no litter


def test_a_figure_that_does_not_fit_on_the_disk_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "curves.png"
    path.write_text("the curves of the step before")
    monkeypatch.setattr("os.fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_figure(Figure(), path)
    assert path.read_text() == "the curves of the step before"
    assert [path] == list(tmp_path.iterdir())


def test_the_journal_remembers(tmp_path):
    journal = Journal(tmp_path / "deep" / "calls.jsonl")
    journal.add("k", {"reply": 1})
    assert Journal(journal.path).rows == {"k": {"key": "k", "reply": 1}}


def test_a_row_that_does_not_fit_on_the_disk_damages_no_other_row(tmp_path):
    """Another thread may write the next row when there is room again."""
    journal = Journal(tmp_path / "calls.jsonl")
    journal.add("k", {"reply": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            journal.add("long", {"reply": "x" * 200})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.add("l", {"reply": 2})
    assert [*Journal(journal.path).rows] == ["k", "l"]
