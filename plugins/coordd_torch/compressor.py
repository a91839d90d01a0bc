"""The one class that every compression is made of.

A compressor is an object: it is made with its parameters, keeps what it has to remember of each tensor, and tells how
much it saves and loses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coordd_torch.gauge import Gauge
from coordd_torch.rounds import Mean, Rounds

__all__ = ["Cargo", "Compressor", "Place"]

Place = tuple[int, tuple[int, ...]]


class Cargo:
    """Tensors that are compressed together: one optimizer's bucket, or a single tensor.

    Attributes:
        flat: this rank's values, one behind the other, in fp32 or fp64; with feedback, what was lost before is in it.
        parts: views of ``flat``, one for each tensor; their dimensions are in the order in which they lie in memory.
        names: of the tensors, equal on all ranks.
        dtype: that of the tensors, in which their values would travel.
        size: number of members.
        news: what was remembered in this step.
    """

    def __init__(
        self,
        flat: Tensor,
        places: Mapping[str, Place],
        *,
        dtype: torch.dtype,
        size: int,
        memory: Mapping[str, Tensor],
    ) -> None:
        """Lays tensors out.

        Args:
            flat: their values.
            places: by name, where each begins in it, and its shape.
            dtype: see above.
            size: see above.
            memory: what was remembered in earlier steps.
        """
        self.flat = flat
        self.names = tuple(places)
        self._places = tuple(places.values())
        self.parts = self.views(flat)
        self.dtype = dtype
        self.size = size
        self.news: dict[str, Tensor] = {}
        self._memory = memory

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Returns views of another tensor that is laid out like ``flat``."""
        return tuple([flat[start : start + math.prod(shape)].view(shape) for start, shape in self._places])

    def recall(self, key: str) -> Tensor | None:
        """Returns what was remembered under this key."""
        return self._memory.get(key)

    def remember(self, key: str, value: Tensor) -> None:
        """Keeps a tensor, which is not changed any more, for the next step; a step that is skipped leaves no trace."""
        self.news[key] = value


class _OfObjects(property):
    """What an object tells; a class has no tensors of which it could."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None and owner is not None:
            name = getattr(self.fget, "__name__", "this")
            text = (
                f"{owner.__name__} is a class, and {name!r} is told by its objects: make one, such as compression = "
                f"cd.Compression.bf16(), give it to DistributedOptimizer, and ask for compression.{name}"
            )
            raise AttributeError(text)
        return super().__get__(instance, owner)


class Compressor:
    """How tensors become smaller on their way; subclass it for one more way.

    There are two methods to choose from. ``compress`` and ``decompress`` are Horovod's: what the first makes is added
    up, and the second undoes it. ``exchange`` is for everything else: values that cannot be added up as they travel,
    several rounds, memory. Whatever is lost, what is not finite is not: a rank whose values hold an infinity or a NaN
    says so beside the first round, and the tensors become NaN on all ranks.

    Attributes:
        feedback: whether what is lost of a tensor is added to the same tensor in the next step.
        elementwise: whether every number travels as one number, which is not finite if it was not.
        residuals: by name of the tensor, what is still to be sent.
        memory: what `Cargo.remember` was given.
        gauge: bytes and losses.
    """

    feedback = False
    elementwise = False

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}
        self.memory: dict[str, Tensor] = {}
        self.gauge = Gauge()

    @property
    def settings(self) -> tuple[object, ...]:
        """What must be equal on all ranks for them to understand each other; plain values."""
        return ()

    @property
    def title(self) -> str:
        """Its kind and its settings, such as ``Int8Compressor(256)``."""
        return f"{type(self).__name__}({', '.join(map(repr, self.settings))})"

    @property
    def simple(self) -> bool:
        """Whether it is two functions, one before and one after, and no more."""
        return type(self).exchange is Compressor.exchange

    @_OfObjects
    def ratio(self) -> float:
        """How many times fewer bytes have travelled to this rank than would have without compression."""
        return self.gauge.ratio

    @_OfObjects
    def error(self) -> float:
        """The relative L2 norm of what was lost of this rank's tensors of late, between 0 and about 1."""
        return self.gauge.error

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Returns what travels, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:  # noqa: ARG004 - Horovod's signature
        """Returns the tensor in its own type."""
        return tensor

    def exchange(self, cargo: Cargo) -> Rounds:
        """Yields what is to travel, gets what has arrived, and returns the mean of all the ranks' ``cargo.flat``.

        Who has joined counts neither here nor in the rounds; where it shall, as in `Average`, that comes afterwards.

        At its end it leaves in ``cargo.flat`` what was lost of it. It runs without autograd, up to the first round on
        the thread of backward, then on the daemon's, beside the rest of backward.
        """
        small, context = self.compress(cargo.flat)
        (mean,) = yield Mean(small)
        cargo.flat -= self.decompress(small, context)
        return self.decompress(mean, context)

    def rescale(self, factor: float) -> None:
        """Multiplies what is still to be sent; for a loss scale that has changed by this factor."""
        if factor != 1.0:
            for residual in self.residuals.values():
                residual.mul_(factor)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Returns what a checkpoint needs so that nothing is lost; the residuals are those of this rank."""
        return {
            "residuals": {name: value.clone() for name, value in self.residuals.items()},
            "memory": {key: value.clone() for key, value in self.memory.items()},
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Takes over what `state_dict` has returned, between two steps."""
        for name, value in state["residuals"].items():
            if name in self.residuals:
                self.residuals[name].copy_(value)
            else:
                self.residuals[name] = value.clone()
        self.memory.clear()
        self.memory.update({key: value.clone() for key, value in state["memory"].items()})
