"""Gradients of several parameters that are reduced as one tensor, in which they live.

On a CPU the tensor lies in memory that the ranks of a host have in common, so nothing is packed, sent or unpacked: the
parameters' ``.grad`` are views of it. Behind the gradients lies a mark for each: 1 from a rank that has the gradient, 0
from one that has none. They are reduced with the rest, so all ranks learn which gradients exist anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from coordd.table import Entry
from coordd_torch.courier import Courier
from coordd_torch.tensors import view
from coordd_torch.tuning import SIGNALS

if TYPE_CHECKING:
    from coordd_torch.gradient import Gradient
    from coordd_torch.reducer import Reducer

__all__ = ["Bucket"]

_ALIGNMENT = 64
_COPIED_AT_ONCE = 64 << 10
"""Bytes from which a gradient is copied as soon as it is there, while the caches hold it, and its own memory freed.

Smaller ones are copied together, when the last of their bucket is there."""


class Bucket:
    """One tensor for several gradients; its own handle towards the daemon."""

    def __init__(self, reducer: Reducer, name: str, gradients: Sequence[Gradient], *, early: bool = True) -> None:
        """Makes room; the gradients move in when they are next computed.

        Args:
            reducer: whose gradients they are.
            name: equal on all ranks.
            gradients: of one type, on one device, in an order that is equal on all ranks.
            early: whether to begin as soon as the last gradient is there; if not, when backward ends.
        """
        self._reducer = reducer
        self._underway = reducer.underway
        self.name = name
        self.submitted = 0.0
        self.open = True
        self._early = early
        self._gradients = tuple(gradients)
        first = gradients[0].parameter
        stride = _ALIGNMENT // first.element_size()
        sizes = [-(-gradient.parameter.numel() // stride) * stride for gradient in gradients]
        stops = np.cumsum(sizes).tolist()
        self._flat = reducer.channel.memory(stops[-1] + len(gradients) + SIGNALS, first)
        self._marks = self._flat[stops[-1] : -SIGNALS]
        self.signals = self._flat[-SIGNALS:]
        """What autotune says; see `coordd_torch.tuning`."""
        self._places = {
            gradient: _shaped(self._flat[stop - size : stop], gradient.parameter)
            for gradient, size, stop in zip(gradients, sizes, stops, strict=True)
        }
        self._homes = [(gradient, gradient.parameter, place) for gradient, place in self._places.items()]
        self._large = {gradient for gradient in gradients if early and gradient.parameter.nbytes >= _COPIED_AT_ONCE}
        self._small = [(index, *home) for index, home in enumerate(self._homes) if home[0] not in self._large]
        self._absent: list[tuple[int, Gradient, torch.Tensor | None]] = []
        self._missing = len(gradients)
        self._entry: Entry | None = None
        self._values = stops[-1]
        self._courier: Courier | None = None
        if reducer.channel.carries(first) and stops[-1]:
            places = {gradient.name: place for gradient, place in self._places.items()}
            self._courier = Courier(reducer.underway, name, self._flat, stops[-1], places)
        for gradient in gradients:
            gradient.bucket = self

    def __iter__(self) -> Iterator[Gradient]:
        return iter(self._gradients)

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """Whose home it is, in their order."""
        return self._gradients

    @property
    def nbytes(self) -> int:
        """Bytes that are reduced."""
        return self._flat.nbytes

    @property
    def sums(self) -> torch.Tensor:
        """The reduced gradients, and what travels behind them."""
        return self._flat

    def holds(self, gradient: Gradient, value: torch.Tensor) -> bool:
        """Says whether this is the gradient's place."""
        return value is self._places[gradient]

    def take(self, gradient: Gradient) -> None:
        """Counts a gradient that is there; starts the reduction with the last one."""
        if gradient in self._large and not self._move(gradient):
            gradient.started = False
            return
        self._missing -= 1
        if not self._missing and self._early:
            self._submit()

    def _move(self, gradient: Gradient) -> bool:
        """Copies a large gradient to its place; says whether there is one: a hook of the user's may take it away."""
        value, place = gradient.dense(), self._places[gradient]
        if value is None:
            return False
        if value is not place:
            with torch.no_grad():
                place.copy_(value)
            gradient.parameter.grad = place
        return True

    def _move_small(self) -> None:
        """Copies the small gradients to their places, all at once."""
        moving = [
            (parameter, place, value)
            for _, _, parameter, place in self._small
            if (value := parameter.grad) is not None and value.layout is torch.strided
        ]
        if self._missing or len(moving) < len(self._small):
            moving = self._sort_out()
        if all(value is place for _, place, value in moving):
            return
        parameters, places, values = zip(*moving, strict=True)
        with torch.no_grad():
            torch._foreach_copy_(places, values)
        for parameter, place in zip(parameters, places, strict=True):
            parameter.grad = place

    def _sort_out(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Finds the small gradients that are there, where some are not, or not as they should be."""
        moving = []
        for index, gradient, parameter, place in self._small:
            if not gradient.started:
                continue
            value = gradient.dense()
            if value is None:
                gradient.started = False
                self._absent.append((index, gradient, self._stand_in(gradient)))
            else:
                moving.append((parameter, place, value))
        return moving

    def close(self) -> None:
        """Fills up what this rank has no gradients for, and starts the reduction; does nothing if it has started."""
        if not self.open:
            return
        for index, gradient in enumerate(self._gradients):
            if not gradient.started and gradient.given:
                gradient.submit()
            if not self.open:
                return
            if not gradient.started:
                self._absent.append((index, gradient, self._stand_in(gradient)))
        self._submit()

    def _stand_in(self, gradient: Gradient) -> torch.Tensor | None:
        """Puts in place of a fresh gradient what the user has kept, and returns it, or zeros."""
        place, kept = self._places[gradient], gradient.parameter.grad
        if kept is None or kept.layout is not torch.strided:
            place.zero_()
            return None
        saved = kept.detach().clone()
        place.copy_(saved)
        return saved

    def _submit(self) -> None:
        self._move_small()
        self.open = False
        self._marks.fill_(1.0)
        self._reducer.signal(self)
        for index, _, _ in self._absent:
            self._marks[index] = 0.0
        reducer = self._reducer
        if self._courier is not None:
            self._courier.start()
            return
        land = None
        if reducer.channel.plain and self._flat.is_cpu:
            array = view(self._flat)
        else:
            array, land = reducer.channel.compressed(self._flat, values=self._values)
        entry = self._entry
        if entry is None or entry.array.dtype != array.dtype:
            entry = self._entry = Entry(reducer.channel.request(self.name, array), array, self)
        entry.array, entry.land, entry.site = array, land, self._underway.site
        self.submitted = time.monotonic()
        self._underway.submit(entry)

    def settle(self) -> Iterator[Gradient]:
        """Keeps what others had where this rank had nothing; yields the gradients that no rank has."""
        for index, gradient, saved in self._absent:
            place = self._places[gradient]
            if self._marks[index] != 0:  # complex numbers know no order
                gradient.parameter.grad = place
                gradient.started = True
            else:
                if saved is not None and gradient.parameter.grad is place:
                    place.copy_(saved)
                yield gradient

    def commit(self) -> None:
        """Keeps what a compressor has to remember, for the step has been made."""
        if self._courier is not None:
            self._courier.commit()

    def retire(self) -> None:
        """Lets go of its memory, which its handle towards the daemon would keep until garbage is collected."""
        self._entry = self._courier = None

    def reset(self) -> None:
        """Gets ready for the next step."""
        if self._courier is not None:
            self._courier.reset()
        self.open = True
        self._missing = len(self._gradients)
        self._absent.clear()
        for gradient, parameter, place in self._homes:
            gradient.passes = 0
            gradient.started = False
            if parameter.grad is not place:
                gradient.remember()

    def land(self, value: np.ndarray, convert: Callable[[np.ndarray], Any] | None) -> None:
        """Runs on the daemon's thread when the reduced gradients have arrived."""
        self._underway.land(value, convert)

    def resolve(self, result: object) -> None:  # noqa: ARG002 - what every handle has
        """Never runs: a bucket is no filler."""
        self._underway.landed()

    def fail(self, error: BaseException) -> None:
        """Runs on the daemon's thread when the reduction has failed."""
        self._underway.fail(error)


def _shaped(room: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Views room as a gradient, laid out as its parameter where that is dense, which autograd and optimizers like."""
    size, stride = parameter.shape, parameter.stride()
    span = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if parameter.numel() else 0
    if span == parameter.numel():
        return room.as_strided(size, stride)
    return room[: parameter.numel()].view(size)
