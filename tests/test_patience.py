from __future__ import annotations

import os
import time

import pytest

from coordd.patience import Patience


class Recorder:
    """A bell that notes what it is asked, and a clock that stands still otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        self.done: list[str | float] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(os, "sched_yield", lambda: self.done.append("yield"))

    def sleep(self, seconds: float) -> None:
        self.done.append(seconds)

    def wait(self, patience: Patience, later: float) -> list[str | float]:
        self.now, self.done = 50.0 + later, []
        patience.wait(self)
        return self.done


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


def test_it_yields_first_then_sleeps_ever_longer(recorder):
    patience = Patience()
    patience.restart()
    assert recorder.wait(patience, 0.0) == ["yield"]
    assert patience.short
    (first,) = recorder.wait(patience, 1e-3)
    (second,) = recorder.wait(patience, 2e-3)
    (last,) = recorder.wait(patience, 10.0)
    assert not patience.short
    assert 0 < first < second < last <= 1e-3


def test_what_happens_makes_it_eager_again(recorder):
    patience = Patience()
    patience.restart()
    assert recorder.wait(patience, 10.0) != ["yield"]
    patience.restart()
    assert patience.short
    assert recorder.wait(patience, 10.0) == ["yield"]
