from __future__ import annotations

import json
import os

import msgspec
import pytest

from coordd.tuning import record as module
from coordd.tuning.record import FORMAT, Record, RecordError, folder, host_kind, latest, path_for, written
from tests.tuning.found import KEY, RECORD


def test_what_was_saved_is_loaded(tmp_path):
    path = tmp_path / "not" / "yet" / "there.json"
    RECORD.save(path)
    assert Record.load(path) == RECORD


def test_a_record_can_be_read_by_people(tmp_path):
    RECORD.save(tmp_path / "r.json")
    found = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert found["format"] == FORMAT
    assert found["progress"]["trials"][1]["outcome"] == "faster"
    assert found["progress"]["best"]["buckets"] == 2


def test_a_record_is_replaced_in_one_piece(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    RECORD.save(path)

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", fails)
    with pytest.raises(OSError, match="disk full"):
        msgspec.structs.replace(RECORD, format=2).save(path)
    assert Record.load(path) == RECORD
    assert list(tmp_path.iterdir()) == [path], "nothing is left behind"


def test_no_record_is_no_error_of_a_record(tmp_path):
    with pytest.raises(FileNotFoundError):
        Record.load(tmp_path / "none.json")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b"sample,score\n1,2\n", b"\xff\xfe", b'{"format": 1}'])
def test_a_broken_record_is_named(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_bytes(text)
    with pytest.raises(RecordError, match=r"r\.json cannot be read"):
        Record.load(path)


def test_a_truncated_record_is_broken(tmp_path):
    path = tmp_path / "r.json"
    RECORD.save(path)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 2, 97):
        path.write_bytes(whole[:length])
        with pytest.raises(RecordError):
            Record.load(path)


def test_settings_outside_their_space_are_broken(tmp_path):
    found = msgspec.to_builtins(RECORD)
    found["space"]["buckets"] = []
    (tmp_path / "r.json").write_text(json.dumps(found), "utf-8")
    with pytest.raises(RecordError, match="buckets"):
        Record.load(tmp_path / "r.json")


def test_another_format_is_told_apart_from_damage(tmp_path):
    (tmp_path / "r.json").write_text('{"format": 7, "all": "else"}', "utf-8")
    with pytest.raises(RecordError, match=f"has format 7, and this version reads format {FORMAT}"):
        Record.load(tmp_path / "r.json")


def test_a_folder_is_no_record(tmp_path):
    with pytest.raises(RecordError, match="cannot be read"):
        Record.load(tmp_path)


def test_records_are_kept_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder({"XDG_CACHE_HOME": "/cache"}).as_posix() == "/cache/coordd/tune"
    assert folder({}) == folder({"XDG_CACHE_HOME": "relative"}) == tmp_path / ".cache" / "coordd" / "tune"


def test_a_path_of_ones_own_is_taken():
    assert path_for(KEY, "here.json", {}).as_posix() == "here.json"
    assert path_for(KEY, "", {"XDG_CACHE_HOME": "/c"}).as_posix() == f"/c/coordd/tune/{KEY.digest}.json"


def test_the_latest_record_is_found(tmp_path):
    assert latest(written(tmp_path / "none"), {}) is None
    for place, name in enumerate(("b", "c", "a")):
        RECORD.save(tmp_path / f"{name}.json")
        os.utime(tmp_path / f"{name}.json", (place, place))
    (tmp_path / "a.html").touch()
    before = written(tmp_path)
    assert latest(before, {}) == tmp_path / "a.json"
    assert latest(before, before) is None
    os.utime(tmp_path / "b.json", (1, 1))
    assert latest(written(tmp_path), before) == tmp_path / "b.json"
    assert list(written(tmp_path / "c.json")) == [tmp_path / "c.json"]


def test_a_host_is_known_by_what_it_is(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Some CPU @ 3 GHz\n", "utf-8")
    monkeypatch.setattr(module, "_CPUINFO", cpuinfo)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert host_kind() == "4 x Some CPU @ 3 GHz"
    monkeypatch.setattr(module, "_CPUINFO", tmp_path / "none")
    assert host_kind().startswith("4 x ")
    assert host_kind() != "4 x "
