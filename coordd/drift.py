"""Whether numbers that were equal on all ranks still are, but for rounding: some of them are compared now and then.

A comparison is submitted with the gradients of a step and heard later, so training does not wait for it. Its requests
are transient: they take no place in the cache, and neither make nor end a locked plan.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from coordd.errors import MismatchError, ranks_text
from coordd.handles import Handle, call_site, hear_of
from coordd.messages import Kind, ReduceOp
from coordd.operations import Operations
from coordd.process_sets import ProcessSet

__all__ = ["Drift", "Quantity", "fingerprint", "is_due"]

_EVERY = 128
_SHOWN = 3
_NAN, _INFINITY = 1e305, 1e304
"""What stands for numbers that are not finite, which would compare equal to anything."""


class Quantity(NamedTuple):
    """Numbers that all ranks should have in common.

    Attributes:
        name: of a parameter or setting, in errors.
        values: the numbers on this rank.
        tolerance: how much of the largest of them ranks may differ by.
    """

    name: str
    values: tuple[float, ...]
    tolerance: float


def is_due(number: int) -> bool:
    """Says whether values are compared in the step of this number: 2, 4, 8, … 128, and then every 128th."""
    return number > 1 and (number % _EVERY == 0 or (number < _EVERY and not number & (number - 1)))


def fingerprint(text: str) -> float:
    """Makes a small whole number of a text, of which two never differ by rounding."""
    return float(1 + zlib.crc32(text.encode()) % 4093)


class Drift:
    """One comparison of some numbers of all ranks."""

    def __init__(  # noqa: PLR0913 - what is compared, and how it is told
        self,
        operations: Operations,
        quantities: Sequence[Quantity],
        *,
        size: int,
        unknown: bool,
        name: str,
        process_set: ProcessSet,
    ) -> None:
        """Starts to compare, without waiting for the answer.

        Args:
            operations: the way to the other ranks.
            quantities: what is compared. The first tells what the others are: if that differs, they are not looked at.
            size: numbers that travel; equal on all ranks, and not less than there are.
            unknown: whether this rank's numbers may differ on purpose; then nothing is compared on any rank.
            name: of the operation; equal on all ranks, and used once.
            process_set: the ranks that take part.
        """
        self._operations = operations
        self._quantities = quantities
        self._site = call_site(sys._getframe(1))  # noqa: SLF001 - the documented way to the caller
        self._mine = np.zeros(size)
        values = np.array([value for quantity in quantities for value in quantity.values])
        self._mine[: values.size] = np.nan_to_num(values, nan=_NAN, posinf=_INFINITY, neginf=-_INFINITY)
        both = np.stack([self._mine, -self._mine])
        if unknown:
            both[...] = np.nan
        self._gathering = operations.request(Kind.ALLGATHER, f"{name}.rows", np.empty((1, 1 + size)), process_set)
        self._rows: Handle[Any] | None = None
        request = operations.request(Kind.ALLREDUCE, name, both, process_set, op=ReduceOp.MAX)
        self._handle = self._submit(request, both, self._gather)

    def _submit(self, request: Any, array: np.ndarray, land: Callable[[np.ndarray], Any] | None) -> Handle[Any]:
        handle = self._operations.submit(msgspec.structs.replace(request, transient=True), array, land, site=self._site)
        handle.add_done_callback(hear_of)  # a script may end before this is heard
        return handle

    def _gather(self, both: np.ndarray) -> None:
        """Runs on the daemon's thread when the extremes are there: if they differ, all ranks send their numbers."""
        if self._differing(both[0], -both[1]):
            row = np.concatenate([[self._operations.daemon.world.rank], self._mine])[None]
            self._rows = self._submit(self._gathering, row, None)

    def _differing(self, most: np.ndarray, least: np.ndarray) -> list[tuple[str, int]]:
        """Finds what differs, given the extremes: names, and for each the place of a number that does."""
        found: list[tuple[str, int]] = []
        start = 0
        for name, values, tolerance in self._quantities:
            stop = start + len(values)
            scale = max(np.abs(most[start:stop]).max(initial=0.0), np.abs(least[start:stop]).max(initial=0.0))
            apart = most[start:stop] - least[start:stop] > tolerance * scale  # never where one is NaN
            if apart.any():
                found.append((name, start + int(apart.argmax())))
                if not start:
                    break
            start = stop
        return found

    def differences(self) -> str:
        """Hears the others, and says what differs and on which ranks; empty if nothing does. The same on all ranks.

        Raises:
            CoorddError: the comparison has failed.
        """
        self._handle.result()
        if self._rows is None:
            return ""
        rows = np.asarray(self._rows.result())
        found = self._differing(rows[:, 1:].max(axis=0), rows[:, 1:].min(axis=0))
        told = [name + _by_rank(rows[:, 0], rows[:, 1 + place]) for name, place in found[:_SHOWN]]
        rest = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return ", ".join(told) + rest

    def check(self, caller: str, advice: str) -> None:
        """Hears the others.

        Args:
            caller: the function to which the numbers belong.
            advice: what usually causes this, and what to do.

        Raises:
            MismatchError: on all ranks: numbers differ.
        """
        if differences := self.differences():
            text = f"the ranks of a {caller} no longer have the same values of {differences}: {advice}"
            raise MismatchError.told(caller, "values", text)


def _by_rank(ranks: np.ndarray, values: np.ndarray) -> str:
    """Tells which ranks have which value."""
    groups: dict[str, list[int]] = {}
    for rank, value in zip(ranks.tolist(), values.tolist(), strict=True):
        groups.setdefault("NaN" if value == _NAN else f"{value:.9g}", []).append(int(rank))
    told = [f"{value} on {ranks_text(group)}" for value, group in groups.items()]
    rest = "; …" if len(told) > _SHOWN else ""
    return f" ({'; '.join(told[:_SHOWN])}{rest})"
