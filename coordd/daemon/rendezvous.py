"""Connects the ranks: over MPI under an MPI launcher, else as a world of one.

One rule: all ranks start, or none does and all report why (`coordd.transport.bootstrap`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from coordd.config import Config
from coordd.control.local import MemoryStar
from coordd.daemon.wakeup import Bell
from coordd.errors import StartError
from coordd.host.launcher_environment import launched_ranks, more_ranks
from coordd.negotiation.channel import Control
from coordd.negotiation.tree import post, tree
from coordd.transport.bootstrap import Bootstrap
from coordd.transport.local import LocalWorld
from coordd.transport.mpi import MpiTransport
from coordd.transport.protocol import Transport
from coordd.transport.registry import announced, require
from coordd.transport.shared_memory.board import ORDERED
from coordd.transport.shared_memory.host_memory import Commons, share
from coordd.transport.shared_memory.notes import Notes

__all__ = ["Link", "Rendezvous", "local_world", "meet", "tell"]

log = logging.getLogger("coordd")


@dataclass(frozen=True)
class Link:
    """A rank's connections to the others.

    Attributes:
        transport: carries data.
        control: carries messages.
        hosts: a name for each rank; ranks of one name share memory, and know each other's process ids.
        commons: the memory that the ranks of this host share.
        notes: the channels for notes between them.
        machines: a name for each rank; ranks of one name reach each other by loopback, though they may share no memory.
            Empty means the hosts.
        start: the exchanges by which all ranks start or none does; by default there are none.
    """

    transport: Transport
    control: Control
    hosts: tuple[str, ...]
    commons: Commons | None = None
    notes: Notes | None = None
    machines: tuple[str, ...] = ()
    start: Bootstrap = field(default_factory=Bootstrap)

    def close(self, *, failed: bool) -> None:
        """Closes all parts; ``failed`` is whether the other ranks may not do so in step with this one.

        An error of one part keeps no other from being closed; then it is raised.
        """
        with contextlib.ExitStack() as steps:  # the last one runs first
            for part in (self.commons, self.notes):
                if part is not None:
                    steps.callback(part.close)
            steps.callback(self.transport.close, failed=failed)
            steps.callback(self.control.close)


Rendezvous = Callable[[Bell], Link]
"""Creates the link on the daemon's thread; its argument wakes the daemon."""


def meet(config: Config, *, one_of_many: bool = True) -> Rendezvous:
    """Chooses how this process finds the other ranks.

    Args:
        config: the settings.
        one_of_many: whether environment variables about several processes apply to this one.

    Raises:
        ConfigError: there is no such transport.
        StartError: the environment announces other ranks, but nothing connects this process to them.
    """
    _refuse_free_threads()
    name = "local" if config.alone else config.transport
    if name == "auto":
        name = "mpi" if launched_ranks(os.environ) else "local"
        if name == "local" and one_of_many:
            _refuse_to_be_one_of_many(os.environ, 1)
    if name == "local":
        return local_world(1)[0]
    require(name, source="transport")
    make: Callable[[], Transport] = MpiTransport if name == "mpi" else announced()[name].load()
    return lambda bell: _over(make(), config, bell, one_of_many=one_of_many)


def tell(error: BaseException) -> threading.Thread | None:
    """Reports to the ranks that an MPI launcher has started beside this one why this one cannot start.

    Returns:
        the thread that reports, as soon as the other ranks have started; None if there are none.
    """
    if launched_ranks(os.environ) < 2:
        return None
    thread = threading.Thread(target=_tell, args=(error,), name="coordd", daemon=True)
    thread.start()
    return thread


def _tell(error: BaseException) -> None:
    with suppress(Exception):  # this rank raises its own error
        transport = MpiTransport()
        start = Bootstrap(transport.gather)
        start.tell(error)
        transport.close(failed=not start.in_step)


def local_world(size: int, hosts: Sequence[str] = (), *, fan_in: int = 2) -> list[Rendezvous]:
    """Creates the rendezvous of ranks that are threads of this process, for tests and simulations.

    Args:
        size: number of ranks.
        hosts: the simulated host of each rank; by default all on one.
        fan_in: the setting of this name.
    """
    here = tuple(hosts) or (os.uname().nodename,) * size
    parents = [place.parent for place in tree(here, fan_in)]
    world, star = LocalWorld(size), MemoryStar(size, parents)

    def way(rank: int) -> Rendezvous:
        return lambda bell: Link(world.join(rank, bell.ring), star.join(rank, bell.ring), here)

    return [way(rank) for rank in range(size)]


def _over(transport: Transport, config: Config, bell: Bell, *, one_of_many: bool) -> Link:
    """Sets up common memory and the control channel, whose addresses and key travel over the data plane."""
    start = Bootstrap(transport.gather)
    with ExitStack() as undo:
        undo.callback(lambda: transport.close(failed=not start.in_step))
        with start.shared():
            if one_of_many:
                _refuse_to_be_one_of_many(os.environ, transport.size)
            link = _connected(transport, config, bell, start, undo)
        undo.pop_all()
    return link


def _connected(transport: Transport, config: Config, bell: Bell, start: Bootstrap, undo: ExitStack) -> Link:
    host = os.uname().nodename
    if transport.size == 1:
        return Link(transport, MemoryStar(1).join(0), (host,), start=start)
    from coordd.control import shared_memory, tree_node
    from coordd.transport.shared_memory import notes

    mine = _split(host, transport, config.simulate_hosts), _machine(), _namespace("pid"), config.shared_memory
    told = start.gather(mine)
    machines = _apart([(name, machine) for name, machine, _, _ in told])
    places = [(machine, processes) for machine, (_, _, processes, _) in zip(machines, told, strict=True)]
    hosts, commons = share(start.gather, _apart(places, mark="/"), transport.rank, bell.descriptor)
    if commons is not None and not all(wanted for *_, wanted in told):
        commons.close()
        commons = None
    if commons is not None:
        undo.callback(commons.close)
    place = post(transport.rank, hosts, config.fan_in)
    control: Control = tree_node.join(
        place,
        start.gather,
        hosts=machines,
        interface=config.interface,
        heartbeat_seconds=config.heartbeat_seconds,
    )
    undo.callback(control.close)
    if commons is None:
        return Link(transport, control, hosts, machines=machines, start=start)
    _warn_of_order(transport.rank)
    control = shared_memory.join(control, place, start.gather, commons)
    found = notes.join(transport.rank, start.gather, commons)
    return Link(transport, control, hosts, commons, found, machines, start)


_KERNEL = Path("/proc/sys/kernel/random/boot_id")


def _machine() -> str:
    """Identifies this machine among others of its name: by its kernel, and its network, which a container may own.

    Empty where the system does not provide it.
    """
    kernel = _KERNEL.read_text("ascii").strip() if _KERNEL.is_file() else ""
    return f"{kernel} {_namespace('net')}".strip()


def _namespace(kind: str) -> str:
    """Returns the id of a namespace of this process, which it shares with the processes of its container."""
    with suppress(OSError):
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    return ""


def _apart(found: Sequence[tuple[str, str]], mark: str = "~") -> tuple[str, ...]:
    """Names the place of each rank, given its name and identity; different places of one name get a number appended."""
    known: dict[str, list[str]] = {}
    for name, own in dict.fromkeys(found):
        known.setdefault(name, []).append(own)
    places = [(name, known[name].index(own)) for name, own in found]
    return tuple(f"{name}{mark}{place + 1}" if place else name for name, place in places)


def _split(host: str, transport: Transport, parts: int) -> str:
    """Names the host of this rank; one machine may simulate several, to test code that needs more than one."""
    return f"{host}#{transport.rank * parts // transport.size}" if parts > 1 else host


def _refuse_free_threads() -> None:
    """Rejects a Python without the GIL: work that framework threads queue for the daemon could be overlooked."""
    enabled = getattr(sys, "_is_gil_enabled", None)  # Python 3.13 and newer
    if enabled is not None and not enabled():
        text = (
            "this Python runs without its global interpreter lock (GIL), which coordd needs: set PYTHON_GIL=1 or start "
            "it with `python -X gil=1`, or use a Python that has the lock"
        )
        raise StartError(text)


def _warn_of_order(rank: int) -> None:
    """Warns once per job if common memory is not tested on this processor."""
    if rank == 0 and not ORDERED:
        log.warning(
            "common memory is tested on x86-64 processors only, and this one is %s: set COORDD_SHARED_MEMORY=0 if "
            "results look wrong, and tell us",
            platform.machine(),
        )


def _refuse_to_be_one_of_many(environment: Mapping[str, str], size: int) -> None:
    """Catches the common mistake of starting ranks in a way that leaves each one alone, as rank 0 of 1.

    Raises:
        StartError: naming the variable that announces more ranks than there are.
    """
    claim = more_ranks(environment, size)
    if claim is None:
        return
    if claim.launcher == "torchrun":
        told = (
            f"RANK and WORLD_SIZE={claim.value} are set, as torchrun does, but coordd's ranks are started by an MPI "
            "launcher"
        )
    else:
        told = (
            f"{claim.variable}={claim.value[:200]} says that {claim.launcher} has started {claim.ranks} processes or "
            f"more, but nothing connects this one to them: each would be rank 0 of {size}"
        )
    srun = "srun with --mpi=pmix or --mpi=pmi2, whichever your MPI knows" if claim.launcher == "srun" else "srun"
    text = (
        f"{told}: use `coordd run -n N python script.py`, mpirun or {srun}. If this process is to work alone, set "
        "COORDD_ALONE=1"
    )
    raise StartError(text)
