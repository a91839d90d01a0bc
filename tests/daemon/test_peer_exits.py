from __future__ import annotations

import threading

import pytest

from coordd.daemon.peer_exits import Departures


@pytest.fixture
def gone():
    return threading.Event()


def test_who_waits_is_told_of_that_rank_only(gone):
    departures = Departures()
    departures.watch(2, gone)
    departures.note(1)
    assert not gone.is_set()
    departures.note(2)
    assert gone.is_set()


def test_who_comes_too_late_need_not_wait(gone):
    departures = Departures()
    departures.note(2)
    departures.watch(2, gone)
    assert gone.is_set()


def test_in_the_end_nobody_waits(gone):
    departures = Departures()
    departures.watch(2, gone)
    departures.end()
    assert gone.is_set()
