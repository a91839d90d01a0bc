"""What a stage computes of a microbatch, and how a backend finds its gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import keras

from coordd.pipeline.frame import Codec
from coordd.pipeline.versions import Weights

__all__ = ["Autodiff", "Call", "Computation", "Result", "autodiff", "floats"]


class Call(NamedTuple):
    """What a stage is called with.

    Attributes:
        values: its inputs.
        masks: of each the mask that Keras has put on it, or None.
        targets: what the last stage's output is compared with, in any structure.
        training: whether layers are called for training.
        judged: whether a loss is found, of the output or of layers.
        measured: whether metrics hear of the output.
    """

    values: Sequence[Any]
    masks: Sequence[Any]
    targets: Any = None
    training: bool = False
    judged: bool = False
    measured: bool = False


class Result(NamedTuple):
    """What it gives: its outputs, their masks, and the loss if it has one."""

    outputs: Sequence[Any]
    masks: Sequence[Any]
    loss: Any


class Computation:
    """The layers of a stage, and what is found of their output: the same on all backends."""

    def __init__(self, part: keras.Model, *, last: bool) -> None:
        """Prepares it.

        Args:
            part: the layers, compiled.
            last: whether theirs is the output.
        """
        self.part = part
        self._last = last

    def __call__(self, call: Call) -> Result:
        """Calls the layers."""
        masks = {"mask": list(call.masks)} if any(mask is not None for mask in call.masks) else {}
        found = self.part(list(call.values), training=call.training, **masks)
        outputs = keras.tree.flatten(found)
        loss = self._judged(call, found) if call.judged else None
        return Result(outputs, [getattr(output, "_keras_mask", None) for output in outputs], loss)

    def prepare(self, call: Call) -> None:
        """Has Keras make what losses and metrics keep, before a graph is made of it."""
        if self._last:
            if self.part.loss is None:
                self(call)
            else:
                self.part.test_on_batch(list(call.values), call.targets)
            self.part.reset_metrics()

    def _judged(self, call: Call, found: Any) -> Any:
        if self.part.loss is None:
            own = self.part.losses  # of regularisers, and of layers that add one
            loss = sum(own[1:], own[0]) if own else None
        else:
            loss = self.part.compute_loss(y=call.targets, y_pred=found, training=call.training)
        if self._last and call.measured and call.targets is not None:
            self.part.compute_metrics(None, call.targets, found, None)
        return loss


class Autodiff(Protocol):
    """How a backend computes, and finds gradients.

    Attributes:
        codec: its tensors in frames.
        weights: of the stage, for older versions of them.
    """

    codec: Codec
    weights: Weights

    def prepare(self, call: Call) -> None:
        """Has Keras make what it needs, with the first call of which a loss is found."""
        ...

    def run(self, call: Call) -> Result:
        """Computes without a way back."""
        ...

    def record(self, call: Call, entering: Sequence[int]) -> tuple[Result, Any]:
        """Computes, and keeps what the way back needs.

        Args:
            call: with what.
            entering: the places of the values that have gradients.
        """
        ...

    def back(self, kept: Any, roots: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
        """Goes back, once.

        Args:
            kept: by `record`.
            roots: of its results, with the gradient of each.

        Returns:
            the gradients of the values that entered, and of the stage's trainable variables; None for none.
        """
        ...

    def seeded(self, seed: int | None) -> AbstractContextManager[None]:
        """A context in which chance that Keras's own generators have no part in follows from a seed; None for any."""
        ...

    def stepping(self) -> AbstractContextManager[None]:
        """A context in which weights may change though there are microbatches on their way."""
        ...

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function of tensors, which may also change variables, as fast as the backend makes it."""
        ...


def autodiff(computation: Computation, variables: Sequence[Any]) -> Autodiff:
    """Makes the one for the backend that Keras runs on.

    Args:
        computation: of the stage.
        variables: of it that are trained.
    """
    home = importlib.import_module(f"coordd_keras.pipeline.{keras.backend.backend()}_autodiff")
    found: Autodiff = home.make(computation, variables)
    return found


def floats(tensor: Any) -> bool:
    """Says whether gradients may flow through a tensor."""
    return bool(keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype)))
