"""Detects repeated steps, the condition for locking a plan. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Repetition", "Slots"]

_MOST = 1024

Slots = tuple[int, ...]


class _Mark(NamedTuple):
    """A position between two buckets: the slots of the step that ends here, and its number of repetitions in a row."""

    step: frozenset[int]
    row: int


class Repetition:
    """Checks at the end of each plan whether the last buckets divide into enough steps with the same slots.

    A step reaches back as far as no slot comes twice. Where the program's own steps begin need not be known.
    """

    def __init__(self, steps: int) -> None:
        """Starts with nothing seen.

        Args:
            steps: equal steps that make a lock; one alone repeats nothing, so at least two.
        """
        self._least = max(2, steps)
        self.needed = self._least
        """How many equal steps make a lock at present."""
        self._groups: list[Slots] = []
        self._marks = [_Mark(frozenset(), 0)]
        self._step: set[int] = set()

    def observe(self, groups: Iterable[Slots], *, changed: Iterable[int] = ()) -> Sequence[Slots]:
        """Records the buckets that one plan releases.

        Args:
            groups: slots by bucket, in the order of the plan.
            changed: slots that the plan gives to another tensor.

        Returns:
            the buckets of the last step if that completes the needed repetitions, else nothing.
        """
        for group in groups:
            self._append(group)
        if not self._step.isdisjoint(changed):
            self.start_over()
        return self._groups if self._marks[-1].row >= self.needed else ()

    def judge(self, lasted: int) -> None:
        """Learns from a lock that was broken after ``lasted`` steps.

        If it did not even last as long as it took to make, the next one needs twice as many steps, so that a program
        that does not repeat is left alone; otherwise the lock was worth it.
        """
        self.needed = self._least if lasted >= self.needed else min(_MOST, 2 * self.needed)
        self.start_over()

    def _append(self, group: Slots) -> None:
        """Appends a bucket to the step, and drops its start up to any repeated slot; marks[n] is before groups[n]."""
        while not self._step.isdisjoint(group):
            self._step.difference_update(self._groups.pop(0))
            del self._marks[0]
        self._groups.append(group)
        self._step.update(group)
        before = self._marks[0]
        row = before.row + 1 if before.step == self._step else 1
        self._marks.append(_Mark(frozenset(self._step), row))

    def start_over(self) -> None:
        """Forgets the steps seen so far."""
        self._groups, self._marks, self._step = [], [_Mark(frozenset(), 0)], set()
