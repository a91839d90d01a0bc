from __future__ import annotations

import errno
import json
import logging
import os
import threading

import pytest

from coordd.monitoring.timeline import writer
from coordd.monitoring.timeline.clock import Reading
from coordd.monitoring.timeline.trace import Trace
from coordd.monitoring.timeline.writer import Writer, rank_file
from coordd.ops.event_buffer import Deck, Pause, Tape

ABOUT = {"rank": 3, "size": 4, "host": "here", "pid": 1, "job": "j", "began": 1.0, "clock": 1.0}
SECONDS = 20.0


@pytest.fixture
def deck():
    deck = Deck()
    deck.tape = Tape(cycles=True)
    return deck


def names(path):
    return [event["name"] for event in json.loads(path.read_text()) if event["ph"] != "M"]


def test_all_that_was_noted_is_in_a_file_of_its_own(tmp_path, deck):
    scribe = Writer(tmp_path / "new" / "folder", deck.tape, deck, ABOUT)
    deck.tape.cycle()
    deck.tape.pause("w")()
    scribe.note(Reading(5.0, 0.25, 0.001))
    scribe.end()
    scribe.join(SECONDS)
    path = rank_file(tmp_path / "new" / "folder", 3)
    assert names(path) == ["CYCLE", "WAIT"]
    assert Trace(path).about == ABOUT
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_running_job_can_be_looked_at(tmp_path, deck, monkeypatch):
    monkeypatch.setattr(writer, "_PERIOD", 0.01)
    written = threading.Event()
    monkeypatch.setattr(writer.Sheet, "flush", noting(writer.Sheet.flush, written))
    scribe = Writer(tmp_path, deck.tape, deck, ABOUT)
    deck.tape.pause("w")()
    assert written.wait(SECONDS)
    assert [event.name for event in Trace(scribe.path).events() if event.ph == "X"] == ["WAIT"]
    assert not scribe.path.read_text().rstrip().endswith("]")
    scribe.end()
    scribe.join(SECONDS)


def noting(flush, written):
    def flushed(sheet):
        some = b"WAIT" in sheet._data
        flush(sheet)
        if some:
            written.set()

    return flushed


def test_an_earlier_file_is_replaced_and_a_link_is_not_followed(tmp_path, deck):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    rank_file(tmp_path, 3).symlink_to(precious)
    scribe = Writer(tmp_path, deck.tape, deck, ABOUT)
    scribe.end()
    scribe.join(SECONDS)
    assert precious.read_text() == "mine"
    assert Trace(rank_file(tmp_path, 3)).rank == 3


def test_a_recording_begins_when_the_one_before_has_ended(tmp_path, deck):
    first = Writer(tmp_path, deck.tape, deck, ABOUT)
    second = Writer(tmp_path, Tape(), deck, ABOUT | {"job": "second"}, after=first)
    first.end()
    second.end()
    second.join(SECONDS)
    assert Trace(second.path).about["job"] == "second"


@pytest.mark.parametrize("trouble", ["full", "no folder"])
def test_trouble_is_told_once_and_ends_the_recording_only(tmp_path, deck, monkeypatch, caplog, trouble):
    folder = tmp_path / "folder"
    if trouble == "full":
        monkeypatch.setattr(os, "write", full)
    else:
        folder.write_text("a file")
    with caplog.at_level(logging.WARNING, "coordd"):
        scribe = Writer(folder, deck.tape, deck, ABOUT)
        scribe.end()
        scribe.join(SECONDS)
    assert deck.tape is None
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("the timeline ends here, the training goes on: ")


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_another_recording_notes_goes_on_after_trouble(tmp_path, deck, monkeypatch, caplog):
    folder = tmp_path / "folder"
    folder.write_text("a file")
    scribe = Writer(folder, Tape(), deck, ABOUT)
    scribe.join(SECONDS)
    assert deck.tape is not None


def test_what_was_dropped_is_told_once_and_written_down(tmp_path, deck, caplog):
    tape = deck.tape = Tape(cycles=True, most=2)
    for _ in range(7):
        tape.cycle()
    with caplog.at_level(logging.WARNING, "coordd"):
        scribe = Writer(tmp_path, tape, deck, ABOUT)
        scribe.end()
        scribe.join(SECONDS)
    assert Trace(scribe.path).dropped == 5
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "the timeline cannot be written as fast as it grows"
    ]


def test_items_come_in_the_order_in_which_they_were_noted(tmp_path, deck):
    for number in range(3):
        deck.tape._put(Pause("main", str(number), number, number + 0.5))
    scribe = Writer(tmp_path, deck.tape, deck, ABOUT)
    scribe.end()
    scribe.join(SECONDS)
    events = json.loads(scribe.path.read_text())
    assert [event["args"]["for"] for event in events if event["name"] == "WAIT"] == ["0", "1", "2"]
