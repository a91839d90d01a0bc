"""One rank's side of the protocol: from what the framework submits to what the data plane carries out.

Pure: no thread, clock or socket. The same object runs in every daemon and in the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from coordd.cache import ResponseCache
from coordd.errors import CoorddError, MismatchError, ShutdownError
from coordd.fusion import buckets
from coordd.messages import Plan, Report, Request, Response
from coordd.table import Entry, TensorTable
from coordd.wire import bits

__all__ = ["Bucket", "Member"]

_SILENT_PLANS = 256


class Bucket(msgspec.Struct, frozen=True):
    """Entries that travel together, in the same order on all ranks; ``sequence`` is their common number."""

    sequence: int
    request: Request
    sizes: tuple[int, ...]
    entries: tuple[Entry, ...]


class Member:
    """Announces tensors, follows plans, and keeps its cache equal to everybody's."""

    def __init__(self, rank: int, *, cache_capacity: int) -> None:
        self.rank = rank
        self.table = TensorTable()
        self._cache = ResponseCache(cache_capacity)
        self._seen = 0
        self._reported = 0
        self._started = 0
        self.stopped = False

    def announce(self, entries: Iterable[Entry]) -> Report | None:
        """Takes new tensors in; returns what the coordinator must hear, None if nothing."""
        report = self.table.admit(entries, self._cache, seen=self._seen)
        if report is None and self._seen - self._reported >= _SILENT_PLANS:
            # A sign of life, so that the coordinator can forget what older reports might have referred to.
            report = Report(self._seen)
        if report is not None:
            self._reported = self._seen
        return report

    def follow(self, plan: Plan) -> list[Bucket]:
        """Carries a plan over into buckets, in the order in which they start.

        Entries that the plan refuses fail here.
        """
        self._seen = plan.sequence
        self.stopped = self.stopped or plan.stop
        slots = list(bits(int.from_bytes(plan.hits, "little")))
        agreed = [Response(self._cache.request(slot), slot=slot) for slot in slots]
        for slot in bits(int.from_bytes(plan.voids, "little")):
            self._void(self._cache.request(slot))
        for response in plan.responses:
            if response.recipients:
                self._refuse(response)
                continue
            if response.void:
                self._void(response.request)
                continue
            agreed.append(response)
            if response.slot >= 0:
                self._cache.store(response)
        return self._buckets(agreed, plan.fusion_bytes)

    def _buckets(self, agreed: list[Response], fusion_bytes: int) -> list[Bucket]:
        """The buckets to which this rank belongs; every rank numbers them all, so that the numbers agree."""
        found = []
        for group in buckets(agreed, fusion_bytes=fusion_bytes):
            self._started += 1
            members = group[0].request.members
            if not members or self.rank in members:
                entries = tuple(self._entry(response) for response in group)
                for place, entry in enumerate(entries):
                    entry.turn = (self._started, place)
                found.append(Bucket(self._started, group[0].request, group[0].sizes, entries))
        return found

    def _entry(self, response: Response) -> Entry:
        entry = self.table.find(response.request.name)
        if response.slot >= 0:
            self._cache.adopt(response.slot, entry.request, entry.site)
        return entry

    def _void(self, request: Request) -> None:
        """Ends a filler: no rank had anything."""
        if not request.members or self.rank in request.members:
            self.table.take(request.name).handle.resolve(None)

    def _refuse(self, response: Response) -> None:
        if self.rank not in response.recipients:
            return
        entry = self.table.take(response.request.name)
        error: CoorddError = (
            ShutdownError(entry.request.name, response.left)
            if response.left
            else MismatchError.told(entry.request.name, response.attribute, response.error)
        )
        entry.handle.fail(error)
