"""Takes a snapshot of this rank's status on another thread than the daemon's, without delaying any thread.

One rule: it takes no lock and needs nothing from the daemon's thread, because that thread may hang.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from coordd.daemon.peer_to_peer import Letter
from coordd.daemon.shared_state import Parts, Status
from coordd.monitoring.stacks import places
from coordd.monitoring.status.report import Operation, Plan, Stack, Standing, Submission, Traffic
from coordd.negotiation.tensor_table import Entry, show_site
from coordd.ops.messages import Failure
from coordd.version import VERSION

__all__ = ["Witness"]

_OPERATIONS = 4096
_THREADS = 32
_DEPTH = 48
_NAME = 1000
_LOOKS = 1000

Found = TypeVar("Found")


class Witness:
    """Takes snapshots of one daemon's status."""

    def __init__(self, status: Status, *, rank: int, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepares for snapshots of ``status``.

        Args:
            status: the status that the daemon's thread publishes.
            rank: this rank according to the launcher; used until the rank is connected to the others.
            size: number of ranks according to the launcher; used until the rank is connected to the others.
            clock: the clock of the handles' submission times, in seconds.
        """
        self._status = status
        self._before = rank, size
        self._clock = clock
        self._since = clock()

    def standing(self) -> Standing:
        """Returns the status of this rank, without ``hosts`` and ``pids``."""
        now, status = self._clock(), self._status
        met = status.parts is not None
        rank, size = (status.world.rank, status.world.size) if met else self._before
        operations = _steadily(lambda: list(_operations(status.parts, now)))
        return Standing(
            version=VERSION,
            rank=rank,
            size=size,
            host=status.world.host,
            pid=os.getpid(),
            seconds=now - self._since,
            phase=_phase(status),
            failure=_tell(status.failure),
            last=_last(status.parts, now),
            operations=tuple(operations[:_OPERATIONS]),
            more=max(0, len(operations) - _OPERATIONS),
            stacks=tuple(Stack(place.thread, tuple(place.lines), place.inside) for place in places(_DEPTH)[:_THREADS]),
            plan=_plan(status.parts),
            traffic=_traffic(status),
            lead=status.lead.seconds,
        )


def _steadily(look: Callable[[], Found]) -> Found:
    """Calls ``look`` until the collection that it reads does not change meanwhile; at most ``_LOOKS`` + 1 times."""
    for _ in range(_LOOKS):
        try:
            return look()
        except RuntimeError:  # a collection has changed its size
            continue
    return look()


def _phase(status: Status) -> str:
    if status.failure is not None:
        return "failed"
    if status.leaving:
        return "leaving"
    return "running" if status.started.is_set() else "starting"


def _tell(failure: Failure | None) -> str:
    return "" if failure is None else f"rank {failure.rank} {failure.reason}"


def _last(parts: Parts | None, now: float) -> Submission | None:
    if parts is None or (last := parts.member.table.last) is None:
        return None
    name, site, submitted = last
    return Submission(name[:_NAME], show_site(site), now - submitted)


def _operations(parts: Parts | None, now: float) -> Iterator[Operation]:
    if parts is None:
        return
    given = {waiting.name: waiting.missing for _, waiting in parts.flights.waiting()}
    lock = parts.member.lock
    held = {entry.request.name for entry in lock.held} if lock is not None else set()
    for entry in list(parts.member.table):
        name = entry.request.name
        late = given.get(name)
        # If no rank's vote is missing on this host, the operation counts as agreed.
        agreed = entry.released or late == ()
        yield _operation(entry, "held" if name in held else "agreed" if agreed else "announced", late or (), now)
    for item in parts.inbox.look():
        if isinstance(item, Entry):
            yield _operation(item, "queued", (), now)
        elif isinstance(item, Letter):
            yield Operation(item.word, item.name[:_NAME], now - item.handle.submitted, "", "matched", (), (item.peer,))
    for since, waiting in list(parts.mailbox.waiting()):
        yield Operation(waiting.operation, waiting.name[:_NAME], now - since, "", "matched", (), waiting.missing)


def _operation(entry: Entry, stage: str, late: tuple[int, ...], now: float) -> Operation:
    request, seconds = entry.request, now - entry.handle.submitted
    site, name = show_site(entry.site), request.name[:_NAME]
    return Operation(request.kind.name.lower(), name, seconds, site, stage, request.members, late, entry.array.nbytes)


def _plan(parts: Parts | None) -> Plan:
    if parts is None:
        return Plan()
    member, lock = parts.member, parts.member.lock
    counts = {"seen": member.seen, "hits": member.hits, "misses": member.misses}
    if lock is None:
        return Plan(**counts)
    return Plan(**counts, lock=lock.number, steps=lock.lasted, buckets=lock.buckets, tensors=len(lock.slots))


def _traffic(status: Status) -> Traffic:
    counted, parts = status.traffic, status.parts
    operations = {kind.name.lower(): count for kind, count in counted.operations.items()}
    moved = {kind.name.lower(): count for kind, count in counted.bytes.items()}
    memory = 0
    if parts is not None:
        operations |= parts.mailbox.done
        moved |= parts.mailbox.bytes
        memory = parts.commons.heap.size if parts.commons is not None else 0
    told = {kind: count for kind, count in operations.items() if count}
    return Traffic(told, {kind: moved[kind] for kind in told}, counted.locked, memory)
