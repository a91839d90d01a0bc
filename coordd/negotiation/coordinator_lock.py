"""The coordinator's side of a locked plan: creates and ends locks, and discards reports that a lock overtakes. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from coordd.negotiation.cycle_detector import Repetition, Slots
from coordd.negotiation.fusion import size
from coordd.ops.messages import Kind, Report, Request, Response

__all__ = ["MOST_LINES", "Latch", "lines"]

MOST_LINES = 256
"""Maximum number of buckets in a lock."""
_ALONE_BYTES = 128 << 10


class _Lock(NamedTuple):
    """A lock: its slots as a bit mask, their names, and as ``number`` the sequence number of its plan."""

    number: int
    slots: int
    names: frozenset[str]

    def mentioned(self, report: Report) -> bool:
        hits = int.from_bytes(report.hits, "little")
        return bool(hits & self.slots) or any(told.request.name in self.names for told in report.fresh)


_OPEN = _Lock(0, 0, frozenset())


class Latch:
    """The locked plan on the coordinator; at most one lock is in force."""

    def __init__(self, steps: int) -> None:
        """Starts without a lock.

        Args:
            steps: equal steps that make a lock; 0 disables locking.
        """
        self._repetition = Repetition(steps)
        self._beside = Repetition(steps)
        self._active = steps > 0
        self._current = _OPEN
        self._overtaking: deque[_Lock] = deque()
        self.ended = 0
        """The number of the lock whose end the next plan announces; 0 for none."""

    @property
    def slots(self) -> int:
        """Bit mask of the locked slots, whose contents must not change."""
        return self._current.slots

    @property
    def watching(self) -> bool:
        """Whether locking is enabled."""
        return self._active

    def observe(self, groups: Iterable[Slots], changed: Iterable[int]) -> Sequence[Slots]:
        """Records the released buckets and the reassigned slots of a plan; returns the buckets to lock, if any.

        Repetition beside a lock ends the lock: the program is in another phase, or does more in a step than before, and
        the next lock will include that. Each time, it has to repeat twice as often, because an operation that does not
        come in every step can never be locked.
        """
        if self._current is _OPEN:
            return self._repetition.observe(groups, changed=changed)
        if self._beside.observe(groups, changed=changed):
            self._beside.judge(0)
            self.ended, self._current = self._current.number, _OPEN
        return ()

    def close(self, number: int, slots: int, names: frozenset[str]) -> None:
        """Creates a lock; entries of older reports for these tensors no longer count."""
        self._current = _Lock(number, slots, names)
        self._repetition.start_over()
        self._beside.start_over()
        self._overtaking.append(self._current)

    def hear(self, report: Report) -> None:
        """Ends the lock if a rank reports it broken, or knows it and still announces a locked tensor."""
        lock = self._current
        if lock is _OPEN or report.seen < lock.number:
            return
        if report.unlock == lock.number or lock.mentioned(report):
            self._repetition.judge(report.lasted)
            self.ended, self._current = lock.number, _OPEN

    def end(self) -> None:
        """Ends the lock, if any: a rank may never submit the locked tensors again, so all ranks must announce them."""
        if self._current is not _OPEN:
            self.ended, self._current = self._current.number, _OPEN

    def tell(self) -> int:
        """Returns the number of the lock whose end is not announced yet, and clears it; 0 for none."""
        ended, self.ended = self.ended, 0
        return ended

    def overtaken(self, seen: int) -> int:
        """Returns the slots that do not count in a report, because its rank takes them back once it sees the lock."""
        slots = 0
        for lock in self._overtaking:
            slots |= lock.slots if lock.number > seen else 0
        return slots

    def overtakes(self, request: Request, seen: int) -> bool:
        """Returns whether a request does not count in a report because its rank takes it back.

        A rank joins after everything that it has announced, so it takes its join back, too.
        """
        joins = request.kind is Kind.JOIN
        return any(lock.number > seen and (joins or request.name in lock.names) for lock in self._overtaking)

    def forget(self, seen: int) -> None:
        """Drops the locks that all ranks have seen: they overtake no further report."""
        while self._overtaking and self._overtaking[0].number <= seen:
            self._overtaking.popleft()


def lines(group: Sequence[Response]) -> list[Slots]:
    """Divides a bucket for the lock: large tensors gain nothing from fusion, so each gets its own bucket."""
    large: list[Slots] = [(response.slot,) for response in group if size(response.request) >= _ALONE_BYTES]
    small = tuple(response.slot for response in group if size(response.request) < _ALONE_BYTES)
    return [small, *large] if small else large
