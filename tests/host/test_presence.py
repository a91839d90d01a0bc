"""What a rank writes for its launcher when `init` begins, ends and fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import coordd
from coordd import api
from coordd.daemon.daemon import Daemon
from coordd.errors import StartError
from coordd.host.presence import VARIABLE, Presence

STATES = ("present", "entering", "never")


@pytest.fixture
def presence(monkeypatch):
    made = Presence()
    monkeypatch.setenv(VARIABLE, made.environment[VARIABLE])
    yield made
    coordd.shutdown()


def states(presence):
    return [state for state in STATES if getattr(presence, state)]


def watch(monkeypatch, presence, *, fails):
    """Records the state inside `init`."""
    seen = []
    start = Daemon.start

    def watched(daemon):
        seen.append(states(presence))
        if fails:
            raise StartError("no memory")
        start(daemon)

    monkeypatch.setattr(Daemon, "start", watched)
    return seen


def test_a_world_of_one_is_not_waited_for(monkeypatch, presence):
    assert states(presence) == ["never"]
    inside = watch(monkeypatch, presence, fails=False)
    coordd.init()
    assert (inside, states(presence)) == ([["entering"]], [])


def test_a_rank_that_is_alone_by_its_settings_does_not_wait_in_init(monkeypatch, presence):
    monkeypatch.setenv("COORDD_ALONE", "1")
    inside = watch(monkeypatch, presence, fails=False)
    coordd.init()
    assert (inside, states(presence)) == ([["never"]], ["never"])


def test_a_rank_whose_init_fails_does_not_wait_in_it_any_longer(monkeypatch, presence):
    inside = watch(monkeypatch, presence, fails=True)
    with pytest.raises(StartError):
        coordd.init()
    assert (inside, states(presence)) == ([["entering"]], [])


def test_a_child_process_of_a_rank_writes_nothing_for_its_parent(monkeypatch, presence):
    monkeypatch.setenv(api.RANK_PID, str(os.getpid()))
    script = "import coordd; coordd.init(); coordd.shutdown()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert states(presence) == ["never"]
