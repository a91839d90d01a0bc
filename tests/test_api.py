"""The default daemon of a process: its life, and what misuse of it is told."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

import coordd
import coordd.torch as cd
from coordd import api
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
    "torch.allreduce_async": lambda: cd.allreduce_async(torch.ones(1)),
    "torch.send_async": lambda: cd.send_async(torch.ones(1), 0, "x"),
    "torch.broadcast_parameters": lambda: cd.broadcast_parameters({"w": torch.ones(1)}),
    "torch.broadcast_object": lambda: cd.broadcast_object(1),
}


@pytest.mark.parametrize("use", USES)
def test_before_init_and_after_shutdown_everything_says_what_to_do(use):
    for _ in range(2):
        with pytest.raises(coordd.errors.NotInitializedError, match=r"has not been initialized; use init\(\) first"):
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
        with pytest.raises(cd.HandleError, match="unknown handle .*pass what an asynchronous operation"):
            use(handle)


FORKED = """
import os, sys, time
import torch
import coordd.torch as cd
cd.init()
pending = cd.allreduce_async(torch.ones(2), name="before")
cd.synchronize(pending)
child = os.fork()
if child == 0:
    told = []
    for use in (lambda: cd.allreduce(torch.ones(2)), cd.rank, cd.init, cd.barrier, lambda: cd.DistributedOptimizer(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))):
        try:
            use()
        except cd.ForkedProcessError as error:
            told.append("before this process was forked" in str(error))
    assert told == [True] * 5, told
    assert not cd.is_initialized()
    {leave}
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == {status}, status
print(cd.allreduce(torch.ones(2), op=cd.Sum).tolist(), cd.rank())
"""


@pytest.mark.parametrize(
    ("leave", "status"),
    [("sys.exit(0)", 0), ("sys.exit(7)", 7), ("os._exit(5)", 5), ("raise ValueError('child')", 1), ("cd.shutdown(); sys.exit(0)", 0)],
)
def test_a_forked_child_is_told_ends_cleanly_and_harms_nobody(leave, status):
    done = run(FORKED.format(leave=leave, status=status))
    assert done.stdout == "[1.0, 1.0] 0\n", done.stderr
    assert ("ValueError: child" in done.stderr) == ("ValueError" in leave)


LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import coordd.torch as cd

def main():
    cd.init()
    data = TensorDataset(torch.arange(12.0).reshape(12, 1))
    net = torch.nn.Linear(1, 1)
    optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
    for _ in range(2):
        seen = 0
        for (rows,) in DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context={context!r}):
            optimizer.zero_grad()
            net(rows).sum().backward()
            optimizer.step()
            seen += len(rows)
    print(seen, cd.allreduce(torch.ones(1)).item())

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_data_loaders_may_start_workers(context, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LOADER.format(context=context))
    done = run(script)
    assert done.stdout == "12 1.0\n", done.stderr


ENDS = {
    "no shutdown": ("", 0),
    "an operation in flight": ("cd.allreduce_async(torch.ones(1))", 0),
    "a receive in flight": ("cd.recv_async(torch.ones(1), 0, 'never')", 0),
    "sys.exit(3)": ("sys.exit(3)", 3),
    "raise SystemExit(3)": ("raise SystemExit(3)", 3),
    "an error": ("1 / 0", 1),
    "an error in a callback": ("cd.allreduce_async(torch.ones(1)).add_done_callback(lambda _: 1 / 0)", 0),
    "twice": ("cd.shutdown(); cd.init(); cd.shutdown(); cd.init(cycle_ms=7)", 0),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_by_itself_with_its_own_exit_code(end):
    script, status = ENDS[end]
    done = run(f"import sys, torch\nimport coordd.torch as cd\ncd.init()\n{script}")
    assert done.returncode == status, done.stderr


def run(script):
    """Runs a program, given as text or as a file."""
    arguments = ["-c", textwrap.dedent(script)] if isinstance(script, str) else [str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
