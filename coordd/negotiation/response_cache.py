"""The response cache: tensors that all ranks know travel as single bits.

Invariant: only plans change it, so every rank and the coordinator hold the same cache after the same plan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from coordd.negotiation.group_names import group_of
from coordd.ops.messages import Kind, Request, Response

__all__ = ["ResponseCache"]

_UNKNOWN = object()
_CACHED_KINDS = frozenset(Kind) - {Kind.ALLGATHER, Kind.JOIN}


class ResponseCache:
    """Slots for the most recently answered requests.

    A tensor keeps its slot when its shape changes. When no slot is free, the least recently used slot that is not
    pinned is reused.
    """

    def __init__(self, capacity: int) -> None:
        """Creates an empty cache of ``capacity`` slots; 0 turns it off."""
        self._capacity = capacity
        self._requests: list[Request] = []
        self._used: OrderedDict[int, None] = OrderedDict()
        self._sites: list[object] = []
        self._slots: dict[str, int] = {}
        self._groups: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def named(self, said: str) -> list[str]:
        """Returns the cached names that belong to an operation or a group."""
        return [*([said] if said in self._slots else ()), *sorted(self._groups.get(said, ()))]

    def slot(self, request: Request) -> int:
        """Returns the slot that holds exactly this request; -1 if there is none."""
        slot = self._slots.get(request.name, -1)
        if slot < 0:
            return -1
        known = self._requests[slot]
        return slot if known is request or known == request else -1

    def slot_of(self, name: str) -> int:
        """Returns the slot of a name, whatever its request; -1 if there is none."""
        return self._slots.get(name, -1)

    def request(self, slot: int) -> Request:
        """Returns the request in a slot."""
        return self._requests[slot]

    def site(self, slot: int) -> object:
        """Returns the line where the caller submits this slot's request; an object equal to nothing if unknown."""
        return self._sites[slot]

    def place(self, request: Request, *, pinned: int = 0) -> int:
        """Returns the slot for a newly answered request; -1 if it gets none.

        Args:
            request: the answered request.
            pinned: bit mask of slots that must not change.
        """
        if not self._capacity or request.transient or request.kind not in _CACHED_KINDS:
            return -1
        known = self._slots.get(request.name, -1)
        if known >= 0:
            return -1 if pinned >> known & 1 else known
        if len(self._requests) < self._capacity:
            return len(self._requests)
        return next((slot for slot in self._used if not pinned >> slot & 1), -1)

    def touch(self, slots: Iterable[int]) -> None:
        """Notes that a plan used these slots; only a cache whose `place` is called needs to know."""
        for slot in slots:
            self._used.move_to_end(slot)

    def store(self, response: Response) -> Request | None:
        """Stores an answered request in the slot that the plan gave it.

        Returns:
            the evicted request, if any.
        """
        slot, request = response.slot, response.request
        if slot == len(self._requests):
            self._requests.append(request)
            self._used[slot] = None
            self._sites.append(_UNKNOWN)
            self._slots[request.name] = slot
            self._enter_group(request.name)
            return None
        gone = self._requests[slot]
        if gone.name != request.name:
            self._leave_group(gone.name)
            self._enter_group(request.name)
        del self._slots[gone.name]
        self._requests[slot] = request
        self._used.move_to_end(slot)
        self._sites[slot] = _UNKNOWN
        self._slots[request.name] = slot
        return gone

    def _enter_group(self, name: str) -> None:
        if group := group_of(name)[0]:
            self._groups.setdefault(group, set()).add(name)

    def _leave_group(self, name: str) -> None:
        if group := group_of(name)[0]:
            self._groups[group].discard(name)
            if not self._groups[group]:
                del self._groups[group]

    def adopt(self, slot: int, request: Request, site: object) -> None:
        """Keeps the caller's own equal object, so that the next look-up compares by identity, and its site."""
        if self._requests[slot] == request:
            self._requests[slot] = request
            self._sites[slot] = site
