from __future__ import annotations

import os
import sys
import threading

from coordd import account as module
from coordd.account import account, process_state

HERE = os.uname().nodename


def test_the_stack_is_that_of_the_main_thread_innermost_last():
    found = []
    thread = threading.Thread(target=lambda: found.append(account(3, None)))
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
    assert "in test_a_stack_of_nothing_but_coordd_is_shown_whole: " in account(0, None).stack


def test_a_main_thread_that_has_ended_is_told(monkeypatch):
    monkeypatch.setattr(sys, "_current_frames", dict)
    assert account(0, None).stack == "(the main thread has ended)"


def test_the_last_submission_is_named_with_its_line():
    site = (sys._getframe().f_code, 31)
    assert account(0, ("w", site, 0.0)).last == f"'w' at {__file__}:31"


def test_the_operating_system_is_asked_about_processes_of_this_host_only():
    assert process_state(os.getpid(), HERE, HERE) == "running"
    assert process_state(os.getpid(), "elsewhere", HERE) == ""
    assert process_state(2**22 + 1, HERE, HERE) == "gone"
