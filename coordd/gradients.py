"""The gradients of one optimizer as arrays, whatever the framework: reduced in buckets while it still computes.

Its one rule: all ranks make the same steps. In each of them every bucket is reduced once; where a rank has no gradient
it takes part with zeros, and a mark behind the gradients tells who had one. So ranks of different frameworks can train
together.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coordd.arguments import check_reducible, name_of
from coordd.config import MIB
from coordd.errors import ArgumentError, CoorddError, NonFiniteError
from coordd.grouping import Grouping
from coordd.handles import Handle, wait_all
from coordd.inventory import Inventory
from coordd.messages import Kind, ReduceOp
from coordd.operations import Operations
from coordd.process_sets import ProcessSet, global_process_set

__all__ = ["Choices", "Gradients", "Parameter"]

log = logging.getLogger("coordd")

_ALIGNMENT = 64
_LAST_BUCKET_BYTES = 1 << 20
_COMBINE = frozenset({ReduceOp.AVERAGE, ReduceOp.AVERAGE_PRESENT, ReduceOp.SUM})


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the user has chosen for the gradients of one optimizer; equal on all ranks.

    Attributes:
        op: how gradients combine.
        process_set: the ranks that take part.
        predivide: gradients are divided by it before they are added up, and multiplied afterwards.
        compression: what makes them smaller, an object of the framework's.
        sparse_as_dense: whether sparse gradients are to become dense.
        grouping: which gradients the user wants together.

    Raises:
        ArgumentError: these do not fit together.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    process_set: ProcessSet = global_process_set
    predivide: float = 1.0
    compression: Any = None
    sparse_as_dense: bool = False
    grouping: Grouping = field(default_factory=lambda: Grouping(kind=()))

    def __post_init__(self) -> None:
        if self.predivide != 1.0 and self.op is not ReduceOp.AVERAGE:
            text = "gradient_predivide_factor not supported with op != Average"
            raise ArgumentError(text)
        if self.op not in _COMBINE:
            text = f"gradients are averaged or added up here, not combined by {self.op.name.capitalize()}: choose op"
            raise ArgumentError(text)


class Parameter:
    """What the gradients of one parameter are like.

    Attributes:
        name: equal on all ranks.
        shape: its dimensions, none of them unknown.
        dtype: in which its gradients travel.
        owner: the user's object, by which groups name it.
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: np.dtype[Any], owner: object = None) -> None:
        self.name = name
        self.shape = tuple(shape)
        self.dtype = dtype
        self.owner = owner
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.nbytes = self.size * dtype.itemsize

    @property
    def kind(self) -> Hashable:
        """What all of a bucket have in common."""
        return self.dtype

    def __str__(self) -> str:
        return f"{self.name} {self.shape} {name_of(self.dtype)}"


class Gradients:
    """Where gradients are put as they become ready, and fetched when they are reduced.

    Each step is: `put` every gradient that there is, from any thread and in any order; then `wait`.
    """

    def __init__(
        self, operations: Operations, parameters: Sequence[Parameter], choices: Choices, *, prefix: str
    ) -> None:
        """Lays buckets out, alike on all ranks.

        Args:
            operations: the way to the others.
            parameters: in the order in which they are used; their gradients are expected in the opposite one.
            choices: what the user wants.
            prefix: of all names; equal on all ranks, and of nobody else.

        Raises:
            ArgumentError: a type cannot be reduced so, or a setting cannot be followed.
        """
        self._operations = operations
        self._parameters = tuple(parameters)
        config = operations.daemon.config
        if config.nonfinite == "skip":
            text = "nonfinite=skip is for coordd.torch: use warn or raise here, or keras.optimizers.LossScaleOptimizer"
            raise ArgumentError(text)
        self._looks = config.nonfinite
        order = [_Place(index, parameter) for index, parameter in enumerate(self._parameters)][::-1]
        limit = int(config.fusion_mb * MIB)
        last = min(limit, _LAST_BUCKET_BYTES)
        groups = choices.grouping.buckets(order, limit=limit, last=last)
        self._buckets = [
            _Bucket(operations, f"{prefix}gradients.{number}", group, choices) for number, group in enumerate(groups)
        ]
        self._home = {place.index: bucket for bucket in self._buckets for place in bucket.places}
        lines = [*sorted(map(str, self._parameters)), f"{choices.op.name} in {len(groups)} buckets"]
        caller, name = "DistributedOptimizer", f"{prefix}inventory"
        self._inventory: Inventory | None = Inventory(
            operations, lines, caller=caller, name=name, process_set=choices.process_set
        )

    @property
    def buckets(self) -> list[tuple[int, ...]]:
        """The parameters whose gradients travel together, by their places, in the order in which they are expected."""
        return [tuple(place.index for place in bucket.places) for bucket in self._buckets]

    def put(self, index: int, gradient: np.ndarray) -> None:
        """Copies the gradient of a parameter; starts the reduction of its bucket with the last one.

        Raises:
            CoorddError: it was put before in this step.
            NonFiniteError: it is not finite, and that is to be an error.
        """
        if self._looks != "ignore":
            self._look(self._parameters[index].name, gradient)
        self._home[index].put(index, gradient)

    def wait(self) -> list[np.ndarray | None]:
        """Returns the reduced gradients when they are there; None where no rank had one.

        Who still has one of these arrays when the next step begins keeps it: their memory is used again when they are
        gone.

        Raises:
            MismatchError, PeerError, ShutdownError: see `coordd.errors`.
        """
        try:
            inventory, self._inventory = self._inventory, None
            if inventory is not None:
                inventory.check()
            for bucket in self._buckets:
                bucket.close()
            wait_all([bucket.handle for bucket in self._buckets if bucket.handle is not None])
            found: list[np.ndarray | None] = [None] * len(self._parameters)
            for bucket in self._buckets:
                for place, array in bucket.finished():
                    found[place.index] = array
        finally:
            self.drop()
        return found

    def drop(self) -> None:
        """Ends this step, whatever comes of it."""
        for bucket in self._buckets:
            bucket.reset()

    def _look(self, name: str, gradient: np.ndarray) -> None:
        if np.isfinite(gradient).all():
            return
        nans, infinities = int(np.isnan(gradient).sum()), int(np.isinf(gradient).sum())
        error = NonFiniteError(name, self._operations.daemon.world.rank, nans=nans, infinities=infinities)
        if self._looks == "raise":
            raise error
        log.warning("%s", error)


class _Place:
    """One gradient's place in a bucket."""

    def __init__(self, index: int, parameter: Parameter) -> None:
        self.index = index
        self.parameter = parameter
        self.nbytes = parameter.nbytes
        self.kind = parameter.kind
        self.owner = parameter.owner


class _Bucket:
    """Gradients of one type, one behind the other, each at a multiple of 64 bytes, and behind them their marks."""

    def __init__(self, operations: Operations, name: str, places: Sequence[_Place], choices: Choices) -> None:
        self._operations = operations
        self.places = tuple(places)
        dtype = places[0].parameter.dtype
        check_reducible(dtype, choices.op, scaled=choices.predivide != 1.0)
        stride = _ALIGNMENT // dtype.itemsize
        sizes = [-(-place.parameter.size // stride) * stride for place in places]
        self._starts = np.cumsum([0, *sizes]).tolist()
        self._count = self._starts[-1] + len(places)
        self._dtype = dtype
        self._slots = {place.index: slot for slot, place in enumerate(places)}
        self._free: list[np.ndarray] = []
        self._request = operations.request(
            Kind.ALLREDUCE,
            name,
            np.empty(self._count, dtype),
            choices.process_set,
            op=choices.op,
            prescale=1.0 / choices.predivide,
            postscale=choices.predivide,
        )
        self._block: np.ndarray | None = None
        self._flat: np.ndarray = np.empty(0, dtype)
        self._missing = len(places)
        self.handle: Handle[Any] | None = None

    def put(self, index: int, gradient: np.ndarray) -> None:
        """Copies one; starts with the last one."""
        slot = self._slots[index]
        if self._block is None:
            self._open()
        elif self._flat[self._starts[-1] + slot]:
            text = (
                f"the gradient of {self.places[slot].parameter.name!r} was computed twice before the step: "
                "use backward_passes_per_step to accumulate gradients locally"
            )
            raise CoorddError(text)
        np.copyto(self._view(self._flat, slot), gradient, casting="same_kind")
        self._flat[self._starts[-1] + slot] = 1
        self._missing -= 1
        if not self._missing:
            self._submit()

    def close(self) -> None:
        """Starts, with zeros for what is missing; does nothing if it has started."""
        if self.handle is not None:
            return
        if self._block is None:
            self._open()
        for slot in np.flatnonzero(self._flat[self._starts[-1] :] == 0):
            self._view(self._flat, int(slot))[...] = 0
        self._submit()

    def finished(self) -> Iterator[tuple[_Place, np.ndarray]]:
        """Yields the reduced gradients that any rank had, as views of memory that is used again when they are gone."""
        assert self._block is not None  # noqa: S101 - for the type checker
        # NumPy's views refer to the array that has the memory; this one has not, so they refer to it, and keep it.
        lent = np.frombuffer(self._block.data, np.uint8)
        weakref.finalize(lent, self._free.append, self._block).atexit = False
        flat = lent.view(self._dtype)
        for slot, place in enumerate(self.places):
            if flat[self._starts[-1] + slot]:
                yield place, self._view(flat, slot)
        self._block = None

    def reset(self) -> None:
        """Gets ready for the next step."""
        if self.handle is not None:
            self.handle.wait()
        if self._block is not None:
            self._free.append(self._block)
        self._block = self.handle = None
        self._missing = len(self.places)

    def _open(self) -> None:
        """Finds memory for a step."""
        nbytes = self._count * self._dtype.itemsize
        self._block = self._free.pop() if self._free else self._operations.daemon.allocate(nbytes)
        self._flat = self._block[:nbytes].view(self._dtype)
        self._flat[self._starts[-1] :] = 0

    def _view(self, flat: np.ndarray, slot: int) -> np.ndarray:
        place, start = self.places[slot], self._starts[slot]
        return flat[start : start + place.parameter.size].reshape(place.parameter.shape)

    def _submit(self) -> None:
        self.handle = self._operations.submit(self._request, self._flat)
