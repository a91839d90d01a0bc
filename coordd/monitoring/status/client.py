"""The client of `coordd status`: queries the ranks of this host directly, and the others through one of them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from coordd.monitoring.status import process
from coordd.monitoring.status.address import FAR_SECONDS, Address, peer
from coordd.monitoring.status.probe_result import Life, Sighting, Survey
from coordd.monitoring.status.report import Question, Stack, Standing

__all__ = ["survey"]

_SECONDS = 2.0
_MOST_FAR = 256
_AT_ONCE = 32
_SILENT = "does not answer"
_WAITING = "starting: waits for the ranks that have not come"

_answer = msgspec.json.Decoder(list[Standing])


def survey(addresses: Sequence[Address]) -> Survey:
    """Queries what the ranks of one job are doing.

    Args:
        addresses: addresses of the job's ranks on this host, at least one.
    """
    here = os.uname().nodename
    with ThreadPoolExecutor(min(len(addresses), _AT_ONCE)) as pool:
        near = {sighting.rank: sighting for sighting in pool.map(lambda address: _see(address, here), addresses)}
    told = [sighting.standing for sighting in near.values() if sighting.standing is not None]
    met = next((standing for standing in told if standing.pids), None)
    size = met.size if met is not None else max(address.size for address in addresses)
    absent = [rank for rank in range(size) if rank not in near]
    host = next((standing.host for standing in told), here)
    far: dict[int, Sighting] = {}
    if met is not None:
        door = next(address for address in addresses if address.pid == met.pid)
        far = _look_further(absent, met, door)
    found = {**{rank: Sighting(rank) for rank in absent[:_MOST_FAR]}, **near, **far}
    title = next(filter(None, (process.command(address.pid) for address in addresses)), "")
    unasked = len(absent[_MOST_FAR:])
    return Survey(addresses[0].job, title, host, size, tuple(found[rank] for rank in sorted(found)), unasked)


def _see(address: Address, host: str) -> Sighting:
    """Probes the process of a rank on this host, and queries it if it can answer."""
    before, start = process.glance(address.pid), time.monotonic()
    if not before.life.can_answer:
        return Sighting(address.rank, host, address.pid, before.life, stacks=_seen(address.pid, before.life))
    standings, reason = _ask(address, Question(), _SECONDS)
    after = process.glance(address.pid)
    if standings:
        return Sighting(standings[0].rank, standings[0].host, address.pid, after.life, standing=standings[0])
    seen = Sighting(address.rank, host, address.pid, after.life, stacks=_seen(address.pid, after.life))
    if not address.met:
        return msgspec.structs.replace(seen, reason=_WAITING)
    cores = (after.seconds - before.seconds) / (time.monotonic() - start)
    return msgspec.structs.replace(seen, reason=reason, cores=cores)


def _seen(pid: int, life: Life) -> tuple[Stack, ...]:
    return () if life is Life.DEAD else process.stacks(pid)


def _look_further(ranks: Sequence[int], met: Standing, door: Address) -> dict[int, Sighting]:
    """Queries ranks that have no status server on this host: they are dead, or on other hosts.

    Args:
        ranks: the ranks to query.
        met: status of a rank that is connected to all others.
        door: address of that rank.
    """
    dead = {rank: Sighting(rank, met.host, met.pids[rank], Life.DEAD) for rank in ranks if _is_gone(rank, met)}
    asked = tuple(rank for rank in ranks if rank not in dead)[:_MOST_FAR]
    if not asked:
        return dead
    standings, reason = _ask(door, Question(asked), FAR_SECONDS + _SECONDS)
    told = {standing.rank: standing for standing in standings}
    found = {
        rank: Sighting(rank, met.hosts[rank], met.pids[rank], standing=told.get(rank), reason=reason or _SILENT)
        for rank in asked
    }
    return dead | found


def _is_gone(rank: int, met: Standing) -> bool:
    return met.hosts[rank] == met.host and process.glance(met.pids[rank]).life is Life.DEAD


def _ask(address: Address, question: Question, seconds: float) -> tuple[list[Standing], str]:
    """Sends a query; returns the answer, and the reason if there is none."""
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        try:
            connection.connect(address.name)
            if peer(connection)[1] != os.geteuid():
                return [], "is another user's"
            connection.sendall(msgspec.json.encode(question) + b"\n")
            data = _read(connection, deadline)
        except OSError:
            return [], _SILENT
    try:
        return _answer.decode(data), ""
    except msgspec.DecodeError:
        return [], "answers what this version of coordd does not understand"


def _read(connection: socket.socket, deadline: float) -> bytes:
    chunks = []
    while chunk := connection.recv(1 << 16):
        chunks.append(chunk)
        connection.settimeout(max(0.001, deadline - time.monotonic()))
    if not chunks:
        raise ConnectionError
    return b"".join(chunks)
