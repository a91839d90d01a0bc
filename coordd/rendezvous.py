"""How the ranks find each other: over MPI under an MPI launcher, else as a world of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from coordd.config import Config
from coordd.control.memory import MemoryStar
from coordd.control.protocol import Control
from coordd.errors import StartError
from coordd.transport.local import LocalWorld
from coordd.transport.mpi import MpiTransport, launched_ranks
from coordd.transport.protocol import Transport

__all__ = ["Link", "Rendezvous", "local_world", "meet"]


@dataclass(frozen=True)
class Link:
    """A rank's way to the others."""

    transport: Transport
    control: Control


Rendezvous = Callable[[Callable[[], None]], Link]
"""Makes the link on the daemon's thread; its argument wakes the daemon."""


def meet(config: Config) -> Rendezvous:
    """Chooses the way for this process.

    Raises:
        StartError: the processes were started by something that cannot connect them.
    """
    name = config.transport
    if name == "auto":
        name = "mpi" if launched_ranks(os.environ) else "local"
        _refuse_foreign_launchers(name)
    if name == "local":
        return local_world(1)[0]
    make: Callable[[], Transport] = MpiTransport if name == "mpi" else _third_party(name)
    return lambda _: _over(make(), config)


def _third_party(name: str) -> Callable[[], Transport]:
    """Finds a data plane that another package has announced."""
    found = {entry.name: entry for entry in entry_points(group="coordd.transports")}
    if name not in found:
        text = f"no transport {name!r}; there are {', '.join(sorted({*found, 'local', 'mpi'}))}"
        raise StartError(text)
    transport: Callable[[], Transport] = found[name].load()
    return transport


def local_world(size: int) -> list[Rendezvous]:
    """Makes the ways of ranks that are threads of this process, for tests and simulations."""
    world, star = LocalWorld(size), MemoryStar(size)

    def way(rank: int) -> Rendezvous:
        return lambda wake: Link(world.join(rank, wake), star.join(rank, wake))

    return [way(rank) for rank in range(size)]


def _over(transport: Transport, config: Config) -> Link:
    """Sets up the control channel, whose address and key travel over the data plane."""
    if transport.size == 1:
        return Link(transport, MemoryStar(1).join(0))
    from coordd.control.zeromq import ZmqControl, interface_for

    hosts = transport.gather(os.uname().nodename)
    control = ZmqControl(transport.rank, heartbeat_seconds=config.heartbeat_seconds)
    mine = control.listen(interface_for(hosts, config.interface)) if transport.rank == 0 else None
    address = transport.gather(mine)[0]
    if transport.rank:
        control.connect(address)
    return Link(transport, control)


def _refuse_foreign_launchers(name: str) -> None:
    """Catches the common mistake of starting ranks in a way that leaves each one alone."""
    size = os.environ.get("WORLD_SIZE", "1")
    if name == "local" and "RANK" in os.environ and size.isdigit() and int(size) > 1:
        text = (
            f"RANK and WORLD_SIZE={size} are set, as torchrun does, but coordd's ranks are started by an MPI launcher: "
            "use `coordd run -n N python script.py`, mpirun or srun (or unset them for a world of one)"
        )
        raise StartError(text)
