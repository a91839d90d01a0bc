"""SIGTERM, as batch systems send it: to `coordd run`, to one rank, or to all ranks at once."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.launch.started import Started, wait_until
from tests.launch.test_run import mpi

pytestmark = mpi

TRAIN = """
import os, signal, sys, threading
import numpy as np
from coordd import api

def save(*_):
    print("saved", flush=True)
    sys.exit(0)

if "save" in sys.argv:
    signal.signal(signal.SIGTERM, save)
api.init()
api.allreduce(np.ones(9, np.float32), name="first")
if "leave" in sys.argv:
    api.leaving()  # from now on SIGTERM ends no rank
print("ready", os.getpid(), flush=True)
step = 0
while "leave" not in sys.argv or not api.leaving():
    api.allreduce(np.ones(9, np.float32), name="weight")
    threading.Event().wait(0.005)
    step += 1
print("left after step", step, flush=True)
"""
GRACE = 30  # the default, 5, is too short for ranks on a busy machine
FINISHED = [
    f"coordd: SIGTERM: ranks have {GRACE} s (--grace-seconds) to end",
    "coordd: all ranks have ended in time, with exit code 0",
]
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); signal.pause()"


@pytest.fixture
def train(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)

    def start(*arguments):
        job = Started("-n", 2, "--grace-seconds", GRACE, sys.executable, script, *arguments, PYTHONFAULTHANDLER="1")
        return job.wait_for_ranks(2)

    return start


def pids(job):
    """The ranks' processes, by rank."""
    return [int(line.split()[-1]) for line in sorted(job.out.splitlines()) if "ready" in line]


def steps(job):
    """After which steps the ranks have left."""
    told = [line.split()[-1] for line in job.out.splitlines() if "left after step" in line]
    assert len(told) == 2
    return set(told)


def test_sent_to_coordd_run_gives_ranks_the_time_to_save(train):
    with train("save") as job:
        job.send(signal.SIGTERM)
        assert job.wait() == 0
        assert job.out.count("saved") == 2
        assert job.err.splitlines()[1:] == FINISHED
        assert wait_until(lambda: not job.left)


def test_sent_to_coordd_run_lets_ranks_finish_the_same_step(train):
    with train("leave") as job:
        job.send(signal.SIGTERM)
        assert job.wait() == 0
        assert len(steps(job)) == 1
        assert job.err.splitlines()[1:] == FINISHED


@pytest.mark.parametrize("victim", [0, 1])
def test_sent_to_one_rank_has_all_leave_after_the_same_step(train, victim):
    with train("leave") as job:
        os.kill(pids(job)[victim], signal.SIGTERM)
        assert job.wait() == 0
        assert len(steps(job)) == 1
        assert not job.err.splitlines()[1:]


def test_sent_to_coordd_run_ends_ranks_that_do_not_handle_it_without_a_word_of_theirs(train):
    with train() as job:
        job.send(signal.SIGTERM)
        assert job.wait() == 143
        assert not [line for line in job.err.splitlines() if line.startswith("[")]
        assert wait_until(lambda: not job.left)


def test_that_ranks_ignore_becomes_sigkill_when_the_grace_is_over():
    with Started("-n", 2, "--grace-seconds", 0.1, sys.executable, "-c", STUBBORN) as job:
        job.wait_for_ranks(2).send(signal.SIGTERM)
        assert job.wait() == 143
        assert job.err.splitlines()[1:] == [
            "coordd: SIGTERM: ranks have 0.1 s (--grace-seconds) to end",
            "coordd: ranks 0-1 did not end in time: killed",
            "coordd: ended by SIGTERM",
        ]
        assert wait_until(lambda: not job.left)


@pytest.mark.parametrize("victim", [0, 1])
def test_sent_to_one_rank_is_what_the_others_fail_with(train, victim):
    with train() as job:
        os.kill(pids(job)[victim], signal.SIGTERM)
        assert job.wait() == 143
        assert f"[{1 - victim}] coordd.errors.PeerError: rank {victim} was ended by SIGTERM" in job.err.splitlines()
        assert f"[{victim}]" not in job.err
        assert job.last == f"coordd: rank {victim} ended by SIGTERM"


def test_sent_to_all_ranks_at_once_ends_the_job_with_one_line(train):
    with train() as job:
        for pid in pids(job):
            os.kill(pid, signal.SIGTERM)
        assert job.wait() == 143
        (told,) = job.err.splitlines()[1:]
        assert told in {f"coordd: rank {rank} ended by SIGTERM (rank {1 - rank} too)" for rank in range(2)}


def test_a_rank_whose_leaving_is_refused_tells_the_others(tmp_path):
    script = tmp_path / "refused.py"
    script.write_text(
        """
import signal, sys, time
import coordd
from coordd.errors import ConfigError, RefusedError
coordd.init()
if coordd.rank() == 0:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
begun = time.monotonic()
try:
    coordd.leaving()
except (ConfigError, RefusedError) as error:
    print(type(error).__name__, time.monotonic() - begun < 2, flush=True)
time.sleep(3)
coordd.barrier()
"""
    )
    with Started("-n", 2, sys.executable, script, PYTHONFAULTHANDLER="1") as job:
        assert job.wait() == 0
        found = sorted(line.split()[-2:] for line in job.out.splitlines())
    assert found == [["ConfigError", "True"], ["RefusedError", "True"]]
