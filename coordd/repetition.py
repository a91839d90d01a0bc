"""Notices that every step does the same: the sign that a plan can be locked. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Repetition", "Slots"]

_MOST = 1024

Slots = tuple[int, ...]


class Repetition:
    """Divides what is released into periods, and counts how many in a row were equal.

    A period ends when a slot is released for the second time. The one that is going on is equal to those before as soon
    as it has released the same slots.
    """

    def __init__(self, steps: int) -> None:
        """Starts with nothing seen.

        Args:
            steps: equal periods that make a lock; one alone repeats nothing, so at least two.
        """
        self._least = max(2, steps)
        self._needed = self._least
        self._last: dict[int, None] = {}
        self._equal = 0
        self._now: dict[int, None] = {}
        self._groups: list[Slots] = []

    @property
    def needed(self) -> int:
        """How many equal periods make a lock at present."""
        return self._needed

    def observe(self, groups: Iterable[Slots], *, changed: Iterable[int] = ()) -> Sequence[Slots]:
        """Takes in what one plan releases.

        Args:
            groups: slots by bucket, in the order of the plan.
            changed: slots that the plan gives to another tensor.

        Returns:
            the buckets of the current period if it is the last that was needed, else nothing.
        """
        for group in groups:
            if any(slot in self._now for slot in group):
                self._end_period()
            self._now.update(dict.fromkeys(group))
            self._groups.append(group)
        if any(slot in self._now or slot in self._last for slot in changed):
            self.start_over()
        repeated = self._equal >= self._needed - 1 and self._now.keys() == self._last.keys()
        return self._groups if repeated else ()

    def judge(self, lasted: int) -> None:
        """Learns from a lock that was broken after so many steps.

        If it did not even last as long as it took to make, the next one takes twice as long, so that a program that
        does not fit is left alone; otherwise it was worth it.
        """
        self._needed = self._least if lasted >= self._needed else min(_MOST, 2 * self._needed)
        self.start_over()

    def _end_period(self) -> None:
        self._equal = self._equal + 1 if self._now.keys() == self._last.keys() else 1
        self._last, self._now, self._groups = self._now, {}, []

    def start_over(self) -> None:
        """Forgets what it has seen."""
        self._last, self._now, self._groups, self._equal = {}, {}, [], 0
