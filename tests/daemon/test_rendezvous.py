from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from coordd import api
from coordd.config import Config
from coordd.daemon import rendezvous
from coordd.daemon.daemon import Daemon
from coordd.daemon.rendezvous import local_world, meet
from coordd.daemon.wakeup import Bell
from coordd.errors import ConfigError, StartError
from coordd.ops.messages import Goodbye
from coordd.transport import registry
from coordd.transport.local import LocalTransport, LocalWorld
from tests.local_ranks import LocalRanks


@pytest.fixture(autouse=True)
def _nothing_is_launched(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_script_without_a_launcher_is_a_world_of_one():
    link = meet(Config())(Bell())
    assert (link.transport.rank, link.transport.size) == (0, 1)
    link.control.send(0, Goodbye())
    assert link.control.receive() == [(0, Goodbye())]


def test_local_ranks_meet_each_other():
    bells = [Bell() for _ in range(3)]
    links = [way(bell) for way, bell in zip(local_world(3), bells, strict=True)]
    assert [(link.transport.rank, link.transport.size) for link in links] == [(0, 3), (1, 3), (2, 3)]
    links[2].control.send(0, Goodbye())
    assert links[0].control.receive() == [(2, Goodbye())]
    bells[0].sleep(None)  # it was rung
    assert links[1].hosts == links[2].hosts


@pytest.mark.parametrize("environment", [{"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "8"}])
def test_ranks_of_a_foreign_launcher_are_not_left_alone(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartError, match="as torchrun does, but coordd's ranks are started by an MPI launcher"):
        meet(Config())
    meet(Config(transport="local"))


@pytest.mark.parametrize("environment", [{"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "0"}])
def test_a_world_of_one_may_have_such_variables(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    meet(Config())


def test_a_python_without_its_global_lock_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr("sys._is_gil_enabled", lambda: False, raising=False)
    for transport in ("auto", "local", "mpi"):
        with pytest.raises(StartError, match=r"without its global interpreter lock .* PYTHON_GIL=1 .* -X gil=1"):
            meet(Config(transport=transport))
    monkeypatch.setattr("sys._is_gil_enabled", lambda: True, raising=False)
    meet(Config())


@pytest.mark.parametrize(("rank", "ordered", "told"), [(0, False, True), (1, False, False), (0, True, False)])
def test_a_processor_on_which_common_memory_is_not_tested_is_told_once(monkeypatch, caplog, rank, ordered, told):
    monkeypatch.setattr(rendezvous, "ORDERED", ordered)
    rendezvous._warn_of_order(rank)
    assert ("COORDD_SHARED_MEMORY=0" in caplog.text) == told


def test_an_mpi_launcher_is_recognised(monkeypatch):
    class Mpi(LocalTransport):
        def __init__(self) -> None:
            super().__init__(LocalWorld(1), 0, lambda: None)

    monkeypatch.setattr(rendezvous, "MpiTransport", Mpi)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert isinstance(meet(Config())(Bell()).transport, Mpi)


def test_a_transport_that_nobody_has_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"transport='pigeons' is not usable: give one of auto, .*local, mpi"):
        meet(Config(transport="pigeons"))


@contextmanager
def pigeons(monkeypatch, **settings):
    """Three ranks that meet over a third party's data plane: the local one, by another name."""
    world, numbers, lock = LocalWorld(3), iter(range(3)), threading.Lock()

    def make():
        with lock:
            return LocalTransport(world, next(numbers), lambda: None)

    entry = EntryPoint("pigeons", f"{__name__}:pigeons", "coordd.transports")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    monkeypatch.setattr(EntryPoint, "load", lambda self: make)
    config = Config(transport="pigeons", **settings)
    ranks = LocalRanks([Daemon(config, meet(config)) for _ in range(3)])
    ranks.start()
    yield ranks
    ranks.stop()


def test_a_third_partys_transport_gets_a_real_control_channel(monkeypatch):
    """The address and the key of the ZeroMQ channel travel over its data plane."""

    def body(index):
        found = api.allreduce(np.array([1.0, api.rank()])).tolist()
        return found, api.broadcast(np.arange(3), 2).tolist(), api.allgather(np.full(api.rank(), api.rank())).tolist()

    with pigeons(monkeypatch) as ranks:
        assert ranks.each(body) == [([1.0, 1.0], [0, 1, 2], [1, 2, 2])] * 3


def test_machines_of_one_name_are_different_hosts(monkeypatch):
    """Clones of one image, say, that all call themselves localhost."""
    here, machines = os.uname().nodename, iter(["one kernel", "another", "one kernel"])
    monkeypatch.setattr(rendezvous, "_machine", lambda: next(machines))
    with pigeons(monkeypatch, interface="127.0.0.1") as ranks:
        sizes = sorted(ranks.each(lambda _: (api.local_size(), api.cross_size(), api.allreduce([1.0]).tolist())))
        assert [size for size, *_ in sizes] == [1, 2, 2]
        assert len({daemon.world.hosts for daemon in ranks.daemons}) == 1
        assert set(ranks.daemons[0].world.hosts) == {here, f"{here}~2"}


@pytest.mark.parametrize(
    ("found", "hosts"),
    [
        ([("a", "1"), ("a", "1"), ("b", "2")], ("a", "a", "b")),
        ([("a", "2"), ("a", "1"), ("b", "1"), ("a", "2"), ("a", "3"), ("b", "1")], ("a", "a~2", "b", "a", "a~3", "b")),
        ([("a", ""), ("a", "")], ("a", "a")),
    ],
)
def test_hosts_that_share_a_name_get_numbers(found, hosts):
    assert rendezvous._apart(found) == hosts


def test_a_machine_knows_itself():
    assert rendezvous._machine() == rendezvous._machine() != ""
