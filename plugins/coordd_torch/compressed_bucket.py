"""Compressed reduction of a bucket: runs the rounds of a compressor while backward goes on.

Invariant: state that is kept between steps changes only when the step is made. A step that is skipped, by a loss scaler
that found an infinity or by the user, changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordd.negotiation.tensor_table import Entry
from coordd_torch.communication import share
from coordd_torch.compression_session import Journey, calmly
from coordd_torch.compressor import Cargo, Place
from coordd_torch.pending import Underway

__all__ = ["Courier"]


class Courier:
    """Compressed reduction of one bucket; also the handle that the daemon resolves for every round."""

    def __init__(
        self,
        underway: Underway,
        name: str,
        flat: Tensor,
        stop: int,
        names: Sequence[str],
        *,
        places: tuple[Tensor, ...],
        land: Callable[[list[float]], None],
    ) -> None:
        """Prepares the buffers, and takes over the residuals that earlier buckets left for these gradients.

        Args:
            underway: counts the pending work of the optimizer.
            name: the bucket's name.
            flat: the gradients, and behind them the marks, flags and signals, which are sent uncompressed.
            stop: number of elements of the gradients.
            names: the gradients' names, in the order of the marks.
            places: the view of ``flat`` for each gradient.
            land: called with the reduced marks, flags and signals; on the daemon's thread.
        """
        self.name = name
        self.submitted = 0.0
        self.underway = underway
        self._channel = underway.channel
        self._compressor = self._channel.compressor
        self._look = land
        self._stop = stop
        self.move(flat)
        offset = flat.storage_offset()
        self._layout: dict[str, Place] = {
            name: (int(place.storage_offset() - offset), _shape(place))
            for name, place in zip(names, places, strict=True)
        }
        self._cargo = self._room()
        self._kept = self._room() if self._compressor.feedback else None
        """The residuals as of the last step that was made."""
        self._journey: Journey | None = None
        if self._kept is not None:
            self._inherit(self._kept)

    def move(self, flat: Tensor) -> None:
        """Reads gradients from other memory of the same layout from now on."""
        self._flat = flat

    @property
    def _body(self) -> Tensor:
        return self._flat[: self._stop]

    @property
    def _tail(self) -> Tensor:
        return self._flat[self._stop :]

    def _room(self) -> Cargo:
        flat = torch.zeros_like(self._body, dtype=torch.promote_types(self._body.dtype, torch.float32))
        memory = self._compressor.memory
        return Cargo(flat, self._layout, dtype=self._body.dtype, size=self._channel.members, memory=memory)

    def _inherit(self, kept: Cargo) -> None:
        for name, part in zip(kept.names, kept.parts, strict=True):
            before = self._compressor.residuals.get(name)
            if before is not None and before.shape == part.shape:
                part.copy_(before)
            self._compressor.residuals[name] = part

    def start(self) -> Entry:
        """Returns the entry of the first round, with the bucket's gradients; on the thread of backward."""
        cargo = self._cargo
        with calmly(cargo.flat):
            cargo.news.clear()
            cargo.flat.copy_(self._body)
            if self._kept is not None:
                cargo.flat += self._kept.flat
            self._journey = Journey(self._compressor, cargo)
            return self._entry(self._journey, self._journey.begin(self._tail))

    def _entry(self, journey: Journey, array: np.ndarray) -> Entry:
        self.submitted = time.monotonic()
        request = self._channel.round(self.name, journey.number, journey.kind, array)
        entry = Entry(request, array, self, self.underway.site)
        entry.splits = journey.splits
        return entry

    def land(self, value: np.ndarray, convert: Callable[[np.ndarray], Any] | None) -> None:  # noqa: ARG002 - a handle's
        """Runs on the daemon's thread when a round has completed: starts the next round, or finishes."""
        assert self._journey is not None  # noqa: S101 - `start` has set it
        try:
            with calmly(self._body):
                following = self._journey.land(value)
                if following is None:
                    self._arrive(self._journey)
                else:
                    self._channel.daemon.submit(self._entry(self._journey, following))
                    self._channel.daemon.lose_no_time()
        except BaseException as error:  # noqa: BLE001 - the thread that waits gets it
            self.underway.fail(error)
        else:
            if following is None:
                self.underway.landed()

    def _arrive(self, journey: Journey) -> None:
        """Writes the reduced gradients, marks, flags and signals to the bucket; NaN if a rank had non-finite values."""
        op, members = self._channel.op, self._channel.members
        factor = share(op, present=journey.present, members=members)
        if journey.tail is not None:
            tail = journey.tail * (factor / journey.present)
            self._tail.copy_(tail)
            self._look(tail.tolist())
        if journey.mean is None:
            for start, shape in self._layout.values():
                self._flat[start : start + math.prod(shape)].fill_(math.nan)
            return
        self._body.copy_(journey.mean if factor == 1.0 else journey.mean * factor)
        if self._kept is not None:
            for mark, part, kept in zip(self._tail.tolist(), journey.cargo.parts, self._kept.parts, strict=False):
                if not mark:  # no rank has this gradient, so its sent residual is not used
                    part.copy_(kept)

    def commit(self) -> None:
        """Keeps the compressor's new state and residuals after the step was made."""
        if self._journey is None or self._journey.mean is None:
            return
        self._compressor.memory.update(self._cargo.news)
        if self._kept is not None:
            self._cargo, self._kept = self._kept, self._cargo
            self._compressor.residuals.update(zip(self._kept.names, self._kept.parts, strict=True))
        self._journey = None

    def reset(self) -> None:
        """Drops the state of a step that was not made."""
        self._journey = None

    def resolve(self, result: object) -> None:  # noqa: ARG002 - what every handle has
        """Never runs: a bucket is never a placeholder."""
        self.underway.landed()

    def fail(self, error: BaseException) -> None:
        """Runs on the daemon's thread when a round has failed."""
        self.underway.fail(error, self)


def _shape(place: Tensor) -> tuple[int, ...]:
    """Returns a gradient's shape in memory order: dimensions sorted by descending stride."""
    strides = place.stride()
    order = sorted(range(place.ndim), key=lambda dimension: -strides[dimension])
    return tuple(place.shape[dimension] for dimension in order)
