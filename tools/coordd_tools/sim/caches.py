"""A look inside the protocol's objects: are all caches the same, and is nothing left behind?"""
# ruff: noqa: SLF001 - looking inside is what this file is for

from __future__ import annotations

from coordd.cache import ResponseCache
from coordd.coordinator import Coordinator
from coordd.member import Member
from coordd.messages import Request
from coordd_tools.sim.ledger import demand

__all__ = ["Caches", "leftovers"]

Content = tuple[Request, ...]


class Caches:
    """What the coordinator's cache held after each plan."""

    def __init__(self) -> None:
        self._after: dict[int, Content] = {}

    def record(self, coordinator: Coordinator, sequence: int) -> None:
        """Notes the coordinator's cache after a plan."""
        self._after[sequence] = _content(coordinator._negotiator._cache)

    def compare(self, member: Member, sequence: int) -> None:
        """Insists that a member that has followed the plan has the same."""
        own, common = _content(member._cache), self._after[sequence]
        demand(own == common, f"after plan {sequence} rank {member.rank} has the cache {own}, the coordinator {common}")


def _content(cache: ResponseCache) -> Content:
    return tuple(cache._requests)


def leftovers(coordinator: Coordinator) -> dict[str, int]:
    """Counts what the coordinator still holds, by the name of the table."""
    mind = coordinator._negotiator
    return {
        "announced": mind._roll.slots.bit_count(),
        "groups": sum(1 for _ in mind._roll),
        "table": len(mind._table),
        "complete": len(mind._complete),
        "refused": len(mind._refused),
        "poisoned": len(mind._poisoned),
        "replaced": len(mind._replaced),
        "sites": len(mind._sites),
        "sets": len(mind._slots_of),
    }
