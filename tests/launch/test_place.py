from __future__ import annotations

import pytest

from coordd.launch.place import Place, place

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("style", "environment"),
    [
        ("open-mpi", OPEN_MPI),
        ("hydra", HYDRA),
        ("slurm", SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}),
        ("slurm", SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,4,1"}),
    ],
)
def test_each_launcher_tells_the_place_in_its_own_words(style, environment):
    assert place(style, environment) == Place(5, 8, 1, 4)


@pytest.mark.parametrize(("node", "local"), [(0, 2), (2, 2), (3, 1), (4, 7), (5, 7)])
def test_slurm_folds_equal_hosts(node, local):
    environment = SLURM | {"SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": "2(x3),1,7(x2)"}
    assert place("slurm", environment).local_size == local


def test_a_place_of_several_hosts_is_told_in_horovods_words_as_far_as_it_is_known():
    assert Place(5, 8, 1, 4).in_horovods_words("a") == {
        "HOROVOD_RANK": "5",
        "HOROVOD_SIZE": "8",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "4",
        "HOROVOD_HOSTNAME": "a",
    }


def test_a_batch_script_is_not_a_rank():
    assert place("alone", SLURM | OPEN_MPI) == Place(0, 1, 0, 1)


def test_a_missing_variable_is_named():
    with pytest.raises(KeyError, match="PMI_SIZE"):
        place("hydra", {"PMI_RANK": "0"})
