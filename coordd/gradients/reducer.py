"""The gradients of one optimizer as arrays, for any framework: reduced in buckets while the framework still computes.

Invariant: all ranks make the same steps. In each step every bucket is reduced once; a rank without a gradient
contributes zeros, and a mark behind the gradients shows whether any rank had one. So ranks of different frameworks can
train together. A rank that cannot complete a step sets a flag in its remaining buckets, so that all ranks discard the
step.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from coordd.config import MIB
from coordd.daemon.operations import Operations
from coordd.errors import ArgumentError, CoorddError, DiscardedStepError, NonFiniteError
from coordd.gradients.consistency import NUMPY, Consistency, Reading
from coordd.gradients.discard_step import error_of, tell
from coordd.gradients.settings import Choices
from coordd.ops.arguments import check_name, check_reducible, name_of
from coordd.ops.handles import Handle, check_may_wait, wait_all
from coordd.ops.messages import Kind
from coordd.parallel.parameter_list import Inventory, not_on_all

__all__ = ["STEPS", "Choices", "Gradients", "Parameter", "Reduced"]

log = logging.getLogger("coordd")

_ALIGNMENT = 64
_LAST_BUCKET_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10
"""Smaller gradients are packed without gaps, so that a framework may take them as one array."""
STEPS = ("steps", "gradients")
"""What is out of step if the reduction of gradients is interrupted; see `Daemon.broken_off`."""
_NAMES_ADVICE = (
    "only names differ, which Keras numbers in each process: give the layers names, or call "
    "keras.backend.clear_session() before the model is made, or make the same models in the same order on all ranks"
)
_FAILED = "has not completed a step, which has failed"


class Parameter:
    """Properties of the gradients of one parameter.

    Attributes:
        name: equal on all ranks.
        shape: its dimensions, all known.
        dtype: in which its gradients are reduced.
        size: number of elements.
        nbytes: bytes of a gradient.
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: np.dtype[Any], owner: object = None) -> None:
        self.name = name
        self.shape = tuple(shape)
        self.dtype = dtype
        self._owner = None if owner is None else weakref.ref(owner)
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.nbytes = self.size * dtype.itemsize

    @property
    def owner(self) -> object:
        """The user's object, by which groups refer to it; None when it no longer exists."""
        return None if self._owner is None else self._owner()

    @property
    def kind(self) -> Hashable:
        """The property that all gradients of a bucket share."""
        return self.dtype

    def __str__(self) -> str:
        return f"{self.name} {self.shape} {name_of(self.dtype)}"


class Gradients:
    """Takes gradients as they become ready, and returns them reduced.

    Each step is: `put` every gradient that there is, from any thread and in any order; then `wait`.
    """

    def __init__(
        self,
        operations: Operations,
        parameters: Sequence[Parameter],
        choices: Choices,
        *,
        prefix: str,
        reading: Reading = NUMPY,
    ) -> None:
        """Lays out the buckets, identically on all ranks.

        Args:
            operations: the operations of this rank.
            parameters: in order of use; their gradients are expected in the opposite order.
            choices: the user's options.
            prefix: of all names; equal on all ranks, and used by nothing else.
            reading: how values of parameters are read for comparison.

        Raises:
            ArgumentError: a dtype does not support this reduction, or a setting is not supported.
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
        groups = choices.grouping.buckets(order, limit=limit, last=min(limit, _LAST_BUCKET_BYTES))
        names = (f"gradients.{number}" for number in itertools.count())
        self._buckets = [_Bucket(operations, name, group, choices) for name, group in zip(names, groups, strict=False)]
        self._home = {place.index: bucket for bucket in self._buckets for place in bucket.places}
        self._prefix = prefix
        self._process_set = choices.process_set
        self._lock = threading.Lock()
        self._unsent = len(self._buckets)
        self._told: Handle[Any] | None = None
        self._step: Hashable = None
        self._turns = threading.Condition()
        self._putting = 0
        self._ending = False
        self._owners: dict[int, weakref.finalize[..., Any]] = {}
        self._lines = [*sorted(map(str, self._parameters)), f"{choices.op.name} in {len(groups)} buckets"]
        self._inventory: Inventory | None = None
        self._counted = False
        self._consistency = Consistency(
            operations, self._parameters, reading=reading, prefix=prefix, process_set=choices.process_set
        )
        self._era = ""
        self._rename(operations.era(choices.process_set.ranks, joins=False))

    def _rename(self, era: str) -> None:
        """Renames all operations, and makes the next step check again that all ranks have the same parameters."""
        if era != self._era:
            self._consistency.restart(self._prefix + era)
        self._era = era
        for bucket in self._buckets:
            bucket.set_prefix(self._prefix + era)
        self._inventory = Inventory(
            self._operations,
            self._lines,
            caller="DistributedOptimizer",
            name=f"{self._prefix}{era}inventory",
            process_set=self._process_set,
            names_advice=_NAMES_ADVICE,
        )

    def _rename_after_deadlock(self) -> None:
        """Renames all operations before a step if there was a deadlock between ranks since the previous step.

        A rank may still announce buckets of the failed step; under the old names they match none of this step.
        """
        era = self._operations.era(self._process_set.ranks, joins=False)
        if era != self._era:
            with self._lock:
                if era != self._era and not (self._counted or any(bucket.begun for bucket in self._buckets)):
                    self._rename(era)

    @property
    def buckets(self) -> list[tuple[int, ...]]:
        """The parameters of each bucket, by index, in the order in which their gradients are expected."""
        return [tuple(place.index for place in bucket.places) for bucket in self._buckets]

    @property
    def packed(self) -> list[tuple[int, ...]]:
        """The small gradients of each bucket, by parameter index, in the order of their layout."""
        return [tuple(place.index for place in bucket.places[bucket.large :]) for bucket in self._buckets]

    def serve(self, parameters: Sequence[Parameter], reading: Reading = NUMPY) -> None:
        """Switches to parameters equal to the first ones; frees memory when their owner no longer exists."""
        if (owner := parameters[0].owner) is None:
            return
        if owner is not self._parameters[0].owner:
            self._parameters = tuple(parameters)
            self._consistency.renew(self._parameters, reading)
        known = self._owners.get(id(owner))
        if known is None or not known.alive:
            found = weakref.finalize(owner, _release, weakref.WeakSet(self._buckets))
            found.atexit = False
            self._owners[id(owner)] = found

    @contextlib.contextmanager
    def begun(self, step: Hashable) -> Iterator[None]:
        """Puts gradients of a step inside; several threads may do so at once, each for buckets of its own.

        If the previous step was never waited for, all ranks discard it first.

        Raises:
            DiscardedStepError: this step has been given up.
        """
        with self._turns:
            self._turns.wait_for(lambda: not self._ending)
            self._ending = step != self._step and (self._told is not None or any(one.begun for one in self._buckets))
            ends = self._ending
            if self._told is not None and not ends:
                raise self._given_up()
            if ends:
                self._turns.wait_for(lambda: not self._putting)
            self._step = step
            self._putting += 1
        try:
            if ends:
                self._end_of_earlier()
            yield
        finally:
            with self._turns:
                self._putting -= 1
                self._turns.notify_all()

    def _given_up(self) -> DiscardedStepError:
        return DiscardedStepError([(self._operations.daemon.world.rank, _FAILED)])

    def _end_of_earlier(self) -> None:
        """Makes all ranks discard a step that was never waited for here."""
        try:
            self.abandon(_FAILED)
            self._end_abandoned()
        finally:
            with self._turns:
                self._ending = False
                self._turns.notify_all()

    def put(self, index: int, gradient: np.ndarray) -> None:
        """Copies the gradient of a parameter; the last gradient of a bucket starts the bucket's reduction.

        The last bucket of a step starts in `wait`: until then this rank can report that it does not complete the step.

        Raises:
            CoorddError: it was put before in this step.
            NonFiniteError: it is not finite, and ``nonfinite`` is ``raise``.
        """
        if self._told is not None:
            if self._putting:  # also by other threads, one of which has abandoned this same step
                raise self._given_up()
            self._end_abandoned()
        self._rename_after_deadlock()
        if self._looks != "ignore":
            self._look(self._parameters[index].name, gradient)
        bucket = self._home[index]
        if bucket.put(index, gradient):
            with self._lock:
                sends = self._unsent > 1
                self._unsent -= sends
            if sends and not self._lost:
                bucket.submit()

    def wait(self, absent: Collection[int] = ()) -> Reduced:
        """Waits for the reductions, and returns the reduced gradients.

        For the ``absent`` parameters this rank has no gradient, and cannot use that of other ranks.

        Raises:
            DiscardedStepError: a rank has not completed this step.
            MismatchError: on all ranks: some have a gradient that is absent on others.
            DeadlockError, PeerError, ShutdownError: see `coordd.errors`.
        """
        check_may_wait("waiting for gradients")
        if self._told is not None:
            self._end_abandoned()
        self._rename_after_deadlock()
        try:
            with self._operations.daemon.unbroken("the reduction of gradients", series=STEPS):
                return self._reduce(absent)
        finally:
            self._reset()

    def _reduce(self, absent: Collection[int]) -> Reduced:
        inventory, self._inventory = self._inventory, None
        if inventory is not None:
            inventory.check()
        self._count_step()
        for bucket in self._buckets:
            if not self._lost:
                bucket.close(absent)
        wait_all([bucket.handle for bucket in self._buckets if bucket.handle is not None])
        if any(bucket.discarded for bucket in self._buckets):
            told, self._told = self._told or self._tell(""), None
            raise error_of(told)
        different = self._consistency.different()  # only now: ranks that have begun more of the step must end it
        if different is not None:
            raise different
        if names := [name for bucket in self._buckets for name in bucket.unusable()]:
            raise not_on_all(names)
        return Reduced([(bucket, bucket.lend()) for bucket in self._buckets])

    @property
    def _lost(self) -> bool:
        """Whether a deadlock between ranks failed a part of this step: the remaining buckets are not started."""
        return any(bucket.handle is not None and bucket.handle.lost for bucket in self._buckets)

    def note(self, settings: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        """Records the hyperparameters of the step whose gradients are reduced, for comparison."""
        self._consistency.note(settings)

    def abandon(self, reason: str) -> None:
        """Discards this step on all ranks, if it has begun; does not wait for them.

        Args:
            reason: what this rank has done, as the end of a sentence.
        """
        with self._turns, self._operations.daemon.unbroken("the end of a step that is discarded", series=STEPS):
            if self._told is None:
                self._rename_after_deadlock()
                self._count_step()
                for bucket in self._buckets:
                    bucket.discard()
                self._told = self._tell(reason)

    @property
    def is_abandoned(self) -> bool:
        """Whether this rank has discarded the step, and has not waited for the others yet."""
        return self._told is not None

    def drop(self, reason: str = _FAILED) -> None:
        """Ends a step that is not completed here; all ranks discard it, and get the reason."""
        if any(bucket.begun for bucket in self._buckets):
            self.abandon(reason)

    def give_up(self, step: Hashable) -> None:
        """Ends a step like `drop`, if it is the current one and no thread works on it; for a watching thread."""
        with self._turns:
            if step == self._step and not (self._ending or self._putting or self._told):
                self.drop()

    def _end_abandoned(self) -> None:
        """Waits until the other ranks have discarded the step as well."""
        told, self._told = self._told, None
        self._reset()
        if told is not None:
            told.wait()
            told.error()

    def _reset(self) -> None:
        for bucket in self._buckets:
            bucket.reset()
        self._unsent = len(self._buckets)
        self._counted = False

    def _tell(self, reason: str) -> Handle[Any]:
        return tell(self._operations, f"{self._prefix}{self._era}discarded", reason, self._process_set)

    def _count_step(self) -> None:
        """Counts this step, once; before the second step, and occasionally later, values are compared."""
        counted, self._counted = self._counted, True
        if not counted:
            self._consistency.begin()

    def _look(self, name: str, gradient: np.ndarray) -> None:
        if np.isfinite(gradient).all():
            return
        nans, infinities = int(np.isnan(gradient).sum()), int(np.isinf(gradient).sum())
        error = NonFiniteError(name, self._operations.daemon.world.rank, nans=nans, infinities=infinities)
        if self._looks == "raise":
            self.abandon(f"has a gradient that is not finite: {error}")
            raise error
        log.warning("%s", error)


class Reduced:
    """The reduced gradients of one step.

    They are views of memory that is reused only when all views are gone.
    """

    def __init__(self, buckets: Sequence[tuple[_Bucket, np.ndarray]]) -> None:
        self._buckets = buckets
        self._home = {place.index: (bucket, flat) for bucket, flat in buckets for place in bucket.places}

    def __getitem__(self, index: int) -> np.ndarray | None:
        """Returns the gradient of a parameter; None if no rank had one."""
        bucket, flat = self._home[index]
        return bucket.view(flat, index) if bucket.marked(flat, index) else None

    def packed(self, bucket: int) -> np.ndarray:
        """Returns a bucket's small gradients in the order of `Gradients.packed`, including those that no rank had."""
        found, flat = self._buckets[bucket]
        return found.packed(flat)


class _Place:
    """One gradient's place in a bucket."""

    def __init__(self, index: int, parameter: Parameter) -> None:
        self.index = index
        self.parameter = parameter
        self.nbytes = parameter.nbytes
        self.kind = parameter.kind

    @property
    def owner(self) -> object:
        return self.parameter.owner


class _Bucket:
    """Gradients of one dtype in one array, followed by two numbers for each gradient and a flag for the step.

    Layout, with every large gradient at a multiple of 64 bytes and the small ones without gaps::

        large gradients | small gradients | mark of each | lack of each | discard

    A mark is 1 from a rank that has the gradient; a lack is 1 from a rank that has none and cannot use that of others.
    """

    def __init__(self, operations: Operations, name: str, places: Sequence[_Place], choices: Choices) -> None:
        self._operations = operations
        self._name = name
        large = [place for place in places if place.nbytes >= _SMALL_BYTES]
        self.places = (*large, *(place for place in places if place.nbytes < _SMALL_BYTES))
        self.large = len(large)
        self._dtype = places[0].parameter.dtype
        check_reducible(self._dtype, choices.op, scaled=choices.predivide != 1.0)
        stride = _ALIGNMENT // self._dtype.itemsize
        sizes = [-(-place.parameter.size // stride) * stride for place in large]
        sizes += [place.parameter.size for place in self.places[len(large) :]]
        starts = [0, *itertools.accumulate(sizes)]
        self._marks = starts[-1]
        self._count = self._marks + 2 * len(places) + 1
        self._small = starts[len(large)]
        self._spots = {
            place.index: _Spot(start, start + place.parameter.size, place.parameter.shape, self._marks + slot)
            for slot, (place, start) in enumerate(zip(self.places, starts, strict=False))
        }
        self._lock = threading.Lock()
        self._free: list[np.ndarray] = []
        self._used = True
        self._request = operations.request(
            Kind.ALLREDUCE,
            name,
            np.empty(self._count, self._dtype),
            choices.process_set,
            op=choices.op,
            prescale=1.0 / choices.predivide,
            postscale=choices.predivide,
        )
        self._block: np.ndarray | None = None
        self._flat: np.ndarray = np.empty(0, self._dtype)
        self._missing = len(places)
        self.handle: Handle[Any] | None = None

    def set_prefix(self, prefix: str) -> None:
        """Sets the prefix of its operation's name."""
        self._request = msgspec.structs.replace(self._request, name=check_name(prefix + self._name))

    @property
    def begun(self) -> bool:
        """Whether a gradient of it was put, or its reduction has started, since the last step ended."""
        return self._block is not None or self.handle is not None

    @property
    def discarded(self) -> bool:
        """Whether a rank has discarded this step."""
        return bool(self._flat[-1])

    def discard(self) -> None:
        """Starts with zeros and the flag by which all ranks discard this step; does nothing if it has started."""
        with self._lock:
            if self.handle is None:
                if self._block is None:
                    self._open()
                self._flat[:-1], self._flat[-1] = 0, 1
                self._submit()

    def put(self, index: int, gradient: np.ndarray) -> bool:
        """Copies a gradient; returns whether it was the bucket's last one."""
        spot = self._spots[index]
        with self._lock:
            if self._block is None:
                self._open()
            elif self._flat[spot.mark]:
                name = next(place.parameter.name for place in self.places if place.index == index)
                text = (
                    f"the gradient of {name!r} was computed twice before the step: use backward_passes_per_step to "
                    "accumulate gradients locally"
                )
                raise CoorddError(text)
            self._flat[spot.mark] = 1
        self._flat[spot.start : spot.stop] = gradient.reshape(-1)
        with self._lock:
            self._missing -= 1
            return not self._missing

    def close(self, absent: Collection[int] = ()) -> None:
        """Starts, with zeros for missing gradients and a lack for ``absent`` ones; does nothing if it has started."""
        if self.handle is not None:
            return
        if self._block is None:
            self._open()
        for index, spot in self._spots.items():
            if not self._flat[spot.mark]:
                self._flat[spot.start : spot.stop] = 0
                self._flat[spot.mark + len(self.places)] = index in absent
        self.submit()

    def unusable(self) -> list[str]:
        """Returns the names of gradients that some ranks have and other ranks cannot use."""
        marks, lacks = self._flat[self._marks : -1].reshape(2, -1)
        return [
            place.parameter.name for place, mark, lack in zip(self.places, marks, lacks, strict=True) if mark and lack
        ]

    def lend(self) -> np.ndarray:
        """Returns the reduced array; its memory is reused when the array and all views of it are gone."""
        assert self._block is not None  # noqa: S101 - for the type checker
        # A view of `lent` keeps `lent` alive, because `lent` has no array as its base.
        lent = np.frombuffer(self._block.data, np.uint8)
        weakref.finalize(lent, self._take_back, self._block).atexit = False
        self._block = None
        return lent[: self._count * self._dtype.itemsize].view(self._dtype)

    def marked(self, flat: np.ndarray, index: int) -> bool:
        """Returns whether any rank had this gradient."""
        return bool(flat[self._spots[index].mark])

    def view(self, flat: np.ndarray, index: int) -> np.ndarray:
        """Returns a view of one gradient of the reduced array."""
        spot = self._spots[index]
        return flat[spot.start : spot.stop].reshape(spot.shape)

    def packed(self, flat: np.ndarray) -> np.ndarray:
        """Returns a view of the small gradients of the reduced array."""
        return flat[self._small : self._marks]

    def reset(self) -> None:
        """Prepares for the next step."""
        if self.handle is not None:
            self.handle.wait()
            self.handle.error()  # marks it as seen: the caller that gives up a step has a more important error
        if self._block is not None:
            self._free.append(self._block)
        self._block = self.handle = None
        self._flat = np.empty(0, self._dtype)
        self._missing = len(self.places)

    def release(self) -> None:
        """Frees memory, and lent memory on its return, unless there is another step."""
        self._used = False
        self._free.clear()

    def _take_back(self, block: np.ndarray) -> None:
        if self._used:
            self._free.append(block)

    def _open(self) -> None:
        """Provides memory for a step."""
        self._used, nbytes = True, self._count * self._dtype.itemsize
        try:
            self._block = self._free.pop()
        except IndexError:  # checking before the pop could be too early: `release` may clear the list in between
            self._block = self._operations.daemon.allocate(nbytes)
        self._flat = self._block[:nbytes].view(self._dtype)
        self._flat[self._marks :] = 0

    def submit(self) -> None:
        """Starts, unless another thread has discarded the step and started it meanwhile."""
        with self._lock:
            if self.handle is None:
                self._submit()

    def _submit(self) -> None:
        self._operations.daemon.check_in_step(STEPS)
        with self._operations.daemon.unbroken("the submission of gradients", series=STEPS):
            self.handle = self._operations.submit(self._request, self._flat)


def _release(buckets: Iterable[_Bucket]) -> None:
    """Frees the memory of a model that no longer exists; another model of the same names allocates new memory."""
    for bucket in buckets:
        bucket.release()


class _Spot(NamedTuple):
    """Offsets of a gradient and of its mark in its bucket, and its shape."""

    start: int
    stop: int
    shape: tuple[int, ...]
    mark: int
