from __future__ import annotations

import threading
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from coordd import rendezvous
from coordd.bell import Bell
from coordd.config import Config
from coordd.daemon import Daemon
from coordd.errors import ConfigError, StartError
from coordd.messages import Goodbye
from coordd.rendezvous import local_world, meet
from coordd.transport import register
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


class Pigeons(LocalTransport):
    """A third party's data plane: the local one, by another name."""

    world = LocalWorld(3)
    ranks = iter(range(3))
    lock = threading.Lock()

    def __init__(self) -> None:
        with self.lock:
            super().__init__(self.world, next(self.ranks), lambda: None)


def test_a_third_partys_transport_gets_a_real_control_channel(monkeypatch):
    """Three ranks meet over it; the address and the key of the ZeroMQ channel travel over its data plane."""
    entry = EntryPoint("pigeons", f"{__name__}:Pigeons", "coordd.transports")
    monkeypatch.setattr(register, "entry_points", lambda group: [entry])
    monkeypatch.setattr(EntryPoint, "load", lambda self: Pigeons)
    config = Config(transport="pigeons")
    ranks = LocalRanks([Daemon(config, meet(config)) for _ in range(3)])
    ranks.start()

    def body(index):
        from coordd import api

        found = api.allreduce(np.array([1.0, api.rank()])).tolist()
        return found, api.broadcast(np.arange(3), 2).tolist(), api.allgather(np.full(api.rank(), api.rank())).tolist()

    assert ranks.each(body) == [([1.0, 1.0], [0, 1, 2], [1, 2, 2])] * 3
    ranks.stop()
