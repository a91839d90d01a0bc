"""Defines what a stage computes for a microbatch, and the interface of a backend's automatic differentiation."""

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
    """Arguments of one forward pass of a stage.

    Attributes:
        values: the stage's inputs.
        masks: for each input its Keras mask, or None.
        targets: of the last stage's output, in any structure.
        training: whether layers are called in training mode.
        judged: whether the loss of the output or of layers is computed.
        measured: whether metrics are updated with the output.
        counts: whether the loss of the output counts; if not, it is replaced by zero, because it may be NaN.
    """

    values: Sequence[Any]
    masks: Sequence[Any]
    targets: Any = None
    training: bool = False
    judged: bool = False
    measured: bool = False
    counts: bool = True


class Result(NamedTuple):
    """Result of a forward pass.

    Attributes:
        outputs: of the stage.
        masks: for each output its Keras mask, or None.
        loss: of the output and of layers, or None.
        own: the part of it that regularizers and layers add, which ``weight=`` does not weight; or None.
    """

    outputs: Sequence[Any]
    masks: Sequence[Any]
    loss: Any
    own: Any = None


class Computation:
    """Forward pass of a stage, with loss and metrics; the same on all backends."""

    def __init__(self, part: keras.Model, *, last: bool) -> None:
        """Keeps the layers.

        Args:
            part: the stage's layers, compiled.
            last: whether this is the last stage, which gives the model's output.
        """
        self.part = part
        self._last = last

    def __call__(self, call: Call) -> Result:
        """Runs the layers."""
        masks = {"mask": list(call.masks)} if any(mask is not None for mask in call.masks) else {}
        found = self.part(list(call.values), training=call.training, **masks)
        outputs = keras.tree.flatten(found)
        own = self.part.losses if call.judged else []  # losses of regularizers and of layers that call add_loss
        added = sum(own[1:], own[0]) if own else None
        loss = self._judged(call, found, added) if call.judged else None
        return Result(outputs, [getattr(output, "_keras_mask", None) for output in outputs], loss, added)

    def prepare(self, call: Call) -> None:
        """Lets Keras create the variables of losses and metrics before a graph is traced."""
        if self._last:
            if self.part.loss is None:
                self(call)
            else:
                self.part.test_on_batch(list(call.values), call.targets)
            self.part.reset_metrics()

    def _judged(self, call: Call, found: Any, own: Any) -> Any:
        if self.part.loss is None:
            loss = own
        elif call.counts:
            loss = self.part.compute_loss(y=call.targets, y_pred=found, training=call.training)
        else:
            loss = sum(keras.ops.sum(output * 0) for output in keras.tree.flatten(found) if floats(output))
        if self._last and call.measured and call.targets is not None:
            self.part.compute_metrics(None, call.targets, found, None)
        return loss


class Autodiff(Protocol):
    """Forward and backward pass of a stage on one backend.

    Attributes:
        codec: converts the backend's tensors to and from frames.
        weights: of the stage, to keep and show older versions.
    """

    codec: Codec
    weights: Weights

    def prepare(self, call: Call) -> None:
        """Lets Keras create its variables, with the first call that computes a loss."""
        ...

    def run(self, call: Call) -> Result:
        """Runs a forward pass without recording it for backward."""
        ...

    def record(self, call: Call, entering: Sequence[int]) -> tuple[Result, Any]:
        """Runs a forward pass and saves what backward needs.

        Args:
            call: its arguments.
            entering: indices of the values that need gradients.
        """
        ...

    def back(self, kept: Any, roots: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
        """Runs backward, once for each recorded pass.

        Args:
            kept: returned by `record`.
            roots: results of the forward pass, each with its gradient.

        Returns:
            gradients of the values at `entering`, and of the stage's trainable variables; None where there is none.
        """
        ...

    def seeded(self, seed: int | None) -> AbstractContextManager[None]:
        """Returns a context that seeds random numbers outside of Keras's own generators; None leaves them unseeded."""
        ...

    def stepping(self) -> AbstractContextManager[None]:
        """Returns a context in which weights may change while microbatches are in flight."""
        ...

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function of tensors, which may also change variables, compiled for the backend."""
        ...


def autodiff(computation: Computation, variables: Sequence[Any]) -> Autodiff:
    """Returns the implementation for the backend that Keras runs on.

    Args:
        computation: of the stage.
        variables: the stage's trainable variables.
    """
    home = importlib.import_module(f"coordd_keras.pipeline.{keras.backend.backend()}_autodiff")
    found: Autodiff = home.make(computation, variables)
    return found


def floats(tensor: Any) -> bool:
    """Returns whether a tensor has a float dtype, so that gradients can flow through it."""
    return bool(keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype)))
