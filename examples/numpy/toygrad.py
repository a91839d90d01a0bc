"""A deep-learning framework in eighty lines, on NumPy: tensors that remember how they were made.

It knows nothing of other processes. What it offers to a plugin is what every framework has: the memory of a tensor, a
call when a gradient is there, and a way to make an operation with a backward pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["Tensor", "backward", "matmul", "mean_squared_error", "operation", "tanh"]

Backward = Callable[..., Sequence[np.ndarray]]


class Tensor:
    """An array, and how it was made."""

    def __init__(self, value: np.ndarray, parents: Sequence[Tensor] = (), backward: Backward | None = None) -> None:
        self.value = value
        self.gradient: np.ndarray | None = None
        self.parents = tuple(parents)
        self.backward = backward
        self.on_gradient: Callable[[np.ndarray], None] | None = None
        """Called with a parameter's gradient as soon as it is complete."""


def operation(value: np.ndarray, parents: Sequence[Tensor], backward: Backward) -> Tensor:
    """Makes a tensor whose gradient ``backward`` turns into those of its parents."""
    return Tensor(value, parents, backward)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    return operation(
        x.value @ weight.value, (x, weight), lambda gradient: (gradient @ weight.value.T, x.value.T @ gradient)
    )


def tanh(x: Tensor) -> Tensor:
    value = np.tanh(x.value)
    return operation(value, (x,), lambda gradient: (gradient * (1 - value**2),))


def mean_squared_error(x: Tensor, wanted: np.ndarray) -> Tensor:
    difference = x.value - wanted
    return operation(np.mean(difference**2), (x,), lambda gradient: (gradient * 2 * difference / difference.size,))


def backward(loss: Tensor) -> None:
    """Computes the gradients of everything that a loss was made of, the last made first."""
    loss.gradient = np.ones_like(loss.value)
    order = _order(loss)
    uses = {id(tensor): sum(tensor in each.parents for each in order) for tensor in order}
    for tensor in order:
        gradients = tensor.backward(tensor.gradient) if tensor.backward else ()
        for parent, gradient in zip(tensor.parents, gradients, strict=True):
            parent.gradient = gradient if parent.gradient is None else parent.gradient + gradient
            uses[id(parent)] -= 1
            if not uses[id(parent)] and parent.on_gradient:
                parent.on_gradient(parent.gradient)
        if tensor.parents:
            tensor.gradient = None


def _order(loss: Tensor) -> list[Tensor]:
    """Lists tensors so that each comes before its parents."""
    found: list[Tensor] = []

    def visit(tensor: Tensor) -> None:
        if all(tensor is not each for each in found):
            for parent in tensor.parents:
                visit(parent)
            found.append(tensor)

    visit(loss)
    return found[::-1]
