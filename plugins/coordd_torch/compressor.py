"""`Compressor`, the base class of all compressions.

A compressor object has parameters, keeps state for each tensor, and measures how much it saves and loses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coordd_torch.compression_stats import Gauge
from coordd_torch.rounds import Mean, Rounds

__all__ = ["Cargo", "Compressor", "Place"]

Place = tuple[int, tuple[int, ...]]


class Cargo:
    """Tensors that are compressed together: one optimizer's bucket, or a single tensor.

    Attributes:
        flat: this rank's values in one flat tensor, fp32 or fp64; with feedback, earlier losses are added.
        parts: views of ``flat``, one per tensor; their dimensions are in memory order.
        names: names of the tensors, equal on all ranks.
        dtype: dtype of the tensors, in which their values would be sent uncompressed.
        size: number of members of the process set.
        news: state that was remembered in this step.
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
        """Creates the views.

        Args:
            flat: the values of all tensors.
            places: by name, each tensor's offset in ``flat`` and its shape.
            dtype: see above.
            size: see above.
            memory: state that was remembered in earlier steps.
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
        """Returns views, one per tensor, of a flat tensor with the layout of ``flat``."""
        return tuple([flat[start : start + math.prod(shape)].view(shape) for start, shape in self._places])

    def recall(self, key: str) -> Tensor | None:
        """Returns the tensor that was remembered under this key, or None."""
        return self._memory.get(key)

    def remember(self, key: str, value: Tensor) -> None:
        """Stores a tensor for the next step; it must not change any more. A skipped step stores nothing."""
        self.news[key] = value


class _OfObjects(property):
    """A property of objects only; access through the class raises an `AttributeError` with a hint."""

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
    """Base class of compressions; subclass it for a new one.

    A subclass overrides one of two interfaces. ``compress`` and ``decompress`` are Horovod's: the output of the first
    is summed over the ranks, and the second converts the sum back. ``exchange`` is for everything else: values that
    cannot be summed in compressed form, several rounds, state. Non-finite values are never lost: a rank whose values
    contain an infinity or a NaN sends a flag with the first round, and the tensors become NaN on all ranks.

    Attributes:
        feedback: whether the compression error of a tensor is added to the same tensor in the next step.
        elementwise: whether every number is sent as one number, and non-finite numbers stay non-finite.
        residuals: by tensor name, the part that is still to be sent.
        memory: the tensors that were passed to `Cargo.remember`, by key.
        gauge: counts bytes and losses.
    """

    feedback = False
    elementwise = False

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}
        self.memory: dict[str, Tensor] = {}
        self.gauge = Gauge()

    @property
    def settings(self) -> tuple[object, ...]:
        """The parameters that must be equal on all ranks; plain values."""
        return ()

    @property
    def title(self) -> str:
        """Its class name and settings, such as ``Int8Compressor(256)``."""
        return f"{type(self).__name__}({', '.join(map(repr, self.settings))})"

    @property
    def simple(self) -> bool:
        """Whether it consists of ``compress`` and ``decompress`` only, without its own ``exchange``."""
        return type(self).exchange is Compressor.exchange

    @_OfObjects
    def ratio(self) -> float:
        """How many times fewer bytes this rank received than without compression."""
        return self.gauge.ratio

    @_OfObjects
    def error(self) -> float:
        """The relative L2 norm of the recent compression error of this rank's tensors, between 0 and about 1."""
        return self.gauge.error

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Returns the tensor to send, and the context that `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:  # noqa: ARG004 - Horovod's signature
        """Returns the tensor in its original dtype."""
        return tensor

    def exchange(self, cargo: Cargo) -> Rounds:
        """Yields rounds to exchange, receives their results, and returns the mean of ``cargo.flat`` over the ranks.

        Joined ranks count neither here nor in the rounds; an operation in which they count, as `Average`, scales the
        mean afterwards.

        At the end ``cargo.flat`` holds the compression error. The generator runs without autograd: up to the first
        round on the thread of backward, then on the daemon's thread, concurrently with backward.
        """
        small, context = self.compress(cargo.flat)
        (mean,) = yield Mean(small)
        cargo.flat -= self.decompress(small, context)
        return self.decompress(mean, context)

    def rescale(self, factor: float) -> None:
        """Multiplies the residuals by the factor by which the loss scale has changed."""
        if factor != 1.0:
            for residual in self.residuals.values():
                residual.mul_(factor)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Returns copies of the residuals and the memory for a checkpoint; the residuals are this rank's own."""
        return {
            "residuals": {name: value.clone() for name, value in self.residuals.items()},
            "memory": {key: value.clone() for key, value in self.memory.items()},
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Loads the result of `state_dict`; call it between two steps.

        Residuals that it does not contain become zero: it may come from before the first step.
        """
        for name in self.residuals.keys() - state["residuals"].keys():
            self.residuals[name].zero_()
        for name, value in state["residuals"].items():
            if name in self.residuals:
                self.residuals[name].copy_(value)
            else:
                self.residuals[name] = value.clone()
        self.memory.clear()
        self.memory.update({key: value.clone() for key, value in state["memory"].items()})
