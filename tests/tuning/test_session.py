from __future__ import annotations

import logging

import msgspec
import pytest

from coordd.errors import ConfigError
from coordd.tuning.record import FORMAT, Record
from coordd.tuning.session import Session
from coordd.tuning.settings import Space
from tests.synthetic import START
from tests.tuning.found import KEY, RECORD, other

pytest.importorskip("optuna")

SPACE = Space(fusion_mb=(32.0,), cycle_ms=(0.0, 20.0), buckets=(1, 2), algorithm=("slices",), compression=("none",))


def seconds(settings):
    return 0.01 / settings.buckets + settings.cycle_ms / 10_000


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tune" / "r.json"


def session(path, **options) -> Session:
    frame = {"space": SPACE, "start": START, "key": KEY, "path": path, "share": 1.0} | options
    return Session(frame.pop("space"), frame.pop("start"), frame.pop("key"), **frame)


def train(one: Session, steps: int) -> None:
    for _ in range(steps):
        one.tell(seconds(one.settings))


def test_a_search_is_written_down_and_skipped_the_next_time(path):
    first = session(path)
    train(first, 1000)
    assert (first.done, first.settings) == (True, other(cycle_ms=0.0, buckets=2))
    second = session(path)
    assert (second.done, second.settings) == (True, first.settings)
    train(second, 1000)
    assert second.progress.spent == first.progress.spent


def test_what_was_measured_is_kept_when_the_job_is_killed(path):
    first = session(path)
    train(first, 70)
    assert not first.done
    kept = Record.load(path).progress
    assert sum(len(trial.ratios) for trial in kept.trials) == 1
    assert session(path).progress.trials == kept.trials


def test_the_end_of_a_run_keeps_what_it_saved_for_a_trial(path):
    first = session(path, share=0.01)
    train(first, 300)
    assert not path.exists(), "nothing was measured"
    first.close()
    assert Record.load(path).progress.credit == pytest.approx(3)


def test_a_finished_search_needs_no_optuna(path, monkeypatch):
    train(session(path), 1000)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert session(path).done
    path.unlink()
    with pytest.raises(ConfigError, match="needs Optuna"):
        session(path)


def unusable(change: str) -> bytes:
    record = msgspec.structs.replace(RECORD, space=SPACE)
    if change == "another model":
        record = msgspec.structs.replace(record, key=msgspec.structs.replace(KEY, model="x"))
    elif change == "choices that are gone":
        progress = msgspec.structs.replace(record.progress, best=other(algorithm="tree"))
        record = msgspec.structs.replace(record, progress=progress)
    elif change == "another format":
        record = msgspec.structs.replace(record, format=FORMAT + 1)
    else:
        return b"Horovod's own,csv,file"
    return msgspec.json.encode(record)


@pytest.mark.parametrize("change", ["another model", "choices that are gone", "another format", "something else"])
def test_a_record_that_cannot_be_used_is_reported_and_set_aside(path, change, caplog):
    path.parent.mkdir()
    path.write_bytes(text := unusable(change))
    one = session(path)
    assert one.settings == START
    assert "the search begins anew" in caplog.text
    assert path.with_name("r.json.old").read_bytes() == text, "it may have been someone's"
    train(one, 1000)
    assert Record.load(path).key == KEY


def test_a_usable_record_is_not_complained_about(path, caplog):
    msgspec.structs.replace(RECORD, space=SPACE).save(path)
    assert session(path).settings == RECORD.progress.best
    assert not [record for record in caplog.records if record.levelname != "INFO"]


def test_training_goes_on_when_nothing_can_be_written(tmp_path, caplog):
    (tmp_path / "file").touch()
    one = session(tmp_path / "file" / "r.json")
    train(one, 1000)
    one.close()
    assert one.done
    assert caplog.text.count("cannot be written") == 1


def test_the_end_is_told(path, caplog):
    with caplog.at_level(logging.INFO, "coordd"):
        train(session(path), 1000)
    assert [record.message.split(":")[0] for record in caplog.records] == ["autotune has ended"]
