"""What of the MPI data plane can be shown without ranks; the rest is in ``tests/mpi``."""

from __future__ import annotations

import sys

import pytest

from coordd.errors import StartError
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
    ],
)
def test_ranks_are_recognised_by_what_their_launcher_sets(environment, count):
    assert launched_ranks(environment) == count


def test_without_mpi4py_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(StartError, match=r"mpi4py is missing: pip install 'coordd\[mpi\]'"):
        MpiTransport()
