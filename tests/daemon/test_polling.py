from __future__ import annotations

import os
import threading
import time

import pytest

from coordd.daemon.polling import Patience, nap_precisely


class Recorder:
    """A bell that notes how long it is to sleep, and a clock that stands still otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        self.naps: list[float] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)

    def nap(self, patience: Patience, later: float, **circumstances: bool) -> float:
        self.now = 50.0 + later
        patience.doze(self, **circumstances)
        return self.naps[-1]


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


@pytest.mark.parametrize("data", [True, False])
def test_it_stays_awake_only_briefly(recorder, data):
    patience = Patience()
    assert not patience.short(data=data)
    patience.restart()
    assert patience.short(data=data)
    recorder.now += 1e-3
    assert not patience.short(data=data)
    patience.restart()
    assert patience.short(data=data)


def test_it_stays_awake_longer_for_data_which_wakes_nobody(recorder):
    patience = Patience()
    patience.restart()
    recorder.now += 2e-4
    assert patience.short(data=True)
    assert not patience.short(data=False)


@pytest.mark.parametrize("awaited", [True, False])
def test_naps_grow_up_to_a_limit_and_are_short_again_when_something_happens(recorder, awaited):
    patience = Patience()
    patience.restart()
    naps = [recorder.nap(patience, later, awaited=awaited) for later in (0.0, 1e-2, 1.5e-2, 10.0, 20.0)]
    assert 0 < naps[0] < naps[1] < naps[2] < naps[3] == naps[4] <= 1e-3
    patience.restart()
    assert recorder.nap(patience, 20.0, awaited=awaited) == naps[0]


def test_naps_are_longer_if_nobody_waits(recorder):
    patience = Patience()
    patience.restart()
    assert recorder.nap(patience, 0.0, awaited=True) < recorder.nap(patience, 0.0, awaited=False)


def test_staying_awake_lets_others_compute(monkeypatch):
    yielded = []
    monkeypatch.setattr(os, "sched_yield", lambda: yielded.append(True))
    Patience().spin()
    assert yielded == [True]


def test_precise_naps_are_asked_for_where_that_is_possible():
    thread = threading.Thread(target=nap_precisely)
    thread.start()
    thread.join()


def test_a_script_is_prompt_if_it_submits_at_once_after_a_result(recorder):
    patience = Patience()
    patience.note_submitted()
    assert patience.prompt
    for later, prompt in [(5e-5, True), (5e-3, False), (5e-5, True)]:
        patience.note_landed()
        recorder.now += later
        patience.note_submitted()
        assert patience.prompt is prompt
