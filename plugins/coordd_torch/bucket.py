"""Buckets: gradients of several parameters that live in one flat tensor and are reduced together.

On a CPU the tensor lies in the shared memory of the host's ranks, so nothing is packed, sent or unpacked: the
parameters' ``.grad`` are views of it. Behind the gradients lies one mark per gradient: 1 on a rank that has the
gradient, 0 on a rank that does not. The marks are reduced with the gradients, so all ranks learn which gradients exist
on any rank. Behind the marks lie the flags of the step, from which all ranks learn whether it counts:

    | gradients | marks | present | discard, repeat | signals of autotune |

``present`` is 1 on every rank that takes part, ``discard`` on a rank whose backward pass failed, and ``repeat`` on a
rank that reduces gradients that were already reduced in this step. A reduced flag that is neither 0 nor equal to
``present`` differs between the ranks.
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from coordd.negotiation.tensor_table import Entry
from coordd_torch.compressed_bucket import Courier
from coordd_torch.references import are_referenced, version_of, write
from coordd_torch.tensors import view
from coordd_torch.tuning import SIGNALS

if TYPE_CHECKING:
    from coordd_torch.gradient import Gradient
    from coordd_torch.placement import Placement

__all__ = ["Bucket", "strides_of"]

_ALIGNMENT = 64
_COPIED_AT_ONCE = 64 << 10
"""A gradient of this many bytes or more is copied as soon as it is ready, while the caches hold it, and then freed.

Smaller gradients are copied together when the last one of their bucket is ready."""
_FLAGS = 2
_NOTHING = np.empty(0, np.uint8)
_DTYPE = operator.attrgetter("dtype")
_GRADIENT = operator.attrgetter("grad")
_LAYOUT = operator.attrgetter("layout")
_SHAPE = operator.attrgetter("shape")
_ADDRESS = torch.Tensor.data_ptr
_VERSION = operator.attrgetter("_version")


class _Memory:
    """The flat tensor of a bucket and its views; the bucket uses another one while the user keeps gradients in it."""

    def __init__(self, reducer: Placement, gradients: Sequence[Gradient], *, early: bool) -> None:
        first = gradients[0].parameter
        stride = _ALIGNMENT // first.element_size()
        sizes = [-(-gradient.parameter.numel() // stride) * stride for gradient in gradients]
        stops = np.cumsum(sizes).tolist()
        count = len(gradients)
        self.values = stops[-1]
        """Number of elements of `flat` that belong to gradients, padding included."""
        self.flat = reducer.channel.memory(stops[-1] + count + 1 + _FLAGS + SIGNALS, first)
        self.body, self.tail = self.flat[: self.values], self.flat[self.values :]
        self.marks, self.marks_and_present = self.tail[:count], self.tail[: count + 1]
        self.flags, self.flags_and_signals = self.tail[count + 1 : -SIGNALS], self.tail[count + 1 :]
        self.signals = self.tail[-SIGNALS:]
        self.array = view(self.flat) if self.flat.is_cpu else None
        self.order = tuple(
            _shaped(self.flat[stop - size : stop], gradient)
            for gradient, size, stop in zip(gradients, sizes, stops, strict=True)
        )
        self.places = dict(zip(gradients, self.order, strict=True))
        self.homes = [(gradient, gradient.parameter, place) for gradient, place in self.places.items()]
        self._parameters = [gradient.parameter for gradient in gradients]
        self._parameters_at, self._shapes = list(map(_ADDRESS, self._parameters)), list(map(_SHAPE, self._parameters))
        self._at = self.flat.data_ptr()
        self._misplaced = False
        self.private = False
        """Whether no place has moved or can move while gradients are copied in, as nothing referred to any so far."""
        self._starts = dict(zip(gradients, [0, *stops], strict=False))
        self._numbers = {gradient: number for number, gradient in enumerate(gradients)}
        self.large = {gradient for gradient in gradients if early and gradient.parameter.nbytes >= _COPIED_AT_ONCE}
        self.small = [(index, *home) for index, home in enumerate(self.homes) if home[0] not in self.large]
        self.small_gradients = [gradient for _, gradient, _, _ in self.small]
        self.small_parameters = [parameter for _, _, parameter, _ in self.small]
        self.small_places = [place for _, _, _, place in self.small]
        self._storage = self.flat.untyped_storage()
        self._addresses = list(map(_ADDRESS, self.order))
        self._usual = self._users()[:2]
        self.versions: list[int] = list(map(_VERSION, self.order))

    def _users(self) -> tuple[int, list[int], int]:
        """Counts users of the memory (tensors, arrays, moved places), references to each place, and moved places."""
        found, moved = torch._C._storage_Use_Count(self._storage._cdata), 0  # noqa: SLF001 - no public way
        if (addresses := list(map(_ADDRESS, self.order))) != self._addresses:  # compared as a whole, quickly
            moved = sum(map(operator.ne, addresses, self._addresses))
        return found + moved, list(map(sys.getrefcount, self.order)), moved

    @property
    def outdated(self) -> bool:
        """Whether the dtype, device or shape of parameters has changed, as after ``model.to()``."""
        addresses = list(map(_ADDRESS, self._parameters))
        if addresses == self._parameters_at:  # the usual case, quickly; no conversion is in place
            return False
        self._parameters_at, self._misplaced = addresses, self._moved(self.places)
        if {*map(_DTYPE, self._parameters)} != {self.flat.dtype} or list(map(_SHAPE, self._parameters)) != self._shapes:
            return True
        return self._parameters[0].device != self.flat.device

    def note_present(self) -> None:
        """Marks this rank and all gradients as present."""
        if self.array is None or self.gone:
            self.marks_and_present.fill_(1)
        else:  # NumPy writes few values more quickly
            self.array[self.values : self.values + len(self.order) + 1] = 1

    @property
    def gone(self) -> bool:
        """Whether the script has moved the whole storage, as `share_memory_` of a single gradient does."""
        return self.flat.data_ptr() != self._at

    @property
    def spoilt(self) -> bool:
        """Whether it cannot be used again: its storage was moved, or a conversion as ``model.to()`` moved places."""
        return self._misplaced or self.gone

    def rooms(self, gradients: Sequence[Gradient]) -> list[torch.Tensor]:
        """Returns the places of gradients in this memory.

        If the script has moved a place, as ``parameter.grad.data = ...`` does, returns a new view of its memory.
        """
        usual = gradients is self.small_gradients
        if not (usual and self.private) and self._moved(gradients):
            return [self._room(gradient) for gradient in gradients]
        return self.small_places if usual else [self.places[gradient] for gradient in gradients]

    def _moved(self, gradients: Collection[Gradient]) -> bool:
        if len(gradients) == len(self.order):  # the usual case, quickly
            return list(map(_ADDRESS, self.order)) != self._addresses
        return any(map(self._elsewhere, map(self._numbers.__getitem__, gradients)))

    def _elsewhere(self, number: int) -> bool:
        """Returns whether the script has given a place other memory."""
        return self.order[number].data_ptr() != self._addresses[number]

    def _room(self, gradient: Gradient) -> torch.Tensor:
        place, start = self.places[gradient], self._starts[gradient]
        room = _shaped(self.flat[start:], gradient)
        return place if place.data_ptr() == room.data_ptr() else room

    def remember(self, former: _Memory | None = None) -> None:
        """Records the version counter of each place.

        Args:
            former: the memory from which gradients were moved in the middle of a step; a gradient that changed there
                counts as changed here.
        """
        versions: list[int] = list(map(_VERSION, self.order))
        if former is not None:
            pairs = zip(versions, former.versions, map(_VERSION, former.order), strict=True)
            versions = [version if then == now else -1 for version, then, now in pairs]
        self.versions = versions

    def version(self, gradient: Gradient) -> int:
        """Returns the last recorded version counter of the place of a gradient."""
        return self.versions[self._numbers[gradient]]

    def note_version(self, gradient: Gradient, *, changed: bool = False) -> None:
        """Records the version counter of a place after a change by coordd, or that the script has changed it."""
        self.versions[self._numbers[gradient]] = -1 if changed else _VERSION(self.places[gradient])

    def _changed(self, place: torch.Tensor, number: int) -> bool:
        """Returns whether the script changed a gradient since the last step, in place or by assigning other memory."""
        if version_of(place) != self.versions[number]:
            return True
        alike = place.dtype == self.flat.dtype and place.device == self.flat.device
        return alike and self._elsewhere(number)

    def is_unused(self) -> bool:
        """Returns whether only its bucket refers to it, no ``.grad`` included; updates `private`."""
        users, references, moved = self._users()
        unused = (users, references) == self._usual
        self.private = unused and not moved
        return unused

    @property
    def kept(self) -> bool:
        """Whether the user still refers to a gradient, by a view or an array, say, that ``.grad`` no longer is.

        While it is ``.grad``, autograd adds to it in place, as the user expects.
        """
        left = [
            parameter.grad is not place or self._elsewhere(at) for at, (_, parameter, place) in enumerate(self.homes)
        ]
        return any(map(operator.and_, left, self._referenced()))

    def _referenced(self) -> list[bool]:
        """Returns, for each gradient, whether the user refers to it, or may refer to its memory."""
        users, references, _ = self._users()
        views = users != self._usual[0]
        return [views or found > usual for found, usual in zip(references, self._usual[1], strict=True)]

    def leave(self, home: Callable[[Gradient, torch.Tensor], torch.Tensor]) -> None:
        """Moves every ``.grad`` that lies here to other memory, except gradients to which the user refers.

        Args:
            home: returns the new tensor, with the same values.
        """
        referenced = self._referenced()
        with torch.no_grad():
            for number, (gradient, parameter, place) in enumerate(self.homes):
                if parameter.grad is place:
                    changed = self._changed(place, number)
                    if not referenced[number]:
                        parameter.grad = home(gradient, place)
                    gradient.remember(changed=changed)


class Bucket:
    """One tensor for several gradients; also the handle that the daemon resolves."""

    def __init__(self, reducer: Placement, name: str, gradients: Sequence[Gradient], *, early: bool = True) -> None:
        """Allocates the memory; gradients move into it when they are next computed.

        Args:
            reducer: the owner of the gradients.
            name: name of the operation, equal on all ranks.
            gradients: of one dtype, on one device, in an order that is equal on all ranks.
            early: whether the reduction starts as soon as the last gradient is ready, or when backward ends.
        """
        self._reducer = reducer
        self.underway = reducer.underway
        self.name = name
        self.submitted = 0.0
        self.open, self._given = True, False
        self._early = early
        self._gradients = tuple(gradients)
        self._memory = _Memory(reducer, gradients, early=early)
        self._spare: _Memory | None = None
        self._adopt(self._memory)
        self._absent: list[tuple[int, Gradient, torch.Tensor | None]] = []
        self._by_hand = False
        """Whether the script has set gradients of this step that backward has not computed."""
        self._outside: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Pairs of a gradient that stays where it is because the user refers to it, and the place of its reduction."""
        self.awaited = len(gradients)
        """Number of gradients that are not ready."""
        self._entry: Entry | None = None
        self._dtype: np.dtype[Any] | None = None
        self.refused = False
        """Whether a rank has discarded this step, or the ranks have made different numbers of passes."""
        self._courier: Courier | None = None
        first, values = gradients[0].parameter, self._memory.values
        if reducer.channel.carries(first) and values:
            names, places = [gradient.name for gradient in gradients], self._memory.order
            self._courier = Courier(reducer.underway, name, self._flat, values, names, places=places, land=self._look)
        for gradient in gradients:
            gradient.bucket, gradient.small = self, gradient not in self._large

    def _adopt(self, memory: _Memory) -> None:
        self._memory, self._flat, self._places = memory, memory.flat, memory.places
        self._homes, self._large, self._small = memory.homes, memory.large, memory.small

    @property
    def outdated(self) -> bool:
        """Whether the dtype, device or shape of its parameters has changed."""
        return self._memory.outdated

    def secure(self) -> None:
        """Switches to other memory, before a step writes to it, if the user keeps gradients in it or it is spoilt."""
        old, spare = self._memory, self._spare
        if (old.is_unused() or not old.kept) and not old.spoilt:
            self._spare = None
            return
        if spare is None or not spare.is_unused():
            spare = _Memory(self._reducer, self._gradients, early=self._early)
        self._adopt(spare)
        spare.private, self._spare = False, None if old.spoilt else old
        if self._courier is not None:
            self._courier.move(self._memory.flat)
        old.leave(lambda gradient, place: self._places[gradient].copy_(place))
        self._memory.remember(old)

    def __iter__(self) -> Iterator[Gradient]:
        return iter(self._gradients)

    @property
    def sums(self) -> torch.Tensor:
        """The reduced gradients, marks, flags and signals."""
        return self._flat

    @property
    def has_all_ranks(self) -> bool:
        """Whether all ranks took part in the last reduction."""
        return self._reducer.channel.has_all(self._memory.marks_and_present[-1].item())

    @property
    def signals(self) -> torch.Tensor:
        """The signals of autotune; see `coordd_torch.tuning`."""
        return self._memory.signals

    def holds(self, gradient: Gradient, value: torch.Tensor) -> bool:
        """Returns whether a tensor is the gradient's place."""
        return value is self._places[gradient]

    def version(self, gradient: Gradient) -> int:
        """Returns the last recorded version counter of the gradient's place."""
        return self._memory.version(gradient)

    def note_version(self, gradient: Gradient, *, changed: bool = False) -> None:
        """Records the version counter of the gradient's place; see `_Memory.note_version`."""
        self._memory.note_version(gradient, changed=changed)

    def take(self, gradient: Gradient) -> None:
        """Counts a gradient that is ready; the last one may start the reduction."""
        if gradient in self._large and not self._move(gradient):
            gradient.started = False
            return
        self.awaited -= 1
        # The last open bucket is submitted only when backward has ended: until then this rank can report a failure.
        if not self.awaited and self._early and self._reducer.open_buckets > 1:
            self._submit()

    def _move(self, gradient: Gradient) -> bool:
        """Copies a large gradient to its place; returns False if there is none, as a hook of the user may remove it."""
        if gradient.dense() is None:
            return False
        self._move_all([gradient], (cast("torch.Tensor", gradient.parameter.grad),))
        return True

    def _move_small(self) -> None:
        """Copies the small gradients to their places in one operation; usually all of them are ready and dense."""
        memory = self._memory
        values = tuple(map(_GRADIENT, memory.small_parameters))
        if not self.awaited and values and _all_dense(values):
            self._move_all(memory.small_gradients, values)
            return
        del values  # `_move_all` needs them without other references from coordd
        if moving := self._sort_out():
            self._move_all(moving, tuple([cast("torch.Tensor", gradient.parameter.grad) for gradient in moving]))

    def _sort_out(self) -> Sequence[Gradient]:
        """Returns the small gradients that are ready; started ones that are missing become absent."""
        moving = []
        for index, gradient, _, _ in self._small:
            if not gradient.started:
                continue
            if gradient.dense() is None:
                gradient.started = False
                self._absent.append((index, gradient, self._stand_in(gradient)))
            else:
                moving.append(gradient)
        return moving

    def _move_all(self, gradients: Sequence[Gradient], values: tuple[torch.Tensor, ...]) -> None:
        """Copies gradients to their places, which become their ``.grad`` unless the user refers to the old ``.grad``.

        Args:
            gradients: the gradients to copy.
            values: their ``.grad``; coordd may hold no other reference to these tensors.
        """
        rooms = self._memory.rooms(gradients)
        if all(map(operator.is_, values, rooms)):
            return
        with torch.no_grad():
            torch._foreach_copy_(rooms, values)
        referenced = are_referenced(values, by_hand=self._by_hand, graphs=self._reducer.graphs)
        if referenced is None and rooms is self._memory.small_places:  # the usual case, quickly
            for parameter, room in zip(self._memory.small_parameters, rooms, strict=True):
                parameter.grad = room
            return
        for number, (gradient, room) in enumerate(zip(gradients, rooms, strict=True)):
            if room is self._places[gradient] and not (referenced and referenced[number]):
                gradient.parameter.grad = room
            elif (value := values[number]) is not room:
                self._outside.append((value, room))
                gradient.remember()

    def close(self) -> None:
        """Fills the places of missing gradients and starts the reduction; does nothing if it has started."""
        if not self.open:
            return
        if not self.awaited:
            self._submit()
            return
        for index, gradient in enumerate(self._gradients):
            if not gradient.started and gradient.given:
                self._by_hand |= not gradient.passes
                gradient.submit()
            if not self.open:
                return
            if not gradient.started:
                self._absent.append((index, gradient, self._stand_in(gradient)))
        self._submit()

    def _stand_in(self, gradient: Gradient) -> torch.Tensor | None:
        """Fills a missing gradient's place with the kept ``.grad`` and returns a copy, or fills it with zeros."""
        place, kept = self._memory.rooms([gradient])[0], gradient.parameter.grad
        if kept is not None and kept.is_sparse and gradient.reducer.sparse_as_dense:
            kept = gradient.dense()
        saved = kept.detach().clone() if kept is not None and kept.layout is torch.strided else None
        if saved is None:
            place.zero_()
        else:
            place.copy_(saved)
        self.note_version(gradient)
        return saved

    @property
    def full(self) -> bool:
        """Whether all gradients are ready and the reduction has not started."""
        return self.open and not self.awaited

    def take_back(self, lost: list[object]) -> bool:
        """Marks the reduction as not started if it is among the lost handles; returns whether it is."""
        found = self in lost or (self._courier is not None and self._courier in lost)
        if found:
            self._given = False
        return found

    def discard(self) -> bool:
        """Starts the reduction with zeros and the discard flag; returns False if it has already started."""
        if self._given:
            return False
        self.secure()
        with torch.no_grad():
            self._flat.zero_()
            self._memory.flags[0] = 1
            self._memory.marks_and_present[-1] = 1
        self._send()
        return True

    def _submit(self) -> None:
        self._move_small()
        self._memory.note_present()
        self._reducer.signal(self)
        for index, _, _ in self._absent:
            self._memory.marks[index] = 0.0
        self._send()

    def signal(self, signals: Sequence[float] | None, *, repeated: bool) -> None:
        """Writes the flags and signals of a step that counts.

        Args:
            signals: the signals of autotune, if any.
            repeated: whether these gradients were already reduced in this step.
        """
        self._memory.flags_and_signals.zero_()
        if repeated:
            self._memory.flags[1] = 1
        if signals is not None:
            self._memory.signals.copy_(torch.tensor(signals, dtype=torch.float64, device="cpu"))

    def _send(self) -> None:
        reducer = self._reducer
        reducer.open_buckets -= self.open
        self.open = False
        entry = self._next_entry() if self._courier is None else self._courier.start()
        self.submitted = time.monotonic()
        try:
            self.underway.submit(entry, lazy=reducer.closing and not reducer.open_buckets)
            self._given = True
        except BaseException as error:
            self._given = True  # it cannot be submitted again
            reducer.channel.broken_off(error, "the submission of gradients")
            raise

    def _next_entry(self) -> Entry:
        """Returns the entry of this step's reduction."""
        reducer = self._reducer
        land, array = None, self._memory.array
        if array is not None and self._memory.gone:
            array = view(self._flat)
        if array is None or not reducer.channel.plain:
            array, land = reducer.channel.compressed(self._flat, values=self._memory.values)
        entry = self._entry
        if entry is None or self._dtype != array.dtype:
            entry = self._entry = Entry(reducer.channel.request(self.name, array), array, self)
            self._dtype = array.dtype
        entry.array, entry.land, entry.site = array, land, self.underway.site
        return entry

    def _look(self, tail: Any) -> None:
        """Reads the reduced flags, which are equal on all ranks; on the daemon's thread."""
        first = len(self._gradients)
        discard, repeat = tail[first + 1], tail[first + 2]
        if discard or repeat:
            self.refused = bool(discard) or not self._reducer.channel.unanimous(tail[first], repeat)

    def settle(self) -> None:
        """Writes the reduced values to the gradients that the user refers to, which have not moved."""
        if self._given:
            for value, room in self._outside:
                write(value, room)
            self._outside.clear()

    def missing(self) -> Iterator[Gradient]:
        """Keeps the reduced gradients that only other ranks had; yields the gradients that no rank has."""
        for index, gradient, saved in self._absent:
            place, value = self._memory.rooms([gradient])[0], gradient.parameter.grad
            if self._memory.marks[index] != 0:  # not `> 0`: complex numbers have no order
                if value is not None and saved is not None and value is not place and value.layout is torch.strided:
                    write(value, place)  # the user may refer to it
                    gradient.remember()
                else:
                    gradient.parameter.grad = place
                    if value is not None and value.is_sparse:
                        gradient.make_sparse()
                gradient.started = True
            else:
                if saved is not None and value is place:
                    place.copy_(saved)
                    self.note_version(gradient)
                yield gradient

    def commit(self) -> None:
        """Commits the state of the compressor after the step was made."""
        if self._courier is not None:
            self._courier.commit()

    def retire(self) -> None:
        """Releases its memory, which its entry would keep alive until the next garbage collection."""
        self._entry = self._courier = None
        self._memory.leave(lambda _, place: place.clone())

    def reopen(self) -> None:
        """Prepares another reduction in the same step."""
        self._open()
        for gradient in self._gradients:
            gradient.started = False

    def reset(self) -> None:
        """Prepares the next step."""
        self._open()
        for gradient, parameter, place in self._homes:
            gradient.passes = 0
            gradient.started = False
            if parameter.grad is not place:
                gradient.remember()

    def _open(self) -> None:
        if self._courier is not None:
            self._courier.reset()
        if self._entry is not None:  # an array that shares the memory would count as a gradient that the user keeps
            self._entry.array, self._entry.land = _NOTHING, None
        self.open, self._given, self.refused = True, False, False
        self.awaited = len(self._gradients)
        self._by_hand = False
        self._absent.clear()
        self._outside.clear()
        self._memory.private = False
        self._memory.remember()

    def land(self, value: np.ndarray, convert: Callable[[np.ndarray], Any] | None) -> None:
        """Runs on the daemon's thread when the reduction has completed."""
        if convert is None or self._reducer.channel.plain:
            self._look(value[self._memory.values :])
            self.underway.land(value, convert)
        else:
            self.underway.land(value, self._opened(convert))

    def _opened(self, convert: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], None]:
        """Returns a conversion that decompresses the gradients and then reads the flags."""

        def land(value: np.ndarray) -> None:
            convert(value)
            self._look(self._memory.tail.tolist())

        return land

    def resolve(self, result: object) -> None:  # noqa: ARG002 - what every handle has
        """Never runs: a bucket is never a placeholder."""
        self.underway.landed()

    def fail(self, error: BaseException) -> None:
        """Runs on the daemon's thread when the reduction has failed."""
        self.underway.fail(error, self)


def _shaped(room: torch.Tensor, gradient: Gradient) -> torch.Tensor:
    """Returns a view of `room` with the gradient's shape and the strides that the ranks agreed on.

    The parameter's own strides may have changed since. The view has its own version counter.
    """
    strides, size = gradient.strides, gradient.parameter.shape
    shaped = room[: size.numel()].view(size) if strides is None else room.as_strided(size, strides)
    return shaped.data


def _all_dense(values: tuple[torch.Tensor, ...]) -> bool:
    try:
        return {*map(_LAYOUT, values)} == {torch.strided}
    except AttributeError:  # a gradient is missing: a hook of the user may remove it
        return False


def strides_of(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the strides of a parameter that is dense but not row-major, such as a transposed one; else None."""
    if parameter.is_contiguous():
        return None
    size, strides = parameter.shape, parameter.stride()
    span = 1 + sum((length - 1) * step for length, step in zip(size, strides, strict=True))
    return strides if span == parameter.numel() else None
