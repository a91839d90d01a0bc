from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from coordd import api
from coordd.errors import CoorddError, PeerError, ShutdownError
from coordd.ops import handles
from coordd.ops.handles import Handle, awaited, call_site, called_from, is_users, wait_all
from tests.local_ranks import each_rank

DEADLINE = 10.0


def test_a_result_is_there_for_everybody_any_number_of_times():
    handle = Handle("x")
    found = []
    threads = [threading.Thread(target=lambda: found.append(handle.result(DEADLINE)), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    handle.resolve(7)
    for thread in threads:
        thread.join(DEADLINE)
    assert [*found, handle.result(), handle.result()] == [7] * 6
    assert handle.error() is None


def test_who_gives_up_takes_nobody_else_with_him():
    handle = Handle("x")
    found = []
    waiter = threading.Thread(target=lambda: found.append(handle.result(DEADLINE)), daemon=True)
    waiter.start()
    assert not handle.wait(0.01)
    assert not handle.wait(-1.0)
    assert len(handle._gates) == len(set(handle._gates))  # each has his own, and need not pass it on
    handle.resolve(7)
    waiter.join(DEADLINE)
    assert found == [7]


def test_a_failure_is_raised_again_and_again_and_does_not_grow():
    handle = Handle("x")
    handle.fail(CoorddError("because"))
    lengths = []
    for _ in range(3):
        with pytest.raises(CoorddError, match="because") as caught:
            handle.result()
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1
    assert isinstance(handle.error(), CoorddError)


def test_poll_and_wait_tell_whether_it_is_done():
    handle = Handle("x")
    assert not handle.poll()
    assert not handle.wait(0.0)
    assert repr(handle) == "<Handle 'x' pending>"
    handle.resolve(None)
    assert handle.poll()
    assert handle.wait()
    assert repr(handle) == "<Handle 'x' done>"


def test_a_result_that_does_not_come_in_time_says_so():
    with pytest.raises(TimeoutError, match=r"'x' is still in flight after 0\.01 s"):
        Handle("x").result(0.01)


def test_waits_that_end_by_their_time_limit_leave_nothing_behind():
    handle = Handle("never")
    for _ in range(100):
        assert not handle.wait(1e-6)
    assert handle._gates == []


def test_waiting_hurries_the_daemon_but_asking_does_not():
    calls = []
    handle = Handle("x", hurry=lambda name: calls.append(f"hurry {name}"))
    handle.poll()
    assert calls == []
    handle.wait(0.0)
    assert calls == ["hurry x"]
    handle.resolve(1)
    handle.wait()
    assert calls == ["hurry x"]


def test_who_hurries_may_hear_of_the_end_of_the_wait():
    ends = []
    handle = Handle("x", hurry=lambda name: lambda: ends.append((name, handle.poll())))
    handle.wait(0.0)
    assert ends == [("x", False)]
    waiting = threading.Thread(target=handle.wait)
    waiting.start()
    handle.resolve(1)
    waiting.join()
    assert ends[1:] in ([], [("x", True)]), "a wait that need not wait does not hurry"


def test_callbacks_run_once_before_and_after_it_is_done():
    handle, seen = Handle("x"), []
    handle.add_done_callback(lambda done: seen.append(("early", done.result())))
    handle.resolve(3)
    handle.add_done_callback(lambda done: seen.append(("late", done.result())))
    assert seen == [("early", 3), ("late", 3)]


def test_a_callback_that_raises_is_logged_and_stops_no_other(caplog):
    handle, seen = Handle("x"), []
    handle.add_done_callback(lambda _: 1 / 0)
    handle.add_done_callback(seen.append)
    handle.resolve(3)
    assert seen == [handle]
    assert "a callback of 'x' failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.fixture
def fast_switches():
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_no_callback_and_no_waiter_is_lost_when_it_is_done_at_the_same_moment(fast_switches):
    count = 1000
    handles = [Handle(str(number)) for number in range(count)]
    called, woken = [], []

    def ask() -> None:
        for handle in handles:
            handle.add_done_callback(called.append)
            woken.append(handle.wait(DEADLINE))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for handle in handles:
        handle.resolve(None)
    for thread in threads:
        thread.join(DEADLINE)
    assert woken == [True] * 2 * count
    assert len(called) == 2 * count


def test_a_handle_that_nobody_waits_for_is_freed():
    handle = Handle("x")
    handle.add_done_callback(lambda _: None)
    seen = weakref.ref(handle)
    del handle
    gc.collect()
    assert seen() is None


def test_wait_all_waits_for_all_and_raises_the_first_error():
    handles = [Handle(name) for name in "abc"]
    handles[0].resolve(1)
    handles[1].fail(CoorddError("b"))
    threading.Timer(0.01, lambda: handles[2].fail(CoorddError("c"))).start()
    with pytest.raises(CoorddError, match="b"):
        wait_all(iter(handles))
    assert handles[2].poll()
    wait_all([])


def test_frames_are_told_apart_by_their_modules():
    frame = sys._getframe()
    assert is_users(frame)
    assert not is_users(frame, package=__name__)


def test_the_call_site_is_the_innermost_line_outside_coordd_and_torch():
    place: dict = {"__name__": "coordd_torch.operations", "find": call_site, "frame": sys._getframe}
    exec("def inner():\n    return find(frame(0))", place)  # noqa: S102 - in a module of that name
    code, line = place["inner"]()
    assert (code.co_name, line) == (
        "test_the_call_site_is_the_innermost_line_outside_coordd_and_torch",
        sys._getframe().f_lineno - 3,
    )
    assert call_site(None) is None


def test_what_autograph_has_generated_is_nobodys_script():
    place: dict = {"__name__": "script", "find": call_site, "frame": sys._getframe}
    code = compile("def inner():\n    return find(frame(0))", "__autograph_generated_filex1y2.py", "exec")
    exec(code, place)  # noqa: S102 - from a file of that name
    assert place["inner"]()[0].co_name == "test_what_autograph_has_generated_is_nobodys_script"


def test_where_no_script_is_at_work_a_thread_speaks_for_a_line_for_a_while():
    site = (sys._getframe().f_code, 7)
    with called_from(site):
        assert call_site(None) == site
        assert call_site(sys._getframe())[0] is site[0]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(call_site, None).result() is None
    assert call_site(None) is None


@pytest.fixture
def unheard(monkeypatch, caplog):
    """What the log says of failures that nobody has asked for."""
    monkeypatch.setattr(handles, "_told", False)

    def found():
        gc.collect()
        return [message for message in caplog.messages if "nobody has asked" in message]

    return found


def test_a_failure_that_nobody_asks_for_is_told_once(unheard):
    for name in ("x", "y"):
        handle = Handle(name)
        handle.fail(CoorddError("because"))
        assert handle.wait()
        assert unheard() == (["'x' " + TOLD] if name == "y" else [])
    del handle
    assert unheard() == ["'x' " + TOLD]


TOLD = "has failed, and nobody has asked for its result: because; wait for every handle (further ones are not told)"


@pytest.mark.parametrize(
    "ask",
    [
        lambda handle: _refused(handle.result),
        lambda handle: handle.error(),
        lambda handle: handle.add_done_callback(lambda _: None),
        lambda handle: _refused(wait_all, [_failed(), handle]),
    ],
    ids=["result", "error", "callback", "wait_all"],
)
def test_who_has_asked_is_told_no_second_time(unheard, ask):
    ask(_failed())
    assert unheard() == []


def _refused(call, *args):
    with pytest.raises(CoorddError, match="because"):
        call(*args)


def _failed(error=None):
    handle = Handle("x")
    handle.fail(error or CoorddError("because"))
    return handle


def test_a_callback_that_waits_hears_of_the_failure(unheard):
    handle = Handle("x")
    handle.add_done_callback(lambda _: None)
    handle.fail(CoorddError("because"))
    del handle
    assert unheard() == []


def test_a_wait_that_a_signal_has_ended_needs_no_telling(unheard):
    def leave(*_):
        raise SystemExit

    handle, before = Handle("x"), signal.signal(signal.SIGALRM, leave)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(SystemExit):
            handle.wait(DEADLINE)
    finally:
        signal.signal(signal.SIGALRM, before)
    handle.fail(CoorddError("because"))
    del handle
    assert unheard() == []


@pytest.mark.parametrize(
    ("error", "times"),
    [(PeerError(1, "died"), 0), (ShutdownError("x"), 0), (ShutdownError("x", [1]), 1)],
    ids=["job", "own shutdown", "others left"],
)
def test_what_is_told_anyway_is_not_told_twice(unheard, error, times):
    _failed(error)
    assert len(unheard()) == times


def test_a_result_that_could_not_be_made_is_told(unheard):
    Handle("x").land(None, lambda _: 1 / 0)
    assert len(unheard()) == 1


def test_an_operation_on_which_ranks_disagree_is_told_if_nobody_waits(unheard):
    def body(rank):
        api.operations().allreduce(np.ones(2 + rank), name="x")
        api.operations().barrier().result(DEADLINE)

    each_rank(2, body)
    (told,) = unheard()
    assert told.startswith("'x' has failed")
    assert "ranks disagree on the shape of 'x'" in told


def test_a_failure_whose_handle_lives_to_the_end_is_told_then():
    script = """
from coordd.errors import CoorddError
from coordd.ops.handles import Handle
handle = Handle("x")
handle.fail(CoorddError("because"))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert TOLD in ended.stderr


def test_a_thread_that_waits_without_a_limit_is_told_from_one_that_does_not():
    handle: Handle[int] = Handle("w")
    begun = threading.Event()
    handle._hurry = lambda _: begun.set()
    thread = threading.Thread(target=handle.result)
    thread.start()
    begun.wait(60)
    found = None
    while found is None and thread.is_alive():  # until it is at the gate
        found = awaited(sys._current_frames().get(thread.ident))
    assert found is handle
    handle.resolve(7)
    thread.join(60)
    assert awaited(sys._getframe()) is None
