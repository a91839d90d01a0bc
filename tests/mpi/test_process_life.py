"""How ranks begin, fork and end: at different times, with children of their own, with settings that make no sense."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.mpi.job import Outcome
from tests.mpi.launch import launch

pytestmark = pytest.mark.mpi

# What is the daemon's is shown with NumPy's arrays where PyTorch, which takes seconds to load, has no part in it.
_ARRAYS = {
    "tensors": "from torch import ones; import coordd.torch as cd; start = cd.allreduce_async",
    "arrays": "from numpy import ones; import coordd as cd; start = lambda x: cd.api.operations().allreduce(x)",
}
_FORKS = """
import os, sys
import torch
import coordd.torch as cd
from coordd import api
from coordd.errors import ForkedProcessError

cd.init()
daemon = api.operations().daemon
for leave in (sys.exit, lambda: sys.exit(7), lambda: os._exit(5)):
    size, number = daemon._commons.heap.size, os.fork()
    if number == 0:
        for allocate in (daemon.allocate, daemon.blank):  # a block of its own would replace one of its parent's
            allocate(4096)[:] = 1
        if daemon._commons.heap.size != size:
            os._exit(98)
        try:
            cd.allreduce(torch.ones(1))
        except ForkedProcessError:
            leave()
        os._exit(99)
    status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    print("child", status, "sum", cd.allreduce(torch.ones(1), op=cd.Sum).item(), flush=True)
"""
_LOADER = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import coordd.torch as cd

if __name__ == "__main__":
    cd.init()
    data = TensorDataset(torch.arange(8.0).reshape(8, 1))
    for method in sys.argv[1:]:
        for (rows,) in DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=method):
            print(method, "sum", cd.allreduce(rows.sum(), op=cd.Sum).item(), flush=True)
"""
_ORPHANS = """
import ctypes, os, signal, sys, threading
import numpy as np
import coordd as cd
from coordd.errors import PeerError

cd.init()
cd.allreduce(np.ones(3), name="first")
if cd.rank() == 1:
    if (os if sys.argv[1] == "os" else ctypes.PyDLL(None)).fork() == 0:  # C libraries fork without Python's knowledge
        threading.Event().wait(25)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    cd.allreduce(np.ones(3), name="second")
except PeerError as error:
    print("heard that", error, flush=True)
    raise
"""
_SESSIONS = """
import torch
import coordd.torch as cd

for session in range(8):
    cd.init()
    for step in range(session % 3):
        if cd.rank() == 0:
            cd.send(torch.full((2,), 1000.0 + session), 1, "x")  # no rank receives it
    cd.shutdown()
    cd.init()
    if cd.rank() == 0:
        cd.send(torch.full((2,), float(session)), 1, "x")
    else:
        print("got", cd.recv(torch.zeros(2), 0, "x")[0].item(), flush=True)
    cd.shutdown()
for session in range(3):
    cd.init()
    for _ in range(300 if cd.rank() == 0 else 0):  # more than are on their way at once
        cd.send_async(torch.ones(5), 1, "left")
    cd.shutdown()
"""
_LEAVING = """
import sys, threading
ARRAYS

cd.init()
start(ones(1000))
start(ones(1_000_000))
if cd.rank() == int(sys.argv[1]):
    threading.Event().wait(0.7)
"""
_MISSING = """
import sys, threading
ARRAYS


cd.init()
cd.allreduce(ones(1), name="first")
for step in range(int(sys.argv[2])):
    if cd.rank() == int(sys.argv[1]) and step == int(sys.argv[2]) - 1:
        threading.Event().wait(30)
    cd.allreduce(ones(1), name="late")
"""
_NEVER = """
import os, threading
import coordd

if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    threading.Event().wait(60)
coordd.init()
"""
_INCOMPLETE = {"rank 0": (0, 1, "arrays"), "rank 1": (1, 1, "arrays"), "locked plan": (1, 20, "tensors")}
"""Which rank is missing, in which step, and with what they train."""
_SETTING = """
import os
if "CULPRIT" in os.environ and os.environ["OMPI_COMM_WORLD_RANK"] == os.environ["CULPRIT"]:
    os.environ.update([os.environ["SETTING"].split("=")])
import coordd
coordd.init()
"""
_VERSION = """
import os
import coordd
from coordd.daemon import event_loop
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    event_loop.VERSION = "0.0.1"
coordd.init()
"""
_NEIGHBOUR = """
import sys
import numpy as np
import coordd as cd

cd.init()
for _ in range(60):
    for count in (3, 50_000):
        found = cd.allreduce(np.full(count, float(sys.argv[1])), name=f"{count}", op=cd.ReduceOp.SUM)
        assert found.min() == found.max() == 2 * float(sys.argv[1]), found
print("size", cd.size(), flush=True)
"""
_PORTS = """
import numpy as np
import psutil
import coordd as cd

cd.init()
cd.allreduce(np.ones(3), name="first")
print("listens on", [each.laddr for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"])
cd.barrier()
"""


def test_a_rank_that_never_begins_is_not_waited_for_for_ever() -> None:
    outcome = launch(2, _NEVER, launcher="coordd", timeout=25, variables={"COORDD_START_SECONDS": "2"})
    assert outcome.returncode == 1, str(outcome)
    told = "the ranks did not find each other within 2 s (start_seconds): on this host nothing is seen of rank 1"
    assert told in outcome.of_rank(0), str(outcome)


def test_forked_children_cannot_use_coordd_and_leave_mpi_to_their_parents() -> None:
    outcome = launch(2, _FORKS, launcher="coordd")
    assert outcome.returncode == 0, str(outcome)
    for status in (0, 7, 5):
        assert outcome.stdout.count(f"child {status} sum 2.0") == 2, str(outcome)


@pytest.mark.parametrize("fork", ["os", "native"])
def test_a_killed_rank_is_missed_at_once_although_its_forked_worker_lives_on(fork: str) -> None:
    """The worker has inherited its sockets, and keeps them open; rank 0 hears before the launcher ends it."""
    outcome = launch(2, _ORPHANS, fork, launcher="coordd", timeout=25)
    assert "heard that rank 1" in outcome.stdout, str(outcome)
    assert outcome.returncode != 0, str(outcome)


def test_a_message_that_no_rank_has_received_is_not_received_in_a_later_session() -> None:
    outcome = launch(2, _SESSIONS, launcher="coordd")
    assert outcome.returncode == 0, str(outcome)
    assert "left with operations" not in outcome.stderr, str(outcome)
    got = [line.text for line in outcome.lines if line.text.startswith("got")]
    assert got == [f"got {session}.0" for session in range(8)], str(outcome)


def test_data_loaders_may_start_workers_in_any_way() -> None:
    methods = ("spawn", "forkserver", "fork")
    outcome = launch(2, _LOADER, *methods, launcher="coordd")
    assert outcome.returncode == 0, str(outcome)
    told = [f"{method} sum {total}" for method in methods for total in (12.0, 44.0)]
    assert [outcome.stdout.count(line) for line in told] == [2] * 6, str(outcome)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_worker_that_runs_the_whole_script_again_is_told_that_it_is_no_rank(method: str) -> None:
    everywhere = _LOADER.replace('if __name__ == "__main__":\n    cd.init()', 'cd.init()\nif __name__ == "__main__":')
    outcome = launch(2, everywhere, method, launcher="coordd")
    assert outcome.returncode != 0, str(outcome)
    assert "under `if __name__ == '__main__':`" in outcome.stderr, str(outcome)


@pytest.mark.parametrize(("launcher", "kind"), [("mpirun", "arrays"), ("coordd", "tensors")])
@pytest.mark.parametrize("late", [0, 1])
def test_ranks_may_end_at_different_times_without_waiting_for_what_is_in_flight(
    launcher: str, kind: str, late: int
) -> None:
    outcome = launch(2, _LEAVING.replace("ARRAYS", _ARRAYS[kind]), str(late), launcher=launcher)
    assert outcome.returncode == 0, str(outcome)
    assert "Fatal" not in outcome.stderr, str(outcome)
    assert "improperly" not in outcome.stderr, str(outcome)


@pytest.fixture(scope="module")
def incomplete() -> Iterator[Mapping[str, Future[Outcome]]]:
    """Jobs in which a rank does not come, side by side: all that they do is to wait."""
    limits = {"COORDD_STALL_SECONDS": "0.3", "COORDD_STALL_ABORT_SECONDS": "2"}

    def run(missing: int, steps: int, kind: str) -> Outcome:
        program = _MISSING.replace("ARRAYS", _ARRAYS[kind])
        return launch(2, program, str(missing), str(steps), launcher="coordd", timeout=25, variables=limits)

    with ThreadPoolExecutor(len(_INCOMPLETE)) as pool:
        yield {name: pool.submit(run, *each) for name, each in _INCOMPLETE.items()}


@pytest.mark.parametrize("name", _INCOMPLETE)
def test_a_rank_that_does_not_come_is_named_with_its_line_and_ends_the_job_in_time(
    incomplete: Mapping[str, Future[Outcome]], name: str
) -> None:
    missing, outcome = _INCOMPLETE[name][0], incomplete[name].result()
    assert outcome.returncode != 0, str(outcome)
    waits = rf"'late' \(allreduce\) waiting for rank {missing}; submitted here at \S*script.py:11\n"
    assert re.search(waits, outcome.stderr), str(outcome)
    assert "script.py:10 in <module>: threading.Event().wait(30)" in outcome.stderr, str(outcome)
    kept = rf"rank {missing} kept 'late' waiting for \d+ s \(stall_abort_seconds\)"
    assert re.search(kept, outcome.stderr), str(outcome)


@pytest.mark.parametrize(
    ("setting", "legal"),
    [
        ("COORDD_FUSION_MB=abc", "a number from"),
        ("COORDD_FUSION_MB=-1", "a number from"),
        ("COORDD_CYCLE_MS=1e99", "a number from"),
        ("COORDD_LOCK_STEPS=2.5", "a whole number"),
        ("HOROVOD_FUSION_THRESHOLD=much", "what COORDD_FUSION_MB can hold, a number from 0 to 65536"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_its_name(setting: str, legal: str) -> None:
    name, _, value = setting.partition("=")
    outcome = launch(1, _SETTING, launcher="python", variables={name: value})
    assert outcome.returncode == 1, str(outcome)
    assert f"ConfigError: {name}=" in outcome.stderr, str(outcome)
    assert f"is not usable: give {legal}" in outcome.stderr, str(outcome)


def test_ranks_with_different_settings_do_not_start() -> None:
    variables = {"CULPRIT": "1", "SETTING": "COORDD_FUSION_MB=3"}
    outcome = launch(2, _SETTING, launcher="coordd", variables=variables)
    assert outcome.returncode == 1, str(outcome)
    _assert_both_said(r"different settings \(ranks 0: the defaults; ranks 1: fusion_mb=3\.0\)", outcome)
    assert "MPI_FINALIZE" not in outcome.stderr, str(outcome)


def test_ranks_with_different_versions_do_not_start() -> None:
    outcome = launch(2, _VERSION, launcher="coordd")
    assert outcome.returncode == 1, str(outcome)
    told = r"the ranks have different versions of coordd \(ranks 0: \S+; ranks 1: 0\.0\.1\): make them equal"
    _assert_both_said(told, outcome)


def _assert_both_said(told: str, outcome: Outcome) -> None:
    """Each shown by itself, or once for both."""
    assert re.search(told, outcome.of_rank(0)), str(outcome)
    same = re.search(rf"{told}.*\ncoordd: the same on rank 1\n", outcome.stderr)
    assert same or re.search(told, outcome.of_rank(1)), str(outcome)


@pytest.mark.parametrize("way", [{}, {"COORDD_SHARED_MEMORY": "0"}], ids=["memory", "network"])
def test_jobs_side_by_side_know_nothing_of_each_other(way: dict[str, str]) -> None:
    """Their tensors have the same names, and their ranks the same numbers."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(launch, 2, _NEIGHBOUR, str(own), launcher="coordd", variables=way) for own in (1, 100)]
        for outcome in (job.result() for job in jobs):
            assert outcome.returncode == 0, str(outcome)
            assert outcome.stdout.count("size 2") == 2, str(outcome)


@pytest.mark.parametrize("way", [{}, {"COORDD_SHARED_MEMORY": "0"}], ids=["memory", "network"])
def test_ranks_of_one_host_listen_on_no_port(way: dict[str, str]) -> None:
    outcome = launch(2, _PORTS, launcher="coordd", variables=way)
    assert outcome.returncode == 0, str(outcome)
    assert outcome.stdout.count("listens on []") == 2, str(outcome)


def test_a_rank_alone_with_a_setting_that_makes_no_sense_ends_the_job() -> None:
    variables = {"CULPRIT": "1", "SETTING": "COORDD_FUSION_MB=abc"}
    outcome = launch(2, _SETTING, launcher="coordd", variables=variables)
    assert outcome.returncode != 0, str(outcome)
    assert "COORDD_FUSION_MB='abc' is not usable" in outcome.of_rank(1), str(outcome)


def test_more_ranks_than_cores_still_train() -> None:
    outcome = launch(8, _LEAVING.replace("ARRAYS", _ARRAYS["arrays"]), "0", launcher="coordd")
    assert outcome.returncode == 0, str(outcome)


def test_more_threads_than_cores_are_told_once() -> None:
    outcome = launch(2, "import coordd\ncoordd.init()", variables={"OMP_NUM_THREADS": "4096"})
    assert outcome.returncode == 0, str(outcome)
    assert outcome.stderr.count("2 ranks of 4096 threads take turns on ") == 1, str(outcome)
    assert "set OMP_NUM_THREADS=" in outcome.stderr, str(outcome)
