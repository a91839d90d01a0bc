"""`init` with Horovod's arguments, the questions about the build, and small things."""

from __future__ import annotations

import os

import horovod.torch as hvd
import pytest
from horovod.common import util

from coordd import api
from coordd.errors import ArgumentError, NotInitializedError


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No launcher, and whatever `init` sets is taken back."""
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "HOROVOD_", "SLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", {**os.environ})
    yield
    api.shutdown()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"comm": None},
        {"comm": []},
        {"comm": [0]},
        {"process_sets": "dynamic"},
        {"process_sets": []},
        {"process_sets": [hvd.ProcessSet([0]), [0], hvd.global_process_set]},
    ],
    ids=str,
)
def test_init_takes_what_means_all_ranks(arguments):
    hvd.init(**arguments)
    assert (hvd.is_initialized(), hvd.rank(), hvd.size()) == (True, 0, 1)
    hvd.init()


def test_init_tells_the_place_to_whoever_reads_horovods_variables():
    hvd.init()
    found = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert found == {f"HOROVOD_{name}": "1" if name.endswith("SIZE") else "0" for name in names}


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"comm": [0, 1]}, r"coordd runs on all 1 ranks .* give operations process_set=hvd\.ProcessSet"),
        ({"comm": object()}, "coordd runs on all 1 ranks"),
        ({"process_sets": "static"}, "give None, 'dynamic', or a list of hvd.ProcessSet"),
        ({"process_sets": 3}, "give None, 'dynamic', or a list of hvd.ProcessSet"),
        ({"process_sets": [object()]}, r"a process set is made of ranks, as in hvd\.ProcessSet"),
        ({"process_sets": [[0, 1]]}, r"process set \(0, 1\) has ranks that do not exist in a world of 1"),
    ],
)
def test_init_refuses_the_rest_and_says_what_to_do(arguments, advice):
    with pytest.raises(ArgumentError, match=advice):
        hvd.init(**arguments)


def test_questions_about_the_build_are_answered_truly():
    assert hvd.mpi_built()
    others = (hvd.gloo_built, hvd.ddl_built, hvd.ccl_built, hvd.cuda_built, hvd.rocm_built, hvd.gloo_enabled)
    assert not any(ask() for ask in others)
    assert hvd.nccl_built(verbose=True) == 0


def test_whether_mpi_takes_threads_is_known_after_init():
    with pytest.raises(NotInitializedError, match=r"has not been initialized; use hvd\.init\(\)"):
        hvd.mpi_threads_supported()
    hvd.init()
    assert hvd.mpi_threads_supported() in {True, False}
    assert hvd.mpi_threads_supported() <= hvd.mpi_enabled()


def test_small_things():
    assert [count for count in range(9) if util.num_rank_is_power_2(count)] == [1, 2, 4, 8]
    assert util.split_list(list(range(7)), 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert (util.is_iterable([]), util.is_iterable(1)) == (True, False)
    assert util.gpu_available("torch") in {True, False}
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"^horovod\.mxnet is refused"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")
