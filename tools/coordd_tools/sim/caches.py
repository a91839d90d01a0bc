"""Inspects protocol objects: whether all response caches are equal, and whether any state is left at the end."""
# ruff: noqa: SLF001 - looking inside is what this file is for

from __future__ import annotations

from collections.abc import Iterable

from coordd.negotiation.coordinator import Coordinator
from coordd.negotiation.response_cache import ResponseCache
from coordd.negotiation.tensor_table import Entry
from coordd.negotiation.wire import bits
from coordd.negotiation.worker import Member
from coordd.ops.messages import Report, Request
from coordd_tools.sim.ledger import demand

__all__ = ["Caches", "leftovers", "mentioned", "told"]

Content = tuple[Request, ...]


class Caches:
    """The contents of the coordinator's response cache after each plan."""

    def __init__(self) -> None:
        self._after: dict[int, Content] = {}

    def record(self, coordinator: Coordinator, sequence: int) -> None:
        """Records the coordinator's cache after a plan."""
        self._after[sequence] = _content(coordinator._negotiator._cache)

    def names(self, sequence: int, slots: Iterable[Iterable[int]]) -> frozenset[str]:
        """Returns the names of the tensors in slots of the cache after a plan."""
        return frozenset(self._after[sequence][slot].name for group in slots for slot in group)

    def compare(self, member: Member, sequence: int) -> None:
        """Checks that the cache of a member that has followed a plan equals the coordinator's.

        Raises:
            Violation: the caches differ.
        """
        own, common = _content(member._cache), self._after[sequence]
        demand(own == common, f"after plan {sequence} rank {member.rank} has the cache {own}, the coordinator {common}")


def _content(cache: ResponseCache) -> Content:
    return tuple(cache._requests)


def mentioned(coordinator: Coordinator, report: Report) -> set[str]:
    """Returns the names of the tensors in a report, as the coordinator's present cache decodes it."""
    cache = coordinator._negotiator._cache
    hits = {cache.request(slot).name for slot in bits(int.from_bytes(report.hits, "little"))}
    return hits | {told.request.name for told in report.fresh}


def told(member: Member, report: Report) -> list[Entry]:
    """Returns the entries in a member's report."""
    hits = [member._cache.request(slot).name for slot in bits(int.from_bytes(report.hits, "little"))]
    return [member.table.find(name) for name in [*hits, *(told.request.name for told in report.fresh)]]


def leftovers(coordinator: Coordinator) -> dict[str, int]:
    """Counts the entries that the coordinator still holds, by the name of the table."""
    mind = coordinator._negotiator
    return {
        "announced": mind._roll.slots.bit_count(),
        "groups": sum(1 for _ in mind._roll),
        "table": len(mind._table),
        "complete": len(mind._complete),
        "refused": len(mind._refused),
        "absent": int(bool(mind._absence)),
        "calls": len(mind._refusals._calls),
        "parts": len(mind._parts._parts),
        "owed": len(mind._owed._refusals),
        "replaced": len(mind._replaced),
        "sites": len(mind._sites),
        "sets": len(mind._slots_of),
        "locks": len(mind._latch._overtaking),
    }
