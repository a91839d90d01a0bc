"""Ties to a parent, each tried by killing it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.launch.started import PATIENCE, ROOT, alive, wait_until

GUARDED = """
import os, signal, subprocess, sys
from coordd.launch.process_guard import Guard
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
guard = Guard(child.pid, lambda: os.write(2, b"farewell"))
print(child.pid, guard._pid, flush=True)
{then}
"""
TIED = """
import os, signal, subprocess, sys
from coordd.launch.process_guard import die_with_parent
if os.fork() == 0:
    die_with_parent(signal.SIGTERM, os.getppid())
    print(os.getpid(), flush=True)
signal.pause()
"""


def start(source):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", source], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_guard_ends_the_group_when_its_maker_is_killed():
    with start(GUARDED.format(then="signal.pause()")) as maker:
        below = [psutil.Process(int(number)) for number in maker.stdout.readline().split()]
        maker.kill()
        assert wait_until(lambda: not any(map(alive, below)))
        assert maker.stderr.read() == "farewell"


def test_a_guard_that_is_dismissed_leaves_the_group_alone():
    with start(GUARDED.format(then="guard.dismiss(); child.kill(); print(child.wait(), flush=True)")) as maker:
        _, guard = map(int, maker.stdout.readline().split())
        assert int(maker.stdout.readline()) == -signal.SIGKILL
        assert maker.wait(PATIENCE) == 0
        assert maker.stderr.read() == ""
    assert not psutil.pid_exists(guard)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's own")
def test_the_kernel_tells_of_a_parents_death():
    with start(TIED) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        assert wait_until(lambda: not alive(child))
