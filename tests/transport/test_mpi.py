"""What of the MPI data plane can be shown without ranks; the rest is in ``tests/mpi``."""

from __future__ import annotations

import queue
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from coordd.errors import StartError
from coordd.transport import mpi
from coordd.transport.mpi import MpiTransport, launched_ranks


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 0),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, 2),
        ({"MPI_LOCALNRANKS": "3"}, 3),
        ({"MV2_COMM_WORLD_SIZE": "8"}, 8),
        ({"SLURM_STEP_NUM_TASKS": "4", "PMIX_RANK": "1"}, 4),
        ({"SLURM_STEP_NUM_TASKS": "4"}, 0),  # srun without MPI, or a batch script: nobody connects these processes
        ({"OMPI_COMM_WORLD_SIZE": "many"}, 0),
        ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-a-7@1"}, 1),  # of any number, which MPI knows
    ],
)
def test_ranks_are_recognised_by_what_their_launcher_sets(environment, count):
    assert launched_ranks(environment) == count


def test_without_mpi4py_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(StartError, match=r"mpi4py is missing: pip install 'coordd\[mpi\]'"):
        MpiTransport()


class Wires:
    """What ranks as threads send each other, in place of a communicator."""

    def __init__(self, rank, queues):
        self.rank, self.queues = rank, queues

    def send(self, value, destination, tag):
        self.queues[self.rank, destination, tag].put(value)

    def recv(self, source, tag):
        return self.queues[source, self.rank, tag].get(timeout=30)


@pytest.mark.parametrize("size", [*range(1, 10), 16, 17])
def test_values_are_gathered_by_messages_alone(size):
    """Open MPI's collectives hang where two hosts have one name."""
    queues = {(one, other, 7): queue.Queue() for one in range(size) for other in range(size)}
    found = {}

    def body(rank):
        transport = MpiTransport.__new__(MpiTransport)
        transport.rank, transport.size = rank, size
        transport._communicator = Wires(rank, queues)
        transport.collective = SimpleNamespace(tags=8)
        found[rank] = [transport.gather(f"{rank} {turn}") for turn in range(3)]

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(body, range(size)))
    expected = [[f"{rank} {turn}" for rank in range(size)] for turn in range(3)]
    assert [found[rank] for rank in range(size)] == [expected] * size
    assert all(wire.empty() for wire in queues.values())


@pytest.mark.parametrize(
    ("first", "own", "contained"),
    [
        ("A=1\0PMIX_RANK=3\0B=2\0", {"PMIX_RANK": "3"}, True),
        ("A=1\0PMIX_RANK=2\0", {"PMIX_RANK": "3"}, False),  # a rank of another MPI has started this container
        ("A=1\0", {"PMIX_RANK": "3"}, False),  # mpirun runs in the container
        ("PMIX_RANK=3\0", {}, False),
        (None, {"PMIX_RANK": "3"}, False),
    ],
)
def test_a_container_of_a_rank_is_known_by_its_first_process(tmp_path, first, own, contained):
    file = tmp_path / "environ"
    if first is not None:
        file.write_text(first)
    assert mpi._contained(file, own) == contained


@pytest.mark.parametrize("status", [0, 7])
def test_exit_handlers_of_libraries_can_be_left_out_without_changing_the_exit_status(status):
    """A thread inside MPI would crash on what they free."""
    script = (
        "import ctypes, sys; from coordd.transport import mpi; libc = ctypes.CDLL(None);"
        "libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None);"
        f"mpi._users.add(None); import os; mpi._finalize(os.getpid()); print('said'); sys.exit({status})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (status, "said\n"), done.stderr
