"""`init` and `shutdown` broken off, repeated, nested and at once: none leaves a daemon without an owner, or hangs."""

from __future__ import annotations

import sys
import threading
from itertools import count

import numpy as np
import pytest

import coordd
from coordd import api
from coordd.daemon.daemon import Daemon
from coordd.daemon.status_server import Desk
from coordd.errors import StartError
from coordd.ops import handles
from coordd.transport.shared_memory import loans, segments
from tests.local_ranks import local_ranks

WAIT = 10.0


@pytest.fixture(autouse=True)
def _left():
    yield
    coordd.shutdown()


def break_off(*_):
    raise KeyboardInterrupt


def test_ctrl_c_in_shutdown_lets_it_be_called_again(monkeypatch):
    coordd.init()
    daemon = api.operations().daemon
    with monkeypatch.context() as patch:
        patch.setattr(daemon.status.over, "wait", break_off)
        with pytest.raises(KeyboardInterrupt):
            coordd.shutdown()
    assert api.operations().daemon is daemon
    assert api._fail("failed: KeyboardInterrupt", "", None) is False  # there is no other rank; and no error
    exit_codes: list[int] = []
    monkeypatch.setattr(api._exits, "insist", exit_codes.append)
    coordd.shutdown()
    assert exit_codes == [1]  # Python has not shown the failure, so its exit code is the only sign of it
    assert daemon.status.ended.is_set()
    assert not coordd.is_initialized()


def test_ctrl_c_in_shutdown_is_a_failure_that_others_hear_of(monkeypatch):
    coordd.init()
    daemon = api.operations().daemon
    monkeypatch.setattr(daemon.status.over, "wait", break_off)
    with pytest.raises(KeyboardInterrupt):
        coordd.shutdown()
    monkeypatch.undo()
    told = []
    monkeypatch.setattr(type(api._default), "fail", lambda _, *story: told.append(story) or True)
    assert api._fail("failed: KeyboardInterrupt", "", None)
    assert told == [("failed: KeyboardInterrupt", "", None)]


@pytest.mark.parametrize("place", [(threading.Event, "wait"), (Desk, "settle")], ids=["while it waits", "afterwards"])
def test_ctrl_c_in_init_leaves_no_daemon_behind(monkeypatch, place):
    made = []
    known = Daemon.start

    def start(daemon):
        made.append(daemon)
        with monkeypatch.context() as patch:
            patch.setattr(daemon.status.started, "wait", break_off)
            known(daemon)

    if place[0] is Desk:
        monkeypatch.setattr(Desk, "settle", break_off)
    else:
        monkeypatch.setattr(Daemon, "start", start)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        coordd.init()
    monkeypatch.undo()
    assert not coordd.is_initialized()
    for daemon in made:
        assert daemon.status.ended.wait(WAIT)
    for thread in threading.enumerate():
        if thread.name == "coordd":
            thread.join(WAIT)
    assert threading.active_count() <= before
    coordd.init()
    assert coordd.allreduce(np.ones(1)).tolist() == [1.0]


def test_without_a_thread_init_says_what_to_do_and_may_be_called_again(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    known = threading.Thread.start
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: (refuse if thread.name == "coordd" else known)(thread))
        with pytest.raises(StartError, match=r"cannot be started \(can't start new thread\): raise the limit"):
            coordd.init()
    coordd.init()
    assert coordd.is_initialized()


_INTERRUPTED = {handles.__file__, segments.__file__, loans.__file__}


class Handler:
    """Waits for a collective at each line of these files that a thread reaches, as a signal's handler may."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self._numbers = count()
        self._inside = False

    def trace(self, frame, event, _):
        place = frame.f_code.co_filename, frame.f_lineno
        if place[0] not in _INTERRUPTED or self._inside:
            return None
        if event == "line" and place not in self.lines:
            self.lines.add(place)
            self._inside = True
            self.call()
            self._inside = False
        return self.trace

    def call(self, *, last=False):
        """Returns whether it was the last call of any rank; the daemon looks up where an array of this size lies."""
        array = np.full(20_000, float(last))
        handle = api.operations().allreduce(array, name=f"of the handler {next(self._numbers)}")
        assert handle.wait(WAIT), "the daemon waits"
        return array.any()


def test_a_handler_of_a_signal_may_wait_for_a_collective_on_any_line():
    """The daemon's thread needs no lock that the interrupted thread holds."""
    handler = Handler()

    def interrupted():
        operations, kept = api.operations(), []
        pending = operations.recv(None, 1, name="later")
        pending.add_done_callback(lambda _: None)
        sys.settrace(handler.trace)
        try:
            assert not pending.wait(0.01)
            pending.add_done_callback(handles.hear_of)
            for size in (1 << 16, 1 << 12, 1 << 16, 1 << 20):
                kept += [operations.daemon.allocate(size), operations.daemon.blank(size)]
                del kept[:1]
        finally:
            sys.settrace(None)
        handler.call(last=True)
        return pending.result(WAIT)[0]

    def body(rank):
        if rank == 0:
            return interrupted()
        other = Handler()
        while not other.call():
            pass
        api.operations().send(np.ones(1), 0, name="later").result(WAIT)
        return 1.0

    with local_ranks(2) as ranks:
        assert ranks.each(body) == [1.0, 1.0]
    assert {file for file, _ in handler.lines} == _INTERRUPTED
    assert len(handler.lines) > 60
