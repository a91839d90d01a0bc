"""`init` and `shutdown` broken off, repeated, nested and at once: none leaves a daemon without an owner, or hangs."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import count

import numpy as np
import pytest

import coordd
from coordd import api
from coordd.daemon import daemon as daemon_module
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
        patch.setattr(daemon._loop, "say_goodbye", lambda: None)  # otherwise the daemon may have ended before `_fail`
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


def test_a_handler_of_a_signal_may_call_shutdown_wherever_it_comes(monkeypatch):
    """In the main thread, which is in `init`, or in `shutdown` itself."""
    known = Daemon.start, Daemon.stop

    def start(daemon):
        coordd.shutdown()
        known[0](daemon)

    def stop(daemon):
        coordd.shutdown()
        return known[1](daemon)

    monkeypatch.setattr(Daemon, "start", start)
    monkeypatch.setattr(Daemon, "stop", stop)
    thread = threading.Thread(target=lambda: [coordd.init(), coordd.shutdown()], daemon=True)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive(), "it waits for itself"
    assert not coordd.is_initialized()


def test_a_second_thread_that_leaves_waits_for_the_first_and_init_for_both(monkeypatch):
    coordd.init()
    first = api.operations().daemon
    entered, go_on, order = threading.Event(), threading.Event(), []
    known = Daemon.stop

    def stop(daemon):
        entered.set()
        assert go_on.wait(WAIT)
        done = known(daemon)
        order.append("stopped")
        return done

    monkeypatch.setattr(Daemon, "stop", stop)
    threads = [threading.Thread(target=coordd.shutdown, daemon=True)]
    threads[0].start()
    assert entered.wait(WAIT)

    def again():
        coordd.shutdown()
        coordd.init()
        order.append("begun")

    threads.append(threading.Thread(target=again, daemon=True))
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    assert order == ["stopped", "begun"]
    assert api.operations().daemon is not first


ENDS = {
    "while a thread waits": "threading.Thread(target=wait, daemon=True).start()",
    "while a thread leaves": "threading.Thread(target=coordd.shutdown, daemon=True).start()",
    "after it has left twice": "coordd.shutdown(); coordd.shutdown()",
    "in a handler of its own": "atexit.register(coordd.shutdown)",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_interpreter_exits_in_order(end):
    script = f"""
import atexit, threading
import coordd
from coordd.errors import ShutdownError
coordd.init()
handle = coordd.api.operations().recv(None, 0, name="never") if {"waits" in end} else None
def wait():
    try:
        handle.result()
    except ShutdownError:
        print("told", flush=True)
{ENDS[end]}
print("last", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "last"), done.stderr
    assert "Traceback" not in done.stderr


_INTERRUPTED = {module.__file__ for module in (handles, segments, loans, daemon_module)}


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


def test_a_handler_of_a_signal_may_wait_for_a_collective_on_any_line(tmp_path):
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
            operations.daemon.start_timeline(tmp_path)
            operations.daemon.stop_timeline()
        finally:
            sys.settrace(None)
        handler.call(last=True)
        return pending.result(WAIT)[0]

    def body(rank):
        if rank == 0:
            return interrupted()
        api.operations().daemon.start_timeline(tmp_path)
        other = Handler()
        while not other.call():
            pass
        api.operations().send(np.ones(1), 0, name="later").result(WAIT)
        return 1.0

    with local_ranks(2) as ranks:
        assert ranks.each(body) == [1.0, 1.0]
    assert {file for file, _ in handler.lines} == _INTERRUPTED
    assert len(handler.lines) > 60
