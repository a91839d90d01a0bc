"""Carries a bucket's gradients in the rounds of a compressor, while backward goes on.

Its one rule: what is kept from one step to the next changes when the step is made, and not before. A step that is
skipped, because a loss scaler found an infinity or the user thought better of it, leaves no trace.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from coordd.errors import ArgumentError
from coordd.messages import ReduceOp
from coordd.table import Entry
from coordd_torch.compressor import Cargo, Place
from coordd_torch.gauge import reduced
from coordd_torch.rounds import Round, Rounds

if TYPE_CHECKING:
    from coordd_torch.reducer import Reducer

__all__ = ["Courier", "calmly", "first_of", "norm"]


class Courier:
    """Of one bucket; towards the daemon the handle of every round."""

    def __init__(self, reducer: Reducer, name: str, flat: Tensor, stop: int, places: Mapping[str, Tensor]) -> None:
        """Takes over what earlier buckets have left to be sent of these gradients.

        Args:
            reducer: whose gradients they are.
            name: the bucket's.
            flat: the gradients, and behind them their marks and what else has to arrive as it is.
            stop: where the gradients end.
            places: by name, where each gradient lies in ``flat``, in the order of the marks.
        """
        self.name = name
        self.submitted = 0.0
        self._reducer = reducer
        self._channel = reducer.channel
        self._compressor = self._channel.compressor
        self._body, self._tail = flat[:stop], flat[stop:]
        self._homes = tuple(places.values())
        offset = flat.storage_offset()
        self._layout: dict[str, Place] = {
            key: (int(place.storage_offset() - offset), _shape(place)) for key, place in places.items()
        }
        self._plain = reduced(sum(place.nbytes for place in self._homes), self._channel.members)
        self._cargo = self._room()
        self._kept = self._room() if self._compressor.feedback else None
        """What is still to be sent, as of the last step that was made."""
        self._rounds: Rounds
        self._round: Round
        self._number = 0
        self._norm = 0.0
        self._done = False
        if self._kept is not None:
            self._inherit(self._kept)

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

    def start(self) -> None:
        """Begins with what lies in the bucket; on the thread of backward."""
        cargo = self._cargo
        self._number = 0
        with calmly(cargo.flat):
            cargo.news.clear()
            cargo.flat.copy_(self._body)
            if self._kept is not None:
                cargo.flat += self._kept.flat
            self._norm = norm(cargo.flat)
            broken = math.isnan(self._norm)
            if broken:
                cargo.flat.zero_()
            self._rounds = self._compressor.exchange(cargo)
            tail = torch.cat([self._tail.detach().float().cpu(), torch.tensor([float(broken)], device="cpu")])
            self._reducer.submit(self._entry(first_of(self._rounds), tail))

    def _entry(self, round_: Round, tail: Tensor | None = None) -> Entry:
        self._round = round_
        array = round_.pack(tail)
        self.submitted = time.monotonic()
        request = self._channel.round(self.name, self._number, round_.kind, array)
        return Entry(request, array, self, self._reducer.site)

    def land(self, value: np.ndarray, convert: Callable[[np.ndarray], Any] | None) -> None:  # noqa: ARG002 - a handle's
        """Runs on the daemon's thread when a round has arrived: begins the next, or ends."""
        try:
            with calmly(self._body):
                self._go_on(value)
        except Exception as error:  # noqa: BLE001 - the thread that waits gets it
            self._reducer.fail(error)

    def _go_on(self, value: np.ndarray) -> None:
        channel = self._channel
        answer, tail = self._round.open(value, channel.members)
        plain = 0.0 if self._number else self._plain
        self._compressor.gauge.travelled(self._round.received(channel.members), plain=plain)
        if tail is not None and self._is_broken(tail):
            self._rounds.close()
            for home in self._homes:
                home.fill_(math.nan)
            self._reducer.landed()
            return
        try:
            following = self._rounds.send(answer)
        except StopIteration as end:
            self._finish(end.value)
        else:
            self._number += 1
            channel.daemon.submit(self._entry(following))
            channel.daemon.hurry(waiting=False)

    def _is_broken(self, tail: Tensor) -> bool:
        """Puts what came beside the first round in its place; says whether any rank had what is not finite."""
        *exact, broken = tail.split([len(self._tail), 1])
        self._tail.copy_(exact[0] / (self._channel.members if self._channel.op is ReduceOp.AVERAGE else 1))
        return bool(broken)

    def _finish(self, mean: Tensor) -> None:
        cargo = self._cargo
        self._body.copy_(mean if self._channel.op is ReduceOp.AVERAGE else mean * self._channel.members)
        self._compressor.gauge.compare(self._norm, norm(cargo.flat))
        if self._kept is not None:
            for mark, part, kept in zip(self._tail.tolist(), cargo.parts, self._kept.parts, strict=False):
                if not mark:  # no rank has had this gradient, so nobody gets what was sent of it
                    part.copy_(kept)
        self._done = True
        self._reducer.landed()

    def commit(self) -> None:
        """Keeps what was remembered, for the step has been made."""
        if not self._done:
            return
        self._compressor.memory.update(self._cargo.news)
        if self._kept is not None:
            self._cargo, self._kept = self._kept, self._cargo
            self._compressor.residuals.update(zip(self._kept.names, self._kept.parts, strict=True))
        self._done = False

    def reset(self) -> None:
        """Forgets a step that was not made."""
        self._done = False

    def resolve(self, result: object) -> None:  # noqa: ARG002 - what every handle has
        """Never runs: a bucket is no filler."""
        self._reducer.landed()

    def fail(self, error: BaseException) -> None:
        """Runs on the daemon's thread when a round has failed."""
        self._reducer.fail(error)


def first_of(rounds: Rounds) -> Round:
    """Runs a compressor up to its first round.

    Raises:
        ArgumentError: it has none.
    """
    found = next(rounds, None)
    if found is None:
        text = "a compressor's exchange() has to yield at least one round, such as Mean(small)"
        raise ArgumentError(text)
    return found


@contextlib.contextmanager
def calmly(like: Tensor) -> Iterator[None]:
    """Computes without autograd, and in the types that are there, whatever the user's code around it wants."""
    kind = like.device.type
    with torch.no_grad(), contextlib.ExitStack() as stack:
        if torch.amp.is_autocast_available(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def norm(flat: Tensor) -> float:
    """Returns the L2 norm; NaN if a value is not finite, infinity if only the norm is too large for its type."""
    found = float(torch.linalg.vector_norm(flat))
    if math.isfinite(found):
        return found
    return math.inf if bool(torch.isfinite(flat).all()) else math.nan


def _shape(place: Tensor) -> tuple[int, ...]:
    """Returns a gradient's dimensions in the order in which they lie in memory."""
    strides = place.stride()
    order = sorted(range(place.ndim), key=lambda dimension: -strides[dimension])
    return tuple(place.shape[dimension] for dimension in order)
