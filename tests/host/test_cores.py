from __future__ import annotations

import os

import psutil
import pytest

from coordd.host import cores
from coordd.host.cores import Cores, cores_here

PACKAGE, SIBLINGS = (
    f"/sys/devices/system/cpu/cpu{{}}/topology/{name}" for name in ("physical_package_id", "thread_siblings_list")
)
GONE = 1


@pytest.fixture
def machine(monkeypatch):
    """Makes this a machine whose files are those of a dictionary, and whose processes have these affinities."""

    def make(files, affinity, cores_counted=None):
        def ask(pid):
            if pid == GONE:
                raise ProcessLookupError
            return affinity[pid] if isinstance(affinity, dict) else set(affinity)

        monkeypatch.setattr(os, "sched_getaffinity", ask, raising=False)
        monkeypatch.setattr(psutil, "cpu_count", lambda *, logical: cores_counted)
        monkeypatch.setattr(cores, "_text", lambda path: files.get(path, ""))

    return make


def sys_files(packages, siblings):
    files = {PACKAGE.format(cpu): str(package) for cpu, package in enumerate(packages)}
    return files | {SIBLINGS.format(cpu): text for cpu, text in enumerate(siblings)}


def test_hyper_threads_are_no_cores(machine):
    machine(sys_files([0] * 4, ["0,2", "1,3", "0,2", "1,3"]), range(4))
    assert cores_here() == Cores(((0, 2), (1, 3)))


def test_only_what_may_be_used_counts(machine):
    machine(sys_files([0] * 4, ["0,2", "1,3", "0,2", "1,3"]), [2, 1, 3])
    assert cores_here() == Cores(((1, 3), (2,)))


def test_cores_that_are_near_each_other_come_together(machine):
    files = sys_files([1, 0, 1, 0, 1, 0, 1, 0], map(str, range(8)))
    files["/sys/devices/system/node/has_cpu"] = "0-3"
    for node, cpus in enumerate(["1,7", "3,5", "0,6", "2,4"]):
        files[f"/sys/devices/system/node/node{node}/cpulist"] = cpus
    machine(files, range(8))
    assert cores_here().threads == ((1,), (7,), (3,), (5,), (0,), (6,), (2,), (4,))


def test_several_processes_may_use_what_one_of_them_may(machine):
    machine(sys_files([0] * 4, map(str, range(4))), {5: {0, 1}, 6: {1, 2}})
    assert cores_here(5, 6, GONE).threads == ((0,), (1,), (2,))
    assert cores_here(6).threads == ((1,), (2,))


def test_a_container_grants_time(machine):
    group = "/sys/fs/cgroup/kube"
    files = {"/proc/self/cgroup": "0::/kube/pod", f"{group}/cpu.max": "150000 100000", f"{group}/pod/cpu.max": "max 1"}
    machine(files | sys_files([0] * 4, map(str, range(4))), range(4))
    assert (cores_here().quota, cores_here().usable, cores_here().divisible) == (2, 2, False)


def test_where_no_topology_is_shown_psutil_counts(machine):
    machine({}, range(4), cores_counted=2)
    assert (cores_here().usable, cores_here().divisible) == (2, False)
    machine({}, range(4), cores_counted=4)
    assert (cores_here().usable, cores_here().divisible) == (4, True)
    machine({}, range(4), cores_counted=None)
    assert cores_here().usable == 4


def test_a_system_without_affinity_counts_cores_and_binds_nothing(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda *, logical: 8 if logical else 4)
    assert (cores_here().usable, cores_here().divisible) == (4, False)


def test_reserved_cores_are_left_out_unless_that_is_all_of_them():
    four = Cores(((0, 4), (1, 5), (2, 6), (3, 7)))
    assert four.without(frozenset({5, 3})).threads == ((0, 4), (2, 6))
    assert four.without(frozenset(range(4))) == four


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="affinity is Linux's own")
def test_the_cores_of_this_process_are_those_it_may_run_on():
    here = cores_here()
    assert {cpu for core in here.threads for cpu in core} == os.sched_getaffinity(0)
    assert 1 <= here.usable <= len(here.threads)
    if len(os.sched_getaffinity(0)) == os.cpu_count() and psutil.cpu_count(logical=False):
        assert len(here.threads) == psutil.cpu_count(logical=False)
