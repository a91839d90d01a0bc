from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from types import FrameType, FunctionType, SimpleNamespace

import pytest

from coordd.daemon.blocked_script import BlockWatch
from coordd.monitoring import stacks as module
from coordd.monitoring.stacks import Account, account, frames_of_other_threads, places, process_state
from coordd.negotiation.tensor_table import TensorTable

HERE = os.uname().nodename


def block_watch_looks() -> None:
    """Looks as the daemon does while the script may be waiting."""
    main, nothing = threading.main_thread().ident or 0, SimpleNamespace(letters=[], wanted=[], offered=[])
    watch = BlockWatch(
        TensorTable(), thread=lambda: main, busy=bool, submitted=bool, tell=lambda *_, again: None, mail=nothing
    )
    watch.note_wait(0.0)
    watch.look(10.0)
    watch._others_may_submit()


def test_the_stack_is_that_of_the_main_thread_innermost_last():
    found = []
    thread = threading.Thread(target=lambda: found.append(account(3, None, 0.0)))
    thread.start()
    thread.join()
    (told,) = found
    assert told.rank == 3
    assert told.last == "nothing yet"
    assert "in test_the_stack_is_that_of_the_main_thread_innermost_last: " in told.stack.splitlines()[-1]
    assert len(told.stack.splitlines()) == 8


def test_a_frame_without_a_line_number_is_shown_with_the_first_line():
    def look():
        try:
            return account(0, None, 0.0).stack
        except TypeError as error:  # pytest cannot show a traceback without line numbers
            return repr(error)

    code = look.__code__.replace(co_linetable=b"")  # as at some instructions of every function
    told = FunctionType(code, globals())()
    assert told.endswith(f"{__file__}:{code.co_firstlineno} in look: def look():")


def test_frames_of_coordd_itself_are_left_out_at_the_end():
    """Whoever waits in coordd wants to read where his own code waits."""
    place = {
        "__name__": "coordd_torch.operations",
        "stack": lambda frame: module._lines(module._calls(module._outside(frame), 8)),
    }
    exec("import sys\ndef synchronize(): return stack(sys._getframe())", place)  # noqa: S102 - in a module of that name
    told = place["synchronize"]()
    assert "in test_frames_of_coordd_itself_are_left_out_at_the_end: " in told[-1]


def test_a_stack_of_nothing_but_coordd_is_shown_whole(monkeypatch):
    monkeypatch.setattr(module, "_OURS", ("",))
    assert "in test_a_stack_of_nothing_but_coordd_is_shown_whole: " in account(0, None, 0.0).stack


LOOKING = """
import gc, threading, time
from coordd.monitoring.stacks import frames_of_other_threads

class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0.0001)  # releases the GIL

def look():
    with frames_of_other_threads() as frames:
        assert threading.main_thread().ident in frames

def work():
    for _ in range(300):
        Cycle()
        look()

gc.set_threshold(1)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert gc.isenabled()
"""


def test_threads_look_at_each_others_frames_while_garbage_is_collected():
    """Python's own function deadlocks at once, in versions such as 3.11.7."""
    subprocess.run([sys.executable, "-c", LOOKING], check=True, timeout=120)


def test_a_garbage_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with frames_of_other_threads():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


class Local:
    """A local variable of a function."""


@pytest.mark.parametrize("look", [lambda: places(48), lambda: account(0, None, 0.0), block_watch_looks])
def test_a_look_keeps_no_local_variable_of_a_function_that_has_returned(look):
    """Nor must it wait for the garbage collector, which may be off."""
    alive: list[weakref.ref[Local]] = []
    looked = [threading.Semaphore(0) for _ in range(2)]

    def step() -> None:
        local = Local()
        alive.append(weakref.ref(local))
        looked[0].release()
        looked[1].acquire()

    def run() -> None:
        for _ in range(3):
            step()

    script = threading.Thread(target=run)
    gc.disable()
    try:
        script.start()
        for _ in range(3):
            looked[0].acquire()
            look()
            looked[1].release()
        script.join()
        assert [found() for found in alive] == [None] * 3
    finally:
        gc.enable()


def test_two_threads_that_look_at_each_other_keep_nothing():
    alive: list[weakref.ref[Local]] = []
    both = threading.Barrier(2)

    def look() -> None:
        local = Local()
        alive.append(weakref.ref(local))
        with frames_of_other_threads():
            both.wait()  # a look must not wait; here it makes sure that both are in one
        both.wait()

    gc.disable()
    try:
        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found() for found in alive] == [None, None]
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_can_look_and_has_its_garbage_collector(monkeypatch):
    """However a fork falls into a look of another thread."""
    inside, go, look = threading.Event(), threading.Event(), sys._current_frames

    def slowly() -> dict[int, FrameType]:
        inside.set()
        go.wait()
        return look()

    monkeypatch.setattr(sys, "_current_frames", slowly)
    other = threading.Thread(target=places, args=(3,))
    other.start()
    inside.wait()
    threading.Timer(0.2, go.set).start()  # the fork waits for the look
    if not (pid := os.fork()):
        os._exit(gc.isenabled() and module._looking.acquire(blocking=False) and go.is_set())
    other.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_a_main_thread_that_has_ended_is_told(monkeypatch):
    found: list[Account] = []
    monkeypatch.setattr(sys, "_current_frames", dict)
    thread = threading.Thread(target=lambda: found.append(account(0, None, 0.0)))
    thread.start()
    thread.join()
    assert found[0].stack == "(the main thread has ended)"


def test_the_last_submission_is_named_with_its_line():
    site = (sys._getframe().f_code, 31)
    assert account(0, ("w", site, 0.0), 0.0).last == f"'w' at {__file__}:31"


def test_the_operating_system_is_asked_about_processes_of_this_host_only():
    assert process_state(os.getpid(), HERE, HERE) == "running"
    assert process_state(os.getpid(), "elsewhere", HERE) == ""
    assert process_state(2**22 + 1, HERE, HERE) == "gone"


def test_the_threads_that_are_not_coordds_are_told_the_main_thread_first():
    found, go = [], threading.Event()
    idle = threading.Thread(target=go.wait, name="loader")
    own = threading.Thread(target=go.wait, name="coordd")
    asker = threading.Thread(target=lambda: found.extend(places(48)), name="asker")
    for thread in (own, idle, asker):
        thread.start()
    asker.join()
    go.set()
    for thread in (own, idle):
        thread.join()
    names = [place.thread for place in found]
    assert names[0] == "MainThread"
    assert "loader" in names
    assert not {"coordd", "asker"} & set(names)
    assert f"in {test_the_threads_that_are_not_coordds_are_told_the_main_thread_first.__name__}: " in found[0].lines[-1]
    assert found[0].inside == ""


def test_the_outermost_call_of_coordd_is_what_a_thread_is_in():
    place = {"__name__": "coordd_torch.operations", "found": (found := [])}
    source = "import sys\ndef inner(): found.append(sys._getframe())\ndef synchronize(): inner()"
    exec(source, place)  # noqa: S102 - in a module of that name
    place["synchronize"]()
    frame = found[0]
    assert module._inside(frame, module._outside(frame)) == "coordd_torch.operations.synchronize"
    assert len(module._lines(module._calls(frame, 2))) == 2
