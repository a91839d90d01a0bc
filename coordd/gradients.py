"""The gradients of one optimizer as arrays, whatever the framework: reduced in buckets while it still computes.

Its one rule: all ranks make the same steps. In each of them every bucket is reduced once; where a rank has no gradient
it takes part with zeros, and a mark behind the gradients tells who had one. So ranks of different frameworks can train
together. A rank that cannot complete a step takes part in the rest of its buckets with a flag, so that all ranks
discard the step.
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

from coordd.arguments import check_name, check_reducible, name_of
from coordd.choices import Choices
from coordd.config import MIB
from coordd.consistency import NUMPY, Consistency, Reading
from coordd.discarding import error_of, tell
from coordd.errors import ArgumentError, CoorddError, DiscardedStepError, NonFiniteError
from coordd.handles import Handle, check_may_wait, wait_all
from coordd.inventory import Inventory, not_on_all
from coordd.messages import Kind
from coordd.operations import Operations

__all__ = ["Choices", "Gradients", "Parameter", "Reduced"]

log = logging.getLogger("coordd")

_ALIGNMENT = 64
_LAST_BUCKET_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10
"""Gradients of fewer bytes lie close together, so that a framework may take them as one array."""
_FAILED = "has not completed a step, which has failed"


class Parameter:
    """What the gradients of one parameter are like.

    Attributes:
        name: equal on all ranks.
        shape: its dimensions, none of them unknown.
        dtype: in which its gradients travel.
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
        """The user's object, by which groups name it; None when it is gone."""
        return None if self._owner is None else self._owner()

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
        self,
        operations: Operations,
        parameters: Sequence[Parameter],
        choices: Choices,
        *,
        prefix: str,
        reading: Reading = NUMPY,
    ) -> None:
        """Lays buckets out, alike on all ranks.

        Args:
            operations: the way to the others.
            parameters: in the order in which they are used; their gradients are expected in the opposite one.
            choices: what the user wants.
            prefix: of all names; equal on all ranks, and of nobody else.
            reading: how values of parameters are read, to compare them.

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
        """Names all operations, and asks again whether all ranks have the same parameters."""
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
        )

    def _rename_after_deadlock(self) -> None:
        """Takes other names before a step if ranks have waited for each other since the step before.

        A rank may still announce buckets of the failed step; under the old names they match none of this step.
        """
        era = self._operations.era(self._process_set.ranks, joins=False)
        if era != self._era:
            with self._lock:
                if era != self._era and not (self._counted or any(bucket.begun for bucket in self._buckets)):
                    self._rename(era)

    @property
    def buckets(self) -> list[tuple[int, ...]]:
        """The parameters whose gradients travel together, by their places, in the order in which they are expected."""
        return [tuple(place.index for place in bucket.places) for bucket in self._buckets]

    @property
    def packed(self) -> list[tuple[int, ...]]:
        """The small ones among those of each bucket, in the order in which they lie behind each other."""
        return [tuple(place.index for place in bucket.places[bucket.large :]) for bucket in self._buckets]

    def serve(self, parameters: Sequence[Parameter], reading: Reading = NUMPY) -> None:
        """Takes parameters over that are like the first ones; gives memory back when they are gone."""
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

        If the step before was never waited for, all ranks discard that first.

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
        """Has all ranks discard a step that was never waited for here."""
        try:
            self.abandon(_FAILED)
            self._end_abandoned()
        finally:
            with self._turns:
                self._ending = False
                self._turns.notify_all()

    def put(self, index: int, gradient: np.ndarray) -> None:
        """Copies the gradient of a parameter; starts the reduction of its bucket with the last one.

        The last bucket of a step starts in `wait`: until then this rank can say that it does not complete the step.

        Raises:
            CoorddError: it was put before in this step.
            NonFiniteError: it is not finite, and that is to be an error.
        """
        if self._told is not None:
            if self._putting:  # by other threads, too, one of which has abandoned this very step
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
        """Returns the reduced gradients when they are there.

        For the parameters that are ``absent`` this rank has no gradient, and cannot use that of other ranks.

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
            with self._operations.daemon.unbroken("the reduction of gradients"):
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
        different = self._consistency.different()  # now, for ranks that have begun more of the step must end it
        if different is not None:
            raise different
        if names := [name for bucket in self._buckets for name in bucket.unusable()]:
            raise not_on_all(names)
        return Reduced([(bucket, bucket.lend()) for bucket in self._buckets])

    @property
    def _lost(self) -> bool:
        """Whether some of this step has failed because ranks have waited for each other: the rest is not started."""
        return any(bucket.handle is not None and bucket.handle.lost for bucket in self._buckets)

    def note(self, settings: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        """Notes with which hyperparameters the step is made whose gradients are reduced, to compare them."""
        self._consistency.note(settings)

    def abandon(self, reason: str) -> None:
        """Discards this step on all ranks, if it has begun; does not wait for them.

        Args:
            reason: what this rank has done, as the end of a sentence.
        """
        with self._turns, self._operations.daemon.unbroken("the end of a step that is discarded"):
            if self._told is None:
                self._rename_after_deadlock()
                self._count_step()
                for bucket in self._buckets:
                    bucket.discard()
                self._told = self._tell(reason)

    def drop(self, reason: str = _FAILED) -> None:
        """Ends a step that is not to be completed here; all ranks discard it, and get the reason."""
        if any(bucket.begun for bucket in self._buckets):
            self.abandon(reason)

    def give_up(self, step: Hashable) -> None:
        """Ends a step like `drop`, if it is the one that has begun; for a thread that only watches."""
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
        """Counts this step, once; before the second one is made, and now and then later, values are compared."""
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

    They are views of memory that is used again only when they are gone.
    """

    def __init__(self, buckets: Sequence[tuple[_Bucket, np.ndarray]]) -> None:
        self._buckets = buckets
        self._home = {place.index: (bucket, flat) for bucket, flat in buckets for place in bucket.places}

    def __getitem__(self, index: int) -> np.ndarray | None:
        """The gradient of a parameter; None if no rank had one."""
        bucket, flat = self._home[index]
        return bucket.view(flat, index) if bucket.marked(flat, index) else None

    def packed(self, bucket: int) -> np.ndarray:
        """The small ones of a bucket, in the order of `Gradients.packed`, one behind the other; those of nobody too."""
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
    """Gradients of one type, one behind the other, and behind them what the ranks say of each.

    A mark is 1 from a rank that has the gradient; another number is 1 from a rank that has none and cannot use that of
    others. Each large one begins at a multiple of 64 bytes, the small ones follow them without gaps.
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
        """Sets what the name of its operation begins with."""
        self._request = msgspec.structs.replace(self._request, name=check_name(prefix + self._name))

    @property
    def begun(self) -> bool:
        """Whether something of it was put, or it has started, since the last step has ended."""
        return self._block is not None or self.handle is not None

    @property
    def discarded(self) -> bool:
        """Whether a rank has said that this step does not count."""
        return bool(self._flat[-1])

    def discard(self) -> None:
        """Starts with nothing, and tells all ranks that this step does not count; does nothing if it has started."""
        with self._lock:
            if self.handle is None:
                if self._block is None:
                    self._open()
                self._flat[:-1], self._flat[-1] = 0, 1
                self._submit()

    def put(self, index: int, gradient: np.ndarray) -> bool:
        """Copies one; says whether it was the last one."""
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
        """Starts, with zeros for what is missing and whether it is ``absent``; does nothing if it has started."""
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
        """Names the gradients that have arrived and cannot be used by all ranks."""
        marks, lacks = self._flat[self._marks : -1].reshape(2, -1)
        return [
            place.parameter.name for place, mark, lack in zip(self.places, marks, lacks, strict=True) if mark and lack
        ]

    def lend(self) -> np.ndarray:
        """Hands over what has been reduced; the memory is used again when the array and all views of it are gone."""
        assert self._block is not None  # noqa: S101 - for the type checker
        # NumPy's views refer to the array that has the memory; this one has not, so they refer to it, and keep it.
        lent = np.frombuffer(self._block.data, np.uint8)
        weakref.finalize(lent, self._take_back, self._block).atexit = False
        self._block = None
        return lent[: self._count * self._dtype.itemsize].view(self._dtype)

    def marked(self, flat: np.ndarray, index: int) -> bool:
        """Says whether any rank had this gradient."""
        return bool(flat[self._spots[index].mark])

    def view(self, flat: np.ndarray, index: int) -> np.ndarray:
        """Views one gradient among all."""
        spot = self._spots[index]
        return flat[spot.start : spot.stop].reshape(spot.shape)

    def packed(self, flat: np.ndarray) -> np.ndarray:
        """Views the small ones among all."""
        return flat[self._small : self._marks]

    def reset(self) -> None:
        """Gets ready for the next step."""
        if self.handle is not None:
            self.handle.wait()
            self.handle.error()  # whoever gives a step up knows of a worse one
        if self._block is not None:
            self._free.append(self._block)
        self._block = self.handle = None
        self._flat = np.empty(0, self._dtype)
        self._missing = len(self.places)

    def release(self) -> None:
        """Gives memory back, and what is lent when it comes, unless there is another step."""
        self._used = False
        self._free.clear()

    def _take_back(self, block: np.ndarray) -> None:
        if self._used:
            self._free.append(block)

    def _open(self) -> None:
        """Finds memory for a step."""
        self._used, nbytes = True, self._count * self._dtype.itemsize
        try:
            self._block = self._free.pop()
        except IndexError:  # asking before could be too early: it may be released in between
            self._block = self._operations.daemon.allocate(nbytes)
        self._flat = self._block[:nbytes].view(self._dtype)
        self._flat[self._marks :] = 0

    def submit(self) -> None:
        """Starts, unless another thread has discarded the step meanwhile, and has started with that."""
        with self._lock:
            if self.handle is None:
                self._submit()

    def _submit(self) -> None:
        self.handle = self._operations.submit(self._request, self._flat)


def _release(buckets: Iterable[_Bucket]) -> None:
    """Gives memory back that nobody may ever need again, for a model is gone; another of the same names gets new."""
    for bucket in buckets:
        bucket.release()


class _Spot(NamedTuple):
    """Where a gradient lies in its bucket, and its mark."""

    start: int
    stop: int
    shape: tuple[int, ...]
    mark: int
