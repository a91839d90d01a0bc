"""The plugin of `toygrad`: what a framework must supply to coordd, and nothing else. See docs/writing-a-plugin.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from toygrad import Tensor, operation

from coordd import api
from coordd.daemon.autograd_rules import Allgather, Allreduce, Differentiable
from coordd.gradients.reducer import Choices, Gradients, Parameter
from coordd.ops.handles import wait_all
from coordd.ops.messages import ReduceOp
from coordd.ops.process_sets import global_process_set

__all__ = ["DistributedSGD", "allgather", "allreduce", "broadcast_parameters"]


# 1. The autograd boundary: the framework's own way to make an operation, around one on arrays.


def differentiable(call: Differentiable, tensor: Tensor) -> Tensor:
    """Carries an operation out so that gradients flow back through it."""
    (result,), kept = call.forward(view(tensor))

    def backward(gradient: np.ndarray) -> Sequence[np.ndarray]:
        call.check()
        return call.backward(kept, gradient)

    return operation(result, (tensor,), backward)


def allreduce(tensor: Tensor, *, op: ReduceOp = ReduceOp.AVERAGE, name: str | None = None) -> Tensor:
    """Returns the reduction of a tensor over all ranks."""
    return differentiable(Allreduce(api.source(), [name], global_process_set, op=op), tensor)


def allgather(tensor: Tensor, *, name: str | None = None) -> Tensor:
    """Returns all ranks' tensors, joined along the first dimension."""
    return differentiable(Allgather(api.source(), [name], global_process_set), tensor)


# 2. The view of a tensor: an array that has its memory. Elsewhere this is where a copy from a device is made.


def view(tensor: Tensor) -> np.ndarray:
    """Views a tensor as an array."""
    array: np.ndarray = tensor.value
    return array


def broadcast_parameters(parameters: Mapping[str, Tensor], root: int = 0) -> None:
    """Copies the root's values into everybody's parameters."""
    own = api.operations()
    wait_all([own.broadcast(view(tensor), root, name=f"start.{name}") for name, tensor in parameters.items()])


# 3. Completion: the call when a gradient is there starts its bucket; the step waits for all of them.


class DistributedSGD:
    """Gradient descent by gradients that are averaged while backward still runs."""

    def __init__(self, parameters: Mapping[str, Tensor], rate: float) -> None:
        """Asks for the gradients of named parameters, the same on all ranks."""
        self._tensors = list(parameters.values())
        self._rate = rate
        own = api.operations()
        alike = [Parameter(name, view(each).shape, view(each).dtype) for name, each in parameters.items()]
        self._gradients = Gradients(own, alike, Choices(), prefix=own.namespace())
        for index, tensor in enumerate(self._tensors):
            tensor.on_gradient = lambda gradient, index=index: self._gradients.put(index, gradient)

    def step(self) -> None:
        """Waits for the averages and follows them."""
        reduced = self._gradients.wait()
        for index, tensor in enumerate(self._tensors):
            if (gradient := reduced[index]) is not None:
                tensor.value -= self._rate * gradient
            tensor.gradient = None
