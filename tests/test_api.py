"""The default daemon of a process: its life, and what misuse of it is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

import coordd
import coordd.torch as cd
from coordd import api
from coordd.daemon.daemon import Daemon
from coordd.daemon.status_server import Desk
from tests.local_ranks import each_rank, local_ranks


@pytest.fixture(autouse=True)
def _left():
    yield
    coordd.shutdown()


USES = {
    "rank": coordd.rank,
    "size": coordd.size,
    "local_rank": coordd.local_rank,
    "local_size": coordd.local_size,
    "cross_rank": coordd.cross_rank,
    "cross_size": coordd.cross_size,
    "is_homogeneous": coordd.is_homogeneous,
    "allreduce": lambda: coordd.allreduce(np.ones(1)),
    "broadcast": lambda: coordd.broadcast(np.ones(1), 0),
    "allgather": lambda: coordd.allgather(np.ones(1)),
    "barrier": coordd.barrier,
    "leaving": coordd.leaving,
    "torch.allreduce_async": lambda: cd.allreduce_async(torch.ones(1)),
    "torch.barrier": cd.barrier,
    "torch.broadcast_parameters": lambda: cd.broadcast_parameters({"w": torch.ones(1)}),
    "torch.broadcast_object": lambda: cd.broadcast_object(1),
}


@pytest.mark.parametrize("use", USES)
def test_before_init_and_after_shutdown_everything_says_what_to_do(use):
    for _ in range(2):
        with pytest.raises(coordd.errors.NotInitializedError, match=r"has not been initialized; use hvd\.init\(\)"):
            USES[use]()
        assert not coordd.is_initialized()
        coordd.init()
        assert coordd.is_initialized()
        USES[use]()
        coordd.shutdown()


def test_a_script_alone_is_a_world_of_one():
    coordd.init()
    places = coordd.rank(), coordd.size(), coordd.local_rank(), coordd.local_size()
    assert places == (0, 1, 0, 1)
    assert (coordd.cross_rank(), coordd.cross_size(), coordd.is_homogeneous()) == (0, 1, True)
    assert coordd.allreduce([1, 2], op=coordd.ReduceOp.SUM).tolist() == [1, 2]
    assert coordd.broadcast([3.0], 0).tolist() == [3.0]
    assert coordd.allgather([[4]]).tolist() == [[4]]
    coordd.barrier()


def test_a_script_alone_needs_neither_mpi_nor_a_network():
    absent = "import sys; sys.modules.update(mpi4py=None, zmq=None)\n"
    done = run(absent + "import coordd; coordd.init(); print(coordd.size(), coordd.allreduce([2.0]).tolist())")
    assert done.stdout == "1 [2.0]\n", done.stderr


def test_init_twice_is_one_init_and_other_settings_are_refused():
    coordd.init(fusion_mb=1)
    daemon = api.operations().daemon
    coordd.init(fusion_mb=1)
    assert api.operations().daemon is daemon
    with pytest.raises(coordd.errors.ConfigError, match=r"with other settings: call shutdown\(\) first"):
        coordd.init(fusion_mb=2)
    assert coordd.allreduce([1.0]).tolist() == [1.0]
    coordd.shutdown()
    coordd.shutdown()
    coordd.init(fusion_mb=2)
    assert api.operations().daemon.config.fusion_mb == 2


def test_settings_come_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("COORDD_CYCLE_MS", "3.5")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", str(4 << 20))
    coordd.init()
    config = api.operations().daemon.config
    assert (config.cycle_ms, config.fusion_mb) == (3.5, 4.0)


def test_ranks_that_ask_whether_to_leave_get_the_same_answer(monkeypatch):
    answers = iter([False, False, True, False])
    monkeypatch.setattr(type(api._exits), "asked", property(lambda _: next(answers)))
    for expected in (False, True):
        assert each_rank(2, lambda _: coordd.leaving()) == [expected] * 2


def test_leaving_needs_sigterm_for_itself():
    coordd.init()
    assert not coordd.leaving()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(coordd.errors.ConfigError, match="leaving\\(\\) cannot hear SIGTERM"):
            coordd.leaving()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("settings", [{"fusion_mb": -1}, {"cycles": 1}, {"stall_check": "maybe"}])
def test_bad_settings_are_refused_and_leave_nothing_behind(settings):
    with pytest.raises(coordd.errors.ConfigError):
        coordd.init(**settings)
    assert not coordd.is_initialized()


def test_inputs_stay_as_they_are_and_results_are_new():
    def body(rank):
        given = np.full((2, 3), float(rank))
        given.flags.writeable = False
        found = coordd.allreduce(given), coordd.broadcast(given, 1), coordd.allgather(given.T)
        assert (given == rank).all()
        return [array.mean().item() for array in found], found[2].shape

    assert each_rank(2, body) == [([0.5, 1.0, 0.5], (6, 2))] * 2


def test_each_thread_may_have_a_daemon_of_its_own():
    coordd.init()
    with local_ranks(2) as ranks:
        assert ranks.each(lambda rank: (coordd.rank(), coordd.size())) == [(0, 2), (1, 2)]
        assert (coordd.rank(), coordd.size()) == (0, 1)


@pytest.mark.parametrize("handle", [None, 7, "allreduce.noname.0", object()])
def test_what_is_no_handle_is_refused(handle):
    coordd.init()
    for use in (cd.synchronize, cd.poll):
        with pytest.raises(cd.HandleError, match=r"unknown handle .*pass what an asynchronous operation"):
            use(handle)


FORKED = """
import os, sys
import numpy as np
import coordd
from coordd.api import operations
from coordd.errors import ForkedProcessError

def child(leave):
    told = []
    for use in (lambda: coordd.allreduce(np.ones(2)), coordd.rank, coordd.init, lambda: pending.result(5.0)):
        try:
            use()
        except ForkedProcessError as error:
            told.append("before this process was forked" in str(error))
    assert told == [True] * 4, told
    assert not coordd.is_initialized()
    leave()

def fail():
    raise ValueError("child")

def shut_down_and_leave():
    coordd.shutdown()
    sys.exit(6)

coordd.init()
pending = operations().recv(None, 0, name="later")
for leave in (sys.exit, lambda: sys.exit(7), lambda: os._exit(5), fail, shut_down_and_leave):
    number = os.fork()
    if number == 0:
        child(leave)
    print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), coordd.allreduce(np.ones(2)).tolist(), flush=True)
operations().send(np.ones(1), 0, name="later")
print(pending.result(5.0).tolist())
"""


def test_forked_children_are_told_end_cleanly_and_harm_nobody():
    done = run(FORKED)
    lines = [f"{status} [1.0, 1.0]" for status in (0, 7, 5, 1, 6)]
    assert done.stdout.splitlines() == [*lines, "[1.0]"], done.stderr
    assert done.stderr.count("ValueError: child") == 1


MIDWAY = """
import os, select, threading
import coordd
from coordd.daemon.daemon import Daemon
from coordd.errors import ForkedProcessError

def wait(daemon):
    entered.set()
    released.wait()
    return known(daemon)

entered, released = threading.Event(), threading.Event()
known, Daemon.{method} = Daemon.{method}, wait
threading.Thread(target=lambda: [coordd.init(), coordd.shutdown()]).start()
entered.wait()
if (number := os.fork()) == 0:
    try:
        coordd.init()
    except ForkedProcessError:
        coordd.shutdown()
        os._exit(3)
end = select.poll()
end.register(os.pidfd_open(number), select.POLLIN)
ended = [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])] if end.poll(20_000) else []
released.set()
print(ended, flush=True)
"""


@pytest.mark.parametrize("method", ["start", "stop"])
def test_a_forked_child_is_told_though_another_thread_was_in_init_or_shutdown(method):
    """That thread does not exist in the child, and never ends the call there."""
    done = run(MIDWAY.format(method=method))
    assert done.stdout.splitlines() == ["[3]"], done.stderr


LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import coordd.torch as cd

cd.init()
data = TensorDataset(torch.arange(12.0).reshape(12, 1))
net = torch.nn.Linear(1, 1)
optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
for _ in range(2):
    for (rows,) in DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork"):
        optimizer.zero_grad()
        net(rows).sum().backward()
        optimizer.step()
print(len(rows), cd.allreduce(torch.ones(1)).item())
"""


def test_data_loaders_may_start_workers():
    done = run(LOADER)
    assert done.stdout == "4 1.0\n", done.stderr


ENDS = {
    "no shutdown": ("", 0),
    "an operation in flight": ("operations().allreduce(np.ones(1))", 0),
    "a receive in flight": ("operations().recv(None, 0, name='never')", 0),
    "sys.exit(3)": ("sys.exit(3)", 3),
    "raise SystemExit(3)": ("raise SystemExit(3)", 3),
    "an error": ("1 / 0", 1),
    "an error in a callback": ("operations().allreduce(np.ones(1)).add_done_callback(lambda _: 1 / 0)", 0),
    "twice": ("coordd.shutdown(); coordd.init(); coordd.shutdown(); coordd.init(cycle_ms=7)", 0),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_by_itself_with_its_own_exit_code(end):
    script, status = ENDS[end]
    done = run(f"import sys, coordd, numpy as np\nfrom coordd.api import operations\ncoordd.init()\n{script}")
    assert done.returncode == status, done.stderr


SWALLOWED = """
import sys, traceback, coordd
from coordd.api import operations

coordd.init()
try:
    raise ValueError("deep inside")
except ValueError as error:
    operations().daemon.fail("failed in a pass: ValueError: deep inside", traceback.format_exc())
    LEAVE
"""
LEAVES = {"sys.exit(3)": 3, "sys.exit()": 1, "raise": 1, "raise KeyError": 1, "raise KeyError from None": 1}


@pytest.mark.parametrize("leave", LEAVES)
def test_the_traceback_of_what_the_others_have_heard_is_shown_once(leave):
    done = run(SWALLOWED.replace("LEAVE", leave))
    assert done.returncode == LEAVES[leave]
    assert done.stderr.count("\nValueError: deep inside\n") == 1, done.stderr
    assert ("this rank failed in a pass" in done.stderr) == (leave not in {"raise", "raise KeyError"}), done.stderr


def run(script):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", script]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_horovods_variables_that_are_read_are_told_once_the_log_is_there(caplog, monkeypatch):
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "info")
    coordd.init()
    coordd.shutdown()
    told = [message for message in caplog.messages if message.startswith("read: ")]
    assert told == ["read: HOROVOD_CYCLE_TIME as COORDD_CYCLE_MS, HOROVOD_LOG_LEVEL as COORDD_LOG_LEVEL"]


def test_a_start_that_fails_before_the_ranks_have_met_is_no_session(monkeypatch):
    coordd.init()
    before = api.operations().session
    coordd.shutdown()
    for part, name in ((Daemon, "start"), (Desk, "settle")):  # before and after the ranks have met
        with monkeypatch.context() as patch:
            patch.setattr(part, name, lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                coordd.init()
    coordd.init()
    assert api.operations().session == before + 2
