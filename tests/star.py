"""The protocol without a network: a coordinator and members whose messages move one by one, when a test says so."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from coordd.negotiation.coordinator import Coordinator
from coordd.negotiation.deadlock import Heard
from coordd.negotiation.tensor_table import Entry
from coordd.negotiation.worker import Bucket, Due, Locked, Member
from coordd.ops.handles import Handle
from coordd.ops.messages import Goodbye, Hello, Kind, Message, Plan, Refused, Report, Request

__all__ = ["Star", "allreduce", "outcome"]

_SCRIPT = compile("", "train.py", "exec")


def allreduce(name: str, *shape: int, **details: Any) -> Request:
    """An allreduce of float32, if nothing else is said."""
    return Request(Kind.ALLREDUCE, name, **{"dtype": "float32", "shape": shape, **details})


def outcome(handle: Handle[Any]) -> str:
    """How an operation ended: done, void, or its error."""
    if not handle.poll():
        return "pending"
    if (error := handle.error()) is not None:
        return f"{type(error).__name__}: {error}"
    return "void" if handle.result() is None else "done"


class Star:
    """Ranks around a coordinator; ``up`` and ``down`` are what is on its way to and from it, by rank.

    ``words`` are those on locked buckets, by occurrence and rank; ``news`` are all reports and words, as they come.
    """

    def __init__(self, size: int, *, cache: int = 64, fusion: int = 1 << 20, **details: Any) -> None:
        self.ranks = range(size)
        self.coordinator = Coordinator(size, cache_capacity=cache, fusion_bytes=fusion, **details)
        self.members = [Member(rank, cache_capacity=cache) for rank in self.ranks]
        self.up: list[deque[Message]] = [deque() for _ in self.ranks]
        self.down: list[deque[Message]] = [deque() for _ in self.ranks]
        self.flying: list[list[Bucket]] = [[] for _ in self.ranks]
        self.words: dict[tuple[int, int, int], dict[int, Locked]] = {}
        self.news: list[tuple[int, Report | Locked]] = []
        self._met: list[Locked] = []
        self._inboxes: list[list[Entry]] = [[] for _ in self.ranks]
        self.now = 0.0
        for rank, member in enumerate(self.members):
            member.deadlocks.later = functools.partial(self._settle, rank)
        for rank in self.ranks:
            self.coordinator.hear(rank, Hello("1", "d", 100 + rank, "h"), now=0.0)
        self.coordinator.turn(0.0)

    def submit(self, rank: int, request: Request, *, line: int = 1, filler: bool = False) -> Handle[Any]:
        """Has a tensor wait for the rank's next report."""
        handle: Handle[Any] = Handle(request.name)
        site = (_SCRIPT, line)
        self._inboxes[rank].append(Entry(request, np.empty(0), handle, site=site, filler=filler))
        return handle

    def report(self, rank: int) -> Report | None:
        """Has a rank say what is new, onto its way up."""
        entries, self._inboxes[rank] = self._inboxes[rank], []
        return self._do(rank, self.members[rank].announce(entries))

    def wait(self, rank: int) -> Report | None:
        """Has a rank notice that somebody waits there."""
        return self._do(rank, self.members[rank].awaited())

    def unlock(self, rank: int) -> None:
        """Has a rank break the lock."""
        self._do(rank, self.members[rank].unlock())

    def refuse(self, rank: int, what: str, *names: str) -> None:
        """Has a rank refuse a call, or its part of the operations with these names."""
        refused = Refused(rank, "" if names else what, f"refused {what}", names=names)
        self._do(rank, self.members[rank].refuse(refused))
        if (told := self.members[rank].told(refused)) is not None:
            self.up[rank].append(told)

    def leave(self, rank: int) -> Report | None:
        """Has a rank say goodbye; returns what it says before."""
        report = self._do(rank, self.members[rank].leave())
        self.up[rank].append(Goodbye())
        return report

    def hear(self, rank: int) -> None:
        """Lets everything from one rank arrive."""
        while self.up[rank]:
            self.coordinator.hear(rank, self.up[rank].popleft(), now=self.now)

    def turn(self) -> list[Message]:
        """Has the coordinator speak; returns what it says to rank 0."""
        said = self.coordinator.turn(self.now)
        for rank, message in said:
            self.down[rank].append(message)
        return [message for rank, message in said if rank == 0]

    def decide(self) -> Plan | None:
        """Has the coordinator speak; returns the plan, if it makes one."""
        return next((message for message in self.turn() if isinstance(message, Plan)), None)

    def follow(self, rank: int) -> list[Bucket]:
        """Lets all plans arrive at one rank."""
        started = []
        while self.down[rank]:
            if isinstance(message := self.down[rank].popleft(), Plan):
                before = len(self.flying[rank])
                self._do(rank, self.members[rank].follow(message))
                started += self.flying[rank][before:]
        return started

    def land(self, rank: int) -> None:
        """Lets the data of all that one rank has started arrive."""
        for bucket in self.flying[rank]:
            self._finish(rank, bucket)
        self.flying[rank].clear()

    def meet(self, rank: int) -> list[Locked]:
        """Tells one rank what has become of its words on which all ranks have given theirs; returns those."""
        ended = []
        for told in [*self.words.values()]:
            mine = told.get(rank)
            if mine is None or mine.bucket is None or len(told) < len(self.ranks) or mine in self._met:
                continue
            self._met.append(mine)
            ended.append(mine)
            if all(locked.bucket for locked in told.values()):
                self._do(rank, self.members[rank].landed(mine))
                self._finish(rank, mine.bucket)
            else:
                self._do(rank, self.members[rank].refused(mine))
        return ended

    def _settle(self, rank: int, heard: Heard) -> None:
        self._do(rank, self.members[rank].settle(heard))

    def _do(self, rank: int, due: Due) -> Report | None:
        """Carries out what is due; returns the first report of it."""
        reports = [message for message in due.messages if isinstance(message, Report)]
        self.up[rank] += due.messages
        self.news += [(rank, report) for report in reports]
        self.flying[rank] += due.buckets
        for locked in due.words:
            self.news.append((rank, locked))
            self.words.setdefault((locked.lock, locked.index, locked.occurrence), {})[rank] = locked
        return reports[0] if reports else None

    def _finish(self, rank: int, bucket: Bucket) -> None:
        for entry in bucket.entries:
            self.members[rank].table.release(entry)
            entry.finish(entry.array)

    def each(self, step: Callable[[int], Any]) -> None:
        """Does something on every rank."""
        for rank in self.ranks:
            step(rank)

    def settle(self) -> Plan | None:
        """Moves everything once, from the reports to the data; returns the plan."""
        self.each(self.report)
        self.each(self.hear)
        plan = self.decide()
        self.each(self.follow)
        self.each(self.land)
        return plan
