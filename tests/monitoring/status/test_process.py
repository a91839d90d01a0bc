from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from coordd.monitoring.status import process
from coordd.monitoring.status.probe_result import Life
from tests.launch.started import wait_until

WAIT = "import threading; print('ready', flush=True); threading.Event().wait()"
TURN = "print('ready', flush=True)\nwhile True: pass"


@contextmanager
def child(source):
    started = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    try:
        assert started.stdout.readline() == b"ready\n"
        yield started
    finally:
        started.kill()
        started.wait()
        started.stdout.close()


def becomes(pid, life):
    return wait_until(lambda: process.glance(pid).life is life)


def test_a_process_is_seen_to_sleep_to_stop_and_to_die():
    with child(WAIT) as waiting:
        assert becomes(waiting.pid, Life.SLEEPING)
        waiting.send_signal(signal.SIGSTOP)
        assert becomes(waiting.pid, Life.STOPPED)
        waiting.kill()
        assert becomes(waiting.pid, Life.DEAD)  # a zombie, until its parent asks
        waiting.wait()
        assert process.glance(waiting.pid).life is Life.DEAD


def test_one_that_works_uses_time():
    with child(TURN) as busy:
        before = process.glance(busy.pid)
        assert wait_until(lambda: process.glance(busy.pid).seconds > before.seconds + 0.05)
        assert becomes(busy.pid, Life.RUNNING)


def test_what_has_started_a_process_is_found():
    found = list(process.ancestors(os.getpid()))
    assert found[:2] == [os.getpid(), os.getppid()]
    assert found[-1] == 1
    assert list(process.ancestors(1 << 30)) == [1 << 30]


def test_the_command_line_is_read():
    with child(WAIT) as waiting:
        assert process.command(waiting.pid) == f"{sys.executable} -c {WAIT}"
    assert process.command(1 << 30) == ""


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="it needs py-spy")
def test_the_stacks_of_a_stopped_process_are_read_from_outside():
    with child(WAIT) as waiting:
        waiting.send_signal(signal.SIGSTOP)
        assert becomes(waiting.pid, Life.STOPPED)
        (main,) = process.stacks(waiting.pid)
        assert main.lines[0] == "<string>:1 in <module>"
        assert process.glance(waiting.pid).life is Life.STOPPED


def test_without_py_spy_or_the_right_to_look_there_are_none(monkeypatch, tmp_path):
    assert process.stacks(1 << 30) == ()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert process.stacks(os.getpid()) == ()
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\necho nonsense\n", "utf-8")
    spy.chmod(0o755)
    assert process.stacks(os.getpid()) == ()
