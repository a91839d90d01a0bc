"""Differentiable operations for autograd, as pairs of functions on arrays: the operation and its gradient.

A plugin wraps them in its framework's autograd; see docs/writing-a-plugin.md. Gradients are Horovod's: those of the
mean of the loss over the ranks. The gradients of a named operation have a name too, so that ranks whose backward passes
differ get an error, instead of a sum of unrelated gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from coordd.daemon.operations import Operations
from coordd.ops.arguments import backward_names, no_gradient
from coordd.ops.handles import wait_all
from coordd.ops.messages import ReduceOp
from coordd.ops.process_sets import ProcessSet

__all__ = ["Allgather", "Allreduce", "Alltoall", "Arrays", "Broadcast", "Differentiable", "Reducescatter", "Source"]

Arrays = tuple[np.ndarray, ...]
Names = Sequence[str | None]
Source = Callable[[], Operations]
"""Returns the operations of the daemon that runs when the function is called."""

_LINEAR = {ReduceOp.AVERAGE, ReduceOp.AVERAGE_PRESENT, ReduceOp.SUM, ReduceOp.ADASUM}


class Differentiable(Protocol):
    """One operation on one or several arrays, which it does not change."""

    @property
    def ragged(self) -> bool:
        """Whether results may differ from the arrays in the number of rows; the rest of the shape is equal."""
        ...

    def check(self) -> None:
        """Rejects operations without a gradient; called when a gradient is requested.

        Raises:
            ArgumentError: it has none.
        """
        ...

    def forward(self, *arrays: np.ndarray) -> tuple[Arrays, np.ndarray]:
        """Runs the operation; returns the results, one per array, and the integers that `backward` needs."""
        ...

    def backward(self, kept: np.ndarray, *gradients: np.ndarray) -> Arrays:
        """Returns the gradients of the arrays, given those of the results."""
        ...

    def double_backward(self, kept: np.ndarray, *gradients: np.ndarray) -> Arrays:
        """Differentiates `backward`: returns the gradients of its inputs, given those of what it returned."""
        ...


class _Call:
    """Common base of the operations."""

    ragged = True

    def __init__(self, source: Source, names: Names, process_set: ProcessSet) -> None:
        self._source = source
        self._names = names
        self._process_set = process_set

    def check(self) -> None:
        """Accepts everything."""

    def _each(self, names: Names, start: Callable[..., Any], arrays: Sequence[np.ndarray], **details: Any) -> list[Any]:
        """Starts one operation per array, all or none of them, and waits for all."""
        with self._source().together(names):
            handles = [
                start(array, name=name, process_set=self._process_set, **details)
                for array, name in zip(arrays, names, strict=True)
            ]
        wait_all(handles)
        return [handle.result() for handle in handles]

    def _reduced(self, names: Names, arrays: Sequence[np.ndarray], **details: Any) -> Arrays:
        copies = [np.array(array, order="C") for array in arrays]
        return tuple(self._each(names, self._source().allreduce, copies, **details))

    def _gathered(self, names: Names, arrays: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Gathers arrays; returns each with the number of rows of every member."""
        return self._each(names, self._source().allgather, arrays, sized=True, land=_pair)

    def _place(self) -> int:
        """Returns this rank's index among the members."""
        world = self._source().daemon.world
        return (self._process_set.ranks or range(world.size)).index(world.rank)

    def _members(self) -> int:
        return self._process_set.count(self._source().daemon.world.size)


def _pair(rows: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return rows, sizes


_NOTHING = np.empty(0, np.int64)


class Allreduce(_Call):
    """The gradient of a reduction is the same reduction of the gradients."""

    ragged = False

    def __init__(  # noqa: PLR0913 - one argument per option of the operation
        self,
        source: Source,
        names: Names,
        process_set: ProcessSet,
        *,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        super().__init__(source, names, process_set)
        self._op = op
        self._details = {"op": op, "prescale": prescale, "postscale": postscale}

    def check(self) -> None:
        """Rejects reductions that are not linear."""
        if self._op not in _LINEAR:
            raise no_gradient(self._op)

    def forward(self, *arrays: np.ndarray) -> tuple[Arrays, np.ndarray]:
        """Reduces copies of the arrays."""
        return self._reduced(self._names, arrays, **self._details), _NOTHING

    def backward(self, kept: np.ndarray, *gradients: np.ndarray) -> Arrays:  # noqa: ARG002 - nothing was kept
        """Reduces the gradients, too."""
        return self._reduced(backward_names(self._names), gradients, **self._details)

    def double_backward(self, kept: np.ndarray, *gradients: np.ndarray) -> Arrays:  # noqa: ARG002 - nothing was kept
        """Reduces the given gradients likewise."""
        return self._reduced(_twice(self._names), gradients, **self._details)


class Allgather(_Call):
    """The gradient is this rank's rows of the averaged gradients."""

    def forward(self, *arrays: np.ndarray) -> tuple[Arrays, np.ndarray]:
        """Gathers each array from all ranks; keeps the start and stop of this rank's rows, and the number of all."""
        found = self._gathered(self._names, arrays)
        starts = [sizes[: self._place()].sum() for _, sizes in found]
        stops = [start + len(array) for start, array in zip(starts, arrays, strict=True)]
        counts = [len(rows) for rows, _ in found]
        return tuple(rows for rows, _ in found), np.array([starts, stops, counts], np.int64)

    def backward(self, kept: np.ndarray, *gradients: np.ndarray) -> Arrays:
        """Averages the gradients and returns this rank's rows."""
        averaged = self._reduced(backward_names(self._names), gradients, op=ReduceOp.AVERAGE)
        return tuple(rows[start:stop] for rows, start, stop in zip(averaged, *kept[:2], strict=True))

    def double_backward(self, kept: np.ndarray, *gradients: np.ndarray) -> Arrays:
        """Averages the gradients, each at this rank's rows."""
        whole = [
            np.zeros((count, *array.shape[1:]), array.dtype) for array, count in zip(gradients, kept[2], strict=True)
        ]
        for array, given, start, stop in zip(whole, gradients, *kept[:2], strict=True):
            array[start:stop] = given
        return self._reduced(_twice(self._names), whole, op=ReduceOp.AVERAGE)


class Broadcast(_Call):
    """The gradient is averaged on the root, and zero elsewhere."""

    ragged = False

    def __init__(self, source: Source, names: Names, process_set: ProcessSet, *, root: int) -> None:
        super().__init__(source, names, process_set)
        self._root = root

    def forward(self, *arrays: np.ndarray) -> tuple[Arrays, np.ndarray]:
        """Returns the root's arrays."""
        copies = [np.array(array, order="C") for array in arrays]
        return tuple(self._each(self._names, self._source().broadcast, copies, root=self._root)), _NOTHING

    def backward(self, kept: np.ndarray, *gradients: np.ndarray) -> Arrays:  # noqa: ARG002 - nothing was kept
        """Averages the gradients for the root."""
        averaged = self._reduced(backward_names(self._names), gradients, op=ReduceOp.AVERAGE)
        return averaged if self._is_root() else tuple(map(np.zeros_like, averaged))

    def double_backward(self, kept: np.ndarray, *gradients: np.ndarray) -> Arrays:  # noqa: ARG002 - nothing was kept
        """Averages the root's, because the other ranks had zeros."""
        used = gradients if self._is_root() else tuple(map(np.zeros_like, gradients))
        return self._reduced(_twice(self._names), used, op=ReduceOp.AVERAGE)

    def _is_root(self) -> bool:
        return self._source().daemon.world.rank == self._root


class Alltoall(_Call):
    """The gradients of rows return to the ranks that sent the rows."""

    def forward(self, *arrays: np.ndarray) -> tuple[Arrays, np.ndarray]:
        """Sends each rank its rows of the first array; a second array has the number of rows for each rank.

        Keeps the numbers of rows sent to and received from each rank, and the number of rows of the array.
        """
        array, *given = arrays
        splits = given[0] if given else None
        ((rows, received),) = self._each(self._names, self._source().alltoall, [array], splits=splits, land=_pair)
        members = len(received)
        sent = np.full(members, len(array) // members) if splits is None else splits
        return (rows,), np.array([sent, received, [len(array)] * members], np.int64)

    def backward(self, kept: np.ndarray, *gradients: np.ndarray) -> Arrays:
        """Sends the gradients back."""
        splits, received, (count, *_) = kept
        ((back, returned),) = self._each(
            backward_names(self._names), self._source().alltoall, gradients, splits=received, land=_pair
        )
        if len(back) == count:
            return (back,)
        # Rows that no rank received, or that a joined rank received, have no gradient.
        found = np.zeros((count, *back.shape[1:]), back.dtype)
        taken = 0
        for start, rows in zip(itertools.accumulate(splits, initial=0), returned, strict=False):
            found[start : start + rows] = back[taken : taken + rows]
            taken += rows
        return (found,)

    def double_backward(self, kept: np.ndarray, *gradients: np.ndarray) -> Arrays:
        """Sends rows like `forward`."""
        ((rows, _),) = self._each(_twice(self._names), self._source().alltoall, gradients, splits=kept[0], land=_pair)
        return (rows,)


class Reducescatter(_Call):
    """The gradient is the concatenated gradients of all ranks' rows, times the number of ranks for a sum."""

    def __init__(  # noqa: PLR0913 - one argument per option of the operation
        self,
        source: Source,
        names: Names,
        process_set: ProcessSet,
        *,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        super().__init__(source, names, process_set)
        self._op = op
        self._factors = {"prescale": prescale, "postscale": postscale}

    def check(self) -> None:
        """Rejects reductions that are not linear."""
        if self._op not in {ReduceOp.AVERAGE, ReduceOp.SUM}:
            raise no_gradient(self._op)

    def forward(self, *arrays: np.ndarray) -> tuple[Arrays, np.ndarray]:
        """Reduces the arrays and returns this rank's rows; keeps the number of rows."""
        found = self._each(self._names, self._source().reducescatter, arrays, op=self._op, **self._factors)
        return tuple(found), np.array([len(array) for array in arrays], np.int64)

    def backward(self, kept: np.ndarray, *gradients: np.ndarray) -> Arrays:
        """Concatenates the gradients of all ranks' rows."""
        factor = self._factors["prescale"] * self._factors["postscale"]
        factor *= self._members() if self._op is ReduceOp.SUM else 1
        found = self._gathered(backward_names(self._names), gradients)
        whole = [_whole(rows, sizes, count) for (rows, sizes), count in zip(found, kept, strict=True)]
        return tuple(array * np.array(factor, array.dtype) for array in whole)

    def double_backward(self, kept: np.ndarray, *gradients: np.ndarray) -> Arrays:  # noqa: ARG002 - the number of rows is that of the gradients
        """Reduces and scatters like `forward`: the rows of an allgather have the mean of all gradients."""
        start = self._source().reducescatter
        return tuple(self._each(_twice(self._names), start, gradients, op=self._op, **self._factors))


def _twice(names: Names) -> Names:
    """Returns the names of the operations of second derivatives."""
    return backward_names(backward_names(names))


def _whole(rows: np.ndarray, sizes: np.ndarray, count: int) -> np.ndarray:
    """Concatenates the gradients of all ranks' rows; the rows of joined ranks are zero."""
    if len(rows) == count:
        return rows
    found = np.zeros((count, *rows.shape[1:]), rows.dtype)
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    for place, mine in zip(np.array_split(found, len(sizes)), parts, strict=True):
        place[: len(mine)] = mine
    return found
