from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

from coordd.monitoring import stacks as module
from coordd.monitoring.stacks import account, current_frames, places, process_state

HERE = os.uname().nodename


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


def test_frames_of_coordd_itself_are_left_out_at_the_end():
    """Whoever waits in coordd wants to read where his own code waits."""
    place = {"__name__": "coordd_torch.operations", "stack": module._stack}
    exec("import sys\ndef synchronize(): return stack(sys._getframe())", place)  # noqa: S102 - in a module of that name
    told = place["synchronize"]()
    assert "in test_frames_of_coordd_itself_are_left_out_at_the_end: " in told.splitlines()[-1]


def test_a_stack_of_nothing_but_coordd_is_shown_whole(monkeypatch):
    monkeypatch.setattr(module, "_OURS", ("",))
    assert "in test_a_stack_of_nothing_but_coordd_is_shown_whole: " in account(0, None, 0.0).stack


LOOKING = """
import gc, threading, time
from coordd.monitoring.stacks import current_frames

class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0.0001)  # releases the GIL

def look():
    assert threading.get_ident() in current_frames()

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
        assert threading.get_ident() in current_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_main_thread_that_has_ended_is_told(monkeypatch):
    monkeypatch.setattr(sys, "_current_frames", dict)
    assert account(0, None, 0.0).stack == "(the main thread has ended)"


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
    assert {"loader", "asker"} <= set(names)
    assert "coordd" not in names
    assert f"in {test_the_threads_that_are_not_coordds_are_told_the_main_thread_first.__name__}: " in found[0].lines[-1]
    assert found[0].inside == ""


def test_the_outermost_call_of_coordd_is_what_a_thread_is_in():
    place = {"__name__": "coordd_torch.operations", "found": (found := [])}
    source = "import sys\ndef inner(): found.append(sys._getframe())\ndef synchronize(): inner()"
    exec(source, place)  # noqa: S102 - in a module of that name
    place["synchronize"]()
    frame = found[0]
    assert module._inside(frame, module._outside(frame)) == "coordd_torch.operations.synchronize"
    assert len(module._lines(frame, 2)) == 2
