from __future__ import annotations

import os
import socket

from hypothesis import given
from hypothesis import strategies as st

from coordd.monitoring.status.address import Address, identity, listed, parse_listing, peer

LINE = "00000000fe5ee008: 00000002 00000000 00010000 0001 01 1516466 {}\n"
HEADER = "Num       RefCount Protocol Flags    Type St Inode Path\n"

numbers = st.integers(0, 2**22)
jobs = st.text("abcXYZ019.@:-_", min_size=1, max_size=56)
addresses = st.builds(Address, numbers, numbers, numbers, st.integers(0, 1), numbers, numbers, jobs)


def listing(*names):
    return HEADER + "".join(LINE.format(name.replace("\0", "@")) for name in names)


@given(st.lists(addresses, unique=True))
def test_what_is_listed_is_read_back_whatever_else_there_is(found):
    names = ["/run/dbus", *(address.name for address in found), "@coordd/what", "@coordd/1/2/3/4/5/6/x"]
    assert parse_listing(listing(*names)) == found


@given(addresses)
def test_a_name_fits_into_the_kernels_limit(address):
    assert len(address.name) <= 107


def test_each_rank_of_a_job_has_an_address_of_its_own_before_it_has_met_any_other():
    ranks = [
        identity({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank), "PMIX_NAMESPACE": "prterun-a-7@1"})
        for rank in range(2)
    ]
    assert [(found.rank, found.size, found.job, found.met) for found in ranks] == [
        (0, 2, "prterun-a-7@1", 0),
        (1, 2, "prterun-a-7@1", 0),
    ]


def test_a_step_of_slurm_is_a_job():
    found = identity(
        {
            "SLURM_STEP_NUM_TASKS": "8",
            "PMI_RANK": "3",
            "SLURM_PROCID": "3",
            "SLURM_JOB_ID": "123",
            "SLURM_STEP_ID": "0",
        }
    )
    assert (found.rank, found.size, found.job) == (3, 8, "123.0")


def test_what_no_launcher_has_named_is_called_by_what_has_started_it():
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    assert identity(hydra).job == f"below-{os.getppid()}"
    assert identity({**hydra, "COORDD_LAUNCHED": "1"}).job not in {f"below-{os.getppid()}", identity(hydra).job}


def test_a_process_alone_is_a_job_whatever_its_batch_script_has_left_in_the_environment():
    found = identity({"SLURM_JOB_ID": "123", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5"})
    assert (found.rank, found.size, found.job) == (0, 1, f"alone-{os.getpid()}")


def test_a_name_that_would_break_the_listing_is_cleaned_and_cut():
    odd = {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_NAMESPACE": "a b/ü" * 30 + "end"}
    job = identity(odd).job
    assert len(job) == 56
    assert job.endswith("a_b__end")


def test_a_socket_is_listed_as_long_as_it_is_open_and_its_user_is_known():
    address = identity({}, turn=77)
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(address.name)
        listener.listen()
        assert address in listed()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address.name)
            assert peer(connection) == (os.getpid(), os.geteuid())
    assert address not in listed()


def test_other_users_are_left_out():
    other = identity({}, turn=78)._replace(uid=os.geteuid() + 1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(other.name)
        assert other not in listed()
