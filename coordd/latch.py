"""The coordinator's side of a locked plan: when one is made and ended, and which reports it has overtaken. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from coordd.fusion import size
from coordd.messages import Kind, Report, Request, Response
from coordd.repetition import Repetition, Slots

__all__ = ["MOST_LINES", "Latch", "lines"]

MOST_LINES = 256
"""Buckets of a lock, at most."""
_ALONE_BYTES = 128 << 10


class _Lock(NamedTuple):
    """What a lock holds: slots as bits, and the names in them; ``number`` is the sequence of the plan that made it."""

    number: int
    slots: int
    names: frozenset[str]

    def mentioned(self, report: Report) -> bool:
        hits = int.from_bytes(report.hits, "little")
        return bool(hits & self.slots) or any(told.request.name in self.names for told in report.fresh)


_OPEN = _Lock(0, 0, frozenset())


class Latch:
    """At most one lock is in force."""

    def __init__(self, steps: int) -> None:
        """Starts open.

        Args:
            steps: equal steps that make a lock; 0 for none ever.
        """
        self._repetition = Repetition(steps)
        self._beside = Repetition(steps)
        self._active = steps > 0
        self._current = _OPEN
        self._overtaking: deque[_Lock] = deque()
        self.ended = 0
        """The lock whose end the next plan has to tell; 0 for none."""

    @property
    def slots(self) -> int:
        """The bits of what is locked: these slots must stay as they are."""
        return self._current.slots

    @property
    def watching(self) -> bool:
        """Whether a lock may be made one day."""
        return self._active

    def observe(self, groups: Iterable[Slots], changed: Iterable[int]) -> Sequence[Slots]:
        """Takes in what a plan releases, and gives to other tensors; returns the buckets to lock, if any.

        What repeats beside a lock ends it: the program has come to another phase, or does more in a step than it did
        before, and the next lock will hold that. Each time it has to repeat twice as often, for it may be something
        that no lock will hold, because it does not come in every step.
        """
        if self._current is _OPEN:
            return self._repetition.observe(groups, changed=changed)
        if self._beside.observe(groups, changed=changed):
            self._beside.judge(0)
            self.ended, self._current = self._current.number, _OPEN
        return ()

    def close(self, number: int, slots: int, names: frozenset[str]) -> None:
        """Makes a lock; what older reports say of these tensors does not count any more."""
        self._current = _Lock(number, slots, names)
        self._repetition.start_over()
        self._beside.start_over()
        self._overtaking.append(self._current)

    def hear(self, report: Report) -> None:
        """Ends the lock if a rank has broken it: it says so, or it speaks of what is locked and knows that it is."""
        lock = self._current
        if lock is _OPEN or report.seen < lock.number:
            return
        if report.unlock == lock.number or lock.mentioned(report):
            self._repetition.judge(report.lasted)
            self.ended, self._current = lock.number, _OPEN

    def end(self) -> None:
        """Ends the lock, if there is one: a rank may never submit again what is in it, so all have to announce it."""
        if self._current is not _OPEN:
            self.ended, self._current = self._current.number, _OPEN

    def tell(self) -> int:
        """Returns the lock whose end was not told yet."""
        ended, self.ended = self.ended, 0
        return ended

    def overtaken(self, seen: int) -> int:
        """The slots that do not count in a report because its rank has taken them back since."""
        slots = 0
        for lock in self._overtaking:
            slots |= lock.slots if lock.number > seen else 0
        return slots

    def overtakes(self, request: Request, seen: int) -> bool:
        """Says whether a request does not count in a report, for the same reason.

        Who joins does so after all that it had announced, so it takes that back, too.
        """
        joins = request.kind is Kind.JOIN
        return any(lock.number > seen and (joins or request.name in lock.names) for lock in self._overtaking)

    def forget(self, seen: int) -> None:
        """Drops what no report can be overtaken by any more, all ranks having seen this plan."""
        while self._overtaking and self._overtaking[0].number <= seen:
            self._overtaking.popleft()


def lines(group: Sequence[Response]) -> list[Slots]:
    """Divides a bucket as it is locked: what is large gains nothing from company, and need not wait for it."""
    large: list[Slots] = [(response.slot,) for response in group if size(response.request) >= _ALONE_BYTES]
    small = tuple(response.slot for response in group if size(response.request) < _ALONE_BYTES)
    return [small, *large] if small else large
