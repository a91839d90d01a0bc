from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.launch.cores import Cores, Share, cores_here, divide, thread_variables

FOUR = Cores(((0,), (1,), (2,), (3,)))
HYPER = Cores(tuple((core, core + 8) for core in range(8)))
CORES = st.builds(
    Cores,
    st.integers(1, 64).flatmap(lambda count: st.just(tuple((core, core + 64) for core in range(count)))),
    st.none() | st.integers(1, 64),
)


@pytest.mark.parametrize(
    ("cores", "place", "share"),
    [
        (FOUR, (0, 1), Share(4)),
        (FOUR, (0, 2), Share(2, (0, 1))),
        (FOUR, (1, 2), Share(2, (2, 3))),
        (FOUR, (3, 4), Share(1)),
        (FOUR, (5, 8), Share(1)),
        (HYPER, (1, 4), Share(2, (2, 3, 10, 11))),
        (HYPER, (2, 3), Share(2, (5, 6, 7, 13, 14, 15))),
        (Cores(HYPER.threads, quota=4), (0, 2), Share(2)),
    ],
)
def test_cores_are_divided(cores, place, share):
    assert divide(cores, *place) == share


@given(CORES, st.integers(1, 80))
def test_ranks_never_get_more_threads_than_there_are_cores(cores, size):
    shares = [divide(cores, rank, size) for rank in range(size)]
    assert len({share.threads for share in shares}) == 1
    assert shares[0].threads * size <= cores.usable or shares[0].threads == 1


@given(CORES, st.integers(1, 80))
def test_bound_ranks_have_all_cores_and_no_core_twice(cores, size):
    bound = [share.bound_to for rank in range(size) if (share := divide(cores, rank, size)).bound_to]
    if bound:
        everything = sorted(cpu for core in cores.threads for cpu in core)
        assert sorted(cpu for cpus in bound for cpu in cpus) == everything
        assert all(len(cpus) >= 2 * divide(cores, 0, size).threads for cpus in bound)


def test_what_the_user_has_set_is_kept_unless_told_otherwise():
    user = {"OMP_NUM_THREADS": "7"}
    assert thread_variables(2, user, insist=False) == {}
    assert thread_variables(2, {}, insist=False) == {"OMP_NUM_THREADS": "2", "TF_NUM_INTRAOP_THREADS": "2"}
    assert "MKL_NUM_THREADS" not in thread_variables(2, {"MKL_NUM_THREADS": "3"}, insist=False)
    assert set(thread_variables(2, user, insist=True).values()) == {"2"}
    assert "MKL_NUM_THREADS" in thread_variables(2, user, insist=True)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="affinity is Linux's own")
def test_the_cores_of_this_process_are_those_it_may_run_on():
    cores = cores_here()
    assert {cpu for core in cores.threads for cpu in core} == os.sched_getaffinity(0)
    assert 1 <= cores.usable <= len(cores.threads)
