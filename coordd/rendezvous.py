"""How the ranks find each other: over MPI under an MPI launcher, else as a world of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordd.bell import Bell
from coordd.config import Config
from coordd.control.memory import MemoryStar
from coordd.control.notes import Notes
from coordd.control.protocol import Control
from coordd.errors import StartError
from coordd.transport.commons import Commons, join
from coordd.transport.local import LocalWorld
from coordd.transport.mpi import MpiTransport, launched_ranks
from coordd.transport.protocol import Transport
from coordd.transport.register import announced, require
from coordd.tree import post, tree

__all__ = ["Link", "Rendezvous", "local_world", "meet"]


@dataclass(frozen=True)
class Link:
    """A rank's way to the others."""

    transport: Transport
    control: Control
    hosts: tuple[str, ...]
    commons: Commons | None = None
    notes: Notes | None = None


Rendezvous = Callable[[Bell], Link]
"""Makes the link on the daemon's thread; its argument wakes the daemon."""


def meet(config: Config) -> Rendezvous:
    """Chooses the way for this process.

    Raises:
        ConfigError: there is no such transport.
        StartError: the processes were started by something that cannot connect them.
    """
    name = config.transport
    if name == "auto":
        name = "mpi" if launched_ranks(os.environ) else "local"
        _refuse_foreign_launchers(name)
    if name == "local":
        return local_world(1)[0]
    require(name, source="transport")
    make: Callable[[], Transport] = MpiTransport if name == "mpi" else announced()[name].load()
    return lambda bell: _over(make(), config, bell)


def local_world(size: int, hosts: Sequence[str] = (), *, fan_in: int = 2) -> list[Rendezvous]:
    """Makes the ways of ranks that are threads of this process, for tests and simulations.

    Args:
        size: number of ranks.
        hosts: where they pretend to be; by default together.
        fan_in: the setting of this name.
    """
    here = tuple(hosts) or (os.uname().nodename,) * size
    parents = [place.parent for place in tree(here, fan_in)]
    world, star = LocalWorld(size), MemoryStar(size, parents)

    def way(rank: int) -> Rendezvous:
        return lambda bell: Link(world.join(rank, bell.ring), star.join(rank, bell.ring), here)

    return [way(rank) for rank in range(size)]


def _over(transport: Transport, config: Config, bell: Bell) -> Link:
    """Sets up common memory and the control channel, whose addresses and key travel over the data plane."""
    host = os.uname().nodename
    if transport.size == 1:
        return Link(transport, MemoryStar(1).join(0), (host,))
    from coordd.control import branch, nearby, notes

    hosts = _apart(transport.gather((_split(host, transport, config.simulate_hosts), _machine())))
    commons = join(transport.gather, hosts, transport.rank, bell.descriptor) if config.shared_memory else None
    place = post(transport.rank, hosts, config.fan_in)
    control: Control = branch.join(
        place,
        transport.gather,
        hosts=hosts,
        interface=config.interface,
        heartbeat_seconds=config.heartbeat_seconds,
    )
    if commons is None:
        return Link(transport, control, hosts)
    control = nearby.join(control, place, transport.gather, commons)
    return Link(transport, control, hosts, commons, notes.join(transport.rank, transport.gather, commons))


_KERNEL = Path("/proc/sys/kernel/random/boot_id")


def _machine() -> str:
    """What tells this machine's kernel from others; nothing where it does not say."""
    return _KERNEL.read_text("ascii").strip() if _KERNEL.is_file() else ""


def _apart(found: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Names the host of each rank, given its name and machine; machines that share a name get a number behind it."""
    machines: dict[str, list[str]] = {}
    for name, machine in dict.fromkeys(found):
        machines.setdefault(name, []).append(machine)
    places = [(name, machines[name].index(machine)) for name, machine in found]
    return tuple(f"{name}~{place + 1}" if place else name for name, place in places)


def _split(host: str, transport: Transport, parts: int) -> str:
    """Names the host of this rank; one machine may play several, to try what else needs more than one."""
    return f"{host}#{transport.rank * parts // transport.size}" if parts > 1 else host


def _refuse_foreign_launchers(name: str) -> None:
    """Catches the common mistake of starting ranks in a way that leaves each one alone."""
    size = os.environ.get("WORLD_SIZE", "1")
    if name == "local" and "RANK" in os.environ and size.isdigit() and int(size) > 1:
        text = (
            f"RANK and WORLD_SIZE={size} are set, as torchrun does, but coordd's ranks are started by an MPI launcher: "
            "use `coordd run -n N python script.py`, mpirun or srun (or unset them for a world of one)"
        )
        raise StartError(text)
