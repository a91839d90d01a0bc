"""Checks now and then that values that were equal on all ranks still are, apart from rounding.

A comparison is submitted with the gradients of a step and evaluated later, so training does not wait for it. Its
requests are transient: they take no slot in the cache, and neither create nor end a locked plan.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from coordd.daemon.operations import Operations
from coordd.errors import MismatchError, ranks_text
from coordd.ops.handles import Handle, call_site, hear_of
from coordd.ops.messages import Kind, ReduceOp
from coordd.ops.process_sets import ProcessSet
from coordd.parallel.fingerprint import ROUNDING

__all__ = ["UNSEEN", "Drift", "Drifts", "Quantity", "Trained", "fingerprint", "is_due", "places"]

_EVERY = 128
_SHOWN = 3
_NAN, _INFINITY = 1e305, 1e304
"""Replacements for numbers that are not finite, which would compare equal to anything."""
_PARAMETERS, _VALUES, _SETTINGS = 8, 8, 63
"""Numbers of parameters, values of each, and settings in one comparison; the next comparison takes others."""
_SAMPLE, _SUMS = 4096, 8
"""How many more values of each parameter are read, and in how many sums they are compared."""
_TURN = (5**0.5 - 1) / 2
"""Part of the distance between two values by which the next comparison takes others; never the same ones again."""
_OF_SETTINGS = 1e-4
"""Different processors may compute a schedule's cosine with different last bits."""
_CAUSES = (
    "usual causes are a learning rate scheduler that follows a metric of one rank only, gradients that one rank clips, "
    "scales or replaces, a layer that one rank freezes (requires_grad), a step that was made or failed on one rank "
    "only, and a checkpoint that one rank has loaded alone. Do the same on all ranks, or call"
)
UNSEEN = object()
"""Placeholder for a setting whose value this rank cannot read."""

Item = TypeVar("Item")


class Quantity(NamedTuple):
    """Numbers that should be equal on all ranks.

    Attributes:
        name: of a parameter or setting, for errors; empty for unused room.
        values: the numbers on this rank, equally many on all; None for one that cannot be read here, and is not
            compared.
        tolerance: allowed difference between ranks, relative to the largest of them and of ``reference``.
        reference: largest earlier magnitude, so that rounding errors of a sum near zero are no difference.
        between: the tolerance between ranks of different frameworks, if it is larger.
        decides: whether the quantities after it are ignored if it differs.
    """

    name: str
    values: tuple[float | None, ...]
    tolerance: float
    reference: float = 0.0
    between: float = 0.0
    decides: bool = False


class Trained(NamedTuple):
    """A parameter that is compared by some of its values.

    Attributes:
        name: for errors.
        what: its shape and dtype, equal on all ranks.
        size: number of values; 0 if they cannot be compared.
        tolerance: allowed difference between ranks due to rounding, relative to the largest value.
        read: returns the values at flat indices of the parameter; None if this rank cannot read them.
    """

    name: str
    what: str
    size: int
    tolerance: float
    read: Callable[[np.ndarray], Sequence[float] | np.ndarray | None]


def is_due(number: int) -> bool:
    """Returns whether values are compared in this step: 2, 4, 8, … 128, and then every 128th."""
    return number > 1 and (number % _EVERY == 0 or (number < _EVERY and not number & (number - 1)))


def fingerprint(text: str) -> float:
    """Hashes a text to a small whole number, so that two different ones never differ by rounding only."""
    return float(1 + zlib.crc32(text.encode()) % 4093)


def places(size: int, count: int) -> np.ndarray:
    """Returns up to ``count`` flat indices, spread over an array of ``size`` elements."""
    return np.unique(np.linspace(0, max(0, size - 1), min(size, count)).astype(np.intp))


def places_in_turn(size: int, count: int, turn: int) -> np.ndarray:
    """Returns up to ``count`` flat indices, evenly spread over an array of ``size`` elements, others in each turn."""
    count = min(size, count)
    return ((np.arange(count) + turn * _TURN % 1) * (size / count)).astype(np.intp)


class Drifts:
    """The comparisons of one optimizer, each of a part of its parameters and settings, in turn."""

    size = 3 + 2 * (1 + _SETTINGS) + _PARAMETERS * (1 + _VALUES + 1 + _SUMS)
    """Most numbers in one comparison: the framework, and each quantity with its reference."""

    def __init__(self, operations: Operations, *, framework: str, prefix: str, process_set: ProcessSet) -> None:
        """Prepares the comparisons.

        Args:
            operations: the operations of this rank.
            framework: of this rank; values may differ more between different ones.
            prefix: prefix of the names of the operations.
            process_set: the ranks that take part.
        """
        self._operations = operations
        self._framework = framework
        self._prefix = prefix
        self._process_set = process_set
        self._largest: dict[str, float] = {}

    def begin(
        self,
        trained: Sequence[Trained],
        settings: Iterable[tuple[str, Any]] | None,
        *,
        step: int,
        unknown: bool = False,
    ) -> Drift:
        """Starts a comparison, without waiting for the result.

        Args:
            trained: all parameters, in the same order on all ranks.
            settings: hyperparameters by name; None if this rank does not know those of its last step.
            step: the number of the step; equal on all ranks.
            unknown: whether this rank's values may differ on purpose; then nothing is compared on any rank.
        """
        turn = step.bit_length() - 2 if step < _EVERY else 5 + step // _EVERY  # equal on all ranks, after a join too
        what = fingerprint(repr([each.what for each in trained]))
        quantities = [
            Quantity("the trained parameters and their groups, as a checksum", (what,), 0.0, decides=True),
            *self._settings(None if settings is None else [*settings], turn),
            *(found for each in _window(trained, turn, _PARAMETERS) if each.size for found in self._values(each, turn)),
        ]
        return Drift(
            self._operations,
            quantities,
            size=self.size,
            unknown=unknown,
            name=f"{self._prefix}values.{step}",
            process_set=self._process_set,
            framework=self._framework,
        )

    def _settings(self, settings: Sequence[tuple[str, Any]] | None, turn: int) -> list[Quantity]:
        """Selects some settings, padded to a fixed number, so that later numbers have the same offset on all ranks."""
        if settings is None:
            return [Quantity("", (None,), 0.0)] * (1 + _SETTINGS)
        what = fingerprint(repr([name for name, _ in settings]))
        chosen = _window(settings, turn, _SETTINGS)
        quantities = [Quantity("the names of hyperparameters, as a checksum", (what,), 0.0, decides=True)]
        for name, value in chosen:
            number = _number(value)
            quantities.append(Quantity(name, (number,), _OF_SETTINGS, self._reference(f" {name}", [number])))
        return [*quantities, *[Quantity("", (None,), 0.0)] * (_SETTINGS - len(chosen))]

    def _values(self, parameter: Trained, turn: int) -> list[Quantity]:
        """Reads some values of a parameter, and sums of the magnitudes of more, spread over all of it.

        Single values show small differences everywhere, which would cancel in sums; sums show a difference in a small
        part of the parameter.
        """
        chosen = places_in_turn(parameter.size, _SAMPLE, turn)
        shown, count = places(chosen.size, _VALUES), min(chosen.size, _SUMS)
        found = parameter.read(chosen)
        if found is None:
            values, sums = (None,) * shown.size, (None,) * count
        else:
            read = np.asarray(found, np.float64)
            values = tuple(read[shown].tolist())
            sums = tuple(np.abs(part).sum().item() for part in np.array_split(read, count))
        name, tolerance = parameter.name, parameter.tolerance
        return [
            Quantity(name, values, tolerance, self._reference(name, values), between=ROUNDING),
            Quantity(name, sums, tolerance, self._reference(f"{name} sums", sums), between=ROUNDING),
        ]

    def _reference(self, key: str, values: Iterable[float | None]) -> float:
        """Returns the largest magnitude that these numbers have had on this rank."""
        known = [abs(value) for value in values if value is not None and np.isfinite(value)]
        found = self._largest[key] = max([self._largest.get(key, 0.0), *known])
        return found


class Drift:
    """One comparison of some numbers of all ranks."""

    def __init__(  # noqa: PLR0913 - what is compared, and how it is reported
        self,
        operations: Operations,
        quantities: Sequence[Quantity],
        *,
        size: int,
        unknown: bool,
        name: str,
        process_set: ProcessSet,
        framework: str = "",
    ) -> None:
        """Starts the comparison, without waiting for the result.

        Args:
            operations: the operations of this rank.
            quantities: what is compared; equally many numbers on all ranks, up to a quantity that ``decides`` and
                differs.
            size: length of the compared array; equal on all ranks, and at least 1 plus one for each value and one more
                for each quantity.
            unknown: whether this rank's numbers may differ on purpose; then nothing is compared on any rank.
            name: of the operation; equal on all ranks, and used once.
            process_set: the ranks that take part.
            framework: of this rank.
        """
        self._operations = operations
        self._quantities = quantities
        self._site = call_site(sys._getframe(1))  # noqa: SLF001 - the documented way to the caller
        self._mine = np.zeros(size)
        numbers = [fingerprint(framework), *(one for each in quantities for one in (*each.values, each.reference))]
        values = np.array([0.0 if number is None else number for number in numbers])
        self._mine[: values.size] = np.nan_to_num(values, nan=_NAN, posinf=_INFINITY, neginf=-_INFINITY)
        self._mine[[place for place, number in enumerate(numbers) if number is None]] = np.nan
        both = np.stack([self._mine, -self._mine])
        if unknown:
            both[...] = np.nan
        self._gathering = operations.request(Kind.ALLGATHER, f"{name}.rows", np.empty((1, 1 + size)), process_set)
        self._rows: Handle[Any] | None = None
        request = operations.request(Kind.ALLREDUCE, name, both, process_set, op=ReduceOp.MAX)
        self._begin = functools.partial(self._submit, request, both, self._gather)
        self._handle = self._begin()

    def begin_again(self) -> None:
        """Takes part once more if the comparison failed because of a deadlock between ranks."""
        if self._handle.lost:
            self._handle = self._begin()

    def _submit(self, request: Any, array: np.ndarray, land: Callable[[np.ndarray], Any] | None) -> Handle[Any]:
        handle = self._operations.submit(msgspec.structs.replace(request, transient=True), array, land, site=self._site)
        handle.add_done_callback(hear_of)  # a script may end before the result is read
        return handle

    def _gather(self, both: np.ndarray) -> None:
        """Sends this rank's numbers to all ranks if the extremes differ; runs on the daemon's thread."""
        if self._differing(both[0], -both[1]):
            row = np.concatenate([[self._operations.daemon.world.rank], self._mine])[None]
            self._rows = self._submit(self._gathering, row, None)

    def _differing(self, most: np.ndarray, least: np.ndarray) -> list[tuple[str, int]]:
        """Returns the differing quantities, given the extremes: each one's name and the index of a differing number."""
        found: dict[str, int] = {}
        mixed, start = bool(most[0] > least[0]), 1
        for each in self._quantities:
            stop = start + len(each.values)
            scale = max(np.abs(most[start : stop + 1]).max(), np.abs(least[start : stop + 1]).max())  # with reference
            tolerance = max(each.tolerance, each.between) if mixed else each.tolerance
            apart = most[start:stop] - least[start:stop] > tolerance * scale  # False where either is NaN
            if each.name and apart.any():
                found.setdefault(each.name, start + int(apart.argmax()))
                if each.decides:
                    break
            start = stop + 1
        return [*found.items()]

    def differences(self) -> str:
        """Waits for the result; describes what differs and on which ranks, "" if nothing does. Equal on all ranks.

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

    def check(self, caller: str, remedy: str) -> None:
        """Waits for the result, and raises an error if numbers differ.

        Args:
            caller: the function that the numbers belong to.
            remedy: the functions that make values equal again, as the end of a sentence.

        Raises:
            MismatchError: on all ranks: numbers differ.
        """
        if differences := self.differences():
            text = f"the ranks of a {caller} no longer have the same values of {differences}: {_CAUSES} {remedy}"
            raise MismatchError.told(caller, "values", f"{text}; init(check_parameters=False) lets them differ")


def _by_rank(ranks: np.ndarray, values: np.ndarray) -> str:
    """Describes which ranks have which value."""
    groups: dict[str, list[int]] = {}
    for rank, value in zip(ranks.tolist(), values.tolist(), strict=True):
        groups.setdefault("NaN" if value == _NAN else f"{value:.9g}", []).append(int(rank))
    told = [f"{value} on {ranks_text(group)}" for value, group in groups.items()]
    rest = "; …" if len(told) > _SHOWN else ""
    return f" ({'; '.join(told[:_SHOWN])}{rest})"


def _window(items: Sequence[Item], turn: int, count: int) -> Sequence[Item]:
    """Returns ``count`` of the items, others in each turn."""
    if len(items) <= count:
        return items
    first = turn * count % len(items)
    return [items[(first + place) % len(items)] for place in range(count)]


def _number(value: Any) -> float | None:
    """Converts a setting to a number."""
    if value is UNSEEN:
        return None
    return float(value) if isinstance(value, Real) else fingerprint(repr(value))
